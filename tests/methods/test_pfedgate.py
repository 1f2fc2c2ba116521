"""pFedGate: a private gate that makes a sparse network of everybody's for each batch."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tiny import CLASSES, INFO, Net, NoisyNet, Recording, X, Y, momentum, new_data, new_federation, photos, same, sgd
from tiny_loops import drawn, stripped, turn_of
from tiny_rounds import assert_same_runs, changing_state, fit, phases_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, relu
from torch.nn.utils import clip_grad_norm_

from lightning_fed.data import IID, InMemory
from lightning_fed.errors import FederationError
from lightning_fed.methods import FedAvg, PFedGate
from lightning_fed.methods.pfedgate import MOVED
from lightning_fed.models import CNN1, ResNet8
from lightning_fed.tensors import count_floats, unpack_bits

SMALL: dict[str, Any] = {"input_shape": (3, 4, 4)}


fit = partial(fit, rounds=2)


def random_gate(module: PFedGate) -> None:
    """Importances that differ: a new gate's are all near one half."""
    with torch.no_grad():
        for branch in filter(None, (module.gate.importance, module.gate.scale)):
            branch[2].bias.normal_(std=2.0)


# ------------------------------------------------------------------------------------- the algorithm, once more, bare


def kept_blocks(importance: list[float], sizes: list[int], names: list[str], density: float) -> list[bool]:
    """Which blocks are kept: the first of each tensor, and greedily, linear layers and the rest apart."""
    least = min(max(1 / 5, 0.1), density)
    kept = [place == 0 or names[place] != names[place - 1] for place in range(len(names))]
    free = [place for place, first in enumerate(kept) if not first]  # Net has nothing but linear layers
    room = round((density - least) * sum(sizes[place] for place in free))
    for place in sorted(free, key=lambda place: -round(max(importance[place], least) * 10)):
        if sizes[place] <= room:
            kept[place], room = True, room - sizes[place]
    return kept


