"""Training in phases: a LightningModule in which different parameters learn one after the other. It knows no client."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn

from lightning_fed.errors import FederationError

MOMENTS = "optimizer/"
"""What names of persistent optimizers' state begin with; no name of a module does."""


def default_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """SGD with learning rate 0.01, the client optimizer of the pFedLoRA experiments."""
    return torch.optim.SGD(parameters, lr=0.01)


@dataclass(frozen=True, eq=False)
class Phase:
    """A stretch of training in which one set of parameters learns and everything else is frozen.

    Args:
        name: how the phase is called in metrics (``train/<name>_loss``).
        parameters: what learns. Everything else has ``requires_grad=False`` and no optimizer entry, so it stays bit-identical.
        loss: the loss of a batch, a scalar. It depends on the module and the batch alone and has no data-dependent control flow.
        optimizer: builds the phase's optimizer, fresh each time the phase starts.
        epochs: passes over the data. Give either epochs or steps.
        steps: optimizer steps, across epochs if need be. The next phase starts with a new epoch.
        eval_modules: modules that are in eval mode during the phase (dropout off, batch-norm statistics fixed).
        persistent: whether the optimizer's state (moments) is kept from one fit to the next: in a federation it is private state,
            and stays with the client. Else each fit begins with an empty one.
    """

    name: str
    parameters: Sequence[nn.Parameter]
    loss: Callable[[Any], Tensor]
    optimizer: OptimizerCallable
    epochs: int | None = None
    steps: int | None = None
    eval_modules: Sequence[nn.Module] = ()
    persistent: bool = False

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise FederationError(f"Phase {self.name!r} got epochs={self.epochs}, steps={self.steps}: give exactly one.")

    def num_epochs(self, batches_per_epoch: int, batches_per_step: int = 1) -> int:
        """Epochs that the phase spans, the last one possibly cut short."""
        return self.epochs if self.epochs is not None else -(-(self.steps or 0) * batches_per_step // batches_per_epoch)


@dataclass(slots=True)
class Progress:
    """Where a phase is. An object beside the module: to set an attribute of a module takes long, next to a small step.

    Args:
        phase: its name; None: no phase is running.
        steps_left: of a phase that is counted in steps.
        waiting: batches of a step that waits for more.
        last_step: the batch, or the batches, of the last call of ``training_step`` if it stepped.
        optimizer: the phase's.
        losses: of the epoch's steps.
        sizes: number of examples of each.
    """

    phase: str | None = None
    steps_left: int | None = None
    waiting: list[Any] = field(default_factory=list)
    last_step: Any = None
    optimizer: LightningOptimizer | None = None
    losses: list[Tensor] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class PhasedModule(L.LightningModule):
    """A LightningModule that learns in phases, by manual optimisation.

    A subclass says in :meth:`phases` what learns when, on which loss and with which optimizer. The base class freezes what is
    outside the running phase, gives each phase a fresh optimizer, steps, clips, and logs ``train/<phase>_loss``. A Trainer runs the
    phases one after the other, and again from the first until it stops; ``max_epochs=module.num_epochs(batches)`` is once through.

    A method with a step of its own overrides :meth:`compute_gradients` or :meth:`client_step`. Almost never override
    ``training_step`` or ``configure_optimizers``: they run the phases.

    Args:
        gradient_clip: largest gradient norm of a step; None does not clip.
    """

    batches_per_step = 1
    """How many batches an optimizer step takes; with more than one, :meth:`client_step` gets a list of them."""

    def __init__(self, gradient_clip: float | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.gradient_clip = gradient_clip
        self.frozen_names: frozenset[str] | None = None
        self.progress = Progress()
        self._phase: Phase | None = None
        self._phases: list[Phase] = []
        self._playing: Sequence[Phase] | None = None
        self._moments: dict[str, Tensor] = {}

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
        """Set the gradients of a step of the running phase; returns the loss. Default: those of the phase's loss. This is also
        what FLOPs are counted of.
        """
        loss: Tensor = self.phase.loss(batch)
        self.manual_backward(loss)
        return loss.detach()

    def client_step(self, batch: Any) -> Tensor:
        """One optimizer step of the running phase; returns the loss."""
        optimizer = self.progress.optimizer
        assert optimizer is not None  # of the running phase
        optimizer.zero_grad()
        loss = self.compute_gradients(batch)
        if self.gradient_clip is not None:
            self.clip_gradients(optimizer.optimizer, self.gradient_clip, "norm")
        optimizer.step()
        return loss

    def num_epochs(self, batches_per_epoch: int) -> int:
        """Trainer epochs that one run through the phases takes."""
        phases = self.phases() if self._playing is None else self._playing
        return sum(phase.num_epochs(batches_per_epoch, self.batches_per_step) for phase in phases)

    @contextmanager
    def playing(self, phases: Sequence[Phase]) -> Iterator[None]:
        """In this block a fit runs these phases, and :meth:`phases` is not asked."""
        self._playing = phases
        try:
            yield
        finally:
            self._playing = None

    # ------------------------------------------------------------------------------------------------- the Trainer's hooks

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One optimizer per phase."""
        if self.frozen_names is None:  # asked before the first phase freezes anything
            self.frozen_names = self.find_frozen()
        phases = self.phases() if self._playing is None else self._playing
        self._phases = [phase for phase in phases if phase.epochs or phase.steps]
        return [phase.optimizer(phase.parameters) for phase in self._phases]

    def find_frozen(self) -> frozenset[str]:
        """Names of the parameters that no phase trains: those that require no gradient as the networks were made. A tied parameter
        has several names, as in the state dict.
        """
        return frozenset(name for name, p in self.named_parameters(remove_duplicate=False) if not p.requires_grad)

    def on_fit_start(self) -> None:
        """Refuse what would clip wrongly."""
        self.progress = Progress()  # a fit that failed left its own
        if self.gradient_clip is not None and self.trainer.precision == "16-mixed":
            raise FederationError(
                f"gradient_clip is {self.gradient_clip} with precision 16-mixed, whose gradients are scaled when they are clipped: "
                "set the trainer's precision to bf16-mixed or 32-true, or leave gradient_clip out."
            )

    def on_train_epoch_start(self) -> None:
        """Find the phase that this epoch belongs to; enter it if it is its first epoch."""
        batches = int(self.trainer.num_training_batches)
        schedule = [phase for phase in self._phases for _ in range(phase.num_epochs(batches, self.batches_per_step))]
        epoch = self.current_epoch % len(schedule)
        if epoch == 0 or schedule[epoch] is not schedule[epoch - 1]:
            self._enter(schedule[epoch])
        self.progress.losses, self.progress.sizes = [], []

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        place = self._phases.index(phase)
        optimizers = self.optimizers()
        wrapped = optimizers[place] if isinstance(optimizers, list) else optimizers
        self.progress = Progress(phase.name, phase.steps, optimizer=wrapped)
        frozen = self.frozen_names or ()
        learning = {id(p) for p in phase.parameters}
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(id(parameter) in learning and name not in frozen)
            parameter.grad = None
        optimizer = self.trainer.optimizers[place]
        optimizer.state.clear()
        if phase.persistent:
            for name, parameter in self.named_parameters():
                prefix = f"{MOMENTS}{phase.name}/{name}/"
                state = {key.removeprefix(prefix): t for key, t in self._moments.items() if key.startswith(prefix)}
                if state:  # a counter of steps stays on the CPU, where PyTorch has it
                    optimizer.state[parameter] = {
                        k: t.clone() if t.dim() == 0 else t.to(self.device, copy=True) for k, t in state.items()
                    }
        self.train()
        for module in phase.eval_modules:
            module.eval()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """End the epoch early when a phase counted in steps is over."""
        return -1 if self.progress.steps_left == 0 else None

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """One :meth:`client_step`, once there are enough batches for it."""
        progress = self.progress
        progress.waiting.append(batch)
        progress.last_step = None
        if len(progress.waiting) == self.batches_per_step:
            step = progress.waiting if self.batches_per_step > 1 else batch
            progress.waiting = []
            progress.losses.append(self.client_step(step))
            progress.sizes.append(extract_batch_size(batch))
            progress.last_step = step
            if progress.steps_left is not None:
                progress.steps_left -= 1

    def on_train_epoch_end(self) -> None:
        """Log ``train/<phase>_loss``, the mean over the epoch's examples: once, for logging takes longer than a small step."""
        losses, sizes = self.progress.losses, self.progress.sizes
        if losses:
            weights = torch.tensor(sizes, device=self.device) / sum(sizes)
            self.log(f"train/{self.phase.name}_loss", (torch.stack(losses) * weights).sum())

    def on_fit_end(self) -> None:
        """Leave the module as it was made: trainable where it was, in train mode, without gradients. Take what persistent
        optimizers have to remember.
        """
        self.progress = Progress()
        for phase, optimizer in zip(self._phases, self.trainer.optimizers, strict=True):
            if phase.persistent:
                for name, parameter in self.named_parameters():
                    for key, tensor in optimizer.state.get(parameter, {}).items():
                        self._moments[f"{MOMENTS}{phase.name}/{name}/{key}"] = tensor.detach().to("cpu", copy=True)
        frozen = self.frozen_names or ()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name not in frozen)
            parameter.grad = None
        self.train()
