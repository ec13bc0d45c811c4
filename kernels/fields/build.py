"""Per-token fields of a packed batch, written from a word stream and a table of runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.fields.stretches import Array, Ints, copier, count_up
from trajpack.kernels.runs import MAX_TOKENS, RUN_WIDTH, Run, in_tiles
from trajpack.kernels.validation import (
    check_boundaries,
    check_integer,
    check_tensor,
    values_to_check,
)

OP = "build"
ENTRIES_AT_ONCE = 2**17
"""Tokens that the host repeats at once in the cache, before it copies them to their memory."""


class TokenFields(NamedTuple):
    """Outputs of `build`, all of shape ``[tokens]``.

    Attributes:
        input_ids: int64 token ids.
        position_ids: int64 positions, from 0 in every sequence.
        sequence_ids: int32 index of the token's sequence.
        turn_ids: int32 index of the turn that generated the token, or -1.
        prompt_mask: bool, True on tokens that were not generated.
        loss_mask: bool, True on generated tokens.
        rollout_logprobs: float32 log-probability at the token's own index; 0 where not generated.
        policy_versions: int32 version that sampled the token, or -1.
        returns: float32 return of the token's turn; 0 where not generated.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    sequence_ids: torch.Tensor
    turn_ids: torch.Tensor
    prompt_mask: torch.Tensor
    loss_mask: torch.Tensor
    rollout_logprobs: torch.Tensor
    policy_versions: torch.Tensor
    returns: torch.Tensor


FIELD_DTYPES = {
    "input_ids": torch.int64,
    "position_ids": torch.int64,
    "sequence_ids": torch.int32,
    "turn_ids": torch.int32,
    "prompt_mask": torch.bool,
    "loss_mask": torch.bool,
    "rollout_logprobs": torch.float32,
    "policy_versions": torch.int32,
    "returns": torch.float32,
}
"""The one table of per-token fields and their dtypes, in the order of `TokenFields`."""

TOKEN_BYTES = sum(dtype.itemsize for dtype in FIELD_DTYPES.values())
TOKEN_OFFSETS: dict[str, int] = {}
"""Bytes of a token in the memory of `empty_memory` in front of each field."""
for _name in sorted(FIELD_DTYPES, key=lambda name: -FIELD_DTYPES[name].itemsize):
    TOKEN_OFFSETS[_name] = sum(FIELD_DTYPES[before].itemsize for before in TOKEN_OFFSETS)


def build(
    words: torch.Tensor,
    runs: torch.Tensor,
    turn_returns: torch.Tensor,
    num_tokens: int,
    impl: Impl = "auto",
) -> TokenFields:
    """Expand a table of runs into every per-token field of a packed batch.

    Args:
        words: int32 stream of token ids and, bit for bit, of float32 log-probabilities.
        runs: ``[runs + 1, 8]`` int32, see `Run`, in order of START; a run may be empty. START of
            the last row is ``num_tokens``, the end of the last run.
        turn_returns: ``[turns]`` float32.
        num_tokens: Tokens of the batch, and of each of `TokenFields`.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others.

    Example:
        >>> words = torch.tensor([7, 8, 9], dtype=torch.int32)
        >>> runs = torch.tensor([[0, 0, 3, 0, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0, 0, 0]])
        >>> build(words, runs.int(), torch.zeros(0), 3).position_ids
        tensor([0, 1, 2])
    """
    check_tensor(OP, "words", words, dtypes=(torch.int32,))
    check_run_table(OP, runs, words.device)
    check_tensor(OP, "turn_returns", turn_returns, dtypes=(torch.float32,), device=words.device)
    check_integer(OP, "num_tokens", num_tokens, most=MAX_TOKENS)
    chosen = resolve_impl(OP, impl, words.device)
    inputs = (one.contiguous() for one in (words, runs, turn_returns))
    return fields_of(torch.ops.trajpack.build(*inputs, num_tokens, chosen), num_tokens)


def check_run_table(op: str, runs: torch.Tensor, device: torch.device) -> None:
    """Raise unless ``runs`` has the shape and dtype of a run table."""
    check_tensor(op, "runs", runs, ndim=2, dtypes=(torch.int32,), device=device)
    if runs.shape[0] == 0 or runs.shape[1] != RUN_WIDTH:
        raise ValueError(
            f"{op}: runs must have shape [runs + 1, {RUN_WIDTH}], got {list(runs.shape)}"
        )


