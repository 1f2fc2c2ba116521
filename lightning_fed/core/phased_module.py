"""Training in phases: a LightningModule in which different parameters learn one after the other. It knows no client."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.cli import LRSchedulerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.core.phase import Phase, Progress
from lightning_fed.core.resume import CHECKPOINT, Resume
from lightning_fed.core.schedules import Interval, Schedule
from lightning_fed.errors import FederationError

__all__ = ["CHECKPOINT", "MOMENTS", "Phase", "PhasedModule", "Progress", "default_optimizer"]

MOMENTS = "optimizer/"
"""What names of persistent optimizers' state begin with; no name of a module does."""


def default_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """SGD with learning rate 0.01, the client optimizer of the pFedLoRA experiments."""
    return torch.optim.SGD(parameters, lr=0.01)


class PhasedModule(L.LightningModule):
    """A LightningModule that learns in phases, by manual optimisation.

    A subclass says in :meth:`phases` what learns when, on which loss and with which optimizer. The base class freezes what is
    outside the running phase, gives each phase a fresh optimizer, steps, clips, and logs ``train/<phase>_loss``. A Trainer runs the
    phases one after the other, and again from the first until it stops; ``max_epochs=module.num_epochs(batches)`` is once through.

    A method with a step of its own overrides :meth:`compute_gradients` or :meth:`client_step`. Almost never override
    ``training_step`` or ``configure_optimizers``: they run the phases.

    A Trainer's checkpoint holds where the training is in its phases, and the random state: stopped anywhere and continued with
    ``trainer.fit(…, ckpt_path=…)``, it ends as if it had never been stopped, if its data play the same batches again (those of
    this package do; a ``DataLoader`` of one's own has to be stateful for that).

    Args:
        gradient_clip: largest gradient norm of a step; None does not clip.
        lr_scheduler: builds the schedule of each phase's learning rate from its optimizer; None: it is constant.
        lr_interval: what the schedule counts: ``round``, runs through all phases so far; ``epoch`` or ``step``, those of the phase,
            which begins it anew.
        accumulate: batches whose gradients make a step, that of the mean over all of their examples, see :meth:`loss_terms`. Of a
            phase that is counted in epochs, the last step of an epoch may have fewer.

    Raises:
        FederationError: for ``accumulate`` where a step has gradients of its own, or its loss is no mean over examples.
    """

    accumulates = True
    """Whether losses are means over examples, so that those of several batches add up to that of all of them."""

    batches_per_step = 1
    """How many batches an optimizer step takes; with more than one, :meth:`client_step` gets a list of them."""

    scales_gradients = True
    """Whether gradients come from :meth:`manual_backward` alone, which scales them where the precision asks for it (16-mixed)."""

    def __init__(
        self,
        gradient_clip: float | None = None,
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Interval = "round",
        accumulate: int = 1,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.accumulate = accumulate
        if accumulate > 1:
            if self.has_own_gradients or not self.accumulates:
                why = "has a training step of its own" if self.has_own_gradients else "computes more of a batch than a mean"
                raise FederationError(
                    f"accumulate is {accumulate}, but {type(self).__name__} {why}: leave accumulate out, and make batches larger."
                )
            self.batches_per_step = accumulate
        self.gradient_clip = gradient_clip
        self.lr_scheduler = lr_scheduler
        self.lr_interval: Interval = lr_interval
        self.private_gradients: Callable[[PhasedModule, Any], Tensor] | None = None  # in place of compute_gradients
        self.frozen_names: frozenset[str] | None = None
        self.rounds_before = 0  # runs through the phases before this fit; a federation says how many
        self.progress = Progress()
        self.running_phases: list[Phase] = []  # of the current fit
        self.moments: dict[str, Tensor] = {}  # of persistent optimizers
        self.resume = Resume()
        self._phase: Phase | None = None
        self._schedules: dict[str, Schedule] = {}
        self._other_phases: Sequence[Phase] | None = None
        self._epoch_batches = 0  # of an epoch that is not cut short

    def phases(self) -> list[Phase]:
        """What learns, one after the other."""
        raise NotImplementedError(f"{type(self).__name__} must override phases().")

    @property
    def phase(self) -> Phase:
        """The running phase; after a fit, the last one."""
        if self._phase is None:
            raise FederationError(f"{type(self).__name__} is in no phase: gradients are for training, which enters one.")
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = phase

    def compute_gradients(self, batch: Any) -> Tensor:
        """Set the gradients of a step of the running phase; returns the loss, which is logged. Default: those of the phase's loss
        and penalty. This is also what FLOPs are counted of.
        """
        if self.accumulate > 1:
            return self._accumulated_gradients(batch)
        loss: Tensor = self.phase.loss(batch)
        self.manual_backward(loss if self.phase.penalty is None else loss + self.phase.penalty())
        return loss.detach()

    def _accumulated_gradients(self, batches: Sequence[Any]) -> Tensor:
        """Those of the mean over all that the losses of the batches are means over."""
        terms = [self.loss_terms(batch) for batch in batches]
        total, losses = max(sum(terms), 1), []
        for batch, share in zip(batches, terms, strict=True):
            loss: Tensor = self.phase.loss(batch) * (share / total)
            self.manual_backward(loss)
            losses.append(loss.detach())
        if self.phase.penalty is not None:
            self.manual_backward(self.phase.penalty())
        return torch.stack(losses).sum()

    def loss_terms(self, batch: Any) -> int:
        """How many terms the loss of a batch is the mean over. Default: one per example."""
        return extract_batch_size(batch)

    @property
    def has_own_gradients(self) -> bool:
        """Whether a step is another than one down the gradient of a loss."""
        return type(self).compute_gradients is not PhasedModule.compute_gradients

    def client_step(self, batch: Any) -> Tensor:
        """One optimizer step of the running phase; returns the loss."""
        optimizer = self.progress.optimizer
        assert optimizer is not None  # of the running phase
        optimizer.zero_grad()
        loss = self.compute_gradients(batch) if self.private_gradients is None else self.private_gradients(self, batch)
        if (clip := self.clip_of(self.phase)) is not None:
            # Of several optimizers that step together each has its own norm: what one network does must not depend on another.
            for own in getattr(optimizer.optimizer, "optimizers", [optimizer.optimizer]):
                self.clip_gradients(own, clip, "norm")
        optimizer.step()
        self.after_step(optimizer.optimizer)
        return loss

    def after_step(self, optimizer: Optimizer) -> None:
        """What follows an optimizer's step; its groups say what was stepped, and with which rate. Default: nothing."""

    def clip_of(self, phase: Phase) -> float | None:
        """The largest gradient norm of a step of a phase."""
        return self.gradient_clip if phase.gradient_clip is None else phase.gradient_clip

    def num_epochs(self, batches_per_epoch: int) -> int:
        """Trainer epochs that one run through the phases takes."""
        phases = self.phases() if self._other_phases is None else self._other_phases
        return sum(phase.num_epochs(batches_per_epoch, self.batches_per_step) for phase in phases)

    @contextmanager
    def training_on(self, phases: Sequence[Phase]) -> Iterator[None]:
        """In this block a fit runs these phases, and :meth:`phases` is not asked."""
        self._other_phases = phases
        try:
            yield
        finally:
            self._other_phases = None

    def load_moments(self, moments: dict[str, Tensor]) -> None:
        """Take over the state of persistent optimizers, by the names that :attr:`moments` has.

        Raises:
            FederationError: for that of something that is no parameter.
        """
        parameters = dict(self.named_parameters())
        if strange := [name for name in moments if name.split("/")[-2] not in parameters]:
            raise FederationError(
                f"The private state for {type(self).__name__} has moments of what is no parameter: {strange[0]!r}."
            )
        self.moments = moments

    # ------------------------------------------------------------------------------------------------- the Trainer's hooks

    def configure_callbacks(self) -> Any:
        """None of its own. Of Lightning's hooks this is the first: what a Trainer would do to gradients is refused here, in words
        that say what to use instead.
        """
        for option, here in (("accumulate_grad_batches", "accumulate"), ("gradient_clip_val", "gradient_clip")):
            if (value := getattr(self.trainer, option)) not in (None, 0, 1 if here == "accumulate" else None):
                raise FederationError(
                    f"The Trainer has {option}={value}, but {type(self).__name__} steps itself: give it {here}={value} instead."
                )
        if any(isinstance(callback, LearningRateFinder) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            raise FederationError(
                f"lr_find moves the optimizer of a module that has one, and {type(self).__name__} has one per phase: compare rates "
                "on validation data, by the tune of a sweep."
            )
        return super().configure_callbacks()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add where the training is."""
        checkpoint[CHECKPOINT] = self.resume.state_dict(self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember where the training was, in case that it is continued."""
        self.resume.stopped = checkpoint.get(CHECKPOINT)

    def configure_optimizers(self) -> Any:
        """One optimizer per phase, and the schedules of those that have one."""
        if self.frozen_names is None:  # asked before the first phase freezes anything
            self.frozen_names = self.find_frozen()
        phases = self.phases() if self._other_phases is None else self._other_phases
        self.running_phases = [phase for phase in phases if phase.epochs or phase.steps]
        optimizers = [phase.new_optimizer() for phase in self.running_phases]
        schedules = {}
        for phase, optimizer in zip(self.running_phases, optimizers, strict=True):
            if factory := phase.lr_scheduler or self.lr_scheduler:
                earlier = self._schedules.get(phase.name)
                schedules[phase.name] = Schedule(factory, phase.lr_interval or self.lr_interval, optimizer, earlier)
        self._schedules |= schedules  # those of phases that other fits run stay where they are
        if not schedules:
            return optimizers
        return optimizers, [{"scheduler": schedule.scheduler, "name": f"lr/{name}"} for name, schedule in schedules.items()]

    def find_frozen(self) -> frozenset[str]:
        """Names of the parameters that no phase trains: those that require no gradient as the networks were made. A tied parameter
        has several names, as in the state dict.
        """
        return frozenset(name for name, p in self.named_parameters(remove_duplicate=False) if not p.requires_grad)

    def on_fit_start(self) -> None:
        """Refuse what cannot be trained with."""
        self.progress = Progress()  # an earlier fit left its own
        self.resume.begin_fit(self)
        if self.trainer.precision == "16-mixed" and not self.scales_gradients:
            raise FederationError(
                f"{type(self).__name__} computes gradients that 16-mixed would have to scale: set the trainer's precision to "
                "bf16-mixed or 32-true."
            )
        clips = [clip for phase in self.running_phases if (clip := self.clip_of(phase)) is not None]
        if clips and self.trainer.precision == "16-mixed":
            raise FederationError(
                f"gradient_clip is {clips[0]} with precision 16-mixed, whose gradients are scaled when they are clipped: "
                "set the trainer's precision to bf16-mixed or 32-true, or leave gradient_clip out."
            )
        if not self.running_phases:
            raise FederationError(f"{type(self).__name__} has nothing to train: give it epochs or steps above 0.")
        if len(self.trainer.lr_scheduler_configs) != sum(phase.name in self._schedules for phase in self.running_phases):
            raise FederationError(
                f"configure_optimizers() of {type(self).__name__} returned a schedule that no phase would follow: give "
                "lr_scheduler to the module or to its phases."
            )

    def on_train_start(self) -> None:
        """Go on inside a phase, or inside an epoch, where a checkpoint was made there."""
        if math.isinf(self.trainer.num_training_batches):
            raise FederationError(
                "The training data have no length, by which phases are counted: give the Trainer limit_train_batches."
            )
        self._epoch_batches = int(self.trainer.num_training_batches)
        self.resume.go_on(self)

    def on_train_epoch_start(self) -> None:
        """Find the phase that this epoch belongs to; enter it if it is its first epoch."""
        if self.trainer.num_training_batches != self.progress.batches:
            self._epoch_batches = int(self.trainer.num_training_batches)  # loaders may have been made anew
        lengths = [phase.num_epochs(self._epoch_batches, self.batches_per_step) for phase in self.running_phases]
        run, epoch = divmod(self.current_epoch, sum(lengths))
        for phase, begin in zip(self.running_phases, accumulate(lengths, initial=0), strict=False):
            if epoch == begin:
                self._enter(phase, self.rounds_before + run)
        progress = self.progress
        progress.losses, progress.sizes = [], []
        missing = self._epoch_batches
        if progress.steps_left is not None:
            missing = progress.steps_left * self.batches_per_step - len(progress.waiting)
        self._cut_epoch(min(missing, self._epoch_batches))

    def _cut_epoch(self, batches: int) -> None:
        """Let the running epoch have so many batches, and the Trainer validate after the last one."""
        loop, interval = self.trainer.fit_loop, self.trainer.val_check_interval
        self.progress.batches = loop.max_batches = batches
        if isinstance(interval, float) and self.trainer.val_check_batch is not None:
            self.trainer.val_check_batch = max(1, int(batches * interval))

    def _optimizer(self, place: int) -> LightningOptimizer:
        optimizers = self.optimizers()
        return optimizers[place] if isinstance(optimizers, list) else optimizers

    def reenter(self, phase: Phase, progress: Progress) -> None:
        """Be at this place of a phase, where a checkpoint was made."""
        self.progress = progress
        progress.optimizer = self._optimizer(self.running_phases.index(phase))
        self._set_learning(phase)
        assert progress.batches is not None  # of a phase that was running
        self._cut_epoch(progress.batches)

    def _enter(self, phase: Phase, round: int) -> None:
        place = self.running_phases.index(phase)
        self.progress = Progress(phase.name, phase.steps, optimizer=self._optimizer(place))
        self._set_learning(phase)
        optimizer = self.trainer.optimizers[place]
        optimizer.state.clear()
        if phase.persistent:
            for name, parameter in self.named_parameters():
                prefix = f"{MOMENTS}{phase.name}/{name}/"
                state = {key.removeprefix(prefix): t for key, t in self.moments.items() if key.startswith(prefix)}
                if state:  # a counter of steps stays on the CPU, where PyTorch has it
                    optimizer.state[parameter] = {
                        k: t.clone() if t.dim() == 0 else t.to(self.device, copy=True) for k, t in state.items()
                    }
        if phase.name in self._schedules:
            self._schedules[phase.name].begin(round)

    def _set_learning(self, phase: Phase) -> None:
        """Let the phase's parameters learn, and nothing else."""
        self.phase = phase
        frozen = self.frozen_names or ()
        learning = {id(p) for p in phase.parameters}
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(id(parameter) in learning and name not in frozen)
            parameter.grad = None
        self.train()
        for module in (*phase.eval_modules, *self.frozen_layers()):
            module.eval()

    def frozen_layers(self) -> Iterable[nn.Module]:
        """Layers that are in eval mode whatever learns. Default: none."""
        return ()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One :meth:`client_step`, once there are enough batches for it."""
        self.resume.before_step(self)
        progress = self.progress
        progress.waiting.append(batch)
        progress.last_step = None
        ends = self.accumulate > 1 and progress.steps_left is None and batch_idx + 1 == progress.batches
        if len(progress.waiting) == self.batches_per_step or ends:
            step = progress.waiting if self.batches_per_step > 1 else batch
            size = sum(map(self.loss_terms, step)) if self.accumulate > 1 else extract_batch_size(batch)
            progress.waiting = []
            progress.losses.append(self.client_step(step))
            progress.sizes.append(size)
            progress.last_step = step if size or self.private_gradients is None else None  # of no example
            if progress.steps_left is not None:
                progress.steps_left -= 1
            self.step_schedule("step")
        if batch_idx + 1 == progress.batches:  # which the loader, if it has more, does not know
            self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True

    def on_train_epoch_end(self) -> None:
        """Log ``train/<phase>_loss``, the mean over the epoch's examples and over the loss's terms: once, for logging takes longer
        than a small step. Log ``train/<phase>_penalty``, as it is now, where there is one, and ``lr/<phase>`` where there is a
        schedule.
        """
        progress = self.progress
        if progress.losses:
            weights = torch.tensor(progress.sizes, device=self.device) / (sum(progress.sizes) or 1)
            self.log(f"train/{progress.phase}_loss", (torch.stack(progress.losses) * weights).sum() / self.phase.terms)
            if self.phase.penalty is not None:
                self.log(f"train/{progress.phase}_penalty", self.phase.penalty().detach())
        if progress.phase in self._schedules:
            self.log(f"lr/{progress.phase}", self._schedules[progress.phase].rate)
        self.step_schedule("epoch")

    def step_schedule(self, interval: Interval) -> None:
        """Let the running phase's schedule, if it has one, count a step or an epoch."""
        if self._schedules and self.progress.phase in self._schedules:
            self._schedules[self.progress.phase].step(interval)

    def on_fit_end(self) -> None:
        """Leave the module as it was made: trainable where it was, in train mode, without gradients. Take what persistent
        optimizers have to remember. A checkpoint that is made now still says where the training was.
        """
        self.progress.optimizer = self.progress.last_step = None
        for phase, optimizer in zip(self.running_phases, self.trainer.optimizers, strict=True):
            if phase.persistent:
                for name, parameter in self.named_parameters():
                    for key, tensor in optimizer.state.get(parameter, {}).items():
                        self.moments[f"{MOMENTS}{phase.name}/{name}/{key}"] = tensor.detach().to("cpu", copy=True)
        frozen = self.frozen_names or ()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)
            parameter.grad = None
        self.train()
