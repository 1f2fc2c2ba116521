"""What every method must keep, whatever it does: a new file in lightning_fed/methods is held to all of this."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from often import FEW, OF_THE_CORE, OFTEN, mostly_slow
from tiny import METHODS, data_for, momentum, new_federation, new_method, private_states, same
from torch import Tensor

import lightning_fed.methods
from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core.messages import ClientUpdate, Turn, TurnFailure
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.phased_module import MOMENTS
from lightning_fed.engines import InProcess
from lightning_fed.errors import FederationError
from lightning_fed.methods.families.adapter_module import AdapterModule
from lightning_fed.testing import Check, checks_of
from lightning_fed.testing.subject import Subject

assert {"FedAvg", "PFedLoRA", "Standalone"} <= set(METHODS)


@cache
def subject(name: str) -> Subject:
    """A method; the run that others are compared with is played once."""
    tunes = issubclass(getattr(lightning_fed.methods, name), AdapterModule)  # a transformer, not any network
    return Subject(partial(new_method, name), partial(data_for, name), any_network=not tunes)


SIBLINGS = {"FedAdagrad", "FedAdam", "FedYogi", "FedExLoRA", "FLoRA", "FFALoRA", "FedRolex", "FedHMDelta"}
"""Methods that differ from one that is tried (FedAvgM, FlexLoRA, RoLoRA, HeteroFL, FedHM) in a formula, which has its tests."""

EACH = [(name, check) for name in METHODS for check in checks_of(subject(name))]
TRIED = [(name, check) for name, check in EACH if name in OFTEN or (str(check) not in OF_THE_CORE and name not in SIBLINGS)]


@pytest.mark.parametrize(("name", "check"), mostly_slow(EACH, TRIED), ids=str)
def test_every_method(name: str, check: Check) -> None:
    check()


class Converting(InProcess):
    """The last client of a round sends something else than it was asked for."""

    def run(self, turns: Iterable[Turn]) -> Iterator[ClientUpdate | TurnFailure]:
        updates = list(super().run(turns))
        last = updates[-1]
        assert isinstance(last, ClientUpdate)
        state = {key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in last.state.items()}
        yield from [*updates[:-1], replace(last, state=state or {"new": torch.zeros(1)})]


class Start(FederationCallback):
    """Keeps the server's state from before the first round."""

    def on_fit_start(self, run: RunView) -> None:
        self.state = {key: tensor.clone() for key, tensor in run.server.state_dict().items()}


@pytest.mark.parametrize("name", mostly_slow(METHODS, FEW))
def test_an_override_of_the_loss_is_what_is_learned(name: str) -> None:
    """Whatever a method does with the loss of a batch, it is the one of its subclass."""
    method, called = getattr(lightning_fed.methods, name), []

    def client_loss(self: FederatedModule, batch: object) -> Tensor:
        called.append(name)
        return method.client_loss(self, batch) * 2

    model = new_method(name)
    model.__class__ = type(f"{name}Twice", (method,), {"client_loss": client_loss})  # the command line finds methods by their names
    history = new_federation(1, participation=0.7, evaluate_every=0).fit(model, subject(name).new_data())
    federation, *_ = subject(name).recorded
    changed, plain = ({k: v for k, v in row.items() if k.startswith("train/")} for row in (history[0], federation.run.history[0]))
    assert called
    assert changed.keys() == plain.keys()
    assert any(changed[key] != pytest.approx(value) for key, value in plain.items())


FRESH = {"FedHM", "FedHMDelta", "FedHMLoRA", "FedHMLoRADelta", "FedRolex", "SplitMix", "SLoRA", "FLoRA", "FlexLoRA", "FedNova"}
"""Methods whose clients train other tensors in each turn, of which no moments are left; and one whose steps must weigh what they do
from zero.
"""


@pytest.mark.parametrize("name", mostly_slow(METHODS, FEW))
def test_rounds_may_be_counted_in_steps_and_moments_stay(name: str) -> None:
    if name == "FedDecomp":
        with pytest.raises(FederationError, match="FedDecomp got steps=2, but its two phases are counted in lora_epochs"):
            new_method(name, steps=2)
        return
    model = new_method(name, steps=2)
    federation = new_federation(2, evaluate_every=0)
    federation.fit(model, subject(name).new_data())
    assert 2 in [phase.steps for phase in federation.run.model.phases()]
    if name in FRESH:
        with pytest.raises((TypeError, FederationError), match="persistent"):
            new_method(name, persistent=True)
        return
    options = {"option": "I"} if name == "SCAFFOLD" else {}  # II is for plain SGD
    model = new_method(name, persistent=True, optimizer=momentum, **options)
    federation.fit(model, subject(name).new_data())
    if not model.centralized:
        assert any(key.startswith(MOMENTS) for state in private_states(federation).values() for key in state)


@pytest.mark.parametrize("name", mostly_slow(METHODS, FEW))
def test_an_update_of_another_kind_is_refused_with_its_client_and_changes_nothing(name: str) -> None:
    start = Start()
    federation = new_federation(1, engine=Converting(), evaluate_every=0, callbacks=[start])
    data = data_for(name, num_clients=3, size=100)
    who = -1 if getattr(lightning_fed.methods, name).centralized else 2
    with pytest.raises(FederationError, match=rf"^The update of client {who} (has .* of torch.float16, expected|holds 'new')"):
        federation.fit(new_method(name), data)
    assert same(federation.run.server.state_dict(), start.state)
