"""Recovery of episodes from a damaged SQLite file, page by page."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from trajpack.packing.token_fields import TokenField
from trajpack.packing.trajectory_log.database import (
    PAGE_BYTES,
    LogFile,
    check_regular,
    declared_fields,
)
from trajpack.packing.trajectory_log.options import DamagedLogError
from trajpack.packing.trajectory_log.records import RECORD_MARK, Record, decoded

_TABLE_LEAF = 13
"""First byte of a page with rows of a table."""


def salvage(source: Path, target: Path, fields: Sequence[TokenField] | None) -> None:
    """Write a new log with the episodes of a damaged one whose checksum is right, in order.

    Rows are recognised by the form of their pages (https://www.sqlite.org/fileformat2.html),
    whatever the rest of the file says. See `TrajectoryLog.salvage`.
    """
    check_regular(source)
    if fields is None:
        described = (one for one in _last_columns(source) if one.startswith(b'{"format": '))
        fields = declared_fields(source, next(described, b"null"))
    known = tuple(fields)

    def records() -> Iterator[Record]:
        for value in _last_columns(source):
            if value.startswith(RECORD_MARK):
                try:
                    yield decoded(value, known)
                except DamagedLogError as error:
                    warnings.warn(f"1 episode of {source} is damaged: {error}", stacklevel=6)

    LogFile.create(target, known, records())


def _last_columns(path: Path) -> Iterator[bytes]:
    """Yield the last column of every row of a file, if it is a blob."""
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        for number in range(1, num_bytes // PAGE_BYTES + 1):
            page = _page(file, number)
            begin = 100 if number == 1 else 0
            count = int.from_bytes(page[begin + 3 : begin + 5]) if page[begin] == _TABLE_LEAF else 0
            for place in range(begin + 8, min(begin + 8 + 2 * count, PAGE_BYTES), 2):
                try:
                    cell = page[int.from_bytes(page[place : place + 2]) :]
                    row = _joined_row(file, cell, num_bytes)
                    end, at = _varint(row, 0)
                    kind = 0
                    while at < end:
                        kind, at = _varint(row, at)
                    if kind >= 12 and kind % 2 == 0:
                        yield row[len(row) - (kind - 12) // 2 :]
                except (IndexError, ValueError):  # the page is damaged, or of another kind
                    continue


def _page(file: BinaryIO, number: int) -> bytes:
    file.seek((number - 1) * PAGE_BYTES)
    return file.read(PAGE_BYTES)


def _joined_row(file: BinaryIO, cell: bytes, num_bytes: int) -> bytes:
    """Return a row that begins in a page and may continue on a chain of overflow pages."""
    size, begin = _varint(cell, 0)
    _, begin = _varint(cell, begin)
    local = size
    if size > PAGE_BYTES - 35:
        least = (PAGE_BYTES - 12) * 32 // 255 - 23
        local = least + (size - least) % (PAGE_BYTES - 4)
        local = local if local <= PAGE_BYTES - 35 else least
    if size > num_bytes:
        raise ValueError("a row is longer than the file")
    end = begin + local
    pieces, left, following = [cell[begin:end]], size - local, cell[end : end + 4]
    while left > 0:
        page = _page(file, max(1, int.from_bytes(following)))
        following = page[:4]
        pieces.append(page[4 : 4 + left])
        left -= PAGE_BYTES - 4
    return b"".join(pieces)


def _varint(content: bytes, place: int) -> tuple[int, int]:
    """Return an integer of variable length, and the place behind it."""
    value = 0
    for end in range(place + 1, place + 9):
        value = value << 7 | content[end - 1] & 0x7F
        if content[end - 1] < 0x80:
            return value, end
    return value << 8 | content[place + 8], place + 9
