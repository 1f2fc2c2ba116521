"""Checkpoints of a federation: complete or absent."""

import json
import os
import shutil
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning_fed.errors import FederationError
from lightning_fed.exchange import State
from lightning_fed.storage.client_store import ClientStore, FileRecord, read_state, write_state

FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds besides tensors. Random state is not among it: every stream is a function of (seed, round, client).

    Args:
        round: the last finished round.
        identity: what must agree with a run that continues it: method, seed, data.
        history: the metrics of every round so far.
        server: the server's file.
        clients: the file of each client's private state.
    """

    round: int
    identity: dict[str, Any]
    history: list[dict[str, float]]
    server: FileRecord
    clients: dict[int, FileRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: its manifest and the server's state."""

    path: Path
    run_folder: Path
    manifest: Manifest
    server: State


class Checkpoints:
    """The checkpoints of one run: ``checkpoints/round_…/{manifest.json, server.safetensors}`` beside ``clients/``.

    A checkpoint is written into a folder with a leading dot, synced and renamed: it is complete or absent. The last two are kept.
    The private states lie in the store's folder under names that are never written twice; a checkpoint lists those that belong to
    it, so that a round writes only what changed.

    Args:
        run_folder: folder of the run.
        keep: how many checkpoints to keep.
    """

    def __init__(self, run_folder: Path, keep: int = 2) -> None:
        self.run_folder = run_folder
        self.folder = run_folder / "checkpoints"
        self.clients_folder = run_folder / "clients"
        self.keep = keep

    def save(
        self, round: int, identity: dict[str, Any], history: list[dict[str, float]], server: State, store: ClientStore
    ) -> Path:
        """Write the checkpoint of a finished round and drop those too old to keep."""
        final = self.folder / f"round_{round:06d}"
        aside = self.folder / f".round_{round:06d}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        clients = store.flush()
        manifest = Manifest(round, identity, history, write_state(aside / "server.safetensors", server), clients)
        _write_manifest(aside / "manifest.json", manifest)
        for folder in (store.folder, aside):
            _sync(folder)
        aside.rename(final)
        _sync(self.folder)
        self._prune(store)
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

    def paths(self) -> list[Path]:
        """Folders of all checkpoints, oldest first."""
        return sorted(self.folder.glob("round_*"))

    def load(self, path: Path) -> Checkpoint:
        """Read and verify one checkpoint. Raises :class:`FederationError` if any of its files is missing or damaged."""
        try:
            manifest = _read_manifest(path / "manifest.json")
            server = read_state(path, manifest.server)
            for record in manifest.clients.values():
                read_state(self.clients_folder, record)
        except FederationError as error:
            raise FederationError(f"Checkpoint {path} cannot be used: {error}") from error
        return Checkpoint(path, self.run_folder, manifest, server)

    def discard_after(self, round: int) -> None:
        """Drop the checkpoints of later rounds, when a run is continued from an earlier one."""
        for path in self.paths():
            if int(path.name.removeprefix("round_")) > round:
                shutil.rmtree(path)

    def _prune(self, store: ClientStore) -> None:
        *old, _ = self.paths()
        for path in old[: -(self.keep - 1) or None]:
            shutil.rmtree(path)
        kept: set[str] = set()
        for path in self.paths()[:-1]:  # the newest one's files are the store's own
            try:
                kept |= {record["file"] for record in _read_manifest(path / "manifest.json").clients.values()}
            except FederationError:
                shutil.rmtree(path)  # damaged since it was written: no use to anybody, and no reason to stop
        store.prune(kept)


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
    fields["clients"] = {int(client): record for client, record in fields["clients"].items()}
    return Manifest(**fields)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
