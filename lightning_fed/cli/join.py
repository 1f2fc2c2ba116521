"""The verb ``join``: a site, which keeps its data and answers a server's messages."""

import logging
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fed.cli.options import Options, positive, restricted
from lightning_fed.deployment.flower import commands
from lightning_fed.errors import require
from lightning_fed.options import NonNegativeInt
from lightning_fed.system.folders import from_home
from lightning_fed.system.signals import Terminated, stopped_by_signals

if TYPE_CHECKING:  # these imports load torch
    from lightning_fed.cli.fit import FederationCLI
    from lightning_fed.core.module import FederatedModule

log = logging.getLogger(__name__)

TEXT = """Take part in a study; the data stay on this machine. Further options are those of fit; the configuration is
that of the server, except for the location of the data and the trainer. docs/deployment.md has an introduction."""


def parser() -> Options:
    """The verb's own options; further ones are those of ``fit``."""
    parser = Options("join", TEXT)
    own = parser.add_argument
    own("--server", required=True, metavar="HOST:PORT", help="where the server is")
    client = restricted(NonNegativeInt, "number from 0 on")
    own("--client", type=client, required=True, metavar="N", help="number of this site in the study")
    own("--key", type=from_home, required=True, metavar="FILE", help="private key of this site; the server has the public one")
    own(
        "--root_certificates",
        type=from_home,
        required=True,
        metavar="FILE",
        help="certificate that signed the server's certificate",
    )
    own("--folder", type=from_home, metavar="DIR", help="for private states and Flower's log (default: site-N)")
    own("--output", type=from_home, metavar="DIR", help="export the client's model there after each evaluation")
    own("--threads", type=positive, metavar="N", help="number of torch threads (default: number of cores)")
    own(
        "--partitioned", action="store_true", help="the data are those of all clients, dealt as configured: take this client's part"
    )
    own("--socket", type=from_home, metavar="FILE", help="where Flower's process finds this one (default: in a temporary folder)")
    own("--without_supernode", action="store_true", help="print the command of Flower's process, for another user to run it")
    return parser


def run(args: Sequence[str]) -> None:
    """Run the verb."""
    given, rest = parser().parse_known_args(args[1:])
    commands.need_flower()
    for file in (given.key, given.root_certificates):
        # another user's key may be in a folder that this user cannot read
        require(given.without_supernode or file.is_file(), f"There is no file {file}.")
    require(
        given.socket is not None or not given.without_supernode,
        "Got without_supernode without socket: say where Flower's process finds this one, --socket /run/study/relay.sock.",
    )

    from lightning_fed.cli.fit import FederationCLI

    try:
        FederationCLI(["fit", *rest], lambda cli: join(cli, given))
    except (KeyboardInterrupt, Terminated) as ended:
        print(f"lightning-fed: the site of client {given.client} has left. To rejoin, run the same command.", file=sys.stderr)
        raise SystemExit(130 if isinstance(ended, KeyboardInterrupt) else 143) from None


def join(cli: "FederationCLI", given: Namespace) -> None:
    """Build the objects of ``fit`` for one client, and answer a server's messages until the process ends. ``given`` are the options
    of ``join``.
    """
    from lightning_fed.cli.verb_settings import verb_settings
    from lightning_fed.data import IID
    from lightning_fed.deployment.flower.node import answer_all
    from lightning_fed.deployment.site import OneClient, Site
    from lightning_fed.engines import InProcess
    from lightning_fed.engines.worker_spec import WorkerSpec
    from lightning_fed.storage.export.folder import refuse_others, write

    client, data, federation = given.client, cli.datamodule, cli.federation
    if given.output:
        refuse_others(given.output)
    if not given.partitioned:
        data.given_num_clients, data.partition = 1, IID()  # all local data belong to this client
    federation.engine = InProcess(given.threads)
    with stopped_by_signals(), federation._surroundings():
        own = OneClient(data, client if given.partitioned else 0, client)
        model, _ = federation._started(cli.model, own)
        info = own.client(client).info
        log.info(f"Client {client}: {info.num_train} training, {info.num_val} validation, {info.num_test} test examples")
        folder = (given.folder or Path(f"site-{client}")).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        spec = WorkerSpec(model, own, federation.new_trainer, federation.seed, compression=federation.settings.compression)

        def export(module: "FederatedModule", round: int) -> None:
            facts = {"method": type(module).__name__, "round": round, "client": client, "seed": federation.seed}
            write(given.output, module, data, facts)

        site = Site(spec, client, verb_settings(cli), folder / "states", export if given.output else None)
        port = commands.SUPERNODE_PORT if given.without_supernode else commands.free_port()
        command = partial(commands.supernode, given.server, given.key.absolute(), given.root_certificates.absolute(), port=port)
        answer_all(site, command, folder, given.socket, given.without_supernode)
