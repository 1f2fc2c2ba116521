"""FD against its paper, and a loop in plain PyTorch."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import CLASSES, INFO, Net, Recording, WideNet, momentum, new_data, private_states
from tiny_loops import step, turn_of
from tiny_rounds import assert_same_runs, check_update, fit, with_storage
from torch import Tensor
from torch.nn.functional import cross_entropy

from lightning_fed.core.class_rows import COUNTS, LABELS, ROWS, pack_rows, present_classes
from lightning_fed.core.messages import Broadcast, ClientUpdate
from lightning_fed.data import ClassesPerClient
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.errors import FederationError
from lightning_fed.methods import FD, Standalone
from lightning_fed.methods.fd import DistillationServer
from lightning_fed.tensors import State, count_bytes, count_floats, pack_bits

NETWORKS: Any = [Net, WideNet]


fit = partial(fit, rounds=3)


def info(client: int, labels: tuple[int, ...] = (1,) * CLASSES) -> ClientInfo:
    return ClientInfo(client, 1, 0, 0, labels)


def sent(client: int, rows: dict[int, Tensor], counts: dict[int, int] | None = None) -> ClientUpdate:
    """An update with these rows."""
    labels = sorted(rows)
    mask = torch.tensor([label in rows for label in range(CLASSES)])
    numbers = torch.tensor([(counts or {}).get(label, 1) for label in labels], dtype=torch.int32)
    return ClientUpdate(client, 1, {ROWS: torch.stack([rows[label] for label in labels]), LABELS: pack_bits(mask), COUNTS: numbers})


def new_server(tmp_path: Path, **options: Any) -> DistillationServer:
    server = DistillationServer(torch.zeros(CLASSES, CLASSES), **{"weighting": "uniform"} | options)
    with_storage(server, tmp_path)
    return server


def merge(server: DistillationServer, round: int, *updates: ClientUpdate) -> None:
    server.on_round_start(round, [])
    server.aggregate(updates)


def teachers(server: DistillationServer, client: ClientInfo) -> dict[int, Tensor]:
    """What a client is taught, by label."""
    state = server.broadcast(client).state
    labels = present_classes(state, CLASSES).nonzero().flatten().tolist()
    return dict(zip(labels, state.get(ROWS, torch.empty(0)), strict=True))


@pytest.fixture
def rows() -> list[dict[int, Tensor]]:
    """Three clients' mean outputs; label 3 is the third client's alone, label 0 the first two's."""
    torch.manual_seed(5)
    holders = [(0, 1, 2), (0, 2), (1, 2, 3)]
    return [{label: torch.rand(CLASSES).softmax(dim=0) for label in labels} for labels in holders]


# ----------------------------------------------------------------------------------------------------------------- the server


def test_teachers_are_probabilities(rows: list[dict[int, Tensor]], tmp_path: Path) -> None:
    server = new_server(tmp_path)
    tiny = {label: torch.tensor([1.0, 1e-30, 0.0, 0.0]) for label in range(3)}
    merge(server, 1, *(sent(client, own) for client, own in enumerate([*rows, tiny])))
    for client in range(4):
        for row in teachers(server, info(client)).values():
            assert row.min() >= 0
            assert row.sum().item() == pytest.approx(1, abs=1e-6)


def test_a_round_in_which_nobody_arrives_leaves_the_teachers(rows: list[dict[int, Tensor]], tmp_path: Path) -> None:
    server = new_server(tmp_path)
    merge(server, 1, sent(0, rows[0]), sent(1, rows[1]))
    before = teachers(server, info(0))
    merge(server, 2)
    assert all(torch.equal(row, before[label]) for label, row in teachers(server, info(0)).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({LABELS: torch.zeros(3, dtype=torch.uint8)}, "of shape"),
        ({LABELS: torch.zeros(1)}, "of shape"),
        ({ROWS: torch.ones(2, CLASSES)}, r"'classes/rows' of shape \(2, 4\), expected \(3, 4\)"),
        ({COUNTS: torch.ones(3)}, "'classes/counts' of torch.float32, expected torch.int32"),
    ],
)
def test_an_update_that_contradicts_itself_is_refused(
    change: State, message: str, rows: list[dict[int, Tensor]], tmp_path: Path
) -> None:
    server, update = new_server(tmp_path), sent(0, rows[0])
    check_update(update, server.expected_payload(update, Broadcast({})))
    wrong = ClientUpdate(0, 1, update.state | change)
    with pytest.raises(FederationError, match=f"The update of client 0 has .*{message}"):
        check_update(wrong, server.expected_payload(wrong, Broadcast({})))


