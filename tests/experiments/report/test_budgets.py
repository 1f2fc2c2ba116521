"""What methods reach with so many bytes."""

from pathlib import Path

import pytest
from written_runs import write_run

from lightning_fed.errors import FederationError
from lightning_fed.experiments.report.report import report_on
from lightning_fed.experiments.sweep.sweep_file import read_sweep

MIB = 100 / 2**20
"""Of a round."""


def test_a_table_says_what_methods_reach_with_a_budget() -> None:
    """In the last round measured within it; on average over seeds; nothing where a run had not been measured by then."""
    for seed in (0, 1):
        write_run(Path("runs/FedAvg", str(seed)), [0.5, 0.6 + seed / 10, 0.9], seed=seed)
        write_run(Path("runs/FedProx", str(seed)), [0.4, 0.5, 0.8], "FedProx", seed)
    report = report_on([Path("runs")], budgets=[0.5 * MIB, 2.5 * MIB, 9 * MIB])
    [layout] = [table for table in report.tables if table.title.startswith("At a budget")]
    assert [[entry.text for entry in row] for row in layout.rows] == [
        ["FedAvg", "–", "65.00", "90.00"],
        ["FedProx", "–", "50.00", "80.00"],
    ]
    assert not any(table.title.startswith("At a budget") for table in report_on([Path("runs")]).tables)


def test_budgets_of_a_sweep_are_numbers() -> None:
    Path("base.yaml").write_text("model: {class_path: FedAvg}\n")
    for wrong in ("[-1]", "5"):
        text = f"base: base.yaml\nfolder: runs\nmethods: {{FedAvg: {{}}}}\nseeds: [0]\nreport: {{budgets: {wrong}}}\n"
        Path("bad.sweep.yaml").write_text(text)
        with pytest.raises(FederationError, match=r"report.budgets is .*, expected a list of MiB"):
            read_sweep(Path("bad.sweep.yaml"))
