# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of moments and whitening.

`moments_kernel` has at most `PARTS` programs. A program walks over every `PARTS`-th chunk of
``CHUNK`` entries, takes their mean, then their squared deviations, from registers, and merges
the chunks one after another; of float32 under a mask it loads the next chunk ahead. The last
program, which an integer counter finds, merges the parts in an order that depends on their number
alone. Chunks without a counted entry change no bit. Whitened chunks are stored whole, unmasked and
full width; the loads of all chunks but the last are unmasked too.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import block_shape
from trajpack.kernels.launches import cdiv, launch_on

CHUNK = block_shape("whiten").block
"""The same on every architecture: it decides the order of the sums, as PARTS does."""
PARTS = 256
MOMENTS = tl.constexpr(5)
COUNTERS = 1024
"""Counters that are made at once."""
ALIGNMENT = 16
"""Alignment of inputs in bytes, so that there is one layout and one order of sums."""


@triton.jit
def _load_chunk(x, counts, first, entries, CHUNK: tl.constexpr):
    """Return the entries of the chunk at ``first``, and how often they count."""
    lane = tl.arange(0, CHUNK)
    # else the mask, which could be loaded by 16, has the floats loaded in its layout, not theirs
    place = tl.max_contiguous(counts + first + lane, 4)
    if first + CHUNK <= entries:
        value = tl.load(x + first + lane)
        count = tl.load(place)
    else:
        inside = lane < entries - first
        value = tl.load(x + first + lane, mask=inside, other=0.0)
        count = tl.load(place, mask=inside, other=0)
    return value, count


@triton.jit
def _join_sums(low, high, count, total, other_low, other_high, other_count, other_total):
    """Return extremes and sums of two sets of entries. NaN shows in the total alone."""
    low, high = tl.minimum(low, other_low), tl.maximum(high, other_high)
    return low, high, count + other_count, total + other_total


@triton.jit
def _of_chunk(value, numbers):
    """Return the moments of a chunk."""
    value = tl.where(numbers != 0, value, 0.0)
    low = tl.where(numbers != 0, value, float("inf"))
    high = tl.where(numbers != 0, value, float("-inf"))
    value = value.to(tl.float64)
    weighted = value
    weight = numbers.to(tl.float64)
    if numbers.dtype != tl.int8:  # no mask
        weighted = weight * value
    # together, so that the warps of a program wait for each other once
    low, high, count, total = tl.reduce((low, high, numbers.to(tl.int32), weighted), 0, _join_sums)
    count = count.to(tl.float64)
    mean = total / tl.maximum(count, 1.0)
    away = value - mean
    squares = away * away
    if numbers.dtype != tl.int8:
        squares = weight * squares
    squares = tl.sum(tl.where(numbers != 0, squares, 0.0), 0)
    return _settled(count, mean, squares, low.to(tl.float64), high.to(tl.float64))


@triton.jit
def _settled(count, mean, squares, low, high):
    """Return moments whose deviations are 0 where all entries are equal, and NaN where one is."""
    mean = tl.where(low == high, low, mean)
    squares = tl.where(low == high, 0.0, squares)
    is_number = tl.abs(mean) >= 0.0
    low, high = tl.where(is_number, low, mean), tl.where(is_number, high, mean)
    return count, mean, squares, low, high


@triton.jit
def _merge(parts, num_parts, PARTS: tl.constexpr):
    """Return the moments of all parts together."""
    lane = tl.arange(0, PARTS)
    known = lane < num_parts
    counts = tl.load(parts + lane, mask=known, other=0.0)
    means = tl.load(parts + num_parts + lane, mask=known, other=0.0)
    squares = tl.load(parts + 2 * num_parts + lane, mask=known, other=0.0)
    low = tl.min(tl.load(parts + 3 * num_parts + lane, mask=known, other=float("inf")), 0)
    high = tl.max(tl.load(parts + 4 * num_parts + lane, mask=known, other=float("-inf")), 0)
    count = tl.sum(counts, 0)
    first = tl.load(parts + num_parts)
    first = tl.where(tl.abs(first) < float("inf"), first, 0.0)
    # about the first part's mean, which stays as it is where no other part counts an entry
    mean = first + tl.sum(counts * (means - first), 0) / tl.maximum(count, 1.0)
    away = tl.where(counts > 0, means - mean, 0.0)
    return _settled(count, mean, tl.sum(squares + counts * (away * away), 0), low, high)


@triton.jit
def _store_all(out, count, mean, squares, low, high):
    """Store the moments of all entries; the extremes of none are 0."""
    _store(
        out, 1, count, mean, squares, tl.where(count > 0, low, 0.0), tl.where(count > 0, high, 0.0)
    )


@triton.jit
def _store(out, stride, count, mean, squares, low, high):
    tl.store(out, count)
    tl.store(out + stride, mean)
    tl.store(out + 2 * stride, squares)
    tl.store(out + 3 * stride, low)
    tl.store(out + 4 * stride, high)


