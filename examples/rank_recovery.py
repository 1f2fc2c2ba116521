"""Does PF2LoRA learn the ranks of its clients? The synthetic experiment of its paper (Section 5, Appendices B and C).

    python examples/rank_recovery.py --setting paper --seed 0
    tensorboard --logdir runs/rank_recovery

Two clients regress on matrices of rank 3 and 4, Y = X W_k* + noise. The methods are the library's, on a network that is one linear
layer of zeros: an adapter is then the whole model, W = AB + C_k D_k. This script adds the loss, the initial factors and the
measurements. docs/methods/rank_recovery.md discusses the results.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.regression import R2Score

from lightning_fed.callbacks import FederationCallback, RunView
from lightning_fed.core.messages import ClientUpdate
from lightning_fed.core.server import Server
from lightning_fed.data import InMemory, Partitioner
from lightning_fed.data.batches import TARGETS
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.data.partition.pools import Indices
from lightning_fed.federation.federation import Federation
from lightning_fed.methods import PF2LoRA
from lightning_fed.methods.families.lora import CLIENT, COMMON, LoRAModule
from lightning_fed.methods.hetlora import HETLoRA, HETLoRAServer
from lightning_fed.models import Transformer
from lightning_fed.nn.rank import spectral_rank

SIZE, TRAIN, TEST = 10, 700, 300
NOISE = (0.1, 0.2)
"""Standard deviations. The paper writes N(0, 0.1) and N(0, 0.2)."""

Setting = Literal["paper", "consistent"]
SETTINGS: tuple[Setting, ...] = ("paper", "consistent")
METHODS = ("PF2LoRA", "HETLoRA")


# ------------------------------------------------------------------------------------------------------------- the problem


@dataclass(frozen=True, eq=False)
class Problem:
    """What is to be learned, and from what.

    Args:
        truths: W_k* of each client, ``(inputs, outputs)``.
        x: inputs, ``(clients, rows, inputs)``.
        y: targets, ``(clients, rows, outputs)``.
    """

    truths: list[Tensor]
    x: Tensor
    y: Tensor

    def data(self) -> InMemory:
        """The first 700 rows of a client are for training, all in one batch; the others are for test."""

        def pool(rows: slice) -> tuple[dict[str, Tensor], Tensor]:
            x, y = self.x[:, rows], self.y[:, rows]
            return {"x": x.flatten(0, 1), TARGETS: y.flatten(0, 1)}, torch.arange(len(x)).repeat_interleave(x.shape[1])

        count = len(self.truths)
        own: dict[str, Any] = {"num_clients": count, "partition": OwnProblem(), "split": "official", "val_share": 0.0}
        return InMemory(*pool(slice(TRAIN)), SIZE, *pool(slice(TRAIN, None)), batch_size=TRAIN, **own)


class OwnProblem(Partitioner):
    """Client k has what is labelled k. Targets are matrices, so the label is free to say whose they are."""

    def split(self, members: list[Indices], num_clients: int, rng: Any) -> list[Indices]:
        """Each class to a client of its own."""
        return members


def draw(setting: Setting, seed: int) -> Problem:
    """A problem whose factors, inputs and noise are normally distributed.

    Args:
        setting: ``paper`` draws W_1* of rank 3 and W_2* of rank 4 independently. ``consistent`` draws W_k* = S + P_k with S of
            rank 2 and P_k of rank 1 and 2: the ranks are the same, and a common adapter has something to be common about.
        seed: of all draws.
    """
    stream = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=stream)

    def product(rank: int) -> Tensor:
        return normal(SIZE, rank) @ normal(rank, SIZE)

    if setting == "paper":
        truths = [product(3), product(4)]
    else:
        common = product(2)
        truths = [common + product(1), common + product(2)]
    x = normal(len(truths), TRAIN + TEST, SIZE)
    y = x @ torch.stack(truths)
    return Problem(truths, x, y + torch.tensor(NOISE)[:, None, None] * normal(*y.shape))


def rank90(matrix: Tensor) -> int:
    """The paper's rank: how many singular values it takes to make up 90 % of their sum.

    >>> [rank90(torch.diag(torch.tensor(values))) for values in ([1.0, 1, 1, 0], [8.5, 1, 0.5], [9.5, 0.5])]
    [3, 2, 1]
    """
    return spectral_rank(torch.linalg.svdvals(matrix.double()))


def joint(distances: Sequence[float]) -> float:
    """The Frobenius distance of all clients' matrices together."""
    return sum(distance**2 for distance in distances) ** 0.5


