"""A site: it holds one client's data, networks and private states, and runs the turns that a server requests."""

import logging
import traceback
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from lightning_fed.core.module import FederatedModule
from lightning_fed.data import ClientDataModule, FederatedDataModule
from lightning_fed.deployment.wire import (
    SiteDescription,
    TurnRequest,
    VerbSettings,
    counted,
    frozen_checksum,
    pack,
    pack_update,
    unpack,
)
from lightning_fed.engines.preflight.generated_answers import check_generation, refuse_long_prompts
from lightning_fed.engines.preflight.mixed_tokens import refuse_mixed_tokens
from lightning_fed.engines.preflight.shape_mismatch import refuse_unknown_tokens
from lightning_fed.engines.preflight.single_examples import refuse_single_examples
from lightning_fed.engines.preflight.wrong_targets import refuse_wrong_targets
from lightning_fed.engines.worker_spec import WorkerSpec
from lightning_fed.errors import FederationError
from lightning_fed.formatting import escaped
from lightning_fed.storage.client_store import FileRecord, read_state, write_state
from lightning_fed.system.disk import sync_folder
from lightning_fed.tensors import State

log = logging.getLogger(__name__)


class OneClient(FederatedDataModule):
    """One client of a data module, with its id in a federation."""

    def __init__(self, data: FederatedDataModule, place: int, id: int) -> None:
        super().__init__(
            partition=data.partition,
            batch_size=data.batch_size,
            single_example=data.single_example,
            continue_epochs=data.continue_epochs,
            seed=data.seed,
        )
        self.given = data
        self._own = data.client(place)
        self._own.info = replace(self._own.info, id=id)
        self.num_classes = data.num_classes
        self._checksum = data.fingerprint()

    def client(self, client: int) -> ClientDataModule:
        """The data. Raises :class:`FederationError` for another client."""
        if client != self._own.info.id:
            raise FederationError(f"This site has client {self._own.info.id}, not client {client}.")
        return replace(self._own)  # turns set attributes of it

    def fingerprint(self) -> str:
        """Checksum of the data that the site divided."""
        return self._checksum


class SiteStore:
    """A client's private states, by run and round. A turn starts from the state of the round that the server merged last. A turn's
    new state is kept beside it until the server asks for it, which confirms that the turn was merged: a turn whose update was lost
    or late, or was merged by a server that then died, never happened.

    Args:
        folder: folder of the states: ``<run>/round_000007-1a2b3c4d.safetensors``, with the CRC-32 of the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, run: str, round: int) -> State:
        """The state after a round. Raises :class:`FederationError` if it does not exist, or if its file is damaged."""
        found = self._files(run).get(round)
        if found is None:
            raise FederationError(f"there is no private state of round {round} of this run in {self.folder}")
        return read_state(found.parent, FileRecord(file=found.name, bytes=found.stat().st_size, crc32=int(found.stem[-8:], 16)))

    def put(self, run: str, round: int, state: State) -> None:
        """Store the state after a round; it is on the disk when this returns."""
        folder = self.folder / run
        folder.mkdir(parents=True, exist_ok=True)
        before = self._files(run).get(round)
        aside = folder / ".written"
        record = write_state(aside, state)
        final = folder / f"round_{round:06d}-{record['crc32']:08x}.safetensors"
        aside.rename(final)
        if before is not None and before != final:
            before.unlink()
        sync_folder(folder)

    def keep(self, run: str, rounds: Collection[int]) -> None:
        """Delete the states of all other rounds of the run."""
        for round, path in self._files(run).items():
            if round not in rounds:
                path.unlink()

    def _files(self, run: str) -> dict[int, Path]:
        ours = f"round_{'[0-9]' * 6}-{'[0-9a-f]' * 8}.safetensors"
        return {int(path.name[6:12]): path for path in sorted((self.folder / run).glob(ours))}


class Site:
    """Answers a server's messages for one client.

    Before anything is computed, a request is checked: it must have the same model, seed and versions, the client of this site, the
    described data, and an existing private state. Errors of a turn are printed here; the server only gets the kind of the error,
    because a message could quote data.

    Args:
        spec: creates the worker; its data have only this client.
        client: id of the client.
        settings: settings that the server must have, too.
        folder: folder of the private states.
        keep: called with the client's model and the round after each evaluation; gets the evaluated model.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        client: int,
        settings: VerbSettings,
        folder: Path,
        keep: Callable[[FederatedModule, int], None] | None = None,
    ) -> None:
        self.client = client
        self._keep = keep
        self.settings = settings
        self.store = SiteStore(folder)
        self.info = spec.data.client(client).info
        self._data = spec.data.fingerprint()
        trainer_settings = spec.build()
        self._worker = spec.worker()
        self._frozen = frozen_checksum(self._worker.template)
        refuse_unknown_tokens(self._worker.template, spec.data.client(client))
        refuse_wrong_targets(self._worker.template, spec.data.client(client))
        assert isinstance(spec.data, OneClient)
        refuse_mixed_tokens(self._worker.template, spec.data.given)
        check_generation(self._worker.template, spec.data.given)
        validates = trainer_settings["trainer.limit_val_batches"] != 0
        refuse_long_prompts(self._worker.template, [spec.data.client(client)], validates)
        refuse_single_examples(self._worker.template, spec.data, [self.info], spec.seed)

    def answer(self, message: bytes) -> bytes:
        try:
            head, tensors = unpack(message, "The server's")
            if (client := counted(head, "client", "The server's")) != self.client:
                raise FederationError(f"this is the site of client {self.client}, not of client {client}")
            self.settings.refuse_other(head)
            if head.get("ask") == "describe":
                return SiteDescription(self.info, self._data).pack()
            request = TurnRequest.unpacked(head, tensors)
            if request.data != self._data:
                raise FederationError("the data differ from those that this run started with")
            if request.frozen != self._frozen:
                raise FederationError("the frozen part of the network, perhaps pretrained, has other weights than the server's")
            private = self.store.get(request.run, request.turn.last_round) if request.turn.last_round else None
        except FederationError as error:
            log.error(f"Refused: {escaped(str(error))}")
            return pack({"answer": "refused", "client": self.client, "why": str(error)})
        except Exception as error:  # messages are untrusted
            return self._failed(error)
        try:
            return self._run_turn(request, private)
        except Exception as error:
            return self._failed(error)

    def _failed(self, error: Exception) -> bytes:
        """Print an error here, and answer with its kind."""
        if isinstance(error, FederationError):
            log.error(f"{error}")
        else:
            traceback.print_exception(error)
        return pack({"answer": "failed", "client": self.client, "why": type(error).__name__})

    def _run_turn(self, request: TurnRequest, private: State | None) -> bytes:
        turn = request.turn
        own = replace(self.info, model_size=turn.client.model_size, num_clients=turn.client.num_clients)
        result = self._worker.run_turn(replace(turn, client=own), private)
        if result.private is not None:
            self.store.put(request.run, turn.round, result.private)
            self.store.keep(request.run, {turn.last_round, turn.round, *request.held})
        if self._keep is not None and turn.verb == "evaluate":
            module = self._worker.module_of(own, turn.broadcast, private)
            if turn.fine_tune:
                self._worker.prepare(module, self.client, turn.round)
            self._keep(module, turn.round)
        return pack_update(result.update, keeps=result.private is not None)
