"""FedProto against its paper."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from often import mostly_slow
from tiny import CLASSES, Net, NoisyNet, WideNet, momentum, new_data, photos, private_states, same, same_states
from tiny_loops import batches, drawn, step, stripped
from tiny_rounds import changing_state, fit
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_fed.core.class_rows import COUNTS, LABELS, ROWS, pack_rows
from lightning_fed.core.messages import Broadcast, ClientUpdate
from lightning_fed.data import ClassesPerClient, InMemory
from lightning_fed.errors import FederationError
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import FedProto, Standalone
from lightning_fed.methods.fedproto import PrototypeServer
from lightning_fed.models import CNN1, CNN5
from lightning_fed.tensors import State

TWO = [Net, WideNet]


fit = partial(fit, rounds=3)


def prototypes(federation: Federation) -> State:
    """The server's, by class."""
    return by_class(federation.run.server.state)


def by_class(state: State) -> State:
    return {str(label): state["prototypes"][label] for label in state["known"].nonzero().flatten().tolist()}


def packed(rows: dict[int, list[float]], counts: list[int] | None = None) -> State:
    """What travels: of some of the classes a row each."""
    table, present = torch.zeros(CLASSES, len(next(iter(rows.values())))), torch.zeros(CLASSES, dtype=torch.bool)
    for label, row in rows.items():
        table[label], present[label] = torch.tensor(row), True
    return pack_rows(table, present, None if counts is None else torch.tensor(counts))


def training_data(data: InMemory, client: int) -> tuple[Tensor, Tensor]:
    of_client = data.client(client)
    inputs, labels = of_client.data[of_client.splits[0]]
    return inputs, labels


# ------------------------------------------------------------------------------------- the algorithm, once more, bare


@pytest.mark.parametrize(
    ("weighting", "source"),
    mostly_slow(
        product(["examples", "uniform"], ["trained", "last_epoch"]), often={("examples", "trained"), ("uniform", "last_epoch")}
    ),
)
def test_rounds_are_those_of_a_bare_loop(weighting: Any, source: Any) -> None:
    data, epochs, lam = new_data(3, 120), 2, 5.0
    method = FedProto(TWO, CLASSES, lam, prototypes=source, weighting=weighting, optimizer=momentum, epochs=epochs)
    federation = fit(method, data)

    template = drawn(FedProto(TWO, CLASSES))
    networks: list[nn.Module] = [template.for_client(client).backbone for client in data.clients]
    center: dict[int, Tensor] = {}
    for round in (1, 2, 3):
        sums: dict[int, Tensor] = {}
        weights: dict[int, int] = {}
        for k, network in enumerate(networks):
            optimizer = momentum(network.parameters())
            for epoch in range(epochs):
                seen: dict[int, list[Tensor]] = {}
                for x, y in batches(data, k, round, epoch):
                    z = network.encode(x)
                    apart = z.new_zeros(())
                    for row, label in zip(z, y.tolist(), strict=True):
                        seen.setdefault(label, []).append(row.detach())
                        if label in center:
                            apart = apart + (row - center[label]).square().sum()
                    step(optimizer, cross_entropy(network.head(z), y) + lam * apart / z.numel())
            if source == "trained":
                inputs, labels = training_data(data, k)
                with torch.no_grad():
                    seen = {label: list(network.encode(inputs[labels == label])) for label in labels.unique().tolist()}
            for label, rows in seen.items():
                weight = len(rows) if weighting == "examples" else 1
                weights[label] = weights.get(label, 0) + weight
                sums[label] = sums.get(label, 0) + weight * torch.stack(rows).double().mean(0)
        center |= {label: (total / weights[label]).float() for label, total in sums.items()}

    ours = prototypes(federation)
    assert ours.keys() == {str(label) for label in center}
    for label, tensor in center.items():
        torch.testing.assert_close(ours[str(label)], tensor, rtol=1e-4, atol=1e-6)
    for k, network in enumerate(networks):
        kept = federation.run.store.get(k)
        torch.testing.assert_close(stripped(kept), network.state_dict(), rtol=1e-4, atol=1e-6)


