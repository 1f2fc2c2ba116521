"""Instructions: what a record may look like, which tokens are learned, and what becomes of what does not fit."""

import datetime
import gzip
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_chats import FORGETFUL, MARKED, QUESTIONS, UNMARKED, chats, save_chat_tokenizer, write_lines

from lightning_fed.data import Instructions
from lightning_fed.data.files.records import files_of, read_records
from lightning_fed.data.text.chat import TEMPLATES
from lightning_fed.data.text.conversations import conversation_of
from lightning_fed.data.text.exact_match import ends_with_number, is_exact
from lightning_fed.data.text.generation import IGNORED
from lightning_fed.data.text.token_rows import TokenRows, write_rows
from lightning_fed.errors import FederationError


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def new(tmp_path: Path, records: list[Any], **options: Any) -> Instructions:
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    return Instructions(write_lines(tmp_path / "chats.jsonl", records), tokenizer, **{"num_clients": 1, "val_share": 0} | options)


def learned_texts(data: Instructions) -> list[str]:
    """What is learned of each row, in the order of the file."""
    rows = data.read().inputs
    batch = rows.read(torch.arange(len(rows)))  # type: ignore[union-attr]
    assert isinstance(batch, dict)
    return [data._tokenizer.decode(row[row != IGNORED]) for row in batch["targets"]]


ONE = {"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hi."}
CHATML = "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n"
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "messages": ({"messages": ONE}, {}, "Hi.<|im_end|>"),
    "sharegpt": ({"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hi."}]}, {}, "Hi.<|im_end|>"),
    "prompt of messages": ({"prompt": ONE[:1], "completion": ONE[1:]}, {}, "Hi.<|im_end|>\n"),
    "prompt of text": ({"prompt": "Hi? ", "completion": "Hi."}, {}, "Hi.<|endoftext|>"),
    "alpaca": ({"instruction": "Hi?", "input": "", "output": "Hi."}, {}, "Hi.<|im_end|>"),
    "columns": ({"q": "Hi", "more": "?", "a": "Hi."}, {"columns": {"user": ["q", "more"], "assistant": "a"}}, "Hi.<|im_end|>"),
    "unmarked": ({"messages": ONE}, {"template": UNMARKED}, "Hi.<|im_end|>\n"),
    "all": ({"messages": ONE}, {"learn": "all"}, CHATML.removeprefix("<|im_start|>")),  # nothing comes before the first
    "a name": ({"messages": ONE}, {"template": "alpaca"}, "Hi.<|endoftext|>"),
    "removed": ({"instruction": "<<x>>Hi?", "output": "H<<1+1=2>>i."}, {"remove": "<<.*?>>"}, "Hi.<|im_end|>"),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_and_its_answer_learned(form: str, tmp_path: Path) -> None:
    record, options, expected = FORMS[form]
    assert learned_texts(new(tmp_path, [record] * 2, **options)) == [expected] * 2


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_answer_that_has_its_end_gets_no_second(template: str, tmp_path: Path) -> None:
    end = "<|im_end|>" if template == "chatml" else "<|endoftext|>"
    records = [{"instruction": "Hi?", "output": answer} for answer in ("Hi.", f"Hi.{end}")]
    assert learned_texts(new(tmp_path, records, template=template)) == [f"Hi.{end}"] * 2


def test_an_input_stands_below_its_instruction(tmp_path: Path) -> None:
    data = new(tmp_path, [{"instruction": "Add.", "input": "1 2", "output": "3"}] * 2)
    ids, _ = data.read().inputs.row(0)  # type: ignore[union-attr]
    assert data._tokenizer.decode(ids).startswith("<|im_start|>user\nAdd.\n\n1 2<|im_end|>")


@pytest.mark.parametrize(
    ("record", "columns"),
    [
        ({"instruction": "Hi?", "output": "Hi."}, None),
        ({"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Hi."}]}, None),
        ({"q": "Hi?", "a": "Hi."}, {"system": "system", "user": "q", "assistant": "a"}),
    ],
    ids=["alpaca", "sharegpt", "columns"],
)
def test_a_system_message_beside_what_is_said(record: dict[str, Any], columns: Any) -> None:
    expected = [{"role": "system", "content": "Be kind."}, *ONE]
    assert conversation_of(record | {"system": "Be kind."}, columns, "record 1,").messages == expected
    for nothing in ("", None):
        assert conversation_of(record | {"system": nothing}, columns, "record 1,").messages == [*ONE]


