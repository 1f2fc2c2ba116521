"""Checkpoints of a federation, which are complete or absent."""

from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from lightning_fed.errors import DamagedError, FederationError
from lightning_fed.storage.client_store import FILE, ClientStore, FileRecord, read_state, write_state
from lightning_fed.storage.index import CLIENTS, ClientEntry, read_index, write_index
from lightning_fed.storage.index import NAME as INDEX_NAME
from lightning_fed.storage.manifest import SERVER_FILE, Manifest, Metrics, read_manifest, round_named, write_manifest
from lightning_fed.system.disk import move_aside, naming, remove, sync_folder
from lightning_fed.tensors import State

Keep = Literal["all", "last", "none"]
"""Which checkpoints a finished run keeps."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory. It has no random state, because every random stream is a function of (seed, round, client).

    Args:
        path: folder of the checkpoint.
        run_folder: folder of the run.
        manifest: content of its manifest.
        server: the server's state.
        history: the metrics of all rounds so far whose files are not lost; includes its own round.
        entries: the files of each client, by index file.
    """

    path: Path
    run_folder: Path
    manifest: Manifest
    server: State
    history: list[Metrics] = field(default_factory=list)
    entries: dict[int, dict[int, ClientEntry]] = field(default_factory=dict)

    @property
    def clients(self) -> dict[int, FileRecord]:
        """The file of each client's private state."""
        return {client: one.client for own in self.entries.values() for client, one in own.items() if one.client is not None}

    @property
    def client_state(self) -> dict[int, FileRecord]:
        """The file of what the server keeps for each client."""
        return {client: one.server for own in self.entries.values() for client, one in own.items() if one.server is not None}

    @property
    def last_rounds(self) -> dict[int, int]:
        """Round of each client's last merged fit turn."""
        return {
            client: one.last_round for own in self.entries.values() for client, one in own.items() if one.last_round is not None
        }

    @property
    def merged_turns(self) -> dict[int, int]:
        """Number of each client's merged fit turns."""
        return {client: one.turns for own in self.entries.values() for client, one in own.items() if one.turns}

    @property
    def missing_rounds(self) -> list[int]:
        """Rounds whose metrics are lost."""
        return sorted(set(range(1, self.manifest.round)) - {int(row["round"]) for row in self.history})