def check_runs(op: str, runs: torch.Tensor, num_tokens: int) -> tuple[Ints, Ints, Ints] | None:
    """Raise if a run table can be read and does not cover ``num_tokens``.

    Else return its rows, and how many tokens of each have an id and were generated; None where it
    cannot be read.
    """
    readable = values_to_check(runs)
    if readable is None:
        return None
    table = readable.numpy().astype(np.int64)
    if (table[:-1, Run.GENERATED] < 0).any():
        raise ValueError(f"{op}: runs must have 0 or more tokens of context (Run.GENERATED)")
    check_boundaries(op, runs[:, Run.START], num_tokens, name="runs")
    lengths, table = np.diff(table[:, Run.START]), table[:-1]
    given = np.where(table[:, Run.SOURCE] >= 0, lengths, 0)
    return table, given, (lengths - table[:, Run.GENERATED]).clip(min=0)


def check_stretches(op: str, rule: str, begins: Ints, counts: Ints, size: int) -> None:
    """Raise if a run has entries outside of ``[0, size)``, with the rule that it breaks."""
    wrong = (counts > 0) & ((begins < 0) | (begins + counts > size))
    if wrong.any():
        at = int(wrong.argmax())
        found = f"run {at} has {counts[at]} from {begins[at]}"
        raise ValueError(f"{op}: {rule} within {size}, {found}")


def empty_memory(num_tokens: int, device: torch.device) -> torch.Tensor:
    """Return uninitialised memory of all fields, int64: one field behind another, in whole tiles.

    Fields of wider dtypes come first; fields of the same width are in the order of `FIELD_DTYPES`.
    """
    size = in_tiles(num_tokens) * TOKEN_BYTES // 8
    if size and device.type == "cpu":  # numpy allocates large arrays in huge pages
        return torch.from_numpy(np.empty(size, np.int64))
    return torch.empty(size, dtype=torch.int64, device=device)


def field_of(memory: torch.Tensor, num_tokens: int, name: str) -> torch.Tensor:
    """Return a field in memory of `empty_memory`, a tensor with a version counter of its own."""
    dtype = FIELD_DTYPES[name]
    begin = TOKEN_OFFSETS[name] // dtype.itemsize * in_tiles(num_tokens)
    # `data`: with a shared counter, autograd takes a write to one field for a write to all
    return memory.view(dtype)[begin : begin + num_tokens].data


def fields_of(memory: torch.Tensor, num_tokens: int) -> TokenFields:
    """Return all fields in memory of `empty_memory`."""
    return TokenFields(*(field_of(memory, num_tokens, name) for name in FIELD_DTYPES))


def expand_runs(
    words: torch.Tensor, runs: torch.Tensor, turn_returns: torch.Tensor, num_tokens: int, impl: str
) -> torch.Tensor:
    """Return memory of `empty_memory` with all fields: `build` of contiguous, unchecked tensors."""
    memory = empty_memory(num_tokens, words.device)
    if impl == "triton":
        from trajpack.kernels.fields.build_triton import write_fields

        write_fields(words, runs, turn_returns, num_tokens=num_tokens, memory=memory)
        return memory
    fields = fields_of(memory, num_tokens)
    if num_tokens and words.device.type == "cpu":
        write_on_host(fields, words.numpy(), runs.numpy(), turn_returns.numpy())
    elif num_tokens:
        built = build_reference(words, runs, turn_returns, num_tokens)
        for field, values in zip(fields, built, strict=True):
            field.copy_(values)
    return memory