@pytest.mark.parametrize("template", [MARKED, UNMARKED], ids=["marked", "unmarked"])
def test_answers_or_the_last_one(template: str, tmp_path: Path) -> None:
    records, newline = chats(turns=2), "" if template == MARKED else "\n"
    said = [[message["content"] for message in record["messages"]] for record in records]
    texts = learned_texts(new(tmp_path, records, template=template))
    assert texts == [f"{first}<|im_end|>{newline}{second}<|im_end|>{newline}" for _, first, _, second in said]
    last = learned_texts(new(tmp_path, records, template=template, learn="last_answer"))
    assert last == [f"{second}<|im_end|>{newline}" for *_, second in said]


TOOLED = "{% if tools %}{{ tools | tojson }}{% endif %}{{ mood | default('') }}" + UNMARKED
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "integer"}}}}, {"type": "function"}]


def test_tools_and_variables_of_a_record_reach_the_template(tmp_path: Path) -> None:
    """For prompts as for whole rows, and in files of all kinds; other rows have none."""
    records = [{"messages": ONE, "tools": TOOLS, "chat_template_kwargs": {"mood": "!"}}, {"messages": ONE}]
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text(json.dumps([records[0] | {"tools": json.dumps(TOOLS)}, records[1] | {"tools": None}]))
    tokenizer, prints = save_chat_tokenizer(tmp_path / "tokenizer"), set()
    for name in (write_lines(tmp_path / "c.jsonl", records), str(tmp_path / "a.parquet"), str(tmp_path / "b.json")):
        for template in (TOOLED, TOOLED.replace(UNMARKED, MARKED)):
            data = Instructions(name, tokenizer, template=template, num_clients=1, val_share=0)
            assert all(text.startswith("Hi.<|im_end|>") for text in learned_texts(data))
            rows = [data._tokenizer.decode(data._rows.row(number)[0]) for number in range(2)]  # type: ignore[union-attr]
            assert rows[0] == json.dumps(TOOLS) + "!" + CHATML
            assert rows[1] == CHATML
        prints.add(data._rows.checksum())  # type: ignore[union-attr]
    assert len(prints) == 1
    assert new(tmp_path, records[1:] * 2, template=template).read().inputs.checksum() not in prints  # type: ignore[union-attr]


def test_tools_that_a_template_leaves_out_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for template, told in ((TOOLED, 0), (UNMARKED, 1)):
        new(tmp_path, [{"messages": ONE}, *[{"messages": ONE, "tools": TOOLS}] * 2], template=template).read()
        said = [record.message for record in caplog.records if "which the chat template leaves out" in record.message]
        assert len(said) == told
    assert "chats.jsonl, record 2, has tools" in said[0]


def test_files_of_all_kinds_say_the_same(tmp_path: Path) -> None:
    records = chats(2)
    line = write_lines(tmp_path / "a" / "x.jsonl", records)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(Path(line).read_bytes()))
    (tmp_path / "c.json").write_text(json.dumps(records, indent=1))
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "d.parquet")
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    places = ("a", "a/*.jsonl", "b.jsonl.gz", "c.json", "d.parquet")
    read = [Instructions(str(tmp_path / place), tokenizer, client="who", val_share=0) for place in places]
    for data in read:
        data.setup()
        assert data.client_names == ["author 0", "author 1"]
    assert len({data.fingerprint() for data in read}) == 1


def test_what_pandas_writes_of_a_gap_is_no_text(tmp_path: Path) -> None:
    """NaN, as a number, in JSON and in columns of Parquet and of datasets that have gaps only."""
    record = {"instruction": "Hi?", "input": math.nan, "output": "Hi.", "system": math.nan, "tools": [{"default": math.nan}]}
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    datasets = pytest.importorskip("datasets")
    parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    datasets.Dataset.from_list([record]).save_to_disk(tmp_path / "saved")
    for path in (write_lines(tmp_path / "a.jsonl", [record]), str(tmp_path / "a.parquet"), str(tmp_path / "saved")):
        [(where, fields, _)] = read_records(path)
        assert conversation_of({name: value for name, value in fields.items() if name != "file"}, None, where).messages == [*ONE]
        assert fields["tools"] == [{"default": None}]


