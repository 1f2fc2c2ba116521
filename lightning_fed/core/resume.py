"""Training that is stopped anywhere and continued as if it had never been, also inside an epoch."""

from typing import Any

from lightning.fabric.utilities import move_data_to_device

from lightning_fed.core.phase import Progress
from lightning_fed.errors import FederationError
from lightning_fed.seeding import random_state, set_random_state

CHECKPOINT = "phases"
"""Where a checkpoint of Lightning's has what is added here."""


class Resume:
    """What a checkpoint says of where in its phases a training is, and of the random state. Each :class:`.PhasedModule` has one
    of its own, and gives itself to it.

    Attributes:
        stopped: what a checkpoint that is about to be continued says; else None.
    """

    def __init__(self) -> None:
        self.stopped: dict[str, Any] | None = None
        self._epoch_to_start = False

    def state_dict(self, module: Any) -> dict[str, Any]:
        """Where the training is."""
        return {
            "phases": [phase.name for phase in module.running_phases],
            "epoch": module.current_epoch,
            "progress": module.progress.state_dict(),
            "moments": dict(module.moments),
            "random_state": random_state(),
        }

    def begin_fit(self, module: Any) -> None:
        """Take the moments of a training that is continued. Raises :class:`FederationError` if it had other phases."""
        if not module.trainer.ckpt_path:
            self.stopped = None  # a checkpoint was loaded, but is not continued
        if self.stopped:
            module.moments = {name: tensor.to("cpu") for name, tensor in self.stopped["moments"].items()}
            before, now = (", ".join(names) for names in (self.stopped["phases"], [p.name for p in module.running_phases]))
            if before != now:
                raise FederationError(
                    f"The checkpoint was made with the phases {before}, but {type(module).__name__} has {now}: continue with the "
                    "settings that it was made with."
                )

    def go_on(self, module: Any) -> None:
        """Be in the phase, and at the batch, at which the training was stopped. The loaders have to be there."""
        stopped, self.stopped = self.stopped, None
        if stopped is None:
            return
        progress: dict[str, Any] = move_data_to_device(stopped["progress"], module.device)
        if progress["phase"] is not None:
            phase = module.running_phases[stopped["phases"].index(progress["phase"])]
            module.reenter(phase, Progress(**progress))
            if module.trainer.fit_loop.restarted_mid_epoch and module.current_epoch > stopped["epoch"]:
                # From the last batch of an epoch Lightning goes on with the next one, but calls no hook between them. It still has
                # to see that the last one was the last, so that the next epoch starts with its first batch.
                module.step_schedule("epoch")
                self._epoch_to_start = True
        set_random_state(stopped["random_state"])  # last: until here, loaders and others may have drawn

    def before_step(self, module: Any) -> None:
        """Start the epoch whose start Lightning left out."""
        if self._epoch_to_start:
            self._epoch_to_start = False
            module.on_train_epoch_start()
