"""Datasets of the Hugging Face library, from a folder, files or the hub."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch

from lightning_fed.data.batches import Inputs
from lightning_fed.data.checked import as_tensor
from lightning_fed.data.files.columns import refuse_missing
from lightning_fed.data.files.table import ROLES, Table, TableData, check_columns
from lightning_fed.data.hub import is_saved, load_from_hub, load_saved, optional, quiet_datasets, unloadable
from lightning_fed.data.split import TRAIN
from lightning_fed.data.text.classification import load_tokenizer, tokenised
from lightning_fed.data.vision.decode import IMAGENET_MEAN, IMAGENET_STD, LazyImages, image_errors
from lightning_fed.errors import FederationError, one_line, require
from lightning_fed.options import PositiveInt, require_from

FORMATS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
"""The loader for each file suffix."""

SOME = 1000
"""Number of images whose sizes are looked up at a time."""


@dataclass(eq=False)
class DatasetImages(LazyImages):
    """Images in a column of a dataset.

    Args:
        table: the dataset, with this column only.
    """

    table: Any

    def checksum(self, start: int = 0) -> int:
        """Of the number of bytes of each image, as it is stored."""
        start, compute, before = crc32(str(self.size).encode(), start), optional("pyarrow.compute", "hub"), 0
        for part in self.table.with_format("arrow").iter(SOME):
            images = part.column(0).combine_chunks()
            sizes = compute.binary_length(images.field("bytes")).to_pylist()
            paths = images.field("path").to_pylist()  # images without bytes stayed in their files
            bytes_of = []
            for row, (size, path) in enumerate(zip(sizes, paths, strict=True), start=before):
                with image_errors(f"the image {self.place(row)}"):
                    bytes_of.append(Path(path).stat().st_size if size is None else size)
            before += len(sizes)
            start = crc32(str(bytes_of).encode(), start)
        return start


@dataclass(frozen=True)
class NamedColumn:
    """A column of the library's type ``ClassLabel``, which has numbers, as names; a missing one stays None or negative.

    Args:
        numbers: the column.
        names: by number.
    """

    numbers: Any
    names: Sequence[str]

    def __getitem__(self, rows: slice) -> list[Any]:
        return [self.names[number] if number is not None and number >= 0 else number for number in self.numbers[rows]]


class HFDataset(TableData):
    """A dataset of the Hugging Face library (``pip install "lightning-fed[hub]"``): images, texts or numbers.

    Its sets are found by their names, ``train``, ``validation`` and ``test``. Images are decoded when a batch needs them, and the
    table stays on disk. Texts are tokenized once. Class names come from a target of the library's type ``ClassLabel``, or from the
    target's strings. Every column of single values can name an example's client.

    Args:
        path: a folder written by ``save_to_disk``; a file, or a folder of files, in CSV, JSON, Parquet or Arrow; else a name on the
            hub, ``owner/name``. Files are copied into the library's cache.
        input: column that a network gets: an image, a text or numbers; or two columns of texts; or several of single numbers.
        target: column to predict.
        config: configuration of a hub dataset, if it has several.
        test: name of the test set.
        tokenizer: for texts, a folder or a name on the hub.
        max_length: maximum number of tokens of a text or pair of texts.
        image_size: height and width to which images are resized, bilinearly.
        in_memory: decode all images at once and keep them, which is faster over several rounds if they fit into memory.
        mean: mean of an image's pixels in [0, 1], per channel. Default: ImageNet's.
        std: standard deviation, in the same form. Default: ImageNet's.
        **kwargs: see :class:`TableData`.
    """

    def __init__(
        self,
        path: str,
        input: list[str] | str,
        target: str,
        client: str | None = None,
        config: str | None = None,
        test: str = "test",
        tokenizer: str | None = None,
        max_length: PositiveInt = 128,
        image_size: PositiveInt = 32,
        in_memory: bool = False,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
        **kwargs: Any,
    ) -> None:
        super().__init__(client=client, **kwargs)
        require_from(1, max_length=max_length, image_size=image_size)
        self.path = path
        self.input = [input] if isinstance(input, str) else input
        self.target = target
        check_columns(self.input, [target])
        self.config = config
        self.test = test
        self.tokenizer = tokenizer
        self.max_length: int = max_length
        self.image_size: int = image_size
        self.in_memory = in_memory
        self.mean, self.std = tuple(mean), tuple(std)

    def read(self) -> Table:
        found = self._sets()
        with quiet_datasets() as datasets:
            try:
                rows = datasets.concatenate_datasets(list(found.values()))
            except ValueError as error:
                raise FederationError(
                    f"The sets {', '.join(found)} of {self.path} have different columns ({one_line(error)}): give them the same."
                ) from error
            lacking = [name for name in (*self.input, self.target) if name not in rows.features]
            require(
                not lacking,
                f"{self.path} has the columns {', '.join(rows.features)}, but no {', '.join(lacking)}: check input and target.",
            )
            feature = rows.features[self.target]
            names = list(feature.names) if isinstance(feature, datasets.ClassLabel) else None
            single = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Value | datasets.ClassLabel)]
            require(
                self.target in single, f"The target {self.target!r} of {self.path} is {feature}: expected one class per example."
            )
            sets = None if len(found) == 1 else np.repeat(list(found), [len(of_set) for of_set in found.values()])
            columns = {name: rows[name] for name in single}  # each is read on demand
            named = {name: kind for name, kind in rows.features.items() if isinstance(kind, datasets.ClassLabel)}
            columns |= {name: NamedColumn(rows[name], kind.names) for name, kind in named.items()}
            if self.group is not None and self.group in columns:
                groups = np.array(["" if name is None else str(name) for name in columns[self.group][:]], dtype=str)
                refuse_missing(groups, self.group, "the group", lambda row: f"{self.path}, row {row},")
            return Table(self._inputs(datasets, rows), np.array(rows[self.target][:]), columns, sets, names)

    def _sets(self) -> dict[str, Any]:
        """The sets to use, by the name of their role."""
        loaded = self._loaded_sets()
        if not isinstance(loaded, Mapping):
            return {"train": loaded}
        if len(loaded) == 1:
            return {"train": next(iter(loaded.values()))}
        require(
            self.test in loaded or self.test == "test",
            f"{self.path} has the sets {', '.join(loaded)}, but no {self.test!r} to test on: set --data.init_args.test.",
        )
        found = {name: rows for name, rows in loaded.items() if name in ROLES and (name != "test" or self.test == "test")}
        if self.test in loaded:
            found.pop(self.test, None)
            found["test"] = loaded[self.test]
        require(
            any(ROLES[name] == TRAIN for name in found),
            f"{self.path} has the sets {', '.join(loaded)}, of which none is called train: give a single one, or rename them.",
        )
        return found

    def _loaded_sets(self) -> Any:
        """One set, or several by name."""
        place = Path(self.path).expanduser()
        if not place.exists():
            return load_from_hub(self.path, self.config, option="path")
        if is_saved(place):
            return load_saved(place)
        kind = "folder" if place.is_dir() else FORMATS.get(place.suffix.lower())
        require(
            kind is not None,
            f"{place} ends in {place.suffix or 'nothing'}: expected a folder that save_to_disk wrote, or a file that ends "
            f"in one of {', '.join(FORMATS)}.",
        )
        with quiet_datasets() as datasets:
            try:
                if kind == "folder":
                    return datasets.load_dataset(str(place))
                options = {"sep": "\t"} if place.suffix.lower() == ".tsv" else {}
                return datasets.load_dataset(kind, data_files=str(place), **options)
            except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
                raise unloadable(place, error) from error

    def _inputs(self, datasets: Any, rows: Any) -> Inputs:
        """The inputs of a network, depending on the type of the columns."""
        kinds = [rows.features[name] for name in self.input]
        if len(kinds) == 1 and isinstance(kinds[0], datasets.Image):
            table = rows.select_columns(self.input).cast_column(self.input[0], datasets.Image())
            images = DatasetImages(table[self.input[0]], self.image_size, self.path, table)
            return images.read(torch.arange(len(images))) if self.in_memory else images
        if all(isinstance(kind, datasets.Value) and kind.dtype in ("string", "large_string") for kind in kinds):
            require(len(kinds) <= 2, f"Got {len(kinds)} columns of texts: give one or two.")
            require(
                self.tokenizer is not None,
                f"The input {', '.join(self.input)} of {self.path} is text: set --data.init_args.tokenizer to that of the network.",
            )
            texts = list(zip(*(rows[name][:] for name in self.input), strict=True))
            for row, parts in enumerate(texts):
                require(None not in parts, f"{self.path}, row {row}, has no text in {' or '.join(self.input)}: leave the row out.")
            return tokenised(texts, load_tokenizer(str(self.tokenizer)), self.max_length)
        try:
            columns = [np.array(rows.with_format("numpy")[name][:]) for name in self.input]
            numbers = columns[0] if len(columns) == 1 and columns[0].ndim > 1 else np.stack(columns, axis=1)
            if numbers.dtype.kind in "mM":  # dates and durations, which NumPy would convert to a huge count of nanoseconds
                raise TypeError
            if numbers.dtype.kind != "f":
                numbers = numbers.astype(np.float32 if numbers.itemsize < 4 else np.float64)
            names = self.input if len(self.input) == numbers.shape[-1] else None
            return as_tensor(numbers, f"inputs of {self.path}", names)
        except (TypeError, ValueError) as error:
            raise FederationError(
                f"The input {', '.join(self.input)} of {self.path} is {', '.join(map(str, kinds))}: expected an image, one or two "
                "texts, or numbers of one shape."
            ) from error