class Checkpoints:
    """The checkpoints of a run: ``checkpoints/round_…/{manifest.json, server.safetensors}``, and the files that manifests name:
    ``index/`` and, named in turn by these, ``clients/``.

    A checkpoint is written into a folder with a leading dot, synced and renamed, so that it is complete or absent. The last two are
    kept, and those of the rounds that they name as the best so far: one round, or two if the last checkpoint names another one than
    the previous one, which the run falls back to if the last one is damaged. The manifests of deleted checkpoints stay in
    ``history/`` for the metrics of their rounds.

    A file is never changed once it has its name, and files that no manifest names are deleted. The states of clients (private ones
    and those that the server keeps) are in ``clients/`` under unique names. An index file names those of at most 256 clients. A
    checkpoint writes only the index files of clients that have changed and reuses the others, so that the amount written does not
    grow with the run. A run that continues from an older checkpoint keeps the later ones until its own first one is complete.

    Args:
        run_folder: folder of the run.
        continued: the checkpoint that the run continues from.
        keep: number of checkpoints to keep besides the best ones.
    """

    def __init__(self, run_folder: Path, continued: Checkpoint | None = None, keep: int = 2) -> None:
        self.run_folder = run_folder
        self.folder = run_folder / "checkpoints"
        self.clients_folder = run_folder / "clients"
        self.history_folder = run_folder / "history"
        self.index_folder = run_folder / "index"
        self.keep = keep
        self._round = continued.manifest.round if continued else 0  # of the last checkpoint
        self._names = dict(continued.manifest.index) if continued else {}  # its index
        self._last_rounds = continued.last_rounds if continued else {}
        self._turns = continued.merged_turns if continued else {}
        self._changed: set[int] = set()  # index files to write
        self._manifests: dict[int, Manifest] = {}  # of the complete checkpoints, by round
        self._later: set[int] = set()  # rounds of those to delete after the next checkpoint, also damaged ones
        self._files: dict[str, set[str]] = {}  # files of states by the index file that names them

    def save(
        self,
        manifest: Manifest,
        history: list[Metrics],
        server: State,
        store: ClientStore,
        last_rounds: Mapping[int, int],
        client_state: ClientStore | None = None,
        merged_turns: Mapping[int, int] | None = None,
    ) -> Path:
        """Write the checkpoint of a finished round and delete those that are too old.

        Args:
            manifest: the manifest, without the names of other files and the rows. If its best round is this one, the checkpoint is
                kept until there is a better one.
            history: the metrics of every round so far.
            server: the server's state.
            store: the private states.
            last_rounds: see :class:`Checkpoint`; for the clients for which it has changed since the last checkpoint.
            client_state: what the server keeps for each client, in the folder of the private states.
            merged_turns: see :class:`Checkpoint`; for the same clients as ``last_rounds``.

        Raises:
            OSError: if the disk fails; existing checkpoints are not affected.
        """
        round, aside = manifest.round, self.folder / ".new"
        remove(aside)
        try:
            aside.mkdir(parents=True)
            self._turns |= merged_turns or {}
            self._write_index(store, last_rounds, client_state)
            written = write_state(aside / SERVER_FILE, server)
            rows = history[self._round - round :]
            manifest = replace(manifest, server=written, index=dict(self._names), rows=rows)
            write_manifest(aside / "manifest.json", manifest)
            for folder in (self.clients_folder, self.index_folder, self.run_folder, aside):
                if folder.is_dir():
                    sync_folder(folder)
        except OSError:
            with suppress(OSError):
                remove(aside)  # it takes space
            raise
        for later in sorted(self._later, reverse=True):  # last first: at any moment, what is left is a consistent past
            self._drop(self.path(later))
            self._manifests.pop(later, None)
        if self._later:
            self._forget_rows()
        final = self.path(round)
        move_aside(final)
        with naming(final):
            aside.rename(final)
        sync_folder(self.folder)
        self._round, self._changed, self._manifests[round] = round, set(), manifest
        replaced, self._later = bool(self._later), set()
        self._prune()
        if replaced:
            self._sweep()
        return final

    def latest(self) -> tuple[Checkpoint, list[str]]:
        """The newest complete checkpoint, and a line for each newer one that was skipped because it is damaged or not a folder.

        Raises:
            FederationError: if there is none.
        """
        problems: list[str] = []
        for path in reversed(self._called_checkpoints()):
            try:
                if _is_folder(path):
                    return self.load(path), problems
                problems.append(f"{path} is not a folder, and so not a checkpoint")
            except DamagedError as error:
                problems.append(str(error))
        raise FederationError(
            f"No complete checkpoint in {self.folder}: {'; '.join(problems) or 'it holds none'}. Start the run without --ckpt_path."
        )

    def best(self) -> Checkpoint:
        """The checkpoint of the best round on validation data.

        Raises:
            FederationError: if there is none, or if it is damaged.
        """
        newest, _ = self.latest()
        if newest.manifest.best is None:
            raise FederationError(
                f"No round of {self.run_folder} was evaluated on validation data, so none of them is the best: hold some out "
                "(data.val_share) in a new run, or give ckpt_path 'last'."
            )
        round = newest.manifest.best.round
        if not self.path(round).is_dir():
            raise FederationError(
                f"The best round of {self.run_folder} is {round}, of which it has no checkpoint: give ckpt_path 'last', or "
                "continue the run until another round is better."
            )
        return self.load(self.path(round))

    def method(self) -> str | None:
        """The method of the run, from the newest checkpoint that can be read; None if none can."""
        for path in reversed(self.paths()):
            try:
                return str(read_manifest(path / "manifest.json").identity["method"])
            except FederationError:
                continue
        return None

    @property
    def is_empty(self) -> bool:
        """Whether there is no checkpoint, neither on disk (which may be gone for a moment) nor of those written and read so far."""
        return not self._manifests and not self.paths()

    def path(self, round: int) -> Path:
        """Folder of the checkpoint of a round."""
        return self.folder / f"round_{round:06d}"

    def paths(self) -> list[Path]:
        """Folders of all checkpoints, oldest first."""
        return [path for path in self._called_checkpoints() if _is_folder(path)]

    def load(self, path: Path, history: bool = True, verified: Container[str] = ()) -> Checkpoint:
        """Read and verify the checkpoint in a folder, with the metrics of earlier rounds if ``history``; ``verified`` are names of
        files of clients' states that are known to be intact.

        Raises:
            DamagedError: if any of its files is missing or damaged.
        """
        try:
            manifest = read_manifest(path / "manifest.json")
            server = read_state(path, manifest.server)
            entries = {number: read_index(self.index_folder / name) for number, name in manifest.index.items()}
            for record in (record for own in entries.values() for entry in own.values() for record in entry.records):
                if record["file"] not in verified:
                    read_state(self.clients_folder, record)
        except DamagedError as error:
            raise DamagedError(f"Checkpoint {path} cannot be used: {error}") from error
        return Checkpoint(path, self.run_folder, manifest, server, self._rows(manifest) if history else manifest.rows, entries)

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """Prepare to continue a run from a checkpoint. Files of rounds without a checkpoint are deleted, and so are earlier
        checkpoints that are damaged or no longer kept. Later ones stay, with their files, until the first new one is complete.
        """
        for left in (self.folder / ".new", self.folder / ".old", self.index_folder / ".new"):
            remove(left)
        verified = {record["file"] for record in (*checkpoint.clients.values(), *checkpoint.client_state.values())}
        for path in self.paths():
            round = round_named(path.name) or 0
            try:
                other = checkpoint if round == checkpoint.manifest.round else self.load(path, False, verified)
            except FederationError:
                other = None
            if round > checkpoint.manifest.round:
                self._later.add(round)
            elif other is None:
                self._drop(path)
            if other is not None:
                self._manifests[round] = other.manifest
                self._files |= {name: _files(other.entries[number]) for number, name in other.manifest.index.items()}
        self._prune()
        if not self._later:
            self._forget_rows()
        self._sweep()

    def finish(self, keep: Keep, stores: Iterable[ClientStore]) -> None:
        """Free a finished run's disk space, but for the checkpoints to keep and the files of stores that are still in use;
        checkpoints go first, so that none is left that names missing files.
        """
        if keep == "all":
            return
        kept = sorted(self._manifests.keys() - self._later)
        for round in kept[:-1] if keep == "last" else kept:
            self._drop(self.path(round))
            del self._manifests[round]
        self._sweep(set().union(*(store.in_use() for store in stores)))
        if keep == "none":
            remove(self.history_folder)
        for folder in (self.folder, self.clients_folder, self.index_folder):
            with suppress(OSError):  # it is not empty
                folder.rmdir()

    def _write_index(self, store: ClientStore, last_rounds: Mapping[int, int], client_state: ClientStore | None) -> None:
        """Write all states, and the index files that have changed."""
        self._last_rounds |= last_rounds
        changed = {*store.flush(), *(client_state.flush() if client_state is not None else ()), *last_rounds}
        self._changed |= {client // CLIENTS for client in changed}
        servers = client_state.records if client_state is not None else {}
        for number in sorted(self._changed):
            clients = range(number * CLIENTS, (number + 1) * CLIENTS)
            last, turns = self._last_rounds, self._turns
            found = {k: ClientEntry(store.records.get(k), servers.get(k), last.get(k), turns.get(k, 0)) for k in clients}
            entries = {client: entry for client, entry in found.items() if entry != ClientEntry(None, None, None)}
            self._names[number] = write_index(self.index_folder, entries)
            self._files[self._names[number]] = _files(entries)

    def _rows(self, manifest: Manifest) -> list[Metrics]:
        """The metrics of all rounds up to that of a checkpoint, as far as they can be read."""
        rows: dict[int, Metrics] = {}
        earlier = [(round_named(path.stem), path) for path in self.history_folder.glob("round_*.json")]
        # Of a round whose checkpoint was being deleted, the manifest may already be in the history.
        earlier += [(round_named(path.name), path / "manifest.json") for path in self.paths()]
        for path in (path for round, path in earlier if round is not None and round < manifest.round):
            with suppress(FederationError):  # leaves a gap in the table
                rows |= {int(row["round"]): row for row in read_manifest(path).rows}
        rows |= {int(row["round"]): row for row in manifest.rows}
        return [rows[round] for round in sorted(rows)]

    def _called_checkpoints(self) -> list[Path]:
        """Paths with the name of a checkpoint's folder, oldest first."""
        found = {path: round_named(path.name) for path in self.folder.iterdir()} if self.folder.is_dir() else {}
        return sorted((path for path, round in found.items() if round is not None), key=lambda path: found[path] or 0)

    def _drop(self, path: Path) -> None:
        """Delete a checkpoint atomically. Its manifest stays, for the metrics that it holds."""
        if not _is_folder(path):
            return  # another process deleted it
        old = self.folder / ".old"
        remove(old)
        self.history_folder.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            (path / "manifest.json").replace(self.history_folder / f"{path.name}.json")
        path.rename(old)
        remove(old)

    def _prune(self) -> None:
        """Delete checkpoints that are neither among the last nor named by these as the best, and files that only they named."""
        kept = sorted(self._manifests.keys() - self._later)
        recent = kept[-self.keep :]
        best = {one.best.round for one in map(self._manifests.__getitem__, recent) if one.best is not None}
        gone = [self._manifests.pop(round) for round in kept if round not in {*recent, *best}]
        for manifest in gone:
            self._drop(self.path(manifest.round))
        for number, name in {item for manifest in gone for item in manifest.index.items()}:
            others = {manifest.index.get(number, "") for manifest in self._manifests.values()}
            if name not in others:  # only files for the same clients can name the same states
                files = self._files.pop(name, set()).difference(*(self._files.get(other, ()) for other in others))
                for path in (self.index_folder / name, *(self.clients_folder / file for file in files)):
                    path.unlink(missing_ok=True)

    def _sweep(self, in_use: Iterable[str] = ()) -> None:
        """Delete files of a run that no manifest names and that are not in use."""
        names = {name for one in self._manifests.values() for name in one.index.values()}
        self._files = {name: files for name, files in self._files.items() if name in names}
        files = set(in_use).union(*self._files.values())
        for folder, named, ours in (
            (self.index_folder, names, INDEX_NAME.fullmatch),
            (self.clients_folder, files, FILE.fullmatch),
        ):
            for path in folder.iterdir() if folder.is_dir() else ():
                if ours(path.name) and path.name not in named:
                    with suppress(IsADirectoryError):  # it does not belong to the run
                        path.unlink()

    def _forget_rows(self) -> None:
        """Delete the metrics of rounds that are repeated."""
        for path in self.history_folder.glob("round_*.json"):
            if (round_named(path.stem) or 0) > self._round:
                path.unlink()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _files(entries: Mapping[int, ClientEntry]) -> set[str]:
    return {record["file"] for entry in entries.values() for record in entry.records}
