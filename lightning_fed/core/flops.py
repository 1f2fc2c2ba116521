"""Floating-point operations of local training, counted off the training path."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from lightning_fed.core.module import FederatedModule
from lightning_fed.core.public_distillation import PublicDistillation
from lightning_fed.models import Transformer, Wrapped
from lightning_fed.seeding import isolated

TENSORS = {"_parameters", "_buffers", "_modules"}
"""Where nn.Module keeps them."""

AROUND = {"networks", "progress", "resume", "_clients", "frozen_by_architecture"}
AROUND |= {"running_phases", "_other_phases", "_schedules", "moments"}
"""Attributes of a module that no step touches: what makes networks, which may be large ones themselves, and what surrounds a step,
with optimizers and their states. Copies share them.
"""

SMALL = 2**18
"""Parameters up to which a copy costs next to nothing, and a step less than finding out its shapes."""


class FlopMeter(L.Callback):
    """Counts the FLOPs of training steps, forward and backward.

    A kind of step (architecture, phase, batch shapes) is counted once, on a copy of the module; training itself only notes which
    kinds of step it did. The copy of a large module is on the meta device, which computes shapes and no numbers; small ones, and
    those that look at numbers while they run, have ordinary copies. The optimizer's own arithmetic and evaluation are not counted.

    Args:
        small: parameters of a network that is small; None: :data:`SMALL`.
    """

    def __init__(self, small: float | None = None) -> None:
        self.small = SMALL if small is None else small
        self._cost: dict[tuple[Any, ...], int] = {}
        self._steps: Counter[tuple[Any, ...]] = Counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note the kind of step that was done."""
        assert isinstance(pl_module, FederatedModule)
        assert pl_module.client is not None
        if pl_module.progress.last_step is not None:  # else a step of several batches waits for more
            phase = pl_module.phase  # whose loss may not be the same in all rounds
            kind = f"{phase.name}/{getattr(phase.loss, '__name__', '')}"
            self.note(pl_module, kind, pl_module.progress.last_step, _train)

    def note(self, module: FederatedModule, kind: str, batch: Any, step: Callable[[FederatedModule, Any], Any]) -> None:
        """Note a step that was done.

        Args:
            module: which did it.
            kind: what sort of step it was, of those that the module's architecture has.
            batch: of the step.
            step: does it again, on a copy of the module and of the batch.
        """
        key = (module.architecture(module.client), kind, _shapes(batch))
        if key not in self._cost:
            self._cost[key] = _count(module, batch, step, self.small)
        self._steps[key] += 1

    def collect(self) -> int:
        """FLOPs since the last call."""
        total = sum(self._cost[step] * times for step, times in self._steps.items())
        self._steps.clear()
        return total


def countable_on_meta(module: FederatedModule) -> bool:
    """Whether a step can be counted on the meta device: not if the method or its network may look at numbers (attention masks)."""
    return module.flops_on_meta and not any(isinstance(layer, Wrapped | Transformer) for layer in module.modules())


def _shapes(batch: Any) -> tuple[Any, ...]:
    """The shapes of a batch's tensors: what its cost depends on."""
    return tuple(tuple(leaf.shape) for leaf in torch.utils._pytree.tree_leaves(batch) if isinstance(leaf, Tensor))


def _count(module: FederatedModule, batch: Any, step: Callable[[FederatedModule, Any], Any], most: float) -> int:
    """FLOPs of a step."""
    small = sum(parameter.numel() for parameter in module.parameters()) <= most
    on_meta = countable_on_meta(module)
    if on_meta and not small:
        copied, batch = _meta_copy(module), move_data_to_device(batch, torch.device("meta"))
    else:
        copied, batch = _real_copy(module), copy.deepcopy(batch)
    with isolated(), torch.autograd.set_detect_anomaly(False), _plain_kernels(copied):
        # Shapes have no anomalies: looking for them asks tensors for numbers that those on the meta device have not.
        if on_meta or small:
            step(copied, batch)  # what is computed once per phase, and kept, is not a part of its steps
        with FlopCounterMode(display=False) as counter:
            step(copied, batch)
    return counter.get_total_flops()


@contextmanager
def _plain_kernels(module: nn.Module) -> Iterator[None]:
    """In this block torch computes in pieces what it may else compute in one kernel, of which its counter counts nothing:
    attention, a layer of a Transformer that only answers, an LSTM; and a language model answers for all tokens.
    """
    for layer in module.modules():
        if isinstance(layer, Transformer):
            layer.counts_flops = True
    backends: Any = torch.backends  # whose types say that these flags cannot be set
    before = backends.mha.get_fastpath_enabled(), backends.mkldnn.enabled, backends.cudnn.enabled
    try:
        backends.mha.set_fastpath_enabled(False)
        if any(isinstance(layer, nn.RNNBase) for layer in module.modules()):
            backends.mkldnn.enabled = backends.cudnn.enabled = False
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        backends.mha.set_fastpath_enabled(before[0])
        _, backends.mkldnn.enabled, backends.cudnn.enabled = before


def _train(copied: FederatedModule, batch: Any) -> None:
    """A step of training in the phase that the module is in: on a copy it has other parameters and another loss."""
    phases = [*copied.phases(), *copied.fine_tuning_phases()]
    if isinstance(copied, PublicDistillation):
        phases += [*copied.server_phases(), *copied.public_phases()]
    copied.phase = {phase.name: phase for phase in phases}[copied.phase.name]
    copied.manual_backward = _backward  # type: ignore[method-assign]
    copied.compute_gradients(batch)


def _backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    loss.backward(*args, **kwargs)


def _meta_copy(module: FederatedModule) -> FederatedModule:
    """The module as it is in its phase, with tensors that have shapes and no numbers.

    Each count has a copy of its own, lest what a network caches between steps make costs depend on the order of the turns.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for tensor in [*module.buffers(), *(value for value in vars(module).values() if isinstance(value, Tensor))]:
        memo[id(tensor)] = torch.empty_like(tensor, device="meta")
    return _copy(module, memo).to("meta")  # its own idea of its device, too


def _real_copy(module: FederatedModule) -> FederatedModule:
    """The module as it is in its phase, with numbers of its own where they may change, for networks that look at numbers."""
    return _copy(module, {id(parameter): parameter for name, parameter in module.named_parameters() if name in module.frozen_names})


def _copy(module: FederatedModule, memo: dict[int, Any]) -> FederatedModule:
    """A copy that has nothing in common with the module but what is not touched by a step, and what refuses to be copied. It does
    without metrics.

    Args:
        module: to be copied.
        memo: what the copy has in place of the module's parts, by their ids.
    """
    memo |= {id(module.val_metrics): None, id(module.test_metrics): None}
    memo |= {id(value): value for name, value in vars(module).items() if name in AROUND}
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:
        return copy.deepcopy(module, memo | _uncopyable(module, memo))


def _uncopyable(module: nn.Module, memo: dict[int, Any]) -> dict[int, Any]:
    """The attributes, of a module and its layers, that refuse to be copied, by their ids. Whatever they raise, it is shared."""
    memo = memo | {id(layer): layer for layer in module.modules()}
    shared: dict[int, Any] = {}
    for layer in module.modules():
        for name, value in vars(layer).items():
            if name not in TENSORS:
                try:
                    copy.deepcopy(value, dict(memo))
                except Exception:
                    shared[id(value)] = value
    return shared
