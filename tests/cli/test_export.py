"""What is exported is the model that was trained, for those who load it elsewhere."""

import copy
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from peft import PeftModel
from tiny import CLASSES, new_data, new_federation, new_method, new_texts, same, tiny_transformer, tiny_vit

from lightning_fed.__main__ import main
from lightning_fed.errors import FederationError
from lightning_fed.models import TransformerClassifier, VisionTransformer


@pytest.mark.parametrize("client", [None, 1], ids=["server", "client"])
@pytest.mark.parametrize("name", ["HOMLoRA", "PF2LoRA", "HETLoRA", "PerFedAvgLoRA", "CentralizedLoRA"])
def test_peft_loads_an_adapter_with_the_same_logits(name: str, client: int | None) -> None:
    pretrained = tiny_transformer(CLASSES)
    options: dict[str, Any] = {"r_min": 2, "r_max": 4} if name == "HETLoRA" else {}
    data = new_texts(3)
    new_federation(2, "runs").fit(new_method(name, backbone=lambda classes: copy.deepcopy(pretrained), **options), data)
    federation, model = new_federation(2, "runs"), new_method(name, backbone=lambda classes: copy.deepcopy(pretrained), **options)
    federation.export(model, data, "exported", client)
    assert {path.name for path in Path("exported").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    loaded = PeftModel.from_pretrained(copy.deepcopy(pretrained.network), "exported").eval()
    module = model if client is None else federation.client_module(client)
    inputs = data.client(1).data[torch.arange(20)][0]
    with torch.no_grad():
        logits, plain = loaded(**inputs).logits, pretrained.eval()(inputs)
        assert torch.allclose(logits, module.eval()(inputs), atol=1e-6)
    assert not torch.allclose(logits, plain, atol=1e-3)


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


def test_what_has_no_adapters_cannot_be_merged() -> None:
    data = new_data(3)
    new_federation(1, "runs").fit(new_method("FedAvg"), data)
    with pytest.raises(FederationError, match="FedAvg has no adapters to merge into the weights: export without merged"):
        new_federation(1, "runs").export(new_method("FedAvg"), data, "exported", merged=True)


def test_a_private_adapter_is_in_its_clients_export_only() -> None:
    data = new_texts(3)
    new_federation(2, "runs").fit(new_method("PF2LoRA"), data)
    for client, rank in ((None, 8), (0, 10)):
        new_federation(2, "runs").export(new_method("PF2LoRA"), data, f"exported/{client}", client)
        state = safetensors.torch.load_file(f"exported/{client}/adapter_model.safetensors")
        assert {len(tensor) for name, tensor in state.items() if "lora_A" in name} == {rank}


@pytest.mark.parametrize("name", ["FedAvg", "FedPer", "FedHM"])
def test_other_methods_export_their_state_dict(name: str) -> None:
    data = new_data(3)
    federation = new_federation(1, "runs")
    federation.fit(new_method(name), data)
    new_federation(1, "runs").export(new_method(name), data, "exported", client=2)
    state = safetensors.torch.load_file("exported/model.safetensors")
    expected = federation.client_module(2).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in state)


def test_the_server_of_a_whole_model_exports_it() -> None:
    data = new_data(3)
    federation = new_federation(1, "runs")
    federation.fit(new_method("FedAvg"), data)
    new_federation(1, "runs").export(new_method("FedAvg"), data, "exported")
    state = safetensors.torch.load_file("exported/model.safetensors")
    assert all(torch.equal(state[key], tensor) for key, tensor in federation.run.server.state.items())


def test_a_network_of_transformers_is_saved_as_that_library_does() -> None:
    data = new_data(3)
    federation = new_federation(1, "runs")
    federation.fit(new_method("FedAvg", backbone=tiny_vit), data)
    new_federation(1, "runs").export(new_method("FedAvg", backbone=tiny_vit), data, "exported")
    loaded = VisionTransformer(CLASSES, name="exported")
    trained = {name.removeprefix("backbone."): tensor for name, tensor in federation.run.server.state.items()}
    assert loaded.state_dict().keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in loaded.state_dict().items())


def test_statistics_that_were_gathered_are_exported() -> None:
    data = new_data(3)
    federation = new_federation(1, "runs")
    federation.fit(new_method("FedHM"), data)
    new_federation(1, "runs").export(new_method("FedHM"), data, "exported")
    state = safetensors.torch.load_file("exported/model.safetensors")
    model = federation.run.server.models()["global"]
    assert state.keys() == model.state.keys() | model.statistics.keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in {**model.state, **model.statistics}.items())


def test_what_is_not_there_cannot_be_exported() -> None:
    data = new_data(3)
    with pytest.raises(FederationError, match="no checkpoint in runs: fit first"):
        new_federation(1, "runs").export(new_method("FedAvg"), data, "exported")
    new_federation(1, "runs").fit(new_method("FedAvg"), data)
    with pytest.raises(FederationError, match="no client 3: ids go from 0 to 2"):
        new_federation(1, "runs").export(new_method("FedAvg"), data, "exported", client=3)


def test_the_command() -> None:
    options = ["--data=Digits", "--data.num_clients=3", "--model=FedAvg", "--model.backbone=CNN5", "--federation.rounds=1"]
    main(["fit", *options, "--federation.progress=false"])
    main(["export", *options, "--output=exported", "--client=1"])
    assert "backbone.head.weight" in safetensors.torch.load_file("exported/model.safetensors")
