"""Training in phases: a LightningModule in which different parameters are trained one after the other."""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, TypeVar

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

MOMENTS = "optimizer/"
"""Prefix of the names of a persistent optimizer's state, ``optimizer/<phase>/<parameter>/<key>``; no name of a module starts
with it.
"""

Step = TypeVar("Step", bound=Callable[..., Any])


def moment_parts(name: str) -> tuple[str, str, str]:
    """The phase, the parameter and the optimizer's key in a name of :attr:`PhasedModule.moments`."""
    rest, _, key = name.removeprefix(MOMENTS).rpartition("/")
    phase, _, parameter = rest.rpartition("/")
    return phase, parameter, key


def default_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """SGD with learning rate 0.01, the client optimizer of the pFedLoRA experiments."""
    return torch.optim.SGD(parameters, lr=0.01)


def with_signature(step: Step) -> Step:
    """Store a step's signature, for which Lightning asks a dozen times per turn: Python would derive it from the code each time."""
    step.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]
    return step


class PhasedModule(L.LightningModule):
    """A LightningModule that trains in phases, by manual optimization.

    A subclass returns its phases from :meth:`phases`: which parameters train, on which loss, with which optimizer. The base class
    freezes all other parameters during a phase, gives each phase a fresh optimizer (or, if ``persistent``, its stored state),
    steps, clips, and logs ``train/<phase>_loss``. The Trainer runs the phases in order and starts over until it stops;
    ``max_epochs=module.num_epochs(batches)`` runs them once.

    A method with its own step overrides :meth:`compute_gradients` or :meth:`client_step`. Avoid overriding ``training_step`` or
    ``configure_optimizers``: they run the phases.

    A Trainer's checkpoint holds the position within the phases and the random state. Training that is interrupted anywhere and
    resumed with ``trainer.fit(…, ckpt_path=…)`` gives the same result as uninterrupted training if the data loader replays the
    same batches. The data of this package do; your own ``DataLoader`` has to be stateful for that.

    Args:
        gradient_clip: maximum gradient norm of a step. None: no clipping.
        lr_scheduler: builds each phase's learning-rate schedule from its optimizer. None: the learning rate is constant.
        lr_interval: unit that the schedule counts: ``round``: completed passes through all phases; ``epoch`` or ``step``: those
            within the phase, starting anew each time the phase begins.
        accumulate: number of batches per optimizer step; the gradient is that of the mean over all their examples, see
            :meth:`loss_terms`. In a phase that is counted in epochs, the last step of an epoch may have fewer batches.

    Raises:
        FederationError: if ``accumulate`` is set for a method that computes its own gradients or whose loss is not a mean over
            examples.
    """

    accumulates = True
    """Whether the loss is a mean over examples, so that the losses of several batches combine to that of all their examples."""

    batches_per_step = 1
    """Number of batches per optimizer step; if it is more than one, :meth:`client_step` gets a list of batches."""

    scales_gradients = True
    """Whether all gradients come from :meth:`manual_backward`, which scales them if the precision is 16-mixed."""

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
                why = "has a training step of its own" if self.has_own_gradients else "has a loss that is not a mean over examples"
                raise FederationError(
                    f"accumulate is {accumulate}, but {type(self).__name__} {why}: leave accumulate out, and make batches larger."
                )
            self.batches_per_step = accumulate
        self.gradient_clip = gradient_clip
        self.lr_scheduler = lr_scheduler
        self.lr_interval: Interval = lr_interval
        self._begin()

    def _begin(self) -> None:
        """Set all attributes that change after ``__init__`` to their initial values; called by it, and on copies."""
        self.private_gradients: Callable[[PhasedModule, Any], Tensor] | None = None  # in place of compute_gradients
        self.frozen_names: frozenset[str] | None = None
        self.rounds_before = 0  # runs through the phases before this fit; set by the federation
        self.progress = Progress()
        self.running_phases: list[Phase] = []  # of the current fit
        self.moments: dict[str, Tensor] = {}  # of persistent optimizers
        self.resume = Resume()
        self._phase: Phase | None = None
        self._schedules: dict[str, Schedule] = {}
        self._other_phases: Sequence[Phase] | None = None
        self._epoch_batches = 0  # of a whole epoch

    def phases(self) -> list[Phase]:
        """The phases, in the order in which they run."""
        raise NotImplementedError(f"{type(self).__name__} must override phases().")

    @property
    def phase(self) -> Phase:
        """The running phase; after a fit, the last one."""
        if self._phase is None:
            raise FederationError(f"{type(self).__name__} is in no phase: compute gradients only during training.")
        return self._phase

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = phase

    def compute_gradients(self, batch: Any) -> Tensor:
        """Set the gradients of a step of the running phase and return the loss, which is logged.

        Default: the gradients of the phase's loss and penalty. FLOPs are counted of this method.
        """
        if self.accumulate > 1:
            return self._accumulated_gradients(batch)
        loss = self._loss_of(batch)
        self.manual_backward(loss if self.phase.penalty is None else loss + self.phase.penalty())
        return loss.detach()

    def _accumulated_gradients(self, batches: Sequence[Any]) -> Tensor:
        """Set the gradients of the mean over all terms of the batches' losses."""
        terms = [self.loss_terms(batch) for batch in batches]
        total, losses = sum(terms) or 1, []
        for batch, share in zip(batches, terms, strict=True):
            loss = self._loss_of(batch) * (share / total)
            self.manual_backward(loss)
            losses.append(loss.detach())
        if self.phase.penalty is not None and (penalty := self.phase.penalty()).requires_grad:  # unlike FedHM's of a full network
            self.manual_backward(penalty)
        return torch.stack(losses).sum()

    def _loss_of(self, batch: Any) -> Tensor:
        """The loss of the running phase. Raises :class:`FederationError` if it is no tensor."""
        if not isinstance(loss := self.phase.loss(batch), Tensor):
            raise FederationError(
                f"The loss of a batch in phase {self.phase.name!r} is a {type(loss).__name__}: let client_loss, or the phase's "
                "loss, return a tensor with one number."
            )
        return loss

    def loss_terms(self, batch: Any) -> float:
        """Number of terms that the loss of a batch is the mean over, or the sum of their weights. Default: one per example."""
        return extract_batch_size(batch)

    @property
    def has_own_gradients(self) -> bool:
        """Whether the method overrides :meth:`compute_gradients`."""
        return type(self).compute_gradients is not PhasedModule.compute_gradients

    def client_step(self, batch: Any) -> Tensor:
        """One optimizer step of the running phase; returns the loss."""
        optimizer = self.progress.optimizer
        assert optimizer is not None  # of the running phase
        optimizer.zero_grad()
        loss = self.compute_gradients(batch) if self.private_gradients is None else self.private_gradients(self, batch)
        if (clip := self.clip_of(self.phase)) is not None:
            # Optimizers that step together are clipped separately: one network's step must not depend on another network.
            for own in getattr(optimizer.optimizer, "optimizers", [optimizer.optimizer]):
                self.clip_gradients(own, clip, "norm")
        optimizer.step()
        self.after_step(optimizer.optimizer)
        return loss

    def after_step(self, optimizer: Optimizer) -> None:
        """Called after an optimizer step, with the optimizer, whose groups hold parameters and learning rates. Default: nothing."""

    def clip_of(self, phase: Phase) -> float | None:
        """The maximum gradient norm of a step of ``phase``."""
        return self.gradient_clip if phase.gradient_clip is None else phase.gradient_clip

    def num_epochs(self, batches_per_epoch: int) -> int:
        """Number of Trainer epochs that one run through the phases takes."""
        phases = self.phases() if self._other_phases is None else self._other_phases
        return int(sum(phase.num_epochs(batches_per_epoch, self.batches_per_step) for phase in phases))

    @contextmanager
    def training_on(self, phases: Sequence[Phase]) -> Iterator[None]:
        """A context in which a fit runs these phases instead of :meth:`phases`."""
        self._other_phases = phases
        try:
            yield
        finally:
            self._other_phases = None

    def load_moments(self, moments: dict[str, Tensor]) -> None:
        """Load the state of persistent optimizers, by the names of :attr:`moments`.

        Raises:
            FederationError: if a name belongs to no parameter.
        """
        parameters = dict(self.named_parameters())
        if strange := [name for name in moments if moment_parts(name)[1] not in parameters]:
            raise FederationError(
                f"The private state for {type(self).__name__} has optimizer state of {strange[0]!r}, which is not a parameter."
            )
        self.moments = moments

    # ------------------------------------------------------------------------------------------------- the Trainer's hooks

    def configure_callbacks(self) -> Any:
        """Refuse settings of the Trainer that conflict with manual optimization; adds no callbacks.

        This is the first of Lightning's hooks, so that the error names the setting to use instead.
        """
        for option, here, off in (("accumulate_grad_batches", "accumulate", 1), ("gradient_clip_val", "gradient_clip", 0)):
            if ((value := getattr(self.trainer, option)) or off) != off:
                raise FederationError(
                    f"The Trainer has {option}={value}, but {type(self).__name__} calls the optimizer itself: pass "
                    f"{here}={value} to the module instead."
                )
        if any(isinstance(callback, LearningRateFinder) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            raise FederationError(
                f"lr_find needs a module with a single optimizer, and {type(self).__name__} has one per phase: compare "
                "learning rates on validation data instead, with tune in a sweep."
            )
        return super().configure_callbacks()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the position within the phases."""
        checkpoint[CHECKPOINT] = self.resume.state_dict(self)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember the position within the phases, for training that resumes."""
        self.resume.stopped = checkpoint.get(CHECKPOINT)

    def configure_optimizers(self) -> Any:
        """One optimizer per phase, and the schedules of the phases that have one."""
        if self.frozen_names is None:  # found before the first phase freezes anything
            self.frozen_names = self.find_frozen()
        phases = self.phases() if self._other_phases is None else self._other_phases
        self.running_phases = [phase for phase in phases if phase.epochs or phase.steps]
        optimizers = [phase.new_optimizer() for phase in self.running_phases]
        schedules = {}
        for phase, optimizer in zip(self.running_phases, optimizers, strict=True):
            if factory := phase.lr_scheduler or self.lr_scheduler:
                earlier = self._schedules.get(phase.name)
                schedules[phase.name] = Schedule(factory, phase.lr_interval or self.lr_interval, optimizer, earlier)
        self._schedules |= schedules  # phases of other fits keep theirs
        if not schedules:
            return optimizers
        return optimizers, [{"scheduler": schedule.scheduler, "name": f"lr/{name}"} for name, schedule in schedules.items()]

    def find_frozen(self) -> frozenset[str]:
        """Names of the parameters that no phase trains: those that did not require gradients when the networks were built. A tied
        parameter has several names, as in the state dict.
        """
        return frozenset(name for name, p in self.named_parameters(remove_duplicate=False) if not p.requires_grad)

    def on_fit_start(self) -> None:
        """Refuse settings that it cannot train with."""
        self.progress = Progress()  # not that of an earlier fit
        self.resume.begin_fit(self)
        if self.trainer.precision == "16-mixed" and not self.scales_gradients:
            raise FederationError(
                f"{type(self).__name__} computes gradients itself, which 16-mixed cannot scale: set the trainer's precision to "
                "bf16-mixed or 32-true."
            )
        clips = [clip for phase in self.running_phases if (clip := self.clip_of(phase)) is not None]
        if clips and self.trainer.precision == "16-mixed":
            raise FederationError(
                f"gradient_clip is {clips[0]} with precision 16-mixed, whose gradients are scaled when they are clipped: "
                "set the trainer's precision to bf16-mixed or 32-true, or leave gradient_clip out."
            )
        if not self.running_phases and type(self).configure_optimizers is not PhasedModule.configure_optimizers:
            raise FederationError(
                f"{type(self).__name__} overrides configure_optimizers, which gives each phase its optimizer: pass optimizer=…, or "
                "override phases."
            )
        if not self.running_phases:
            raise FederationError(f"{type(self).__name__} has nothing to train: give it epochs or steps above 0.")
        if len(self.trainer.lr_scheduler_configs) != sum(phase.name in self._schedules for phase in self.running_phases):
            raise FederationError(
                f"configure_optimizers() of {type(self).__name__} returned a schedule that no phase would follow: give "
                "lr_scheduler to the module or to its phases."
            )

    def on_train_start(self) -> None:
        """Resume within a phase or an epoch if the checkpoint was saved there."""
        if math.isinf(self.trainer.num_training_batches):
            raise FederationError(
                "The training data have no length, by which phases are counted: give the Trainer limit_train_batches."
            )
        self._epoch_batches = int(self.trainer.num_training_batches)
        self.resume.go_on(self)

    def on_train_epoch_start(self) -> None:
        """Find the phase that this epoch belongs to and enter it at its first epoch."""
        if self.trainer.num_training_batches != self.progress.batches:
            self._epoch_batches = int(self.trainer.num_training_batches)  # the loaders may be new
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
        """Limit the running epoch to ``batches``, and let the Trainer validate after the last one."""
        loop, interval = self.trainer.fit_loop, self.trainer.val_check_interval
        self.progress.batches = loop.max_batches = batches
        if isinstance(interval, float) and self.trainer.val_check_batch is not None:
            self.trainer.val_check_batch = max(1, int(batches * interval))

    def _optimizer(self, place: int) -> LightningOptimizer:
        optimizers = self.optimizers()
        return optimizers[place] if isinstance(optimizers, list) else optimizers

    def reenter(self, phase: Phase, progress: Progress) -> None:
        """Resume ``phase`` at the given progress."""
        self.progress = progress
        progress.optimizer = self._optimizer(self.running_phases.index(phase))
        self._enter_modes(phase)
        assert progress.batches is not None  # saved while a phase was running
        self._cut_epoch(progress.batches)

    def _enter(self, phase: Phase, round: int) -> None:
        place = self.running_phases.index(phase)
        self.progress = Progress(phase.name, phase.steps, optimizer=self._optimizer(place))
        self._enter_modes(phase)
        optimizer = self.trainer.optimizers[place]
        optimizer.state.clear()
        if phase.persistent:
            parameters = dict(self.named_parameters())
            counts_there = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
            for name, tensor in self.moments.items():
                owner, parameter, key = moment_parts(name)
                if owner == phase.name:  # PyTorch keeps the step counter on the CPU, except of such optimizers
                    own = parameters[parameter]
                    if tensor.dim() and tensor.shape == own.shape:  # in its layout: otherwise half precision is rounded otherwise
                        value: Any = torch.empty_like(own, dtype=tensor.dtype, device=self.device).copy_(tensor)
                    elif tensor.dim() == 0 and tensor.dtype == torch.int64:  # the step counter of other libraries' optimizers
                        value = int(tensor)
                    else:
                        stays = tensor.dim() == 0 and not counts_there
                        value = tensor.clone() if stays else tensor.to(self.device, copy=True)
                    optimizer.state[own][key] = value
        if phase.name in self._schedules:
            self._schedules[phase.name].begin(round)

    def _enter_modes(self, phase: Phase) -> None:
        """Make the phase's parameters trainable and freeze all others."""
        self.phase = phase
        self._set_learning(phase.parameters)
        for module in (*phase.eval_modules, *self.frozen_layers()):
            module.eval()

    def _set_learning(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make these parameters trainable, except frozen ones, and no others; without gradients, in train mode."""
        frozen, learning = self.frozen_names or (), {id(p) for p in parameters}
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(id(parameter) in learning and name not in frozen)
            parameter.grad = None
        self.train()

    def frozen_layers(self) -> Iterable[nn.Module]:
        """Layers that are in eval mode in every phase. Default: none."""
        return ()

    @with_signature
    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Run :meth:`client_step` once enough batches have arrived for a step."""
        self.resume.before_step(self)
        progress = self.progress
        progress.waiting.append(batch)
        progress.last_step = None
        ends = self.accumulate > 1 and progress.steps_left is None and batch_idx + 1 == progress.batches
        if len(progress.waiting) == self.batches_per_step or ends:
            step = progress.waiting if self.batches_per_step > 1 else batch
            size = sum(map(self.loss_terms, step if self.accumulate > 1 else [batch]))
            progress.waiting = []
            progress.losses.append(self.client_step(step))
            progress.sizes.append(size)
            progress.last_step = step if size or self.private_gradients is None else None  # of no example
            if progress.steps_left is not None:
                progress.steps_left -= 1
            self.step_schedule("step")
        if batch_idx + 1 == progress.batches:  # the loader may have more batches
            self.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True

    def on_train_epoch_end(self) -> None:
        """Log the epoch's ``train/<phase>_loss``, its current ``train/<phase>_penalty`` and ``lr/<phase>``, where there are any.

        The loss is the mean over the epoch's examples, or over what their loss is a mean of (tokens, class weights). It is logged
        once per epoch because logging takes longer than a small step.
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
        """Advance the running phase's schedule, if it has one, by a step or an epoch."""
        if self._schedules and self.progress.phase in self._schedules:
            self._schedules[self.progress.phase].step(interval)

    def on_fit_end(self) -> None:
        """Store the state of persistent optimizers and reset the module: trainable as built, in train mode, without gradients.

        A checkpoint that is saved now still holds the position within the phases.
        """
        self.progress.optimizer = self.progress.last_step = None
        for phase, optimizer in zip(self.running_phases, self.trainer.optimizers, strict=True):
            if phase.persistent:
                for name, parameter in self.named_parameters():
                    for key, value in optimizer.state.get(parameter, {}).items():
                        tensor = torch.as_tensor(value).detach().to("cpu", copy=True)
                        self.moments[f"{MOMENTS}{phase.name}/{name}/{key}"] = tensor
        self._set_learning(self.parameters())
