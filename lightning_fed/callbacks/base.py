"""Hooks into the rounds of a run."""

from lightning_fed.core.messages import ClientUpdate
from lightning_fed.federation.run import Run


class FederationCallback:
    """Does something at certain moments of a run; every hook does nothing by default.

    What there is to look at is in :class:`lightning_fed.federation.run.Run`: ``run.round``, ``.history`` (a dict of metrics per round),
    ``.results`` (the last measured metrics by client), ``.clients``, ``.data``, ``.server``, ``.folder`` (the run's folder, or
    None) and ``.loggers``.
    """

    def on_fit_start(self, run: Run) -> None:
        """Before the first round, after a checkpoint was loaded."""

    def on_turn_end(self, run: Run, update: ClientUpdate) -> None:
        """After a participant's update was received."""

    def on_round_end(self, run: Run) -> None:
        """After a round was measured; its metrics are ``run.history[-1]``."""

    def on_fit_end(self, run: Run) -> None:
        """After the last round."""

    def on_measure_end(self, run: Run, metrics: dict[str, float]) -> None:
        """After ``validate`` or ``test`` measured all clients."""

    def teardown(self, run: Run) -> None:
        """At the very end, also when the run fails or is interrupted."""
