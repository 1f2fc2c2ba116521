"""Datasets of the Hugging Face hub, and optional packages."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning_fed.errors import FederationError, one_line


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
    """The package ``datasets``, without its progress bars."""
    datasets = optional("datasets", extra)
    shows_progress = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    finally:
        if shows_progress:
            datasets.enable_progress_bars()


def is_saved(folder: Path) -> bool:
    """Whether a folder is one that ``save_to_disk`` of the package ``datasets`` wrote."""
    of_one = all((folder / name).is_file() for name in ("dataset_info.json", "state.json"))
    return of_one or (folder / "dataset_dict.json").is_file()


def load_saved(folder: Path) -> Any:
    """What such a folder has: one set, or several by name."""
    with quiet_datasets() as datasets:
        try:
            return datasets.load_from_disk(str(folder))
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise unloadable(folder, error) from error


def unloadable(place: Path, error: Exception) -> FederationError:
    """The error for files from which the package ``datasets`` makes no dataset."""
    return FederationError(f"Could not load a dataset from {place.absolute()} ({one_line(error)}): check its files.")


PATIENCE = 5.0
"""Seconds after which a hub that does not answer counts as unreachable."""

T = TypeVar("T")


def from_hub_or_cache(load: Callable[..., T], name: str, kind: Literal["model", "dataset"] = "model") -> T:
    """Load something from the local cache if it is there, else from the hub. The hub is asked once, without its library's retries.

    Args:
        load: gets the name, ``local_files_only`` and, if given, ``revision``, as ``from_pretrained`` does.
        name: ``owner/name``, or ``owner/name@revision``: a branch, a tag or a commit.
        kind: what the name refers to.

    Raises:
        FederationError: immediately if the hub cannot be reached, or if there is no such thing.
    """
    import huggingface_hub
    from huggingface_hub import errors

    plain, _, revision = name.partition("@")
    pinned = {"revision": revision} if revision else {}
    with suppress(OSError, ValueError):
        return load(plain, local_files_only=True, **pinned)
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        raise FederationError(f"the {kind} {name!r} is not in the local cache, and HF_HUB_OFFLINE forbids asking the hub for it.")
    ask = huggingface_hub.HfApi().model_info if kind == "model" else huggingface_hub.HfApi().dataset_info
    try:
        ask(plain, revision=revision or None, timeout=PATIENCE)
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        said = " ".join(str(error).split("\n\n")[-1].split())
        raise FederationError(f"the Hugging Face hub has no {kind} {name!r}, or denies access to it: {said:.200}") from error
    except Exception as error:  # of whichever library makes the requests
        raise FederationError(
            f"the {kind} {name!r} is not in the local cache, and the Hugging Face hub cannot be reached ({one_line(error)}): check "
            "the name and the network, or give a folder."
        ) from error
    return load(plain, **pinned)


def cached_dataset(name: str, revision: str | None, config: str | None) -> Any:
    """The sets of a hub dataset that is in the cache. ``load_dataset`` has no option to use only the cache.

    Args:
        name: ``owner/name``.
        revision: a commit; the cache does not know branches and tags. None: the newest in the cache.
        config: configuration of the dataset, if it has several.

    Raises:
        OSError: if it is not in the cache.
        ValueError: if it is not in the cache, or in several configurations of which none is given.
    """
    from datasets.packaged_modules.cache.cache import Cache

    version = {"version": "auto", "hash": "auto"} if revision is None else {"version": "0.0.0", "hash": revision}
    config = "default" if config is None and revision is not None else config
    builder = Cache(repo_id=name, dataset_name=name.split("/")[-1], config_name=config, **version)
    builder.download_and_prepare()  # fails if files are missing, and downloads nothing
    return builder.as_dataset()


def load_from_hub(name: str, config: str | None = None, extra: str = "hub", option: str = "root") -> Any:
    """The sets of a hub dataset by name; the hub's library downloads and caches them.

    Args:
        name: ``owner/name``, or ``owner/name@revision``.
        config: configuration of the dataset, if it has several.
        extra: extra to install if the hub's library is missing.
        option: option of the data that may be set to a folder instead.
    """
    with quiet_datasets(extra) as datasets:

        def load(plain: str, revision: str | None = None, local_files_only: bool = False) -> Any:
            if local_files_only:
                return cached_dataset(plain, revision, config)
            return datasets.load_dataset(plain, config, revision=revision)

        try:
            return from_hub_or_cache(load, name, "dataset")
        except (OSError, ValueError) as error:
            said = one_line(error).removesuffix(".")
            raise FederationError(
                f"Could not load {name}: {said}. Or set --data.init_args.{option} to a folder with its files."
            ) from error
