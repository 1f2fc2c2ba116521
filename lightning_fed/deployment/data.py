"""Information at the server about data that stay at their sites."""

from collections.abc import Sequence
from dataclasses import replace
from zlib import crc32

from torch import Tensor

from lightning_fed.core.module import FederatedModule
from lightning_fed.core.public_distillation import PublicDistillation
from lightning_fed.data import ClientDataModule, FederatedDataModule
from lightning_fed.data.batches import SharedTensors
from lightning_fed.data.client_info import ClientInfo
from lightning_fed.deployment.wire import SiteDescription
from lightning_fed.errors import FederationError


class DataAtSites(FederatedDataModule):
    """Data at sites, of which a server knows sizes and label counts once the sites have described them."""

    at_hand = False

    def __init__(self, given: FederatedDataModule) -> None:
        super().__init__(
            partition=given.partition,
            batch_size=given.batch_size,
            single_example=given.single_example,
            continue_epochs=given.continue_epochs,
            seed=given.seed,
            partition_seed=given.partition_seed,
        )
        self.given = given
        self.num_classes, self.problem, self.mean, self.std = given.num_classes, given.problem, given.mean, given.std
        self.predicts_labels, self.class_names = given.predicts_labels, given.class_names
        self.image_size, self.tokenizer = (getattr(given, name, None) for name in ("image_size", "tokenizer"))
        self._checksum = 0

    def refuse_what_needs_them(self, model: FederatedModule) -> None:
        """Raises :class:`FederationError` for a method that needs the data."""
        if model.centralized:
            self.pooled()
        if isinstance(model, PublicDistillation):
            self.public_set()

    def described(self, sites: Sequence[SiteDescription]) -> None:
        """Store the descriptions of the sites, in order of the clients."""
        self._clients = [replace(site.info, num_clients=len(sites)) for site in sites]
        self._checksum = 0
        for site in sites:
            self._checksum = crc32(site.data.encode(), self._checksum)

    @property
    def clients(self) -> list[ClientInfo]:
        return list(self._clients)

    @property
    def num_labels(self) -> int:
        """Number of labels that the sites count; before they are described, the number of classes."""
        return len(self._clients[0].label_counts) if self._clients else self.num_classes

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    def setup(self, stage: str | None = None) -> None: ...

    def majority_accuracy(self) -> None: ...

    def fingerprint(self) -> str:
        """Checksum of the checksums of all sites, and of the unseen ones."""
        return f"{crc32(str(sorted(self._unseen)).encode(), self._checksum) if self._unseen else self._checksum:08x}"

    def pooled(self) -> ClientDataModule:
        raise FederationError(
            "The method asks for the pooled data, which stay at their sites: choose one that trains at the clients, such as FedAvg."
        )

    def public_set(self, batch_size: int | None = None, examples: Tensor | None = None) -> ClientDataModule:
        raise FederationError("The method needs public data at the server, and there are no data: choose another method.")

    def _loaded(self) -> SharedTensors:
        raise FederationError("The data are at their sites and not available here.")