def test_a_module_of_the_server_has_its_prototypes() -> None:
    federation = fit(FedProto(TWO, CLASSES, optimizer=momentum))
    module = federation.server_module()
    assert isinstance(module, FedProto)
    assert module.known.equal(federation.run.server.state["known"])
    assert module.rows[module.known].equal(federation.run.server.state["prototypes"][module.known])


@pytest.mark.parametrize("source", ["trained", "last_epoch"])
def test_without_the_term_it_is_standalone_and_prototypes_flow_all_the_same(source: Any) -> None:
    ours = fit(FedProto([NoisyNet], CLASSES, 0.0, prototypes=source, optimizer=momentum, epochs=2), participation=0.7)
    theirs = fit(Standalone([NoisyNet], CLASSES, momentum, epochs=2), participation=0.7)
    assert same_states(private_states(ours), private_states(theirs))
    assert [row["train/local_loss"] for row in ours.run.history] == [row["train/local_loss"] for row in theirs.run.history]
    for client, results in theirs.run.results.items():
        assert results.items() <= ours.run.results[client].items()
    assert prototypes(ours)


# --------------------------------------------------------------------------------------------------------- the prototypes


def test_of_one_example_it_is_its_features() -> None:
    """Exactly, also with batch norm and dropout: the trained network in eval mode."""
    images = torch.randn(12, 3, 4, 4)
    labels = torch.tensor([0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1])
    data = InMemory(images, labels, CLASSES, num_clients=1, val_share=0, test_share=0.25, batch_size=4)
    federation = fit(FedProto(NoisyNet, CLASSES, optimizer=momentum), data, rounds=1)
    inputs, targets = training_data(data, 0)
    assert (targets == 0).sum() == 1
    network = federation.client_module(0).backbone.eval()
    with torch.no_grad():
        features = network.encode(inputs)
    assert torch.equal(prototypes(federation)["0"], features[targets == 0][0])
    torch.testing.assert_close(prototypes(federation)["1"], features[targets == 1].mean(0))
    assert prototypes(federation).keys() == {"0", "1"}  # classes that nobody has are absent


def update_of(client: int, center: dict[int, tuple[list[float], int]], counts: bool = True) -> ClientUpdate:
    numbers = [center.get(label, ([], 0))[1] for label in range(CLASSES)]
    return ClientUpdate(client, 10, packed({label: row for label, (row, _) in center.items()}, numbers if counts else None))


SENT = [{0: ([1.0, 2.0], 3), 2: ([4.0, 0.0], 1)}, {0: ([5.0, 2.0], 1)}, {2: ([0.0, 8.0], 3)}]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_weights_sum_to_1_over_those_who_have_the_class_in_any_order(order: tuple[int, ...]) -> None:
    for weighting, expected in (("examples", ([2.0, 2.0], [1.0, 6.0])), ("uniform", ([3.0, 2.0], [2.0, 4.0]))):
        server = PrototypeServer(torch.zeros(4, 2), weighting)
        server.aggregate(update_of(client, SENT[client], weighting == "examples") for client in order)
        assert same(by_class(server.state), {"0": torch.tensor(expected[0]), "2": torch.tensor(expected[1])})


def test_a_class_that_nobody_sends_keeps_its_prototype() -> None:
    server = PrototypeServer(torch.zeros(4, 2), "examples")
    server.aggregate([update_of(0, SENT[0])])
    server.aggregate([update_of(1, SENT[1])])
    server.aggregate([])
    assert same(by_class(server.state), {"0": torch.tensor([5.0, 2.0]), "2": torch.tensor([4.0, 0.0])})


