"""The time to import the package, compared with importing torch and lightning.

    python bench/startup.py

``import torch, lightning`` and ``import lightning_fed.federation.federation, lightning_fed.methods`` (all that a run from Python
needs), alternately, each in a process of its own. The result is the ratio of their medians. Then follow the imports of the
package that take longest by themselves, as measured by Python (``-X importtime``).
"""

import argparse
import statistics
import subprocess
import sys
from time import perf_counter

BASE = "import torch, lightning"
OURS = "import torch, lightning; import lightning_fed.federation.federation, lightning_fed.methods"


def seconds(code: str) -> float:
    """Of a process that runs some code, all of it."""
    start = perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return perf_counter() - start


def slowest(count: int) -> list[tuple[float, str]]:
    """Modules that ``OURS`` imports and ``BASE`` does not, with what each takes by itself, in milliseconds."""
    known = {name for _, name in imports(BASE)}
    return sorted(((own, name) for own, name in imports(OURS) if name not in known), reverse=True)[:count]


def imports(code: str) -> list[tuple[float, str]]:
    """Milliseconds of each module's own import, and its name."""
    trace = subprocess.run([sys.executable, "-X", "importtime", "-c", code], check=True, capture_output=True, text=True).stderr
    rows = [line.removeprefix("import time:").split("|") for line in trace.splitlines() if line.startswith("import time:")]
    return [(int(own) / 1000, name.strip()) for own, _, name in rows if own.strip().isdecimal()]


def main() -> None:
    """Print the ratio and the slowest imports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    pairs = [(seconds(OURS), seconds(BASE)) for _ in range(options.pairs + 1)][1:]  # the first pair fills the disk's cache
    ours, base = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = sorted(mine / its for mine, its in pairs)
    print(f"{OURS.partition('; ')[2]}: {ours:.2f} s; {BASE}: {base:.2f} s (medians of {options.pairs} pairs)")
    print(f"ratio: median {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")
    print("the slowest imports beyond those:")
    for own, name in slowest(12):
        print(f"  {own:7.1f} ms  {name}")


if __name__ == "__main__":
    main()
