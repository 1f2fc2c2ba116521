"""Tasks: multiclass, binary, multilabel, regression and survival. Each has a default loss and metrics."""

from lightning_fed.tasks.metrics import AUROC, F1, ConcordanceIndex, Matthews
from lightning_fed.tasks.task import TASKS, Binary, Multiclass, Multilabel, Regression, Survival, Task, TaskName

__all__ = [
    "AUROC",
    "F1",
    "TASKS",
    "Binary",
    "ConcordanceIndex",
    "Matthews",
    "Multiclass",
    "Multilabel",
    "Regression",
    "Survival",
    "Task",
    "TaskName",
]
