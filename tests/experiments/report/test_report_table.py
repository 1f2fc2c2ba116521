"""What a table says, and how it is written."""

import itertools
import json
import math
from pathlib import Path

import pandas as pd
import pytest
from markdown_it import MarkdownIt
from rich.console import Console
from written_runs import add_facts, write_crossed, write_run, write_sweep, write_sweep_file

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report import load_runs
from lightning_fed.experiments.report.comparison import comparisons, unfinished
from lightning_fed.experiments.report.layout import Entry, Layout
from lightning_fed.experiments.report.methods_table import finding, spread, tables
from lightning_fed.experiments.report.seeds_table import seed_tables
from lightning_fed.experiments.report.writers import html, latex, markdown, terminal
from lightning_fed.experiments.sweep.folder import CellFolder, CellRecord
from lightning_fed.experiments.sweep.plan import Published, ReportOptions
from lightning_fed.formatting import sized

VALUES = {"FedAvg": [0.80, 0.82, 0.84], "FedPer": [0.81, 0.80, 0.86], "Standalone": [0.50, 0.51, 0.53]}


@pytest.fixture
def sweep() -> Path:
    return write_sweep(Path("sweep"), VALUES)


def rows_of(layout: Layout) -> dict[str, dict[str, Entry]]:
    return {row[0].text: dict(zip(layout.columns, row, strict=True)) for row in layout.rows}


def test_means_spreads_and_paired_differences(sweep: Path) -> None:
    [layout] = tables(load_runs(sweep))
    rows = rows_of(layout)
    assert list(rows) == ["FedAvg", "FedPer", "Standalone", "majority label"]
    assert rows["FedAvg"]["last round (%)"] == Entry("82.00 ± 2.00", bold=True)
    assert rows["FedPer"]["last round (%)"].bold
    assert rows["Standalone"]["last round (%)"] == Entry("51.33 ± 1.53", bold=False)
    assert rows["FedAvg"]["last, minus Standalone"].text == "+30.67 ± 1.43"  # 4.303 · 0.577 / √3
    assert rows["Standalone"]["last, minus Standalone"].text == "–"
    assert rows["majority label"]["last round (%)"].text == "25.00 ± 0.00"
    assert rows["FedAvg"]["worst tenth of clients (%)"].text == "50.00 ± 0.00"
    assert {name: rows["FedAvg"][name].text for name in ("rounds × epochs", "bytes sent", "training FLOPs", "seconds")} == {
        **{"rounds × epochs": "2 × 1", "bytes sent": "200 B", "training FLOPs": "2.00e3", "seconds": "6"},
    }


def test_what_servers_computed_has_a_column_where_any_did(sweep: Path) -> None:
    assert "server's FLOPs" not in tables(load_runs(sweep))[0].columns
    for path in sweep.glob("FedPer/*/*/metrics.csv"):
        pd.read_csv(path).assign(**{"server/total_flops": [10_000, 20_000]}).to_csv(path, index=False)
    rows = rows_of(tables(load_runs(sweep))[0])
    assert {name: rows[name]["server's FLOPs"].text for name in VALUES} == {"FedAvg": "0", "FedPer": "2.00e4", "Standalone": "0"}
    runs = load_runs(sweep).drop(columns="server_flops")  # as a file of an earlier version
    assert "server's FLOPs" not in tables(runs)[0].columns


def test_what_is_not_separated_says_so(sweep: Path) -> None:
    rows = rows_of(tables(load_runs(sweep), ReportOptions(baseline="FedAvg"))[0])
    assert rows["FedPer"]["last, minus FedAvg"].text == "+0.33 ± 5.17, not separated"
    assert rows["Standalone"]["last, minus FedAvg"].text == "−30.67 ± 1.43"
    with pytest.raises(FederationError, match="no method 'FedProx' to be the baseline; there are FedAvg, FedPer, Standalone"):
        tables(load_runs(sweep), ReportOptions(baseline="FedProx"))


def test_the_baseline_has_a_number_if_any_method_has_one() -> None:
    for name, monitor in (("FedAvg", "global/test_accuracy"), ("FedPer", "global/test_accuracy"), ("Standalone", None)):
        write_run(Path("runs", name), [0.6, 0.8], name, **({"monitor": monitor} if monitor else {}))
    [layout] = tables(load_runs("runs", metric="global/test_accuracy"))
    assert "last, minus FedAvg" in layout.columns
    [layout] = tables(load_runs("runs"))
    assert "last, minus Standalone" in layout.columns


