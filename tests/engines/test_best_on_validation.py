"""Of the models that a training passes, the best on validation data stays."""

import lightning as L
import pytest
import torch
from tiny import new_trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fed.engines.best_on_validation import BestOnValidation


class Counting(L.LightningModule):
    """Its weight is the number of steps that it took, its score in each validation is given."""

    def __init__(self, scores: list[float]) -> None:
        super().__init__()
        self.weight, self.scores = nn.Parameter(torch.zeros(())), iter(scores)

    def training_step(self, batch: Tensor) -> Tensor:
        return -self.weight

    def validation_step(self, batch: Tensor) -> None:
        self.log("score", next(self.scores))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@pytest.mark.parametrize(
    ("scores", "higher", "patience", "best", "steps"),
    [
        ([1, 3, 2, 3, 0], True, None, 4, 10),  # of equals the first
        ([1, 3, 2, 3, 0], False, None, 10, 10),
        ([1, 3, 2, 3, 5], True, 4, 4, 8),
        ([5, 3, 2, 3, 5], True, 2, 2, 4),
    ],
)
def test_the_best_stays(scores: list[float], higher: bool, patience: int | None, best: int, steps: int) -> None:
    module, callback = Counting(scores), BestOnValidation("score", higher, every=2, patience=patience)
    options = {"num_sanity_val_steps": 0, "log_every_n_steps": 1, **callback.trainer_options}
    trainer = new_trainer(max_epochs=1, callbacks=[callback], **options)
    trainer.fit(module, DataLoader(torch.zeros(10)), DataLoader(torch.zeros(1)))
    assert (module.weight.item(), trainer.global_step) == (best, steps)
