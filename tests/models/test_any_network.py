"""Networks that know nothing of this package: how they may be given, where they are cut, and which methods take them."""

import copy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torchvision
import transformers
from often import OFTEN, mostly_slow
from tiny import (
    CLASSES,
    METHODS,
    ON_IMAGES,
    ON_TINY_DATA,
    TINY_TRANSFORMER,
    TINY_VIT,
    Net,
    assert_same,
    momentum,
    new_data,
    new_federation,
    new_texts,
    new_trainer,
    same,
)
from torch import Tensor, nn

import lightning_fed.methods
from lightning_fed.core import PublicDistillation
from lightning_fed.engines import Processes
from lightning_fed.engines.packing import pack, unpack
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedAvg, FedHM, FedPer, FedProto, FedRep, FedRoD, HeteroFL, HOMLoRA, PFedLoRA, SplitMix, Standalone
from lightning_fed.methods.families.adapter_module import AdapterModule
from lightning_fed.models import Backbone, TransformerClassifier, VisionTransformer, Wrapped, backbone_of

torchvision_vit = partial(
    torchvision.models.VisionTransformer, image_size=4, patch_size=2, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8
)
FINE_TUNING = [name for name in METHODS if issubclass(getattr(lightning_fed.methods, name), AdapterModule)]
WHOLE = [name for name in METHODS if name not in FINE_TUNING]


def without_type(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "model_type"} | {"num_labels": CLASSES}


def hub_vit(num_labels: int = CLASSES) -> transformers.ViTForImageClassification:
    return transformers.ViTForImageClassification(transformers.ViTConfig(**without_type(TINY_VIT) | {"num_labels": num_labels}))


def hub_roberta(num_labels: int = CLASSES) -> transformers.RobertaForSequenceClassification:
    config = transformers.RobertaConfig(**without_type(TINY_TRANSFORMER) | {"num_labels": num_labels})
    return transformers.RobertaForSequenceClassification(config)


class Plain(nn.Module):
    """A convolution, batch norm and two linear layers; what is registered last is not its head."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__()
        self.fc = nn.Linear(6, num_classes)
        self.conv = nn.Sequential(nn.Conv2d(3, 6, 2), nn.BatchNorm2d(6), nn.ReLU())
        self.pool = nn.AdaptiveAvgPool2d(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.conv(x)).flatten(1))


class Behind(Plain):
    """With something behind its head."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log_softmax(dim=1)


class Convolutional(nn.Module):
    """Without any linear layer."""

    def __init__(self, num_classes: int = CLASSES) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, num_classes, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).flatten(1)


def fit(method: type, backbone: Any, texts: bool = False, rounds: int = 1, engine: Any = None, **options: Any) -> Federation:
    if issubclass(method, AdapterModule):
        options = {"steps": 1} | options
    federation = new_federation(rounds, engine=engine)
    new = new_texts if texts else new_data
    public = {"public": new(1, 24)} if issubclass(method, PublicDistillation) else {}  # type: ignore[attr-defined]
    federation.fit(method(backbone, num_classes=CLASSES, **options), new(num_clients=2, size=50, **public))
    return federation


def images(count: int = 5) -> Tensor:
    return torch.randn(count, 3, 4, 4)


def choosy(num_classes: int) -> nn.Module:
    """As torchvision's functions are with the weights of a pretrained network."""
    raise ValueError("only for 1000")


def computed() -> nn.Module:
    """Has a tensor that was computed from its parameters, as with the older ``torch.nn.utils.weight_norm``."""
    network = nn.Linear(4, CLASSES)
    network.scaled = network.weight * 2
    return network


# ---------------------------------------------------------------------------------------------------- how they are given


@pytest.mark.parametrize(
    "given",
    [Plain, "test_any_network.Plain", lambda: Plain(), lambda classes: Plain(classes), Plain(), Backbone.wrap(Plain(), head="fc")],
    ids=["class", "path", "factory without arguments", "factory", "network", "wrapped"],
)
def test_a_network_may_be_given_in_any_way(given: Any) -> None:
    backbone = backbone_of(given, CLASSES)
    assert isinstance(backbone, Wrapped)
    assert isinstance(backbone.network, Plain)
    assert backbone(images()).shape == (5, CLASSES)
    assert backbone.head is backbone.network.fc
    assert backbone.head_names() == {"network.fc.weight", "network.fc.bias"}


