"""The figure of the README: mean test accuracy per round of the quickstart and of its Standalone counterpart.

Run both first, then draw:

    lightning-fed fit --config configs/quickstart.yaml
    lightning-fed fit --config configs/quickstart.yaml --model Standalone --federation.run_dir runs/quickstart-standalone
    python bench/plot_quickstart.py runs/quickstart/version_0 runs/quickstart-standalone/version_0 docs/images/quickstart.png
"""

import csv
import sys
from pathlib import Path

from matplotlib.figure import Figure


def read(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def draw(runs: dict[str, Path]) -> Figure:
    figure = Figure(figsize=(7, 3.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for (name, folder), color in zip(runs.items(), ("tab:blue", "tab:orange"), strict=True):
        rows = [row for row in read(folder / "metrics.csv") if "after/test_accuracy/mean" in row]
        axes.plot([r["round"] for r in rows], [100 * r["after/test_accuracy/mean"] for r in rows], "o-", color=color, label=name)
        last = rows[-1]
        axes.plot(last["selected/round"], 100 * last["selected/test_accuracy"], "o", ms=14, mfc="none", color=color)
    majority = [row["majority_accuracy"] for row in read(next(iter(runs.values())) / "clients.csv")]
    axes.axhline(100 * sum(majority) / len(majority), color="gray", linestyle="--", label="each client's majority label")
    axes.plot([], [], "o", ms=11, mfc="none", color="gray", label="best round on validation data")
    axes.set(xlabel="round", ylabel="test accuracy, mean of clients (%)", ylim=(10, 102))
    axes.set_title("scikit-learn digits, 10 clients with 2 classes each, five CNNs", fontsize=10)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    return figure


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    pfedlora, standalone, image = map(Path, sys.argv[1:])
    draw({"pFedLoRA": pfedlora, "Standalone": standalone}).savefig(image)
