"""A block for clients that have names."""

from pathlib import Path

import pandas as pd
from written_runs import write_sweep

from lightning_fed.experiments.report.report import report_on


def test_sites_have_a_row_each() -> None:
    """By their names, also if these look like a number, or like nothing."""
    sweep = write_sweep(Path("sweep"), {"FedAvg": [0.8, 0.9], "Standalone": [0.5, 0.5]})
    assert not any("each client" in table.title for table in report_on([sweep]).tables)
    for path in sweep.rglob("clients.csv"):
        better = 0.1 if "FedAvg/seed_1" in str(path) else 0.0
        table = pd.read_csv(path)
        better_by = {"test/accuracy": table["test/accuracy"] - better}
        table.assign(name=["007", "NA"], train=[30, 50], **better_by).to_csv(path, index=False)
    [table] = [table for table in report_on([sweep]).tables if table.title == "each client"]
    assert table.columns == ["", "train examples", "test examples", "FedAvg", "Standalone"]
    assert [[entry.text for entry in row] for row in table.rows] == [
        ["007", "30", "1", "45.00 ± 7.07", "50.00 ± 0.00"],
        ["NA", "50", "2", "95.00 ± 7.07", "100.00 ± 0.00"],
    ]
    report_on([sweep]).write(Path("report"))
    assert Path("report/sites.pdf").is_file()


def test_each_clients_model_on_each_ones_data_is_a_table_where_they_have_models_of_their_own() -> None:
    sweep = write_sweep(Path("sweep"), {"FedAvg": [0.8, 0.9], "Standalone": [0.5, 0.5]})
    for path in sweep.rglob("clients.csv"):
        own, seed = "Standalone" in str(path), 0.1 * ("seed_1" in str(path))
        table = pd.read_csv(path)
        table.assign(name=["North", "South"]).to_csv(path, index=False)
        pairs = [(trained, tested) for trained in (0, 1) for tested in (0, 1, -1)]
        values = [0.5 + seed + (0.2 if own and trained == tested else 0.0) for trained, tested in pairs]
        crossed = pd.DataFrame(pairs, columns=["trained", "tested"]).assign(**{"test/accuracy": values})
        crossed.loc[crossed["tested"] == -1, "test/accuracy"] = float("nan") if own else 0.5  # a metric that does not exist there
        crossed.to_csv(path.with_name("cross.csv"), index=False)
    [table] = [table for table in report_on([sweep]).tables if "each one's data" in table.title]
    assert table.title == "Standalone: each client's model on each one's data"
    assert table.columns == ["", "on North", "on South", "on all clients' data"]
    assert [[entry.text for entry in row] for row in table.rows] == [
        ["trained on North", "75.00 ± 7.07", "55.00 ± 7.07", "–"],
        ["trained on South", "55.00 ± 7.07", "75.00 ± 7.07", "–"],
    ]
