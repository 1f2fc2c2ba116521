"""lightning-fed beside fluke and Flower's simulation on the same work: seconds of a round, and accuracy after equal rounds.

    python bench/peers/run.py --root data/cifar10 --peers ../peers       # where README.md of this folder has installed them

FedAvg with CNN-1: 100 clients with 400 images each, of which 10 take part in a round of one epoch, batch 64, plain SGD. All begin
with the same weights, and each draws its own cohorts and batches. They take turns, round by round, in processes that wait while
another one plays, so that a drift of the machine's speed cancels: what counts are the ratios of rounds that were played one after
the other, of which the median is printed. A contestant's first round, in which processes start, is left out of the times. A round
is over when the models are merged; they are measured here, on 2,000 test images.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import torch
from work import CNN1, Settings

from lightning_fed.data import CIFAR10, Digits, FederatedDataModule

HERE = Path(__file__).parent


@dataclass
class Entrant:
    """A contestant from outside.

    Args:
        name: in the table.
        command: what runs it.
        threads: of torch.
    """

    name: str
    command: list[str]
    threads: int = 1

    def start(self, work: Path, rounds: int) -> subprocess.Popen[bytes]:
        """Start its process."""
        args = [*self.command, "--work", str(work), "--name", self.key, "--rounds", str(rounds)]
        quiet = {"RAY_USAGE_STATS_ENABLED": "0", "FLWR_TELEMETRY_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        found = os.pathsep.join(filter(None, (str(HERE.absolute()), os.environ.get("PYTHONPATH"))))  # also by Ray's actors
        threads = {f"{library}_NUM_THREADS": str(self.threads) for library in ("OMP", "MKL")}
        environment = os.environ | quiet | threads | {"PYTHONPATH": found}
        with (work / f"{self.key}.log").open("wb") as log:
            return subprocess.Popen(args, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment)

    @property
    def key(self) -> str:
        """Its name in the names of files."""
        return self.name.replace(" ", "_").replace(",", "")


def main() -> None:
    """Play and print."""
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="where CIFAR-10 is; without it the digits of scikit-learn are used, for a trial")
    parser.add_argument("--peers", type=Path, help="folder of the environments fluke and flower; without it nobody else plays")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--workers", type=int, default=cores)
    parser.add_argument("--channels_last", action="store_true", help="the peers' networks too, as those of lightning-fed are")
    options = parser.parse_args()
    settings = Settings(options.clients, options.images, options.cohort, 64, options.lr, options.workers, options.channels_last)
    data: FederatedDataModule = CIFAR10(options.root) if options.root else Digits()
    seconds, accuracies = play(entrants(options.peers, settings.workers, cores), settings, data, options.rounds)
    print(f"torch {torch.__version__}, {cores} cores, {options.rounds} rounds, {settings}")
    show(seconds, accuracies)


def entrants(peers: Path | None, workers: int, cores: int) -> list[Entrant]:
    """Who takes part."""
    ours = [sys.executable, str(HERE / "ours.py"), "--engine"]
    found = [Entrant(f"lightning-fed, {workers} workers", [*ours, "Processes"])]
    found += [Entrant("lightning-fed, in process", [*ours, "InProcess"])]
    if peers:
        fluke, flower = ([str(peers / name / "bin" / "python"), str(HERE / f"with_{name}.py")] for name in ("fluke", "flower"))
        found += [Entrant("fluke, one thread", fluke), Entrant(f"fluke, {cores} threads", fluke, cores)]
        found += [Entrant(f"Flower, {workers} actors", flower)]
        if workers >= 2:  # cores that an actor gets if nobody says how many
            found += [Entrant("Flower, 2 cores an actor", [*flower, "--cores", "2"], 2)]
    return found


def play(
    contestants: list[Entrant], settings: Settings, data: FederatedDataModule, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each round of each contestant, and its accuracy after it."""
    images, labels, test_images, test_labels = data.load()
    assert isinstance(images, torch.Tensor)
    assert isinstance(test_images, torch.Tensor)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    if not len(test_labels):  # the digits have no test set of their own
        order, tests = order[:-300], order[-300:]
        test_images, test_labels = images[tests], labels[tests]
    needed = settings.clients * settings.images
    if needed > len(order):
        raise SystemExit(f"{settings.clients} clients with {settings.images} images need {needed}; there are {len(order)}.")
    torch.manual_seed(0)
    network = CNN1(settings)
    work = Path(tempfile.mkdtemp(prefix="peers_"))
    chosen = {"images": images[order[:needed]].contiguous(), "labels": labels[order[:needed]]}
    torch.save({"settings": asdict(settings), "initial": network.state_dict(), **chosen}, work / "work.pt")
    seconds: dict[str, list[float]] = {one.name: [] for one in contestants}
    accuracies: dict[str, list[float]] = {one.name: [] for one in contestants}
    with Listener(str(work / "line"), "AF_UNIX") as listener:
        lines: dict[str, Connection] = {}
        processes = []
        for one in contestants:
            processes.append(one.start(work, rounds))
            lines[one.name] = _answered(listener, processes[-1], work / f"{one.key}.log")
        for _ in range(rounds):
            for one in contestants:
                lines[one.name].send("go")
                seconds[one.name].append(_received(lines[one.name], work / f"{one.key}.log"))
                network.load_state_dict(torch.load(work / f"{one.key}.pt"))
                accuracies[one.name].append(accuracy(network, test_images[:2000], test_labels[:2000]))
        for line in lines.values():
            line.send("stop")
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
    shutil.rmtree(work)
    return seconds, accuracies


def _answered(listener: Listener, process: subprocess.Popen[bytes], log: Path) -> Connection:
    """The line of a contestant that was started."""
    listener._listener._socket.settimeout(300)  # type: ignore[attr-defined]
    try:
        line = listener.accept()
    except TimeoutError:
        raise SystemExit(f"A contestant did not answer (exit code {process.poll()}): {log.read_text()[-2000:]}") from None
    line.recv()
    return line


def _received(line: Connection, log: Path) -> float:
    try:
        return float(line.recv())
    except EOFError:
        raise SystemExit(f"A contestant ended early: {log.read_text()[-2000:]}") from None


@torch.no_grad()
def accuracy(network: CNN1, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Of a model, in percent."""
    found = [network(batch.float() / 255).argmax(1) for batch in images.split(500)]
    return 100 * float((torch.cat(found) == labels).float().mean())


def show(seconds: dict[str, list[float]], accuracies: dict[str, list[float]]) -> None:
    """Print the table: times are medians over all rounds but the first, and ratios medians of paired ones."""
    first = next(iter(seconds))
    print(f"| | seconds a round | times those of {first} | accuracy (%) |\n|---|---:|---:|---:|")
    for name, taken in seconds.items():
        ratio = statistics.median(its / mine for its, mine in zip(taken[1:], seconds[first][1:], strict=True))
        print(f"| {name} | {statistics.median(taken[1:]):.3f} | {ratio:.2f} | {accuracies[name][-1]:.2f} |")


if __name__ == "__main__":
    main()
