# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of moments and whitening.

`moments_kernel` stores the moments of every chunk of ``CHUNK`` entries: mean, then squared
deviations, of entries held in registers. The last program, which an integer counter finds, merges
the chunks in an order that depends on their number alone. Chunks without a counted entry change no
bit. `whiten_kernel` stores whole chunks, unmasked and full width; the loads of all chunks but the
last are unmasked too.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import DEFAULT, block_shape, launch_on

CHUNK = block_shape("whiten", DEFAULT).block
"""The same on every architecture: it decides the order of the sums, as PARTIALS does."""
PARTIALS = 512
"""Chunks whose moments are read at once."""
RESULTS = 8
"""Count, mean, squared deviations, minimum, maximum; count, sum, sum of squares."""
ALIGNMENT = 16
"""Alignment of inputs in bytes, so that there is one layout and one order of sums."""


@triton.jit
def _load_chunk(x, mask, first, entries, CHUNK: tl.constexpr):
    """Return the entries of the chunk at ``first``, 0 where they do not count, and which do."""
    lane = tl.arange(0, CHUNK)
    # else the mask, which could be loaded by 16, has the floats loaded in its layout, not theirs
    place = tl.max_contiguous(mask + first + lane, 4)
    if first + CHUNK <= entries:
        value = tl.load(x + first + lane)
        byte = tl.load(place)
    else:
        inside = lane < entries - first
        value = tl.load(x + first + lane, mask=inside, other=0.0)
        byte = tl.load(place, mask=inside, other=0)
    counted = byte != 0
    return tl.where(counted, value, 0.0), counted


@triton.jit
def _merge_chunks(partials, num_chunks, PARTIALS: tl.constexpr):
    """Return count, mean, squared deviations, minimum and maximum of all chunks together."""
    lane = tl.arange(0, PARTIALS)
    count = tl.zeros((PARTIALS,), tl.float64)
    total = tl.zeros((PARTIALS,), tl.float64)
    low = total + float("inf")
    high = total - float("inf")
    done = 0
    while done < num_chunks:
        known = done + lane < num_chunks
        column = partials + (done + lane)
        count += tl.load(column, mask=known, other=0.0)
        total += tl.load(column + num_chunks, mask=known, other=0.0)
        least = tl.load(column + 3 * num_chunks, mask=known, other=float("inf"))
        low = tl.minimum(low, least)
        most = tl.load(column + 4 * num_chunks, mask=known, other=float("-inf"))
        high = tl.maximum(high, most)
        done += PARTIALS
    lowest = tl.min(low, 0)
    highest = tl.max(high, 0)
    counts = tl.sum(count, 0)
    mean = tl.sum(total, 0) / tl.maximum(counts, 1.0)
    mean = tl.where(lowest == highest, lowest, mean)
    squares = tl.zeros((PARTIALS,), tl.float64)
    done = 0
    while done < num_chunks:
        known = done + lane < num_chunks
        column = partials + (done + lane)
        count = tl.load(column, mask=known, other=0.0)
        total = tl.load(column + num_chunks, mask=known, other=0.0)
        away = tl.where(count > 0, total / tl.maximum(count, 1.0) - mean, 0.0)
        own = tl.load(column + 2 * num_chunks, mask=known, other=0.0)
        squares += own + count * (away * away)
        done += PARTIALS
    deviations = tl.where(lowest == highest, 0.0, tl.sum(squares, 0))
    is_number = tl.abs(mean) >= 0.0
    lowest = tl.where(is_number, lowest, mean)
    highest = tl.where(is_number, highest, mean)
    return counts, mean, deviations, lowest, highest


