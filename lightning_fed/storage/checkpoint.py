"""Checkpoints of a federation: complete or absent."""

import json
import os
import shutil
import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_fed.errors import FederationError
from lightning_fed.exchange import State
from lightning_fed.storage.client_store import ClientStore, FileRecord, read_state, write_state
from lightning_fed.storage.journal import Extent, Journal

FORMAT = 2

Keep = Literal["all", "last", "none"]
"""Which checkpoints stay when a run is finished."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint's own file holds; the rest is in the journal and in the files of states.

    Args:
        round: the last finished round.
        identity: what must agree with a run that continues it: method, seed, data.
        threads: torch threads that the run has computed with: sums depend on it.
        server: the server's file.
        journal: how much of the journal belongs to it.
        best: the round that was best on validation data so far; None: nothing was measured on such data.
    """

    round: int
    identity: dict[str, Any]
    threads: int
    server: FileRecord
    journal: Extent
    best: int | None = None


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
    checkpoint writes what is new since the last one, however long the run is.

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
        """
        final = self.path(round)
        aside = self.folder / f".round_{round:06d}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        clients, replaced = store.flush()
        entry = {"round": round, "history": history[self._rows :], "clients": clients, "since": dict(since)}
        if kept is not None:
            entry["kept"], others = kept.flush()
            replaced += others
        extent = self.journal.append(entry)
        self._rows = len(history)
        manifest = Manifest(round, identity, threads, write_state(aside / "server.safetensors", server), extent, best)
        _write_manifest(aside / "manifest.json", manifest)
        for folder in (self.clients_folder, self.run_folder, aside):
            if folder.is_dir():
                _sync(folder)
        aside.rename(final)
        _sync(self.folder)
        if best == round:
            self._bests[round] = store.files() | (kept.files() if kept is not None else set())
        self._prune(store, replaced, best)
        return final

    def latest(self) -> tuple[Checkpoint, list[str]]:
        """The newest complete checkpoint, and one line for each newer one that was passed over because it is damaged.

        Raises:
            FederationError: if there is none.
        """
        problems: list[str] = []
        for path in reversed(self.paths()):
            try:
                return self.load(path), problems
            except FederationError as error:
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
                return str(_read_manifest(path / "manifest.json").identity["method"])
            except FederationError:
                continue
        return None

    def path(self, round: int) -> Path:
        """Folder of the checkpoint of a round."""
        return self.folder / f"round_{round:06d}"

    def paths(self) -> list[Path]:
        """Folders of all checkpoints, oldest first."""
        return sorted(self.folder.glob("round_*"))

    def load(self, path: Path) -> Checkpoint:
        """Read and verify one checkpoint. Raises :class:`FederationError` if any of its files is missing or damaged."""
        try:
            manifest = _read_manifest(path / "manifest.json")
            checkpoint = Checkpoint(path, self.run_folder, manifest, read_state(path, manifest.server))
            for entry in Journal(self.journal.path, manifest.journal).read():
                checkpoint.history.extend(entry["history"])
                checkpoint.clients.update({int(client): record for client, record in entry["clients"].items()})
                checkpoint.kept.update({int(client): record for client, record in entry.get("kept", {}).items()})
                checkpoint.since.update({int(client): round for client, round in entry["since"].items()})
            for record in (*checkpoint.clients.values(), *checkpoint.kept.values()):
                read_state(self.clients_folder, record)
        except FederationError as error:
            raise FederationError(f"Checkpoint {path} cannot be used: {error}") from error
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

    def discard_after(self, checkpoint: Checkpoint) -> None:
        """Drop what later rounds left, when a run is continued from a checkpoint: their checkpoints, and files of states that none
        of the others refers to. Of the earlier ones, those stay that a run keeps and that are not damaged.
        """
        recent, kept = [checkpoint], _files(checkpoint)
        named = {checkpoint.manifest.best}
        for path in reversed(self.paths()):  # a file goes with the last checkpoint that needs it
            if path.name == checkpoint.path.name:
                continue
            is_best = path in {self.path(round) for round in named if round is not None}
            if path.name > checkpoint.path.name or not (is_best or len(recent) < self.keep):
                shutil.rmtree(path)
                continue
            try:
                older = self.load(path)
            except FederationError:
                shutil.rmtree(path)  # damaged: no use to anybody
                continue
            if len(recent) < self.keep:
                recent.append(older)
                self._replaced.appendleft(sorted(_files(older) - kept))
                kept |= _files(older)
                named.add(older.manifest.best)
            if older.manifest.round in named:
                self._bests[older.manifest.round] = _files(older)
        if checkpoint.manifest.best == checkpoint.manifest.round:
            self._bests[checkpoint.manifest.round] = _files(checkpoint)
        self._named.extend(older.manifest.best for older in reversed(recent))
        self._held = set().union(*self._bests.values()) - kept
        if self.clients_folder.is_dir():
            for file in self.clients_folder.iterdir():
                if file.name not in kept | self._held:
                    file.unlink()

    def _prune(self, store: ClientStore, replaced: list[str], best: int | None) -> None:
        """Drop checkpoints that are neither among the last nor named by these as the best, then the files that only they needed."""
        self._named.append(best)
        self._bests = {round: files for round, files in self._bests.items() if round in self._named}
        best_paths = {self.path(round) for round in self._bests}
        for path in self.paths()[: -self.keep]:
            if path not in best_paths:
                shutil.rmtree(path)
        self._replaced.append(replaced)
        while len(self._replaced) >= self.keep:
            self._held.update(self._replaced.popleft())
        free = {name for name in self._held if not any(name in files for files in self._bests.values())}
        store.discard(free)
        self._held -= free


def _files(checkpoint: Checkpoint) -> set[str]:
    """The files of clients' states that a checkpoint refers to."""
    return {record["file"] for record in (*checkpoint.clients.values(), *checkpoint.kept.values())}


def _write_manifest(path: Path, manifest: Manifest) -> None:
    body = json.dumps(asdict(manifest))
    with path.open("w") as file:
        file.write(json.dumps({"format": FORMAT, "crc32": zlib.crc32(body.encode()), "body": body}))
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(path: Path) -> Manifest:
    if not path.is_file():
        raise FederationError(f"{path} is missing")
    try:
        document = json.loads(path.read_bytes())
        body, crc32, version = document["body"], document["crc32"], document["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise FederationError(f"{path} is damaged ({error})") from error
    if version != FORMAT:
        raise FederationError(f"{path} has format {version}, this version reads {FORMAT}")
    if zlib.crc32(body.encode()) != crc32:
        raise FederationError(f"{path} is damaged (its checksum does not match)")
    fields = json.loads(body)
    return Manifest(**fields | {"journal": Extent(*fields["journal"])})


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
