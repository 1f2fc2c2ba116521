"""What is predicted: one class of several, several labels at once, or numbers. Each has its usual loss and its metrics."""

from lightning_fed.tasks.metrics import F1, Matthews
from lightning_fed.tasks.task import TASKS, Multiclass, Multilabel, Regression, Task, TaskName

__all__ = ["F1", "TASKS", "Matthews", "Multiclass", "Multilabel", "Regression", "Task", "TaskName"]
