"""The cost of a round when the clients are sites: over the real Flower on this machine, and the same rounds without it.

    pip install -e ".[flower]" && python bench/sites.py
    python bench/sites.py --cases small --rounds 12

A coordinator (``lightning-fed serve``) and three sites (``lightning-fed join``), each a process with one thread and a SuperNode
of its own, with certificates and keys; in process with one thread; and on two worker processes. In each repetition each of them
runs the same rounds, one after the other, on scikit-learn's digits. The result is the median of the ratios within a repetition. A
round's time is the sum of the columns ``seconds/…`` of the run's ``metrics.csv``; the first round, which starts processes and
counts FLOPs, and the last, in which all clients are measured, are left out.

Cases: ``small``, a perceptron whose turn takes almost no time, which shows the time of the transport; ``large``, CNN-1, which sends
10.5 MB each way for each client. Sites, their SuperNodes and the coordinator share this machine's cores, unlike in a real study.
Needs ssh-keygen and openssl.
"""

import argparse
import csv
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

CLIENTS = 3
CASES = {
    "small": ("perceptron, 16 hidden units", "{class_path: MLP, init_args: {inputs: 192, hidden: [16]}}", 8),
    "large": ("CNN-1", "CNN1", 32),
}
STUDY = """
seed_everything: 0
data: {{class_path: Digits, init_args: {{num_clients: {clients}, image_size: {size}, batch_size: 64}}}}
model: {{class_path: FedAvg, init_args: {{backbone: {network}}}}}
federation: {{rounds: {rounds}, evaluate_every: 0, checkpoint_every: 0, logger: false}}
trainer: {{accelerator: cpu}}
"""
COMMAND = [sys.executable, "-m", "lightning_fed"]
ENGINES = {
    "in process": ["InProcess", "--federation.engine.init_args.threads=1"],
    "2 workers": ["Processes", "--federation.engine.init_args.workers=2"],
}


def command(*args: str | Path) -> None:
    """Run to the end; what it printed is shown if it fails."""
    done = subprocess.run(list(map(str, args)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, args))} ended with exit code {done.returncode}:\n{done.stdout}")


def write_keys() -> None:
    """A key pair for each site, and certificates for localhost by an authority of one's own, as docs/deployment.md has them."""
    for folder in ("keys", "sites", "certificates"):
        Path(folder).mkdir()
    for client in range(CLIENTS):
        command("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", f"keys/{client}")
        shutil.copy(f"keys/{client}.pub", "sites")
    new = ["openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-384", "-nodes"]
    os.chdir("certificates")
    command(*new, "-x509", "-subj", "/CN=Bench", "-keyout", "ca.key", "-out", "ca.crt")
    command(*new, "-subj", "/CN=localhost", "-keyout", "server.key", "-out", "server.csr")
    Path("names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    signed = ["openssl", "x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"]
    command(*signed, "-extfile", "names", "-out", "server.pem")
    os.chdir("..")


def round_of(run_dir: str) -> float:
    """Seconds of a round of the newest run: the median over all but the first and the last."""
    newest = max(Path(run_dir).glob("version_*"), key=lambda path: path.stat().st_mtime)
    with (newest / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return statistics.median(
        sum(float(value) for name, value in row.items() if name.startswith("seconds/") and value) for row in rows[1:-1]
    )


def play_here(engine: list[str], run_dir: str) -> float:
    """Seconds of a round on this machine's own engine."""
    command(*COMMAND, "fit", "--config", "study.yaml", "--federation.run_dir", run_dir, "--federation.engine", *engine)
    return round_of(run_dir)


def play_at_sites(port: int) -> float:
    """Seconds of a round over Flower."""
    sites = []
    for client in range(CLIENTS):
        args = ["--server", f"localhost:{port}", "--client", str(client), "--key", f"keys/{client}", "--threads", "1"]
        args += ["--root_certificates", "certificates/ca.crt", "--partitioned"]
        with Path(f"join-{client}.out").open("a") as output:
            sites.append(subprocess.Popen([*COMMAND, "join", "--config", "study.yaml", *args], stdout=output, stderr=output))
    try:
        served = ["--config", "study.yaml", "--sites", "sites", "--certificates", "certificates", "--port", str(port)]
        command(*COMMAND, "serve", *served, "--federation.run_dir", "apart")
    finally:
        for site in sites:
            site.terminate()
        for site in sites:
            site.wait()
    return round_of("apart")


def main() -> None:
    """Print paired ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="lightning_fed_bench_") as folder:
        os.chdir(folder)
        write_keys()
        for case in options.cases:
            title, network, size = CASES[case]
            study = STUDY.format(clients=CLIENTS, size=size, network=network, rounds=options.rounds)
            Path("study.yaml").write_text(study)
            seconds: dict[str, list[float]] = {}
            for _ in range(options.repetitions):
                for name, engine in ENGINES.items():
                    seconds.setdefault(name, []).append(play_here(engine, name.replace(" ", "_")))
                seconds.setdefault(f"{CLIENTS} sites over Flower", []).append(play_at_sites(options.port))
            print(f"\nFedAvg, {title}, {CLIENTS} clients, {options.repetitions} repetitions of {options.rounds} rounds")
            for name, values in seconds.items():
                ratio = statistics.median(mine / its for mine, its in zip(values, seconds["in process"], strict=True))
                print(f"  {name:22s} {statistics.median(values):7.3f} s a round   {ratio:6.3f} x in process", flush=True)
        os.chdir("/")


if __name__ == "__main__":
    main()
