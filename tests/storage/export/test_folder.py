"""What is exported is the model that was trained, for those who load it elsewhere."""

import copy
import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
import transformers
from lightning.pytorch.cli import instantiate_class
from often import mostly_slow
from peft import PeftModel
from safetensors.torch import load_file
from tiny import (
    CLASSES,
    Net,
    NoisyNet,
    new_data,
    new_federation,
    new_method,
    new_texts,
    new_trainer,
    same,
    tiny_transformer,
    tiny_vit,
)
from tiny_chats import TINY_MODELS
from tiny_texts import save_tokenizer
from torch import nn

import lightning_fed
from lightning_fed.__main__ import main
from lightning_fed.data import ByColumn, Digits, InMemory
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg, FedDecomp
from lightning_fed.methods.pfedlora import build_adapter
from lightning_fed.models import CNN5, Adapters, CausalLM, TransformerClassifier, VisionTransformer, Wrapped
from lightning_fed.models.adapters import inside
from lightning_fed.nn.low_rank import factors
from lightning_fed.storage.export import folder
from lightning_fed.storage.export.config import network_config
from lightning_fed.storage.export.safetensors import write_safetensors
from lightning_fed.storage.initial import initial_network
from lightning_fed.system.locks import taken
from lightning_fed.tensors import State, count_floats

NET = f"{Net.__module__}.Net"


def fit_and_export(
    name: str,
    data: Any = None,
    client: int | None = None,
    rounds: int = 1,
    folder: str = "exported",
    merged: bool = False,
    **options: Any,
) -> Federation:
    """Play a run and export from its files, as another process would; returns the federation that has played it."""
    data = new_data(3) if data is None else data
    federation = new_federation(rounds, "runs")
    federation.fit(new_method(name, **options), data)
    new_federation(rounds, "runs").export(new_method(name, **options), data, folder, client, merged=merged)
    return federation


