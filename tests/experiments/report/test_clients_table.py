"""A block for clients that have names."""

from pathlib import Path

import pandas as pd
from written_runs import write_sweep

from lightning_fed.experiments.report.report import report_on


def test_sites_have_a_row_each() -> None:
    sweep = write_sweep(Path("sweep"), {"FedAvg": [0.8, 0.9], "Standalone": [0.5, 0.5]})
    assert not any("each client" in table.title for table in report_on([sweep]).tables)
    for path in sweep.rglob("clients.csv"):
        better = 0.1 if "FedAvg/seed_1" in str(path) else 0.0
        table = pd.read_csv(path)
        table.assign(name=["North", "South"], **{"test/accuracy": table["test/accuracy"] - better}).to_csv(path, index=False)
    [table] = [table for table in report_on([sweep]).tables if table.title == "each client"]
    assert table.columns == ["", "test examples", "FedAvg", "Standalone"]
    assert [[entry.text for entry in row] for row in table.rows] == [
        ["North", "1", "45.00 ± 7.07", "50.00 ± 0.00"],
        ["South", "2", "95.00 ± 7.07", "100.00 ± 0.00"],
    ]
