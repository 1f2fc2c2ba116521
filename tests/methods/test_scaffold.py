"""SCAFFOLD against its paper."""

from functools import partial
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import CLASSES, INFO, Net, NoisyNet, Recording, momentum, new_data, new_trainer, private_states, same, sgd
from tiny_rounds import Bowls, UniformFedAvg, fit
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from lightning_fed.core import FineTuning
from lightning_fed.core.messages import Broadcast
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import IID
from lightning_fed.engines.compression import Compression
from lightning_fed.engines.turn_loop import QUIET
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import SCAFFOLD, FedAvg
from lightning_fed.methods.scaffold import CONTROL
from lightning_fed.tensors import State, count_bytes, count_floats

fit = partial(fit, rounds=3)


def controls(private: State) -> State:
    """A client's control variate, by name of the parameter."""
    return {
        name.removeprefix("own_control.").replace("/", "."): t for name, t in private.items() if name.startswith("own_control.")
    }


def split(state: State) -> tuple[State, State]:
    """What travels: the network, and the control variates by name of the parameter."""
    own = {name.removeprefix(CONTROL): t for name, t in state.items() if name.startswith(CONTROL)}
    return {name: t for name, t in state.items() if not name.startswith(CONTROL)}, own


def first_broadcast(network: type[Net]) -> State:
    engine = Recording()
    fit(SCAFFOLD(network, CLASSES, epochs=0), rounds=1, engine=engine)
    return engine.turns[0].broadcast.state