def test_a_backbone_stays_what_it_is() -> None:
    assert type(backbone_of(Net, CLASSES)) is Net
    assert type(backbone_of(partial(Net, hidden=7), CLASSES)) is Net
    assert type(backbone_of(Net(CLASSES), CLASSES)) is Net
    assert type(backbone_of("tiny.Net", CLASSES)) is Net


def of_a_width(width: int, classes: int) -> nn.Module:
    return nn.Linear(width, classes)


@pytest.mark.parametrize(
    "build",
    [
        *(torchvision.models.resnet18, torchvision_vit, hub_vit, lambda num_labels: hub_vit(num_labels)),
        *(partial(of_a_width, 3), partial(of_a_width, width=3), partial(Wrapped, network=of_a_width, settings={"width": 3})),
    ],
)
def test_the_number_of_classes_reaches_the_factory_by_its_name(build: Any) -> None:
    assert backbone_of(build, 7).head.out_features == 7


def test_clients_have_copies_of_a_network_that_is_there() -> None:
    given = Net(CLASSES)
    before = {name: tensor.clone() for name, tensor in given.state_dict().items()}
    federation = fit(Standalone, given, rounds=2)
    clients = [federation.run.model.for_client(client, seed).backbone for seed, client in enumerate(federation.run.clients)]
    assert all(same(client.state_dict(), before) for client in clients)
    assert same(given.state_dict(), before)
    trained = [federation.client_module(k).backbone.state_dict() for k in (0, 1)]
    assert not same(trained[0], before)
    assert not same(*trained)


def test_a_run_that_starts_from_a_network_is_a_function_of_it() -> None:
    given = Plain()
    assert_same(fit(FedAvg, given), fit(FedAvg, copy.deepcopy(given)))
    assert_same(fit(FedAvg, given), fit(FedAvg, lambda: copy.deepcopy(given)))


@pytest.mark.parametrize("given", [Plain(), Backbone.wrap(Plain(), "fc"), hub_vit()], ids=["network", "wrapped", "transformers"])
def test_another_process_has_the_same_network(given: nn.Module) -> None:
    data = new_data(2, 50)
    model = FedAvg(given, CLASSES)
    model.configure_model()
    worker = unpack(pack(WorkerSpec(model, data, new_trainer, 0).unbuilt())).worker()
    assert same(worker.template.state_dict(), model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "given", "texts"),
    [(FedAvg, Net(CLASSES), False), (FedAvg, Backbone.wrap(hub_vit()), False), (HOMLoRA, hub_roberta(), True)],
    ids=["network", "wrapped", "text model"],
)
def test_worker_processes_change_nothing(method: type, given: nn.Module, texts: bool, two_workers: Processes) -> None:
    assert_same(fit(method, given, texts), fit(method, given, texts, engine=two_workers))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "backbone is 3, a int: give a network, its class"),
        ("torchvision.models.resnet19", r"There is no 'torchvision.models.resnet19' .*give the dotted path"),
        (lambda: 3, "gave a int, expected a torch.nn.Module"),
        (lambda a, b: Plain(), r"cannot be called with .*missing a required argument: 'b'"),
        (Net(7), "Net has 7 outputs, but num_classes is 4: give num_classes=7"),
        (torchvision_vit(num_classes=7), r"The head 'heads.head' of VisionTransformer has 7 outputs, not 4: .*num_classes=4\)"),
        (nn.LazyLinear(CLASSES), "LazyLinear has lazy layers, whose sizes are not known yet: give the sizes"),
        (computed(), r"The Linear that was given cannot be copied for each client .*torch\.nn\.utils\.parametrizations"),
        (choosy, r"choosy builds no network with num_classes=4: only for 1000"),
    ],
)
def test_what_is_no_network_is_refused(given: Any, message: str) -> None:
    with pytest.raises(FederationError, match=message):
        FedAvg(given, CLASSES).configure_model()


