# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of moments and whitening.

The first launch stores the moments of every chunk of ``CHUNK`` entries: mean, then squared
deviations, of entries held in registers. In the second each program merges the moments of all
chunks, in an order that depends on their number alone, and whitens its own entries: no third launch
and no atomics. Chunks without a counted entry change no bit. Stores are whole chunks, unmasked and
full width, as are the loads of all chunks but the last.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import DEFAULT, block_shape, launch_on

CHUNK = block_shape("whiten", DEFAULT).block
"""The same on every architecture: it decides the order of the sums, as PARTIALS does."""
PARTIALS = 1024
"""Chunks whose moments are read at once."""
MOST_PROGRAMS = 256
"""Largest number of programs that whiten; each reads the moments of all chunks. All of them fit on
an H200 at once: two blocks of 256 threads on each of 132 SMs."""
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
def store_chunk_moments(value, counted, partials, chunk, num_chunks):
    """Write count, sum, squared deviations, minimum and maximum of a chunk to its column.

    ``value`` is 0 where it does not count.
    """
    low = tl.min(tl.where(counted, value, float("inf")), 0)
    high = tl.max(tl.where(counted, value, float("-inf")), 0)
    count = tl.sum(counted.to(tl.int32), 0).to(tl.float64)
    total = tl.sum(value.to(tl.float64), 0)
    deviation = tl.where(counted, value.to(tl.float64) - total / tl.maximum(count, 1.0), 0.0)
    squares = tl.sum(deviation * deviation, 0)
    column = partials + chunk
    tl.store(column, count)
    tl.store(column + num_chunks, total)
    tl.store(column + 2 * num_chunks, squares)
    tl.store(column + 3 * num_chunks, low.to(tl.float64))
    tl.store(column + 4 * num_chunks, high.to(tl.float64))


@triton.jit(do_not_specialize=["entries", "num_chunks"])
def chunk_moments_kernel(
    x, mask, partials, entries: tl.int64, num_chunks: tl.int64, CHUNK: tl.constexpr
):  # fmt: skip
    """Write the moments of a chunk to its column."""
    chunk = tl.program_id(0)
    value, counted = _load_chunk(x, mask, chunk.to(tl.int64) * CHUNK, entries, CHUNK)
    store_chunk_moments(value, counted, partials, chunk, num_chunks)


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
def _store_moments(moments, count, mean, squares, low, high):
    tl.store(moments, count)
    tl.store(moments + 1, mean)
    tl.store(moments + 2, squares)
    tl.store(moments + 3, low)
    tl.store(moments + 4, high)


@triton.jit(do_not_specialize=["num_chunks"])
def merge_chunks_kernel(
    partials, moments, sums, shift: tl.float64, num_chunks: tl.int64, PARTIALS: tl.constexpr
):
    """Write the moments of all chunks, and the sums that they amount to."""
    count, mean, squares, low, high = _merge_chunks(partials, num_chunks, PARTIALS)
    _store_moments(moments, count, mean, squares, low, high)
    away = tl.where(count > 0, mean - shift, 0.0)
    tl.store(sums, count)
    tl.store(sums + 1, count * away)
    tl.store(sums + 2, squares + count * away * away)


