"""Turns on public data: models predict them, and learn from what others predict."""

from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from torch import Tensor

from lightning_fed.core.flops import FlopMeter
from lightning_fed.core.messages import ClientUpdate, Turn, TurnResult
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.public_distillation import OUTPUTS, PublicDistillation
from lightning_fed.data import ClientDataModule
from lightning_fed.data.client_info import SERVER
from lightning_fed.errors import FederationError
from lightning_fed.seeding import PUBLIC, PUBLIC_TRAINING, seed_all
from lightning_fed.tensors import State, check_finite

if TYPE_CHECKING:
    from lightning_fed.engines.worker import Worker


class PublicTurns:
    """The verbs of a worker that are about public data, for methods that have any.

    Args:
        worker: whose trainers, data and seed these are.
    """

    def __init__(self, worker: "Worker") -> None:
        self.worker = worker

    def predict_public(self, module: FederatedModule, turn: Turn) -> TurnResult:
        """What a model predicts for each public example."""
        assert isinstance(module, PublicDistillation)  # whose server alone asks for that
        outputs = {OUTPUTS: self._outputs(module, self._data(module, turn, None))}
        return TurnResult(
            ClientUpdate(turn.client.id, turn.client.num_train, outputs, {"flops": float(self.worker.flops.collect())})
        )

    def train_on_public(self, module: FederatedModule, turn: Turn) -> TurnResult:
        """Train the server's model, which is sent, or a client's, which stays."""
        assert isinstance(module, PublicDistillation)
        state, private = {}, None
        if turn.client.id == SERVER:
            data = self._data(module, turn, module.public_examples)
            metrics = self.worker.train(module, data, module.server_phases(), turn.round - 1, self._best(module, data))
            state = module.shared_state()
        else:
            metrics = self.train_client(module, turn)
            private = private_state(module)
        metrics["flops"] = float(self.worker.flops.collect())
        return TurnResult(ClientUpdate(turn.client.id, turn.client.num_train, state, metrics), private)

    def train_client(self, module: FederatedModule, turn: Turn) -> dict[str, float]:
        """Train a client on public data, if there is anything to learn from them."""
        if not isinstance(module, PublicDistillation) or not (phases := module.public_phases()):
            return {}
        data = self.worker.data.public_set(module.public_batch_size, module.public_examples)
        data.order_seed = seed_all(self.worker.seed, PUBLIC_TRAINING, turn.round, turn.client.id)
        return self.worker.train(module, data, phases, turn.round - 1)

    def answers(self, module: FederatedModule) -> State:
        """What a client that has trained predicts for the examples that it is asked about, if it is."""
        if not isinstance(module, PublicDistillation) or module.predict_public is None:
            return {}
        return {OUTPUTS: self._outputs(module, self.worker.data.public_set(module.public_batch_size, module.predict_public))}

    def _data(self, module: PublicDistillation, turn: Turn, examples: Tensor | None) -> ClientDataModule:
        data = self.worker.data.public_set(module.public_batch_size, examples)
        data.order_seed = seed_all(self.worker.seed, PUBLIC, turn.round, int(turn.broadcast.model_size or 0))
        return data

    def _best(self, module: PublicDistillation, data: ClientDataModule) -> "BestOnValidation | None":
        if module.server_validation is None or not data.info.num_val:
            return None
        return BestOnValidation(f"val/{module.monitor}", module.higher_is_better, *module.server_validation)

    def _outputs(self, module: PublicDistillation, data: ClientDataModule) -> Tensor:
        self.worker.activity = "asked about public data"
        outputs = OutputsPass(module, self.worker.flops, data.info.num_train)
        self.worker.trainers.for_measuring().predict(outputs, datamodule=data, return_predictions=False)
        return outputs.result()


def private_state(module: FederatedModule) -> State | None:
    """What stays with a client after a turn; None if nothing does. Raises :class:`FederationError` for what is not finite."""
    state = module.private_state() or None
    if state is not None:
        check_finite(state, "The private state")
    return state


class OutputsPass(L.LightningModule):
    """What a module says of each example. ``Trainer.predict`` runs it, on examples in order.

    Args:
        module: whose ``forward`` is asked.
        flops: counts the passes.
        examples: how many there are.
    """

    def __init__(self, module: PublicDistillation, flops: FlopMeter, examples: int) -> None:
        super().__init__()
        self.module = module
        self.flops = flops
        self.examples = examples
        self.outputs: Tensor | None = None
        self._seen = 0

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        """Take a batch in; returns its number. Each output goes to its row: pieces put together in the end are in memory twice."""
        x, _ = self.module.unpack(batch)
        said: Tensor = self.module(x)
        self.flops.note(self.module, "predict", batch, _predict)
        if self.outputs is None:
            size = 4 * self.examples * said[0].numel()  # in float32
            wide = torch.promote_types(said.dtype, torch.float32)
            dtype = wide if size <= self.module.public_table_limit else torch.bfloat16
            self.outputs = torch.empty(self.examples, *said.shape[1:], dtype=dtype)
        self.outputs[self._seen : self._seen + len(said)] = said
        self._seen += len(said)
        return batch_idx

    def result(self) -> Tensor:
        """All of them, ``(M, …)``, on the CPU: in float32 at least, or in bfloat16 where they are large.

        Raises:
            FederationError: if not all examples were looked at.
        """
        if self.outputs is None or self._seen < self.examples:
            raise FederationError(
                f"the model was asked about {self._seen} of {self.examples} public examples: set no limit_predict_batches and no "
                "fast_dev_run for the trainer, which apply to each turn."
            )
        return self.outputs


def _predict(copied: FederatedModule, batch: Any) -> None:
    copied(copied.unpack(batch)[0])


class BestOnValidation(L.Callback):
    """Leaves a module as it was when it was best on validation data, and stops where it gets no better.

    Args:
        metric: the column of ``callback_metrics`` that says how good it is.
        higher_is_better: whether it is to be large.
        every: after how many steps there is a validation.
        patience: after how many steps that made it no better the fit stops; None: not before its end.
    """

    def __init__(self, metric: str, higher_is_better: bool, every: int, patience: int | None) -> None:
        self.metric = metric
        self.higher_is_better = higher_is_better
        self.every = every
        self.patience = patience
        self.waited = 0  # steps
        self.best: float | None = None
        self.state: State = {}

    @property
    def trainer_options(self) -> dict[str, Any]:
        """What a Trainer needs to validate so often."""
        return {"val_check_interval": self.every, "check_val_every_n_epoch": None}

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Compare, and remember."""
        value = float(trainer.callback_metrics[self.metric])
        if self.best is None or (value > self.best if self.higher_is_better else value < self.best):
            self.best, self.waited = value, 0
            self.state = {name: tensor.clone() for name, tensor in pl_module.state_dict().items()}
        else:
            self.waited += self.every
            trainer.should_stop = self.patience is not None and self.waited >= self.patience

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Go back to the best."""
        if self.state:
            pl_module.load_state_dict(self.state)
            self.state = {}
