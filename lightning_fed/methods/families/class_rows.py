"""Clients with different networks that exchange a row for each class; see :mod:`lightning_fed.core.class_rows`."""

import torch
from torch import Tensor

from lightning_fed.core import (
    Broadcast,
    ClientInfo,
    ClientUpdate,
    FederatedModule,
    Server,
    State,
    check_counts,
    check_fits,
    expected_rows,
    unpack_rows,
)


class ClassRowsModule(FederatedModule):
    """Base of FD and FedProto: networks stay with their clients, and the server sends each client a row for some of the classes.

    Args:
        **kwargs: see :class:`.FederatedModule`.
    """

    heterogeneous = True
    dynamic_payload = True

    rows: Tensor
    """Those that came last, ``(C, D)``, one per class; zero where there was none."""

    known: Tensor
    """Which classes had one, ``(C,)``."""

    def make_room(self, width: int) -> None:
        """Register buffers for rows of width D; called after the network has been built."""
        self.register_buffer("rows", torch.zeros(self.num_classes, width), persistent=False)
        self.register_buffer("known", torch.zeros(self.num_classes, dtype=torch.bool), persistent=False)

    def shared_names(self) -> set[str]:
        """Empty: no part of a network travels."""
        return set()

    def load_payload(self, payload: State) -> None:
        """Load the rows of the classes that have one."""
        self.rows.zero_()
        self.known.zero_()
        if payload:
            check_fits(payload, expected_rows(payload, self.rows), f"The payload for {type(self).__name__}")
            rows, counts = unpack_rows(payload, self.rows)
            self.rows.copy_(rows)
            self.known.copy_(counts > 0)


class ClassRowsServer(Server):
    """A server that receives a row for each class that an update declares."""

    like: Tensor
    """A table of all classes, ``(C, D)``, in the dtype that travels."""

    counted = True
    """Whether it comes with each row of how many examples it is the mean."""

    def expected_payload(self, update: ClientUpdate, sent: Broadcast) -> State:
        return expected_rows(update.state, self.like, self.counted)

    def check(self, update: ClientUpdate, sent: Broadcast, client: ClientInfo) -> None:
        """Also refuse means over zero examples."""
        super().check(update, sent, client)
        check_counts(update)
