"""What most ways of packing need first: pieces as arrays, and a row of values for each turn."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise

import numpy as np

from trajpack import Trajectory

PIECE = 8192
"""Numbers of a list that are converted at a time."""
SHORT = 256
"""Tokens a sequence or list below which a way for many short ones is the faster."""


class Table:
    """Trajectories as lists of arrays, and as columns over turns."""

    def __init__(self, trajectories: Sequence[Trajectory]) -> None:
        turns = [turn for trajectory in trajectories for turn in trajectory.turns]
        earned = [value for trajectory in trajectories for value in discounted(trajectory)]
        self.ids, self._all_ids = as_arrays(
            [part for turn in turns for part in (turn.prompt_ids, turn.completion_ids)], np.int32
        )
        self.logprobs, self._all_logprobs = as_arrays(
            [turn.completion_logprobs for turn in turns], np.float32
        )
        self.pieces = np.fromiter(map(len, self.ids), np.int64, len(self.ids))
        self.lengths = self.pieces[::2] + self.pieces[1::2]
        ends = np.cumsum(self.lengths)
        self.starts = ends - self.lengths
        self.cu_seqlens = np.append(0, ends).astype(np.int32)
        self.index = np.arange(len(turns), dtype=np.int32)
        self.is_sampled = np.tile([False, True], len(turns))
        self.turns = _behind(self.index, -1)
        self.versions = _behind([turn.version_start for turn in turns], -1).astype(np.int32)
        self.returns = _behind(earned, 0.0).astype(np.float32)

    def put_ids(self, out: np.ndarray) -> None:
        """Write all ids behind each other."""
        if self._all_ids is not None:
            out[:] = self._all_ids
        elif self.ids:
            np.concatenate(self.ids, out=out, casting="safe")

    def spread_logprobs(self, out: np.ndarray, loss_mask: np.ndarray) -> np.ndarray:
        """Write each log-probability at its token's place, and zeros elsewhere."""
        if len(out) < SHORT * len(self.lengths):
            out[:] = 0
            told = self._all_logprobs
            out[loss_mask] = np.concatenate(self.logprobs) if told is None else told
        elif self.logprobs:
            silence = np.zeros(int(self.pieces.max(initial=0)), np.float32)
            both = zip(self.pieces[::2].tolist(), self.logprobs, strict=True)
            np.concatenate([part for n, c in both for part in (silence[:n], c)], out=out)
        return out


def as_arrays(
    parts: Sequence, dtype: type[np.generic]
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Return the parts as arrays; and all of them as one, where that was made on the way.

    Lists are converted by `struct.pack`, the fastest way there is, in pieces that fit the cache;
    many small ones are joined before.
    """
    if not all(isinstance(part, list) for part in parts):
        return [np.asarray(part, dtype) for part in parts], None
    sizes = list(map(len, parts))
    if sum(sizes) >= SHORT * len(parts):
        return [packed(part, dtype) for part in parts], None
    joined = packed(list(chain.from_iterable(parts)), dtype)
    return [joined[a:b] for a, b in pairwise(accumulate(sizes, initial=0))], joined


def packed(values: list, dtype: type[np.generic]) -> np.ndarray:
    """Return a list's numbers as an array."""
    code, out = np.dtype(dtype).char, np.empty(len(values), dtype)
    for begin in range(0, len(values), PIECE):
        piece = values if len(values) <= PIECE else values[begin : begin + PIECE]
        struct.pack_into(f"{len(piece)}{code}", out, 4 * begin, *piece)
    return out


def discounted(trajectory: Trajectory) -> list[float]:
    """Return the discounted return of each turn of a trajectory."""
    returns, total = [], 0.0
    for turn in reversed(trajectory.turns):
        total = turn.reward + trajectory.turn_discount * total
        returns.append(total)
    return returns[::-1]


def _behind(values, prompt):
    """Interleave: ``prompt`` for each prompt, then a turn's value for its completion."""
    values = np.asarray(values)
    both = np.full(2 * len(values), prompt, values.dtype)
    both[1::2] = values
    return both
