"""AG_NEWS as sequences of word ids."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fed.data.federated import FederatedDataModule, Pools
from lightning_fed.data.text.classification import read_examples
from lightning_fed.errors import require
from lightning_fed.options import PositiveInt

PADDING, UNKNOWN = 0, 1
CLASSES = ("1", "2", "3", "4")
COLUMNS = ("class", "title", "description")


class AGNews(FederatedDataModule):
    """News in four classes (Zhang et al., 2015): title and description as one sequence of words.

    The vocabulary consists of the most frequent words of the training file; other words are "unknown". Sequences are cut or padded
    to one length.

    Args:
        root: folder with ``train*.csv`` and ``test.csv``: class (1 to 4), title, description, no header.
        vocab_size: number of ids, including padding (0) and unknown (1); at most that of the backbone's embedding.
        max_length: number of words per example.
        **kwargs: see :class:`FederatedDataModule`.
    """

    num_classes = 4
    class_names = ("World", "Sports", "Business", "Sci/Tech")

    def __init__(self, root: str, vocab_size: PositiveInt = 10000, max_length: PositiveInt = 64, **kwargs: Any) -> None:
        super().__init__(augment="none", **kwargs)
        self.root = root
        self.vocab_size: int = vocab_size
        self.max_length: int = max_length

    def load(self) -> Pools:
        """Word ids of shape (N, max_length) and labels of both sets."""
        folder = Path(self.root).expanduser()
        found = {part: sorted(folder.glob(f"{part}*.csv")) for part in ("train", "test")}
        for part, files in found.items():
            require(
                len(files) == 1,
                f"Found {len(files)} files {part}*.csv in {folder.absolute()}, expected one: set --data.init_args.root to the "
                "folder with AG_NEWS's train.csv and test.csv.",
            )
        train, test = (words_of(files[0]) for files in found.values())
        words = Counter(word for text in train[0] for word in text)
        ids = {word: number for number, (word, _) in enumerate(words.most_common(self.vocab_size - 2), start=UNKNOWN + 1)}
        return *self._encode(*train, ids), *self._encode(*test, ids)

    def _encode(self, texts: list[list[str]], labels: list[int], ids: dict[str, int]) -> tuple[Tensor, Tensor]:
        tokens = torch.full((len(texts), self.max_length), PADDING)
        for row, text in enumerate(texts):
            known = [ids.get(word, UNKNOWN) for word in text[: self.max_length]] or [UNKNOWN]
            tokens[row, : len(known)] = torch.tensor(known)
        return tokens, torch.tensor(labels)


def words_of(path: Path) -> tuple[list[list[str]], list[int]]:
    """The words of each line's title and description, lower-cased, and the labels from 0."""
    texts, labels = read_examples(path, COLUMNS[1:], COLUMNS[0], CLASSES, header=COLUMNS)
    return [re.findall(r"[a-z0-9']+", " ".join(parts).lower()) for parts in texts], labels
