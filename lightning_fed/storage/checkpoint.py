"""Checkpoints of a federation: complete or absent."""

import os
import shutil
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_fed.errors import DamagedError, FederationError
from lightning_fed.exchange import State
from lightning_fed.storage.client_store import ClientStore, FileRecord, owner_and_client, read_state, write_state
from lightning_fed.storage.disk import naming
from lightning_fed.storage.journal import Journal
from lightning_fed.storage.manifest import SERVER_FILE, Manifest, Setting, read_entries, read_manifest, round_of, write_manifest

Keep = Literal["all", "last", "none"]
"""Which checkpoints stay when a run is finished."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory. Random state is not part of it: every stream is a function of (seed, round, client).

    Args:
        path: its folder.
        run_folder: folder of its run.
        manifest: what its own file holds.
        server: the server's state.
        history: the metrics of every round so far.
        clients: the file of each client's private state.
        kept: the file of what the server keeps for each client.
        since: round of each client's last fit turn that was merged.
    """

    path: Path
    run_folder: Path
    manifest: Manifest
    server: State
    history: list[dict[str, float]] = field(default_factory=list)
    clients: dict[int, FileRecord] = field(default_factory=dict)
    kept: dict[int, FileRecord] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run: ``checkpoints/round_…/{manifest.json, server.safetensors}`` beside ``journal.jsonl`` and
    ``clients/``.

    A checkpoint is written into a folder with a leading dot, synced and renamed: it is complete or absent. The last two are kept,
    and those of the rounds that they name as the best so far: one round, or two where the last checkpoint names another than the
    one before, to which a run goes back if the last one is damaged. The states of clients, private ones and those that the server
    keeps for them, lie in one folder under names that are never written twice; the journal lists them, and the rounds' metrics: a
    checkpoint writes what is new since the last one, however long the run is. A run that goes on from an older checkpoint leaves
    the later ones as they are until its own first one is complete. What else lies in these folders is not looked at.

    Args:
        run_folder: folder of the run.
        continued: the checkpoint that the run goes on from.
        keep: how many checkpoints to keep, the best ones aside.
    """

    def __init__(self, run_folder: Path, continued: Checkpoint | None = None, keep: int = 2) -> None:
        self.run_folder = run_folder
        self.folder = run_folder / "checkpoints"
        self.clients_folder = run_folder / "clients"
        self.keep = keep
        self.journal = Journal(run_folder / "journal.jsonl", *([continued.manifest.journal] if continued else []))
        self._rows = len(continued.history) if continued else 0  # of the history, in the journal
        self._last = continued.manifest.round if continued else 0  # the round of the last checkpoint
        self._later: list[Path] = []  # checkpoints that go when there is a new one
        self._later_files: set[str] = set()  # which only they need
        self._replaced: deque[list[str]] = deque()  # files that the last checkpoints need, the newest one does not
        self._named: deque[int | None] = deque(maxlen=keep)  # the best rounds of which the last checkpoints know
        self._bests: dict[int, set[str]] = {}  # the files that the checkpoints of these rounds need
        self._held: set[str] = set()  # of these files, those that the last checkpoints do not need

    def save(
        self,
        round: int,
        identity: dict[str, Any],
        threads: int,
        history: list[dict[str, float]],
        server: State,
        store: ClientStore,
        since: Mapping[int, int],
        best: int | None = None,
        kept: ClientStore | None = None,
        settings: Mapping[str, Setting] | None = None,
    ) -> Path:
        """Write the checkpoint of a finished round and drop those too old to keep.

        Args:
            round: its number.
            identity: see :class:`Manifest`.
            threads: see :class:`Manifest`.
            history: the metrics of every round so far.
            server: the server's state.
            store: the private states.
            since: see :class:`Checkpoint`; of the clients for which it changed since the last checkpoint.
            best: see :class:`Manifest`. If it is this round, the checkpoint is kept until there is a better one.
            kept: what the server keeps for each client, in the folder of the private states.
            settings: see :class:`Manifest`.

        Raises:
            OSError: if the disk refuses; what was there before is still there.
        """
        aside = self.folder / ".new"
        shutil.rmtree(aside, ignore_errors=True)
        try:
            with naming(self.folder):
                aside.mkdir(parents=True)
                clients, replaced = store.flush()
                entry = {"round": round, "after": self._last, "history": history[self._rows :], "clients": clients}
                entry["since"] = dict(since)
                if kept is not None:
                    entry["kept"], others = kept.flush()
                    replaced += others
                extent = self.journal.append(entry)
                written = write_state(aside / SERVER_FILE, server)
                manifest = Manifest(round, identity, threads, written, extent, best, dict(settings or {}))
                write_manifest(aside / "manifest.json", manifest)
                for folder in (self.clients_folder, self.run_folder, aside):
                    if folder.is_dir():
                        _sync(folder)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)  # it takes room
            raise
        with naming(self.folder):
            for later in reversed(self._later):  # the last one first: what there is at any moment is of one past
                self._drop(later)
            final = aside.rename(self.path(round))
            _sync(self.folder)
        self._rows, self._last, self._later = len(history), round, []
        if best == round:
            self._bests[round] = store.files() | (kept.files() if kept is not None else set())
        self._prune(store, replaced, best)
        return final

    def latest(self) -> tuple[Checkpoint, list[str]]:
        """The newest complete checkpoint, and one line for each newer one that was passed over because it is damaged.

        Raises:
            FederationError: if there is none, or if one is not damaged, but says what no run can have written.
        """
        problems: list[str] = []
        for path in reversed(self.paths()):
            try:
                return self.load(path), problems
            except DamagedError as error:
                problems.append(str(error))
        raise FederationError(
            f"No complete checkpoint in {self.folder}: {'; '.join(problems) or 'it holds none'}. Start the run without --ckpt_path."
        )

    def best(self) -> Checkpoint:
        """The checkpoint of the round that was best on validation data.

        Raises:
            FederationError: if there is none, or if it is damaged.
        """
        newest, _ = self.latest()
        if newest.manifest.best is None:
            raise FederationError(
                f"No round of {self.run_folder} was measured on validation data, so none of them is the best: hold some out "
                "(data.val_share) in a new run, or give ckpt_path 'last'."
            )
        path = self.path(newest.manifest.best)
        if not path.is_dir():
            raise FederationError(
                f"The best round of {self.run_folder} is {newest.manifest.best}, of which it has no checkpoint: give ckpt_path "
                "'last', or continue the run until another round is better."
            )
        return self.load(path)

    def method(self) -> str | None:
        """The method of the run, as the newest checkpoint that can be read has it; None if none can."""
        for path in reversed(self.paths()):
            try:
                return str(read_manifest(path / "manifest.json").identity["method"])
            except FederationError:
                continue
        return None

    def path(self, round: int) -> Path:
        """Folder of the checkpoint of a round."""
        return self.folder / f"round_{round:06d}"

    def paths(self) -> list[Path]:
        """Folders of all checkpoints, oldest first."""
        found = {path: round_of(path) for path in self.folder.iterdir()} if self.folder.is_dir() else {}
        return sorted((path for path, round in found.items() if round is not None), key=lambda path: found[path] or 0)

    def load(self, path: Path) -> Checkpoint:
        """Read and verify one checkpoint.

        Raises:
            DamagedError: if any of its files is missing or damaged.
            FederationError: if they are whole, but not what a run writes.
        """
        try:
            manifest = read_manifest(path / "manifest.json")
            checkpoint = Checkpoint(path, self.run_folder, manifest, read_state(path, manifest.server))
            journal = Journal(self.journal.path, manifest.journal)
            for entry in read_entries(journal.read(), manifest, str(journal.path)):
                checkpoint.history.extend(entry.history)
                checkpoint.clients.update(entry.clients)
                checkpoint.kept.update(entry.kept)
                checkpoint.since.update(entry.since)
            for record in (*checkpoint.clients.values(), *checkpoint.kept.values()):
                read_state(self.clients_folder, record)
        except DamagedError as error:
            raise DamagedError(f"Checkpoint {path} cannot be used: {error}") from error
        except FederationError as error:
            raise FederationError(
                f"Checkpoint {path} cannot be used: {error} Delete its folder, or give another checkpoint as ckpt_path."
            ) from error
        return checkpoint

    def drop(self, all_but: set[str] | None) -> None:
        """Free what a finished run takes on disk: all checkpoints but the newest, and states that it does not need; checkpoints
        first, so that none is left that refers to what is gone.

        Args:
            all_but: names of the files of states that the newest checkpoint needs; None: keep no checkpoint, and no state at all.
        """
        paths = self.paths()
        for path in paths if all_but is None else paths[:-1]:
            shutil.rmtree(path)
        if all_but is None:
            for folder in (self.folder, self.clients_folder):
                shutil.rmtree(folder, ignore_errors=True)
            self.journal.path.unlink(missing_ok=True)
        elif self.clients_folder.is_dir():
            for path in self.clients_folder.glob("*.safetensors"):
                if path.name not in all_but:
                    path.unlink()

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """Prepare to continue a run from a checkpoint. What lies there of rounds that no checkpoint has is deleted; so are earlier
        checkpoints that are damaged, or that a run does not keep. Later ones stay, with all that they need, until the first new one
        is complete.
        """
        for left in (".new", ".old"):
            shutil.rmtree(self.folder / left, ignore_errors=True)
        recent, kept = [checkpoint], _files(checkpoint)
        named = {checkpoint.manifest.best}
        for path in reversed(self.paths()):  # a file goes with the last checkpoint that needs it
            round = round_of(path) or 0
            if round == checkpoint.manifest.round:
                continue
            try:
                other = self.load(path)
            except FederationError:
                other = None
            if round > checkpoint.manifest.round:
                self._later.insert(0, path)
                if other is not None:
                    self._later_files |= _files(other)
                    self.journal.extent = max(self.journal.extent, other.manifest.journal)
            elif other is None or not (round in named or len(recent) < self.keep):
                self._drop(path)
            else:
                if len(recent) < self.keep:
                    recent.append(other)
                    self._replaced.appendleft(sorted(_files(other) - kept))
                    kept |= _files(other)
                    named.add(other.manifest.best)
                if round in named:
                    self._bests[round] = _files(other)
        if checkpoint.manifest.best == checkpoint.manifest.round:
            self._bests[checkpoint.manifest.round] = _files(checkpoint)
        self._named.extend(older.manifest.best for older in reversed(recent))
        self._held = set().union(*self._bests.values()) - kept
        self._later_files -= kept | self._held
        self.journal.trim()
        if self.clients_folder.is_dir():
            for file in self.clients_folder.iterdir():
                if owner_and_client(file.name) and file.name not in kept | self._held | self._later_files:
                    with suppress(IsADirectoryError):  # which is not ours
                        file.unlink()

    def _drop(self, path: Path) -> None:
        """Delete a checkpoint, which is there as a whole or not at all."""
        old = self.folder / ".old"
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
        shutil.rmtree(old)

    def _prune(self, store: ClientStore, replaced: list[str], best: int | None) -> None:
        """Drop checkpoints that are neither among the last nor named by these as the best, then the files that only they needed."""
        self._named.append(best)
        self._bests = {round: files for round, files in self._bests.items() if round in self._named}
        best_paths = {self.path(round) for round in self._bests}
        for path in self.paths()[: -self.keep]:
            if path not in best_paths:
                self._drop(path)
        self._replaced.append(replaced)
        while len(self._replaced) >= self.keep:
            self._held.update(self._replaced.popleft())
        free = {name for name in self._held if not any(name in files for files in self._bests.values())}
        store.discard(free | self._later_files)
        self._held -= free
        self._later_files = set()


def _files(checkpoint: Checkpoint) -> set[str]:
    """The files of clients' states that a checkpoint refers to."""
    return {record["file"] for record in (*checkpoint.clients.values(), *checkpoint.kept.values())}


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
