"""Merge the calls of one session into training rows: numpy alone, to copy into a gateway.

A call is what a model saw and what it sampled. It extends the longest row whose tokens are all a
prefix of its prompt, the latest on a tie, and stores only what is new; where there is none, it
begins a row. So a conversation of n turns is one row of O(n) tokens in which each sampled token is
trained once, and sub-agents, branches and rewritten histories are rows of their own. These are the
rows of `trajpack.pack` with the layout "merged", which a test compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Call(NamedTuple):
    """Token ids of a prompt, the ids that were sampled, and their log-probabilities."""

    prompt_ids: Sequence[int] | npt.NDArray[np.integer]
    completion_ids: Sequence[int] | npt.NDArray[np.integer]
    logprobs: Sequence[float] | npt.NDArray[np.floating]


class Row(NamedTuple):
    """One sequence to train on.

    Attributes:
        input_ids: int32 [tokens].
        loss_mask: bool [tokens]; True where a token was sampled.
        logprobs: float32 [tokens]; 0 where a token was not sampled.
        call_index: int32 [tokens]; the call that sampled a token, -1 where none did.
    """

    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    call_index: npt.NDArray[np.int32]


class GrowingRow:
    """A row that calls extend. Its memory doubles, so that a token is copied a few times."""

    def __init__(self) -> None:
        self.length = 0
        self.stored = Row(*(np.empty(0, dtype) for dtype in ("i4", "?", "f4", "i4")))

    def is_prefix_of(self, prompt: npt.NDArray[np.int32]) -> bool:
        """Tell whether a prompt begins with all tokens of the row."""
        if self.length > len(prompt):
            return False
        own = self.stored.input_ids[: self.length]
        last = self.length - 1  # where most prompts differ that do at all
        return own[last] == prompt[last] and bool(np.array_equal(own, prompt[: self.length]))

    def append(self, index: int, prompt: npt.NDArray[np.int32], call: Call) -> None:
        """Append the new tokens of a prompt, and what was sampled behind it."""
        begin, middle = self.length, len(prompt)
        sampled = token_ids(index, call.completion_ids)
        end = middle + len(sampled)
        if end > len(self.stored.input_ids):
            self.stored = Row(*(np.resize(column, 2 * end) for column in self.stored))
        ids, mask, logprobs, calls = self.stored
        ids[begin:middle], ids[middle:end] = prompt[begin:], sampled
        mask[begin:middle], mask[middle:end] = False, True
        logprobs[begin:middle], logprobs[middle:end] = 0, call.logprobs
        calls[begin:middle], calls[middle:end] = -1, index
        self.length = end


def token_ids(index: int, values: Sequence[int] | npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Return token ids as int32."""
    ids = np.asarray(values)
    limit = 2**31
    if len(ids) and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= limit):
        raise ValueError(f"call {index}: token ids must be integers from 0 to 2^31 - 1, got {ids}")
    return ids.astype(np.int32)


def merge(calls: Iterable[Call]) -> list[Row]:
    """Return the rows of one session's calls, which come in the order in which they were made.

    Raises:
        ValueError: If a prompt is empty, ids are no token ids, or a call has not one
            log-probability for each sampled id.
    """
    rows: list[GrowingRow] = []
    for index, call in enumerate(calls):
        prompt = token_ids(index, call.prompt_ids)
        if not len(prompt) or len(call.completion_ids) != len(call.logprobs):
            counts = len(prompt), len(call.completion_ids), len(call.logprobs)
            raise ValueError(f"call {index}: prompt, sampled ids and log-probabilities: {counts}")
        longest = None
        for row in rows:  # a later row of the same length comes last
            longer = longest is None or row.length >= longest.length
            if longer and row.is_prefix_of(prompt):
                longest = row
        if longest is None:
            rows.append(longest := GrowingRow())
        longest.append(index, prompt, call)
    return [Row(*(column[: row.length] for column in row.stored)) for row in rows]


if __name__ == "__main__":
    question, wrong, feedback = [11, 12, 13], [21, 22], [31]
    session = [
        Call(question, wrong, [-0.7, -0.1]),
        Call(question + wrong + feedback, [23, 22], [-0.4, -0.1]),
        Call([41, 42], [51], [-0.2]),  # a sub-agent
    ]
    for row in merge(session):
        print(row.input_ids.tolist(), row.loss_mask.astype(int).tolist())
