"""A tokenizer that knows few words, and a few rows in the format of each of GLUE's tasks."""

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
