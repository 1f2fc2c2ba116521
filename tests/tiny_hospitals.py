"""Data of hospitals, in the form of the originals, and small."""

from pathlib import Path

import numpy as np

SIZES = {"cleveland": 12, "hungarian": 9, "switzerland": 6, "va": 8}


def heart_files(folder: Path, **changed: list[str]) -> str:
    """Patients of which the last of each hospital lacks the cholesterol; of the others only what is left out anyway."""
    for seed, (name, size) in enumerate(SIZES.items()):
        draw = np.random.default_rng(seed).integers
        lines = []
        for k in range(size):
            known = [draw(30, 80), draw(0, 2), draw(1, 5), draw(90, 200), draw(100, 400), draw(0, 2), draw(0, 3)]
            rest = [draw(70, 200), draw(0, 2), 1.5, "?", "?", "?", 3 if name == "switzerland" else k % 3]
            lines.append(",".join(map(str, [*known, *rest])))
        fields = lines[-1].split(",")
        lines[-1] = ",".join([*fields[:4], "?", *fields[5:]])
        (folder / f"processed.{name}.data").write_text("\n".join(changed.get(name, lines)) + "\n")
    return str(folder)


def breast_files(folder: Path, sites: int = 6, features: int = 39) -> str:
    """Twenty patients of each region, every third of them for test; all die, one a day."""
    names = [f"feature {k}" for k in range(features)]
    lines, parts = [",".join(["pid", *names, "E", "T"])], ["pid,fold,fold2"]
    for k in range(20 * sites):
        lines.append(",".join(map(str, [f"p{k}", *((k >> bit) % 2 for bit in range(features)), 1, k])))
        parts.append(f"p{k},-,{'test' if k % 3 == 0 else 'train'}_{k // 20}")
    (folder / "brca.csv").write_text("\n".join(lines) + "\n")
    (folder / "train_test_split.csv").write_text("\n".join(parts) + "\n")
    return str(folder)
