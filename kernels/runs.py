"""The run table: stretches of tokens that share all but their index."""

from __future__ import annotations

from enum import IntEnum


class Run(IntEnum):
    """Columns of the run table. A run is a stretch of tokens that share all but their index."""

    START = 0
    """Index of the run's first token in the batch; the next row's START ends the run."""
    SOURCE = 1
    """Index of its first token id in the word stream."""
    LOGPROB = 2
    """Index of its first log-probability in the word stream; unread where not generated."""
    POSITION = 3
    """Position of its first token in its sequence."""
    SEQUENCE = 4
    """Sequence it belongs to."""
    TURN = 5
    """Turn that generated it, or -1."""
    VERSION = 6
    """Policy version that generated it, or -1."""


RUN_WIDTH = 8
"""int32 words in a row of the run table: one 32-byte sector, the last word unused."""


MAX_TOKENS = 2**31 - 1024
"""Tokens of a batch at most: the kernel counts them in whole tiles of 1,024, in int32."""
