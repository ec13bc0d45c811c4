# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of loss weights: the share of a token in each slot, and that of each token."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import DEFAULT, block_shape
from trajpack.kernels.corrections.slots import Places
from trajpack.kernels.corrections.slots_triton import (
    APART,
    CELLS,
    entries_of,
    load_tokens,
    number_with_tokens,
    slots_of,
    sum_slots,
)
from trajpack.kernels.launches import cdiv, launch_on
from trajpack.kernels.reduce.whiten_triton import aligned

TILE = block_shape("loss_weights", DEFAULT).block


@triton.jit
def _share(found, cells, denominator, given, CELLS: tl.constexpr, APART: tl.constexpr):
    """Return the share of a token among ``found``, in float32.

    The denominator is the number of slots in ``cells``, else ``denominator``, else ``given``.
    """
    whole = given
    if cells is not None:
        whole = number_with_tokens(cells, CELLS, APART).to(tl.float64)
    elif denominator is not None:
        whole = tl.load(denominator).to(tl.float64)
    return (1.0 / (found.to(tl.float64) * whole)).to(tl.float32)


@triton.jit(
    do_not_specialize=["num_slots", "divides"], do_not_specialize_on_alignment=["denominator"]
)
def slot_shares_kernel(
    table, cells, denominator, shares, num_slots, given: tl.float64, divides,
    CELLS: tl.constexpr, APART: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the shares of slots; a division takes as long as the rest of a token's work."""
    slot = tl.program_id(0) * TILE + tl.arange(0, TILE)
    found = tl.load(table + slot, mask=(slot < num_slots) & (divides != 0), other=1)
    share = _share(found, cells, denominator, given, CELLS, APART)
    tl.store(shares + slot, share, mask=slot < num_slots)


@triton.jit(
    do_not_specialize=["num_segments", "num_slots", "tokens"],
    do_not_specialize_on_alignment=["owners", "denominator"],
)
def share_kernel(
    counts, ids, owners, num_segments, num_slots, shares, denominator, weights, tokens: tl.int64,
    given: tl.float64, TILE: tl.constexpr,
):  # fmt: skip
    """Write the weights of a tile, by the ``shares`` of slots if there are any."""
    first = tl.program_id(0).to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    place = tl.max_contiguous(counts + first + lane, 4)
    count, segment, _, _ = load_tokens(
        place, ids, None, None, first, lane, tokens, shares is not None and ids is None, TILE
    )
    counted = count != 0
    if shares is not None:
        slot = slots_of(
            None, ids, owners, num_segments, num_slots, segment, first, lane, tokens, TILE
        )
        share = tl.load(shares + slot, mask=counted & (slot >= 0), other=0.0)
    else:
        one = tl.full((), 1, tl.int32)
        share = tl.where(counted, _share(one, None, denominator, given, 1, 1), 0.0)
    tl.store(weights + first + lane, share)


def loss_weights_forward(
    counts: torch.Tensor,
    places: Places | None,
    denominator: torch.Tensor | None,
    *,
    given: float,
    divides: bool,
) -> torch.Tensor:
    """Return weights of contiguous tensors, in one launch; by slots in up to four."""
    counts, shares = aligned(counts), None
    is_given = given > 0 or denominator is not None
    launch = launch_on("loss_weights", counts.get_device())
    if places is not None:
        if places.ids is not None:
            places = places._replace(ids=aligned(places.ids))
        cells, table = None, counts
        if divides or not is_given:
            cells, table = sum_slots(counts, places)
        shares = torch.empty(places.num_slots, dtype=torch.float32, device=counts.device)
        launch(
            slot_shares_kernel, cdiv(places.num_slots, TILE), table, None if is_given else cells,
            denominator, shares, places.num_slots, given, int(divides), CELLS=CELLS, APART=APART,
            TILE=TILE,
        )  # fmt: skip
    elif not is_given:
        denominator = counts.sum()
    entries = entries_of(counts, places)
    tiles = cdiv(entries, TILE)
    weights = torch.empty(tiles * TILE, dtype=torch.float32, device=counts.device)
    launch(
        share_kernel, tiles, counts, *(places or Places(None, None, None, 0, 0))[1:], shares,
        denominator, weights, entries, given, TILE=TILE,
    )  # fmt: skip
    return weights[:entries]
