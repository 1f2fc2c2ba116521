"""What is written and drawn about the ranks of adapters."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from often import mostly_slow
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import data_for, new_federation, new_method

from lightning_fed.callbacks import AdapterRanks
from lightning_fed.callbacks.adapter_ranks import rank_figure, short_names
from lightning_fed.core.messages import RANK
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import PF2LoRA

LAYERS = [f"backbone.network.roberta.encoder.layer.0.attention.self.{layer}" for layer in ("query", "value")]


def fit(name: str = "PF2LoRA", rounds: int = 2, run_dir: str | None = "runs", logger: bool = True, **options: Any) -> Federation:
    federation = new_federation(rounds, run_dir, logger=logger, participation=0.7, **options)
    federation.fit(new_method(name), data_for(name, num_clients=3, size=60))
    return federation


def built() -> PF2LoRA:
    module = new_method("PF2LoRA", r=4, client_r=2)
    assert isinstance(module, PF2LoRA)
    module.configure_model()
    return module


def written() -> list[tuple[int, str, int]]:
    with Path("runs/version_0/ranks.csv").open(newline="") as file:
        return [(int(row["client"]), row["layer"], int(row["rank"])) for row in csv.DictReader(file)]


def drawn() -> list[int]:
    """Rounds of the figures."""
    found = EventAccumulator("runs/version_0", size_guidance={"images": 0}).Reload()
    return [image.step for image in found.Images("adapter/ranks")] if "adapter/ranks" in found.Tags()["images"] else []


# ------------------------------------------------------------------------------------------------------------------ ranks


def test_an_adapter_has_no_rank_before_it_has_learned() -> None:
    assert built().adapter_ranks() == dict.fromkeys(LAYERS, 0)


def test_adapters_that_act_together_have_one_rank() -> None:
    module, ones = built(), torch.eye(8)
    layer: Any = module.get_submodule(LAYERS[0])
    with torch.no_grad():
        for adapter, part in (("common", slice(4)), ("client", slice(4, 6))):
            layer.lora_A[adapter].weight.copy_(ones[part])
            layer.lora_B[adapter].weight.copy_(ones[:, part])
    assert module.adapter_ranks() == {LAYERS[0]: 6, LAYERS[1]: 0}
    with torch.no_grad():
        layer.lora_B["client"].weight.zero_()
    assert module.adapter_ranks()[LAYERS[0]] == 4
    with torch.no_grad():
        layer.lora_B["common"].weight.zero_()
        layer.lora_B["client"].weight[:, 0] = 1
    assert module.adapter_ranks()[LAYERS[0]] == 1


# --------------------------------------------------------------------------------------------------------------- callback


def test_everybodys_ranks_are_written_and_drawn() -> None:
    federation = fit()
    expected = [
        (client, layer, rank) for client in range(3) for layer, rank in federation.client_module(client).adapter_ranks().items()
    ]
    assert written() == expected
    assert {layer for _, layer, _ in expected} == set(LAYERS)
    assert all(rank > 0 for _, _, rank in expected)
    assert drawn() == [2]


@pytest.mark.often(1)
@pytest.mark.parametrize(
    ("every", "evaluate_every", "rounds"),
    mostly_slow([(2, 1, (2, 4, 5)), (2, 4, (4, 5)), (10, 1, (5,)), (1, 0, (5,))], often={(2, 4, (4, 5)), (1, 0, (5,))}),
)
def test_when_they_are_drawn(every: int, evaluate_every: int, rounds: tuple[int, ...]) -> None:
    federation = new_federation(5, "runs", logger=True, evaluate_every=evaluate_every)
    federation.callbacks[:] = [AdapterRanks(every)]
    federation.fit(new_method("HOMLoRA", steps=1), data_for("HOMLoRA", num_clients=2, size=40))
    assert drawn() == list(rounds)


def test_no_model_is_built_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    build, counts = PF2LoRA.build, []

    def counted(module: PF2LoRA) -> None:
        counts[-1] += 1
        build(module)

    monkeypatch.setattr(PF2LoRA, "build", counted)
    for run, callbacks in enumerate(([], [AdapterRanks(1)])):
        counts.append(0)
        federation = new_federation(2, f"runs-{run}", logger=True)
        federation.callbacks[:] = [*callbacks]
        federation.fit(new_method("PF2LoRA", steps=1), data_for("PF2LoRA", num_clients=3, size=60))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", ["FedAvg", "SLoRA"])
def test_without_adapters_there_is_nothing_to_write(name: str) -> None:
    """SLoRA has none in its first stage."""
    fit(name, rounds=1)
    assert Path("runs/version_0/metrics.csv").is_file()
    assert not Path("runs/version_0/ranks.csv").exists()
    assert not drawn()


def test_without_a_board_there_is_a_table() -> None:
    fit(logger=False)
    assert len(written()) == 6


def test_without_a_folder_nothing_is_written_and_no_rank_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fed.callbacks.adapter_ranks.ranks_of", None)
    federation = fit(run_dir=None)
    assert not list(Path.cwd().iterdir())
    for client, results in federation.run.results.items():  # what the turns found is there all the same
        ranks = federation.client_module(client).adapter_ranks()
        assert {name: rank for name, rank in results.items() if name.startswith(RANK)} == {
            f"{RANK}{layer}": rank for layer, rank in ranks.items()
        }


def test_a_client_without_ranks_keeps_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unseen clients have none: the others would move up."""
    seen = []
    monkeypatch.setattr("lightning_fed.callbacks.adapter_ranks.rank_figure", lambda ranks, layers: seen.append(ranks) or Figure())
    fit(unseen=[0])
    assert [row.tolist() for row in np.isnan(seen[-1])] == [[True] * 2, [False] * 2, [False] * 2]


# ----------------------------------------------------------------------------------------------------------------- figure


def test_a_cell_per_client_and_layer() -> None:
    ranks = np.array([[1, 2], [3, 4], [5, 2]])
    figure = rank_figure(ranks, LAYERS)
    axes = figure.axes[0]
    assert np.array_equal(axes.images[0].get_array(), ranks)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["query", "value"]
    assert axes.get_title() == "effective rank (largest: 5)"
    assert axes.images[0].get_clim() == (0, 5)


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (["a.0.q", "a.1.q"], ["0.q", "1.q"]),
        (["a.b.q", "a.b.v"], ["q", "v"]),
        (["a.b.q"], ["q"]),
        (["q", "a.q"], ["q", "a.q"]),
        (["a.b", "a.b.c"], ["b", "b.c"]),
    ],
)
def test_names_without_what_they_begin_with(layers: list[str], names: list[str]) -> None:
    assert short_names(layers) == names
