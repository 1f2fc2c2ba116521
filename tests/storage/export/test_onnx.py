"""Exported ONNX files compute what the models compute, for any number of examples and any length of texts."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from tiny import CLASSES, Net, NoisyNet, new_data, new_federation, new_method, new_texts, still_transformer
from tiny_texts import TINY_GPT2
from torch import Tensor

from lightning_fed.__main__ import main
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import Digits
from lightning_fed.data.federated import FederatedDataModule
from lightning_fed.errors import FederationError
from lightning_fed.models import TransformerLM
from lightning_fed.storage.export.onnx import sample, write_onnx


def run(path: Path | str, inputs: Tensor | dict[str, Tensor]) -> np.ndarray:
    """What onnxruntime computes."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    named = {"images": inputs} if isinstance(inputs, Tensor) else inputs
    assert {entry.name for entry in session.get_inputs()} == named.keys()
    [logits] = session.run(["logits"], {name: tensor.numpy() for name, tensor in named.items()})
    return logits


def assert_same_logits(path: Path | str, module: FederatedModule, inputs: Tensor | dict[str, Tensor]) -> None:
    with torch.no_grad():
        expected = module.eval()(inputs)
    torch.testing.assert_close(torch.from_numpy(run(path, inputs)), expected, rtol=1e-4, atol=1e-5)


def exported(module: FederatedModule, data: FederatedDataModule, client: int | None) -> FederatedModule:
    """Train a little and export; returns the model that was exported."""
    federation = new_federation(1, "runs")
    federation.fit(module, data)
    federation.export(module, data, "exported", client, format="onnx")
    return federation.run.server_module() if client is None else federation.client_module(client)


@pytest.mark.parametrize(
    ("name", "client"),
    [
        ("FedAvg", None),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("FedDecomp", "FedRoD", "PFedLoRA", "FedHM")),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in ("SplitMix", "HeteroFL", "PrefixTuning", "FedHMLoRA")),
    ],
)
def test_image_classifiers(name: str, client: int | None) -> None:
    module = exported(new_method(name), new_data(3), client)
    for count in (1, 2, 7):
        assert_same_logits("exported/model.onnx", module, torch.randn(count, 3, 4, 4))
    assert {path.name for path in Path("exported").iterdir()} == {"model.onnx", "config.json"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "client"), [("HOMLoRA", None), ("PF2LoRA", 1)])
def test_texts_of_any_length(name: str, client: int | None) -> None:
    module = exported(new_method(name, backbone=still_transformer), new_texts(3), client)
    for count, length in ((1, 3), (2, 6), (5, 17)):
        mask = torch.ones(count, length, dtype=torch.long)
        mask[0, length // 2 :] = 0
        assert_same_logits(
            "exported/model.onnx", module, {"input_ids": torch.randint(2, 30, (count, length)), "attention_mask": mask}
        )


@pytest.mark.slow
def test_a_language_model() -> None:
    module = new_method("HOMLoRA", backbone=partial(TransformerLM, config=TINY_GPT2), num_classes=1)
    module.configure_model()
    write_onnx(Path("model.onnx"), module, new_texts(3).client(0))
    for count, length in ((1, 4), (3, 9)):
        inputs = {"input_ids": torch.randint(0, 40, (count, length)), "attention_mask": torch.ones(count, length, dtype=torch.long)}
        assert_same_logits("model.onnx", module, inputs)


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_model_stays_in_its_mode(training: bool) -> None:
    module = new_method("FedAvg", backbone=NoisyNet)
    module.configure_model()
    module.train(training)
    module.backbone.norm.eval()
    write_onnx(Path("model.onnx"), module, new_data(3).client(0))
    assert module.training == module.backbone.training == training
    assert not module.backbone.norm.training


def test_one_example_is_enough_to_try_it_on() -> None:
    assert len(sample(new_data(2, size=60, eval_batch_size=1).client(0))) == 2
    assert {len(tensor) for tensor in sample(new_texts(2, eval_batch_size=1).client(0)).values()} == {2}


def test_what_is_no_whole_model_is_refused() -> None:
    data = new_data(3)
    new_federation(1, "runs").fit(new_method("PFedLoRA"), data)
    with pytest.raises(FederationError, match="The server of PFedLoRA has only the shared part, which cannot predict"):
        new_federation(1, "runs").export(new_method("PFedLoRA"), data, "exported", format="onnx")
    with pytest.raises(FederationError, match="without merged"):
        new_federation(1, "runs").export(new_method("PFedLoRA"), data, "exported", 1, merged=True, format="onnx")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    module = new_method("FedAvg")
    module.configure_model()
    with pytest.raises(FederationError, match=r'pip install "lightning-fed\[onnx\]"'):
        write_onnx(Path("model.onnx"), module, new_data(3).client(0))


class Undecided(Net):
    """Looks at its input before it knows what to do."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else -super().forward(x)


def test_what_onnx_cannot_express_is_refused() -> None:
    module = new_method("FedAvg", backbone=Undecided)
    module.configure_model()
    with pytest.raises(FederationError, match=r"FedAvg cannot be exported as ONNX: .* Export it as safetensors"):
        write_onnx(Path("model.onnx"), module, new_data(3).client(0))


def test_the_command() -> None:
    options = ["--data=Digits", "--data.num_clients=3", "--data.image_size=8", "--model=FedAvg", "--federation.rounds=1"]
    options += ["--model.backbone=MLP", "--model.backbone.inputs=192", "--model.backbone.hidden=[8]"]
    main(["fit", *options, "--federation.progress=false"])
    main(["export", *options, "--output=exported", "--client=1", "--format=onnx", "--ckpt_path=best"])
    images, _ = next(iter(Digits(num_clients=3, image_size=8).client(1).test_dataloader()))
    assert run("exported/model.onnx", images.float() / 255).shape == (len(images), 10)
    assert CLASSES != 10
