"""Training that is stopped anywhere and continued as if it had never been, also inside an epoch."""

from typing import Any

import lightning as L
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lightning_fed.core.phase import Phase, Progress
from lightning_fed.errors import FederationError
from lightning_fed.seeding import random_state, set_random_state

CHECKPOINT = "phases"
"""Where a checkpoint of Lightning's has what this module adds."""


class ContinuedModule(L.LightningModule):
    """A LightningModule whose checkpoints hold where in its phases a training is, and the random state.

    Who runs the phases calls :meth:`_remember` when a fit begins, and :meth:`_go_on` when its loaders are there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.progress = Progress()
        self._phases: list[Phase] = []  # those that a fit runs
        self._moments: dict[str, Tensor] = {}  # of persistent optimizers
        self._stopped: dict[str, Any] | None = None  # from a checkpoint that is about to be continued
        self._epoch_to_start = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add where the training is."""
        checkpoint[CHECKPOINT] = {
            "phases": [phase.name for phase in self._phases],
            "epoch": self.current_epoch,
            "progress": self.progress.state_dict(),
            "moments": dict(self._moments),
            "random_state": random_state(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember where the training was, in case that it is continued."""
        self._stopped = checkpoint.get(CHECKPOINT)

    def _remember(self) -> None:
        """Take the moments of a training that is continued. Raises :class:`FederationError` if it had other phases."""
        if not self.trainer.ckpt_path:
            self._stopped = None  # a checkpoint was loaded, but is not continued
        if self._stopped:
            self._moments = {name: tensor.to("cpu") for name, tensor in self._stopped["moments"].items()}
            theirs, ours = (", ".join(names) for names in (self._stopped["phases"], [phase.name for phase in self._phases]))
            if theirs != ours:
                raise FederationError(
                    f"The checkpoint was made with the phases {theirs}, but {type(self).__name__} has {ours}: continue with the "
                    "settings that it was made with."
                )

    def _go_on(self) -> None:
        """Be in the phase, and at the batch, at which the training was stopped."""
        stopped, self._stopped = self._stopped, None
        if stopped is None:
            return
        progress: dict[str, Any] = move_data_to_device(stopped["progress"], self.device)
        if progress["phase"] is not None:
            self._reenter(self._phases[stopped["phases"].index(progress["phase"])], Progress(**progress))
            if self.trainer.fit_loop.restarted_mid_epoch and self.current_epoch > stopped["epoch"]:
                # From the last batch of an epoch Lightning goes on with the next one, but calls no hook between them. It still has
                # to see that the last one was the last, so that the next epoch starts with its first batch.
                self._pass_epoch()
                self._epoch_to_start = True
        set_random_state(stopped["random_state"])  # last: until here, loaders and others may have drawn

    def _reenter(self, phase: Phase, progress: Progress) -> None:
        """Be at this place of a phase."""
        raise NotImplementedError

    def _pass_epoch(self) -> None:
        """Do what is done between two epochs."""
        raise NotImplementedError