def test_the_servers_state_has_one_shape_in_all_rounds() -> None:
    server, other = (PrototypeServer(torch.ones(4, 2), "examples") for _ in range(2))
    empty = server.state_dict()
    server.aggregate(update_of(client, sent) for client, sent in enumerate(SENT))
    state = server.state_dict()
    assert {name: (t.shape, t.dtype) for name, t in state.items()} == {name: (t.shape, t.dtype) for name, t in empty.items()}
    other.load_state_dict(state)
    assert same(other.state, server.state)
    other.load_state_dict(empty)
    assert other.broadcast(new_data().clients[0]).state == {}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda state: state | {COUNTS: 0 * state[COUNTS]}, r"'classes/counts' down to 0, expected at least 1"),
        (lambda state: state | {COUNTS: -3 * state[COUNTS]}, r"'classes/counts' down to -\d+, expected at least 1"),
        (lambda state: state | {COUNTS: state[COUNTS].float()}, r"'classes/counts' of torch\.float32, expected torch\.int32"),
        (lambda state: state | {LABELS: torch.tensor([0], dtype=torch.uint8)}, r"of shape \(4, 6\), expected \(0, 6\)"),
        (lambda state: state | {LABELS: state[LABELS].float()}, r"of shape \(4, 6\), expected \(0, 6\)"),
        (lambda state: state | {"classes/4": state[ROWS][0]}, r"holds 'classes/4', which does not belong there"),
        (lambda state: {name: state[name] for name in (ROWS, LABELS)}, r"lacks 'classes/counts'"),
        (lambda state: state | {ROWS: torch.zeros(4, 3)}, r"'classes/rows' of shape \(4, 3\), expected \(4, 6\)"),
        (lambda state: state | {ROWS: torch.full((4, 6), torch.nan)}, r"holds NaN or infinity in 'classes/rows'"),
    ],
)
def test_what_is_no_prototype_is_refused_with_its_client(change: Any, complaint: str) -> None:
    with pytest.raises(FederationError, match=rf"^The update of client 0 .*{complaint}"):
        fit(FedProto(Net, CLASSES), rounds=1, engine=changing_state(change))


def test_networks_of_other_widths_are_refused() -> None:
    """Before the first round; and whatever comes all the same."""
    with pytest.raises(FederationError, match=r"^Client 1's network, Net, has 6 features, but Net has 3: choose networks"):
        fit(FedProto([partial(Net, width=0.5), Net], CLASSES))
    module = FedProto(Net, CLASSES).for_client(new_data().clients[0])
    with pytest.raises(FederationError, match=r"^The payload for FedProto has 'classes/rows' of shape \(1, 3\), expected \(1, 6\)"):
        module.load_broadcast(Broadcast(packed({0: [0.0] * 3})))


# ------------------------------------------------------------------------------------------------------------ on the wire


def test_traffic() -> None:
    """Of two of 10 classes and 500 features: 1,000 floats, ten bits and two counts up; in the end 5,000 and ten bits down."""
    data = photos(10, 5, copies=6, partition=ClassesPerClient(2), batch_size=60)
    for weighting, extra in (("examples", 2 * 4), ("uniform", 0)):
        federation = fit(FedProto([CNN5, CNN1], weighting=weighting), data, rounds=2)  # type: ignore[arg-type]
        first, second = federation.run.history
        assert first["traffic/down_parameters"] == first["traffic/down_bytes"] == 0
        assert second["traffic/down_parameters"] == 5 * 5_000
        assert second["traffic/down_bytes"] == 5 * (4 * 5_000 + 2)
        for row in (first, second):
            assert row["traffic/up_parameters"] == 5 * 1_000
            assert row["traffic/up_bytes"] == 5 * (4 * 1_000 + 2 + extra)


# ------------------------------------------------------------------------------------------------------------ predicting


def with_prototypes(**options: Any) -> FedProto:
    """A client with classes 0 and 1, that knows the prototypes of 0, 2 and 3."""
    info = replace(new_data().clients[0], label_counts=(5, 5, 0, 0))
    module = FedProto(Net, CLASSES, **options).for_client(info)
    module.load_broadcast(Broadcast(packed({label: [float(label)] * 6 for label in (0, 2, 3)})))
    return module.eval()