def test_a_network_of_a_later_client_is_refused_before_the_first_round() -> None:
    with pytest.raises(FederationError, match=r"^There is no 'torchvision.models.resnet19'"):  # else: Client 1 in round 1: …
        new_federation(1).fit(Standalone([Net, "torchvision.models.resnet19"], CLASSES), new_data())
    texts = [partial(TransformerClassifier, config=TINY_TRANSFORMER | {"vocab_size": size}) for size in (30, 20)]
    with pytest.raises(FederationError, match="but the network knows 0 to 19"):
        new_federation(1).fit(Standalone(texts, CLASSES), new_texts())


# ---------------------------------------------------------------------------------------------------------- head and cuts


def test_representation_and_head_make_the_network() -> None:
    """Against torchvision's own layers, one after the other."""
    network = torchvision.models.resnet18(num_classes=CLASSES).eval()
    backbone = Backbone.wrap(network, head="fc", cuts={"avgpool": 512, "layer4.1.bn2": 512}).eval()
    x = torch.randn(2, 3, 32, 32)
    expected = nn.Sequential(*list(network.children())[:-1])(x).flatten(1)
    assert torch.equal(backbone.encode(x), expected)
    assert torch.equal(backbone.encode(x, "avgpool"), expected)
    assert torch.equal(backbone.classify(backbone.encode(x)), network(x))
    representation, logits = backbone.encode_and_classify(x, "layer4.1.bn2")
    assert torch.equal(logits, network(x))
    assert representation.shape == (2, 512)  # maps of 1 × 1
    assert backbone.cuts == {"avgpool": 512, "layer4.1.bn2": 512, "features": 512}
    assert not any(layer._forward_hooks for layer in backbone.modules())


@pytest.mark.parametrize("build", [torchvision_vit, hub_vit, Plain])
def test_the_head_is_found(build: Any) -> None:
    backbone = backbone_of(build, CLASSES).eval()
    x = images()
    assert torch.equal(backbone.classify(backbone.encode(x)), backbone(x))


def test_a_new_head() -> None:
    """The network stays as it was pretrained, but for its head."""
    pretrained = Plain(7)
    backbone = Backbone.wrap(pretrained, head="fc", num_classes=CLASSES)
    assert backbone(images()).shape == (5, CLASSES)
    assert torch.equal(backbone.network.conv[0].weight, pretrained.conv[0].weight)
    assert pretrained.fc.out_features == 7
    assert Backbone.wrap(hub_vit(7), num_classes=CLASSES).network.config.num_labels == CLASSES


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda: Backbone.wrap(Plain(), head="conv"), "Plain has no linear layer 'conv' to be its head: name one of fc"),
        (lambda: Backbone.wrap(Plain(), cuts={"layer4": 6}), "Plain has no layer 'layer4' to cut at"),
        (lambda: backbone_of(Behind, CLASSES).encode(images()), "Behind has layers after its head 'fc'"),
        (
            lambda: Backbone.wrap(Plain(), cuts={"conv": 6}).encode(images(), "conv"),
            r"shape \(54,\) per example at 'conv', expected 6",
        ),
        (lambda: Backbone.wrap(Plain()).encode(images(), "pool"), "Plain cannot be cut at 'pool': name it in cuts"),
        (lambda: Wrapped(CLASSES), "Wrapped got no network"),
    ],
)
def test_what_cannot_be_cut_is_refused(wrap: Any, message: str) -> None:
    with pytest.raises(FederationError, match=message):
        wrap()


@pytest.mark.parametrize("method", [FedPer, FedProto, FedRep, FedRoD, HeteroFL])
def test_methods_that_need_a_head_say_so(method: type) -> None:
    with pytest.raises(FederationError, match=r"This method needs the head of the network, and Convolutional has no linear layer"):
        fit(method, Convolutional, **({"widths": [1.0]} if method is HeteroFL else {}))


def test_outputs_are_counted_where_no_head_is_known() -> None:
    with pytest.raises(FederationError, match=r"Convolutional gives outputs of shape \(5, 7\), but num_classes is 4"):
        backbone_of(Convolutional(7), CLASSES)(images())


