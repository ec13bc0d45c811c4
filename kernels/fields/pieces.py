"""Table of pieces, the tensors that `gather_words` concatenates: one row per tensor."""

from __future__ import annotations

from enum import IntEnum


class Piece(IntEnum):
    """Columns of the table."""

    ADDRESS = 0
    """Address of the tensor's first entry on the device."""
    START = 1
    """Index of its first word in the stream; the next row's START ends it."""
    KIND = 2
    """Conversion of its entries, a `Kind`."""


PIECE_WIDTH = 4
"""int64 numbers in a row: one 32-byte sector, the last unused."""


class Kind(IntEnum):
    """Conversion of an entry to a word."""

    WORD = 0
    """None: int32 and float32."""
    INT64 = 1
    """Low 32 bits."""
    INT16 = 2
    INT8 = 3
    UINT8 = 4
    """bool too."""
    FLOAT64 = 5
    """Rounded to float32."""
    BFLOAT16 = 6
    FLOAT16 = 7