def test_clients_by_column_file_or_label(tmp_path: Path) -> None:
    for name in ("east", "west"):
        write_lines(tmp_path / "sites" / f"{name}.jsonl", chats(2))
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    by_file = Instructions(str(tmp_path / "sites"), tokenizer, client="file", val_share=0)
    assert [client.num_train for client in by_file.clients] == [7, 7]
    assert by_file.client_names == ["east", "west"]
    by_label = Instructions(str(tmp_path / "sites"), tokenizer, label="task", num_clients=2, val_share=0)
    assert by_label.num_labels == 3
    assert by_label.num_classes == 1
    official = Instructions(
        str(tmp_path / "sites/east.jsonl"), tokenizer, str(tmp_path / "sites/west.jsonl"), num_clients=2, val_share=0
    )
    official.setup()
    assert official.split == "official"
    assert sum(client.num_test for client in official.clients) == 8


def test_names_of_files_and_patterns_of_folders(tmp_path: Path) -> None:
    """Only endings are left out of names; files of one name in several folders are told apart by these."""
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    for name in ("aya.de", "aya.fr"):
        write_lines(tmp_path / "files" / f"{name}.jsonl", chats(2))
    packed = tmp_path / "files" / "aya.it.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "files/aya.de.jsonl").read_bytes()))
    for name in ("east", "west"):
        write_lines(tmp_path / "sites" / name / "train.jsonl", chats(2))
        write_lines(tmp_path / "sites" / name / "test.jsonl", chats(2))
    expected = {"files": ["aya.de", "aya.fr", "aya.it"], "sites/*/train.jsonl": ["east/train", "west/train"]}
    for path, names in expected.items():
        data = Instructions(str(tmp_path / path), tokenizer, client="file", val_share=0)
        data.setup()
        assert data.client_names == names
    packed.rename(packed.with_name("aya.de.json"))
    with pytest.raises(FederationError, match=r"aya.de.json.* and .*have the same name aya.de: rename one"):
        Instructions(str(tmp_path / "files"), tokenizer, num_clients=1).setup()


