"""Rows of tokens of any length in files that all processes of a machine map into memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.data.batches import EXAMPLE, ROUND_UP, TARGETS, BatchTransform
from lightning_fed.data.lazy import LazyInputs
from lightning_fed.data.text.generation import IGNORED
from lightning_fed.errors import FederationError

PARTS = ("ids", "learned", "starts", "records", "cut")
"""The arrays of a folder: token ids and whether they are trained, of all rows in sequence; the start of each row and the end of the
last; the number of each row's record, and whether the row was cut off.
"""

PACKED_TO = 64
"""Packed batches have a multiple of this many tokens, so that few shapes occur."""


@dataclass(eq=False)
class TokenRows(LazyInputs):
    """Conversations as tokens. Worker processes get the name of the folder and map its files into memory.

    Args:
        folder: folder with :data:`PARTS`, written by :func:`write_rows`.
        padding: the token that pads shorter rows. It is in no mask and no target, so that it may also have another meaning.
        side: side on which rows are padded.
    """

    folder: Path
    padding: int
    side: Literal["right", "left"] = "right"

    def __getstate__(self) -> dict[str, Any]:
        """The state without mapped memory."""
        return {name: value for name, value in vars(self).items() if name in ("folder", "padding", "side")}

    @cached_property
    def parts(self) -> dict[str, NDArray[Any]]:
        """The arrays, by name.

        Raises:
            FederationError: if the files are missing.
        """
        try:
            return {name: np.load(self.folder / f"{name}.npy", mmap_mode="r") for name in PARTS}
        except OSError as error:
            raise FederationError(
                f"The tokens in {self.folder} cannot be read ({error}): on several machines, set XDG_CACHE_HOME to a folder that "
                "all of them have."
            ) from error

    def __len__(self) -> int:
        return len(self.parts["records"])

    def checksum(self, start: int = 0) -> int:
        """Of the tokens: another template, or another day that a template writes, gives other data."""
        for name in ("ids", "learned", "starts"):
            start = crc32(self.parts[name].data, start)
        return start

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Lengths of the rows, in tokens."""
        return np.diff(self.parts["starts"])

    def row(self, number: int) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Token ids of a row, and which of them are trained."""
        place = slice(*self.parts["starts"][number : number + 2])
        return self.parts["ids"][place], self.parts["learned"][place]

    def answer(self, number: int) -> list[int]:
        """Token ids of the first trained part of a row."""
        ids, learned = self.row(number)
        first = int(learned.argmax())
        rest = np.flatnonzero(~learned[first:])
        answer: list[int] = ids[first : first + int(rest[0]) if len(rest) else None].tolist()
        return answer

    def is_answer_cut(self, number: int) -> bool:
        """Whether the end of :meth:`answer` was cut off."""
        learned = self.row(number)[1]
        return bool(self.parts["cut"][number] and learned[learned.argmax() :].all())

    def read(self, rows: Tensor) -> dict[str, Tensor]:
        """A batch: ``input_ids``, ``attention_mask``, ``position_ids`` if the left is padded, and targets, ``(B, L)``, with L a
        multiple of 8; and the numbers of the rows. A token's target is the next one if that is trained, else :data:`.IGNORED`.
        """
        read = [self.row(number) for number in rows.tolist()]
        longest = -(-max((len(ids) for ids, _ in read), default=1) // ROUND_UP) * ROUND_UP
        ids = torch.full((len(read), longest), self.padding)
        mask, targets = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
        for place, (of_row, learned) in enumerate(read):
            begin = longest - len(of_row) if self.side == "left" else 0
            own = torch.from_numpy(of_row.astype(np.int64))
            ids[place, begin : begin + len(own)] = own
            mask[place, begin : begin + len(own)] = 1
            following = own[1:].where(torch.from_numpy(learned[1:].copy()), IGNORED)
            targets[place, begin : begin + len(following)] = following
        places = {"position_ids": positions_of(mask)} if self.side == "left" else {}
        return {"input_ids": ids, "attention_mask": mask, TARGETS: targets, EXAMPLE: rows} | places


def positions_of(mask: Tensor) -> Tensor:
    """Positions of tokens in their rows, ``(B, L)``, by a mask without padding between tokens; 0 left of a row."""
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


def write_rows(folder: Path, rows: Iterable[tuple[int, bool, list[int], list[bool]]]) -> None:
    """Write rows to a folder, so that readers find all of them or none. If another process was first, its rows are kept. A row has
    the number of its record, whether its end was cut off, token ids, and which are trained.
    """
    ids, learned, lengths, records, cut = [], [], [0], [], []
    for record, is_cut, of_row, mask in rows:
        cut.append(is_cut)
        ids.append(np.array(of_row, np.int32))
        learned.append(np.array(mask, np.bool_))
        lengths.append(len(of_row))
        records.append(record)
    arrays = (np.concatenate(ids), np.concatenate(learned), np.cumsum(lengths), np.array(records), np.array(cut))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent, ignore_cleanup_errors=True) as beside:
            aside = Path(beside, "rows")
            aside.mkdir()  # with the usual permissions of folders, for others who share the cache
            for name, array in zip(PARTS, arrays, strict=True):
                np.save(aside / f"{name}.npy", array)
            try:
                aside.rename(folder)
            except OSError:
                if not folder.is_dir():
                    raise
    except OSError as error:
        raise FederationError(
            f"Tokens cannot be written to {folder.parent} ({error}): set XDG_CACHE_HOME to another folder."
        ) from error


@dataclass(frozen=True)
class Packing(BatchTransform):
    """Concatenates the rows of a training batch without padding. Positions restart with each row; without an attention mask the
    transformers library uses them to keep rows apart: attention is block-diagonal. Networks that ignore them are refused
    before the first round.
    """

    def __call__(self, batch: Any, trainer: Any) -> Any:
        inputs, targets = batch
        if trainer is None or not trainer.training:
            return batch
        mask = inputs["attention_mask"].bool()
        positions = positions_of(mask)[mask]
        fill = -len(positions) % PACKED_TO
        begun = torch.arange(fill, device=positions.device)  # like another row, without trained tokens
        ids = torch.cat([inputs["input_ids"][mask], begun * 0])
        packed = {"input_ids": ids[None], "position_ids": torch.cat([positions, begun])[None]}
        return packed, torch.cat([targets[mask], begun * 0 + IGNORED])[None]