def test_of_one_seed_nothing_is_said_to_be_better() -> None:
    [layout] = tables(load_runs(write_sweep(Path("one"), {"FedAvg": [0.8], "Standalone": [0.2]})))
    assert not any(entry.bold for row in layout.rows for entry in row)
    assert rows_of(layout)["FedAvg"]["last, minus Standalone"].text == "+60.00"
    assert layout.notes[0] == "after/test_accuracy/mean: seed 0 alone."


def test_runs_without_a_number_are_counted(sweep: Path) -> None:
    path = sweep / "FedAvg/seed_2/version_0/metrics.csv"
    pd.read_csv(path).assign(**{"after/test_accuracy/mean": math.nan}).to_csv(path, index=False)
    row = rows_of(tables(load_runs(sweep))[0])["FedAvg"]
    assert row["last round (%)"] == Entry("81.00 ± 1.41 (2 of 3)", bold=True)
    assert row["last, minus Standalone"] == Entry("+30.50 ± 6.35", note="Over the 2 of 3 seeds for which no run is missing.")


def test_different_versions_are_named(sweep: Path) -> None:
    for path in sweep.glob("*/seed_*"):
        (path / "cell.json").write_text(json.dumps({"status": "finished", "versions": "python 3.11, torch 2.9", "commit": "a1"}))
    assert not any("versions" in note for note in tables(load_runs(sweep))[0].notes)
    (path / "cell.json").write_text(json.dumps({"status": "finished", "versions": "python 3.11, torch 3.0", "commit": "b2"}))
    said = "The runs were not made with the same versions: commit a1, commit b2, torch 2.9, torch 3.0."
    assert said in tables(load_runs(sweep))[0].notes


def test_a_run_that_ended_early_shows_in_the_number_of_rounds(sweep: Path) -> None:
    path = sweep / "FedAvg/seed_0/version_0"
    pd.read_csv(path / "metrics.csv").head(1).to_csv(path / "metrics.csv", index=False)
    add_facts(path, rounds=1)
    rows = rows_of(tables(load_runs(sweep))[0])
    assert [rows[name]["rounds × epochs"].text for name in ("FedAvg", "FedPer")] == ["1–2 × 1", "2 × 1"]


def test_small_numbers_keep_their_digits() -> None:
    for seed in (0, 1):
        write_run(Path(f"runs/a{seed}"), [1 - 0.00011 - seed * 1e-5], "FedAvg", seed)
        write_run(Path(f"runs/b{seed}"), [1 - 0.00021 - seed * 3e-5], "FedPer", seed)
    rows = rows_of(tables(load_runs("runs", metric="after/test_loss/mean"))[0])
    assert rows["FedAvg"]["last round"].text == "0.000115 ± 0.000007"
    assert rows["FedPer"]["last, minus FedAvg"].text == "+0.000110 ± 0.000127, not separated"


def test_what_has_diverged_has_no_difference(sweep: Path) -> None:
    path = sweep / "FedPer/seed_2/version_0/metrics.csv"
    pd.read_csv(path).assign(**{"after/test_loss/mean": math.inf}).to_csv(path, index=False)
    [layout] = tables(load_runs(sweep, metric="after/test_loss/mean"))
    row = rows_of(layout)["FedPer"]
    assert (row["last round"], row["last, minus Standalone"].text) == (Entry("inf"), "no number")
    [table] = seed_tables(comparisons(load_runs(sweep, metric="after/test_loss/mean"), ReportOptions())[0])[:1]
    assert [entry.text for entry in table.rows[1]] == ["FedPer", "no number", "–", "–"]


def test_cost_to_a_target_is_a_median_over_those_who_reached_it(sweep: Path) -> None:
    rows = rows_of(tables(load_runs(sweep, target=0.82))[0])
    assert rows["FedAvg"]["rounds to target"].text == "2 (in 2 of 3)"
    assert rows["Standalone"]["bytes to target"].text == "not reached"
    for seed, first in enumerate((2, 3)):
        write_run(Path(f"even/{seed}"), [0.1] * (first - 1) + [0.9] * (4 - first), "FedAvg", seed)
    even = rows_of(tables(load_runs("even", target=0.82))[0])
    assert even["FedAvg"]["rounds to target"].text == "2.5"
    with pytest.raises(FederationError, match=r"target is 80, but accuracies are shares of 1: give 0.8 for 80 %"):
        load_runs(sweep, target=80)


