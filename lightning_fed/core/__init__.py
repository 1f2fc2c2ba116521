"""Everything that the file of a method imports.

Names are looked up on first use, so that parts of this package load without the others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_fed.core.aggregation import EntryMean, WeightedMean, check_payload, noted, weighted_mean
    from lightning_fed.core.class_rows import (
        check_counts,
        class_means,
        class_sums,
        expected_rows,
        pack_rows,
        present_classes,
        unpack_rows,
    )
    from lightning_fed.core.client_modules import one_per_architecture
    from lightning_fed.core.client_state import (
        ClientStates,
        RoundState,
        Vectors,
        at_a_time,
        common_bits,
        cosines,
        each_mixture,
        flatten,
        mixtures,
        squared_distances,
        squared_norms,
        unflatten,
    )
    from lightning_fed.core.fine_tuning import FineTuning
    from lightning_fed.core.global_parameters import KeepsGlobalParameters
    from lightning_fed.core.messages import PRIVATE_SHARE, RANK, Broadcast, ClientUpdate
    from lightning_fed.core.module import FederatedModule
    from lightning_fed.core.phase import Phase
    from lightning_fed.core.phased_module import PhasedModule, default_optimizer
    from lightning_fed.core.public_distillation import OUTPUTS, PublicDistillation
    from lightning_fed.core.robust import Aggregation, ClippedMean, GeometricMedian, Krum, Median, MultiKrum, TrimmedMean
    from lightning_fed.core.server import (
        Combine,
        PartialUpdate,
        PersonalServer,
        Privacy,
        RunOnServer,
        Server,
        ServerUpdate,
        mean_of_updates,
    )
    from lightning_fed.data.client_info import SERVER, ClientInfo
    from lightning_fed.errors import FederationError
    from lightning_fed.nn.server_optimizers import ServerAdagrad, ServerAdam, ServerOptimizer, ServerSGD, ServerYogi
    from lightning_fed.tensors import State, check_fits, pack_bits, unpack_bits, widened

_HOMES = (
    *("errors", "tensors", "data.client_info", "nn.server_optimizers", "core.messages", "core.phase", "core.aggregation"),
    *("core.class_rows", "core.client_state", "core.client_modules", "core.robust", "core.server", "core.phased_module"),
    *("core.fine_tuning", "core.module", "core.global_parameters", "core.public_distillation"),
)
"""The modules that define the names; those that import others come after them."""

__all__ = [
    "OUTPUTS",
    "PRIVATE_SHARE",
    "RANK",
    "SERVER",
    "Aggregation",
    "Broadcast",
    "ClientInfo",
    "ClientStates",
    "ClientUpdate",
    "ClippedMean",
    "Combine",
    "EntryMean",
    "FederatedModule",
    "FederationError",
    "FineTuning",
    "GeometricMedian",
    "KeepsGlobalParameters",
    "Krum",
    "Median",
    "MultiKrum",
    "PartialUpdate",
    "PersonalServer",
    "Phase",
    "PhasedModule",
    "Privacy",
    "PublicDistillation",
    "RoundState",
    "RunOnServer",
    "Server",
    "ServerAdagrad",
    "ServerAdam",
    "ServerOptimizer",
    "ServerSGD",
    "ServerUpdate",
    "ServerYogi",
    "State",
    "TrimmedMean",
    "Vectors",
    "WeightedMean",
    "at_a_time",
    "check_counts",
    "check_fits",
    "check_payload",
    "class_means",
    "class_sums",
    "common_bits",
    "cosines",
    "default_optimizer",
    "each_mixture",
    "expected_rows",
    "flatten",
    "mean_of_updates",
    "mixtures",
    "noted",
    "one_per_architecture",
    "pack_bits",
    "pack_rows",
    "present_classes",
    "squared_distances",
    "squared_norms",
    "unflatten",
    "unpack_bits",
    "unpack_rows",
    "weighted_mean",
    "widened",
]


def __getattr__(name: str) -> Any:
    for home in _HOMES if name in __all__ else ():
        if hasattr(module := import_module(f"lightning_fed.{home}"), name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