def test_what_is_tested_on_is_not_trained_on(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", chats(2))
    last = write_lines(tmp_path / "b.jsonl", chats(2))
    write_lines(tmp_path / ".b.jsonl", chats(2))
    assert files_of(f"{tmp_path}/*.jsonl") == [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    data = Instructions(f"{tmp_path}/*.jsonl", save_chat_tokenizer(tmp_path / "tokenizer"), test_path=last)
    with pytest.raises(FederationError, match=r"b.jsonl belongs to path and to test_path"):
        data.setup()


def test_data_sets_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a dot in their name, in one of several configurations, and as a test set alone."""
    asked, sets = [], {"train": chats(3), "test": chats(1), "extra": [{}]}

    def load(name: str, config: str | None, option: str) -> dict[str, Any]:
        asked.append((name, config))
        return sets

    monkeypatch.setattr("lightning_fed.data.files.records.load_from_hub", load)
    tokenizer, file = save_chat_tokenizer(tmp_path / "tokenizer"), write_lines(tmp_path / "chats.jsonl", chats(2))
    own = Instructions("owner/name-2.5", tokenizer, config="main", num_clients=1, val_share=0)
    tested = Instructions(file, tokenizer, "owner/name", num_clients=1, val_share=0)
    twice = Instructions("owner/name", tokenizer, "owner/name", num_clients=1, val_share=0)
    for data, trained in ((own, 12), (tested, 8), (twice, 12)):
        data.setup()
        assert (data.clients[0].num_train, data.clients[0].num_test) == (trained, 4)
    assert asked == [("owner/name-2.5", "main"), *[("owner/name", None)] * 3]
    with pytest.raises(FederationError, match=r"config='main', which only datasets of the hub have, and .*chats.jsonl is none"):
        Instructions(file, tokenizer, config="main", num_clients=1).setup()
    sets.pop("test")
    with pytest.raises(FederationError, match="owner/name has the sets train, extra: expected one that is called test"):
        Instructions(file, tokenizer, "owner/name", num_clients=1).setup()


def test_data_sets_that_were_saved(tmp_path: Path) -> None:
    """One set, which is divided as files are, and several by name."""
    datasets = pytest.importorskip("datasets")
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    some, one = datasets.Dataset.from_list(chats(3)), datasets.Dataset.from_list(chats(1))
    some.save_to_disk(tmp_path / "some")
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": some, "test": one}).save_to_disk(tmp_path / "both")
    new = partial(Instructions, tokenizer=tokenizer, num_clients=1, val_share=0)
    pooled = new(str(tmp_path / "some"), test_share=0.25)
    tested, both = new(str(tmp_path / "some"), test_path=str(tmp_path / "one")), new(str(tmp_path / "both"))
    for data, trained, of_test in ((pooled, 9, 3), (tested, 12, 4), (both, 12, 4)):
        data.setup()
        assert (data.clients[0].num_train, data.clients[0].num_test) == (trained, of_test)
    (tmp_path / "one/state.json").write_text("{")
    with pytest.raises(FederationError, match=r"Could not load a dataset from .*one .*: check its files"):
        new(str(tmp_path / "one")).setup()


def test_rows_are_tokenised_once_and_mapped_by_who_gets_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = new(tmp_path, chats(2))
    first.setup()
    monkeypatch.setattr("lightning_fed.data.files.instructions.ChatTemplate.encode", None)
    again = new(tmp_path, chats(2))
    again.setup()
    assert again.fingerprint() == first.fingerprint()
    sent = pickle.dumps(again)
    assert b"parts" not in sent
    batches = [data.client(0).test_dataloader() for data in (again, pickle.loads(sent))]
    for (inputs, targets), (others, theirs) in zip(*batches, strict=True):
        assert torch.equal(targets, theirs)
        assert all(torch.equal(inputs[name], others[name]) for name in inputs)
    with pytest.raises(TypeError):  # another template has to be tokenised
        new(tmp_path, chats(2), template=UNMARKED).setup()


def test_what_a_template_writes_of_the_day_is_tokenised_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Later":
            return cls(2031, 1, 2)

    template = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }} " + MARKED
    dated, given = ({"template": template, "template_variables": given} for given in ({}, {"date_string": "1 May 2024"}))

    def fingerprints() -> list[str]:
        both = [new(tmp_path, chats(2), **options) for options in (dated, given)]
        for data in both:
            data.setup()
        return [data.fingerprint() for data in both]

    before = fingerprints()
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Later)
    after = fingerprints()
    assert (before[0] == after[0], before[1] == after[1]) == (False, True)


def test_padding_is_by_place_and_on_the_side_that_was_asked_for(tmp_path: Path) -> None:
    sides = {}
    for side in ("right", "left"):
        rows = new(tmp_path, chats(), padding=side).read().inputs
        sides[side] = rows.read(torch.arange(4))  # type: ignore[union-attr]
    right, left = sides["right"], sides["left"]
    assert right["input_ids"].shape[1] % 8 == 0
    for row, length in enumerate(right["attention_mask"].sum(1).tolist()):
        for name in ("input_ids", "attention_mask", "targets"):
            assert torch.equal(right[name][row, :length], left[name][row, -length:])
        assert (right["targets"][row, length - 1 :] == IGNORED).all()
        assert (left["targets"][row, :-length] == IGNORED).all()


def test_packed_rows_stand_one_behind_the_other(tmp_path: Path) -> None:
    data = new(tmp_path, chats(2), packing=True, batch_size=3)
    trainer = type("Trainer", (), {"training": True})()
    client = data.client(0)
    inputs, targets = next(iter(client.train_dataloader()))
    packed, of_packed = client.transform((inputs, targets), trainer)
    mask, total = inputs["attention_mask"].bool(), int(inputs["attention_mask"].sum())
    assert packed["input_ids"].shape == of_packed.shape == (1, -(-total // 64) * 64)
    assert torch.equal(packed["input_ids"][0, :total], inputs["input_ids"][mask])
    assert torch.equal(of_packed[0, :total], targets[mask])
    assert (of_packed[0, total:] == IGNORED).all()
    starts = (packed["position_ids"][0, :total] == 0).nonzero().flatten().tolist()
    assert starts == [0, *mask.sum(1).cumsum(0)[:-1].tolist()]
    trainer.training = False
    assert client.transform((inputs, targets), trainer)[0] is inputs


def test_what_is_too_long_is_counted_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = [*chats(), {"messages": [ONE[0], {"role": "assistant", "content": "a" * 80}]}]
    records += [{"messages": [{"role": "user", "content": "q" * 80}, ONE[1]]}]
    data = new(tmp_path, records, max_length=70)
    texts = learned_texts(data)
    assert len(texts) == 5
    assert set(texts[-1]) == {"a"}
    said = r"1 of 6 records are longer than max_length 70 and lost .*\(the first is .*record 5\); 1 of 6 .* out, .*record 6"
    assert any(re.search(said, record.message) for record in caplog.records)
    assert len(learned_texts(new(tmp_path, records, max_length=70, overlong="drop"))) == 4
    with pytest.raises(FederationError, match=r"chats.jsonl, record 5, has 1\d\d tokens, but max_length is 70: raise it"):
        new(tmp_path, records, max_length=70, overlong="refuse").setup()


def test_what_was_learned_as_the_end_ends_an_answer(tmp_path: Path) -> None:
    """Also where generation went on, and where a template writes a line's end behind it."""
    for template in (MARKED, UNMARKED):
        data = new(tmp_path, [{"instruction": "2 * 21?", "output": "#### 42"}] * 3, template=template)
        data.read()
        assert data.end_token == data._tokenizer.convert_tokens_to_ids("<|im_end|>")
        ids = data._tokenizer("#### 42<|im_end|>\n<|im_start|>user\nAnd 1?\n#### 1")["input_ids"]
        assert data.score([(torch.tensor([0]), torch.tensor([ids]))]) == {"exact_match": 1}


def test_an_answer_that_was_cut_is_no_reference(tmp_path: Path) -> None:
    records = [{"instruction": "?", "output": "a" * 80 + "#### 42"}, *({"instruction": "?", "output": "#### 7"},) * 3]
    data = new(tmp_path, records, max_length=60)
    data.read()
    right = data._tokenizer("#### 7")["input_ids"]
    assert data.score([(torch.tensor([0, 1]), torch.tensor([right, right]))]) == {"exact_match": 1}
    assert math.isnan(data.score([(torch.tensor([0]), torch.tensor([right]))])["exact_match"])


def test_who_writes_a_cache_second_leaves_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first one came in the very moment in which the second one is done."""
    rows, move = [(0, False, [1, 2], [False, True])], {name: getattr(os, name) for name in ("rename", "replace")}

    def overtaken(source: Any, target: Any) -> None:
        shutil.copytree(source, target)
        move["rename"](source, target)

    for name in move:
        monkeypatch.setattr(os, name, overtaken)
    write_rows(tmp_path / "tokens", rows)
    assert [path.name for path in tmp_path.iterdir()] == ["tokens"]
    assert TokenRows(tmp_path / "tokens", 0).answer(0) == [2]
    (tmp_path / "file").write_text("")
    with pytest.raises(FederationError, match=r"cannot be written to .*: set XDG_CACHE_HOME"):
        write_rows(tmp_path / "file" / "tokens", rows)


def test_the_learned_text_of_the_first_row_is_printed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    new(tmp_path, chats(2)).setup()
    assert any("record 1, is: '3<|im_end|>'" in record.message for record in caplog.records)
    assert any("has no padding token: its end token is used" in record.message for record in caplog.records)
    assert not any("the model does not learn to stop" in record.message for record in caplog.records)
    new(tmp_path, chats(2), template=MARKED.replace("m['content'] + '<|im_end|>'", "m['content']")).setup()
    assert any("ends in '3', no special token: the model does not learn to stop" in record.message for record in caplog.records)
    caplog.clear()
    long = {"messages": [ONE[0], {"role": "assistant", "content": "a" * 80}]}
    new(tmp_path, [long, *chats()], max_length=70).setup()
    assert any("record 2, is: '3<|im_end|>'" in record.message for record in caplog.records)  # the first is not whole


def test_answers_are_scored_by_the_first_one_of_their_row(tmp_path: Path) -> None:
    data = new(tmp_path, chats(2, turns=2), metrics=["exact_match", "last_number", "rouge_l"])
    data.setup()

    def scores(*texts: str) -> dict[str, float]:
        return data.score(
            [(torch.tensor([row]), torch.tensor([data._tokenizer(text)["input_ids"]])) for row, text in enumerate(texts)]
        )

    said = [answer for _, answer in QUESTIONS]
    assert scores(*said) == {"exact_match": 1, "last_number": 0.25, "rouge_l": pytest.approx(1)}
    assert scores("It is 3", "Hi, hi<|im_end|>")["exact_match"] == 0.5
    assert scores("It is 3", "Hi, hi")["last_number"] == 0.5


@pytest.mark.parametrize(
    ("answer", "reference", "exact", "last"),
    [
        ("so\n#### 1,234", "x <<1+1=2>> #### 1234", True, True),
        ("so\n#### 12\nno: #### -5", "#### -5", True, True),
        ("it is $1234.", "#### 1,234", False, True),
        ("nothing", "#### 3", False, False),
        ("Not an Entailment!", "not an entailment", True, False),
        ("not", "not an entailment", False, False),
        ("3", "-3", False, False),
        ("The answer: -3.", "the answer -3", True, True),
        ("1 5", "1.5", False, False),
        ("It is 1.5, or .5.", "it is 1.5 or .5", True, True),
        ("-$5.00", "$-5.00", True, True),
        ("near £20-25 -- so...5 of 5-year-olds", "Near £20 25 so 5 of 5 year olds", True, True),
        ("No.5, e-3", "no 5 e 3", True, False),
        ("", "+", False, False),
        ("<", "!=", False, False),
        ("", "```", False, False),
        ("+ ", "+", True, False),
    ],
)
def test_what_is_right(answer: str, reference: str, exact: bool, last: bool) -> None:
    assert is_exact(answer, reference) == exact
    assert ends_with_number(answer, reference) == last


def roles(*names: str) -> dict[str, Any]:
    return {"messages": [{"role": name, "content": "x"} for name in names]}


ONE_RECORD: dict[str, Any] = {"messages": ONE, "who": "ann", "task": 1}

BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "tools of texts": (ONE_RECORD | {"tools": ["add"]}, {}, r"record 2, has the tools .*add.*: expected a list of objects"),
    "tools that are no JSON": (ONE_RECORD | {"tools": "[{"}, {}, r"record 2, has the tools '\[{': expected a list of objects"),
    "variables": (ONE_RECORD | {"chat_template_kwargs": "x"}, {}, "record 2, has the chat_template_kwargs 'x': expected an object"),
    "tools without template": (
        {"prompt": "x", "completion": "y", "tools": [{}]},
        {},
        "record 2, has tools for a chat template, but texts without one",
    ),
    "no answer": (roles("user"), {}, "record 2, has the roles user: it ends without an answer"),
    "empty answer": ({"instruction": "x", "output": ""}, {}, "record 2, has no answer, an assistant's message is empty"),
    "no completion": ({"prompt": "x", "completion": " "}, {}, "record 2, has no answer, its completion is empty"),
    "history": (
        {"instruction": "x", "output": "y", "history": [["a", "b"]]},
        {},
        "record 2, has a history, which no form here has",
    ),
    "order": (roles("user", "user", "assistant"), {}, "record 2, .* after user comes user, expected assistant"),
    "begin": (roles("assistant", "user", "assistant"), {}, "record 2, .* expected the user first"),
    "form": ({"text": "x"}, {}, "record 2, has text: expected messages .*, prompt and completion, or instruction"),
    "no messages": ({"messages": []}, {}, "record 2, has no messages: it ends without an answer"),
    "no list": ({"messages": "x"}, {}, "record 2, has the messages 'x': expected a list of role and content"),
    "null": ({"prompt": None, "completion": "x"}, {}, "record 2, has the prompt 'None': expected .*, or two texts"),
    "no content": ({"messages": [{"role": "user"}, ONE[1]]}, {}, "record 2, has a message of the user without content"),
    "no object": (3, {}, "record 2, is '3', expected an object"),
    "no text": ({"instruction": "x", "output": math.nan}, {}, "record 2, has no answer, an assistant's message is empty"),
    "no role": ({"messages": [{"role": None, "content": "x"}, ONE[1]]}, {}, "record 2, has the message .* expected role"),
    "no name": ({"conversations": [{"from": None, "value": "x"}]}, {}, "record 2, has the message .* expected role and content"),
    "names": ({"conversations": [{"from": ["x"], "value": "x"}]}, {}, "record 2, has the message .* expected role and content"),
    "message": ({"messages": [{"speaker": "x"}]}, {}, "record 2, has the message .* expected role and content"),
    "column": ({"q": "x"}, {"columns": {"user": "q", "assistant": "a"}}, "record 1, has messages, who, task, but no q"),
    "template": (
        roles("user", "assistant"),
        {"template": "chatlm"},
        "template='chatlm': give one of chatml, alpaca, plain, a file",
    ),
    "unmarked": (
        chats(1, 2)[0],
        {"template": FORGETFUL},
        "tokens cannot be found, .*learn to last_answer or all, or .*template",
    ),
    "refused": (
        roles("user", "assistant"),
        {"template": "{{ raise_exception('no x') }}"},
        r"is refused by the chat template \(no x\)",
    ),
    "label": (roles("user", "assistant"), {"label": "topic"}, "has the columns who, task, file, but no label 'topic'"),
    "pattern": (roles("user", "assistant"), {"remove": "("}, "is not a regular expression"),
    "nothing left": (roles("user", "assistant"), {"max_length": 9}, "chats.jsonl has nothing left to train on within max_length 9"),
    "null label": (ONE_RECORD | {"task": None}, {"label": "task"}, "record 2, has task None, as its label: expected a text"),
    "client of a list": (ONE_RECORD | {"who": ["ann"]}, {"client": "who"}, r"record 2, has who .*ann.*, as its client"),
    "column of a list": (
        {"q": ["x"], "a": "x", **ONE_RECORD},
        {"columns": {"user": "q", "assistant": "a"}, "only": True},
        "record 1, has the column q, which is a list: expected a text",
    ),
    "field of that name": (
        ONE_RECORD | {"file": "x"},
        {},
        "record 2, has a field 'file', which is reserved for the name of the file",
    ),
    "half": ({"instruction": "x", "output": "\ud800"}, {}, r"record 2, has '.ud800', half of a character: write both"),
    "half of a completion": ({"prompt": "x", "completion": "\ud800"}, {}, "record 2, has .* half of a character"),
    "blank answer": ({"instruction": "x", "output": " "}, {}, "record 2, has no answer, an assistant's message is empty"),
    "empty client": (
        {"who": "ann", "messages": [{"role": "user", "content": "q" * 200}, ONE[1]]},
        {"client": "who", "max_length": 90, "num_clients": None},
        "the client ann has no record left below max_length 90",
    ),
}


def test_a_record_of_parquet_has_null_for_all_names_of_other_forms() -> None:
    lacking = {"messages": None, "conversations": None, "prompt": None, "completion": None}
    found = conversation_of(lacking | {"instruction": "x", "input": None, "output": "y"}, None, "record 1,")
    assert found.messages == [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]


@pytest.mark.parametrize("wrong", BAD)
def test_what_is_wrong_is_one_line_with_file_and_record(wrong: str, tmp_path: Path) -> None:
    record, options, said = BAD[wrong]
    others = [] if "only" in options else chats()
    options = {name: value for name, value in options.items() if name != "only"}
    with pytest.raises(FederationError, match=said) as error:
        new(tmp_path, [*others[:1], record, *others], **options).setup()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("save", "said"),
    [
        (lambda folder: save_chat_tokenizer(folder, None), "has no chat template: set template to one of chatml, alpaca, plain"),
        (lambda folder: save_chat_tokenizer(folder, eos_token=None), "has no token for the end of a text"),
    ],
    ids=["template", "end"],
)
def test_tokenizers_that_lack_something(save: Callable[[Path], str], said: str, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "chats.jsonl", chats())
    with pytest.raises(FederationError, match=said):
        Instructions(path, save(tmp_path / "tokenizer"), num_clients=1).setup()


def test_broken_lines_are_named(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text(json.dumps(chats()[0]) + "\n{'a': 1}\n")
    with pytest.raises(FederationError, match=r"broken.jsonl, line 2, is not JSON .*, column 2.: write an object on each line"):
        Instructions(str(tmp_path / "broken.jsonl"), save_chat_tokenizer(tmp_path / "tokenizer"), num_clients=1).setup()


def test_an_object_around_all_records_is_named(tmp_path: Path) -> None:
    file = tmp_path / "wrapped.json"
    file.write_text(json.dumps({"data": chats()}, indent=1))
    said = r"wrapped.json is one object over several lines: write an object on each line, or a list of objects\.$"
    with pytest.raises(FederationError, match=said):
        list(read_records(str(file)))
    file.write_text(json.dumps({"data": chats()}, indent=1)[:-1])
    with pytest.raises(FederationError, match=r"wrapped.json, line 1, is not JSON"):
        list(read_records(str(file)))