# ----------------------------------------------------------------------------------------------------------------- the client


def taught(module: FD, rows: dict[int, Tensor]) -> None:
    mask = torch.tensor([label in rows for label in range(CLASSES)])
    module.load_broadcast(Broadcast({ROWS: torch.stack([rows[label] for label in sorted(rows)]), LABELS: pack_bits(mask)}))


def a_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(12, 3, 4, 4), torch.arange(12) % CLASSES


@pytest.mark.parametrize("average", ["batch", "taught"])
def test_labels_without_a_teacher_have_no_second_term(average: Any) -> None:
    module, (x, y) = FD(Net, CLASSES, 0.7, average=average).for_client(INFO), a_batch()
    rows = {1: torch.tensor([0.1, 0.2, 0.3, 0.4]), 3: torch.tensor([0.4, 0.3, 0.2, 0.1])}
    taught(module, rows)
    terms = [
        -(rows[int(label)] * out.log_softmax(dim=0)).sum() for out, label in zip(module(x), y, strict=True) if int(label) in rows
    ]
    second = sum(terms) / (12 if average == "batch" else len(terms))
    torch.testing.assert_close(module.client_loss((x, y)), cross_entropy(module(x), y) + 0.7 * second)


def test_a_batch_without_any_taught_label() -> None:
    module, (x, y) = FD(Net, CLASSES, average="taught").for_client(INFO), a_batch()
    taught(module, {1: torch.ones(CLASSES) / CLASSES})
    keep = y != 1
    torch.testing.assert_close(module.client_loss((x[keep], y[keep])), cross_entropy(module(x[keep]), y[keep]))


# ----------------------------------------------------------------------------------------------------------------- the rounds


@pytest.mark.often(1)
@pytest.mark.parametrize("participation", [0.7, 1.0])
def test_without_the_second_term_it_is_standalone_bit_for_bit(participation: float) -> None:
    ours, theirs = FD(NETWORKS, CLASSES, 0.0, optimizer=momentum, epochs=2), Standalone(NETWORKS, CLASSES, momentum, epochs=2)
    assert_same_runs(ours, theirs, "clients", "results", rounds=3, participation=participation)


def test_a_module_of_the_server_has_no_teacher() -> None:
    module = fit(FD(Net, CLASSES, optimizer=momentum), rounds=2).server_module()
    assert isinstance(module, FD)
    assert not module.known.any()


def test_teachers_of_an_earlier_turn_are_forgotten() -> None:
    module = FD(Net, CLASSES)
    module.configure_model()
    module.load_payload(pack_rows(torch.ones(CLASSES, CLASSES), torch.ones(CLASSES, dtype=torch.bool)))
    assert module.known.all()
    module.load_payload({})
    assert not module.known.any()
    assert not module.rows.any()


def test_clients_without_a_label_in_common_are_standalone_bit_for_bit() -> None:
    """Two clients that have no label in common."""
    data = new_data(2, 120, partition=ClassesPerClient(2), test_share=0.4)
    ours, theirs = FD(NETWORKS, CLASSES, optimizer=momentum), Standalone(NETWORKS, CLASSES, momentum)
    assert_same_runs(ours, theirs, "clients", "results", data=data, rounds=3)