def test_what_an_earlier_broadcast_brought_is_not_known_any_more() -> None:
    module = with_prototypes(predict="prototypes")
    module.load_broadcast(Broadcast(packed({2: [2.0] * 6})))
    with torch.no_grad():
        assert (module(torch.randn(20, 3, 4, 4)).argmax(1) == 2).all()


def test_large_features_of_a_class_without_a_prototype_add_nothing() -> None:
    """Their squares are infinite."""
    module, x, y = with_prototypes(), 1e25 * torch.randn(5, 3, 4, 4), torch.ones(5, dtype=torch.int64)
    assert module.backbone.encode(x).square().isinf().any()
    torch.testing.assert_close(module.client_loss((x, y)), cross_entropy(module(x), y))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_nearest_prototype_is_predicted(dtype: torch.dtype) -> None:
    """In the precision of the run."""
    module = with_prototypes(predict="prototypes").to(dtype)
    x = torch.randn(20, 3, 4, 4, dtype=dtype)
    with torch.no_grad():
        scores, z = module(x), module.backbone.encode(x)
    for label in (0, 2, 3):
        torch.testing.assert_close(scores[:, label], -(z - label).square().sum(1).sqrt())
    assert (scores[:, 1] == -torch.inf).all()


def test_a_network_in_double_precision_is_measured_by_its_prototypes() -> None:
    class Double(Net):
        def __init__(self, num_classes: int = CLASSES) -> None:
            super().__init__(num_classes)
            self.double()

        def encode(self, x: Tensor, cut: str = "features") -> Tensor:
            return super().encode(x.double(), cut)

    assert fit(FedProto(Double, CLASSES, optimizer=momentum), new_data(2, 60)).run.history


def test_the_clients_own_classes_can_be_the_only_candidates() -> None:
    with torch.no_grad():
        scores = with_prototypes(predict="prototypes", candidates="own")(torch.randn(20, 3, 4, 4))
    assert (scores.argmax(1) == 0).all()
    assert (scores[:, 1:] == -torch.inf).all()


def test_until_there_are_prototypes_the_head_predicts() -> None:
    module = FedProto(Net, CLASSES, predict="prototypes").for_client(new_data().clients[0])
    x = torch.randn(20, 3, 4, 4)
    assert torch.equal(module(x), module.backbone(x))


@pytest.mark.parametrize(("predict", "other"), [("head", "prototype_accuracy"), ("prototypes", "head_accuracy")])
def test_both_ways_to_predict_are_measured(predict: Any, other: str) -> None:
    federation = fit(FedProto(TWO, CLASSES, 1.0, predict, optimizer=momentum))
    for client, results in federation.run.results.items():
        data = federation.run.data.client(client)
        inputs, labels = data.data[data.splits[2]]
        module = federation.client_module(client).eval()
        with torch.no_grad():
            z = module.backbone.encode(inputs)
            by_head = module.backbone.head(z).argmax(1)
            center = torch.stack([prototypes(federation)[str(label)] for label in range(CLASSES)])
            by_prototypes = (z[:, None] - center).square().sum(-1).argmin(1)
        found = {"head": by_head, "prototypes": by_prototypes}
        assert results["test/accuracy"] == pytest.approx((found.pop(predict) == labels).float().mean().item())
        assert results[f"test/{other}"] == pytest.approx((found.popitem()[1] == labels).float().mean().item())
    assert f"after/test_{other}/mean" in federation.run.history[-1]


def test_own_candidates_need_the_clients_labels() -> None:
    module = with_prototypes(predict="prototypes", candidates="own")
    module.client = None
    with pytest.raises(FederationError, match="candidates=own needs the client's label counts"):
        module(torch.randn(2, 3, 4, 4))
