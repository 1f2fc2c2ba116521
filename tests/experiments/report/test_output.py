"""The folder that a report fills, its page, its pictures."""

import io
import math
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.image import imread
from written_runs import write_crossed, write_run, write_sweep

from lightning_fed.experiments.report import load_clients, load_rounds, load_runs
from lightning_fed.experiments.report.comparison import comparisons
from lightning_fed.experiments.report.folders import run_folders
from lightning_fed.experiments.report.methods_table import finding
from lightning_fed.experiments.report.pictures import WIDTH, dots, pictures, save
from lightning_fed.experiments.report.played import settings_table
from lightning_fed.experiments.report.report import report_on
from lightning_fed.experiments.sweep.plan import ReportOptions

VALUES = {"FedAvg": [0.80, 0.82, 0.84], "Standalone": [0.50, 0.51, 0.53]}
METRIC = "after/test_accuracy/mean"
OVER = ("over_rounds", "over_bytes", "over_flops")


@pytest.fixture
def sweep() -> Path:
    folder = write_sweep(Path("sweep"), VALUES)
    (folder / "cells.csv").write_text("command\nlightning-fed fit --model=<mine>\n")
    return folder


class Page(HTMLParser):
    """Elements that are open when a page ends, and what it asks others for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.asked: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in {"meta", "img", "br"}:
            self.open.append(tag)
        self.asked += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_folder_with_all_that_there_is_to_see(sweep: Path) -> None:
    report_on([sweep]).write(Path("out"))
    drawn = {f"{name}.{kind}" for name in ("differences", *OVER, "clients") for kind in ("png", "pdf")}
    tables = {"runs.csv", "rounds.csv", "clients.csv", "table.md", "table.tex", "report.html"}
    assert {path.name for path in Path("out").iterdir()} == drawn | tables


def test_a_report_of_a_sweep_whose_baseline_has_not_begun() -> None:
    """It is on its way."""
    report = {"baseline": "FedPer", "between": ["Standalone", "FedPer"]}
    [table, *_] = report_on([write_sweep(Path("sweep"), VALUES | {"FedPer": []}, report=report)]).tables
    assert "last, minus Standalone" in table.columns
    assert "No run of FedPer is finished here." in table.notes
    assert {row[0].text: row[-1].text for row in table.rows if row[0].text in VALUES} == dict.fromkeys(VALUES, "no gap")


def test_the_page_says_who_is_first_and_what_was_played(sweep: Path) -> None:
    for run in sweep.rglob("metrics.csv"):
        os.utime(run, (1_700_000_000, 1_700_000_000))  # 14 November 2023
    report_on([sweep]).write(Path("out"))
    text = Path("out/report.html").read_text()
    assert "FedAvg is first with 82.00 ± 2.00 % (last round of after/test_accuracy/mean); that is +30.67 ± " in text
    assert " beside Standalone.</p>" in text
    settings = text[text.index("<details>") : text.index("</details>")]
    assert "<th>all</th><th>FedAvg</th><th>Standalone</th>" in settings
    assert "<tr><td>class_path</td><td></td><td>FedAvg</td><td>Standalone</td></tr>" in settings
    assert "seed_everything" not in settings
    assert "Last written: 2023-11-14." in settings


def test_pictures_leave_unfinished_runs_out_and_have_short_names() -> None:
    sweep = write_sweep(Path("sweep"), VALUES, grid={"model.mu": {"m" * 240: {}}})
    for method in VALUES:
        shutil.move(sweep / method, sweep / ("m" * 240) / method)
    run = sweep / ("m" * 240) / "FedAvg/seed_2/version_0"
    pd.read_csv(run / "metrics.csv").head(1).to_csv(run / "metrics.csv", index=False)
    report = report_on([sweep])
    report.write(Path("out"))
    assert len(list(Path("out").glob("over_rounds-mmmm*.png"))) == 1
    assert report.ends == {("m" * 240, "FedAvg"): pytest.approx(0.81), ("m" * 240, "Standalone"): pytest.approx(0.51333333)}


@pytest.mark.parametrize("at", ["last", "best"])
def test_published_numbers_stand_beside_what_the_sweep_reports(at: str) -> None:
    report = report_on([write_sweep(Path("sweep"), VALUES, published=[{"method": "FedAvg", "mean": 88.0}])], at=at)
    left_out = any(note.startswith("Published numbers are not shown") for note in report.notes)
    assert ("published" in report.tables[0].columns, left_out) == (at == "last", at == "best")


def test_sweeps_that_tuned_differently_are_told() -> None:
    write_sweep(Path("a"), {"FedAvg": [0.8]})
    write_sweep(Path("b"), {"FedProx": [0.7]}, tune={"FedProx": {"model.init_args.mu": [0.1, 1]}})
    for mu in (0.1, 1):
        shutil.copytree("b/FedProx/seed_0", f"b/FedProx/mu={mu}/seed_0")
        Path(f"b/FedProx/mu={mu}/seed_0/cell.json").write_text('{"status": "finished"}')
    report = report_on([Path("a"), Path("b")])
    assert "Methods were tuned unequally; values tried: FedAvg none, FedProx 2." in report.notes


def test_settings_say_what_varies_and_what_is_zero() -> None:
    for alpha, momentum in ((0.1, 0.0), (10.0, 0.0)):
        write_run(Path(f"runs/{alpha}"), [0.8], alpha=alpha, momentum=momentum, nesterov=False)
    runs = run_folders(["runs"], vary=["model.alpha"])
    rows = {row[0].text: row[1].text for row in settings_table(runs).rows}
    assert rows["alpha"] == "varies"
    assert rows["momentum"] == "0.0"
    assert "nesterov" not in rows


def test_a_method_that_diverged_is_not_first() -> None:
    for method, value in (("Aa", math.nan), ("FedAvg", 0.8)):
        write_run(Path(f"runs/{method}"), [value], model=method)
    [one] = comparisons(load_runs("runs"), ReportOptions(baseline="FedAvg"))
    assert finding(one).startswith("FedAvg is first with 80.00 %")


def test_a_method_that_is_first_with_fewer_runs_says_so() -> None:
    write_sweep(Path("sweep"), {"FedAvg": [0.9], "FedPer": [0.8, 0.7]})
    [one] = comparisons(load_runs("sweep"), ReportOptions())
    assert finding(one).startswith("FedAvg (1 of 2 seeds) is first with 90.00 %")


def test_runs_without_a_round_are_told_in_every_form() -> None:
    write_sweep(Path("sweep"), {"FedAvg": [0.5, 0.6, 0.7], "FedPer": [0.5]})
    failed = Path("sweep/FedPer/seed_1")
    failed.mkdir()
    (failed / "cell.json").write_text('{"status": "failed", "error": "the loss of client_3 is nan."}')
    report, root = report_on([Path("sweep")]), Path("sweep").absolute()
    assert report.notes == [
        f"Left out: {root}/FedPer/seed_1 has failed before it finished a round: the loss of client_3 is nan.",
        f"Left out: 1 of 6 runs in {root}, which have not finished a round.",
    ]
    assert "\n\nLeft out: 1 of 6 runs in " in report.text("md")
    assert "\n\nLeft out: " in (tex := report.text("tex"))
    assert r"the loss of client\_3 is nan." in tex
    assert report_on([Path("sweep/FedAvg")]).notes == []


def test_runs_of_another_sweep_in_the_folder_are_told() -> None:
    sweep = write_sweep(Path("sweep"), {"FedAvg": [0.5, 0.6]})
    for seed in (0, 1):
        cell = sweep / f"Standalone/seed_{seed}"
        write_run(cell / "version_0", [0.5], "Standalone", seed)
        (cell / "cell.json").write_text('{"status": "finished"}')
    [note] = report_on([sweep]).notes
    assert note.startswith(f"Left out: 2 runs below {sweep.absolute()} that are not, or no longer, of its sweep, such as ")
    assert report_on([sweep / "FedAvg"]).notes == []


def test_the_page_is_whole_and_asks_nobody_for_anything(sweep: Path) -> None:
    report_on([sweep]).write(Path("out"))
    text = Path("out/report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert len(page.asked) == 5
    assert all(source.startswith("data:image/png;base64,") for source in page.asked)
    assert not re.search(r"https?://|@import|url\(", text)
    assert "lightning-fed fit --model=&lt;mine&gt;" in text
    assert "<b>82.00 ± 2.00</b>" in text


@pytest.mark.parametrize(
    "methods",
    [
        ["FedAvg", "Standalone"],
        ["FedAvg with fine-tuning of the head, twice", "Standalone"],
        [f"FedAvg with fine-tuning of the head, {number}" for number in range(5)],
        [r"FedAvg for $1$, $\nothing{$", "FedAvg_1"],  # no formulas
    ],
    ids=["short", "long", "many", "dollars"],
)
def test_pictures_are_as_wide_as_a_column_and_nothing_is_cut_off(methods: list[str]) -> None:
    called = {f"M{place}": name for place, name in enumerate(methods)}
    sweep = write_sweep(Path("sweep"), {name: [0.50, 0.53] for name in called})
    rounds, clients = load_rounds(sweep).replace(called), load_clients(sweep).assign(name="client").replace(called)
    for name, figure in pictures(rounds, clients, METRIC):
        image = imread(io.BytesIO(save(figure, Path(name))))
        assert image.shape[1] == WIDTH * 300
        edges = (image[0], image[-1], image[:, 0], image[:, -1])
        assert all(np.all(edge[..., :3] == 1) for edge in edges), name
        assert figure.axes[0].get_position().width > 0.15, name  # the legend does not take its place


def test_curves_are_means_over_seeds_with_a_band_of_one_deviation(sweep: Path) -> None:
    over_rounds = dict(pictures(load_rounds(sweep), load_clients(sweep), METRIC))["over_rounds"]
    [axes] = over_rounds.axes
    line = next(line for line in axes.lines if line.get_label() == "FedAvg (82.0)")
    assert line.get_ydata() == pytest.approx([41.0, 82.0])
    band = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (pytest.approx(40.0), pytest.approx(84.0))
    assert axes.get_ylabel() == "test accuracy (%)"


def test_thin_lines_are_runs_at_their_own_cost() -> None:
    """Of runs that end early, too, and through rounds in which only others were measured."""
    for seed, (accuracies, flops) in enumerate((([0.1, 0.3], 100), ([0.5, 0.6, 0.7, 0.9], 20))):
        write_run(Path(f"runs/{seed}"), accuracies, seed=seed)
        table = pd.read_csv(metrics := Path(f"runs/{seed}/metrics.csv"))
        table.assign(**{"compute/total_flops": flops * table["round"]}).to_csv(metrics, index=False)
    vary = ["federation.rounds"]
    rounds = load_rounds("runs", vary=vary).assign(setting="")
    rounds.loc[(rounds["seed"] == 1) & (rounds["round"] == 2), METRIC] = math.nan
    [axes] = dict(pictures(rounds, load_clients("runs", vary=vary), METRIC))["over_flops"].axes
    thin = [line for line in axes.lines if line.get_linewidth() < 1]
    assert [line.get_xdata().tolist() for line in thin] == [[100, 200], [20, 60, 80]]
    assert [line.get_ydata().tolist() for line in thin] == [pytest.approx([10, 30]), pytest.approx([50, 70, 90])]


def test_a_column_that_is_no_mean_of_clients_has_its_name_on_the_axis(sweep: Path) -> None:
    least = "after/test_accuracy/min"
    rounds = load_rounds(sweep).rename(columns={METRIC: least})
    [axes] = dict(pictures(rounds, load_clients(sweep), least))["over_rounds"].axes
    assert axes.get_ylabel() == f"{least} (%)"


def test_a_legend_has_the_last_round_where_there_are_too_few_for_a_mean(sweep: Path) -> None:
    report = report_on([sweep], at="mean3")
    [axes] = dict(pictures(report.rounds, report.clients, METRIC, report.ends))["over_rounds"].axes
    assert "FedAvg (82.0)" in [line.get_label() for line in axes.lines]


@pytest.mark.parametrize(("others", "means"), [([0.3, 0.5, 0.7, 0.9], [20.0, 40.0]), ([math.nan, math.nan, 0.7, 0.9], [])])
def test_a_mean_is_over_all_seeds_also_where_runs_end_early(others: list[float], means: list[float]) -> None:
    for seed, accuracies in enumerate(([0.1, 0.3], others)):
        write_run(Path(f"runs/{seed}"), accuracies, seed=seed)
    rounds = load_rounds("runs", vary=["federation.rounds"]).assign(setting="")
    [axes] = dict(pictures(rounds, load_clients("runs", vary=["federation.rounds"]), METRIC))["over_rounds"].axes
    line = next(line for line in axes.lines if line.get_label() == "FedAvg (60.0)")  # (0.3 + 0.9) / 2
    assert line.get_ydata() == pytest.approx(means)


def test_differences_have_a_dot_per_partition_and_an_interval() -> None:
    values = {"FedAvg": [[0.60, 0.62], [0.70, 0.72], [0.40, 0.42]], "Standalone": [[0.5, 0.5]] * 3}
    report = report_on([write_crossed(Path("sweep"), values)])
    [axes] = dots(report.compared[0]).axes
    [of_partitions] = [line for line in axes.lines if line.get_marker() == "o"]
    assert of_partitions.get_xdata() == pytest.approx([11, 21, -9])
    [bar] = [line for line in axes.collections if len(line.get_paths()) == 1]
    low, high = bar.get_paths()[0].vertices[:, 0]
    apart = report.compared[0].differences("last")["FedAvg"]
    assert ((high + low) / 2, (high - low) / 2) == pytest.approx((100 * 23 / 300, 100 * apart.half_width))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["FedAvg"]
    assert axes.get_xlabel() == "test accuracy minus that of Standalone (points)"


def test_the_axis_of_differences_names_the_measure_that_is_compared(sweep: Path) -> None:
    figure = dots(report_on([sweep], equal="rounds").compared[0])
    [axes] = figure.axes
    assert axes.get_xlabel() == "test accuracy minus that of Standalone (points),\nat equal rounds (2)"
    figure.draw_without_rendering()
    assert axes.xaxis.label.get_window_extent().y0 >= 0


def test_who_sends_nothing_is_a_line_across(sweep: Path) -> None:
    rounds = load_rounds(sweep)
    rounds.loc[rounds["method"] == "Standalone", "traffic/total_bytes"] = 0
    figure = dict(pictures(rounds, load_clients(sweep), METRIC))["over_bytes"]
    [axes] = figure.axes
    line = next(line for line in axes.lines if line.get_label() == "Standalone (51.3, sends nothing)")
    assert line.get_ydata() == pytest.approx([100 * sum(VALUES["Standalone"]) / 3] * 2)
    assert (axes.get_legend(), len(figure.legends)) == (None, 1)  # above, where the line does not cross it


def test_each_method_is_drawn_by_its_own_headline() -> None:
    write_run(Path("runs/a"), [0.5, 0.6], "HOMLoRA")
    write_run(Path("runs/b"), [0.7, 0.8], "PerFedAvgLoRA", monitor="after/test_adapted_accuracy/mean")
    clients = Path("runs/b/clients.csv")
    clients.write_text(clients.read_text().replace("test/accuracy", "test/adapted_accuracy"))
    report = report_on([Path("runs")])
    tables = (load_rounds("runs"), load_clients("runs"))
    rounds, of_clients, metric = report._of_one_metric(*tables)
    assert rounds.loc[rounds["method"] == "PerFedAvgLoRA", metric].tolist() == pytest.approx([0.6, 0.7])
    assert of_clients["test/accuracy"].tolist() == [0.5, 1.0] * 2
    report.write(Path("out"))
    assert Path("out/clients.png").is_file()


def test_losses_are_not_drawn_or_listed_as_accuracies() -> None:
    write_run(Path("runs/a"), [0.5, 0.6])
    write_run(Path("runs/b"), [0.7, 0.8], "FedPer", monitor="global/test_loss")
    report = report_on([Path("runs")], metric="monitor", budgets=[1])
    rounds, clients, metric = report._of_one_metric(report.rounds, report.clients)
    [axes] = dict(pictures(rounds, clients, metric, report.ends))["over_rounds"].axes
    assert axes.get_ylabel() == "test monitored metric"
    assert [line.get_label() for line in axes.lines] == ["FedAvg (0.600)", "FedPer (0.700)"]
    [budgets] = [table for table in report.tables if table.title.startswith("At a budget")]
    assert [[entry.text for entry in row] for row in budgets.rows] == [
        ["FedAvg", "after/test_accuracy/mean", "0.600"],
        ["FedPer", "global/test_loss", "0.700"],
    ]


def test_a_round_that_was_not_measured_is_no_gap(sweep: Path) -> None:
    rounds = load_rounds(sweep)
    rounds.loc[rounds["round"] == 1, METRIC] = np.nan
    [axes] = dict(pictures(rounds, load_clients(sweep), METRIC))["over_rounds"].axes
    assert next(line for line in axes.lines if line.get_label() == "FedAvg (82.0)").get_ydata() == pytest.approx([82.0])
    assert [name for name, _ in pictures(rounds.assign(**{METRIC: np.nan}), load_clients(sweep), METRIC)] == ["clients"]