def bare_rounds(initial: list[State], cohorts: list[list[int]], gamma: float, epochs: int, by_examples: bool) -> list[State]:
    """The method once more, from its card: everybody's network after the rounds."""
    data = new_data(3, 120)
    data.setup()
    networks = [NETWORKS[k % 2](CLASSES) for k in range(3)]
    for network, state in zip(networks, initial, strict=True):
        network.load_state_dict({name.removeprefix("backbone."): t for name, t in state.items()})
    means: dict[int, dict[int, tuple[Tensor, int]]] = {}
    for round, cohort in enumerate(cohorts, start=1):
        new: dict[int, dict[int, tuple[Tensor, int]]] = {}
        for k in cohort:
            teacher = {}
            for label in range(CLASSES):
                others = [rows[label] for j, rows in means.items() if j != k and label in rows]
                if others:
                    weights = torch.tensor([count if by_examples else 1 for _, count in others])
                    teacher[label] = (weights / weights.sum()) @ torch.stack([mean for mean, _ in others])
            optimizer = momentum(networks[k].parameters())
            outputs: dict[int, list[Tensor]] = {}
            for x, y in turn_of(data, k, round, epochs):
                logits = networks[k](x)
                loss = cross_entropy(logits, y)
                for out, label in zip(logits, y.tolist(), strict=True):
                    if label in teacher:
                        loss = loss + gamma * cross_entropy(out[None], teacher[label][None]) / len(y)
                    outputs.setdefault(label, []).append(out.detach().softmax(dim=0))
                step(optimizer, loss)
            new[k] = {label: (torch.stack(rows).mean(dim=0), len(rows)) for label, rows in outputs.items()}
        means = new
    return [{f"backbone.{name}": t for name, t in network.state_dict().items()} for network in networks]


@pytest.mark.parametrize(("participation", "weighting"), [(0.7, "uniform"), (1.0, "examples")])
def test_rounds_are_those_of_a_bare_loop(participation: float, weighting: Any) -> None:
    engine = Recording()
    model = FD(NETWORKS, CLASSES, 0.5, weighting=weighting, optimizer=momentum, epochs=2)
    federation = fit(model, participation=participation, engine=engine)
    cohorts = [[turn.client.id for turn, _ in engine.fits(round)] for round in (1, 2, 3)]
    initial = [FD(NETWORKS, CLASSES).for_client(client).private_state() for client in federation.run.clients]
    expected = bare_rounds(initial, cohorts, 0.5, 2, weighting == "examples")
    for client, private in private_states(federation).items():
        torch.testing.assert_close(private, expected[client], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------------- the wire


def test_traffic_of_two_labels_of_ten() -> None:
    """2 × 10 floats each way and no more; up, two counts and ten bits, down ten bits."""
    counts = (3, 0, 0, 0, 2, 0, 0, 0, 0, 0)
    module = FD(Net, 10).for_client(ClientInfo(0, 5, 0, 0, counts))
    module.add_outputs(torch.randn(5, 10), torch.tensor([0, 0, 4, 0, 4]))
    assert (count_floats(module.update_state()), count_bytes(module.update_state())) == (20, 80 + 8 + 2)
    server = DistillationServer(torch.zeros(10, 10), "uniform")
    with_storage(server, Path())
    assert server.broadcast(ClientInfo(0, 5, 0, 0, counts)).state == {}  # nobody has said anything yet
    everything = {ROWS: torch.full((10, 10), 0.1), LABELS: pack_bits(torch.ones(10).bool()), COUNTS: torch.ones(10).int()}
    merge(server, 1, ClientUpdate(0, 1, module.update_state()), ClientUpdate(1, 1, everything))
    down = server.broadcast(ClientInfo(0, 5, 0, 0, counts)).state
    assert (count_floats(down), count_bytes(down)) == (20, 80 + 2)


def test_data_whose_labels_are_no_classes_are_refused() -> None:
    with pytest.raises(
        FederationError, match="FD needs data whose labels are the 4 classes that are predicted, but client 3 counts 2"
    ):
        FD(Net, CLASSES).configure_server([info(0), info(3, (1, 2))])


def test_a_broadcast_that_does_not_fit_is_refused() -> None:
    module = FD(Net, CLASSES).for_client(INFO)
    with pytest.raises(FederationError, match=r"The payload for FD has 'classes/rows' of shape \(3, 4\), expected \(1, 4\)"):
        module.load_broadcast(
            Broadcast({ROWS: torch.ones(3, CLASSES), LABELS: pack_bits(torch.tensor([True, False, False, False]))})
        )