@pytest.mark.parametrize("client", mostly_slow([None, 1], often={1}), ids=["server", "client"])
@pytest.mark.parametrize(
    "name", mostly_slow(["HOMLoRA", "PF2LoRA", "HETLoRA", "PerFedAvgLoRA", "CentralizedLoRA"], often={"PF2LoRA", "HETLoRA"})
)
def test_peft_loads_an_adapter_with_the_same_logits(name: str, client: int | None) -> None:
    pretrained = tiny_transformer(CLASSES)
    options: dict[str, Any] = {"r_min": 2, "r_max": 4} if name == "HETLoRA" else {}
    data = new_texts(3)
    new_federation(2, "runs").fit(new_method(name, backbone=lambda classes: copy.deepcopy(pretrained), **options), data)
    federation, model = new_federation(2, "runs"), new_method(name, backbone=lambda classes: copy.deepcopy(pretrained), **options)
    federation.export(model, data, "exported", client)
    assert {path.name for path in Path("exported").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    loaded = PeftModel.from_pretrained(copy.deepcopy(pretrained.network), "exported").eval()
    module = federation.run.server_module() if client is None else federation.client_module(client)
    inputs = data.client(1).data[torch.arange(20)][0]
    with torch.no_grad():
        logits, plain = loaded(**inputs).logits, pretrained.eval()(inputs)
        assert torch.allclose(logits, module.eval()(inputs), atol=1e-6)
    assert not torch.allclose(logits, plain, atol=1e-3)


ON_ADAPTERS = [
    (method, network, client, merged)
    for method, network in (
        ("FedAvg", tiny_transformer),
        ("Ditto", tiny_transformer),
        ("FedAvg", NoisyNet),
        ("FedAvg", tiny_vit),
        ("PFedSD", NoisyNet),
    )
    for client in (None, 1)
    for merged in (False, True)
] + [("PFedLoRA", NoisyNet, 1, merged) for merged in (False, True)]


@pytest.mark.parametrize(
    ("method", "network", "client", "merged"),
    mostly_slow(
        ON_ADAPTERS,
        [
            ("Ditto", tiny_transformer, 1, False),
            ("FedAvg", NoisyNet, None, True),
            ("FedAvg", NoisyNet, 1, False),
            ("PFedLoRA", NoisyNet, 1, False),
        ],
    ),
)
def test_any_method_on_adapters_exports_them_with_the_same_logits(
    method: str, network: Any, client: int | None, merged: bool
) -> None:
    pretrained = network(CLASSES)
    texts = network is tiny_transformer
    data = new_texts(3) if texts else new_data(3)
    targets = {} if network is not NoisyNet else {"target_modules": ["fc1", "fc2"], "modules_to_save": ["fc2"]}
    options = {"backbone": pretrained, "adapters": Adapters(r=2, lora_alpha=16, use_rslora=True, **targets)}
    federation = fit_and_export(method, data, client, merged=merged, **options)
    module = federation.run.server_module() if client is None else federation.run.client_module(client)
    predicts = module.backbone if client is None else module.predictor
    inputs = data.client(1).data[torch.arange(20)][0]
    plain: Any = inside(pretrained)
    assert Path("exported/adapter.safetensors").exists() == (method == "PFedLoRA")  # what it has beside its network
    if not merged:
        loaded = PeftModel.from_pretrained(copy.deepcopy(plain), "exported").eval()
    elif hasattr(plain, "save_pretrained"):
        loaded = type(plain).from_pretrained("exported").eval()
    else:
        loaded = copy.deepcopy(plain).eval()
        loaded.load_state_dict(load_file("exported/model.safetensors"))
    with torch.no_grad():
        outputs = loaded(**inputs) if texts else loaded(inputs)
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        torch.testing.assert_close(logits, predicts.eval()(inputs), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(logits, pretrained.eval()(inputs), atol=1e-3)


@pytest.mark.parametrize("who", ["server", "client"])
def test_merged_weights_give_the_same_logits(who: str) -> None:
    """Of the server with the common adapter, of a client with its own as well; the frozen weights stay as they are."""
    data = new_texts(3)
    module = new_method("PF2LoRA", lora_alpha=16.0)
    if who == "client":
        module = module.for_client(data.clients[1])
    module.configure_model()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0 if who == "server" and ".client." in name else 0.5)
    frozen = {name: module.state_dict()[name].clone() for name in module.frozen_names}
    module.export_merged(Path("merged"))
    assert same({name: module.state_dict()[name] for name in frozen}, frozen)
    merged = TransformerClassifier(CLASSES, name="merged").eval()
    assert merged.state_dict().keys() == tiny_transformer(CLASSES).state_dict().keys()
    inputs = data.client(1).data[torch.arange(20)][0]
    torch.testing.assert_close(merged(inputs), module.eval()(inputs), rtol=1e-5, atol=1e-5)


def test_what_no_export_wrote_is_not_replaced() -> None:
    """The pretrained network of somebody, say; an earlier export is."""
    data = new_data(3)
    new_federation(1, "runs").fit(new_method("FedAvg"), data)
    Path("bert").mkdir()
    for name in ("config.json", "model.safetensors"):
        (Path("bert") / name).write_text("{}")
    with pytest.raises(
        FederationError, match=r"bert has 'config\.json' and 1 more in it and no exported model: give another output"
    ):
        new_federation(1, "runs").export(new_method("FedAvg"), data, "bert")
    assert Path("bert/model.safetensors").read_text() == "{}"
    for client in (0, 1):
        new_federation(1, "runs").export(new_method("FedAvg"), data, "exported", client)
    assert config_of("exported")["client"] == 1


def test_an_export_takes_the_place_of_an_earlier_one_of_another_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a merged network, the transformers library would load the earlier adapter, too."""
    pretrained, data = tiny_transformer(CLASSES), new_texts(2, 40)
    method = partial(new_method, "HOMLoRA", backbone=lambda classes: copy.deepcopy(pretrained))
    new_federation(1, "runs").fit(method(), data)

    def export(folder: str, merged: bool) -> dict[str, bytes]:
        new_federation(1, "runs").export(method(), data, folder, 1, merged=merged)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.name != "README.md"}

    adapter, network = export("adapter", False), export("network", True)
    assert adapter.keys() ^ network.keys() == {"adapter_config.json", "adapter_model.safetensors", "model.safetensors"}
    assert export("exported", False) == adapter
    assert export("exported", True) == network
    assert export("exported", False) == adapter
    monkeypatch.setattr(TransformerClassifier, "state_dict", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export("exported", True)
    assert {path.name: path.read_bytes() for path in Path("exported").iterdir() if path.name in adapter} == adapter


def test_two_exports_to_a_folder_do_not_mix() -> None:
    fit_and_export("FedAvg", client=0)
    data, method = new_data(3), new_method("FedAvg")
    other = os.open("exported", os.O_RDONLY)
    assert taken(other)  # as another process that is writing
    with pytest.raises(FederationError, match="exported is being written by another export: wait until it ends, or give another"):
        new_federation(1, "runs").export(method, data, "exported", 1)
    assert config_of("exported")["client"] == 0
    os.close(other)
    new_federation(1, "runs").export(method, data, "exported", 1)
    assert config_of("exported")["client"] == 1
    assert {path.name for path in Path("exported").iterdir()} == {"config.json", "model.safetensors"}


def test_nothing_of_an_earlier_export_is_left_beside_a_model() -> None:
    fit_and_export("PFedLoRA", client=0)
    Path("exported/chat_template.jinja").touch()
    assert Path("exported/adapter.safetensors").exists()
    fit_and_export("FedAvg")
    assert {path.name for path in Path("exported").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_nothing_of_a_killed_export_is_left_beside_a_model() -> None:
    data = new_data(2, 40)
    new_federation(1, "runs").fit(new_method("FedAvg"), data)
    child = os.fork()
    if child == 0:
        try:
            folder._replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            new_federation(1, "runs").export(new_method("FedAvg"), data, "exported")
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert [path.name for path in Path("exported").glob("*/*")]
    new_federation(1, "runs").export(new_method("FedAvg"), data, "exported")
    assert {path.name for path in Path("exported").iterdir()} == {"config.json", "model.safetensors"}


def test_what_has_no_adapters_cannot_be_merged() -> None:
    with pytest.raises(FederationError, match="FedAvg's networks have no adapters, so that nothing can be merged: export"):
        fit_and_export("FedAvg", merged=True)


def plain(state: State, part: str = "backbone.") -> State:
    """The tensors of a part under the names that they have in it."""
    return {name.removeprefix(part): tensor for name, tensor in state.items() if name.startswith(part)}


@pytest.mark.parametrize("name", mostly_slow(["FedAvg", "FedPer", "FedBN", "FedHM", "HeteroFL"], often={"FedBN", "FedHM"}))
def test_other_methods_export_the_clients_network_with_its_own_names(name: str) -> None:
    federation = fit_and_export(name, client=2)
    expected = federation.client_module(2).backbone.state_dict()
    assert same(load_file("exported/model.safetensors"), dict(expected))


@pytest.mark.parametrize("name", mostly_slow(["FedAvg", "FedDyn", "MOON", "SCAFFOLD"], often={"FedAvg", "SCAFFOLD"}))
@pytest.mark.parametrize("client", [None, 1])
def test_the_server_of_a_whole_model_exports_it(name: str, client: int | None) -> None:
    """And what clients keep beside it is in no export."""
    federation = fit_and_export(name, client=client)
    assert same(load_file("exported/model.safetensors"), plain(federation.run.server.state))
    assert config_of("exported")["content"] == "model"
    assert [path.name for path in Path("exported").glob("*.safetensors")] == ["model.safetensors"]


@pytest.mark.parametrize(
    "name", mostly_slow(["PFedLoRA", "FedPer", "FedRep", "LGFedAvg", "FedBN", "FedRoD"], often={"PFedLoRA", "FedPer"})
)
def test_a_server_that_has_a_part_exports_that(name: str) -> None:
    options: dict[str, Any] = {"backbone": NoisyNet} if name == "FedBN" else {}
    federation = fit_and_export(name, **options)
    found = {
        f"{'backbone' if path.stem == 'model' else path.stem}.{name}": tensor
        for path in Path("exported").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    assert same(found, federation.run.server.state)
    assert config_of("exported")["content"] == "shared"
    assert (config_of("exported")["network"] is None) == (name == "PFedLoRA")  # it shares nothing of the networks


def test_pfedloras_server_export_is_its_adapter() -> None:
    """Of the paper's size, and nothing else."""
    data = Digits(num_clients=2, batch_size=900)
    new_federation(1, "runs").fit(new_method("PFedLoRA", backbone=CNN5, num_classes=10, adapter_epochs=0), data)
    new_federation(1, "runs").export(new_method("PFedLoRA", backbone=CNN5, num_classes=10), data, "exported")
    assert {path.name for path in Path("exported").iterdir()} == {"adapter.safetensors", "config.json"}
    adapter = load_file("exported/adapter.safetensors")
    assert count_floats(adapter) == 30_670
    build_adapter(500, 60, 10, "reduction", True).load_state_dict(adapter)


def test_parts_beside_the_network_have_files_of_their_own() -> None:
    for name, part in (("PFedLoRA", "adapter"), ("FedRoD", "personal"), ("SplitMix", "bases")):
        module = fit_and_export(name, client=1, folder=name).client_module(1)
        assert same(load_file(f"{name}/{part}.safetensors"), dict(module.get_submodule(part).state_dict()))
        if name != "SplitMix":  # which has no other network
            assert same(load_file(f"{name}/model.safetensors"), dict(module.backbone.state_dict()))


@pytest.mark.parametrize("client", [None, 1], ids=["server", "client"])
def test_feddecomp_exports_a_plain_network(client: int | None) -> None:
    """Of a client the sum of both parts, of the server the shared one."""
    federation = fit_and_export("FedDecomp", client=client, rounds=2)
    network, x = Net(), torch.randn(5, 3, 4, 4)
    network.load_state_dict(load_file("exported/model.safetensors"))
    module = federation.client_module(1).eval()
    if client is None:
        with torch.no_grad():
            for factor in factors(module.backbone):
                factor.zero_()
    with torch.no_grad():
        assert torch.equal(network(x), module(x))


@pytest.mark.parametrize("name", ["Standalone", "FedAMP"])
def test_where_nothing_is_shared_the_server_has_nothing(name: str) -> None:
    with pytest.raises(FederationError, match=rf"{name} shares nothing, its server has no model: export a client's \(--client 0\)"):
        fit_and_export(name)


def test_a_network_of_transformers_is_saved_as_that_library_does(capsys: pytest.CaptureFixture[str]) -> None:
    federation = fit_and_export("FedAvg", backbone=tiny_vit)
    assert capsys.readouterr().err == ""  # no progress bar
    loaded = VisionTransformer(CLASSES, name="exported")
    trained = {name.removeprefix("backbone."): tensor for name, tensor in federation.run.server.state.items()}
    assert loaded.state_dict().keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in loaded.state_dict().items())