def assert_c_is_the_mean(federation: Federation) -> None:
    """Of the control variates of all who may take part, those that never did included, whose is zero."""
    _, c = split(federation.run.server.state_dict())
    each = [controls(state) for state in private_states(federation).values()]
    assert any(tensor.abs().max() > 1e-3 for tensor in c.values())
    for name, tensor in c.items():
        torch.testing.assert_close(
            tensor, sum(own[name] for own in each) / len(federation.run.eligible_clients), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("participation", mostly_slow([1.0, 0.4], often={0.4}))
@pytest.mark.parametrize("rounds", mostly_slow([1, 2, 5], often={2}))
def test_c_is_the_mean_of_all_clients(option: Any, participation: float, rounds: int) -> None:
    model = SCAFFOLD(Net, CLASSES, option, optimizer=sgd)
    assert_c_is_the_mean(fit(model, new_data(5, 200), rounds=rounds, participation=participation))


def test_with_weights_by_examples_c_is_by_how_much_the_model_moved() -> None:
    """As in FLamby: both means weigh clients by their examples, and with everybody there c is (x - x⁺) / ηK."""
    first, second = (
        split(fit(SCAFFOLD(Net, CLASSES, optimizer=sgd, steps=3, weighting="examples"), rounds=rounds).run.server.state_dict())
        for rounds in (1, 2)
    )
    for name, control in second[1].items():
        torch.testing.assert_close(control, (first[0][name] - second[0][name]) / (0.1 * 3), rtol=1e-4, atol=1e-5)
    plain = fit(FedAvg(Net, CLASSES, sgd, steps=3), rounds=1).run.server.state_dict()
    assert same(first[0], plain)


def test_who_may_not_take_part_is_not_counted() -> None:
    assert_c_is_the_mean(fit(SCAFFOLD(Net, CLASSES, optimizer=sgd), new_data(5, 200), rounds=2, eligible_clients=[1, 3]))


def test_c_is_the_mean_of_all_clients_after_a_run_was_continued() -> None:
    for rounds in (2, 4):
        federation = fit(SCAFFOLD(Net, CLASSES, optimizer=sgd), new_data(5, 200), rounds=rounds, participation=0.4, run_dir="runs")
        assert_c_is_the_mean(federation)


@pytest.mark.parametrize("option", ["I", "II"])
def test_the_first_round_is_fedavgs_with_equal_weights_bit_for_bit(option: Any) -> None:
    ours = fit(SCAFFOLD(NoisyNet, CLASSES, option, optimizer=sgd, epochs=2), rounds=1)
    theirs = fit(UniformFedAvg(NoisyNet, CLASSES, sgd, epochs=2), rounds=1)
    assert same(split(ours.run.server.state_dict())[0], theirs.run.server.state_dict())
    assert ours.run.history[0]["train/local_loss"] == theirs.run.history[0]["train/local_loss"]


@pytest.mark.often(1)
@pytest.mark.parametrize("rate", [0.5, 8.0])
def test_the_server_steps_by_its_rate(rate: float) -> None:
    """x + η_g (mean y - x); batch norm's buffers are the mean all the same: a variance that was stepped could be negative."""
    whole, stepped = (fit(SCAFFOLD(NoisyNet, CLASSES, server_lr=lr, optimizer=sgd), rounds=1) for lr in (1.0, rate))
    start = split(first_broadcast(NoisyNet))[0]
    for name, tensor in split(stepped.run.server.state_dict())[0].items():
        full = whole.run.server.state_dict()[name]
        expected = start[name] + rate * (full - start[name]) if CONTROL + name in stepped.run.server.state_dict() else full
        torch.testing.assert_close(tensor, expected)


# ---------------------------------------------------------------------------------------------------- two quadratic clients

RATE, STEPS = 0.1, 4


class BowlScaffold(Bowls, SCAFFOLD):
    pass


class BowlFedAvg(Bowls, UniformFedAvg):
    pass


def end(model: FederatedModule) -> float:
    """The number after many rounds of 4 steps each."""
    data = new_data(2, 40, batch_size=4, partition=IID())
    assert [len(data.client(client).train_dataloader()) for client in (0, 1)] == [STEPS, STEPS]
    federation = fit(model, data, rounds=50)
    return federation.run.server.state_dict()["backbone.head.bias"][0].item()


@pytest.mark.parametrize("option", mostly_slow(["I", "II"], often={"II"}))
def test_unlike_fedavg_it_finds_the_optimum_of_the_mean(option: Any) -> None:
    """FedAvg stops where the clients' drifts cancel, which is elsewhere."""
    rate = partial(torch.optim.SGD, lr=RATE)
    drift = [1 - (1 - RATE * h) ** STEPS for h in Bowls.curvatures]
    biased = sum(d * w for d, w in zip(drift, Bowls.optima, strict=True)) / sum(drift)
    assert abs(biased - Bowls.optimum()) > 0.2
    assert end(BowlFedAvg(Net, CLASSES, rate)) == pytest.approx(biased, abs=1e-4)
    assert end(BowlScaffold(Net, CLASSES, option, optimizer=rate)) == pytest.approx(Bowls.optimum(), abs=1e-4)


# ------------------------------------------------------------------------------------------------------------ on the wire


def test_what_is_sent_back_is_c_and_the_clients_change() -> None:
    """The changes add up to the client's control variate over its turns."""
    engine = Recording()
    federation = fit(SCAFFOLD(Net, CLASSES, optimizer=sgd), engine=engine)
    for client, private in private_states(federation).items():
        fits = [(turn, update) for turn, update in engine.fits() if update.client == client]
        for name, own in controls(private).items():
            changes = [update.state[CONTROL + name] - turn.broadcast.state[CONTROL + name] for turn, update in fits]
            torch.testing.assert_close(sum(changes), own, rtol=1e-4, atol=1e-6)
            assert not torch.equal(changes[-1], own)


def test_entries_that_were_not_sent_leave_c_near_the_mean_of_the_clients() -> None:
    """What is made sparse is the change of a control variate, so that errors are those of error feedback, and do not grow."""
    model = SCAFFOLD(Net, CLASSES, optimizer=sgd)
    federation = fit(model, new_data(3, 120), rounds=10, compression=Compression(up="topk", share=0.05))
    _, c = split(federation.run.server.state_dict())
    each = [controls(state) for state in private_states(federation).values()]
    apart = sum((tensor - sum(own[name] for own in each) / len(each)).norm() ** 2 for name, tensor in c.items()) ** 0.5
    size = sum(sum(own[name].norm() for name in c) for own in each) / len(each)
    assert apart < size / 2


def test_twice_the_parameters_travel_each_way_and_buffers_once() -> None:
    ours, plain = SCAFFOLD(NoisyNet, CLASSES).for_client(INFO), FedAvg(NoisyNet, CLASSES).for_client(INFO)
    parameters = sum(p.numel() for p in plain.parameters())
    assert count_floats(ours.update_state()) == count_floats(plain.update_state()) + parameters
    assert count_bytes(ours.update_state()) == count_bytes(plain.update_state()) + 4 * parameters
    row = fit(SCAFFOLD(Net, CLASSES, optimizer=sgd), rounds=1).run.history[0]
    assert row["traffic/down_parameters"] == row["traffic/up_parameters"] == 3 * 2 * sum(p.numel() for p in Net().parameters())


def test_a_broadcast_without_control_variates_is_refused() -> None:
    module = SCAFFOLD(Net, CLASSES).for_client(INFO)
    with pytest.raises(FederationError, match=r"The payload for SCAFFOLD lacks 'control/backbone\.fc1\.bias' and 5 more tensors"):
        module.load_broadcast(Broadcast(module.shared_state()))


# ------------------------------------------------------------------------------------------------------------ the client


def moved(module: SCAFFOLD) -> None:
    """Control variates of noticeable size."""
    for controls in (module.control, module.own_control):
        controls.update({name: torch.randn_like(tensor) for name, tensor in controls.items()})


def test_the_correction_is_of_the_gradient_and_not_of_the_loss() -> None:
    module, batch = SCAFFOLD(Net, CLASSES).for_client(INFO), (torch.randn(8, 3, 4, 4), torch.arange(8) % CLASSES)
    moved(module)
    corrected, plain = module.corrected_loss(batch), module.client_loss(batch)
    assert torch.equal(corrected, plain)
    own = dict(module.named_parameters())
    grads = [torch.autograd.grad(loss, list(own.values())) for loss in (corrected, plain)]
    for name, one, other in zip(own, *grads, strict=True):
        torch.testing.assert_close(one - other, module.control[name] - module.own_control[name], rtol=1e-4, atol=1e-5)


def test_gradients_are_clipped_when_they_are_corrected() -> None:
    module = SCAFFOLD(Net, CLASSES, "I", optimizer=sgd, gradient_clip=1e-3).for_client(INFO)
    moved(module)
    before = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    new_trainer(**QUIET, max_epochs=1, limit_train_batches=1, limit_val_batches=0).fit(module, datamodule=new_data().client(1))
    way = torch.nn.utils.parameters_to_vector(module.parameters()).detach() - before
    assert way.norm().item() == pytest.approx(0.1 * 1e-3, rel=1e-3)


class Scheduled(SCAFFOLD):
    """Every step has half the rate of the one before."""

    def client_step(self, batch: Any) -> Tensor:
        loss = super().client_step(batch)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] /= 2
        return loss


