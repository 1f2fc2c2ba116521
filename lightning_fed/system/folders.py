"""Folders of the file system."""

import logging
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path

log = logging.getLogger(__name__)


def from_home(path: Path | str) -> Path:
    """A path as users write it: ``~`` is their home, which a shell does not replace in ``--option=~/runs``, nor anybody in a file.
    A name that begins with ``~`` and is no user's stays as it is.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser() raises an error for such names


def walked(folders: Iterable[Path]) -> Iterator[tuple[Path, set[str]]]:
    """All folders at or below some folders, with the names of their files. Links are followed, last, so that a folder has its own
    name if it can; each folder comes once. A line names those that cannot be read. Folders may disappear meanwhile: a run deletes
    its earlier checkpoints.
    """
    due, seen = deque(folders), set[Path]()
    while due:
        for place, below, files in os.walk(due.popleft(), onerror=_report):
            path = Path(place)
            if (real := path.resolve()) in seen:
                below.clear()
                continue
            seen.add(real)
            due += [path / name for name in below if (path / name).is_symlink()]
            yield path, set(files)


def numbered(paths: Iterable[Path]) -> dict[Path, int]:
    """The folders of runs among some paths, which are called ``version_<n>``, in the order of n, with n."""
    found = [(path, int(match[1])) for path in paths if (match := re.fullmatch(r"version_(\d+)", path.name))]
    return dict(sorted(found, key=itemgetter(1)))


def _report(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        log.error(f"Left out: {os.fsdecode(error.filename)} cannot be read ({error.strerror}).")