def lower_bound(one: Tensor, other: Tensor, client_r: int) -> float:
    r"""How near two clients that share AB can come to their truths, jointly.

    :math:`\hat W_1 - \hat W_2 = C_1 D_1 - C_2 D_2` has at most rank :math:`2 \tilde r`, so it stays away from
    :math:`W_1^* - W_2^*` by what lies behind that many singular values; and :math:`\lVert e_1 \rVert^2 + \lVert e_2 \rVert^2 \ge
    \lVert e_1 - e_2 \rVert^2 / 2` for the errors :math:`e_k`.
    """
    return tail_norm(one - other, 2 * client_r) / 2**0.5


def tail_norm(matrix: Tensor, rank: int) -> float:
    """The Frobenius distance of a matrix from the nearest of a lower rank."""
    return torch.linalg.svdvals(matrix.double())[rank:].norm().item()


def project_off(c: Tensor, d: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """C and D such that CD has no column and no row in common with AB: AᵀC = 0 and DBᵀ = 0.

    Args:
        c: ``(inputs, client_r)``.
        d: ``(client_r, outputs)``.
        a: ``(inputs, r)``.
        b: ``(r, outputs)``.
    """
    columns, rows = torch.linalg.qr(a.double()).Q, torch.linalg.qr(b.T.double()).Q
    off_columns = c - columns @ (columns.T @ c.double())
    off_rows = d - (d.double() @ rows) @ rows.T
    return off_columns.to(c.dtype), off_rows.to(d.dtype)


# ------------------------------------------------------------------------------------------------------------- the methods


class LinearMap(Transformer):
    """One linear layer of zeros, which is frozen, with what LoRA methods ask of a network: an adapter on it is the whole model.

    Args:
        outputs: number of outputs.
    """

    measures = ("r2",)

    def __init__(self, outputs: int = SIZE) -> None:
        nn.Module.__init__(self)  # there is nothing to load
        self.attention, self.drawn = None, frozenset()
        self.network = AdaptedLayers({"linear": nn.Linear(SIZE, outputs, bias=False)})
        nn.init.zeros_(self.network["linear"].weight)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """XW of ``inputs["x"]``."""
        return self.network["linear"](inputs["x"])

    def head_names(self) -> set[str]:
        """There is no head."""
        return set()


class AdaptedLayers(nn.ModuleDict):
    """Layers by name, for peft to find."""

    def set_attn_implementation(self, name: str) -> None:
        """Nothing attends here: a linear layer can be differentiated twice as it is."""


class Regression(LoRAModule):
    """What a LoRA method needs for matrix regression; it comes behind the method among the bases."""

    problem: Problem
    """Whose truths the clients' matrices are compared with. Set after construction: it is no hyperparameter, to be logged."""

    def factors(self, adapter: str = COMMON) -> tuple[Tensor, Tensor]:
        """An adapter's factors as in the paper, whose W = AB is applied from the right: views of LoRA's."""
        a, b = self.adapter(adapter).values()
        return a.T, b.T

    def matrix(self) -> Tensor:
        """The client's W."""
        a, b = self.factors()
        return (a @ b).detach()

    def criterion(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The squared error of a row, mean over rows."""
        return row_error(outputs, targets)

    def configure_metrics(self) -> MetricCollection:
        """Loss, R², distance from the truth, rank."""
        metrics: dict[str, Any] = {name: MeanMetric() for name in ("loss", "distance", "rank")}
        return MetricCollection(metrics | {"r2": R2Score(multioutput="variance_weighted")}, compute_groups=False)

    def update_metrics(self, metrics: MetricCollection, batch: Any) -> None:
        """Take a batch into the metrics; distance and rank do not depend on it."""
        inputs, targets = batch
        assert self.client is not None
        predictions, matrix = self(inputs), self.matrix()
        metrics["loss"].update(row_error(predictions, targets), weight=len(predictions))
        metrics["r2"].update(predictions, targets)
        metrics["distance"].update((matrix - self.problem.truths[self.client.id]).norm())
        metrics["rank"].update(rank90(matrix))


def row_error(predictions: Tensor, targets: Tensor) -> Tensor:
    """Squared error of a row, mean over rows."""
    return (predictions - targets).square().sum(dim=1).mean()


class PF2LoRARegression(PF2LoRA, Regression):
    """PF2LoRA whose factors are all drawn from N(0, 1), C_k D_k then projected off AB."""

    start: tuple[Tensor, Tensor]
    """A ``(10, r)`` and B ``(r, 10)`` at first: the clients must know them when they draw C_k and D_k."""

    def build(self) -> None:
        """See the class."""
        super().build()
        with torch.no_grad():
            for factor, value in zip(self.factors(), self.start, strict=True):
                factor.copy_(value)
            c, d = self.factors(CLIENT)
            for factor, value in zip((c, d), project_off(c.normal_(), d.normal_(), *self.start), strict=True):
                factor.copy_(value)

    def matrix(self) -> Tensor:
        """AB + C_k D_k."""
        c, d = self.factors(CLIENT)
        return super().matrix() + (c @ d).detach()


class HETLoRARegression(HETLoRA, Regression):
    """HETLoRA whose A is drawn from N(0, 1), and whose clients have the ranks of the paper's experiment."""

    first_ranks = (2, 10)

    def build(self) -> None:
        """See the class."""
        super().build()
        with torch.no_grad():
            self.factors()[0].normal_()

    def configure_server(self, clients: Sequence[ClientInfo]) -> Server:
        """The ranks are not those of the method's rule. The server's model serves two problems and solves neither: not measured."""
        ranks = {client.id: rank for client, rank in zip(clients, self.first_ranks, strict=True)}
        server = HETLoRAServer(self.shared_state(), ranks, self.r_min)
        server.holds_model = False
        return server


def new_method(name: str, problem: Problem, seed: int = 0, steps: int = 10) -> Regression:
    """A method with the paper's ranks and rates, and plain gradient descent.

    Args:
        name: ``PF2LoRA`` or ``HETLoRA``.
        problem: what it is measured against.
        seed: of where the common adapter starts; what clients draw is up to the federation's.
        steps: between two averages.
    """
    shared: dict[str, Any] = {"num_classes": SIZE, "target_modules": ["linear"], "train_head": False, "steps": steps}
    if name == "PF2LoRA":
        options: dict[str, Any] = {"r": 4, "client_r": 2, "client_lr": 0.002, "batches": 1}
        module: Regression = PF2LoRARegression(LinearMap, optimizer=partial(torch.optim.SGD, lr=0.005), **options, **shared)
        stream = torch.Generator().manual_seed(seed)
        module.start = torch.randn(SIZE, 4, generator=stream), torch.randn(4, SIZE, generator=stream)
    else:
        options = {"r_min": 1, "r_max": 12, "penalty": 0.1, "keep": 0.7}
        module = HETLoRARegression(LinearMap, optimizer=partial(torch.optim.SGD, lr=0.002), **options, **shared)
    module.problem = problem
    return module


# --------------------------------------------------------------------------------------------------------- what comes of it


class RankFigure(FederationCallback):
    """Keeps each client's distance, rank and loss of every round, before and after averaging; logs them and draws a figure.

    Args:
        problem: the truths.
        bounds: what the joint distance cannot be smaller than, ``before`` and ``after`` averaging.
        title: of the figure.
    """

    def __init__(self, problem: Problem, bounds: dict[str, float], title: str) -> None:
        self.truths = [rank90(truth) for truth in problem.truths]
        self.bounds = bounds
        self.title = title
        self.before: list[dict[int, dict[str, float]]] = []
        self.after: list[dict[int, dict[str, float]]] = []

    def on_turn_end(self, run: RunView, update: ClientUpdate) -> None:
        """Note what the client had learned by itself."""
        if len(self.before) < run.round:
            self.before.append({})
        self.before[-1][update.client] = update.metrics

    def on_round_end(self, run: RunView) -> None:
        """Note what the clients have now, and log."""
        self.after.append(run.results)
        scalars = {f"recovery/distance_{when}": self.distances(when)[-1] for when in ("before", "after")}
        for when in ("before", "after"):
            for client, ranks in enumerate(self.ranks(when), start=1):
                scalars[f"recovery/rank_{when}_client_{client}"] = ranks[-1]
        for logger in run.loggers:
            logger.log_metrics(scalars, step=run.round)

    def on_fit_end(self, run: RunView) -> None:
        """Draw."""
        for logger in run.loggers:
            if isinstance(logger, TensorBoardLogger):
                logger.experiment.add_figure("recovery/ranks", self.draw(), global_step=run.round)

    def values(self, when: str, metric: str) -> list[list[float]]:
        """A test metric, a list of rounds per client.

        Args:
            when: ``before`` or ``after`` averaging.
            metric: ``distance``, ``rank`` or ``loss``.
        """
        rounds = self.before if when == "before" else self.after
        return [[row[client][f"test/{metric}"] for row in rounds] for client in range(len(self.truths))]

    def ranks(self, when: str) -> list[list[int]]:
        """The ranks, a list of rounds per client."""
        return [[round(rank) for rank in client] for client in self.values(when, "rank")]

    def distances(self, when: str) -> list[float]:
        """The joint distance, by round."""
        return [joint(row) for row in zip(*self.values(when, "distance"), strict=True)]

    def draw(self) -> Figure:
        """Distances on the left, ranks on the right."""
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        figure.suptitle(self.title)
        left, right = figure.subplots(1, 2)
        rounds = range(1, len(self.after) + 1)
        for when, color in (("before", "tab:green"), ("after", "tab:purple")):
            left.plot(rounds, self.distances(when), color=color, label=f"{when} averaging")
        if self.bounds["after"] > 0.01:
            label = "lower bound" if self.bounds["before"] else "lower bound after averaging"
            left.axhline(self.bounds["after"], color="gray", linestyle=":", label=label)
        left.set(xlabel="round", ylabel="joint distance from the truths", yscale="log")
        left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        left.yaxis.set_minor_formatter(NullFormatter())
        left.legend()
        highest = 0
        for client, (truth, color) in enumerate(zip(self.truths, ("tab:blue", "tab:orange"), strict=True)):
            shift = 0.1 * (2 * client - 1)  # where lines would hide each other
            right.axhline(truth + shift, color=color, linewidth=7, alpha=0.25, label=f"W* of client {client + 1}: {truth}")
            for when, style in (("before", "--"), ("after", "-")):
                ranks = self.ranks(when)[client]
                shifted = [rank + shift for rank in ranks]
                right.plot(rounds, shifted, style, color=color, drawstyle="steps-mid", label=f"learned, {when} averaging")
                highest = max(highest, truth, *ranks)
        right.set(xlabel="round", ylabel="rank (90 % of singular values)", ylim=(0, highest + 2.6), yticks=range(highest + 1))
        right.legend(ncols=2, loc="upper right", fontsize="small")
        for axes in (left, right):
            axes.grid(alpha=0.3)
        return figure


def bounds_of(method: str, problem: Problem) -> dict[str, float]:
    """What the joint distance cannot be smaller than, by the ranks alone."""
    if method == "PF2LoRA":  # before averaging each client has rank 6, more than its truth
        return {"before": 0.0, "after": lower_bound(*problem.truths, client_r=2)}
    missing = tail_norm(problem.truths[0], HETLoRARegression.first_ranks[0])
    return {"before": missing, "after": missing}


def play(
    method: str, setting: Setting, seed: int = 0, rounds: int = 200, steps: int = 10, run_dir: Path | None = None
) -> tuple[Federation, RankFigure]:
    """One run; nothing is written without a ``run_dir``."""
    problem = draw(setting, seed)
    title = f"{method}, {setting} setting, seed {seed}, averaged every {steps} steps"
    recovery = RankFigure(problem, bounds_of(method, problem), title)
    federation = Federation(
        rounds=rounds,
        seed=seed,
        checkpoint_every=0,
        run_dir=run_dir,
        logger=run_dir is not None,
        progress=False,
        callbacks=[recovery],
        trainer=partial(L.Trainer, accelerator="cpu", devices=1),
    )
    federation.fit(new_method(method, problem, seed, steps), problem.data())
    return federation, recovery


def report(method: str, recovery: RankFigure) -> str:
    """A run's state after its last round: a line before and one after averaging."""

    def both(when: str, metric: str, digits: int) -> str:
        return " / ".join(f"{values[-1]:.{digits}f}" for values in recovery.values(when, metric))

    return "\n".join(
        f"{method if when == 'before' else '':8} {when:9} {recovery.distances(when)[-1]:14.2f} {recovery.bounds[when]:12.2f} "
        f"{both(when, 'rank', 0):>10} {both(when, 'loss', 2):>18}"
        for when in ("before", "after")
    )


def main() -> None:
    """Run both methods; print a table per setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", choices=[*SETTINGS, "both"], default="both")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--local-steps", type=int, default=10, help="steps between two averages")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/rank_recovery"), help="where figures and metrics are written")
    options = parser.parse_args()
    torch.set_num_threads(1)  # more only wait for each other on 10×10 matrices

    for setting in SETTINGS if options.setting == "both" else (options.setting,):
        ranks = " / ".join(str(rank90(truth)) for truth in draw(setting, options.seed).truths)
        noise = " / ".join(f"{SIZE * std**2:.2f}" for std in NOISE)
        print(f"\n{setting} setting, seed {options.seed}, {options.rounds} rounds of {options.steps} steps")
        print(f"rank of W* (90 % of singular values): {ranks}; loss of W*: {noise}; clients are separated by /")
        print(f"{'method':8} {'averaging':9} {'joint distance':>14} {'cannot beat':>12} {'rank':>10} {'test loss':>18}")
        for method in METHODS:
            start, folder = perf_counter(), options.run_dir / setting / method.lower()
            federation, recovery = play(method, setting, options.seed, options.rounds, options.steps, folder)
            print(report(method, recovery))
            if isinstance(federation.run.server, HETLoRAServer):
                print(f"{'':8} ranks that the server allots: {' / '.join(map(str, federation.run.server.ranks.values()))}")
            print(f"{'':8} {perf_counter() - start:.0f} s", flush=True)
    print(f"\ntensorboard --logdir {options.run_dir}")


if __name__ == "__main__":
    main()
