"""Clients that share a whole model and keep additional private state."""

from lightning_fed.core import FederatedModule, State


class WholeServerModule(FederatedModule):
    """Base of FedALA, FedDyn, MOON and SCAFFOLD: a client's private state is not part of its model.

    Args:
        **kwargs: see :class:`.FederatedModule`.
    """

    beside_the_model: tuple[str, ...]
    """What the names of the client's private state begin with."""

    def shared_names(self) -> set[str]:
        """Names in the model; the rest stays."""
        return {name for name in super().shared_names() if not name.startswith(self.beside_the_model)}

    @property
    def shares_whole_model(self) -> bool:
        """True: all clients have the server's model."""
        return True

    def export_state(self, private: bool = True) -> State:
        """The model, without the client's private state."""
        kept = self._private | self._statistics
        return {name: tensor for name, tensor in self.state_dict().items() if name not in kept}
