"""Renamed options and metrics: errors for an old name suggest the new one."""

from collections.abc import Mapping

OPTIONS = {
    "adapt_epochs": "fine_tuning.epochs",
    "adapt_steps": "fine_tuning.steps",
    "adapt_layers": "fine_tuning.part",
    "adapt_when": "fine_tuning.when",
    "adapt_optimizer": "fine_tuning.optimizer",
    "local_steps": "steps",
    "lone_example": "single_example",
    "participants": "eligible_clients",
    "room": "between",
    "reparametrise": "reparametrize",
    "test_file": "test_path",
    "train_file": "path",
}
"""Renamed options of configurations."""

METRICS = {
    "adapt/": "fine_tune/",
    "adapted/": "fine_tuned/",
    "headline": "monitor",
    "round/lost": "round/failed_clients",
}
"""Renamed columns of tables, or prefixes of them."""


def hint(name: str, renamed: Mapping[str, str]) -> str:
    """The new name of an option or metric of :data:`OPTIONS` or :data:`METRICS`, as the end of an error message; empty if it was
    not renamed.
    """
    old = next((old for old in renamed if name == old or (old.endswith("/") and name.startswith(old))), None)
    return "" if old is None else f" (it is called {renamed[old]}{name.removeprefix(old)} now)"
