"""Hooks into the rounds of a federation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_fed.exchange import ClientUpdate

if TYPE_CHECKING:
    from lightning_fed.federation import Federation


class FederationCallback:
    """Does something at certain moments of a run; every hook does nothing by default.

    What there is to look at: ``federation.round``, ``.history`` (a dict of metrics per round), ``.results`` (the last measured
    metrics by client), ``.clients``, ``.data``, ``.server``, ``.folder`` (the run's folder, or None) and ``.loggers``.
    """

    def on_fit_start(self, federation: Federation) -> None:
        """Before the first round, after a checkpoint was loaded."""

    def on_turn_end(self, federation: Federation, update: ClientUpdate) -> None:
        """After a participant's update was received."""

    def on_round_end(self, federation: Federation) -> None:
        """After a round was measured; its metrics are ``federation.history[-1]``."""

    def on_fit_end(self, federation: Federation) -> None:
        """After the last round."""

    def on_measure_end(self, federation: Federation, metrics: dict[str, float]) -> None:
        """After ``validate`` or ``test`` measured all clients."""

    def teardown(self, federation: Federation) -> None:
        """At the very end, also when the run fails or is interrupted."""
