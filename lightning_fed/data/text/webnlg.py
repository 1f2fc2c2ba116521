"""The data of the WebNLG challenge of 2017: descriptions of facts."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from lightning_fed.data.text.generation import Example, TextGeneration, grouped, reference_of
from lightning_fed.errors import FederationError, require


class WebNLG(TextGeneration):
    """The WebNLG challenge of 2017 (Gardent et al., INLG 2017): express one to seven facts of DBpedia in words.

    A source is a line like ``Aarhus : leaderName : Jacob_Bundsgaard | Aarhus_Airport : cityServed : Aarhus``, the format of LoRA's
    experiments, with the facts as modified by the challenge. The label is the category, of which the training set has 10. The test
    set has 5 more, on which no client trains: texts about these are left out. As in LoRA's experiments, references that are not
    marked as good are left out, too.

    Args:
        root: folder with the folders ``train``, ``dev`` and ``test`` (``testdata_with_lex.xml``) of the challenge's XML files.
        test_set: the set that clients are tested on; ``dev`` to choose hyperparameters.
        **kwargs: see :class:`TextGeneration`.
    """

    def __init__(self, root: str, test_set: Literal["test", "dev"] = "test", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        require(test_set in ("test", "dev"), f"Got test_set={test_set!r}: give test or dev.")
        self.root = root
        self.test_set = test_set

    def examples(self) -> tuple[list[Example], list[Example]]:
        """Training set, and the part of the test set with the same categories."""
        folder = Path(self.root).expanduser()
        train = grouped(read_webnlg(sorted((folder / "train").rglob("*.xml")), folder / "train"))
        names = [folder / "test" / "testdata_with_lex.xml"] if self.test_set == "test" else sorted((folder / "dev").rglob("*.xml"))
        test = grouped(read_webnlg([path for path in names if path.is_file()], folder / self.test_set))
        seen = {example.label for example in train}
        return train, [example for example in test if example.label in seen]


def read_webnlg(paths: Sequence[Path], folder: Path) -> Iterator[tuple[str, str, str]]:
    """Source, category and reference of each text that is marked as good. The error for no files names the folder in which they are
    expected.
    """
    require(
        len(paths) > 0,
        f"Found none of WebNLG's files in {folder.absolute()}: set --data.init_args.root to the folder that has train, dev, and "
        "test with testdata_with_lex.xml.",
    )
    for path in paths:
        try:
            entries = list(ElementTree.parse(path).iter("entry"))
        except ElementTree.ParseError as error:
            raise FederationError(f"{path} is not an XML file ({error}): get it again.") from error
        for entry in entries:
            facts = [(fact.text or "").split(" | ") for fact in entry.findall("modifiedtripleset/mtriple")]
            category = entry.get("category")
            require(
                category is not None and bool(facts) and all(len(fact) == 3 for fact in facts),
                f"{path} has an entry {entry.get('eid')} of category {category} with the facts {facts}, expected a category and "
                "facts of three parts.",
            )
            source = " | ".join(" : ".join(part.strip() for part in fact) for fact in facts)
            for text in entry.findall("lex"):
                if text.get("comment") == "good":
                    where = f"{path}, entry {entry.get('eid')}, text {text.get('lid')},"
                    yield source, str(category), reference_of(text.text, where)
