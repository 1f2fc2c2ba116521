"""What is known about a client without looking at its data."""

from dataclasses import dataclass

SERVER = -1
"""The id under which everybody's pooled data are measured."""


@dataclass(frozen=True)
class ClientInfo:
    """What is known about a client without looking at its data.

    Args:
        id: position in the federation, from 0.
        num_train: training examples, the :math:`n_k` of weighted averages.
        num_val: validation examples.
        num_test: test examples.
        label_counts: training examples per label, length ``num_labels``.
        model_size: how large a version of the model the client has, where a method has several; the server says so with its
            broadcast. None: the whole model.
        num_clients: how many clients the federation has, those that never take part included.
        num_public: how many public examples there are, which belong to nobody.
        takes_part: whether it is among those of whom a cohort is drawn; else it is only measured. The server's to know: what is
            built for a client does not depend on it.
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
