"""A tokenizer that knows few words, a few rows in the format of each of GLUE's tasks, and questions in that of SQuAD."""

import json
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "dog", "barks", "cat", "naps", ",", '"']
BERT_INPUTS = ["input_ids", "token_type_ids", "attention_mask"]
IDS = {word: number for number, word in enumerate(WORDS)}


def save_tokenizer(folder: Path, **options: Any) -> str:
    """A tokenizer that knows few words, saved as transformers does."""
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", IDS["[SEP]"]), ("[CLS]", IDS["[CLS]"]))
    options = {"unk_token": "[UNK]", "pad_token": "[PAD]", "model_input_names": BERT_INPUTS} | options
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
    fast.save_pretrained(folder)
    return str(folder)


# One file per task with two good rows: folder, development set, content, texts, labels.
FILES = {
    "cola": ("CoLA", "dev", 'gj04\t1\t\tA "b\ngj04\t0\t*\tC d.\n', [('A "b',), ("C d.",)], [1, 0]),
    "sst2": ("SST-2", "dev", 'sentence\tlabel\n"a" b \t1\nc \t0\n', [('"a" b ',), ("c ",)], [1, 0]),
    "mrpc": (
        "MRPC",
        "dev",
        '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t12\t13\t" A\tB\n0\t2\t3\tC\tD\n',
        [('" A', "B"), ("C", "D")],
        [1, 0],
    ),
    "qqp": (
        "QQP",
        "dev",
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tA?\tB?\t0\n4\t5\t6\tcut short\n7\t8\t9\tC?\tD?\t1\n",
        [("A?", "B?"), ("C?", "D?")],
        [0, 1],
    ),
    "mnli": (
        "MNLI",
        "dev_matched",
        "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse\t"
        "sentence1\tsentence2\tlabel1\tgold_label\n"
        "0\t1\t1n\tfiction\t( a )\t( b )\t(ROOT a)\t(ROOT b)\tA\tB\tentailment\tcontradiction\n"
        "1\t2\t2e\tfiction\t( c )\t( d )\t(ROOT c)\t(ROOT d)\tC\tD\tentailment\tneutral\n",
        [("A", "B"), ("C", "D")],
        [2, 1],
    ),
    "qnli": (
        "QNLI",
        "dev",
        'index\tquestion\tsentence\tlabel\n0\tWho?\t"A".\tentailment\n1\tWhat?\tB.\tnot_entailment\n',
        [("Who?", '"A".'), ("What?", "B.")],
        [0, 1],
    ),
    "rte": (
        "RTE",
        "dev",
        "index\tsentence1\tsentence2\tlabel\n0\tA\tB\tnot_entailment\n1\tC\tD\tentailment\n",
        [("A", "B"), ("C", "D")],
        [1, 0],
    ),
}


def write_glue(task: str, root: Path, copies: int = 8) -> str:
    """Training and development file of a task with so many copies of its rows; returns ``root``."""
    folder, dev, content, _, _ = FILES[task]
    lines = content.splitlines(keepends=True)
    header, rows = ([], lines) if task == "cola" else (lines[:1], lines[1:])
    (root / folder).mkdir(parents=True)
    for name in ("train", dev):
        (root / folder / f"{name}.tsv").write_text("".join(header + rows * copies))
    return str(root)


def squad_article(title: str, copies: int = 1, unanswerable: bool = False) -> dict[str, Any]:
    """Two questions per paragraph, what the dog and the cat do, or a third one: what the ox does, whom no paragraph mentions."""
    context = "the dog barks , the cat naps"
    qas = [
        {"id": f"{title}/{copy}/{animal}", "question": animal, "answers": answers}
        for copy in range(copies)
        for animal, answers in (
            ("dog", [{"text": "barks", "answer_start": 8}, {"text": "dog barks", "answer_start": 4}]),
            ("cat", [{"text": "naps", "answer_start": 24}]),
        )
    ]
    if unanswerable:
        qas = [{**qa, "is_impossible": False} for qa in qas]
        plausible = [{"text": "naps", "answer_start": 24}]
        nothing: Any = {"question": "ox", "answers": [], "plausible_answers": plausible, "is_impossible": True}
        qas += [{"id": f"{title}/{copy}/ox", **nothing} for copy in range(copies)]
    return {"title": title, "paragraphs": [{"context": context, "qas": qas}]}