def test_a_network_without_a_head_is_averaged() -> None:
    assert 0 <= fit(FedAvg, Convolutional).run.history[-1]["after/test_accuracy/mean"] <= 1


def test_a_cut_that_is_not_named_is_refused() -> None:
    with pytest.raises(
        FederationError, match=r"Plain cannot be cut at 'pool': set cut to one of \['features'\], or wrap the network"
    ):
        fit(PFedLoRA, Plain, cut="pool")
    with pytest.raises(FederationError, match=r"Convolutional cannot be cut at 'features': name its head, or wrap"):
        fit(PFedLoRA, Convolutional)
    assert fit(PFedLoRA, Backbone.wrap(Plain(), cuts={"pool": 6}), cut="pool").run.history


def test_a_part_that_was_compiled_before_anything_looked_at_it_is_told_of() -> None:
    """Compiled code does not notice hooks that come later."""

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(Plain(CLASSES), backend="eager")

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    wrapped = Backbone.wrap(Compiled())
    wrapped(images())
    with pytest.raises(FederationError, match=r"does not use its layer 'inner\._orig_mod\.\w+', or torch\.compile has left out"):
        wrapped.encode(images())


def test_networks_of_different_width_are_named_before_the_first_round() -> None:
    wide = torchvision_vit(num_classes=CLASSES)
    with pytest.raises(
        FederationError, match=r"^Client 1's network, VisionTransformer, is 8 wide at 'features', .* client 0, Plain, is 6"
    ):
        fit(PFedLoRA, [Plain, wide])
    assert fit(PFedLoRA, [Plain, Net]).run.history  # both have 6 features


def test_methods_say_what_they_cannot_take() -> None:
    with pytest.raises(
        FederationError, match=r"Plain does not say which of its layers can be factorized: name them in layers, such as"
    ):
        fit(FedHM, Plain)
    with pytest.raises(FederationError, match="needs a backbone that takes a width, as ResNet18 does"):
        fit(HeteroFL, Plain)
    with pytest.raises(FederationError, match="SplitMix trains 9 networks that start from different weights, but got one, a Plain"):
        fit(SplitMix, Plain())
    with pytest.raises(FederationError, match="networks of the transformers library, but this is a Plain"):
        fit(HOMLoRA, Plain)


# --------------------------------------------------------------------------------------------------------- with a method


def each_with_one(builds: list[Any]) -> set[tuple[str, Any]]:
    """Some methods in turn with each network, first those that look into it."""
    looking = ["FedHM", "FedDecomp", "PFedGate", "PFedLoRA"]
    some = [*looking, *(name for name in ANY if name in OFTEN and name not in looking)]
    return {(name, builds[place % len(builds)]) for place, name in enumerate(some)}


ANY = [name for name in WHOLE if name != "FedRolex"]  # which has to know what is hidden
NETWORKS = [torchvision_vit, hub_vit, Plain]