@triton.jit
def store_moments(value, counted, results, counter, shift, PARTIALS: tl.constexpr):
    """Store the moments of this program's chunk; the last program merges those of all.

    ``value`` is 0 where it does not count. ``results`` has 8 entries for moments and sums, then 5
    for each chunk. ``counter`` is 0 before the launch and after it.
    """
    low = tl.min(tl.where(counted, value, float("inf")), 0)
    high = tl.max(tl.where(counted, value, float("-inf")), 0)
    count = tl.sum(counted.to(tl.int32), 0).to(tl.float64)
    total = tl.sum(value.to(tl.float64), 0)
    deviation = tl.where(counted, value.to(tl.float64) - total / tl.maximum(count, 1.0), 0.0)
    squares = tl.sum(deviation * deviation, 0)
    num_chunks = tl.num_programs(0).to(tl.int64)
    column = results + 8 + tl.program_id(0)
    tl.store(column, count)
    tl.store(column + num_chunks, total)
    tl.store(column + 2 * num_chunks, squares)
    tl.store(column + 3 * num_chunks, low.to(tl.float64))
    tl.store(column + 4 * num_chunks, high.to(tl.float64))
    if tl.atomic_add(counter, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        counts, mean, deviations, lowest, highest = _merge_chunks(results + 8, num_chunks, PARTIALS)
        tl.store(results, counts)
        tl.store(results + 1, mean)
        tl.store(results + 2, deviations)
        tl.store(results + 3, lowest)
        tl.store(results + 4, highest)
        away = tl.where(counts > 0, mean - shift, 0.0)
        tl.store(results + 5, counts)
        tl.store(results + 6, counts * away)
        tl.store(results + 7, deviations + counts * away * away)
        tl.store(counter, 0)


@triton.jit(do_not_specialize=["entries"])
def moments_kernel(
    x, mask, results, counter, entries: tl.int64, shift: tl.float64,
    CHUNK: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """Write the moments of all entries, and the sums that they amount to."""
    first = tl.program_id(0).to(tl.int64) * CHUNK
    value, counted = _load_chunk(x, mask, first, entries, CHUNK)
    store_moments(value, counted, results, counter, shift, PARTIALS)


@triton.jit(
    do_not_specialize=["entries", "is_sums", "ddof", "center"],
    do_not_specialize_on_alignment=["given"],
)
def whiten_kernel(
    x, mask, given, whitened, entries: tl.int64, is_sums, shift: tl.float64, noise: tl.float64,
    ddof, eps: tl.float64, center, CHUNK: tl.constexpr,
):  # fmt: skip
    """Whiten a chunk by moments, or by sums that were added up.

    The definitions are `trajpack.kernels.reduce.whiten.moments_of_sums` and `whiten_reference`.
    """
    count = tl.load(given)
    first = tl.load(given + 1)
    second = tl.load(given + 2)
    away = first / tl.maximum(count, 1.0)
    squares = second - first * away
    squares = tl.where(squares <= second * noise, 0.0, squares)
    squares = tl.where(is_sums != 0, squares, second)
    mean = tl.where(is_sums != 0, shift + away, first)
    varies = (count > ddof) & (squares != 0.0)
    std = tl.sqrt(squares) / tl.sqrt(tl.maximum(count - ddof, 1.0))
    scale = tl.where(varies, 1.0 / tl.where(varies, std + eps, 1.0), 0.0)
    kept = tl.where(center != 0, 0.0, mean)
    begin = tl.program_id(0).to(tl.int64) * CHUNK
    value, counted = _load_chunk(x, mask, begin, entries, CHUNK)
    result = tl.where(varies, (value.to(tl.float64) - mean) * scale, 0.0) + kept
    result = tl.where(counted, result, 0.0)
    tl.store(whitened + begin + tl.arange(0, CHUNK), result.to(tl.float32))


def moments_forward(x: torch.Tensor, mask: torch.Tensor, shift: float) -> torch.Tensor:
    """Return moments and sums [8] of contiguous tensors, in one launch."""
    x, mask = aligned(x), aligned(mask)
    programs = max(triton.cdiv(x.shape[0], CHUNK), 1)
    results, counter = empty_results(programs, x.device)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        moments_kernel[(programs,)](
            x, mask, results, counter, x.shape[0], shift, CHUNK=CHUNK, PARTIALS=PARTIALS,
            **launch_on("whiten", x.get_device()).options,
        )  # fmt: skip
    return results[:RESULTS]


def whiten_forward(
    x: torch.Tensor,
    mask: torch.Tensor,
    given: torch.Tensor,
    *,
    shift: float,
    noise: float,
    ddof: int,
    eps: float,
    center: bool,
) -> torch.Tensor:
    """Return whitened entries of contiguous tensors, in one launch; 3 of ``given`` are sums."""
    x, mask = aligned(x), aligned(mask)
    programs = triton.cdiv(x.shape[0], CHUNK)
    whitened = torch.empty(programs * CHUNK, dtype=torch.float32, device=x.device)
    if programs:
        with torch.cuda.device_of(x):
            whiten_kernel[(programs,)](
                x, mask, given, whitened, x.shape[0], int(given.shape[0] == 3), shift, noise,
                ddof, eps, int(center), CHUNK=CHUNK,
                **launch_on("whiten", x.get_device()).options,
            )  # fmt: skip
    return whitened[: x.shape[0]]


def empty_results(programs: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ``results`` and the ``counter`` of `store_moments`.

    Launches of a stream follow each other, so they share a counter, which each leaves at 0. A
    graph may be replayed on any stream: it sets a counter of its own to 0.
    """
    results = torch.empty(RESULTS + 5 * programs, dtype=torch.float64, device=device)
    if device.type != "cuda":
        return results, _counter_of(device, 0)
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            return results, torch.zeros(1, dtype=torch.int32, device=device)
        return results, _counter_of(device, torch.cuda.current_stream().cuda_stream)


@cache
def _counter_of(device: torch.device, stream: int) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, a mask as bytes, copied if it is not aligned."""
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.int8)  # Triton takes a bool pointer for one bit
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