def test_a_text_classifier_that_is_trained_as_a_whole_is_saved_so_too() -> None:
    federation = fit_and_export("FedAvg", new_texts(3), backbone=tiny_transformer)
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained("exported")
    assert same(dict(loaded.state_dict()), plain(federation.run.server.state, "backbone.network."))
    assert config_of("exported")["lightning_fed"]["method"] == "FedAvg"


SHUFFLENET = "torchvision.models.shufflenetv2.shufflenet_v2_x0_5"


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("given", [torchvision.models.shufflenet_v2_x0_5, SHUFFLENET], ids=["function", "path"])
def test_a_network_of_another_library_can_be_made_and_loaded_without_this_one(given: Any, wrapped: bool) -> None:
    module = FedAvg(partial(Wrapped, network=given, head="fc", settings={"weights": None}) if wrapped else given, 4)
    module.configure_model()
    write_safetensors(Path("exported"), module)
    config = network_config(module)
    assert config == {"class_path": SHUFFLENET, "init_args": {"num_classes": 4} | ({"weights": None} if wrapped else {})}
    instantiate_class((), config).load_state_dict(load_file("exported/model.safetensors"))


def test_what_makes_a_network_with_another_head_does_not_make_this_one() -> None:
    module = FedAvg(partial(Wrapped, network=SHUFFLENET, new_head=True), 4)
    module.configure_model()
    assert network_config(module) == {"class_path": "torchvision.models.shufflenetv2.ShuffleNetV2", "init_args": None}


