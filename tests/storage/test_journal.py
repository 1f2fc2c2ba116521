"""The journal only gets longer, and a checkpoint's part of it is whole or refused."""

import math
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_fed.errors import FederationError
from lightning_fed.storage.journal import EMPTY, Extent, Journal

PATH = Path("journal.jsonl")
ENTRIES = [
    {"round": round, "history": [{"accuracy": 0.1 * round}], "clients": {str(round): {"file": "é"}}} for round in range(1, 4)
]


def written(entries: list[dict[str, Any]], extent: Extent = EMPTY) -> list[Extent]:
    """Append entries; the extent after each."""
    journal = Journal(PATH, extent)
    return [journal.append(entry) for entry in entries]


def test_what_is_appended_comes_back() -> None:
    extent = written(ENTRIES)[-1]
    assert Journal(PATH, extent).read() == ENTRIES


def test_floats_come_back_bit_for_bit() -> None:
    values = [0.1 + 0.2, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, 1 / 3]
    [extent] = written([{"values": [*values, math.nan]}])
    [entry] = Journal(PATH, extent).read()
    assert [value.hex() for value in entry["values"]] == [value.hex() for value in [*values, math.nan]]


def test_an_extent_is_the_length_and_the_checksum_of_all_so_far() -> None:
    journal = Journal(PATH)
    assert journal.extent == EMPTY
    for entry in ENTRIES:
        before = PATH.read_bytes() if PATH.exists() else b""
        extent = journal.append(entry)
        data = PATH.read_bytes()
        assert data.startswith(before)
        assert data.endswith(b"\n")
        assert extent == journal.extent == (len(data), zlib.crc32(data))


def test_an_earlier_extent_reads_what_was_there_then() -> None:
    for count, extent in enumerate(written(ENTRIES), start=1):
        assert Journal(PATH, extent).read() == ENTRIES[:count]


def test_reading_nothing_takes_no_file_for_granted() -> None:
    with pytest.raises(FederationError, match=r"journal\.jsonl is missing"):
        Journal(PATH).read()


@pytest.mark.parametrize("tail", [b"{", b'{"round": 9}\n', b"x" * 1000], ids=["short", "line", "long"])
def test_the_tail_of_a_killed_run_is_cut_off(tail: bytes) -> None:
    first, second = written(ENTRIES[:2])
    for extent, kept in ((second, ENTRIES[:2]), (first, ENTRIES[:1]), (EMPTY, [])):
        with PATH.open("ab") as file:
            file.write(tail)
        assert Journal(PATH, extent).read() == kept
        [after] = written(ENTRIES[2:], extent)
        assert PATH.stat().st_size == after.bytes
        assert Journal(PATH, after).read() == [*kept, ENTRIES[2]]


def test_a_line_that_was_not_synced_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(PATH)
    extent = journal.append(ENTRIES[0])
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: os.close(-1))
        with pytest.raises(OSError, match="Bad file descriptor"):
            journal.append(ENTRIES[1] | {"more": "x" * 100})
    assert journal.extent == extent
    assert Journal(PATH, journal.append(ENTRIES[2])).read() == [ENTRIES[0], ENTRIES[2]]


def test_a_line_is_on_the_disk_before_its_extent_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append((os.fstat(descriptor).st_ino, os.fstat(descriptor).st_size)))
    extents = written(ENTRIES)
    assert synced == [(PATH.stat().st_ino, extent.bytes) for extent in extents]


def test_what_lies_behind_an_extent_may_be_damaged() -> None:
    first, *_ = written(ENTRIES)
    data = PATH.read_bytes()
    PATH.write_bytes(data[: first.bytes] + bytes(len(data) - first.bytes))
    assert Journal(PATH, first).read() == ENTRIES[:1]


def shorten(data: bytes) -> bytes:
    return data[:-1]


def flip_first(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


def flip_last(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def zero(data: bytes) -> bytes:
    return bytes(len(data))


def empty(data: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("harm", [shorten, flip_first, flip_last, zero, empty])
def test_a_damaged_prefix_is_refused(harm: Callable[[bytes], bytes]) -> None:
    extent = written(ENTRIES)[-1]
    PATH.write_bytes(harm(PATH.read_bytes()))
    with pytest.raises(FederationError, match=rf"journal\.jsonl is damaged \(\d+ bytes, {extent.bytes} were written\)"):
        Journal(PATH, extent).read()


def test_a_prefix_damaged_after_it_was_read_is_refused_with_all_that_follows() -> None:
    first, *_ = written(ENTRIES[:1])
    PATH.write_bytes(flip_first(PATH.read_bytes()))
    [after] = written(ENTRIES[1:2], first)
    with pytest.raises(FederationError, match=r"journal\.jsonl is damaged"):
        Journal(PATH, after).read()
