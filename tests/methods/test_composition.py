"""Methods with one another's parts: adapters under rules of the server, fine-tuning after any of them."""

from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import CLASSES, METHODS, Net, data_for, momentum, new_data, new_federation, new_method, private_states, same, sgd
from tiny_rounds import fit

from lightning_fed.core import FederationError, FineTuning
from lightning_fed.core.server import UPDATE
from lightning_fed.data import IID
from lightning_fed.methods import FedAvg, FedDyn, FedNova
from lightning_fed.methods.fednova import STEPS, total_weight
from lightning_fed.models import Adapters
from lightning_fed.tensors import State
from lightning_fed.testing.watch import Recording

ADAPTERS = Adapters(r=2, lora_alpha=4, target_modules=["fc1", "fc2"])


def test_fednova_over_adapters_is_fedavg_over_them_where_all_take_as_many_steps() -> None:
    options: dict[str, Any] = {"optimizer": momentum, "adapters": ADAPTERS}
    states = [
        fit(method(Net, CLASSES, **options), new_data(3, 120, partition=IID()), 2).run.server.state for method in (FedAvg, FedNova)
    ]
    states[1].pop(STEPS)
    assert any("lora_A" in name for name in states[0])
    assert same(*states)


def test_fednova_weights_what_adapters_learned_by_steps() -> None:
    """Two rounds, so that it begins with adapters that are not zero; clients take 1 to 5 steps."""
    engine = Recording()
    method, data = FedNova(Net, CLASSES, optimizer=momentum, adapters=ADAPTERS), new_data(4, 160)
    before = fit(method, data, 1).run.server.state
    after = fit(FedNova(Net, CLASSES, optimizer=momentum, adapters=ADAPTERS), data, 2, engine=engine).run.server.state
    updates = engine.trained[-4:]
    steps = [int(update.state[STEPS]) for update in updates]
    assert len(set(steps)) > 1
    share = torch.tensor([update.num_examples for update in updates], dtype=torch.double)
    share, weight = share / share.sum(), torch.tensor([total_weight(n, 0.9) for n in steps], dtype=torch.double)
    for name in before.keys() - {STEPS}:
        changes = torch.stack([before[name].double() - update.state[name].double() for update in updates]).flatten(1)
        expected = before[name].double() - ((share @ weight) * (share / weight) @ changes).view_as(before[name])
        torch.testing.assert_close(after[name].double(), expected, rtol=1e-4, atol=1e-6)


def test_feddyns_state_over_adapters_is_of_what_learns_and_h_is_everybodys_mean() -> None:
    federation = fit(FedDyn(Net, CLASSES, optimizer=sgd, adapters=ADAPTERS), new_data(5, 200), 3, participation=0.4)
    state, own = federation.run.server.state_dict(), private_states(federation)
    h = {name.removeprefix(UPDATE): tensor for name, tensor in state.items() if name.startswith(UPDATE)}
    learns = {name for name, _ in federation.client_module(0).named_parameters() if "lora_" in name or ".head." in name}
    assert h.keys() == learns
    for name, tensor in h.items():
        mean = sum(g[f"own_gradient.{name.replace('.', '/')}"] for g in own.values()) / 5
        torch.testing.assert_close(tensor, mean, rtol=1e-4, atol=1e-6)
    assert max(tensor.abs().max() for tensor in h.values()) > 1e-3


def fine_tuned(name: str, fine_tuning: FineTuning | None) -> tuple[State, dict[int, State], dict[str, float]]:
    federation = new_federation(2)
    federation.fit(new_method(name, **({} if fine_tuning is None else {"fine_tuning": fine_tuning})), data_for(name))
    return federation.run.server.state_dict(), private_states(federation), federation.run.history[-1]


def can_be_fine_tuned(name: str) -> bool:
    try:
        new_method(name, fine_tuning=FineTuning(steps=2))
    except FederationError:
        return False
    return True


TUNED = [name for name in METHODS if can_be_fine_tuned(name)]


@pytest.mark.parametrize("name", mostly_slow(TUNED, often={"FedNova", "FedDyn", "SCAFFOLD", "PFedMe"}))
def test_any_method_is_fine_tuned_for_a_measurement_alone(name: str) -> None:
    """Server and clients end as they do without; what is measured is another model, which costs FLOPs."""
    (state, private, tuned), (plain_state, plain_private, plain) = (fine_tuned(name, FineTuning(steps=n)) for n in (2, 0))
    assert same(state, plain_state)
    assert private.keys() == plain_private.keys()
    assert all(same(own, plain_private[client]) for client, own in private.items())
    assert tuned["fine_tune/flops"] > plain.get("fine_tune/flops", 0)
    assert tuned["after/test_loss/mean"] != plain["after/test_loss/mean"]


@pytest.mark.parametrize("name", ["FedALA", "FedAS"])
def test_what_a_method_does_before_an_evaluation_does_not_depend_on_when_clients_are_fine_tuned(name: str) -> None:
    *_, plain = fine_tuned(name, None)
    *_, last = fine_tuned(name, FineTuning(steps=2, when="last"))
    always = plain.keys() - {"fine_tune/flops", "fine_tune/total_flops"}
    assert {key: last[key] for key in always if "seconds" not in key} == {key: plain[key] for key in always if "seconds" not in key}
    assert last["fine_tuned/test_loss/mean"] != plain["after/test_loss/mean"]
