"""Floating-point operations of local training, counted outside the training loop."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from lightning_fed.core.module import FederatedModule
from lightning_fed.core.public_distillation import PublicDistillation
from lightning_fed.models import Transformer, Wrapped
from lightning_fed.seeding import isolated

TENSORS = {"_parameters", "_buffers", "_modules"}
"""Where nn.Module keeps its tensors and children."""

AROUND = {
    *("networks", "progress", "resume", "_clients", "frozen_by_architecture"),
    *("running_phases", "_other_phases", "_schedules", "moments"),
}
"""Attributes of a module that no step uses: network factories, which may be large networks themselves, and what surrounds a step,
such as optimizers and their states. Copies share them.
"""

SMALL = 2**18
"""Number of parameters up to which a copy is cheap and a step costs less than computing shapes."""


class AllModules(nullcontext[None]):
    """Lets a counter count for no module in particular. The tracker that it has by itself needs hooks at parameters that a module
    gets as inputs, as parametrizations do; torch.autograd.grad cannot run these.
    """

    parents = ("Global",)
    """The names for which the counter counts; its total is that of ``Global``."""


class FlopMeter(L.Callback):
    """Counts the FLOPs of training steps, forward and backward.

    Each kind of step (architecture, phase, batch shapes) is counted once, on a copy of the module; training only records which
    kinds of steps it made. The copy of a large module has fake tensors, which have shapes but no values and take no memory; small
    modules and those that read tensor values have ordinary copies. The optimizer's own arithmetic and evaluation are not counted.

    Args:
        small: number of parameters up to which a network is small. None: :data:`SMALL`.
    """

    def __init__(self, small: float | None = None) -> None:
        self.small = SMALL if small is None else small
        self._cost: dict[tuple[Any, ...], int] = {}
        self._steps: Counter[tuple[Any, ...]] = Counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the kind of step."""
        assert isinstance(pl_module, FederatedModule)
        assert pl_module.client is not None
        if pl_module.progress.last_step is not None:  # else a step of several batches needs more of them
            phase = pl_module.phase  # its loss may differ between rounds
            kind = f"{phase.name}/{getattr(phase.loss, '__name__', '')}"
            self.note(pl_module, kind, pl_module.progress.last_step, _train)

    def note(self, module: FederatedModule, kind: str, batch: Any, step: Callable[[FederatedModule, Any], Any]) -> None:
        """Record a step.

        Args:
            module: the module that made the step.
            kind: name of the kind of step, among those of the module's architecture.
            batch: the step's batch.
            step: repeats the step on a copy of the module and of the batch.
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


def countable_without_values(module: FederatedModule) -> bool:
    """Whether a step can be counted without values: not if the method or a user's network may read them, or if weights are
    quantised.
    """
    quantised = any(not parameter.is_floating_point() for parameter in module.parameters())
    return module.flops_without_values and not quantised and not any(isinstance(layer, Wrapped) for layer in module.modules())


def _shapes(batch: Any) -> tuple[Any, ...]:
    """The shapes of a batch's tensors, on which its cost depends."""
    return tuple(tuple(leaf.shape) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _count(module: FederatedModule, batch: Any, step: Callable[[FederatedModule, Any], Any], most: float) -> int:
    """FLOPs of one step."""
    small = sum(parameter.numel() for parameter in module.parameters()) <= most
    without_values = countable_without_values(module)
    # A first step computes what is cached once per phase, which no step counts. With large transformers it would take seconds.
    warm = small or (without_values and not any(isinstance(layer, Transformer) for layer in module.modules()))
    if without_values and not small:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            return _counted(_fake_copy(module, fake), tree_map_only(Tensor, fake.from_tensor, batch), step, warm, fake)
        except (DataDependentOutputException, DynamicOutputShapeException):
            pass  # the network reads values, as mixtures of experts do
    return _counted(_real_copy(module), copy.deepcopy(batch), step, warm, nullcontext())


def _counted(copied: FederatedModule, batch: Any, step: Callable[[FederatedModule, Any], Any], warm: bool, mode: Any) -> int:
    """FLOPs of a step of a copy, after a first one if it is to be warm."""
    copied.loss_terms = _one_term  # type: ignore[method-assign]
    with isolated(), torch.autograd.set_detect_anomaly(False), _plain_kernels(copied), mode:
        # Anomaly detection reads tensor values, which fake tensors do not have.
        if warm:
            step(copied, batch)
        counter = FlopCounterMode(display=False)
        counter.mod_tracker = AllModules()  # type: ignore[assignment]
        with counter:
            step(copied, batch)
    return counter.get_total_flops()


@contextmanager
def _plain_kernels(module: nn.Module) -> Iterator[None]:
    """A context in which torch avoids fused kernels, of which its counter counts nothing: attention, a Transformer layer in
    inference, an LSTM, a mixture of experts. Language models compute outputs for all tokens.
    """
    for layer in module.modules():
        if isinstance(layer, Transformer):
            layer.counts_flops = True
            if hasattr(layer.network, "set_experts_implementation"):
                layer.network.set_experts_implementation("eager")
    backends: Any = torch.backends  # its type hints say that these flags are read-only
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
    """A training step in the module's phase; a copy needs its own parameters and loss."""
    of_public = [copied.server_phases, copied.public_phases] if isinstance(copied, PublicDistillation) else []
    makers = [copied.phases, copied.evaluation_phases, *of_public, copied.fine_tuning_phases]  # a server's model has no fine-tuning
    copied.phase = next(phase for make in makers for phase in make() if phase.name == copied.phase.name)
    copied.manual_backward = _backward  # type: ignore[method-assign]
    copied.compute_gradients(batch)


def _backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    loss.backward(*args, **kwargs)


def _one_term(batch: Any) -> int:
    """Instead of the number of learned tokens, a value. It only scales losses."""
    return 1


def _fake_copy(module: FederatedModule, fake: FakeTensorMode) -> FederatedModule:
    """A copy of the module in its phase, with fake tensors.

    Each count gets its own copy, so that values that a network caches between steps do not make costs depend on the turn order.
    """
    own = (value for value in vars(module).values() if isinstance(value, Tensor))
    return _copy(module, {id(tensor): fake.from_tensor(tensor) for tensor in [*module.parameters(), *module.buffers(), *own]})


def _real_copy(module: FederatedModule) -> FederatedModule:
    """A copy of the module in its phase that shares only frozen parameters, for networks that read tensor values."""
    return _copy(module, {id(parameter): parameter for name, parameter in module.named_parameters() if name in module.frozen_names})


def _copy(module: FederatedModule, memo: dict[int, Any]) -> FederatedModule:
    """A deep copy without metrics that shares only what no step touches and what cannot be copied.

    Args:
        module: the module to copy.
        memo: replacements for parts of the module, by their ids.
    """
    memo |= {id(module.val_metrics): None, id(module.test_metrics): None}
    memo |= {id(value): value for name, value in vars(module).items() if name in AROUND}
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:
        return copy.deepcopy(module, memo | _uncopyable(module, memo))


def _uncopyable(module: nn.Module, memo: dict[int, Any]) -> dict[int, Any]:
    """Attributes of a module and its layers that cannot be copied, by their ids. Whatever copying raises, they are shared."""
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
