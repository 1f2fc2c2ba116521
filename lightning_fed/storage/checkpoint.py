"""Checkpoints of a federation: complete or absent."""

from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from lightning_fed.errors import DamagedError, FederationError
from lightning_fed.storage.client_store import FILE, ClientStore, FileRecord, read_state, write_state
from lightning_fed.storage.disk import move_aside, naming, remove, sync_folder
from lightning_fed.storage.index import CLIENTS, ClientEntry, read_index, write_index
from lightning_fed.storage.index import NAME as INDEX_NAME
from lightning_fed.storage.manifest import SERVER_FILE, Manifest, Metrics, read_manifest, round_named, write_manifest
from lightning_fed.tensors import State

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
        history: the metrics of every round so far, without those of which the file is lost; its own is there.
        entries: what there is of each client, by index file.
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
        """Round of each client's last fit turn that was merged."""
        return {
            client: one.last_round for own in self.entries.values() for client, one in own.items() if one.last_round is not None
        }

    @property
    def merged_turns(self) -> dict[int, int]:
        """How many of each client's fit turns were merged."""
        return {client: one.turns for own in self.entries.values() for client, one in own.items() if one.turns}

    @property
    def missing_rounds(self) -> list[int]:
        """Rounds whose metrics are lost."""
        return sorted(set(range(1, self.manifest.round)) - {int(row["round"]) for row in self.history})


