"""Arrays in NumPy files and tensors in PyTorch files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.data.checked import as_tensor
from lightning_fed.data.files.columns import FILE, names_of
from lightning_fed.data.files.table import Table, TableData, sets_of
from lightning_fed.data.vision.images import resize
from lightning_fed.errors import FederationError, one_line, require
from lightning_fed.options import PositiveInt

ENDINGS = (".npz", ".pt", ".pth")
SETS = ("train", "val", "test")
NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)


class ArrayFiles(TableData):
    """Arrays by name, as ``numpy.savez`` writes them (``.npz``), or tensors by name, as ``torch.save`` writes a dict of them
    (``.pt``).

    Sets may be separate arrays: ``train_images`` and ``train_labels``, or ``images`` and ``labels``, optionally ``val_…`` and
    ``test_…``, as in MedMNIST's files. Every other array with a value per example is a column. So is ``file``, the name of an
    example's file, see :data:`.columns.FILE`: with ``client: file`` each file is a client.

    Args:
        path: a file, or a folder with ``.npz``, ``.pt`` or ``.pth`` files.
        input: name of the inputs, in the forms that :class:`InMemory` takes.
        target: name of the targets, of shape (N,) or (N, 1).
        test_path: an official test set, in the same form.
        image_size: height and width to which byte images are resized, bilinearly; grey images get three equal channels. None: they
            stay as they are.
        mean: mean of byte images, scaled to [0, 1], per channel or for all.
        std: standard deviation, in the same form.
        **kwargs: see :class:`TableData`.
    """

    def __init__(
        self,
        path: str,
        input: str = "images",
        target: str = "labels",
        test_path: str | None = None,
        image_size: PositiveInt | None = None,
        mean: tuple[float, ...] = (0.0,),
        std: tuple[float, ...] = (1.0,),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path = path
        self.input = input
        self.target = target
        self.test_path = test_path
        self.image_size: int | None = image_size
        self.mean, self.std = tuple(mean), tuple(std)

    def read(self) -> Table:
        files, sets = sets_of(self.path, self.test_path, ENDINGS)
        tables = [
            self._table_of(file, called, of_prefix, prefix, of_set)
            for file, called, of_set in zip(files, names_of(files, sets), sets or ["train"] * len(files), strict=True)
            for prefix, of_prefix in self._by_prefix(file, load_arrays(file)).items()
        ]
        first = tables[0]
        same = set(first).intersection(*map(set, tables))
        for table in tables:
            kinds = [f"{of[self.input].dtype} of shape {of[self.input].shape[1:]}" for of in (first, table)]
            places = " and ".join(map(_file, (first, table)))
            require(
                kinds[0] == kinds[1],
                f"{self.path} has {self.input} of {kinds[0]} and of {kinds[1]}, in {places}: give examples of one kind and size.",
            )
        for name in filter(None, (self.owner_column, self.group, self.split_column)):
            lacking = [f"{''.join(table['set'][:1])} (in {_file(table)})" for table in tables if name not in table]
            require(
                len(lacking) in (0, len(tables)),
                f"{self.path} has no array {name} in the set {', '.join(lacking)}, as it has in others: give one for each set.",
            )
        joined = {name: np.concatenate([table[name] for table in tables]) for name in first if name in same}
        inputs = as_tensor(joined.pop(self.input), f"{self.input} of {self.path}")
        is_bytes, kind = inputs.dtype == torch.uint8, f"{inputs.dtype} of shape {tuple(inputs.shape)}"
        sized = ("image_size", self.image_size, None, is_bytes and inputs.dim() == 4)
        for name, value, usual, has_effect in (sized, ("mean", self.mean, (0.0,), is_bytes), ("std", self.std, (1.0,), is_bytes)):
            require(
                has_effect or value == usual,
                f"Got {name}={value}, but {self.input} is {kind}: images are bytes. Leave {name} out.",
            )
        if self.image_size is not None:
            channels = inputs.shape[1]
            require(
                channels in (1, 3),
                f"Got image_size={self.image_size}, but {self.input} have {channels} channels: give grey or colour images, without "
                "opacity, or leave image_size out.",
            )
            inputs = resize(inputs, self.image_size)
        found = joined.pop("set")
        return Table(inputs, joined.pop(self.target), joined, None if set(found.tolist()) == {"train"} else found)

    def _by_prefix(self, file: Path, arrays: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, NDArray[Any]]]:
        """The arrays of each set, by the prefix of their names, which is empty for a single set and for a training set."""
        prefixes = ["", *(f"{name}_" for name in SETS)]
        found = [prefix for prefix in prefixes if {f"{prefix}{self.input}", f"{prefix}{self.target}"} <= arrays.keys()]
        require(
            len(found) > 0,
            f"{file} has the arrays {', '.join(arrays)}, but no {self.input} and {self.target}, nor train_{self.input} and "
            f"train_{self.target}: set --data.init_args.input and target.",
        )
        require(
            not {"", "train_"} <= {*found},
            f"{file} has {self.input} and train_{self.input}, which are both for training: take one out, or rename it.",
        )
        longest = {name: next((prefix for prefix in reversed(found) if name.startswith(prefix)), None) for name in arrays}
        return {prefix: {name: values for name, values in arrays.items() if longest[name] == prefix} for prefix in found}

    def _table_of(
        self, file: Path, called: str, arrays: Mapping[str, NDArray[Any]], prefix: str, of_file: str
    ) -> dict[str, NDArray[Any]]:
        """The arrays of a set that have a value per example."""
        given = arrays[f"{prefix}{self.input}"]
        require(given.ndim > 0, f"{file} has a single number as {prefix}{self.input}: give a row per example.")
        size = len(given)
        table = {name.removeprefix(prefix): values for name, values in arrays.items() if values.ndim > 0 and len(values) == size}
        taken = next((name for name in (FILE, "set") if name in table), None)
        require(taken is None, f"{file} has an array {prefix}{taken}, whose name is reserved: rename it.")
        target = table.get(self.target)
        require(
            target is not None and target.size == size,
            f"{file} has {size} {prefix}{self.input} and {prefix}{self.target} of shape "
            f"{arrays[f'{prefix}{self.target}'].shape}: give one per example.",
        )
        kind = arrays[f"{prefix}{self.target}"].dtype
        require(kind.kind in "buifUS", f"{file} has {prefix}{self.target} of {kind}: give classes, as names or numbers.")
        columns = {name: values.reshape(size) for name, values in table.items() if name != self.input and values.size == size}
        of_set = prefix.removesuffix("_") or of_file
        return columns | {self.input: table[self.input], FILE: np.full(size, called), "set": np.full(size, of_set)}


def _file(table: Mapping[str, NDArray[Any]]) -> str:
    return str(table[FILE][0]) if len(table[FILE]) else "an empty file"


def load_arrays(file: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file, or its tensors as arrays, by name. Nothing else is unpickled."""
    is_numpy = file.suffix.lower() == ".npz"
    try:
        if is_numpy:
            with np.load(file, allow_pickle=False) as opened:
                found = {name: _as_text(array) for name, array in opened.items()}
        else:
            found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # those of zipfile, pickle, torch and NumPy
        raise FederationError(
            f"Could not read {file} ({type(error).__name__}: {one_line(error)}): expected the output of numpy.savez for "
            "arrays of numbers or strings, or of torch.save for a dict of tensors."
        ) from error
    if is_numpy:
        other = next((name for name, values in found.items() if not isinstance(values, np.ndarray)), None)
        require(other is None, f"{file} holds {other!r}, which is not an array: write it with numpy.savez.")
        return found
    require(
        isinstance(found, dict) and all(isinstance(value, Tensor) for value in found.values()),
        f"{file} has a {type(found).__name__}: expected a dict of tensors, as torch.save({{'images': …, 'labels': …}}, …) writes.",
    )
    other = next((name for name in found if not isinstance(name, str)), None)
    require(other is None, f"{file} has a tensor by the name {other!r}, a {type(other).__name__}: name tensors by strings.")
    return {name: _as_numpy(tensor, f"{file} has {name}") for name, tensor in found.items()}


def _as_text(array: Any) -> Any:
    """Names that are bytes, as NumPy and HDF5 store them, as text in UTF-8; anything else unchanged."""
    return np.char.decode(array, "utf-8") if isinstance(array, np.ndarray) and array.dtype.kind == "S" else array


def _as_numpy(tensor: Tensor, what: str) -> NDArray[Any]:
    """A tensor as an array. Dtypes that NumPy lacks are widened, which changes no value."""
    if tensor.is_floating_point() and tensor.dtype not in NUMPY_FLOATS:
        tensor = tensor.float()
    try:
        return tensor.numpy(force=True)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise FederationError(
            f"{what}, which cannot be converted to an array ({one_line(error):.100}): save ordinary tensors of numbers."
        ) from error
