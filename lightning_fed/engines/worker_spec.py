"""All that is needed to create a worker, in this process or in another."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_fed.core.client_modules import as_before_build, frozen_parameters, take_frozen
from lightning_fed.core.module import FederatedModule
from lightning_fed.data import FederatedDataModule
from lightning_fed.engines.block import Block
from lightning_fed.engines.compression import NONE, Compression
from lightning_fed.engines.packing import Buffer, Packed, Packer, pack, unpicklable
from lightning_fed.engines.preflight.one_process import refuse_several_processes
from lightning_fed.engines.preflight.trainer_options import refuse_another_course
from lightning_fed.engines.silence import quiet_lightning
from lightning_fed.engines.turn_loop import QUIET, TrainerFactory
from lightning_fed.engines.worker import Worker
from lightning_fed.errors import FederationError
from lightning_fed.privacy.example_dp import ExampleTraining
from lightning_fed.seeding import INITIAL, seeded
from lightning_fed.tensors import State

OF_RESULTS = (
    "precision",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "fast_dev_run",
)
"""Settings of Trainers that results depend on, unlike those of the hardware."""


@dataclass(frozen=True)
class WorkerSpec:
    """Creates identical workers anywhere.

    Networks are not pickled (parametrized ones cannot be): the method is sent without them and built again on the stream of
    (seed, initial), as the federation built it. Frozen tensors are sent, and are once in memory on a machine.

    Args:
        template: the method.
        data: the clients' data, loaded.
        new_trainer: builds the Trainer of a turn.
        seed: the run's seed.
        initial: originals that new clients' private states are copied from, see :meth:`.SharedStateMixin.initial_originals`.
            None: those of the template.
        compression: compression of messages between server and clients.
        frozen: frozen tensors of a template that has been built; they are used instead of drawing them again.
        examples: how clients train with example-level privacy. None: without.
    """

    template: FederatedModule
    data: FederatedDataModule
    new_trainer: TrainerFactory
    seed: int
    initial: State | None = None
    compression: Compression = NONE
    frozen: dict[str, nn.Parameter] | None = None
    examples: ExampleTraining | None = None

    def worker(self) -> Worker:
        """A worker of this process. Networks that are built are used as they are; otherwise :meth:`build` is called."""
        if not self.template.is_built:
            self.build()
        return Worker(self.template, self.data, self.new_trainer, self.seed, self.initial, self.compression, self.examples)

    def build(self) -> dict[str, Any]:
        """Build the template's networks, if necessary, in the precision of the Trainers, which all states then have from the first
        round on. Returns the Trainers' settings that results depend on.
        """
        trainer = self.new_trainer(**QUIET)
        refuse_several_processes(trainer)
        refuse_another_course(trainer)
        with seeded(self.seed, INITIAL):
            self.template.configure_model()
        if self.frozen is not None:
            take_frozen(self.template, self.frozen)
        trainer.precision_plugin.convert_module(self.template)
        return {f"trainer.{name}": getattr(trainer, name) for name in OF_RESULTS}

    def unbuilt(self) -> "WorkerSpec":
        """The spec in the form that is sent."""
        return replace(self, template=as_before_build(self.template), frozen=frozen_parameters(self.template))

    def packed(self, move: bool = False, allocate: Callable[[int], Buffer] = Block, packer: type[Packer] = Packer) -> Packed:
        """The spec packed for other processes; the arguments are those of :func:`.pack`.

        Raises:
            FederationError: names what cannot be sent to them.
        """
        try:
            return pack(self, move, allocate, packer)
        except FederationError:
            raise
        except Exception as error:
            parts = {"model": self.template, "data": self.data, "trainer": self.new_trainer}
            culprits = (unpicklable(name, part, packer) for name, part in parts.items())
            culprit = next(filter(None, culprits), "The spec")
            raise FederationError(
                f"{culprit} cannot be sent to worker processes ({error}): give something that can be pickled, such as a function "
                "of a module instead of a lambda, or use the engine InProcess."
            ) from error

    def is_for_gpu(self) -> bool:
        """Whether a turn in this process would compute on a GPU. Without a GPU, no Trainer is built to find out."""
        if not torch.cuda.is_available():
            return False
        with quiet_lightning():
            return self.new_trainer(**QUIET).strategy.root_device.type == "cuda"
