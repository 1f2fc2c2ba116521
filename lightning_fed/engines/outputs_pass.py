"""Turns on public data: models predict them, and learn from other models' predictions."""

from typing import Any

import lightning as L
import torch
from torch import Tensor

from lightning_fed.core.flops import FlopMeter
from lightning_fed.core.messages import ClientUpdate, Turn, TurnResult
from lightning_fed.core.module import FederatedModule
from lightning_fed.core.public_distillation import OUTPUTS, PublicDistillation
from lightning_fed.data import ClientDataModule
from lightning_fed.data.client_info import SERVER
from lightning_fed.engines.best_on_validation import BestOnValidation
from lightning_fed.engines.worker import Worker, private_state
from lightning_fed.errors import FederationError
from lightning_fed.seeding import PUBLIC, PUBLIC_TRAINING, seed_all
from lightning_fed.tensors import State


class PublicWorker(Worker):
    """A worker that also runs turns on public data, for methods that have them; see :class:`.Worker`."""

    def predict_public(self, module: FederatedModule, turn: Turn) -> TurnResult:
        """A model's outputs for each public example."""
        assert isinstance(module, PublicDistillation)  # only their servers have such turns
        outputs = {OUTPUTS: self._outputs(module, self._public_data(module, turn, None))}
        return TurnResult(ClientUpdate(turn.client.id, turn.client.num_train, outputs, {"flops": float(self.flops.collect())}))

    def train_on_public(self, module: FederatedModule, turn: Turn) -> TurnResult:
        """Train the server's model, which is sent back, or a client's, which is not."""
        assert isinstance(module, PublicDistillation)
        state, private = {}, None
        if turn.client.id == SERVER:
            data = self._public_data(module, turn, module.public_examples)
            metrics = self.train(module, data, module.server_phases(), turn.round - 1, self._best(module, data))
            state = module.shared_state()
        else:
            metrics = self.before_training(module, turn)
            private = private_state(module)
        metrics["flops"] = float(self.flops.collect())
        return TurnResult(ClientUpdate(turn.client.id, turn.client.num_train, state, metrics), private)

    def before_training(self, module: FederatedModule, turn: Turn) -> dict[str, float]:
        """Train a client on public data, if its method does so."""
        if not isinstance(module, PublicDistillation) or not (phases := module.public_phases()):
            return {}
        data = self.data.public_set(module.public_batch_size, module.public_examples)
        data.order_seed = seed_all(self.seed, PUBLIC_TRAINING, turn.round, turn.client.id)
        return self.train(module, data, phases, turn.round - 1)

    def after_training(self, module: FederatedModule, data: ClientDataModule) -> State:
        """Add the client's predictions for public examples, if its method needs them."""
        found = super().after_training(module, data)
        if isinstance(module, PublicDistillation) and module.predict_public is not None:
            found[OUTPUTS] = self._outputs(module, self.data.public_set(module.public_batch_size, module.predict_public))
        return found

    def _public_data(self, module: PublicDistillation, turn: Turn, examples: Tensor | None) -> ClientDataModule:
        data = self.data.public_set(module.public_batch_size, examples)
        data.order_seed = seed_all(self.seed, PUBLIC, turn.round, int(turn.broadcast.model_size or 0))
        return data

    def _best(self, module: PublicDistillation, data: ClientDataModule) -> BestOnValidation | None:
        if module.server_validation is None or not data.info.num_val:
            return None
        return BestOnValidation(f"val/{module.monitor}", module.higher_is_better, *module.server_validation)

    def _outputs(self, module: PublicDistillation, data: ClientDataModule) -> Tensor:
        self.activity = "predicting public data"
        outputs = OutputsPass(module, self.flops, data.info.num_train)
        self.trainers.for_measuring().predict(outputs, datamodule=data, return_predictions=False)
        return outputs.result()


class OutputsPass(L.LightningModule):
    """Collects a module's outputs for each example. ``Trainer.predict`` runs it, on examples in order.

    Args:
        module: module whose ``forward`` is called.
        flops: counts the passes.
        examples: number of examples.
    """

    def __init__(self, module: PublicDistillation, flops: FlopMeter, examples: int) -> None:
        super().__init__()
        self.module = module
        self.flops = flops
        self.examples = examples
        self.outputs: Tensor | None = None
        self._seen = 0

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        """Process a batch; returns its index. Outputs are written to their rows: concatenating them would need twice the memory."""
        x, _ = self.module.unpack(batch)
        outputs: Tensor = self.module(x)
        self.flops.note(self.module, "predict", batch, _predict)
        if self.outputs is None:
            size = 4 * self.examples * outputs[0].numel()  # in float32
            wide = torch.promote_types(outputs.dtype, torch.float32)
            dtype = wide if size <= self.module.public_table_limit else torch.bfloat16
            self.outputs = torch.empty(self.examples, *outputs.shape[1:], dtype=dtype)
        self.outputs[self._seen : self._seen + len(outputs)] = outputs
        self._seen += len(outputs)
        return batch_idx

    def result(self) -> Tensor:
        """All outputs, ``(M, …)``, on the CPU, in float32 or wider, or in bfloat16 if they are large.

        Raises:
            FederationError: if not all examples were processed.
        """
        if self.outputs is None or self._seen < self.examples:
            raise FederationError(
                f"the model predicted {self._seen} of {self.examples} public examples: remove limit_predict_batches and "
                "fast_dev_run from the trainer, which apply to each turn."
            )
        return self.outputs


def _predict(copied: FederatedModule, batch: Any) -> None:
    copied(copied.unpack(batch)[0])
