"""Whether a run may go on from a checkpoint, before anything of it is taken over."""

import logging
from collections.abc import Mapping

from lightning_fed.errors import FederationError
from lightning_fed.storage.checkpoint import Checkpoint
from lightning_fed.storage.manifest import Setting
from lightning_fed.storage.settings import differences, optimizer_of
from lightning_fed.tensors import State, check_dtypes, check_finite, check_fits

log = logging.getLogger(__name__)


def check_goes_on(
    checkpoint: Checkpoint,
    identity: Mapping[str, object],
    threads: int,
    settings: Mapping[str, Setting],
    server: State,
    persistent: list[str],
) -> None:
    """Refuse a checkpoint that this run cannot go on from; print what differs where it can.

    Args:
        checkpoint: where it would go on from.
        identity: what must agree: method, seed, number of clients, and the fingerprint of their data.
        threads: torch threads of this run.
        settings: those of this run.
        server: what the server's state must look like; see :meth:`.Server.expected_state`.
        persistent: names of the phases whose optimizers clients keep from round to round.

    Raises:
        FederationError: naming what the checkpoint has, and what this run has.
    """
    manifest = checkpoint.manifest
    for key, mine in identity.items():
        if manifest.identity.get(key) != mine:
            raise FederationError(
                f"Checkpoint {checkpoint.path} was made with {key} = {manifest.identity.get(key)!r}, this run has {mine!r}: "
                "continue with the configuration of that run, or start a new run without --ckpt_path."
            )
    if manifest.threads != threads:
        log.warning(
            f"Checkpoint {checkpoint.path} was made with {manifest.threads} torch threads, this run has {threads}: "
            "sums may differ in their last bits. Set OMP_NUM_THREADS, or the engine's threads."
        )
    if different := differences(manifest.settings, settings):
        log.warning(f"Checkpoint {checkpoint.path} was made with {'; '.join(different)}. What is computed now is this run's.")
    what = f"The server state of checkpoint {checkpoint.path}"
    check_fits(checkpoint.server, server, what)
    check_dtypes(checkpoint.server, server, what, ": continue with the precision of that run.")
    check_finite(checkpoint.server, what)
    for name in map(optimizer_of, persistent):
        theirs, ours = manifest.settings.get(name), settings.get(name)
        if theirs not in (None, ours) and checkpoint.clients:
            raise FederationError(
                f"Checkpoint {checkpoint.path} was made with the {name} {theirs}, whose moments clients keep; this run has "
                f"{ours}: continue with {theirs}, or start a new run without --ckpt_path."
            )
