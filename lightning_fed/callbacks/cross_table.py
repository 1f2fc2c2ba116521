"""Each client's model on each client's test data, as a CSV file."""

from lightning_fed.callbacks.base import FederationCallback, RunView
from lightning_fed.callbacks.table import write_table


class CrossTable(FederationCallback):
    """Writes ``cross.csv``: metrics of each client's model on the data of each client after the last round, a row for each pair
    (``trained``, ``tested``), and on the pooled data (``tested`` is -1). It is meant for few clients, such as hospitals: N clients
    take N × (N + 1) evaluations. A report shows it as a table *trained on site i, tested on site j*.

    With data at sites there is no such file.
    """

    def on_fit_end(self, run: RunView) -> None:
        if run.folder is None or not run.data.at_hand:
            return
        rows = [
            {"trained": client.id, "tested": tested, **measured}
            for client in run.clients
            for tested, measured in run.measure_across(client.id).items()
        ]
        write_table(run.folder / "cross.csv", rows)
