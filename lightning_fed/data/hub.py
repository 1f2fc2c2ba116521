"""Datasets of the Hugging Face hub, and packages that only some users need."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from lightning_fed.errors import FederationError


def optional(package: str, extra: str) -> Any:
    """Import a package that one of the extras installs."""
    try:
        return import_module(package)
    except ImportError as error:
        raise FederationError(
            f'These data need the package {package}, which cannot be imported ({error}): pip install "lightning-fed[{extra}]".'
        ) from error


@contextmanager
def quiet_datasets(extra: str = "hub") -> Iterator[Any]:
    """The package datasets, without its progress bars.

    Args:
        extra: what to install where it is missing.
    """
    datasets = optional("datasets", extra)
    shows_progress = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    finally:
        if shows_progress:
            datasets.enable_progress_bars()


def load_from_hub(name: str, *config: str, extra: str = "hub", option: str = "root") -> Any:
    """The sets of a hub dataset by name; the hub's library downloads and caches them.

    Args:
        name: ``owner/name``.
        *config: which of its configurations, if it has several.
        extra: what to install where the hub's library is missing.
        option: of the data, which may be set to a folder instead.
    """
    with quiet_datasets(extra) as datasets:
        try:
            return datasets.load_dataset(name, *config)
        except (OSError, ValueError) as error:
            raise FederationError(
                f"Could not load {name} from the Hugging Face hub ({error}): check the name and the network, or set "
                f"--data.init_args.{option} to a folder with its files."
            ) from error