def without_arguments() -> Net:
    return Net(4)


def test_what_makes_a_network_without_arguments_is_given_none() -> None:
    module = FedAvg(without_arguments, 4)
    module.configure_model()
    assert network_config(module) == {"class_path": "test_folder.without_arguments", "init_args": {}}


def of_a_width(width: int, classes: int) -> nn.Module:
    return nn.Linear(width, classes)


@pytest.mark.parametrize("make", [partial(of_a_width, 3), partial(of_a_width, width=3)])
def test_of_what_makes_a_network_all_arguments_are_named(make: Any) -> None:
    module = FedAvg(make, 4)
    module.configure_model()
    assert network_config(module)["init_args"] == {"width": 3, "classes": 4}


class Tied(Net):
    """Two of its layers have one bias."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes, hidden=6)
        self.fc1.bias = self.fc2.bias


def test_tied_weights_are_merged_under_both_names() -> None:
    fit_and_export("FedAvg", new_data(3), None, merged=True, backbone=Tied(), adapters=Adapters(r=2, target_modules=["fc1"]))
    merged = load_file("exported/model.safetensors")
    assert torch.equal(merged["fc1.bias"], merged["fc2.bias"])


class OneWeight(Net):
    """Two of its layers have one weight, and a third has two names."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__(num_classes, hidden=6)
        self.other = nn.Linear(6, 6)
        self.other.weight = self.fc2.weight
        self.block = self.again = nn.Sequential(nn.Linear(6, 6))

    def encode(self, x: torch.Tensor, cut: str = "features") -> torch.Tensor:
        return self.again(self.block(self.other(super().encode(x))))


