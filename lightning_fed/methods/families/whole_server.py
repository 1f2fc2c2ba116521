"""Clients that keep something beside a model which they share as a whole."""

from lightning_fed.core import FederatedModule, State


class WholeServerModule(FederatedModule):
    """What FedALA, FedDyn, MOON and SCAFFOLD have in common: what stays with a client is no part of what it predicts with.

    Args:
        **kwargs: see :class:`.FederatedModule`.
    """

    @property
    def shares_whole_model(self) -> bool:
        """True: the server's model is everybody's."""
        return True

    def export_state(self, private: bool = True) -> State:
        """The model, without what a client keeps beside it."""
        kept = self._private | self._statistics
        return {name: tensor for name, tensor in self.state_dict().items() if name not in kept}
