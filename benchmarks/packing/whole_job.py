"""The whole job of packing, done the usual ways: each returns all ten fields of the turns layout.

Input: trajectories as an agent hands them over, with arrays or plain lists in them. Output:
CPU tensors, sequence after sequence, a sequence being one turn's prompt and completion. Every
way is written as a careful engineer would: no copy that can be left out, tables of per-turn
values expanded in one call, lists converted by the fastest call there is (`struct.pack`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from benchmarks.packing.turn_table import Table, discounted
from trajpack import Trajectory
from trajpack.packing.batch.batch import PackedBatch
from trajpack.testing import assert_same_bits

WROTE = "10 fields"
LONG = 1024
"""Tokens a sequence from which `torch.cat` is faster than `torch.repeat_interleave`."""
COUNT = "count"
Take: TypeAlias = Callable[[str, int, Any], np.ndarray]


def fresh(name: str, size: int, dtype: Any) -> np.ndarray:
    """Return new memory."""
    return np.empty(size, dtype)


def count_to(size: int, take: Take) -> np.ndarray:
    """Return 0, 1, 2 and so on, kept where memory is kept."""
    return np.arange(size) if take is fresh else take(COUNT, size, np.int64)


class Fields(NamedTuple):
    """What the whole job writes; dtypes as in `PackedBatch`."""

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    sequence_ids: torch.Tensor
    turn_ids: torch.Tensor
    prompt_mask: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    policy_versions: torch.Tensor
    returns: torch.Tensor
    cu_seqlens: torch.Tensor


def assert_same_fields(actual: Fields | PackedBatch, expected: Fields) -> None:
    """Raise unless all fields agree bit for bit (returns, which are sums: to 1 in 1,000,000)."""
    for name, want in expected._asdict().items():
        got = getattr(actual, name)
        if name == "returns":
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        else:
            assert_equal(got, want, name)


def assert_equal(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    """Raise as `assert_same_bits`, but compare values first, which is four times faster."""
    if want.is_floating_point() and got.dtype == want.dtype:
        got, want = got.view(torch.int32), want.view(torch.int32)  # so that -0 is not 0
    if got.dtype != want.dtype or not torch.equal(got, want):
        assert_same_bits(got, want, name)


def by_lists(trajectories: Sequence[Trajectory]) -> Fields:
    """Extend one Python list per field, token by token; convert each list once."""
    ids, positions, sequences, turns = [], [], [], []
    prompt_mask, loss_mask, logprobs, versions, returns = [], [], [], [], []
    cu_seqlens = [0]
    index = 0
    for trajectory in trajectories:
        for turn, earned in zip(trajectory.turns, discounted(trajectory), strict=True):
            given, sampled = len(turn.prompt_ids), len(turn.completion_ids)
            ids.extend(as_list(turn.prompt_ids))
            ids.extend(as_list(turn.completion_ids))
            positions.extend(range(given + sampled))
            sequences.extend([index] * (given + sampled))
            turns.extend([-1] * given)
            turns.extend([index] * sampled)
            prompt_mask.extend([True] * given)
            prompt_mask.extend([False] * sampled)
            loss_mask.extend([False] * given)
            loss_mask.extend([True] * sampled)
            logprobs.extend([0.0] * given)
            logprobs.extend(as_list(turn.completion_logprobs))
            versions.extend([-1] * given)
            versions.extend([turn.version_start] * sampled)
            returns.extend([0.0] * given)
            returns.extend([earned] * sampled)
            cu_seqlens.append(len(ids))
            index += 1
    return _fields(
        np.array(ids, np.int64),
        np.array(positions, np.int64),
        np.array(sequences, np.int32),
        np.array(turns, np.int32),
        np.array(prompt_mask, np.bool_),
        np.array(loss_mask, np.bool_),
        np.array(logprobs, np.float32),
        np.array(versions, np.int32),
        np.array(returns, np.float32),
        np.array(cu_seqlens, np.int32),
    )


def three_fields_by_lists(trajectories: Sequence[Trajectory]) -> tuple[torch.Tensor, ...]:
    """Collect ids, prompt mask and log-probabilities as the agent does that this one replaces."""
    input_ids, prompt_mask, logprobs = [], [], []
    for trajectory in trajectories:
        for turn in trajectory.turns:
            prompt, completion = as_list(turn.prompt_ids), as_list(turn.completion_ids)
            input_ids.extend(prompt)
            input_ids.extend(completion)
            prompt_mask.extend([True] * len(prompt))
            prompt_mask.extend([False] * len(completion))
            logprobs.extend([0.0] * len(prompt))
            logprobs.extend(as_list(turn.completion_logprobs))
    return (
        torch.tensor(input_ids, dtype=torch.int64),
        torch.tensor(prompt_mask, dtype=torch.bool),
        torch.tensor(logprobs, dtype=torch.float32),
    )


def by_numpy(trajectories: Sequence[Trajectory], take: Take = fresh) -> Fields:
    """Concatenate per field with numpy, and repeat per-turn values; ``take`` lends memory."""
    table = Table(trajectories)
    total = int(table.cu_seqlens[-1])
    ids = take("ids", total, np.int64)
    table.put_ids(ids)
    loss_mask = np.repeat(table.is_sampled, table.pieces)
    positions = take("positions", total, np.int64)
    np.subtract(count_to(total, take), np.repeat(table.starts, table.lengths), out=positions)
    return _fields(
        ids,
        positions,
        np.repeat(table.index, table.lengths),
        np.repeat(table.turns, table.pieces),
        np.logical_not(loss_mask, out=take("prompt_mask", total, np.bool_)),
        loss_mask,
        table.spread_logprobs(take("logprobs", total, np.float32), loss_mask),
        np.repeat(table.versions, table.pieces),
        np.repeat(table.returns, table.pieces),
        table.cu_seqlens,
    )


def by_numpy_again() -> Callable[[Sequence[Trajectory]], Fields]:
    """Return `by_numpy` in memory of its own, written again each time wherever numpy can."""
    memory: dict[str, np.ndarray] = {}

    def take(name, size, dtype):
        if len(memory.get(name, ())) < size:
            memory[name] = np.arange(size) if name == COUNT else np.empty(size, dtype)
        return memory[name][:size]

    return lambda trajectories: by_numpy(trajectories, take)


def by_torch_cat(trajectories: Sequence[Trajectory]) -> Fields:
    """Call `torch.cat` per field, and expand what repeats in the faster of two ways."""
    table = Table(trajectories)
    pieces, lengths = torch.from_numpy(table.pieces), torch.from_numpy(table.lengths)
    total = int(table.cu_seqlens[-1])

    def expand(values, counts):
        return torch.repeat_interleave(torch.from_numpy(values), counts, output_size=total)

    ids = torch.from_numpy(np.empty(total, np.int64))  # numpy's memory comes in huge pages
    torch.cat([torch.from_numpy(piece) for piece in table.ids], out=ids)
    if total < LONG * len(table.lengths):
        loss_mask = expand(table.is_sampled, pieces)
        prompt_mask = ~loss_mask
        positions = torch.arange(total) - expand(table.starts, lengths)
    else:
        positions, prompt_mask, loss_mask = _by_stretches(table)
    silence = torch.zeros(int(table.lengths.max(initial=0)))
    logprobs = zip(table.pieces[::2].tolist(), table.logprobs, strict=True)
    return Fields(
        ids,
        positions,
        expand(table.index, lengths),
        expand(table.turns, pieces),
        prompt_mask,
        loss_mask,
        torch.cat([part for n, c in logprobs for part in (silence[:n], torch.from_numpy(c))]),
        expand(table.versions, pieces),
        expand(table.returns, pieces),
        torch.from_numpy(table.cu_seqlens),
    )


def _by_stretches(table: Table) -> tuple[torch.Tensor, ...]:
    """Concatenate stretches of ready-made constants: faster where sequences are long."""
    longest = int(table.lengths.max(initial=0))
    count = torch.arange(longest)
    no, yes = torch.zeros(longest, dtype=torch.bool), torch.ones(longest, dtype=torch.bool)
    pairs = list(zip(table.pieces[::2].tolist(), table.pieces[1::2].tolist(), strict=True))
    return (
        torch.cat([count[: given + sampled] for given, sampled in pairs]),
        torch.cat([part for p, c in pairs for part in (yes[:p], no[:c])]),
        torch.cat([part for p, c in pairs for part in (no[:p], yes[:c])]),
    )


def by_padding(trajectories: Sequence[Trajectory]) -> Fields:
    """Pad every field to the longest sequence, then take what a mask selects."""
    table = Table(trajectories)
    rows, longest = len(table.lengths), int(table.lengths.max(initial=0))
    ids = torch.zeros(rows, longest, dtype=torch.int32)
    logprobs = torch.zeros(rows, longest)
    both = zip(table.ids[::2], table.ids[1::2], table.logprobs, strict=True)
    id_rows, logprob_rows = ids.numpy(), logprobs.numpy()
    for row, (prompt, completion, sampled) in enumerate(both):
        end = len(prompt) + len(completion)
        id_rows[row, : len(prompt)] = prompt
        id_rows[row, len(prompt) : end] = completion
        logprob_rows[row, len(prompt) : end] = sampled
    column = torch.arange(longest)
    mask = column < torch.from_numpy(table.lengths)[:, None]
    given = torch.from_numpy(table.pieces[::2])
    loss_mask = (column >= given[:, None])[mask]

    def spread(values, nowhere):
        table_of = torch.from_numpy(values)[:, None].expand(-1, longest)[mask]
        return table_of if nowhere is None else torch.where(loss_mask, table_of, nowhere)

    return Fields(
        ids[mask].long(),
        column.expand(rows, -1)[mask],
        spread(table.index, None),
        spread(table.index, -1),
        ~loss_mask,
        loss_mask,
        logprobs[mask],
        spread(table.versions[1::2].copy(), -1),
        spread(table.returns[1::2].copy(), 0.0),
        torch.from_numpy(table.cu_seqlens),
    )


def by_nested(trajectories: Sequence[Trajectory]) -> Fields:
    """Make jagged nested tensors of ids and log-probabilities; derive the rest from offsets."""
    table = Table(trajectories)
    ids, logprobs = [], []
    both = zip(table.ids[::2], table.ids[1::2], table.logprobs, strict=True)
    silence = np.zeros(int(table.pieces.max(initial=0)), np.float32)
    for prompt, completion, sampled in both:
        ids.append(torch.from_numpy(np.concatenate((prompt, completion))))
        logprobs.append(torch.from_numpy(np.concatenate((silence[: len(prompt)], sampled))))
    nested = torch.nested.nested_tensor(ids, layout=torch.jagged)
    said = torch.nested.nested_tensor(logprobs, layout=torch.jagged)
    offsets, values = nested.offsets(), nested.values()
    lengths, total = offsets.diff(), values.shape[0]
    sequence = torch.repeat_interleave(lengths, output_size=total)
    positions = torch.arange(total) - offsets[:-1][sequence]
    loss_mask = positions >= torch.from_numpy(table.pieces[::2])[sequence]
    sequence_ids = sequence.int()
    versions, returns = table.versions[1::2].copy(), table.returns[1::2].copy()
    return Fields(
        values.long(),
        positions,
        sequence_ids,
        torch.where(loss_mask, sequence_ids, -1),
        ~loss_mask,
        loss_mask,
        said.values(),
        torch.where(loss_mask, torch.from_numpy(versions)[sequence], -1),
        torch.where(loss_mask, torch.from_numpy(returns)[sequence], 0.0),
        offsets.int(),
    )


def as_list(values):
    """Return a list; itself if it is one."""
    return values if isinstance(values, list) else values.tolist()


def _fields(*arrays):
    return Fields(*(torch.from_numpy(array) for array in arrays))


RIVALS = {
    "Python lists": by_lists,
    "numpy.concatenate per field": by_numpy,
    "torch.cat per field": by_torch_cat,
    "pad, then mask": by_padding,
    "torch.nested jagged": by_nested,
}
