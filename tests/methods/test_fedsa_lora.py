"""FedSA-LoRA: A is averaged, B and the head are each client's own."""

from functools import partial
from pathlib import Path

import pytest
import torch
from tiny import Recording, new_texts, private_states, same
from tiny_adapters import WIDTH, A, B, fit, mean_of, method_of, of_factor, one_batch, sgd

from lightning_fed.core.phased_module import MOMENTS
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedSALoRA, HOMLoRA


def test_a_alone_travels_and_all_else_is_each_clients_own() -> None:
    engine = Recording()
    federation = fit(method_of(FedSALoRA), new_texts(3, 120), engine=engine)
    names = of_factor(dict(federation.run.model.state_dict()), "A").keys()
    for turn, update in engine.fits():
        assert turn.broadcast.state.keys() == update.state.keys() == names
    assert federation.run.server.state_dict().keys() == names
    for way in ("up", "down"):
        assert federation.run.history[0][f"traffic/{way}_parameters"] == 3 * 3 * 2 * WIDTH
    kept = private_states(federation)
    heads = {name for name in kept[0] if name.startswith("backbone.") and ".classifier." in name}
    assert len(heads) == 4
    for client, other in ((0, 1), (1, 2), (0, 2)):
        for name in (B, *heads):
            assert not torch.equal(kept[client][name], kept[other][name])
    own = {name for name in kept[0] if name.startswith("backbone.")}
    assert {name.split("/")[2] for name in kept[0] if name.startswith(MOMENTS)} == {*names, *own}
    assert own == {*heads, *(name.replace("lora_A", "lora_B") for name in names)}
    assert "global/test_accuracy" not in federation.run.history[-1]


def test_a_is_averaged_by_examples() -> None:
    engine = Recording()
    federation = fit(method_of(FedSALoRA), new_texts(3, 120), rounds=1, engine=engine)
    updates = [update for _, update in engine.fits(1)]
    mean = mean_of([update.state for update in updates], [float(update.num_examples) for update in updates])
    assert len({update.num_examples for update in updates}) == 3
    torch.testing.assert_close(federation.run.server.state[A].double(), mean[A], rtol=1e-6, atol=1e-7)


class SharesAll(FedSALoRA):
    """B and the head, too."""

    weighting = "uniform"

    def shared_names(self) -> set[str]:
        return HOMLoRA.shared_names(self)  # type: ignore[arg-type]


def test_with_everything_shared_it_is_homlora() -> None:
    own, homlora = (fit(method_of(method), rounds=3) for method in (SharesAll, HOMLoRA))
    assert same(own.run.server.state_dict(), homlora.run.server.state_dict())


def test_one_client_trains_alone() -> None:
    """Whatever is sent to the server and back."""
    own, homlora = (fit(method_of(method), new_texts(1, 60), rounds=3) for method in (FedSALoRA, HOMLoRA))
    assert same(dict(own.client_module(0).state_dict()), dict(homlora.client_module(0).state_dict()))


def test_the_first_step_leaves_a_where_it_was() -> None:
    """Of gradient descent, while B is zero; and the mean of equal tensors is that tensor."""
    engine = Recording()
    federation = fit(method_of(FedSALoRA, optimizer=sgd, steps=1), one_batch(3), rounds=2, engine=engine)
    first, second = (engine.fits(r)[0][0].broadcast.state for r in (1, 2))
    assert same(first, second)
    assert not same(federation.run.server.state, second)


def test_who_has_never_trained_has_the_pretrained_network() -> None:
    federation = fit(method_of(FedSALoRA), new_texts(3, 120), rounds=1, participation=0.7)
    [absent] = {0, 1, 2} - private_states(federation).keys()
    module = federation.client_module(absent)
    assert same({A: module.state_dict()[A]}, {A: federation.run.server.state[A]})
    assert not module.state_dict()[B].any()


def test_the_server_has_no_model_to_export(tmp_path: Path) -> None:
    module = method_of(FedSALoRA)
    module.configure_model()
    for export in (module.export_adapter, module.export_merged):
        with pytest.raises(FederationError, match=r"The server of FedSALoRA has A, and no B and no head: export a client's"):
            partial(export, tmp_path / "none", private=False)()
    module.export_adapter(tmp_path / "client")
    assert (tmp_path / "client" / "adapter_model.safetensors").exists()
