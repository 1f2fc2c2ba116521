"""AG_NEWS, on a few lines of the same format."""

from pathlib import Path

import pytest
import torch

from lightning_fed.data import IID, AGNews
from lightning_fed.errors import FederationError

TRAIN = '"1","The big dog","barks at a big, ""red"" cat"\n"4","","the dog naps"\n'
TEST = '"2","A zebra","naps"\n"3","",""\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "train.csv").write_text(TRAIN)
    (tmp_path / "test.csv").write_text(TEST)
    return tmp_path


def test_words_become_ids(root: Path) -> None:
    tokens, labels, test_tokens, test_labels = AGNews(str(root), vocab_size=100, max_length=6).load()
    assert labels.tolist() == [0, 3]
    assert test_labels.tolist() == [1, 2]
    assert tokens.shape == (2, 6)
    the, big, dog, *_ = tokens[0].tolist()
    assert {the, big, dog} == {2, 3, 4}  # twice each: the most frequent
    assert tokens[1].tolist()[:2] == [the, dog]
    assert tokens[1].tolist()[3:] == [0, 0, 0]  # padding
    naps = tokens[1, 2].item()
    assert test_tokens[0].tolist()[1:3] == [1, naps]  # no zebra in the training file
    assert test_tokens[1].tolist() == [1, 0, 0, 0, 0, 0]  # an empty text is one unknown word


def test_the_vocabulary_is_bounded(root: Path) -> None:
    tokens, *_ = AGNews(str(root), vocab_size=4, max_length=20).load()
    assert tokens.max() == 3


def test_batches_are_ids(root: Path) -> None:
    (root / "train.csv").write_text(TRAIN * 10)
    data = AGNews(str(root), num_clients=2, partition=IID(), max_length=6)
    tokens, labels = next(iter(data.client(0).train_dataloader()))
    assert tokens.dtype == labels.dtype == torch.int64


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=r"Found 0 files train\*.csv"):
        AGNews(str(tmp_path)).load()