def write_squad(root: Path, version: str = "1.1", copies: int = 8) -> str:
    """Training and development file about 3 and 2 topics, each with so many copies of its questions; returns ``root``."""
    root.mkdir(parents=True, exist_ok=True)
    for part, topics in (("train", "ABC"), ("dev", "DE")):
        articles = [squad_article(title, copies, version == "2.0") for title in topics]
        (root / f"{part}-v{version}.json").write_text(json.dumps({"version": version, "data": articles}))
    return str(root)


# -------------------------------------------------------------------------------------------------------------- generation

SENTENCES = ["{name} is {kind} .", "the {kind} {name} is near the river , by the old bridge .", "{kind} : {name} ."]
KINDS = ["pub", "coffee shop", "restaurant"]
TRAINED, TESTED = ["Alimentum", "Blue Spice", "Cocum", "Zizzi"], ["Cocum", "Blue Spice"]
"""Restaurants of the training and of the test set."""

TINY_GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 40,
    "n_positions": 64,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.5,  # so that attention makes a difference
}
"""Of a language model for :func:`save_word_tokenizer`."""


def save_word_tokenizer(folder: Path) -> str:
    """A tokenizer like GPT-2's: one special token is for the beginning, the end and what is unknown, none for padding."""
    end = "<|endoftext|>"
    text = " ".join([*SENTENCES, *KINDS, *TRAINED, "name Type price area cheap riverside City Food stars a b |"])
    words = dict.fromkeys([end, *text.replace("{name}", "").replace("{kind}", "").split()])
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=end))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end, unk_token=end)
    fast.save_pretrained(folder)
    return str(folder)


def write_e2e(root: Path) -> str:
    """E2E's three files with a few restaurants, each of several kinds, of which each has several references; returns ``root``."""
    root.mkdir(parents=True, exist_ok=True)
    for file, names in (("trainset", TRAINED), ("devset", TRAINED[:1]), ("testset_w_refs", TESTED)):
        rows = [
            f'"name[{name}], eatType[{kind}], priceRange[cheap]","{sentence.format(name=name, kind=kind)}"\n'
            for name in names
            for kind in KINDS
            for sentence in SENTENCES[: 3 if file == "trainset" else 2]
        ]
        (root / f"{file}.csv").write_text("mr,ref\n" + "".join(rows))
    return str(root)


def write_webnlg(root: Path) -> str:
    """WebNLG's folders with two categories, and a third in the test set alone; returns ``root``."""

    def entry(category: str, number: int) -> str:
        facts = "".join(f"<mtriple>{category}_{fact} | stars | {number}</mtriple>" for fact in range(2))
        texts = f'<lex comment="good">{category} a</lex><lex comment="toFix">b</lex><lex comment="good">{category} b</lex>'
        original = "<originaltripleset><otriple>x | y | z</otriple></originaltripleset>"
        return f'<entry category="{category}">{original}<modifiedtripleset>{facts}</modifiedtripleset>{texts}</entry>'

    files = {"train/1triples/a.xml": ["City", "Food"], "train/2triples/b.xml": ["City"], "dev/1triples/a.xml": ["Food"]}
    files |= {"test/testdata_with_lex.xml": ["Food", "City", "Artist"], "test/testdata_no_lex.xml": ["Food"]}
    for begin, (file, categories) in enumerate(files.items()):
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = "".join(entry(category, 3 * begin + number) for category in categories for number in range(3))
        path.write_text(f"<benchmark><entries>{entries}</entries></benchmark>")
    return str(root)
