"""Effective ranks of the clients' adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lightning_fed.callbacks.base import FederationCallback, RunView, boards, due
from lightning_fed.callbacks.table import write_table
from lightning_fed.core.messages import PRIVATE_SHARE, RANK

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class AdapterRanks(FederationCallback):
    """Writes ``ranks.csv``, the effective rank of each client's adapters per layer at its last evaluation (with PF2LoRA also their
    private share), and draws the ranks for TensorBoard (``adapter/ranks``); see :meth:`.LoRAModule.adapter_ranks`. Does nothing for
    methods without such adapters.

    Args:
        every: do so every N rounds, if clients are evaluated in them, and after the last one.
    """

    def __init__(self, every: int = 10) -> None:
        self.every = every

    def on_round_end(self, run: RunView) -> None:
        if not (due(run, self.every) and (boards(run) or run.folder is not None)):
            return
        ranks = {client: ranks_of(result) for client, result in run.results.items()}
        layers = list(dict.fromkeys(layer for own in ranks.values() for layer in own))
        if not layers:
            return
        if run.folder is not None:
            rows = [
                {"client": client, "layer": layer, "rank": rank, **share_of(run.results[client], layer)}
                for client, own in ranks.items()
                for layer, rank in own.items()
            ]
            write_table(run.folder / "ranks.csv", rows)
        for logger in boards(run):
            everybody = [ranks.get(client.id, {}) for client in run.clients]  # the axis counts them by id
            values = np.array([[own.get(layer, np.nan) for layer in layers] for own in everybody])
            logger.experiment.add_figure("adapter/ranks", rank_figure(values, layers), global_step=run.round)


def ranks_of(result: dict[str, float]) -> dict[str, int]:
    """The effective rank of a client's adapters, by layer, from its evaluate turn."""
    return {name.removeprefix(RANK): int(value) for name, value in result.items() if name.startswith(RANK)}


def share_of(result: dict[str, float], layer: str) -> dict[str, float]:
    """The private share of a layer's adapters, as ``private_share``; empty without private adapters."""
    name = f"{PRIVATE_SHARE}{layer}"
    return {"private_share": result[name]} if name in result else {}


def rank_figure(ranks: np.ndarray, layers: Sequence[str]) -> Figure:
    """Heat map of ranks: clients × layers.

    Args:
        ranks: effective ranks, ``(clients, layers)``; NaN where a client has none.
        layers: names of the layers; their common prefix is left out.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    clients, count = ranks.shape
    figure = Figure(figsize=(min(3 + 0.28 * count, 16), min(3 + 0.28 * clients, 16)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(ranks, aspect="auto", interpolation="nearest", vmin=0)
    axes.set(ylabel="client", title=f"effective rank (largest: {np.nanmax(ranks):g})")
    axes.set_xticks(range(count), short_names(layers), rotation=90, fontsize=7)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image, ticks=MaxNLocator(integer=True))
    return figure


def short_names(layers: Sequence[str]) -> list[str]:
    """Dotted names without the parts that all of them start with; the last part is always kept."""
    parts = [layer.split(".") for layer in layers]
    common = 0
    while all(len(name) > common + 1 and name[common] == parts[0][common] for name in parts):
        common += 1
    return [".".join(name[common:]) for name in parts]
