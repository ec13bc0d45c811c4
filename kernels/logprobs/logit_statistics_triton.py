# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of a tile of logits: one folds it into sums, one makes its gradient.

A program takes one row of the tile. The row is padded to whole blocks, so no access to it is masked
but those of its few pairs, whose tokens are in memory one behind the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trajpack.kernels.block_shapes import DEFAULT, block_shape
from trajpack.kernels.launches import launch_on

BLOCK = block_shape("logit_statistics", DEFAULT).block
PAIRS = 128
"""Pairs that a program takes at once: one a thread, which alone reads and replaces its logit."""


@triton.jit
def _transformed(z, cap, inverse):
    """Return logits after soft-cap and temperature, and their derivative."""
    slope = inverse + tl.zeros_like(z)
    if cap > 0:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1)
        share = z / cap
        capped = 1.0 - 2.0 / (tl.exp(2.0 * share) + 1.0)
        z = tl.where(share == float("-inf"), share, capped * cap)
        slope = slope * (1.0 - capped * capped)
    return z * inverse, slope


@triton.jit
def _moved(weighted, total, most, shift):
    """Return sums of weighted logits relative to ``shift``, of sums relative to ``most``."""
    return weighted + tl.where(most == float("-inf"), 0.0, total * (most - shift))


@triton.jit
def _pairs_in(tokens, first, end, column, width, PAIRS: tl.constexpr):
    """Return numbers of pairs from ``first``, their columns, and which are of the row and tile."""
    number = first + tl.arange(0, PAIRS)
    place = tl.load(tokens + number, mask=number < end, other=-1) - column
    return number, place, (place >= 0) & (place < width)


