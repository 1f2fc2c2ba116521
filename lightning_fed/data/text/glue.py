"""The GLUE benchmark's classification tasks."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from lightning_fed.data.hub import load_from_hub
from lightning_fed.data.lines import existing
from lightning_fed.data.text.classification import Examples, TextClassification, read_examples
from lightning_fed.errors import require

HUB_NAME = "nyu-mll/glue"


class GlueTask(NamedTuple):
    """The files of a task.

    Args:
        folder: folder of its files.
        texts: columns of the texts.
        label: column of the label.
        classes: values of that column, in the order of the hub's numbers.
        hub_texts: columns of the texts on the hub.
        header: columns of a file without a header.
        dev: suffix of the development set's name after ``dev`` or, on the hub, ``validation``.
    """

    folder: str
    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    hub_texts: tuple[str, ...]
    header: tuple[str, ...] | None = None
    dev: str = ""


NUMBERS = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
SENTENCE = ("sentence",)
SENTENCES = ("sentence1", "sentence2")
QUESTIONS = ("question1", "question2")
QUESTION = ("question", "sentence")

GLUE_TASKS = {
    "cola": GlueTask("CoLA", SENTENCE, "label", NUMBERS, SENTENCE, header=("source", "label", "mark", "sentence")),
    "sst2": GlueTask("SST-2", SENTENCE, "label", NUMBERS, SENTENCE),
    "mrpc": GlueTask("MRPC", ("#1 String", "#2 String"), "Quality", NUMBERS, SENTENCES),
    "qqp": GlueTask("QQP", QUESTIONS, "is_duplicate", NUMBERS, QUESTIONS),
    "mnli": GlueTask(
        "MNLI", SENTENCES, "gold_label", ("entailment", "neutral", "contradiction"), ("premise", "hypothesis"), dev="_matched"
    ),
    "qnli": GlueTask("QNLI", QUESTION, "label", ENTAILMENT, QUESTION),
    "rte": GlueTask("RTE", SENTENCES, "label", ENTAILMENT, SENTENCES),
}


class GLUE(TextClassification):
    """A classification task of GLUE (Wang et al., ICLR 2019).

    The labels of GLUE's test sets are hidden. The test pool is therefore the development set (for MNLI: the matched one), on which
    most papers report; validation examples, if any, are held out of the training set.

    Args:
        task: acceptability (cola), sentiment (sst2), paraphrases (mrpc, qqp), inference (mnli, qnli, rte).
        root: folder with GLUE's folders (``CoLA``, ``SST-2``, …), each with ``train.tsv`` and ``dev.tsv`` (MNLI:
            ``dev_matched.tsv``). None: download nyu-mll/glue from the Hugging Face hub.
        split: see :class:`FederatedDataModule`; ``pooled`` joins training and development set.
        **kwargs: see :class:`TextClassification`.
    """

    def __init__(
        self,
        task: Literal["cola", "sst2", "mrpc", "qqp", "mnli", "qnli", "rte"],
        root: str | None = None,
        split: Literal["pooled", "official"] = "official",
        **kwargs: Any,
    ) -> None:
        super().__init__(split=split, **kwargs)
        require(task in GLUE_TASKS, f"Got task={task!r}: give one of {', '.join(GLUE_TASKS)}.")
        self.task = task
        self.root = root
        self.num_classes = len(GLUE_TASKS[task].classes)
        self.class_names = None if GLUE_TASKS[task].classes is NUMBERS else GLUE_TASKS[task].classes

    def examples(self) -> tuple[Examples, Examples]:
        """Training and development set."""
        return self._from_hub() if self.root is None else self._from_files(self.root)

    def _from_files(self, root: str) -> tuple[Examples, Examples]:
        task = GLUE_TASKS[self.task]
        names = [f"{task.folder}/train.tsv", f"{task.folder}/dev{task.dev}.tsv"]
        remedy = f"set --data.init_args.root to the folder that has {' and '.join(names)}, or leave it out to download them"
        files = [existing(Path(root, name), remedy) for name in names]
        # A few lines of QQP lack columns; GLUE's readers skip them.
        columns, skip_short = (task.texts, task.label, task.classes, task.header), self.task == "qqp"
        train, dev = (read_examples(file, *columns, skip_short) for file in files)
        return train, dev

    def _from_hub(self) -> tuple[Examples, Examples]:
        task = GLUE_TASKS[self.task]
        sets = load_from_hub(HUB_NAME, self.task, extra="nlp")
        train, dev = (
            (list(zip(*(list(rows[name]) for name in task.hub_texts), strict=True)), list(rows["label"]))
            for rows in (sets["train"], sets[f"validation{task.dev}"])
        )
        return train, dev