def build_reference(
    words: torch.Tensor, runs: torch.Tensor, turn_returns: torch.Tensor, num_tokens: int
) -> TokenFields:
    """Define `build` in plain torch: each token looks up its run, then each field.

    No value is read by the host, so it runs on any device.
    """
    start = runs[:, Run.START]
    run = torch.repeat_interleave(start.diff(), output_size=num_tokens).long()
    offset = torch.arange(num_tokens, device=words.device) - start[run]
    source, context = runs[run, Run.SOURCE], runs[run, Run.GENERATED]
    generated = offset >= context
    token = torch.where(source >= 0, source + offset, 0)
    logprob = torch.where(generated, runs[run, Run.LOGPROB] + offset - context, 0)
    turn = torch.where(generated, runs[run, Run.TURN], -1)
    stream = words if words.shape[0] else words.new_zeros(1)  # all may be padding
    returns = torch.zeros(num_tokens, dtype=torch.float32, device=words.device)
    if turn_returns.shape[0]:
        returns = torch.where(generated, turn_returns[turn.clamp(min=0)], 0.0)
    return TokenFields(
        input_ids=torch.where(source >= 0, stream[token], 0).long(),
        position_ids=runs[run, Run.POSITION] + offset,
        sequence_ids=runs[run, Run.SEQUENCE],
        turn_ids=turn,
        prompt_mask=~generated,
        loss_mask=generated,
        rollout_logprobs=torch.where(generated, stream.view(torch.float32)[logprob], 0.0),
        policy_versions=torch.where(generated, runs[run, Run.VERSION], -1),
        returns=returns,
    )


def write_on_host(fields: TokenFields, words: Ints, runs: Ints, turn_returns: Array) -> None:
    """Write all fields on the host, run by run; each byte is written once."""
    arrays: Any = (field.numpy() for field in fields)
    out: Any = TokenFields(*arrays)
    lengths = np.diff(runs[:, Run.START])
    rows, lengths = runs[:-1][lengths > 0], lengths[lengths > 0]
    context = np.clip(rows[:, Run.GENERATED], 0, lengths)
    generated = lengths - context
    halves = np.stack([context, generated], 1).reshape(-1)
    is_trained = generated > 0
    returns = np.zeros(len(rows), np.float32)
    returns[is_trained] = turn_returns[rows[is_trained, Run.TURN]]

    def by_half(field: Array, of_context: int | bool, of_generated: Array) -> None:
        values = np.full(2 * len(rows), of_context, of_generated.dtype)
        values[1::2] = of_generated
        _repeat(field, values, halves)

    start, source = rows[:, Run.START], rows[:, Run.SOURCE]
    num_tokens = int(lengths.sum())
    copied = copier(num_tokens, start, source, np.where(source >= 0, lengths, 0))
    copied(out.input_ids, words, 0)
    count_up(out.position_ids, start, rows[:, Run.POSITION], lengths)
    _repeat(out.sequence_ids, rows[:, Run.SEQUENCE], lengths)
    by_half(out.turn_ids, -1, rows[:, Run.TURN])
    by_half(out.loss_mask, False, np.ones(len(rows), np.bool_))
    np.logical_not(out.loss_mask, out=out.prompt_mask)
    copied = copier(num_tokens, start + context, rows[:, Run.LOGPROB], generated)
    copied(out.rollout_logprobs, words.view(np.float32), 0)
    by_half(out.policy_versions, -1, rows[:, Run.VERSION])
    by_half(out.returns, 0, returns)


def _repeat(out: Array, values: Array, lengths: Ints) -> None:
    """Write each value as often as its length says."""
    ends = np.cumsum(lengths)
    bounds = np.arange(ENTRIES_AT_ONCE, out.size, ENTRIES_AT_ONCE)
    cuts = np.searchsorted(ends, bounds, side="right")
    first = begin = 0
    for last in (*cuts.tolist(), len(lengths)):
        if last > first:
            end = int(ends[last - 1])
            out[begin:end] = np.repeat(values[first:last], lengths[first:last])
            first, begin = last, end


def _run(
    words: torch.Tensor, runs: torch.Tensor, turn_returns: torch.Tensor, num_tokens: int, impl: str
) -> torch.Tensor:
    if checked := check_runs(OP, runs, num_tokens):
        table, given, generated = checked
        for column, counts, size in (
            (Run.SOURCE, given, words.shape[0]),
            (Run.LOGPROB, generated, words.shape[0]),
            (Run.TURN, generated.clip(max=1), turn_returns.shape[0]),
        ):
            rule = f"runs must keep Run.{column.name}"
            check_stretches(OP, rule, table[:, column], counts, size)
    return expand_runs(words, runs, turn_returns, num_tokens, impl)


def _fake(words: torch.Tensor, runs: Any, turn_returns: Any, num_tokens: int, impl: str) -> Any:
    return words.new_empty(in_tiles(num_tokens) * TOKEN_BYTES // 8, dtype=torch.int64)


register_op(
    "build(Tensor words, Tensor runs, Tensor turn_returns, SymInt num_tokens, str impl) -> Tensor",
    _run,
    _fake,
)