def test_published_numbers_stand_beside_ours(sweep: Path) -> None:
    entry = Published("FedAvg", 88.09, 0.29, source="a paper")
    [layout] = tables(load_runs(sweep), ReportOptions(pooled=True), published=[entry])
    assert rows_of(layout)["FedAvg"]["published"].text == "88.09 ± 0.29"
    assert rows_of(layout)["FedPer"]["published"].text == ""
    assert layout.notes[-1] == "Published: a paper."
    assert rows_of(layout)["FedAvg"]["pooled (%)"].text == "83.33 ± 0.00"


def test_a_published_number_keeps_the_places_that_yaml_drops(sweep: Path) -> None:
    [layout] = tables(load_runs(sweep), published=[Published("FedAvg", 78.1, 2.51), Published("FedPer", 80.0)])
    assert rows_of(layout)["FedAvg"]["published"].text == "78.10 ± 2.51"
    assert rows_of(layout)["FedPer"]["published"].text == "80"


def test_unfinished_runs_are_left_out_and_named() -> None:
    write_run(Path("runs/a"), [0.5])
    write_run(Path("runs/b"), [0.5], "Standalone", rounds=1)
    write_run(Path("late/c"), [0.5], "FedPer", rounds=9)
    with pytest.raises(FederationError, match="None of the 1 runs is finished"):
        tables(load_runs("late"))
    runs = load_runs("runs", "late", vary=["federation.rounds"])
    assert unfinished(runs) == ["Left out: late/c has finished 1 of 9 rounds."]
    assert [list(rows_of(layout)) for layout in tables(runs)] == [["FedAvg", "Standalone", "majority label"]]


def test_a_run_that_is_to_have_more_rounds_is_not_finished(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path / "sweep", {"FedAvg": [0.5], "Standalone": [0.4]})
    file = folder / "sweep.yaml"
    file.write_text(file.read_text().replace("model: FedAvg", "model: FedAvg\n    federation.rounds: 3"))
    for method, status in (("FedAvg", "failed"), ("Standalone", "finished")):
        error = "the training diverged." if status == "failed" else ""
        CellFolder(folder / method / "seed_0").record(CellRecord(status, rounds=3, error=error))
    runs = load_runs(folder)
    why = "the training diverged"
    assert unfinished(runs) == [f"Left out: {folder}/FedAvg/seed_0/version_0 has finished 2 of 3 rounds: {why}."]
    assert [list(rows_of(layout)) for layout in tables(runs)] == [["Standalone", "majority label"]]


def test_settings_without_a_number_or_a_run_of_a_reference_do_not_prevent_the_others() -> None:
    methods = {"FedAvg": 0.8, "FedPer": 0.7, "Standalone": 0.5}
    write_sweep_file(Path("sweep"), methods, seeds=[0], grid={"mu": {"a": {"model.mu": 1}, "b": {"model.mu": 2}}})
    for (method, value), setting in itertools.product(methods.items(), ("a", "b")):
        if (method, setting) != ("FedPer", "b"):
            write_run(Path(f"sweep/{setting}/{method}/seed_0/version_0"), [value], method, mu="ab".index(setting) + 1)
    options = ReportOptions(baseline="FedPer", between=("Standalone", "FedPer"))
    one, other = tables(load_runs("sweep"), options)
    assert rows_of(one)["FedAvg"]["last, minus FedPer"].text == "+10.00"
    assert rows_of(other)["FedAvg"]["last, minus Standalone"].text == "+30.00"
    assert rows_of(other)["FedAvg"]["gap closed"].text == "no gap"
    assert "No run of FedPer is finished here." in other.notes
    assert "No run of FedPer is finished here." not in one.notes
    only_there = Path("sweep/a/FedAvg/seed_0/version_0/metrics.csv")
    pd.read_csv(only_there).assign(**{"after/test_f1/mean": 0.3}).to_csv(only_there, index=False)
    one, other = tables(load_runs("sweep", metric="after/test_f1/mean"))
    assert rows_of(one)["FedAvg"]["last round"].text == "0.300"
    assert rows_of(other)["FedAvg"]["last round"].text == "–"
    assert rows_of(other)["FedAvg"]["last, minus Standalone"].text == "no number"  # not "no seed in common"
    [_, comparison] = comparisons(load_runs("sweep", metric="after/test_f1/mean"), ReportOptions())
    assert finding(comparison) == "b: no method has come to a number."