@pytest.mark.parametrize("targets", [["fc2", "other"], ["fc2"], ["other"]], ids=str)
def test_a_weight_that_two_layers_have_is_not_merged_with_the_adapter_of_one(targets: list[str]) -> None:
    """Either layer's name would load the weight of the other one."""
    data, options = new_data(3), {"backbone": OneWeight(), "adapters": Adapters(r=2, target_modules=targets)}
    fit_and_export("FedAvg", data, **options)
    with pytest.raises(FederationError, match=r"^fc2.weight and other.weight of OneWeight are one weight, which adapters would"):
        new_federation(1, "runs").export(new_method("FedAvg", **options), data, "merged", merged=True)
    assert not Path("merged").exists()


def test_a_repeated_layer_is_merged_under_both_names() -> None:
    pretrained = OneWeight()
    options = {"backbone": pretrained, "adapters": Adapters(r=2, target_modules=["block.0", "fc1"])}
    module = fit_and_export("FedAvg", merged=True, **options).run.server_module().eval()
    loaded, x = copy.deepcopy(pretrained).eval(), torch.randn(5, 3, 4, 4)
    loaded.load_state_dict(load_file("exported/model.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), module(x))
        assert not torch.allclose(loaded(x), pretrained.eval()(x), atol=1e-4)


@pytest.mark.parametrize(
    "config", [TINY_MODELS["gpt2"], TINY_MODELS["llama"] | {"tie_word_embeddings": True}], ids=["gpt2", "llama"]
)
def test_a_language_model_that_feddecomp_has_trained_is_tied_as_before(config: dict[str, Any]) -> None:
    module = FedDecomp(partial(CausalLM, config=config), 1)
    module.configure_model()
    with torch.no_grad():
        for factor in factors(module):
            factor.normal_(std=0.3)
    write_safetensors(Path("exported"), module.eval())
    loaded = transformers.AutoModelForCausalLM.from_pretrained("exported").eval()
    assert loaded.lm_head.weight is loaded.get_input_embeddings().weight
    with torch.no_grad():
        ids = torch.randint(0, 20, (2, 7))
        torch.testing.assert_close(loaded(ids).logits, module.backbone.network(ids).logits)


@pytest.mark.parametrize("backbone", [tiny_vit, torchvision.models.shufflenet_v2_x0_5, Tied])
def test_a_run_can_begin_with_an_export(backbone: Any) -> None:
    module = FedAvg(backbone, CLASSES)
    module.configure_model()
    write_safetensors(Path("exported"), module)
    begun = FedAvg(backbone, CLASSES).with_initial_weights(initial_network(Path("exported/model.safetensors"))[0])
    begun.configure_model()
    assert same(dict(begun.state_dict()), dict(module.state_dict()))


def test_statistics_that_were_gathered_are_exported() -> None:
    federation = fit_and_export("FedHM")
    model = federation.run.server.global_models()["global"]
    assert same(load_file("exported/model.safetensors"), plain({**model.state, **model.statistics}))


def test_what_is_not_there_cannot_be_exported() -> None:
    data = new_data(3)
    with pytest.raises(FederationError, match="no checkpoint of FedAvg in runs: fit first"):
        new_federation(1, "runs").export(new_method("FedAvg"), data, "exported")
    new_federation(1, "runs").fit(new_method("FedAvg"), data)
    with pytest.raises(FederationError, match="no client 3: ids go from 0 to 2"):
        new_federation(1, "runs").export(new_method("FedAvg"), data, "exported", client=3)
    with pytest.raises(FederationError, match="no client 'last': ids go from 0 to 2"):
        new_federation(1, "runs").export(new_method("FedAvg"), data, "exported", client="last")  # type: ignore[arg-type]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data=Digits", "--data.num_clients=3", "--model=FedAvg", "--model.backbone=CNN5", "--federation.rounds=1"]
    main(["fit", *options, "--federation.progress=false"])
    main(["export", *options, "--output=exported", "--client=1"])
    assert capsys.readouterr().out.endswith("exported: client 1's model after round 1.\n")
    assert "head.weight" in load_file("exported/model.safetensors")
    assert config_of("exported")["network"] == {
        "class_path": "lightning_fed.models.cnn.CNN5",
        "init_args": {"num_classes": 10, "width": 1.0},
    }


# ----------------------------------------------------------------------------------------------------------- what it says


def config_of(folder: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text())
    return config


class NamedDigits(Digits):
    class_names = tuple(f"digit {label}" for label in range(10))


@pytest.mark.parametrize("client", [None, 1], ids=["server", "client"])
def test_the_configuration_says_what_it_is(client: int | None) -> None:
    data = NamedDigits(num_clients=2, image_size=8, batch_size=900)
    backbone = partial(SmallNet, hidden=4)
    new_federation(2, "runs", seed=3).fit(new_method("FedAvg", backbone=backbone, num_classes=10), data)
    new_federation(2, "runs", seed=3).export(new_method("FedAvg", backbone=backbone, num_classes=10), data, "exported", client)
    assert config_of("exported") == {
        "lightning_fed_version": lightning_fed.__version__,
        "method": "FedAvg",
        "round": 2,
        "client": client,
        "seed": 3,
        "content": "model",
        "network": {"class_path": "test_folder.SmallNet", "init_args": {"num_classes": 10, "hidden": 4}},
        "model_size": None,
        "num_classes": 10,
        "class_names": list(NamedDigits.class_names),
        "image_size": [8, 8],
        "mean": list(Digits.mean),
        "std": list(Digits.std),
    }


class SmallNet(Net):
    """For digits of 8 × 8 pixels."""

    def __init__(self, num_classes: int, hidden: int = 5, **more: Any) -> None:
        super().__init__(num_classes, hidden)
        self.fc1 = torch.nn.Linear(3 * 8 * 8, hidden)
        self.more = more


def by_name(*, num_classes: int) -> Net:
    return Net(num_classes)


def test_a_network_whose_arguments_have_names_alone_can_be_made_again() -> None:
    module = FedAvg(Net, 4)
    module.network_factory = lambda: (by_name, {})
    assert network_config(module) == {"class_path": "test_folder.by_name", "init_args": {"num_classes": 4}}


def test_the_first_client_need_not_have_trained() -> None:
    images, labels, tested = torch.zeros(20, 3, 4, 4), torch.arange(20) % CLASSES, {"who": list("abc")}
    options: dict[str, Any] = {"columns": {"who": list("bc") * 10}, "test_columns": tested, "partition": ByColumn("who")}
    data = InMemory(images, labels, CLASSES, images[:3], labels[:3], split="official", val_share=0, **options)
    federation = new_federation(1, "runs", unseen=[0])
    federation.fit(new_method("FedAvg"), data)
    federation.export(new_method("FedAvg"), data, "exported")
    assert config_of("exported")["image_size"] == [4, 4]


def test_images_that_come_as_floats_are_not_normalized() -> None:
    fit_and_export("FedAvg")
    config = config_of("exported")
    assert (config["image_size"], config["mean"], config["std"], config["class_names"]) == ([4, 4], None, None, None)


@pytest.mark.parametrize(
    ("backbone", "expected"),
    [
        (Net, {"class_path": NET, "init_args": {"num_classes": 4}}),
        (
            partial(partial(Net, hidden=3), width=2.0),
            {"class_path": NET, "init_args": {"num_classes": 4, "hidden": 3, "width": 2.0}},
        ),
        (partial(SmallNet, depth=2), {"class_path": "test_folder.SmallNet", "init_args": {"num_classes": 4, "depth": 2}}),
        (lambda classes: Net(classes), {"class_path": NET, "init_args": None}),
        (partial(SmallNet, norm=torch.nn.ReLU()), {"class_path": "test_folder.SmallNet", "init_args": None}),
    ],
    ids=["class", "partial", "kwargs", "lambda", "object"],
)
def test_the_network_can_be_made_again(backbone: Any, expected: dict[str, Any]) -> None:
    module = FedAvg(backbone, 4)
    module.configure_model()
    config = network_config(module)
    assert config == expected
    if config["init_args"] is not None:
        made = instantiate_class((), json.loads(json.dumps(config)))
        made.load_state_dict(module.backbone.state_dict())


@pytest.mark.often(1)
@pytest.mark.parametrize("client", [None, 0, 1])
def test_the_network_of_a_width_can_be_made_again(client: int | None) -> None:
    fit_and_export("HeteroFL", client=client, widths=[0.5, 1.0])
    config = config_of("exported")
    assert config["model_size"] == (0.5 if client == 0 else None)
    instantiate_class((), config["network"]).load_state_dict(load_file("exported/model.safetensors"))


def test_clients_networks_differ() -> None:
    data = new_data(3)
    new_federation(1, "runs").fit(new_method("PFedLoRA"), data)
    for client, network in enumerate([NET, NET.replace("Net", "WideNet"), NET]):
        new_federation(1, "runs").export(new_method("PFedLoRA"), data, f"exported/{client}", client)
        assert config_of(f"exported/{client}")["network"]["class_path"] == network


# ------------------------------------------------------------------------------------------------------ beside transformers


class NamedTexts(InMemory):
    class_names = ("bad", "so so", "good", "best")


def texts_with_names() -> InMemory:
    data = new_texts(3)
    data.__class__ = NamedTexts
    data.tokenizer = save_tokenizer(Path("tokenizer"))
    return data


@pytest.mark.often(1)
@pytest.mark.parametrize("merged", [False, True])
def test_a_tokenizer_goes_with_the_texts_network(merged: bool) -> None:
    fit_and_export("HOMLoRA", texts_with_names(), merged=merged)
    loaded, original = (transformers.AutoTokenizer.from_pretrained(folder) for folder in ("exported", "tokenizer"))
    assert loaded("the dog barks").input_ids == original("the dog barks").input_ids
    config = config_of("exported")
    about = config["lightning_fed"] if merged else config
    assert (about["method"], about["class_names"], about["image_size"]) == ("HOMLoRA", list(NamedTexts.class_names), None)
    assert ("model_type" in config) == merged
    if merged:
        network = transformers.AutoModelForSequenceClassification.from_pretrained("exported")
        assert network.config.id2label == dict(enumerate(NamedTexts.class_names))
        assert network.config.label2id["good"] == 2
        task = transformers.pipeline("text-classification", model="exported", device="cpu")
        assert task("the dog barks")[0]["label"] in NamedTexts.class_names


# -------------------------------------------------------------------------------------------------------------- best round


def test_the_best_round_is_exported_with_private_states() -> None:
    federation = new_federation(6, "runs", participation=0.5, evaluate_every=2, trainer=new_trainer)
    federation.fit(new_method("FedRep", epochs=2), new_data())
    best = int(federation.run.history[-1]["selected/round"])
    assert best < 6  # else it would be the last
    other = new_federation(best, "other", participation=0.5)
    other.fit(new_method("FedRep", epochs=2), new_data())
    for client in range(4):
        new_federation(6, "runs", participation=0.5).export(
            new_method("FedRep", epochs=2), new_data(), "exported", client, ckpt_path="best"
        )
        assert config_of("exported")["round"] == best
        assert same(load_file("exported/model.safetensors"), dict(other.client_module(client).backbone.state_dict()))
