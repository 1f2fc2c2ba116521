"""Information about a client that does not require its data."""

from dataclasses import dataclass

SERVER = -1
"""The id of the server, under which the pooled data are evaluated."""


@dataclass(frozen=True)
class ClientInfo:
    """Information about a client that does not require its data.

    Args:
        id: index in the federation, from 0.
        num_train: number of training examples, the :math:`n_k` of weighted averages.
        num_val: number of validation examples.
        num_test: number of test examples.
        label_counts: number of training examples per label, length ``num_labels``.
        model_size: size of the client's version of the model, for methods with several; the server sets it with its broadcast.
            None: the whole model.
        num_clients: number of clients of the federation, including those that never take part.
        num_public: number of public examples.
        takes_part: whether the client may be sampled; otherwise it is only evaluated. For the server only: what is built for a
            client does not depend on it.
    """

    id: int
    num_train: int
    num_val: int
    num_test: int
    label_counts: tuple[int, ...]
    model_size: float | None = None
    num_clients: int = 1
    num_public: int = 0
    takes_part: bool = True