def test_a_table_per_point_of_the_grid() -> None:
    for alpha, value in ((0.1, 0.05), (2.0, 0.2), (10.0, 0.5)):
        write_run(Path(f"runs/{alpha}"), [value], alpha=alpha)
    layouts = tables(load_runs("runs", vary=["model.alpha"]))
    assert [(layout.title, layout.rows[0][1].text) for layout in layouts] == [
        ("alpha=0.1", "5.00"),
        ("alpha=2.0", "20.00"),
        ("alpha=10.0", "50.00"),
    ]


TABLE = Layout("a & b", ["", "x (%)"], [[Entry("one_two"), Entry("1 ± 2", bold=True)], [Entry("<b>"), Entry("")]], ["Read."])


def test_markdown() -> None:
    assert markdown(TABLE) == "**a & b**\n\n| | x (%) |\n|---|---:|\n| one_two | **1 ± 2** |\n| \\<b> | |\n\nRead.\n"


STRANGE = ["_top_", "a|b", "*", r"\x{y}", "a~b^c", "[1]", "`<b>`", "$a_b$", "two\nlines"]


def test_names_with_signs_of_markdown_stay_what_they_are() -> None:
    """Read by another program than writes them, the one that makes the documentation's pages."""
    layout = Layout("|*|", ["", *STRANGE], [[Entry(name) for name in ["", *STRANGE]]], ["_a_"])
    page = MarkdownIt().enable(["table", "strikethrough"]).parse(markdown(layout))
    texts = ["".join(child.content for child in token.children or ()) for token in page if token.type == "inline"]
    names = [" ".join(name.split()) for name in STRANGE]
    assert texts == ["|*|", "", *names, "", *names, "_a_"]
    assert not any(child.type.startswith(("em", "code", "link", "html")) for token in page for child in token.children or ())


def test_names_with_signs_of_latex_stay_what_they_are() -> None:
    written = latex(Layout("two\nlines", ["", *STRANGE], [[Entry("[1]"), *map(Entry, STRANGE)]]))
    cells = r"\_top\_ & a\textbar{}b & {*} & \textbackslash{}x\{y\} & a\textasciitilde{}b\textasciicircum{}c & {[}1{]} & "
    assert written.splitlines()[2] == r"\caption{two lines.}"
    assert "\n{[}1] & " + cells.replace("{]}", "]") in written
    assert r" & `\textless{}b\textgreater{}` & \$a\_b\$ & two lines \\" in written
    assert r"\caption{$\epsilon$ = 8, $\Delta$$_2$ $\to$ $\lambda$.}" in latex(Layout("ε = 8, Δ₂ → λ", ["", "x"], []))


def test_latex() -> None:
    lines = latex(TABLE).splitlines()
    assert lines[:4] == [r"\begin{table}", r"\centering", r"\caption{a \& b. Read.}", r"\begin{tabular}{lr}"]
    assert lines[-2:] == [r"\end{tabular}", r"\end{table}"]
    assert r" & x (\%) \\" in lines
    assert r"one\_two & \textbf{1 $\pm$ 2} \\" in lines


def test_html_is_escaped() -> None:
    assert "<td>&lt;b&gt;</td>" in html(TABLE)
    assert "<b>1 ± 2</b>" in html(TABLE)


def test_names_with_signs_of_a_terminal_stay_what_they_are() -> None:
    layout = Layout("[iid] α", ["", "x"], [[Entry("a" * 30), Entry("1")]], ["Of [bold] [/x]."])
    console = Console(width=200)
    with console.capture() as captured:
        console.print(terminal(layout, 200))
    lines = captured.get().splitlines()
    assert (lines[0].strip(), lines[-1].strip()) == ("[iid] α", "Of [bold] [/x].")


