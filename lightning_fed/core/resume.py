"""Training that can be interrupted anywhere, also within an epoch, and resumed as if it had not been."""

from typing import Any

from lightning.fabric.utilities import move_data_to_device

from lightning_fed.core.phase import Progress
from lightning_fed.errors import FederationError
from lightning_fed.seeding import random_state, set_random_state

CHECKPOINT = "phases"
"""The key of this package's entries in a Lightning checkpoint."""


class Resume:
    """Saves and restores the position within the phases and the random state. Each :class:`.PhasedModule` has its own instance and
    passes itself to the methods.

    Attributes:
        stopped: the entries of a checkpoint that is about to be resumed; else None.
    """

    def __init__(self) -> None:
        self.stopped: dict[str, Any] | None = None
        self._epoch_to_start = False

    def state_dict(self, module: Any) -> dict[str, Any]:
        """The position within the phases and the random state."""
        return {
            "phases": [phase.name for phase in module.running_phases],
            "epoch": module.current_epoch,
            "progress": module.progress.state_dict(),
            "moments": dict(module.moments),
            "random_state": random_state(),
        }

    def begin_fit(self, module: Any) -> None:
        """Load the optimizer state of a resumed training. Raises :class:`FederationError` if it had other phases."""
        if not module.trainer.ckpt_path:
            self.stopped = None  # a checkpoint was loaded, but training does not resume from it
        if self.stopped:
            module.moments = {name: tensor.to("cpu") for name, tensor in self.stopped["moments"].items()}
            before, now = (", ".join(names) for names in (self.stopped["phases"], [p.name for p in module.running_phases]))
            if before != now:
                raise FederationError(
                    f"The checkpoint was made with the phases {before}, but {type(module).__name__} has {now}: continue with the "
                    "settings that it was made with."
                )

    def go_on(self, module: Any) -> None:
        """Restore the phase and the batch at which training was interrupted. The loaders must exist."""
        stopped, self.stopped = self.stopped, None
        if stopped is None:
            return
        progress: dict[str, Any] = move_data_to_device(stopped["progress"], module.device)
        if progress["phase"] is not None:
            phase = module.running_phases[stopped["phases"].index(progress["phase"])]
            module.reenter(phase, Progress(**progress))
            if module.trainer.fit_loop.restarted_mid_epoch and module.current_epoch > stopped["epoch"]:
                # After the last batch of an epoch Lightning resumes with the next epoch, but calls no hook between them. It still
                # has to see that this batch was the last, so that the next epoch starts with its first batch.
                module.step_schedule("epoch")
                self._epoch_to_start = True
        set_random_state(stopped["random_state"])  # last, because loaders and others may draw before

    def before_step(self, module: Any) -> None:
        """Call the hook of an epoch start that Lightning skipped."""
        if self._epoch_to_start:
            self._epoch_to_start = False
            module.on_train_epoch_start()