@pytest.mark.often(1)
@pytest.mark.parametrize(("density", "absentees"), [(0.5, "left_out"), (0.3, "stale")], ids=["half", "a third"])
def test_rounds_are_those_of_a_bare_loop(density: float, absentees: Any) -> None:
    data, rounds, epochs = new_data(), 2, 2
    slow = partial(torch.optim.SGD, lr=0.05)
    model = PFedGate(Net, CLASSES, [density], **SMALL, absentees=absentees, epochs=epochs, gradient_clip=1.0)
    model.optimizer, model.gate_optimizer = momentum, slow
    federation = fit(model, data, rounds=rounds)

    template = drawn(PFedGate(Net, CLASSES, **SMALL))
    theta: nn.Module = template.backbone
    gates = [template.for_client(client).gate for client in data.clients]
    sizes, names, lengths = [], [], {}
    for name, parameter in theta.named_parameters():
        lengths[name] = -(-parameter.numel() // min(5, parameter.numel()))
        cuts = [len(part) for part in parameter.detach().flatten().split(lengths[name])]
        sizes, names = sizes + cuts, names + [name] * len(cuts)

    for round in range(1, rounds + 1):
        trained: list[nn.Module] = []
        for k, gate in enumerate(gates):
            network = copy.deepcopy(theta)
            optimizers = momentum(network.parameters()), slow(gate.parameters())
            for x, y in turn_of(data, k, round, epochs):
                gamma = gate.importance(gate.norm(x)).sigmoid().mean(dim=0)
                kept = torch.tensor(kept_blocks(gamma.tolist(), sizes, names, density)).float()
                clipped = gamma.clamp(min=0.2)
                coefficients = gamma * kept * (1 + (clipped - clipped.detach()))
                adapted, begin = {}, 0
                for name, parameter in network.named_parameters():
                    parts = parameter.flatten().split(lengths[name])
                    own = [c * part for c, part in zip(coefficients[begin:], parts, strict=False)]
                    adapted[name], begin = torch.cat(own).view(parameter.shape), begin + len(parts)
                h = relu(linear(x.flatten(1), adapted["fc1.weight"], adapted["fc1.bias"]))
                h = relu(linear(h, adapted["fc2.weight"], adapted["fc2.bias"]))
                loss = cross_entropy(linear(h, adapted["head.weight"], adapted["head.bias"]), y)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss.backward()
                for part in (network, gate):
                    clip_grad_norm_(part.parameters(), 1.0)
                for optimizer in optimizers:
                    optimizer.step()
            trained.append(network)
        n = [client.num_train for client in data.clients]
        theta = copy.deepcopy(theta)
        with torch.no_grad():
            for mean, *own in zip(theta.parameters(), *(network.parameters() for network in trained), strict=True):
                mean.copy_(sum(n_k * p.double() for n_k, p in zip(n, own, strict=True)) / sum(n))

    torch.testing.assert_close(stripped(federation.run.server.state), theta.state_dict(), rtol=1e-5, atol=1e-6)
    for k, gate in enumerate(gates):
        state = federation.run.store.get(k)
        assert state.keys() == {f"gate.{name}" for name in gate.state_dict()}
        torch.testing.assert_close(stripped(state, "gate."), gate.state_dict(), rtol=1e-5, atol=1e-6)


# ----------------------------------------------------------------------------------------------------- degenerate cases


class Open(PFedGate):
    """Its gate keeps all blocks, as they are."""

    def coefficients(self, x: Tensor) -> Tensor:
        return torch.ones(len(self.blocks))


@pytest.mark.often(1)
@pytest.mark.parametrize("network", [NoisyNet, partial(ResNet8, width=0.1)], ids=["batch norm, dropout", "ResNet-8"])
def test_an_open_gate_is_fedavg_bit_for_bit(network: Any) -> None:
    options: dict[str, Any] = {"rounds": 2, "participation": 0.7}
    data = None
    if network is not NoisyNet:
        labels = torch.arange(10).repeat(6)
        data = InMemory(torch.randn(60, 3, 32, 32), labels, 10, num_clients=3, partition=IID(), batch_size=8)
        options["rounds"] = 1
    shape = {} if data else SMALL
    classes = 10 if data else CLASSES
    ours = Open(network, classes, **shape, optimizer=momentum, gradient_clip=1.0)
    assert_same_runs(ours, FedAvg(network, classes, momentum, gradient_clip=1.0), "server", "results", data=data, **options)


# -------------------------------------------------------------------------------------------------------- the gradients


@pytest.mark.parametrize("separate", [False, True])
def test_blocks_that_are_not_kept_get_no_gradient(separate: bool) -> None:
    module = PFedGate(Net, CLASSES, [0.4], **SMALL, separate_scale=separate, optimizer=sgd).for_client(INFO)
    random_gate(module)
    kept = module.coefficients(X) > 0
    assert 0 < kept.sum() < len(kept)
    module.client_loss((X, Y)).backward()
    for name, parameter in module.backbone.named_parameters():
        assert parameter.grad is not None
        assert not parameter.grad[~module.blocks.spread(name, kept, parameter.shape)].any()
    before = {name: p.detach().clone() for name, p in module.backbone.named_parameters()}
    sgd(module.backbone.parameters()).step()
    moved = module.blocks.moved(dict(module.backbone.named_parameters()), before)
    assert not moved[~kept].any()
    assert moved.any()


def test_scales_may_have_a_branch_of_their_own() -> None:
    module = PFedGate(Net, CLASSES, [0.5], **SMALL, separate_scale=True).for_client(INFO)
    assert module.gate.scale is not None
    with torch.no_grad():
        module.gate.scale[2].bias.fill_(3.0)
    importance, scale = module.gate(X)
    assert not torch.allclose(importance, scale)
    by = module.coefficients(X)
    assert torch.equal(by[by > 0], scale[by > 0])


# ----------------------------------------------------------------------------------------------------------- what travels


@pytest.mark.parametrize("optimizer", [sgd, momentum])
def test_what_is_not_sent_has_not_moved(optimizer: Any) -> None:
    """The server's mean is that of whole networks, though clients send parts; with momentum and decay everything moves."""
    engine = Recording()
    model = PFedGate(NoisyNet, CLASSES, [0.4], **SMALL, optimizer=optimizer)
    federation = fit(model, new_data(3, 120, batch_size=200), engine=engine, rounds=1)
    names = [name for name, _ in federation.run.model.named_parameters() if name.startswith("backbone.")]
    blocks = federation.run.model.blocks  # type: ignore[union-attr]
    for turn, update in engine.fits():
        moved = unpack_bits(update.state[MOVED], len(blocks))
        if optimizer is momentum:  # of which the bias of batch norm, which begins at zero, has nothing to decay
            assert moved[: blocks.first[names.index("backbone.norm.bias")]].all()
        else:
            assert moved.float().mean() < 0.7
        assert {name: update.state[name].shape for name in names} == {
            f"backbone.{name}": part.shape
            for name, part in blocks.parts({n.removeprefix("backbone."): turn.broadcast.state[n] for n in names}, moved).items()
        }
        assert torch.equal(update.state["backbone.norm.num_batches_tracked"], torch.tensor(1))
    [row] = federation.run.history
    assert (row["server/moved"] > 0.9) == (optimizer is momentum)


@pytest.mark.often(1)
@pytest.mark.parametrize(("separate", "gate"), [(False, 150_687), (True, 301_362)])
def test_traffic_of_cnn1(separate: bool, gate: int) -> None:
    """One batch and plain SGD: what is kept, a byte for eight of the 49 blocks; down, everything."""
    engine = Recording()
    federation = fit(PFedGate(CNN1, separate_scale=separate), photos(10, 2), rounds=1, engine=engine)
    [row] = federation.run.history
    assert row["traffic/down_parameters"] == 2 * 2_621_558
    assert row["traffic/down_bytes"] == 8 * 2_621_558
    ups = [count_floats(update.state) for _, update in engine.fits()]
    assert all(0.4 * 2_621_558 < up <= 1_153_486 for up in ups)
    assert row["traffic/up_parameters"] == sum(ups)
    assert row["traffic/up_bytes"] == 4 * sum(ups) + 2 * 7
    assert all(update.state[MOVED].shape == (7,) for _, update in engine.fits())
    learned = federation.run.model.gate  # type: ignore[union-attr]
    assert sum(p.numel() for p in learned.parameters()) == gate


class Decided(PFedGate):
    """A gate whose means over a batch differ between batches; those of a new one are all near one half."""

    def build(self) -> None:
        super().build()
        nn.init.constant_(self.gate.importance[2].weight, 20.0)


def test_more_batches_are_the_union_of_their_blocks() -> None:
    shares = []
    for batch_size in (200, 8):
        model = Decided(Net, CLASSES, [0.4], **SMALL, optimizer=sgd)
        shares.append(fit(model, new_data(3, 120, batch_size=batch_size), rounds=1).run.history[0]["server/moved"])
    assert shares[0] < shares[1]


@pytest.mark.often(2)
@pytest.mark.parametrize(("participation", "participants"), [(0.4, None), (1.0, None), (1.0, [0, 2]), (0.5, [0, 2])])
def test_who_is_absent_may_count_with_what_everybody_had(participation: float, participants: list[int] | None) -> None:
    """But not who may never take part."""
    engine, who = Recording(), {"participation": participation, "eligible_clients": participants}
    model = PFedGate(Net, CLASSES, **SMALL, absentees="stale", optimizer=momentum)
    federation = fit(model, new_data(), engine=engine, rounds=1, **who)
    left_out = fit(PFedGate(Net, CLASSES, **SMALL, optimizer=momentum), new_data(), rounds=1, **who)
    may = [client.num_train for client in federation.run.clients if participants is None or client.id in participants]
    share = sum(update.num_examples for update in engine.trained) / sum(may)
    start = engine.turns[0].broadcast.state
    for name, tensor in federation.run.server.state.items():
        torch.testing.assert_close(tensor, share * left_out.run.server.state[name] + (1 - share) * start[name])
    assert (share == 1) == (participation == 1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda state: state | {MOVED: state[MOVED][:1]}, MOVED),
        (lambda state: state | {MOVED: torch.zeros_like(state[MOVED])}, "backbone.fc1.weight"),
        (lambda state: {name: tensor for name, tensor in state.items() if name != MOVED}, MOVED),
    ],
)
def test_an_update_that_does_not_fit_its_mask_is_refused(change: Any, named: str) -> None:
    with pytest.raises(FederationError, match=f"The update of client 0 (has|lacks) '{named}'"):
        fit(PFedGate(Net, CLASSES, **SMALL, optimizer=sgd), engine=changing_state(change))


