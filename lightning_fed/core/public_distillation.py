"""Methods whose clients or server learn from inputs that belong to nobody."""

import math

from torch import Tensor

from lightning_fed.core.module import FederatedModule
from lightning_fed.core.phase import Phase

OUTPUTS = "outputs"
"""The name of what a model predicts for public examples, ``(M, C)``."""


class PublicDistillation(FederatedModule):
    """A method that needs public data, see :meth:`.FederatedDataModule.public_set`: models predict them, and learn from what others
    predict.

    Args:
        **kwargs: see :class:`.FederatedModule`.
    """

    public_batch_size: int | None = None
    """Size of the batches of public data; None: that of training."""

    server_validation: tuple[int, int | None] | None = None
    """Where the server trains: after how many steps it validates, and after how many steps that made it no better it stops (None:
    not before the end). The model that was best stays. None: the last one stays.
    """

    public_table_limit: float = math.inf
    """Bytes that a model's predictions of the public data may have in float32; what is larger is in bfloat16."""

    predict_public: Tensor | None = None
    """Numbers of the public examples that a client predicts when it has trained: its predictions come to :meth:`after_training`,
    under :data:`OUTPUTS`. None: it predicts none.
    """

    public_examples: Tensor | None = None
    """Numbers of the public examples on which :meth:`server_phases` and :meth:`public_phases` train; None: all."""

    def server_phases(self) -> list[Phase]:
        """How the server trains a model on public data, for methods whose server does; see :meth:`.Server.train_on_public`. It
        begins with the model that the server names, and learns from the numbers of examples, which a batch has in place of
        targets, and from what came as :meth:`payload`; see :attr:`public_batch_size` and :attr:`server_validation`. Default: it
        does not.
        """
        return []

    def public_phases(self) -> list[Phase]:
        """How a client trains on public data: before its own, if what it was sent says so; or when the server has merged, see
        :meth:`.Server.public_training`. It is asked when the broadcast has been loaded. Default: it does not.
        """
        return []
