"""The network that a run begins with, out of what another one left."""

from pathlib import Path

import safetensors.torch

from lightning_fed.errors import FederationError, error_text
from lightning_fed.storage.run_folder import load_checkpoint
from lightning_fed.tensors import State

NETWORK = "backbone."
"""What names of a server's tensors begin with that are the network's; others are the method's own."""


def initial_network(path: Path) -> tuple[State, str | None]:
    """The network that the server of a run has, or that a file holds.

    Args:
        path: as for ``ckpt_path``, the folder of a run, of a run and ``best``, or of one checkpoint; or a ``.safetensors`` file, as
            ``export`` writes it.

    Returns:
        Its tensors by their names in the network, and the checksum of the data that the run had; None for a file.

    Raises:
        FederationError: if there is no such thing, or no network in it.
    """
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load(path.read_bytes()), None
        except Exception as error:  # of several kinds: of the file, of the format, of a dtype that PyTorch lacks, of a shape
            raise FederationError(
                f"init_from: could not read {path} ({error_text(error)}): give a file in the safetensors format."
            ) from error
    try:
        checkpoint, _ = load_checkpoint(path)
    except FederationError as error:
        raise FederationError(f"init_from: {error}") from error
    network = {name.removeprefix(NETWORK): tensor for name, tensor in checkpoint.server.items() if name.startswith(NETWORK)}
    if not network:
        raise FederationError(
            f"init_from: the server of {checkpoint.manifest.identity['method']} in {checkpoint.path} has no network to begin with: "
            "give a run of a method that shares the whole network, such as FedAvg."
        )
    return network, str(checkpoint.manifest.identity["data"])
