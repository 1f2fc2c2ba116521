"""Options and metrics that have another name now: whoever uses the old one is told the new one."""

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
    "reparametrise": "reparametrize",
    "test_file": "test_path",
    "train_file": "path",
}
"""Of configurations."""

METRICS = {
    "adapt/": "fine_tune/",
    "adapted/": "fine_tuned/",
    "headline": "monitor",
    "round/lost": "round/failed_clients",
}
"""Columns of tables, or what their names begin with."""


def new_name(name: str, renamed: Mapping[str, str]) -> str | None:
    """What is called ``name`` no more; None if it never was.

    Args:
        name: as it is given.
        renamed: :data:`OPTIONS` or :data:`METRICS`.
    """
    old = next((old for old in renamed if name == old or (old.endswith("/") and name.startswith(old))), None)
    return renamed[old] + name.removeprefix(old) if old is not None else None


def hint(name: str, renamed: Mapping[str, str]) -> str:
    """That, for the end of an error's sentence; empty if there is none."""
    new = new_name(name, renamed)
    return f" (it is called {new} now)" if new else ""
