"""Every per-token field on the host, run by run: what `build` does for CPU tensors.

First touch of fresh memory dominates here, so nothing is written but the outputs, and those
are taken from numpy, whose large arrays come in huge pages, or from the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.runs import Run
from trajpack.kernels.validation import values_to_check

SHORT = 128
"""Mean stretch below which one gather is faster than a copy for each stretch (measured)."""

PIECE = 2**17
"""Tokens of a field that are made at once and then copied to memory that was given."""

Ints = npt.NDArray[np.integer[Any]]


def build_on_host(
    words: torch.Tensor,
    runs: torch.Tensor,
    turn_returns: torch.Tensor,
    num_tokens: int,
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Write the fields of `trajpack.kernels.fields.build.TokenFields`, in their order.

    Raises:
        ValueError: If the table does not go from 0 to ``num_tokens``, or goes back.
    """
    stream, table, earned = words.numpy(), runs.numpy(), turn_returns.numpy()
    check_runs("build", runs, num_tokens)
    lengths = np.diff(table[:, Run.START])
    rows, lengths = table[:-1][lengths > 0], lengths[lengths > 0]
    context = np.clip(rows[:, Run.GENERATED], 0, lengths)
    halves = np.stack([context, lengths - context], 1).reshape(-1)
    trained = rows[context < lengths]
    returns = np.zeros(len(rows), np.float32)
    returns[context < lengths] = earned[trained[:, Run.TURN]]

    ids, positions, sequences, turns, prompt, loss, logprobs, versions, gains = (
        [None] * 9 if out is None else [field.numpy() for field in out]
    )
    loss = _repeated(loss, _alternating(False, np.ones(len(rows), np.bool_)), halves)
    fields = (
        _copied_ids(ids, stream, rows, lengths),
        _counted_positions(positions, rows, lengths),
        _repeated(sequences, rows[:, Run.SEQUENCE], lengths),
        _repeated(turns, _alternating(-1, rows[:, Run.TURN]), halves),
        np.logical_not(loss, out=prompt),
        loss,
        _scattered_logprobs(logprobs, stream.view(np.float32), rows, lengths, loss),
        _repeated(versions, _alternating(-1, rows[:, Run.VERSION]), halves),
        _repeated(gains, _alternating(0, returns), halves),
    )
    return [torch.from_numpy(field) for field in fields] if out is None else list(out)


def check_runs(op: str, runs: torch.Tensor, num_tokens: int) -> None:
    """Raise if a table of runs can be read and does not go from 0 to ``num_tokens``."""
    readable = values_to_check(runs)
    if readable is None:
        return
    table = readable.numpy()
    if (table[:-1, Run.GENERATED] < 0).any():
        raise ValueError(f"{op}: runs must have 0 or more tokens of context (Run.GENERATED)")
    first, last = table[0, Run.START], table[-1, Run.START]
    if first != 0 or last != num_tokens or (np.diff(table[:, Run.START]) < 0).any():
        raise ValueError(
            f"{op}: runs must go from 0 to num_tokens {num_tokens} and never back, they go "
            f"from {first} to {last}"
        )


def _alternating(context: int | bool, generated: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return what a run's context holds and what its generated tokens hold, run after run."""
    values = np.full(2 * len(generated), context, generated.dtype)
    values[1::2] = generated
    return values


def _repeated(
    out: npt.NDArray[Any] | None, values: npt.NDArray[Any], lengths: Ints
) -> npt.NDArray[Any]:
    if out is None:
        return np.repeat(values, lengths)
    # in pieces, so that what is copied from is still in cache
    ends = np.cumsum(lengths)
    cuts = np.searchsorted(ends, np.arange(PIECE, out.size, PIECE), side="right")
    first = begin = 0
    for last in (*cuts.tolist(), len(lengths)):
        if last > first:
            end = int(ends[last - 1])
            out[begin:end] = np.repeat(values[first:last], lengths[first:last])
            first, begin = last, end
    return out


def _copied_ids(
    out: npt.NDArray[np.int64] | None, stream: npt.NDArray[np.int32], rows: Ints, lengths: Ints
) -> npt.NDArray[np.int64]:
    out = np.empty(lengths.sum(), np.int64) if out is None else out
    heads, lengths = _joined(rows, lengths, rows[:, Run.SOURCE])
    source = heads[:, Run.SOURCE]
    if (source >= 0).all():
        copy_stretches(out, heads[:, Run.START], stream, source, lengths)
        return out
    padding = source < 0
    for start, length in zip(heads[padding, Run.START], lengths[padding], strict=True):
        out[start : start + length] = 0
    copy_stretches(out, heads[~padding, Run.START], stream, source[~padding], lengths[~padding])
    return out


def _counted_positions(
    out: npt.NDArray[np.int64] | None, rows: Ints, lengths: Ints
) -> npt.NDArray[np.int64]:
    out = np.empty(lengths.sum(), np.int64) if out is None else out
    heads, lengths = _joined(rows, lengths, rows[:, Run.POSITION])
    if out.size and out.size < SHORT * lengths.size:
        first = heads[:, Run.POSITION].astype(np.int64)
        out[:] = 1
        out[heads[:, Run.START]] = first - np.append(0, (first + lengths - 1)[:-1])
        return np.cumsum(out, out=out)
    positions = np.arange((heads[:, Run.POSITION] + lengths).max(initial=0))
    copy_stretches(out, heads[:, Run.START], positions, heads[:, Run.POSITION], lengths)
    return out


def _scattered_logprobs(
    out: npt.NDArray[np.float32] | None,
    stream: npt.NDArray[np.float32],
    rows: Ints,
    lengths: Ints,
    loss_mask: npt.NDArray[np.bool_],
) -> npt.NDArray[np.float32]:
    if out is None:
        out = np.zeros(lengths.sum(), np.float32)
    else:
        out[:] = 0
    context = rows[:, Run.GENERATED]
    trained = context < lengths
    rows, context, lengths = rows[trained], context[trained], (lengths - context)[trained]
    source = rows[:, Run.LOGPROB]
    if len(rows) and (source[1:] == source[:-1] + lengths[:-1]).all() and _short(lengths):
        out[loss_mask] = stream[source[0] : source[0] + lengths.sum()]
    else:
        copy_stretches(out, rows[:, Run.START] + context, stream, source, lengths)
    return out


def _joined(rows: Ints, lengths: Ints, follow: Ints) -> tuple[Ints, Ints]:
    """Join runs for which ``follow`` goes on where the run before ends."""
    continues = (follow[1:] == follow[:-1] + lengths[:-1]) & (follow[:-1] >= 0)
    heads = np.flatnonzero(np.append(np.ones(min(len(rows), 1), np.bool_), ~continues))
    return rows[heads], np.add.reduceat(lengths, heads) if heads.size else lengths


def _short(lengths: Ints) -> bool:
    return bool(lengths.sum() < SHORT * lengths.size)


def copy_stretches(
    out: npt.NDArray[Any], starts: Ints, source: npt.NDArray[Any], begins: Ints, lengths: Ints
) -> None:
    """Copy ``source[begin : begin + length]`` to ``out[start:]`` for each stretch."""
    if lengths.size > 1 and _short(lengths):
        index = np.arange(lengths.sum(), dtype=np.int64)
        index -= np.repeat(np.cumsum(lengths) - lengths, lengths)
        values = source[index + np.repeat(begins, lengths)]
        out[index + np.repeat(starts, lengths)] = values
        return
    for start, begin, length in zip(
        starts.tolist(), begins.tolist(), lengths.tolist(), strict=True
    ):
        out[start : start + length] = source[begin : begin + length]
