# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of loss weights: one counts the tokens of each slot, one writes their shares.

A slot is a sequence, or a group of sequences. Neighbouring tokens of one slot are counted
together, and added with one atomic addition of an integer, which is exact in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import DEFAULT, block_shape, launch_on

TILE = block_shape("loss_weights", DEFAULT).block


@triton.jit
def _slot_of(ids, owners, token, inside, num_ids, num_slots, HAS_OWNERS: tl.constexpr):
    """Return the slot of each token, -1 for none."""
    identifier = tl.load(ids + token, mask=inside, other=-1)
    slot = tl.where((identifier >= 0) & (identifier < num_ids), identifier, -1).to(tl.int32)
    if HAS_OWNERS:
        owner = tl.load(owners + slot, mask=slot >= 0, other=-1)
        slot = tl.where((owner >= 0) & (owner < num_slots), owner, -1).to(tl.int32)
    return slot


@triton.jit
def _maximum(one, other):
    return tl.maximum(one, other)


@triton.jit(
    do_not_specialize=["tokens", "num_ids", "num_slots"],
    do_not_specialize_on_alignment=["mask", "ids", "owners", "counts"],
)
def count_slots_kernel(
    mask, ids, owners, counts, tokens: tl.int64, num_ids: tl.int64, num_slots: tl.int64,
    HAS_OWNERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the generated tokens of each slot to its count, and to the last the slots with any."""
    lane = tl.arange(0, TILE)
    token = tl.program_id(0).to(tl.int64) * TILE + lane
    inside = token < tokens
    slot = _slot_of(ids, owners, token, inside, num_ids, num_slots, HAS_OWNERS)
    has_before = inside & (lane > 0)
    before = _slot_of(ids, owners, token - 1, has_before, num_ids, num_slots, HAS_OWNERS)
    has_after = (token + 1 < tokens) & (lane < TILE - 1)
    after = _slot_of(ids, owners, token + 1, has_after, num_ids, num_slots, HAS_OWNERS)
    counted = (tl.load(mask + token, mask=inside, other=0) != 0).to(tl.int32)
    running = tl.associative_scan(counted, 0, _sum)
    is_first = (slot != before) | (lane == 0)
    is_last = (slot != after) | (lane == TILE - 1)
    begin = tl.associative_scan(tl.where(is_first, running - counted, 0), 0, _maximum)
    found = running - begin
    adds = is_last & (slot >= 0) & (found > 0)
    old = tl.atomic_add(counts + slot, found.to(tl.int64), mask=adds, sem="relaxed")
    new = tl.sum((adds & (old == 0)).to(tl.int64), 0)
    tl.atomic_add(counts + num_slots, new, mask=new > 0, sem="relaxed")


@triton.jit
def _sum(one, other):
    return one + other


@triton.jit(
    do_not_specialize=["tokens", "num_ids", "num_slots", "divides"],
    do_not_specialize_on_alignment=["mask", "ids", "owners", "counts", "denominator"],
)
def share_kernel(
    mask, ids, owners, counts, denominator, weights,
    tokens: tl.int64, num_ids: tl.int64, num_slots: tl.int64, given: tl.float64, divides,
    HAS_IDS: tl.constexpr, HAS_OWNERS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the weights of a tile; ``given`` is the denominator, if it is above 0."""
    token = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = token < tokens
    counted = tl.load(mask + token, mask=inside, other=0) != 0
    whole = tl.load(denominator).to(tl.float64)
    whole = tl.where(given > 0, given, whole)
    if HAS_IDS:
        slot = _slot_of(ids, owners, token, inside, num_ids, num_slots, HAS_OWNERS)
        counted = counted & (slot >= 0)
        count = tl.load(counts + slot, mask=counted & (divides != 0), other=1)
        share = 1.0 / (count.to(tl.float64) * whole)
    else:
        share = 1.0 / whole + tl.zeros((TILE,), tl.float64)
    tl.store(weights + token, tl.where(counted, share, 0.0).to(tl.float32))


def loss_weights_forward(
    loss_mask: torch.Tensor,
    sequence_ids: torch.Tensor | None,
    group_ids: torch.Tensor | None,
    denominator: torch.Tensor | None,
    *,
    given: float,
    num_ids: int,
    num_slots: int,
    divides: bool,
) -> torch.Tensor:
    """Return weights of contiguous tensors, in one launch, or in two and one that fills zeros."""
    tokens, device, mask = loss_mask.shape[0], loss_mask.device, loss_mask.view(torch.int8)
    counts = None
    if sequence_ids is None:
        if denominator is None and not given:
            denominator = loss_mask.sum()
    elif divides or (denominator is None and not given):
        counts = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        count_slots(mask, sequence_ids, group_ids, counts, num_ids)
        if denominator is None:
            denominator = counts[num_slots:]
    unused = mask if sequence_ids is None else sequence_ids
    return share(
        mask, sequence_ids, group_ids, unused if counts is None else counts,
        unused if denominator is None else denominator,
        given=given, num_ids=num_ids, num_slots=num_slots, divides=divides,
    )[:tokens]  # fmt: skip


def count_slots(
    mask: torch.Tensor,
    ids: torch.Tensor,
    owners: torch.Tensor | None,
    counts: torch.Tensor,
    num_ids: int,
) -> None:
    """Launch a program for each tile, which adds to ``counts``."""
    if mask.shape[0]:
        with torch.cuda.device_of(mask):  # Triton launches on the current device
            count_slots_kernel[(triton.cdiv(mask.shape[0], TILE),)](
                mask, ids, owners, counts, mask.shape[0], num_ids, counts.shape[0] - 1,
                HAS_OWNERS=owners is not None, TILE=TILE,
                **launch_on("loss_weights", mask.get_device()).options,
            )  # fmt: skip


def share(
    mask: torch.Tensor,
    ids: torch.Tensor | None,
    owners: torch.Tensor | None,
    counts: torch.Tensor,
    denominator: torch.Tensor,
    *,
    given: float,
    num_ids: int,
    num_slots: int,
    divides: bool,
) -> torch.Tensor:
    """Launch a program for each tile; return weights in whole tiles."""
    tiles = triton.cdiv(mask.shape[0], TILE)
    weights = torch.empty(tiles * TILE, dtype=torch.float32, device=mask.device)
    if tiles:
        with torch.cuda.device_of(mask):
            share_kernel[(tiles,)](
                mask, ids, owners, counts, denominator, weights, mask.shape[0], num_ids, num_slots,
                given, int(divides), HAS_IDS=ids is not None, HAS_OWNERS=owners is not None,
                TILE=TILE, **launch_on("loss_weights", mask.get_device()).options,
            )  # fmt: skip
    return weights