@triton.jit(
    do_not_specialize=["stride", "column", "width", "softcap"],
    do_not_specialize_on_alignment=[
        "temperature", "most", "total", "weighted", "boundaries", "tokens", "picked",
    ],
)  # fmt: skip
def fold_kernel(
    tile, temperature, most, total, weighted, boundaries, tokens, picked, stride: tl.int64,
    column: tl.int64, width: tl.int32, softcap: tl.float64,
    HAS_TEMPERATURE: tl.constexpr, WITH_MEAN: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Fold a row into its maximum, sum of exponentials and sum of logits weighted by them.

    Every lane keeps sums of its own. Exponentials and the logits that they weight are relative to
    the maximum: so little is lost where logits are large and the entropy is small. The logits of
    pairs are picked and replaced by minus infinity before.
    """
    row = tl.program_id(0)
    begin = tile + row.to(tl.int64) * stride
    end = tl.load(boundaries + row + 1)
    for first in range(tl.load(boundaries + row), end, PAIRS):
        number, place, inside = _pairs_in(tokens, first, end, column, width, PAIRS)
        found = tl.load(begin + place, mask=inside)
        tl.store(picked + number, found.to(tl.float64), mask=inside)
        tl.store(begin + place, float("-inf"), mask=inside)
    tl.debug_barrier()
    lane = tl.arange(0, BLOCK)
    kind = most.dtype.element_ty
    cap = softcap.to(kind)
    inverse = tl.full((), 1.0, kind)
    if HAS_TEMPERATURE:
        inverse = 1.0 / tl.load(temperature + row).to(kind)
    own_most = tl.full((BLOCK,), float("-inf"), kind)
    own_total = tl.zeros((BLOCK,), kind)
    own_weighted = tl.zeros((BLOCK,), kind)
    for first in range(0, width, BLOCK):
        z, _ = _transformed(tl.load(begin + first + lane).to(kind), cap, inverse)
        z = tl.where(first + lane < width, z, float("-inf"))
        new_most = tl.maximum(own_most, z)
        shift = tl.where(new_most == float("-inf"), 0.0, new_most)
        old = tl.exp(own_most - shift)
        exponential = tl.exp(z - shift)
        if WITH_MEAN:
            term = tl.where(exponential == 0.0, 0.0, exponential * (z - shift))
            own_weighted = _moved(own_weighted, own_total, own_most, shift) * old + term
        own_total = own_total * old + exponential
        own_most = new_most
    before = tl.load(most + row)
    new_most = tl.maximum(before, tl.max(own_most, 0))
    shift = tl.where(new_most == float("-inf"), 0.0, new_most)
    old = tl.exp(before - shift)
    own = tl.exp(own_most - shift)
    total_before = tl.load(total + row)
    if WITH_MEAN:
        of_row = _moved(tl.load(weighted + row), total_before, before, shift)
        # the barriers of this sum stand between all loads and the stores
        of_tile = tl.sum(_moved(own_weighted, own_total, own_most, shift) * own, 0)
        tl.store(weighted + row, of_row * old + of_tile)
    tl.store(total + row, total_before * old + tl.sum(own_total * own, 0))
    tl.store(most + row, new_most)


@triton.jit(
    do_not_specialize=["stride", "column", "width", "softcap"],
    do_not_specialize_on_alignment=[
        "temperature", "of_logsumexp", "of_mean", "logsumexp", "mean", "boundaries", "tokens",
        "of_picked",
    ],
)  # fmt: skip
def slope_kernel(
    tile, source, temperature, of_logsumexp, of_mean, logsumexp, mean, boundaries, tokens,
    of_picked, stride: tl.int64, column: tl.int64, width: tl.int32, softcap: tl.float64,
    HAS_TEMPERATURE: tl.constexpr, WITH_MEAN: tl.constexpr, BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Make a row the gradient of its source's log-sum-exp and mean, then that of its pairs."""
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    kind = logsumexp.dtype.element_ty
    cap = softcap.to(kind)
    inverse = tl.full((), 1.0, kind)
    if HAS_TEMPERATURE:
        inverse = 1.0 / tl.load(temperature + row).to(kind)
    shift = tl.load(logsumexp + row)
    shift = tl.where(shift == float("-inf"), 0.0, shift)
    rate = tl.load(of_logsumexp + row)
    begin = tile + row.to(tl.int64) * stride
    logit = source + row.to(tl.int64) * stride
    for first in range(0, width, BLOCK):
        z, slope = _transformed(tl.load(logit + first + lane).to(kind), cap, inverse)
        probability = tl.exp(z - shift)
        change = tl.zeros_like(z) + rate
        if WITH_MEAN:
            change += tl.load(of_mean + row) * (1.0 + z - tl.load(mean + row))
        gradient = tl.where(probability == 0.0, 0.0, probability * change * slope)
        tl.store(begin + first + lane, gradient.to(tile.dtype.element_ty))
    tl.debug_barrier()
    end = tl.load(boundaries + row + 1)
    for first in range(tl.load(boundaries + row), end, PAIRS):
        number, place, inside = _pairs_in(tokens, first, end, column, width, PAIRS)
        tl.store(begin + place, tl.load(of_picked + number, mask=inside), mask=inside)


def _launch(kernel, logits, tile, memory, pairs, vectors, of_pairs, *, with_mean) -> None:
    """Launch a program for each row; arguments as for the references."""
    num_rows, width = tile.logits.shape
    temperature = logits.temperature_of(tile.rows)
    launch_on("logit_statistics", tile.padded.get_device())(
        kernel, num_rows, *memory, tile.padded if temperature is None else temperature,
        *vectors[:, tile.rows], pairs.boundaries[tile.rows.start :], pairs.tokens, of_pairs,
        tile.padded.stride(0), tile.columns.start, width, logits.softcap,
        HAS_TEMPERATURE=temperature is not None, WITH_MEAN=with_mean, BLOCK=BLOCK, PAIRS=PAIRS,
    )  # fmt: skip


def fold_forward(logits, tile, pairs, running, picked, *, with_mean) -> None:
    """Fold a tile; arguments as for the reference."""
    memory = (tile.padded,)
    _launch(fold_kernel, logits, tile, memory, pairs, running, picked, with_mean=with_mean)


def slope_forward(logits, tile, pairs, rates, of_picked, *, with_mean) -> None:
    """Make a tile the gradient of its source; arguments as for the reference."""
    memory = tile.padded, tile.source
    _launch(slope_kernel, logits, tile, memory, pairs, rates, of_picked, with_mean=with_mean)