# --------------------------------------------------------------------------------------------------------- the rest of it


def test_predictions_depend_on_the_batch_and_leave_the_gate_as_it_is() -> None:
    module = PFedGate(Net, CLASSES, **SMALL, optimizer=sgd).for_client(INFO)
    random_gate(module)
    module(3 * X)
    module.eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert not torch.allclose(module(X)[:1], module(X[:1]))
    assert same(before, dict(module.state_dict()))


def test_clients_may_have_different_budgets() -> None:
    modules = [PFedGate(Net, CLASSES, [0.3, 1.0], **SMALL).for_client(client) for client in new_data().clients]
    assert [module.density for module in modules] == [0.3, 1.0, 0.3, 1.0]
    assert [bool((module.coefficients(X) > 0).all()) for module in modules] == [False, True, False, True]


def test_gate_and_network_may_take_turns() -> None:
    changed = phases_of(PFedGate(Net, CLASSES, **SMALL, alternating=True, optimizer=momentum, epochs=2))
    assert {phase: {name.split(".")[0] for name in names} for phase, names in changed.items()} == {
        "gate": {"gate"},
        "local": {"backbone"},
    }


def test_the_gate_does_not_change_the_initial_network() -> None:
    gated, plain = PFedGate(Net, CLASSES, **SMALL).for_client(INFO), FedAvg(Net, CLASSES).for_client(INFO)
    assert same(gated.shared_state(), plain.shared_state())


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(FederationError, match=r"built for images of shape \(3, 32, 32\), got \(3, 4, 4\): set input_shape"):
        fit(PFedGate(Net, CLASSES, input_shape=(3, 32, 32)))


def test_the_gate_takes_its_shape_from_the_data() -> None:
    given, found = PFedGate(Net, CLASSES, **SMALL), PFedGate(Net, CLASSES)
    assert same(fit(given).run.server.state, fit(found).run.server.state)
    with pytest.raises(FederationError, match="the data have no known shape: give input_shape"):
        PFedGate(Net, CLASSES).configure_model()
    tables = InMemory(torch.zeros(40, 5), torch.arange(40) % CLASSES, partition=IID(), num_clients=2)
    with pytest.raises(FederationError, match=r"images of one size, and the data have \(5,\): give input_shape"):
        new_federation(1).fit(PFedGate(nn.Linear(5, CLASSES), CLASSES), tables)