def test_a_table_that_is_too_wide_is_turned(sweep: Path) -> None:
    [layout] = tables(load_runs(sweep))
    for width, first in ((400, "last round"), (100, "FedAvg")):
        console = Console(width=width)
        with console.capture() as captured:
            console.print(terminal(layout, width))
        header = captured.get().splitlines()[1]
        assert first in header


def test_a_table_that_is_still_too_wide_is_cut_between_columns() -> None:
    rows = [[Entry(f"method {k}"), *(Entry("12.34 ± 5.67") for _ in range(6))] for k in range(7)]
    layout = Layout("title", ["", *(f"worst tenth of clients ({k})" for k in range(6))], rows, ["Read."])
    console = Console(width=80)
    with console.capture() as captured:
        console.print(terminal(layout, 80))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert (lines[0].strip(), lines[-1].strip()) == ("title", "Read.")
    assert [line.count("method") for line in lines if "method" in line] == [3, 3, 1]
    assert sum("worst tenth of clients (5)" in line for line in lines) == 3  # each whole
    assert sum(line.count("12.34 ± 5.67") for line in lines) == 42


def test_sizes() -> None:
    assert [sized(n) for n in (0, 999, 1234, 24_536_000, 5e13)] == ["0 B", "999 B", "1.23 kB", "24.5 MB", "50 TB"]
    assert [sized(n) for n in (999.4, 999.5, 999_499, 999_600_000)] == ["999 B", "1 kB", "999 kB", "1 GB"]


def test_the_best_round_is_said_to_be_chosen_on_test_data_and_the_last_stands_beside_it(sweep: Path) -> None:
    [layout] = tables(load_runs(sweep, at="best"), ReportOptions(at="best"))
    assert layout.columns[1:4] == ["best measured round, chosen on test data (%)", "last round (%)", "best on validation (%)"]
    assert "best, minus Standalone" in layout.columns
    assert "worst tenth of clients, last round (%)" in layout.columns
    assert any("chosen by this metric on the test data" in note for note in layout.notes)
    assert not any("on the test data" in note for note in tables(load_runs(sweep))[0].notes)


def test_a_mean_over_rounds(sweep: Path) -> None:
    [layout] = tables(load_runs(sweep, at="mean2"), ReportOptions(at="mean2"))
    assert rows_of(layout)["FedAvg"]["mean of the last 2 measured rounds (%)"].text == "61.50 ± 1.50"  # of half and the whole
    with pytest.raises(FederationError, match="has no column mean3: write it with at mean3"):
        tables(load_runs(sweep), ReportOptions(at="mean3"))


def test_a_mean_over_more_rounds_than_there_are_is_told(sweep: Path) -> None:
    [layout] = tables(load_runs(sweep, at="mean3"), ReportOptions(at="mean3"))
    assert layout.columns[1] == "last round (%)"
    assert "No run has come to a number for: mean of the last 3 measured rounds." in layout.notes


def test_at_equal_cost(sweep: Path) -> None:
    [layout] = tables(load_runs(sweep, equal="flops"), ReportOptions(equal="flops"))
    assert layout.columns[1:3] == ["at equal training FLOPs (2.00e3) (%)", "last round (%)"]
    assert "equal flops, minus Standalone" in layout.columns
    with pytest.raises(FederationError, match="has no column equal_bytes: write it with equal bytes"):
        tables(load_runs(sweep), ReportOptions(equal="bytes"))


def test_clients_means_of_different_measures_are_compared_and_named() -> None:
    for seed in (0, 1):
        write_run(Path(f"runs/a{seed}"), [0.5 + seed / 100], "HOMLoRA", seed)
        write_run(Path(f"runs/b{seed}"), [0.5], "HETLoRA", seed)
        write_run(Path(f"runs/c{seed}"), [0.8 + seed / 100], "PerFedAvgLoRA", seed, monitor="after/test_adapted_accuracy/mean")
    [layout] = tables(load_runs("runs"), ReportOptions(baseline="HOMLoRA"))
    row = rows_of(layout)["PerFedAvgLoRA"]
    assert (row["last round (%)"], row["last, minus HOMLoRA"].text) == (Entry("70.50 ± 0.71", bold=True), "+20.00 ± 0.00")
    assert layout.notes[0].startswith("after/test_accuracy/mean, of PerFedAvgLoRA after/test_adapted_accuracy/mean: mean ±")


