"""Which part of a client's module is shared with the server and which part is private."""

from collections.abc import Callable, Iterable

import lightning as L
from torch import Tensor

from lightning_fed.core.messages import Broadcast
from lightning_fed.core.phase import Phase
from lightning_fed.core.phased_module import MOMENTS
from lightning_fed.errors import FederationError
from lightning_fed.tensors import State, check_dtypes, check_fits


class SharedStateMixin(L.LightningModule):
    """A LightningModule whose state dict has a shared part, a private part and statistics that are recomputed over all clients.

    A payload, which is not in the state dict, may be sent along with the shared part. All states that are returned are copies on
    the CPU. A tensor that the state dict has under several names (tied weights) is sent, averaged and stored once, under the first
    one; it is shared if one of its names is.
    """

    dynamic_payload = False
    """Whether names or shapes of :meth:`payload` differ between clients and rounds. If so, :meth:`load_payload` checks what it
    gets, and the server's :meth:`expected_payload <.Server.expected_payload>` says what it accepts.
    """

    frozen_names: frozenset[str]
    moments: dict[str, Tensor]
    load_moments: Callable[[State], None]
    phases: Callable[[], list[Phase]]
    _shared: frozenset[str]
    _private: frozenset[str]
    _statistics: frozenset[str]
    _payload: frozenset[str]
    _built: frozenset[str]
    _second_names: dict[str, str]
    _keeps_moments: bool | None

    def shared_names(self) -> set[str]:
        """Names of the shared state-dict entries; they do not change once the networks are built. Default: all entries that are
        neither frozen nor statistics.
        """
        return self.state_dict().keys() - self.frozen_names - self.recomputed_buffers()

    def recomputed_buffers(self) -> set[str]:
        """Names of the statistics: state-dict entries that are neither shared nor private, but recomputed over all clients before
        each evaluation (static batch norm; see :mod:`lightning_fed.nn.norms`). Default: none.
        """
        return set()

    def private_names(self) -> set[str]:
        """Names of the private state-dict entries: those that are neither shared nor frozen nor statistics."""
        return self.state_dict().keys() - self.frozen_names - self.recomputed_buffers() - self.shared_names()

    def continued_names(self) -> set[str]:
        """Names of what training changes from the received values on, in the same coordinates in every round. Of these a part of
        the change can be sent, and the rest in a later round (``topk``); everything else is sent as it is. Default: the shared
        parameters.
        """
        return {name for name, _ in self.named_parameters(remove_duplicate=False) if name in self._shared}

    def buffer_names(self) -> set[str]:
        """Names of buffers (statistics of batch norm), as they are sent: they are never rounded, because a variance must not become
        negative. Default: those of the module.
        """
        return {name for name, _ in self.named_buffers(remove_duplicate=False)}

    def initialized_from(self) -> dict[str, str]:
        """Names of the private entries that start as copies of shared entries or of the payload, with the name of each original.

        See :meth:`initial_originals`. A client that has never taken part stores no such entries: they are copied whenever it is
        evaluated. Default: none, each client draws its private entries.
        """
        return {}

    def load_initial(self, shared: State) -> None:
        """Copy the entries of :meth:`initialized_from` from the shared state."""
        if copies := self.initialized_from():
            firsts = {name: self._second_names.get(original, original) for name, original in copies.items()}
            self.load_state_dict({name: shared[first] for name, first in firsts.items()}, strict=False)

    def initial_originals(self) -> State:
        """The originals of :meth:`initialized_from` before the first round, from which new clients start. Empty: a new client
        starts from the first broadcast that it receives.
        """
        if not (originals := self.first_names(self.initialized_from().values())):
            return {}
        return {name: tensor for name, tensor in self.update_state().items() if name in originals}

    def payload(self) -> State:
        """Tensors that are sent along with the shared part and are not in the state dict (prototypes, logits, control variates).

        Their names differ from those of the state dict. Names and shapes do not change once the networks are built: the server
        starts from them, sends them and accepts only them, unless :attr:`dynamic_payload` is set. Default: none.
        """
        return {}

    def load_payload(self, payload: State) -> None:
        """Load the :meth:`payload` that the server sent. Default: nothing."""

    def shared_state(self) -> State:
        """A copy of the shared part of the state dict, on the CPU."""
        return self._state(self._shared)

    def update_state(self) -> State:
        """A copy of all that is sent to the server, :meth:`shared_state` and :meth:`payload`, on the CPU."""
        return self.shared_state() | {name: tensor.detach().to("cpu", copy=True) for name, tensor in self.payload().items()}

    def private_state(self) -> State:
        """A copy of what the client keeps between turns, including the state of persistent optimizers, on the CPU."""
        return self._state(self._private) | self.moments

    def load_shared_state(self, state: State) -> None:
        """Load the shared state from the server. Raises :class:`FederationError` if it does not fit :meth:`shared_names`."""
        self._load_state(state, self._shared, "shared")

    def load_private_state(self, state: State) -> None:
        """Load the client's private state. Raises :class:`FederationError` if it does not fit :meth:`private_names`."""
        own = {name: tensor for name, tensor in state.items() if not name.startswith(MOMENTS)}
        self._load_state(own, self._private, "private")
        self.load_moments({name: tensor for name, tensor in state.items() if name not in own})

    def statistics(self) -> State:
        """A copy of the entries of :meth:`recomputed_buffers`, on the CPU."""
        return self._state(self._statistics)

    def load_statistics(self, state: State) -> None:
        """Load recomputed statistics. Raises :class:`FederationError` if they do not fit :meth:`recomputed_buffers`."""
        self._load_state(state, self._statistics, "statistics")

    def load_broadcast(self, broadcast: Broadcast) -> None:
        """Load what the server sent: shared state, payload and statistics."""
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
        """Whether the client keeps anything between its turns."""
        if self._keeps_moments is None:
            self._keeps_moments = any(phase.persistent for phase in self.phases())
        return self.has_private_tensors or self._keeps_moments

    @property
    def has_private_tensors(self) -> bool:
        """Whether the client has private tensors from the start; optimizer state does not count."""
        return bool(self._private)

    @property
    def has_statistics(self) -> bool:
        """Whether there are statistics to recompute before an evaluation."""
        return bool(self._statistics)

    def first_names(self, names: Iterable[str]) -> frozenset[str]:
        """The first name in the state dict of each of these entries."""
        return frozenset(self._second_names.get(name, name) for name in names)

    def check_names(self) -> None:
        """Refuse names that do not fit the state dict.

        Raises:
            FederationError: for shared and other names that are not in it, and for a payload's that are.
        """
        own, method = self.state_dict().keys(), type(self).__name__
        parts = {"shared_names": self._shared, "recomputed_buffers": self._statistics, "private_names": self._private}
        for hook, names in parts.items():
            for name in sorted(names - own):
                ends = [known for known in own if known.endswith(f".{name}")]
                meant = f"did you mean {ends[0]!r}?" if ends else "print the module's state_dict() to see them."
                raise FederationError(f"{hook} of {method} has {name!r}, which is no name of its state dict: {meant}")
        if clash := sorted(self._payload & own):
            raise FederationError(f"The payload of {method} names {clash[0]!r}, which is in the state dict: rename it.")
        self._built = frozenset(own)

    def check_tensors(self) -> None:
        """Refuse entries that would be sent or kept and are no tensors, such as what a layer's ``get_extra_state`` returns.

        Raises:
            FederationError: names one.
        """
        for name, entry in self.state_dict().items():
            if not isinstance(entry, Tensor) and name in self._shared | self._private:
                verb = "send" if name in self._shared else "keep"
                raise FederationError(
                    f"{type(self).__name__} would {verb} {name!r}, which is a {type(entry).__name__}, and clients send and keep "
                    "tensors: let the network's state have such ones only."
                )

    def refuse_late_layers(self) -> None:
        """Refuse trainable parameters that have come after :meth:`build`: they would be neither sent nor kept.

        Raises:
            FederationError: names one.
        """
        trainable = (name for name, p in self.named_parameters(remove_duplicate=False) if p.requires_grad)
        if late := [name for name in trainable if name not in self._built]:
            raise FederationError(
                f"{type(self).__name__} has {late[0]!r}, which was added after build(), so that it would be neither sent nor kept "
                "between turns: add it in build(), after super().build()."
            )

    def _state(self, names: frozenset[str]) -> State:
        return {name: t.detach().to("cpu", copy=True) for name, t in self.state_dict().items() if name in names}

    def _load_state(self, state: State, names: frozenset[str], kind: str) -> None:
        expected = {name: tensor for name, tensor in self.state_dict().items() if name in names}
        check_fits(state, expected, f"The {kind} state for {type(self).__name__}")
        if kind == "private":  # it comes from a file
            check_dtypes(state, expected, f"The {kind} state for {type(self).__name__}", ".")
        self.load_state_dict(state, strict=False)

    @property
    def shares_whole_model(self) -> bool:
        """Whether the shared and the frozen parts make a whole model, with no private part."""
        return bool(self._shared) and not self._private

    def export_state(self, private: bool = True) -> State:
        """The tensors that an export writes, by their names in the state dict. A method overrides it if it predicts with tensors of
        another form.

        Args:
            private: True: all tensors, including the client's private ones. False: the shared ones, which the server has; all if
                nothing is private.
        """
        whole = private or self.shares_whole_model
        shared = self._shared | {name for name, first in self._second_names.items() if first in self._shared}
        return {name: tensor for name, tensor in self.state_dict().items() if whole or name in shared}
