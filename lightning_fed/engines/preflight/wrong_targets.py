"""A check that targets are those of the task, before the first round."""

from lightning_fed.core.module import FederatedModule
from lightning_fed.data.client import ClientDataModule
from lightning_fed.data.lazy import LazyInputs


def refuse_wrong_targets(module: FederatedModule, data: ClientDataModule) -> None:
    """Refuse targets as :meth:`.PredictionMixin.check_values` does. Those that are read on demand are only checked when they are
    measured.

    Raises:
        FederationError: says what was got and what is expected.
    """
    if not isinstance(data.data.images, LazyInputs):
        module.check_values(data.data.targets(slice(None)))
