"""The verb ``serve``: the server of a study whose data stay at their sites."""

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fed.cli.options import Options, positive, restricted
from lightning_fed.deployment.flower import commands
from lightning_fed.errors import require
from lightning_fed.options import Fraction
from lightning_fed.system.folders import from_home

if TYPE_CHECKING:  # these imports load torch
    from lightning_fed.cli.fit import FederationCLI

TEXT = """Run the server of a study whose data stay at their sites: each round it sends tasks to the sites and merges their updates.
Further options are those of fit; the configuration is that of the sites. docs/deployment.md has an introduction."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def parser() -> Options:
    """The verb's own options; further ones are those of ``fit``."""
    parser = Options("serve", TEXT)
    own = parser.add_argument
    own(
        "--sites", type=from_home, required=True, metavar="DIR", help="public keys of the sites: 0.pub, 1.pub, … of clients 0, 1, …"
    )
    own("--certificates", type=from_home, required=True, metavar="DIR", help="ca.crt, server.pem and server.key")
    own("--host", default="127.0.0.1", help="address on which Flower listens (default: 127.0.0.1, for a proxy in front of it)")
    own("--port", type=restricted(port, "port from 1 to 65535"), default=8000, help="its port (default: 8000)")
    own("--exposed_control_api_is_protected", action="store_true", help="allow another host than this machine")
    own("--output", type=from_home, metavar="DIR", help="export the server's model there after all rounds")
    own("--wait", type=positive, default=600, metavar="SECONDS", help="time until all sites must be online (default: 600)")
    own(
        "--deadline",
        type=positive,
        default=3600,
        metavar="SECONDS",
        help="time for the turns of a phase of a round (default: 3600)",
    )
    share = restricted(Fraction, "share in (0, 1]")
    own("--quorum", type=share, default=1.0, metavar="SHARE", help="share of turns without which the run ends (default: 1)")
    return parser


def port(text: str) -> int:
    """A port, as a plain int: Python's sockets take no subclass of it. Raises :class:`ValueError` for other texts."""
    number = int(text)
    if not 0 < number < 2**16:
        raise ValueError
    return number


def run(args: Sequence[str]) -> None:
    """Run the verb."""
    given, rest = parser().parse_known_args(args[1:])
    commands.need_flower()
    refuse_exposed(given)
    keys = public_keys(given.sites)
    lacking = [name for name in ("ca.crt", "server.pem", "server.key") if not (given.certificates / name).is_file()]
    require(not lacking, f"{given.certificates} lacks {', '.join(lacking)}: docs/deployment.md says how to make certificates.")

    from lightning_fed.cli.fit import FederationCLI

    FederationCLI(["fit", *rest], lambda cli: serve(cli, given, keys))


def serve(cli: "FederationCLI", given: Namespace, keys: Sequence[Path]) -> None:
    """Run ``fit`` with turns at sites, whose public keys are in order of their clients. ``given`` are the options of ``serve``."""
    from lightning_fed.cli.verb_settings import verb_settings
    from lightning_fed.deployment.data import DataAtSites
    from lightning_fed.deployment.engine import Sites
    from lightning_fed.deployment.flower.link import linked
    from lightning_fed.storage.export.folder import refuse_others, write

    if given.output:
        refuse_others(given.output)
    data = DataAtSites(cli.datamodule)
    data.refuse_what_needs_them(cli.model)
    kwargs = cli._prepare_subcommand_kwargs("fit") | {"datamodule": data}
    settings, federation = verb_settings(cli), cli.federation
    with tempfile.TemporaryDirectory() as scratch:
        home = (federation.run_dir or Path(scratch)) / "flower"
        with linked(given.certificates, keys, given.host, given.port, home) as link:
            federation.engine = Sites(link, len(keys), settings, wait=given.wait, deadline=given.deadline, quorum=given.quorum)
            federation.fit(**kwargs)
    if given.output:
        run = federation.run
        facts = {"method": run.method, "round": run.round, "client": None, "seed": run.seed}
        write(given.output, run.server_module(), data, facts)


def refuse_exposed(given: Namespace) -> None:
    """Refuse hosts other than this machine: Flower's Control API has no authentication, on the port that sites need."""
    require(
        given.host in LOOPBACK or given.exposed_control_api_is_protected,
        f"Got host={given.host}, where anyone who can reach it can start programs on the server and at all sites, through Flower's "
        "Control API: leave host out and put a proxy in front that only passes on /v1/fleet/ (docs/deployment.md), or set "
        "--exposed_control_api_is_protected.",
    )


def public_keys(folder: Path) -> list[Path]:
    """Files of the sites' keys, in order of their clients."""
    found = {path.stem: path for path in folder.glob("*.pub")}
    expected = [str(client) for client in range(len(found))]
    require(
        bool(found) and sorted(found) == sorted(expected),
        f"{folder} has {', '.join(sorted(path.name for path in found.values())) or 'no public keys'}: expected 0.pub, 1.pub, … "
        "without gaps, a file per client.",
    )
    return [found[name] for name in expected]
