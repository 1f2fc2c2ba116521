"""All that makes a worker, in this process or in another."""

from dataclasses import dataclass, replace
from typing import Any

from lightning_fed.data import FederatedDataModule
from lightning_fed.engines.alone import refuse_several_processes
from lightning_fed.engines.worker import QUIET, TrainerFactory, Worker
from lightning_fed.exchange import State
from lightning_fed.module import FederatedModule
from lightning_fed.seeding import INITIAL, seeded


@dataclass(frozen=True)
class Recipe:
    """Makes equal workers anywhere.

    Networks are not pickled (parametrised ones cannot be): the method travels without them and is built again on the stream of
    (seed, initial), as the federation built it.

    Args:
        template: the method.
        data: the clients' data, loaded.
        new_trainer: builds the Trainer of a turn.
        seed: the run's seed.
        initial: what new clients' private states begin with copies of, see :meth:`.FederatedModule.initial_copies`; None: what the
            template has.
    """

    template: FederatedModule
    data: FederatedDataModule
    new_trainer: TrainerFactory
    seed: int
    initial: State | None = None

    def worker(self) -> Worker:
        """A worker of this process."""
        self.build()
        return Worker(self.template, self.data, self.new_trainer, self.seed, self.initial)

    def build(self) -> None:
        """Make the template's networks, if it has none yet, in the precision of the Trainers: what is built, sent, merged and kept
        has it from the first round on.
        """
        trainer = self.new_trainer(**QUIET)
        refuse_several_processes(trainer)
        with seeded(self.seed, INITIAL):
            self.template.configure_model()
        trainer.precision_plugin.convert_module(self.template)

    def unbuilt(self) -> "Recipe":
        """The recipe as it travels."""
        return replace(self, template=self.template.blank())

    def parts(self) -> dict[str, Any]:
        """What it is made of, by the names that an error should use."""
        return {"model": self.template, "data": self.data, "trainer": self.new_trainer}
