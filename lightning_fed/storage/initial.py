"""The initial network of a run, from another run or a file."""

from pathlib import Path

import safetensors.torch

from lightning_fed.errors import FederationError, error_text
from lightning_fed.storage.run_folder import load_checkpoint
from lightning_fed.tensors import State

NETWORK = "backbone."
"""Prefix of a server's tensors that belong to the network; others belong to the method."""


def initial_network(path: Path) -> tuple[State, str | None]:
    """The network of a run's server, or of a file.

    Args:
        path: as for ``ckpt_path``, the folder of a run, of a run and ``best``, or of one checkpoint; or a ``.safetensors`` file, as
            written by ``export``.

    Returns:
        Its tensors by their names in the network, and the checksum of the run's data; None for a file.

    Raises:
        FederationError: if the path does not exist, or has no network.
    """
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load(path.read_bytes()), None
        except Exception as error:  # errors of the file, the format, a dtype that PyTorch lacks, or a shape
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
            f"init_from: the server of {checkpoint.manifest.identity['method']} in {checkpoint.path} has no network to start from: "
            "give a run of a method that shares the whole network, such as FedAvg."
        )
    return network, str(checkpoint.manifest.identity["data"])
