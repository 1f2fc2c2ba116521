"""The E2E data: descriptions of restaurants."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from lightning_fed.data.lines import csv_table, existing
from lightning_fed.data.text.generation import Example, TextGeneration, grouped, reference_of
from lightning_fed.errors import require

SLOT = re.compile(r"([^\[\],]+)\[([^\]]*)\]")
MEANING = re.compile(rf"{SLOT.pattern}(, {SLOT.pattern})*")
NAMES = {"eatType": "Type", "priceRange": "price", "familyFriendly": "family friendly"}
"""Names of slots in the data of LoRA's experiments that differ from the files."""


class E2E(TextGeneration):
    """The E2E NLG challenge (Novikova, Dušek and Rieser, SIGDIAL 2017): describe a restaurant in words.

    A source is a line like ``name : The Vaults | Type : pub | price : more than £30``, the format of LoRA's experiments. The label
    is the restaurant's name: there are 34 in the training set, 18 of them also in the test set. Texts are those of the files,
    unchanged.

    Args:
        root: folder with ``trainset.csv``, ``devset.csv`` and ``testset_w_refs.csv``.
        test_set: the set that clients are tested on; ``dev`` to choose hyperparameters.
        **kwargs: see :class:`TextGeneration`.
    """

    def __init__(self, root: str, test_set: Literal["test", "dev"] = "test", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        require(test_set in ("test", "dev"), f"Got test_set={test_set!r}: give test or dev.")
        self.root = root
        self.test_set = test_set

    def examples(self) -> tuple[list[Example], list[Example]]:
        names = "trainset.csv", "testset_w_refs.csv" if self.test_set == "test" else "devset.csv"
        train, test = (grouped(read_e2e(Path(self.root, name))) for name in names)
        return train, test


def read_e2e(path: Path) -> Iterator[tuple[str, str, str]]:
    """Source, restaurant and reference of each line."""
    path = existing(path, "set --data.init_args.root to the folder with E2E's files")
    for where, [meaning, reference] in csv_table(path, ["mr", "ref"])[1]:
        slots = [(name.strip(), value.strip()) for name, value in SLOT.findall(meaning)]
        require(
            MEANING.fullmatch(meaning.strip()) is not None and "name" in dict(slots),
            f"{where} has the meaning {meaning.strip()!r}, expected one like name[The Vaults], eatType[pub].",
        )
        source = " | ".join(f"{NAMES.get(name, name)} : {value}" for name, value in slots)
        yield source, dict(slots)["name"], reference_of(reference, where)