@triton.jit(do_not_specialize=["entries"])
def moments_kernel(
    x, counts, moments, counter, entries: tl.int64, CHUNK: tl.constexpr, PARTS: tl.constexpr
):
    """Write the moments of all entries, and behind them those of each program's chunks.

    Program ``p`` takes every chunk whose number leaves ``p`` as the remainder. ``counter`` is 0.
    """
    count = tl.full((), 0.0, tl.float64)
    mean, squares = count, count
    low, high = count + float("inf"), count - float("inf")
    first = tl.program_id(0).to(tl.int64) * CHUNK
    # the next chunk is loaded while one is summed, where registers suffice for both
    AHEAD: tl.constexpr = x.dtype.element_ty == tl.float32 and counts.dtype.element_ty == tl.int8
    if AHEAD:
        value, numbers = _load_chunk(x, counts, first, entries, CHUNK)
    while first < entries:
        if not AHEAD:
            value, numbers = _load_chunk(x, counts, first, entries, CHUNK)
        first += tl.num_programs(0).to(tl.int64) * CHUNK
        if AHEAD:
            following = value, numbers
            if first < entries:
                following = _load_chunk(x, counts, first, entries, CHUNK)
        number, center, own, least, most = _of_chunk(value, numbers)
        low, high = tl.minimum(low, least), tl.maximum(high, most)
        total = tl.maximum(count + number, 1.0)
        apart = tl.where(number > 0, center - mean, 0.0)
        squares += own + apart * apart * (count * (number / total))
        mean += apart * (number / total)
        count += number
        if AHEAD:
            value, numbers = following
    count, mean, squares, low, high = _settled(count, mean, squares, low, high)
    num_parts = tl.num_programs(0)
    parts = moments + MOMENTS
    _store(parts + tl.program_id(0), num_parts, count, mean, squares, low, high)
    if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
        count, mean, squares, low, high = _merge(parts, num_parts, PARTS)
        _store_all(moments, count, mean, squares, low, high)


@triton.jit(
    do_not_specialize=["entries", "ddof", "center"], do_not_specialize_on_alignment=["given"]
)
def whiten_kernel(
    x, counts, given, moments, whitened, entries: tl.int64, ddof, eps: tl.float64, center,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Whiten a chunk by moments, as `trajpack.kernels.reduce.whiten.whiten_reference`.

    One program alone takes its own moments if none are given, and writes them to ``moments``.
    Memory is allocated for a whole last chunk.
    """
    first = tl.program_id(0).to(tl.int64) * CHUNK
    value, numbers = _load_chunk(x, counts, first, entries, CHUNK)
    if given is None:
        count, mean, squares, low, high = _of_chunk(value, numbers)
        _store_all(moments, count, mean, squares, low, high)
    else:
        count, mean, squares = tl.load(given), tl.load(given + 1), tl.load(given + 2)
    varies = (count > ddof) & (squares != 0.0)
    std = tl.sqrt(squares) / tl.sqrt(tl.maximum(count - ddof, 1.0))
    scale = tl.where(varies, 1.0 / tl.where(varies, std + eps, 1.0), 0.0)
    kept = tl.where(center != 0, 0.0, mean)
    result = tl.where(varies, tl.fma(value.to(tl.float64) - mean, scale, kept), kept)
    result = tl.where(numbers != 0, result.to(tl.float32), 0.0)
    tl.store(whitened + first + tl.arange(0, CHUNK), result)


def moments_forward(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return moments ``[5]`` of contiguous tensors, in one launch."""
    x, counts = aligned(x), aligned(counts)
    parts = max(min(cdiv(x.shape[0], CHUNK), PARTS), 1)
    moments = torch.empty(MOMENTS.value * (parts + 1), dtype=torch.float64, device=x.device)
    launch_on("whiten", x.get_device())(
        moments_kernel, parts, x, counts, moments, new_counter(x.device), x.shape[0], CHUNK=CHUNK,
        PARTS=PARTS,
    )  # fmt: skip
    return moments[: MOMENTS.value]


def whiten_forward(
    x: torch.Tensor,
    counts: torch.Tensor,
    given: torch.Tensor | None,
    *,
    ddof: int,
    eps: float,
    center: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whitened entries of contiguous tensors, and their moments or those that are given.

    One launch with moments that are given, and for one chunk; else two.
    """
    x, counts = aligned(x), aligned(counts)
    chunks = cdiv(x.shape[0], CHUNK)
    whitened = torch.empty(chunks * CHUNK, dtype=torch.float32, device=x.device)
    if given is None and chunks != 1:
        given = moments_forward(x, counts)
    moments = x.new_empty(MOMENTS.value, dtype=torch.float64) if given is None else given
    launch_on("whiten", x.get_device())(
        whiten_kernel, chunks, x, counts, given, moments, whitened, x.shape[0], ddof, eps,
        int(center), CHUNK=CHUNK,
    )  # fmt: skip
    return whitened[: x.shape[0]], moments


def new_counter(device: torch.device) -> torch.Tensor:
    """Return an int32 that is 0 and that no other launch has, so none can leave it at a number.

    One in `COUNTERS` calls on a stream launches a fill; so does each call in a capture, for the
    graph is replayed.
    """
    if device.type != "cuda":
        return torch.zeros(1, dtype=torch.int32, device=device)
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return torch.zeros(1, dtype=torch.int32, device=device)
        unused = _unused[device, torch.cuda.current_stream().cuda_stream]
        if not unused:
            unused.extend(torch.zeros(COUNTERS, dtype=torch.int32, device=device).split(1))
        return unused.pop()


_unused: dict[tuple[torch.device, int], list[torch.Tensor]] = defaultdict(list)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, a mask as bytes, copied if it is not aligned."""
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.int8)  # Triton takes a bool pointer for one bit
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