@triton.jit
def _write_whitened(
    x, mask, whitened, entries, chunks_each, count, mean, squares, ddof, eps, center,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Whiten the chunks of this program; see `trajpack.kernels.reduce.whiten.whiten_reference`."""
    varies = (count > ddof) & (squares != 0.0)
    std = tl.sqrt(squares) / tl.sqrt(tl.maximum(count - ddof, 1.0))
    scale = tl.where(varies, 1.0 / tl.where(varies, std + eps, 1.0), 0.0)
    kept = tl.where(center != 0, 0.0, mean)
    lane = tl.arange(0, CHUNK)
    first = tl.program_id(0).to(tl.int64) * chunks_each * CHUNK
    end = tl.minimum(first + chunks_each * CHUNK, entries)
    while first < end:
        value, counted = _load_chunk(x, mask, first, entries, CHUNK)
        result = tl.where(varies, (value.to(tl.float64) - mean) * scale, 0.0) + kept
        result = tl.where(counted, result, 0.0)
        tl.store(whitened + first + lane, result.to(tl.float32))
        first += CHUNK


@triton.jit(do_not_specialize=["entries", "num_chunks", "chunks_each", "ddof", "center"])
def whiten_kernel(
    x, mask, partials, whitened, moments, entries: tl.int64, num_chunks: tl.int64, chunks_each,
    ddof, eps: tl.float64, center, CHUNK: tl.constexpr, PARTIALS: tl.constexpr,
):  # fmt: skip
    """Merge the moments of all chunks and whiten by them; the first program stores them."""
    count, mean, squares, low, high = _merge_chunks(partials, num_chunks, PARTIALS)
    if tl.program_id(0) == 0:
        _store_moments(moments, count, mean, squares, low, high)
    _write_whitened(
        x, mask, whitened, entries, chunks_each, count, mean, squares, ddof, eps, center, CHUNK
    )


@triton.jit(
    do_not_specialize=["entries", "chunks_each", "ddof", "center"],
    do_not_specialize_on_alignment=["sums"],
)
def whiten_by_sums_kernel(
    x, mask, sums, whitened, entries: tl.int64, chunks_each, shift: tl.float64,
    ddof, eps: tl.float64, center, NOISE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Whiten by sums that were added up; see `trajpack.kernels.reduce.whiten.moments_of_sums`."""
    count = tl.load(sums)
    first = tl.load(sums + 1)
    second = tl.load(sums + 2)
    away = first / tl.maximum(count, 1.0)
    squares = second - first * away
    squares = tl.where(squares <= second * NOISE, 0.0, squares)
    _write_whitened(
        x, mask, whitened, entries, chunks_each, count, shift + away, squares, ddof, eps, center,
        CHUNK,
    )  # fmt: skip


def chunk_moments(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Launch a program for each chunk; return float64 ``[5, chunks]``."""
    x, mask = _aligned(x), _aligned(mask)
    num_chunks = triton.cdiv(x.shape[0], CHUNK)
    partials = torch.empty((5, num_chunks), dtype=torch.float64, device=x.device)
    if num_chunks:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            chunk_moments_kernel[(num_chunks,)](
                x, mask, partials, x.shape[0], num_chunks, CHUNK=CHUNK, **_options(x)
            )
    return partials


def merge_chunks(partials: torch.Tensor, shift: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch one program for float64 ``[5, chunks]``; return moments [5] and sums [3]."""
    moments = torch.empty(5, dtype=torch.float64, device=partials.device)
    sums = torch.empty(3, dtype=torch.float64, device=partials.device)
    with torch.cuda.device_of(partials):
        merge_chunks_kernel[(1,)](
            partials, moments, sums, shift, partials.shape[1], PARTIALS=PARTIALS,
            **_options(partials),
        )  # fmt: skip
    return moments, sums


def moments_forward(
    x: torch.Tensor, mask: torch.Tensor, shift: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return moments [5] and sums [3] of contiguous tensors, in two launches."""
    return merge_chunks(chunk_moments(x, mask), shift)


def whiten_forward(
    x: torch.Tensor, mask: torch.Tensor, *, ddof: int, eps: float, center: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whitened entries and moments [5] of contiguous tensors, in two launches."""
    x, mask = _aligned(x), _aligned(mask)
    return whiten_by_chunks(x, mask, chunk_moments(x, mask), ddof=ddof, eps=eps, center=center)


def whiten_by_chunks(
    x: torch.Tensor,
    mask: torch.Tensor,
    partials: torch.Tensor,
    *,
    ddof: int,
    eps: float = 0.0,
    center: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whiten by the moments of chunks; return the moments [5] of all chunks too."""
    whitened, chunks_each, programs = _cut(x)
    moments = torch.empty(5, dtype=torch.float64, device=x.device)
    with torch.cuda.device_of(x):
        whiten_kernel[(max(programs, 1),)](
            x, mask, partials, whitened, moments, x.shape[0], partials.shape[1], chunks_each,
            ddof, eps, int(center), CHUNK=CHUNK, PARTIALS=PARTIALS, **_options(x),
        )  # fmt: skip
    return whitened[: x.shape[0]], moments


def whiten_by_sums_forward(
    x: torch.Tensor,
    mask: torch.Tensor,
    sums: torch.Tensor,
    *,
    shift: float,
    noise: float,
    ddof: int,
    eps: float,
    center: bool,
) -> torch.Tensor:
    """Return whitened entries of contiguous tensors, in one launch."""
    x, mask = _aligned(x), _aligned(mask)
    whitened, chunks_each, programs = _cut(x)
    if programs:
        with torch.cuda.device_of(x):
            whiten_by_sums_kernel[(programs,)](
                x, mask, sums, whitened, x.shape[0], chunks_each, shift, ddof, eps, int(center),
                NOISE=noise, CHUNK=CHUNK, **_options(x),
            )  # fmt: skip
    return whitened[: x.shape[0]]


def _cut(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Return memory in whole chunks, chunks of a program, and number of programs."""
    num_chunks = triton.cdiv(x.shape[0], CHUNK)
    chunks_each = max(triton.cdiv(num_chunks, MOST_PROGRAMS), 1)
    memory = torch.empty(num_chunks * CHUNK, dtype=torch.float32, device=x.device)
    return memory, chunks_each, triton.cdiv(num_chunks, chunks_each)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, a mask as bytes, copied if it is not aligned."""
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.int8)  # Triton takes a bool pointer for one bit
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def _options(tensor: torch.Tensor) -> dict[str, int | bool]:
    return launch_on("whiten", tensor.get_device()).options
