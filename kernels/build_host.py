"""Every per-token field on the host, run by run: what `build` does for CPU tensors.

First touch of fresh memory dominates here, so nothing is written but the outputs, and those
are taken from numpy, whose large arrays come in huge pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.runs import Run

SHORT = 128
"""Mean stretch below which one gather is faster than a copy for each stretch (measured)."""


def build_on_host(
    words: torch.Tensor, runs: torch.Tensor, turn_returns: torch.Tensor, num_tokens: int
) -> list[torch.Tensor]:
    """Write the fields of `trajpack.kernels.build.TokenFields`, in their order."""
    stream, table, earned = words.numpy(), runs.numpy(), turn_returns.numpy()
    lengths = np.diff(table[:, Run.START])
    _check_ends(table, lengths, num_tokens)
    rows, lengths = table[:-1][lengths > 0], lengths[lengths > 0]
    turns = rows[:, Run.TURN]
    generated = turns >= 0
    returns = np.zeros(len(rows), np.float32)
    returns[generated] = earned[turns[generated]]
    loss_mask = np.repeat(generated, lengths)

    input_ids = np.empty(num_tokens, np.int64)
    position_ids = np.empty(num_tokens, np.int64)
    heads, spans = _joined(rows, lengths)
    _copy(input_ids, heads[:, Run.START], stream, heads[:, Run.SOURCE], spans)
    positions = np.arange((heads[:, Run.POSITION] + spans).max(initial=0))
    _copy(position_ids, heads[:, Run.START], positions, heads[:, Run.POSITION], spans)
    logprobs = np.zeros(num_tokens, np.float32)
    _copy(
        logprobs,
        rows[generated, Run.START],
        stream.view(np.float32),
        rows[generated, Run.LOGPROB],
        lengths[generated],
    )
    fields = (
        input_ids,
        position_ids,
        np.repeat(rows[:, Run.SEQUENCE], lengths),
        np.repeat(turns, lengths),
        ~loss_mask,
        loss_mask,
        logprobs,
        np.repeat(rows[:, Run.VERSION], lengths),
        np.repeat(returns, lengths),
    )
    return [torch.from_numpy(field) for field in fields]


def _check_ends(
    table: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32], num_tokens: int
) -> None:
    first, last = table[0, Run.START], table[-1, Run.START]
    if first != 0 or last != num_tokens or (lengths < 0).any():
        raise ValueError(
            f"build: runs must go from 0 to num_tokens {num_tokens} and never back, they go "
            f"from {first} to {last}"
        )


def _joined(
    rows: npt.NDArray[np.int32], lengths: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Join runs that go on where the one before ends, in the stream and in their sequence."""
    both = [Run.SOURCE, Run.POSITION]
    continues = (rows[1:, both] == rows[:-1, both] + lengths[:-1, None]).all(1)
    heads = np.flatnonzero(np.append(np.ones(min(len(rows), 1), np.bool_), ~continues))
    return rows[heads], np.add.reduceat(lengths, heads) if heads.size else lengths


def _copy(
    out: npt.NDArray[Any],
    starts: npt.NDArray[np.int32],
    source: npt.NDArray[Any],
    begins: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int32],
) -> None:
    """Copy ``source[begin : begin + length]`` to ``out[start:]`` for each stretch."""
    if lengths.size and lengths.sum() < SHORT * lengths.size:
        index = np.arange(lengths.sum(), dtype=np.int64)
        index -= np.repeat(np.cumsum(lengths) - lengths, lengths)
        values = source[index + np.repeat(begins, lengths)]
        out[index + np.repeat(starts, lengths)] = values
        return
    for start, begin, length in zip(
        starts.tolist(), begins.tolist(), lengths.tolist(), strict=True
    ):
        out[start : start + length] = source[begin : begin + length]
