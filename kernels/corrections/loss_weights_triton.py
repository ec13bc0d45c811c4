# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernel of loss weights: it writes the share of each token, by the sums of its slot."""

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


@triton.jit(
    do_not_specialize=["num_segments", "num_slots", "tokens", "divides"],
    do_not_specialize_on_alignment=["owners", "denominator"],
)
def share_kernel(
    counts, ids, owners, num_segments, num_slots, table, cells, denominator, weights,
    tokens: tl.int64, given: tl.float64, divides, HAS_SLOTS: tl.constexpr,
    CELLS: tl.constexpr, APART: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Write the weights of a tile.

    The denominator is the number of slots in ``cells``, else ``denominator``, else ``given``.
    """
    first = tl.program_id(0).to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    place = tl.max_contiguous(counts + first + lane, 4)
    count, segment, _, _ = load_tokens(
        place, ids, None, None, first, lane, tokens, HAS_SLOTS and ids is None, TILE
    )
    counted = count != 0
    whole = given
    if cells is not None:
        whole = number_with_tokens(cells, CELLS, APART).to(tl.float64)
    elif denominator is not None:
        whole = tl.load(denominator).to(tl.float64)
    if HAS_SLOTS:
        slot = slots_of(
            None, ids, owners, num_segments, num_slots, segment, first, lane, tokens, TILE
        )
        counted = counted & (slot >= 0)
        found = tl.load(table + slot, mask=counted & (divides != 0), other=1)
        share = 1.0 / (found.to(tl.float64) * whole)
    else:
        share = 1.0 / whole + tl.zeros((TILE,), tl.float64)
    tl.store(weights + first + lane, tl.where(counted, share, 0.0).to(tl.float32))


def loss_weights_forward(
    counts: torch.Tensor,
    places: Places | None,
    denominator: torch.Tensor | None,
    *,
    given: float,
    divides: bool,
) -> torch.Tensor:
    """Return weights of contiguous tensors, in one launch, or in two and one that fills zeros."""
    counts, table, cells = aligned(counts), None, None
    if places is not None and places.ids is not None:
        places = places._replace(ids=aligned(places.ids))
    is_given = given > 0 or denominator is not None
    if places is not None and (divides or not is_given):
        cells, table = sum_slots(counts, places)
        cells = None if is_given else cells
    elif not is_given:
        denominator = counts.sum()
    entries = entries_of(counts, places)
    tiles = cdiv(entries, TILE)
    weights = torch.empty(tiles * TILE, dtype=torch.float32, device=counts.device)
    launch_on("loss_weights", counts.get_device())(
        share_kernel, tiles, counts, *(places or Places(None, None, None, 0, 0))[1:],
        counts if table is None else table, cells, denominator, weights, entries, given,
        int(divides), HAS_SLOTS=places is not None, CELLS=CELLS, APART=APART, TILE=TILE,
    )  # fmt: skip
    return weights[:entries]