@pytest.mark.parametrize(
    ("monitor", "column", "shown"),
    [
        ("global/test_accuracy", "last round (%)", "80.00 ± 0.00"),
        ("after/test_f1/mean", "last round", "0.8000 ± 0.0000"),
    ],
)
def test_of_methods_with_different_headlines_none_is_the_best(monitor: str, column: str, shown: str) -> None:
    for seed in (0, 1):
        write_run(Path(f"runs/a{seed}"), [0.6 + seed / 100], "FedAvg", seed)
        write_run(Path(f"runs/b{seed}"), [0.5 + seed / 90], "FedPer", seed)
        write_run(Path(f"runs/c{seed}"), [0.9], "FedHM", seed, monitor=monitor)
    [layout] = tables(load_runs("runs", metric="monitor"), ReportOptions(baseline="FedAvg"))
    rows = rows_of(layout)
    measured = {name: row["measured"].text for name, row in rows.items()}
    assert (measured["FedPer"], measured["FedHM"]) == ("after/test_accuracy/mean", monitor)
    assert (rows["FedHM"][column], rows["FedHM"]["last, minus FedAvg"].text) == (Entry(shown), "another measure")
    assert rows["FedPer"]["last, minus FedAvg"].text.startswith("−")
    assert not any(entry.bold for row in layout.rows for entry in row)
    assert not any(note.startswith("Bold") for note in layout.notes)
    [layout] = tables(load_runs("runs"))
    assert rows_of(layout)["FedHM"]["last round (%)"].text == "90.00 ± 0.00"
    assert f"The monitored metric of FedHM is {monitor} (metric: monitor shows it)." in layout.notes


def test_a_majority_label_is_a_mean_over_training_seeds_which_may_draw_the_unseen_clients(tmp_path: Path) -> None:
    runs = load_runs(write_crossed(tmp_path / "sweep", {"FedAvg": [[0.5, 0.6], [0.5, 0.6]]}))
    [layout] = tables(runs.assign(majority=[0.4, 0.6, 0.2, 0.4]))
    assert rows_of(layout)["majority label"]["last round (%)"].text == "40.00 ± 14.14"


def test_a_majority_label_is_known_where_one_method_has_clients() -> None:
    write_run(Path("runs/a"), [0.6], "FedAvg", monitor="global/test_accuracy")
    write_run(Path("runs/b"), [0.5], "FedPer")
    [layout] = tables(load_runs("runs", metric="monitor"))
    assert rows_of(layout)["majority label"]["last round (%)"].text == "25.00"


GROUPED = Layout(
    "",
    ["", "x"],
    [
        [Entry("a"), Entry("1", note="Once.")],
        [Entry("b"), Entry("2", bold=True, note="Twice.")],
        [Entry("c"), Entry("3", note="Once.")],
    ],
    ["Read."],
    {0: "first", 2: "last & least"},
)


def test_groups_of_rows_and_footnotes_in_every_form() -> None:
    assert markdown(GROUPED).splitlines()[2:] == [
        *("| *first* | |", "| a | 1¹ |", "| b | **2²** |", "| *last & least* | |", "| c | 3¹ |", "", "Read. ¹ Once. ² Twice."),
    ]
    lines = latex(GROUPED).splitlines()
    assert lines[2] == r"\caption{Read. $^1$ Once. $^2$ Twice.}"
    assert lines[7:10] == [r"\multicolumn{2}{l}{\textit{first}} \\", r"a & 1$^1$ \\", r"b & \textbf{2$^2$} \\"]
    assert r"\multicolumn{2}{l}{\textit{last \& least}} \\" in lines
    assert '<tr><th colspan="2"><i>last &amp; least</i></th></tr>\n<tr><td>c</td><td>3¹</td></tr>' in html(GROUPED)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(terminal(GROUPED, 80))
    said = captured.get()
    assert said.index("first") < said.index("a ") < said.index("last & least") < said.index("3¹") < said.index("¹ Once.")


def test_negative_means_have_a_minus_sign() -> None:
    assert spread(pd.Series([-0.5, -0.3])) == "−0.40 ± 0.14"
