"""Padding on the host: what `pad` and `unpad` do for CPU tensors.

First touch of fresh memory dominates here, so results are taken from numpy, whose large arrays
come in huge pages, and every byte of them is written once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Dtype in which elements of so many bytes are moved bit for bit."""
SHORT = 1024
"""Mean bytes of a sequence below which one gather is faster than a copy for each (measured)."""


def pad_on_host(
    packed: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    value: complex,
    side: str,
) -> torch.Tensor:
    """Write the rows of `trajpack.kernels.rearrange.pad.pad`."""
    source, ends = _bits(packed), cu_seqlens.numpy().astype(np.int64)
    fill = _bits(torch.full((1,), value, dtype=packed.dtype, device="cpu"))[0]
    batch = ends.size - 1
    out = np.empty((batch, max_seqlen, *source.shape[1:]), source.dtype)
    if _is_short(ends, source):
        out[...] = fill
        rows = out.reshape(batch * max_seqlen, *source.shape[1:])
        rows[_places(ends, max_seqlen, side)] = source
        return torch.from_numpy(out).view(packed.dtype)
    bounds = ends.tolist()
    for row, begin, end in zip(out, bounds[:-1], bounds[1:], strict=True):
        room = max_seqlen - (end - begin)
        if side == "left":
            row[:room] = fill
            row[room:] = source[begin:end]
        else:
            row[: end - begin] = source[begin:end]
            row[end - begin :] = fill
    return torch.from_numpy(out).view(packed.dtype)


def unpad_on_host(
    padded: torch.Tensor, cu_seqlens: torch.Tensor, num_tokens: int, side: str
) -> torch.Tensor:
    """Write the tokens of `trajpack.kernels.rearrange.pad.unpad`."""
    source, ends = _bits(padded), cu_seqlens.numpy().astype(np.int64)
    max_seqlen = source.shape[1]
    out = np.empty((num_tokens, *source.shape[2:]), source.dtype)
    if _is_short(ends, out):
        place = _places(ends, max_seqlen, side)
        if source.flags.c_contiguous:
            flat = source.reshape(len(source) * max_seqlen, *source.shape[2:])
            np.take(flat, place, 0, out, mode="clip")  # in range; "raise" would copy twice
        else:
            out[...] = source[np.divmod(place, max(max_seqlen, 1))]
        return torch.from_numpy(out).view(padded.dtype)
    bounds = ends.tolist()
    for row, begin, end in zip(source, bounds[:-1], bounds[1:], strict=True):
        if side == "left":
            out[begin:end] = row[max_seqlen - (end - begin) :]
        else:
            out[begin:end] = row[: end - begin]
    return torch.from_numpy(out).view(padded.dtype)


def _bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Return the memory of a tensor as numbers that numpy knows; nothing is copied."""
    bits: npt.NDArray[Any] = tensor.detach().view(BITS[tensor.element_size()]).numpy()
    return bits


def _is_short(ends: npt.NDArray[np.int64], packed: npt.NDArray[Any]) -> bool:
    return packed.nbytes < SHORT * (ends.size - 1)


def _places(ends: npt.NDArray[np.int64], max_seqlen: int, side: str) -> npt.NDArray[np.int64]:
    """Return where each token stands among the ``batch · max_seqlen`` places."""
    lengths = np.diff(ends)
    first = np.arange(lengths.size) * max_seqlen
    if side == "left":
        first += max_seqlen - lengths
    return np.arange(ends[-1]) + np.repeat(first - ends[:-1], lengths)
