"""Which part of a client's module is shared with the server, and which stays with the client."""

from collections.abc import Callable

import lightning as L
from torch import Tensor

from lightning_fed.core.messages import Broadcast
from lightning_fed.core.phase import Phase
from lightning_fed.core.phased_module import MOMENTS
from lightning_fed.tensors import State, check_dtypes, check_fits


class SharedStateMixin(L.LightningModule):
    """A LightningModule of whose state dict a part is shared, a part is private, and a part may be gathered anew from all clients.
    A payload may travel beside it that is in no state dict. All that is handed out is copied, on the CPU.
    """

    dynamic_payload = False
    """Whether names or shapes of :meth:`payload` differ between clients and rounds. :meth:`load_payload` then checks what comes,
    and the server says what it :meth:`expects <.Server.expected_payload>`.
    """

    frozen_names: frozenset[str]
    moments: dict[str, Tensor]
    load_moments: Callable[[State], None]
    phases: Callable[[], list[Phase]]
    _shared: frozenset[str]
    _private: frozenset[str]
    _statistics: frozenset[str]
    _payload: frozenset[str]
    _keeps_moments: bool | None

    def shared_names(self) -> set[str]:
        """Names of the state-dict entries that travel, the same at any time from when the networks are built. Default: all that are
        neither frozen nor statistics.
        """
        return self.state_dict().keys() - self.frozen_names - self.recomputed_buffers()

    def recomputed_buffers(self) -> set[str]:
        """Names of the state-dict entries that neither travel nor stay: before each measurement they are gathered anew from all
        clients (static batch norm; see :mod:`lightning_fed.nn.static_batch_norm`). Default: none.
        """
        return set()

    def private_names(self) -> set[str]:
        """Names of the state-dict entries that stay with the client: what is neither shared nor frozen nor gathered."""
        return self.state_dict().keys() - self.frozen_names - self.recomputed_buffers() - self.shared_names()

    def initialized_from(self) -> dict[str, str]:
        """Names of the private entries that begin as copies of what travels, shared part or payload, each with the name of its
        original; see :meth:`initial_originals`. A client that never took part keeps none: they are copied whenever it is measured.
        Default: none, each client draws what it keeps.
        """
        return {}

    def load_initial(self, shared: State) -> None:
        """Set what begins as a copy, from what travels."""
        if copies := self.initialized_from():
            self.load_state_dict({name: shared[original] for name, original in copies.items()}, strict=False)

    def initial_originals(self) -> State:
        """What of the shared state, as it is now before the first round, new clients begin with copies of. Empty: they begin with
        copies of the first broadcast that they get.
        """
        if not (originals := set(self.initialized_from().values())):
            return {}
        return {name: tensor for name, tensor in self.update_state().items() if name in originals}

    def payload(self) -> State:
        """What travels beside the shared part, under names of its own, which are no entries of the state dict (prototypes, logits,
        control variates). Names and shapes are the same at any time, from when the networks are built: they are those that the
        server starts from, sends, and accepts; unless :attr:`dynamic_payload`. Default: nothing.
        """
        return {}

    def load_payload(self, payload: State) -> None:
        """Take over what the server sent under the names of :meth:`payload`. Default: nothing to do."""

    def shared_state(self) -> State:
        """The part of the state dict that travels: a copy, on the CPU."""
        return self._state(self._shared)

    def update_state(self) -> State:
        """All that is sent to the server, :meth:`shared_state` and :meth:`payload`: a copy, on the CPU."""
        return self.shared_state() | {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.payload().items()}

    def private_state(self) -> State:
        """What the client keeps between its turns, the state of persistent optimizers included: a copy, on the CPU."""
        return self._state(self._private) | self.moments

    def load_shared_state(self, state: State) -> None:
        """Take over what the server sent. Raises :class:`FederationError` if it does not fit :meth:`shared_names`."""
        self._load_state(state, self._shared, "shared")

    def load_private_state(self, state: State) -> None:
        """Take over the client's own state. Raises :class:`FederationError` if it does not fit :meth:`private_names`."""
        own = {name: tensor for name, tensor in state.items() if not name.startswith(MOMENTS)}
        self._load_state(own, self._private, "private")
        self.load_moments({name: tensor for name, tensor in state.items() if name not in own})

    def statistics(self) -> State:
        """The entries of :meth:`recomputed_buffers`: a copy, on the CPU."""
        return self._state(self._statistics)

    def load_statistics(self, state: State) -> None:
        """Take over what was gathered. Raises :class:`FederationError` if it does not fit :meth:`recomputed_buffers`."""
        self._load_state(state, self._statistics, "statistics")

    def load_broadcast(self, broadcast: Broadcast) -> None:
        """Take over what the server sent, with payload and statistics if there are any."""
        state = broadcast.state
        if self._payload or self.dynamic_payload:
            payload = {name: tensor for name, tensor in state.items() if name not in self._shared}
            if not self.dynamic_payload:
                check_fits(payload, self.payload(), f"The payload for {type(self).__name__}")
            state = {name: tensor for name, tensor in state.items() if name in self._shared}
            self.load_payload(payload)
        self.load_shared_state(state)
        if broadcast.statistics:
            self.load_statistics(broadcast.statistics)

    @property
    def has_private_state(self) -> bool:
        """Whether anything stays with the client between its turns."""
        if self._keeps_moments is None:
            self._keeps_moments = any(phase.persistent for phase in self.phases())
        return self.has_private_tensors or self._keeps_moments

    @property
    def has_private_tensors(self) -> bool:
        """Whether any of that is a client's from the start; moments are not."""
        return bool(self._private)

    @property
    def has_statistics(self) -> bool:
        """Whether anything is to be gathered before a measurement."""
        return bool(self._statistics)

    def _state(self, names: frozenset[str]) -> State:
        return {name: t.detach().to("cpu", copy=True) for name, t in self.state_dict().items() if name in names}

    def _load_state(self, state: State, names: frozenset[str], kind: str) -> None:
        expected = {name: tensor for name, tensor in self.state_dict().items() if name in names}
        check_fits(state, expected, f"The {kind} state for {type(self).__name__}")
        if kind == "private":  # which comes from a file
            check_dtypes(state, expected, f"The {kind} state for {type(self).__name__}", ".")
        self.load_state_dict(state, strict=False)

    @property
    def shares_whole_model(self) -> bool:
        """Whether what is shared is a whole model, with what is frozen: nothing that one predicts with stays with the clients."""
        return bool(self._shared) and not self._private

    def export_state(self, private: bool = True) -> State:
        """What an export writes, by name in the state dict. A method overrides it whose state has another form than what one
        predicts with.

        Args:
            private: with what belongs to the client; else what is shared alone, which is what the server has. Where nothing belongs
                to the clients, the server has a whole model.
        """
        whole = private or self.shares_whole_model
        return {name: tensor for name, tensor in self.state_dict().items() if whole or name in self._shared}