@pytest.mark.often(3)
@pytest.mark.parametrize(("name", "build"), mostly_slow(product(ANY, NETWORKS), often=each_with_one(NETWORKS)))
def test_every_method_that_trains_the_whole_network_takes_any(name: str, build: Any) -> None:
    options: dict[str, Any] = {"widths": [1.0]} if name == "HeteroFL" else dict(ON_TINY_DATA.get(name, {}))
    if name in ("FedHM", "FedHMDelta"):
        network = backbone_of(build, CLASSES)
        layers = [key for key, layer in network.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        layer = layers[len(layers) // 2]
        options = {"layers": [layer], "ratios": [1.0, 0.5]}
    last = fit(getattr(lightning_fed.methods, name), build, **options).run.history[-1]
    assert 0 <= last["after/test_accuracy/mean"] <= 1
    assert last["compute/flops"] > 0


@pytest.mark.parametrize("name", mostly_slow([name for name in FINE_TUNING if name in ON_IMAGES], often={"FedHMLoRA", "SLoRA"}))
def test_an_image_classifier_of_transformers_is_fine_tuned(name: str) -> None:
    federation = fit(getattr(lightning_fed.methods, name), hub_vit())
    assert isinstance(federation.run.model.backbone, VisionTransformer)
    assert 0 <= federation.run.history[-1]["after/test_accuracy/mean"] <= 1


@pytest.mark.parametrize("name", mostly_slow([name for name in FINE_TUNING if name not in ON_IMAGES], often={"HETLoRA"}))
def test_a_text_model_is_fine_tuned_however_it_is_given(name: str, tmp_path: Any) -> None:
    method = getattr(lightning_fed.methods, name)
    model = hub_roberta()
    model.save_pretrained(tmp_path / "model")
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    from_folder = partial(transformers.AutoModelForSequenceClassification.from_pretrained, str(tmp_path / "model"))
    runs = [fit(method, given, texts=True) for given in (str(tmp_path / "model"), model, from_folder, Backbone.wrap(model))]
    assert same(model.state_dict(), before)
    for other in runs[1:]:
        assert_same(runs[0], other)


def test_a_given_model_is_in_memory_once() -> None:
    model = hub_roberta()
    federation = fit(HOMLoRA, model, texts=True)
    body, ours = model.roberta.embeddings.word_embeddings.weight, federation.client_module(0).backbone.network
    assert ours.roberta.embeddings.word_embeddings.weight.data_ptr() == body.data_ptr()
    assert ours.classifier.dense.weight.data_ptr() != model.classifier.dense.weight.data_ptr()
    assert all(p.requires_grad for p in model.parameters())


def test_a_text_model_is_trained_as_a_whole() -> None:
    model = hub_roberta()
    for method in (FedAvg, FedRep, PFedLoRA):
        trained = fit(method, lambda num_classes: copy.deepcopy(model), texts=True).client_module(0).backbone.network
        for name in ("roberta.embeddings.word_embeddings.weight", "classifier.out_proj.weight"):
            assert not torch.equal(trained.get_parameter(name), model.get_parameter(name))


def test_a_model_for_other_classes_is_refused() -> None:
    with pytest.raises(FederationError, match="has 7 outputs, but num_classes is 4: load it with num_labels=4"):
        fit(HOMLoRA, hub_roberta(7), texts=True)


def test_a_model_without_a_task_is_refused() -> None:
    body = transformers.RobertaModel(hub_roberta().config, add_pooling_layer=False)
    with pytest.raises(FederationError, match=r"RobertaModel gives a BaseModelOutput.* without logits: give a network that"):
        fit(FedAvg, body, texts=True)


# ------------------------------------------------------------------------------------------------- Hugging Face's batches


@pytest.mark.parametrize("method", [FedAvg, PFedLoRA, HOMLoRA])
def test_batches_of_hugging_faces_collators_are_understood(method: type) -> None:
    """The same in a pair and in a dict, in a Trainer of anybody's."""
    from torch.utils.data import DataLoader

    torch.manual_seed(1)
    rows = [{"input_ids": torch.randint(3, 30, (length,)).tolist(), "label": length % CLASSES} for length in (3, 4, 5, 6)]
    collate = transformers.DataCollatorWithPadding(padding_tokenizer())
    model = hub_roberta()
    module = method(model, num_classes=CLASSES, optimizer=momentum)
    trainer = new_trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    loader: Any = DataLoader(rows, batch_size=2, collate_fn=collate)  # type: ignore[arg-type]
    trainer.fit(module, loader, loader)
    assert 0 <= trainer.callback_metrics["val/accuracy"] <= 1
    module.eval()
    batch = dict(collate(rows[:2]))
    pair = {name: tensor for name, tensor in batch.items() if name != "labels"}, batch["labels"]
    assert torch.equal(module.client_loss(batch), module.client_loss(pair))


def padding_tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    vocabulary = {"[PAD]": 1, "[UNK]": 0}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def test_a_batch_without_labels_is_refused() -> None:
    with pytest.raises(FederationError, match="A batch has pixel_values, but no labels"):
        FedAvg(Plain, CLASSES).unpack({"pixel_values": images()})
    x, y = images(), torch.tensor([0, 1, 2, 3, 0])
    inputs, targets = FedAvg(Plain, CLASSES).unpack({"pixel_values": x, "labels": y})
    assert inputs is x
    assert targets is y
