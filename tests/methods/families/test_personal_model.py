"""Methods whose clients have a personal network beside the one that travels."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import CLASSES, Net, momentum, same
from tiny_rounds import fit

import lightning_fed.methods
from lightning_fed.storage.export.safetensors import write_safetensors


@pytest.mark.parametrize("method", ["Ditto", "PFedSD"])
def test_what_is_exported_of_a_client_is_what_it_predicts_with(method: str, tmp_path: Path) -> None:
    module = fit(getattr(lightning_fed.methods, method)(Net, CLASSES, optimizer=momentum)).client_module(1)
    for name, private, network in (("client", True, module.personal), ("server", False, module.backbone)):
        write_safetensors(tmp_path / name, module, private)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["model.safetensors"]
        assert same(load_file(tmp_path / name / "model.safetensors"), dict(network.state_dict()))
    assert not same(dict(module.personal.state_dict()), dict(module.backbone.state_dict()))


@pytest.mark.parametrize("method", ["PFedMe", "PFedSD"])
def test_the_servers_model_is_whole_and_predicts(method: str) -> None:
    run = fit(getattr(lightning_fed.methods, method)(Net, CLASSES, optimizer=momentum)).run
    module, x = run.server_module().eval(), torch.randn(5, 3, 4, 4)
    assert module.shares_whole_model
    assert same(module.shared_state(), run.server.state)
    assert torch.equal(module(x), module.backbone(x))