class Checkpoints:
    """The checkpoints of one run: ``checkpoints/round_…/{manifest.json, server.safetensors}``, and what their manifests name:
    ``index/`` and, named by the files there, ``clients/``.

    A checkpoint is written into a folder with a leading dot, synced and renamed: it is complete or absent. The last two are kept,
    and those of the rounds that they name as the best so far: one round, or two where the last checkpoint names another than the
    one before, to which a run goes back if the last one is damaged. Of those that go, the manifest stays in ``history/`` for the
    metrics of its round.

    No file is changed once it has its name, and what no manifest names goes. The states of clients, private ones and those that the
    server keeps for them, lie in ``clients/`` under names that are never written twice. An index file names those of at most 256
    clients; a checkpoint writes the index files of the clients of which something changed, and names those of the others as the
    checkpoint before did: what it writes does not grow with the run. A run that goes on from an older checkpoint leaves the later
    ones as they are until its own first one is complete.

    Args:
        run_folder: folder of the run.
        continued: the checkpoint that the run goes on from.
        keep: how many checkpoints to keep, the best ones aside.
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
        self._changed: set[int] = set()  # index files that are to be written
        self._manifests: dict[int, Manifest] = {}  # of the whole checkpoints that are there, by round
        self._later: set[int] = set()  # rounds of those that go when there is a new one, also damaged ones
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
        """Write the checkpoint of a finished round and drop those too old to keep.

        Args:
            manifest: what its own file is to hold, but for the names of other files and the rows. If its best round is this one,
                the checkpoint is kept until there is a better one.
            history: the metrics of every round so far.
            server: the server's state.
            store: the private states.
            last_rounds: see :class:`Checkpoint`; of the clients for which it changed since the last checkpoint.
            client_state: what the server keeps for each client, in the folder of the private states.
            merged_turns: see :class:`Checkpoint`; of the same clients as ``last_rounds``.

        Raises:
            OSError: if the disk refuses; what was there before is still there.
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
                remove(aside)  # it takes room
            raise
        for later in sorted(self._later, reverse=True):  # the last one first: what there is at any moment is of one past
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
        """The newest complete checkpoint, and one line for each newer one that was passed over because it is damaged, or no folder.

        Raises:
            FederationError: if there is none.
        """
        problems: list[str] = []
        for path in reversed(self._called_checkpoints()):
            try:
                if _is_folder(path):
                    return self.load(path), problems
                problems.append(f"{path} is no folder, and so no checkpoint")
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
        round = newest.manifest.best.round
        if not self.path(round).is_dir():
            raise FederationError(
                f"The best round of {self.run_folder} is {round}, of which it has no checkpoint: give ckpt_path 'last', or "
                "continue the run until another round is better."
            )
        return self.load(self.path(round))

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
        return [path for path in self._called_checkpoints() if _is_folder(path)]

    def load(self, path: Path, history: bool = True, verified: Container[str] = ()) -> Checkpoint:
        """Read and verify one checkpoint.

        Args:
            path: its folder.
            history: read the metrics of earlier rounds, too.
            verified: names of files of clients' states that are known to be whole.

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
        """Prepare to continue a run from a checkpoint. What lies there of rounds that no checkpoint has is deleted; so are earlier
        checkpoints that are damaged, or that a run does not keep. Later ones stay, with all that they need, until the first new one
        is complete.
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
        """Free what a finished run takes on disk; checkpoints first, so that none is left that names what is gone.

        Args:
            keep: which checkpoints stay.
            stores: what the run can still be asked for: the files that they use stay.
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
            with suppress(OSError):  # something is in it
                folder.rmdir()

    def _write_index(self, store: ClientStore, last_rounds: Mapping[int, int], client_state: ClientStore | None) -> None:
        """Write all states, and the index files that change thereby."""
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
        """The metrics of all rounds up to a checkpoint's, as far as they can be read."""
        rows: dict[int, Metrics] = {}
        earlier = {round_named(path.stem): path for path in self.history_folder.glob("round_*.json")}
        earlier |= {round_named(path.name): path / "manifest.json" for path in self.paths()}
        for path in (path for round, path in earlier.items() if round is not None and round < manifest.round):
            with suppress(FederationError):  # a gap in the table
                rows |= {int(row["round"]): row for row in read_manifest(path).rows}
        rows |= {int(row["round"]): row for row in manifest.rows}
        return [rows[round] for round in sorted(rows)]

    def _called_checkpoints(self) -> list[Path]:
        """What is called as a checkpoint's folder is, oldest first."""
        found = {path: round_named(path.name) for path in self.folder.iterdir()} if self.folder.is_dir() else {}
        return sorted((path for path, round in found.items() if round is not None), key=lambda path: found[path] or 0)

    def _drop(self, path: Path) -> None:
        """Delete a checkpoint, which is there as a whole or not at all. Its manifest stays, for the metrics that it holds."""
        if not _is_folder(path):
            return  # somebody was faster
        old = self.folder / ".old"
        remove(old)
        self.history_folder.mkdir(exist_ok=True)
        with suppress(FileNotFoundError):
            (path / "manifest.json").replace(self.history_folder / f"{path.name}.json")
        path.rename(old)
        remove(old)

    def _prune(self) -> None:
        """Drop checkpoints that are neither among the last nor named by these as the best, then the files that only they named."""
        kept = sorted(self._manifests.keys() - self._later)
        recent = kept[-self.keep :]
        best = {one.best.round for one in map(self._manifests.__getitem__, recent) if one.best is not None}
        gone = [self._manifests.pop(round) for round in kept if round not in {*recent, *best}]
        for manifest in gone:
            self._drop(self.path(manifest.round))
        for number, name in {item for manifest in gone for item in manifest.index.items()}:
            others = {manifest.index.get(number, "") for manifest in self._manifests.values()}
            if name not in others:  # only these can name the same files: they are of the same clients
                files = self._files.pop(name, set()).difference(*(self._files.get(other, ()) for other in others))
                for path in (self.index_folder / name, *(self.clients_folder / file for file in files)):
                    path.unlink(missing_ok=True)

    def _sweep(self, in_use: Iterable[str] = ()) -> None:
        """Delete the files of a run that no manifest names, and that are not in use."""
        names = {name for one in self._manifests.values() for name in one.index.values()}
        self._files = {name: files for name, files in self._files.items() if name in names}
        files = set(in_use).union(*self._files.values())
        for folder, named, ours in (
            (self.index_folder, names, INDEX_NAME.fullmatch),
            (self.clients_folder, files, FILE.fullmatch),
        ):
            for path in folder.iterdir() if folder.is_dir() else ():
                if ours(path.name) and path.name not in named:
                    with suppress(IsADirectoryError):  # which is not ours
                        path.unlink()

    def _forget_rows(self) -> None:
        """Delete the metrics of rounds that are played again."""
        for path in self.history_folder.glob("round_*.json"):
            if (round_named(path.stem) or 0) > self._round:
                path.unlink()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _files(entries: Mapping[int, ClientEntry]) -> set[str]:
    return {record["file"] for entry in entries.values() for record in entry.records}
