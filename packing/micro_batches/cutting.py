"""From a packed batch to micro-batches, and their outputs back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

import torch

from trajpack.kernels.dispatch import Impl
from trajpack.kernels.rearrange.merge_tokens import merge_tokens
from trajpack.kernels.rearrange.select_tokens import Segment, TokenSources
from trajpack.kernels.rearrange.token_rows import Number
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.micro_batches.micro_batch import MicroBatch, check_given
from trajpack.packing.micro_batches.tables import (
    CU_SEQLENS,
    Lengths,
    Placed,
    place_plan,
    send_merge_tables,
    send_tables,
)

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.plan.plan import Plan

OWN = ("input_ids", "turn_ids", "prompt_mask", "loss_mask", "rollout_logprobs", "policy_versions")
FILLS: Mapping[str, Number] = {"turn_ids": -1, "policy_versions": -1}
"""What padding holds, where it is not 0."""
WIDEST = 8
"""Bytes of an element that a kernel moves at most."""


class Sources(NamedTuple):
    """What is selected from, and the names that it has in a micro-batch."""

    names: list[str]
    tokens: TokenSources


def sources_of(
    batch: PackedBatch, tensors: Mapping[str, torch.Tensor] | None, alignment: Alignment
) -> Sources:
    """Return what is selected from: the batch's own tensors, its fields, and those given.

    Raises:
        TypeError: If what was given is no tensor.
        ValueError: If it has the wrong shape or device, or a name that is taken.
    """
    own = [*OWN, "returns"] + ["advantages"] * (batch.advantages is not None)
    fills = {**FILLS, "input_ids": alignment.token_id}
    fills |= {field.name: field.fill for field in batch.token_fields}
    named = {name: getattr(batch, name) for name in own} | dict(batch.fields)
    taken = {field.name for field in fields(MicroBatch)} | set(batch.fields)
    for name, tensor in (tensors or {}).items():
        check_given(name, tensor, taken, batch.num_tokens, batch.device)
        if tensor.dtype.itemsize > WIDEST or 0 in tensor.shape[1:]:
            raise ValueError(
                f"tensors: {name!r} must have rows, of a dtype of at most {WIDEST} bytes, got "
                f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            )
        named[name] = tensor
    padding = [fills.get(name, 0) for name in named]
    return Sources(list(named), TokenSources(list(named.values()), padding))


def cut(
    batch: PackedBatch,
    lengths: Lengths,
    placed: Sequence[Placed],
    alignment: Alignment,
    tensors: Mapping[str, torch.Tensor] | None,
    impl: Impl,
) -> Iterator[MicroBatch]:
    """Check all, send the tables, and return what makes one micro-batch after another."""
    sources = sources_of(batch, tensors, alignment)
    tables = send_tables(lengths, placed, alignment, batch.device)
    return (
        _selected(sources, one, table, alignment, impl)
        for one, table in zip(placed, tables, strict=True)
    )


def _selected(
    sources: Sources, placed: Placed, table: torch.Tensor, alignment: Alignment, impl: Impl
) -> MicroBatch:
    lengths, padded, num_tokens = placed.placement
    rows, position_ids, sequence_ids = sources.tokens.select(
        table, num_tokens, alignment.positions, impl
    )
    named = dict(zip(sources.names, rows, strict=True))
    own = {name: named.pop(name) for name in (*OWN, "returns")}
    seqlens, padded_seqlens = tuple(lengths.tolist()), tuple(padded.tolist())
    num_boundaries = alignment.num_boundaries or len(padded_seqlens) + 1
    cu_padded = table[Segment.START, :num_boundaries]
    same = seqlens == padded_seqlens
    fixed = alignment.total if alignment.max_sequences is not None else None
    return MicroBatch(
        **own,
        position_ids=position_ids,
        sequence_ids=sequence_ids,
        advantages=named.pop("advantages", None),
        fields=named,
        cu_seqlens=cu_padded if same else table[CU_SEQLENS, :num_boundaries],
        cu_seqlens_padded=cu_padded,
        seqlens=seqlens,
        padded_seqlens=padded_seqlens,
        sequences=tuple(placed.sequences.tolist()),
        num_kept=tuple(placed.kept.tolist()),
        max_seqlen=max(padded_seqlens, default=0) if fixed is None else fixed,
    )


def merged(
    batch: PackedBatch,
    plan: Plan,
    outputs: Sequence[torch.Tensor],
    alignment: Alignment,
    fill: Number,
    impl: Impl,
) -> torch.Tensor:
    """Do what `PackedBatch.merge` says."""
    lengths = batch.host_lengths
    placed = place_plan(lengths, plan, alignment)
    outputs = list(outputs)
    _check_outputs(outputs, placed, batch.device)
    if not outputs:
        raise ValueError("outputs must be one or more, got none")
    table, inverse = send_merge_tables(lengths, placed, batch.device)
    rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return merge_tokens(rows, table, inverse, batch.num_tokens, fill, impl)


def _check_outputs(
    outputs: Sequence[torch.Tensor], placed: Sequence[Placed], device: torch.device
) -> None:
    """Raise unless there is an output of every micro-batch, with rows alike."""
    if len(outputs) != len(placed):
        raise ValueError(
            f"outputs must be {len(placed)}, one of each micro-batch, got {len(outputs)}"
        )
    for number, (output, one) in enumerate(zip(outputs, placed, strict=True)):
        if not isinstance(output, torch.Tensor):
            raise TypeError(f"output {number} must be a tensor, got {type(output).__name__}")
        if output.shape[:1] != (one.placement.num_tokens,):
            raise ValueError(
                f"output {number} must have shape [{one.placement.num_tokens}, ...], a row for "
                f"each token of its micro-batch, got {list(output.shape)}"
            )
        first, got = (_row_of(each) for each in (outputs[0], output))
        if first != got or output.device != device:
            raise ValueError(
                f"output {number} must have rows of {first} on {device}, as output 0, got {got} "
                f"on {output.device}"
            )


def _row_of(output: torch.Tensor) -> str:
    return f"{str(output.dtype).removeprefix('torch.')} {list(output.shape[1:])}"
