"""Costs and results of a round, as columns of the report."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Literal, TypeVar

import numpy as np

from lightning_fed.core.messages import PRIVATE_SHARE, Broadcast, ClientUpdate
from lightning_fed.storage.manifest import Best, Metrics
from lightning_fed.tensors import count_bytes, count_floats

T = TypeVar("T")


class Stopwatch:
    """Seconds per stage. A nested stage is not counted in the outer one."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = 0.0

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time a block."""
        start, outer, self._inner = perf_counter(), self._inner, 0.0
        try:
            yield
        finally:
            elapsed = perf_counter() - start
            self.seconds[stage] += elapsed - self._inner
            self._inner = outer + elapsed

    def each(self, stage: str, items: Iterable[T]) -> Iterator[T]:
        """Time how long each item takes to arrive."""
        iterator = iter(items)
        while True:
            with self(stage):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def collect(self) -> Metrics:
        """``seconds/<stage>`` since the last call."""
        metrics = {f"seconds/{stage}": seconds for stage, seconds in self.seconds.items()}
        self.seconds.clear()
        return metrics


class TrafficMeter:
    """Floating-point values ("parameters") and bytes between server and participants. Evaluation and the server's own turns do not
    count.
    """

    def __init__(self) -> None:
        self._round = self._zero()

    @staticmethod
    def _zero() -> Metrics:
        return {f"traffic/{direction}_{unit}": 0.0 for direction in ("down", "up") for unit in ("parameters", "bytes")}

    def down(self, client: int, broadcast: Broadcast) -> None:
        """Count what a participant receives."""
        if client >= 0:
            self._count("down", broadcast)

    def up(self, update: ClientUpdate) -> None:
        """Count what a participant sends."""
        if update.client >= 0:
            self._count("up", update)

    def _count(self, direction: str, payload: Broadcast | ClientUpdate) -> None:
        self._round[f"traffic/{direction}_parameters"] += count_floats(payload.state)
        self._round[f"traffic/{direction}_bytes"] += count_bytes(payload.state)

    def collect(self) -> Metrics:
        """Traffic since the last call."""
        metrics, self._round = self._round, self._zero()
        return metrics


def spread(prefix: str, values: Sequence[float]) -> Metrics:
    """Mean and quartiles of a per-client metric, with equal weight for each client. NaN (too few examples) is left out; if all
    values are NaN, so are the results.
    """
    known = [value for value in values if not math.isnan(value)] or [math.nan]
    # Nothing lies between two infinite values, such as perplexities.
    method: Literal["linear", "lower"] = "linear" if np.isfinite(known).all() else "lower"
    low, q25, median, q75, high = np.quantile(known, [0, 0.25, 0.5, 0.75, 1], method=method).tolist()
    names = {"mean": float(np.mean(known)), "min": low, "q25": q25, "median": median, "q75": q75, "max": high}
    return {f"{prefix}/{name}": value for name, value in names.items()}


def spread_all(stage: str, results: Iterable[Metrics]) -> Metrics:
    """:func:`spread` of every ``val/…`` and ``test/…`` metric of the clients, as ``<stage>/<val or test>_<metric>/…``."""
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, value in result.items():
            if name.startswith(("val/", "test/")):
                columns[name].append(value)
    return {k: v for name, column in columns.items() for k, v in spread(f"{stage}/{name.replace('/', '_')}", column).items()}


def private_shares(results: Iterable[Metrics]) -> Metrics:
    """Mean over the clients of each layer's private share of the adapters, and the mean over all layers; empty if no client has
    such adapters.
    """
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, value in result.items():
            if name.startswith(PRIVATE_SHARE):
                columns[f"adapter/{name}"].append(value)
    means = {name: float(np.mean(column)) for name, column in columns.items()}
    return means | ({f"adapter/{PRIVATE_SHARE}mean": float(np.mean(list(means.values())))} if means else {})


def training_means(updates: Sequence[ClientUpdate]) -> Metrics:
    """Mean of each ``train/…`` and ``lr/…`` metric over the participants, weighted by their numbers of training examples."""
    names = dict.fromkeys(name for update in updates for name in update.metrics if name.startswith(("train/", "lr/")))
    means = {}
    for name in names:
        holders = [update for update in updates if name in update.metrics]
        weight = sum(update.num_examples for update in holders)
        means[name] = sum(update.num_examples * update.metrics[name] for update in holders) / weight
    return means


def running_totals(before: Metrics, row: Metrics) -> Metrics:
    """Total costs since the first round.

    Args:
        before: metrics of the previous round; empty in the first.
        row: metrics of the round.
    """
    totals = {
        "traffic/total_parameters": row["traffic/down_parameters"] + row["traffic/up_parameters"],
        "traffic/total_bytes": row["traffic/down_bytes"] + row["traffic/up_bytes"],
        "compute/total_flops": row["compute/flops"],
    }
    if "fine_tune/flops" in row or "fine_tune/total_flops" in before:
        totals["fine_tune/total_flops"] = row.get("fine_tune/flops", 0.0)  # rounds without evaluation have no fine-tuning
    if "server/flops" in row or "server/total_flops" in before:
        totals["server/total_flops"] = row.get("server/flops", 0.0)
    return {name: before.get(name, 0.0) + value for name, value in totals.items()}


class BestRound:
    """Tracks the monitored metric at the best round on validation data so far, which is what may be reported without bias.

    Args:
        monitored: column of the monitored metric on ``"val"`` and on ``"test"`` data.
        metric: name of the metric in the result, ``selected/test_<metric>``.
        higher_is_better: whether larger values are better.

    Attributes:
        best: the best round. None without validation data.
    """

    def __init__(self, monitored: Callable[[str], str], metric: str, higher_is_better: bool = True) -> None:
        self.monitored = monitored
        self.metric = metric
        self.best: Best | None = None
        self._sign = 1 if higher_is_better else -1

    def update(self, row: Metrics) -> Metrics:
        """Update with a round's metrics; returns ``selected/test_<metric>``, if test data were evaluated, and ``selected/round``;
        nothing without validation data.
        """
        value = self._sign * row.get(self.monitored("val"), -self._sign * math.inf)
        if value > (self._sign * self.best.val if self.best else -math.inf):
            self.best = Best(int(row["round"]), row[self.monitored("val")], row.get(self.monitored("test"), math.nan))
        if self.best is None:
            return {}
        selected = {} if math.isnan(self.best.test) else {f"selected/test_{self.metric}": self.best.test}
        return selected | {"selected/round": float(self.best.round)}


class Target:
    """Tracks the cost of reaching a target: ``target/round`` and the bytes, parameters and FLOPs spent until then.

    Args:
        monitored: column that should reach the target.
        target: value to reach.
        higher_is_better: whether larger values are better.

    Attributes:
        reached: these columns; empty before the target is reached.
    """

    def __init__(self, monitored: str, target: float, higher_is_better: bool = True) -> None:
        self.monitored = monitored
        self.target = target
        self.reached: Metrics = {}
        self._sign = 1 if higher_is_better else -1

    def update(self, row: Metrics) -> Metrics:
        """Update with a round's metrics, including totals; returns :attr:`reached`."""
        if not self.reached and self.monitored in row and self._sign * row[self.monitored] >= self._sign * self.target:
            costs = {unit: row[f"traffic/total_{unit}"] for unit in ("parameters", "bytes")}
            costs |= {"flops": row["compute/total_flops"], "round": row["round"]}
            self.reached = {f"target/{name}": value for name, value in costs.items()}
        return self.reached