def test_option_2_divides_by_the_rates_of_the_steps_that_were_taken() -> None:
    engine, data = Recording(), new_data(3, 120)
    federation = fit(Scheduled(Net, CLASSES, optimizer=sgd), data, rounds=1, engine=engine)
    for turn, update in engine.fits():
        steps = len(data.client(update.client).train_dataloader())
        way = sum(0.1 / 2**step for step in range(steps))
        for name, own in controls(private_states(federation)[update.client]).items():
            torch.testing.assert_close(own, (turn.broadcast.state[name] - update.state[name]) / way, rtol=1e-4, atol=1e-6)
            # At the first turn the change is the control variate.
            assert torch.equal(update.state[CONTROL + name], own)


def test_option_1_is_the_gradient_where_the_round_began() -> None:
    """Over all the client's examples that the loss does not ignore, whatever the batches; its pass is counted."""
    engine, data, loss = Recording(), new_data(3, 120), nn.CrossEntropyLoss(ignore_index=0)
    federation = fit(SCAFFOLD(Net, CLASSES, "I", optimizer=sgd, epochs=2, loss=loss), data, rounds=1, engine=engine)
    for turn, update in engine.fits():
        module = FedAvg(Net, CLASSES).for_client(turn.client)
        module.load_shared_state(split(turn.broadcast.state)[0])
        of_client = data.client(turn.client.id)
        inputs, labels = of_client.data[of_client.splits[0]]
        grads = torch.autograd.grad(loss(module(inputs), labels), list(module.parameters()))
        own = controls(private_states(federation)[update.client])
        for (name, _), grad in zip(module.named_parameters(), grads, strict=True):
            torch.testing.assert_close(own[name], grad, rtol=1e-4, atol=1e-6)
    other = fit(SCAFFOLD(Net, CLASSES, "II", optimizer=sgd, epochs=2, loss=loss), data, rounds=1)
    costs = [run.run.history[0]["compute/flops"] for run in (federation, other)]
    assert costs[0] == pytest.approx(costs[1] * 3 / 2)  # two epochs of steps, and a pass that costs as much as one


def test_without_a_step_nothing_changes() -> None:
    federation = fit(SCAFFOLD(NoisyNet, CLASSES, epochs=0))
    x, c = split(federation.run.server.state_dict())
    assert same(x, split(first_broadcast(NoisyNet))[0])
    assert all(not tensor.any() for tensor in c.values())


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"optimizer": momentum}, "momentum, weight_decay"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)}, "weight_decay"),
        ({"optimizer": torch.optim.Adam}, "Adam"),
        ({"gradient_clip": 1.0}, "gradient_clip=1.0"),
    ],
)
def test_option_2_is_for_plain_sgd(options: dict[str, Any], what: str) -> None:
    with pytest.raises(FederationError, match=f"option II is for plain SGD, but got {what}: .* Set option to I"):
        SCAFFOLD(Net, CLASSES, **options)
    fit(SCAFFOLD(Net, CLASSES, "I", **options), rounds=1)


def in_groups(parameters: Any) -> torch.optim.SGD:
    parameters = list(parameters)
    return torch.optim.SGD([{"params": parameters[:1], "lr": 0.1}, {"params": parameters[1:], "lr": 0.01}])


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"optimizer": sgd, "lr_scheduler": partial(OneCycleLR, max_lr=0.1, total_steps=5)}, "momentum"),
        ({"optimizer": in_groups}, "groups with different lr"),
    ],
)
def test_steps_of_option_2_are_of_plain_sgd(options: dict[str, Any], what: str) -> None:
    """What the optimizer does not have before the first step."""
    with pytest.raises(FederationError, match=f"option II is for plain SGD, but got {what}: .* cycle_momentum"):
        fit(SCAFFOLD(Net, CLASSES, steps=1, **options), rounds=1)
    fit(SCAFFOLD(Net, CLASSES, "I", steps=1, **options), rounds=1)


def test_fine_tuning_may_have_another_optimizer() -> None:
    tuned = FineTuning(steps=1, optimizer=momentum)
    fit(SCAFFOLD(Net, CLASSES, optimizer=sgd, steps=1, fine_tuning=tuned), rounds=1, evaluate_every=1)
