"""The run table: stretches of a sequence, each a context and what was generated after it."""

from __future__ import annotations

from enum import IntEnum


class Run(IntEnum):
    """Columns of the run table.

    A run is a stretch of one sequence: first its context, which nobody generated there, then
    what one version of the policy generated in one turn. Either may be empty.
    """

    START = 0
    """Index of the run's first token in the batch; the next row's START ends the run."""
    SOURCE = 1
    """Index of its first token id in the word stream; negative where the run is padding, whose
    token ids are 0."""
    GENERATED = 2
    """Tokens of its context, 0 or more: how far behind START generation begins. At least the
    run's length where nothing was generated."""
    LOGPROB = 3
    """Index of its first log-probability, that of its first generated token, in the stream."""
    POSITION = 4
    """Position of its first token in its sequence."""
    SEQUENCE = 5
    """Sequence it belongs to."""
    TURN = 6
    """Turn that generated it."""
    VERSION = 7
    """Policy version that generated it."""


RUN_WIDTH = 8
"""int32 words in a row of the run table: one 32-byte sector."""


TILE = 1024
"""Tokens that a program of the kernel writes; memory for fields comes in whole tiles."""

MAX_TOKENS = 2**31 - TILE
"""Tokens of a batch at most: the kernel counts them in whole tiles, in int32."""


def in_tiles(count: int) -> int:
    """Return ``count`` rounded up to whole tiles."""
    return -(-count // TILE) * TILE
