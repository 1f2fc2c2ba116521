"""What the command line makes of classes of data of which no configuration comes along."""

from typing import Any

import pytest
from jsonargparse import ArgumentParser

from lightning_fed.data import FederatedDataModule


def parser_of_data() -> ArgumentParser:
    parser = ArgumentParser()
    parser.add_subclass_arguments(FederatedDataModule, "data")
    return parser


TEXTS = {"path": "a.csv", "tokenizer": "roberta-base", "num_clients": 8}


@pytest.mark.parametrize(
    ("kind", "given", "found"),
    [
        ("QuestionFiles", {"path": "t.json", "tokenizer": "t"}, {"allow_unanswerable": False}),
        ("TextFiles", TEXTS | {"input": "sentence", "classes": ["bad", "good"]}, {"input": ["sentence"], "num_clients": 8}),
        ("TextFiles", TEXTS | {"input": ["one", "two"], "classes": ["0", "1"]}, {"input": ["one", "two"], "classes": ["0", "1"]}),
    ],
)
def test_the_command_line_builds_it(kind: str, given: dict[str, Any], found: dict[str, Any]) -> None:
    parser = parser_of_data()
    config = parser.parse_object({"data": {"class_path": kind, "init_args": given}})
    data = parser.instantiate(parser.parse_string(parser.dump(config))).data
    assert type(data).__name__ == kind
    assert {name: getattr(data, name) for name in found} == found


def test_what_is_no_choice_is_refused() -> None:
    with pytest.raises(SystemExit):
        parser_of_data().parse_args(["--data", "SQuAD", "--data.version", "3", "--data.tokenizer", "t"])
