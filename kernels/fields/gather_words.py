"""Tensors on one device, concatenated into a stream of 4-byte words."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.dispatch import Impl, call_op, check_not_captured, register_op, resolve_impl
from trajpack.kernels.validation import check_boundaries, check_tensor

OP = "gather_words"


class Piece(IntEnum):
    """Columns of the table of pieces, the tensors: one row for each."""

    ADDRESS = 0
    """Address of the tensor's first entry on the device."""
    START = 1
    """Index of its first word in the stream; the next row's START ends it."""
    KIND = 2
    """Conversion of its entries, a `Kind`."""


PIECE_WIDTH = 4
"""int64 numbers in a row: one 32-byte sector, the last unused."""


class Kind(IntEnum):
    """Conversion of an entry to a word."""

    WORD = 0
    """None: int32 and float32."""
    INT64 = 1
    """Low 32 bits."""
    INT16 = 2
    INT8 = 3
    UINT8 = 4
    """bool too."""
    FLOAT64 = 5
    """Rounded to float32."""
    BFLOAT16 = 6
    FLOAT16 = 7


KINDS = {
    torch.int32: Kind.WORD,
    torch.int64: Kind.INT64,
    torch.int16: Kind.INT16,
    torch.int8: Kind.INT8,
    torch.uint8: Kind.UINT8,
    torch.bool: Kind.UINT8,
    torch.float32: Kind.WORD,
    torch.float64: Kind.FLOAT64,
    torch.bfloat16: Kind.BFLOAT16,
    torch.float16: Kind.FLOAT16,
}
"""Conversion of each dtype that is accepted."""

MAX_WORDS = 2**31 - 1024
"""Most words of a stream: the kernel counts whole tiles of 1,024 in int32."""


def gather_words(tensors: Sequence[torch.Tensor], impl: Impl = "auto") -> torch.Tensor:
    """Concatenate tensors of any mixture of dtypes into one stream of 4-byte words.

    Args:
        tensors: One-dimensional, contiguous, on one device; entries of an integer or bool
            dtype become int32 (of int64 the low 32 bits), of a floating one the bits of
            float32. A tensor may be empty, and so may the sequence.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.

    Returns:
        ``[words]`` int32 on the device of the tensors; the CPU's where there are none. No
        gradient flows.

    Raises:
        TypeError: If an entry is not a tensor, or of another dtype.
        ValueError: If one is not one-dimensional or not contiguous (a strided view is not
            copied in silence), if devices differ, or if there are more than ``MAX_WORDS``.
        RuntimeError: If ``impl`` cannot run, or a CUDA graph is captured.

    Cost: one copy of 32 bytes a tensor and one launch; no host synchronisation. About 0.5 µs
    of the host a tensor.

    Example:
        >>> ids, logprobs = torch.tensor([7, 8]), torch.tensor([-0.5], dtype=torch.float64)
        >>> words = gather_words([ids, logprobs])
        >>> words[:2], words[2:].view(torch.float32)
        (tensor([7, 8], dtype=torch.int32), tensor([-0.5000]))
    """
    tensors = list(tensors)
    table = piece_table(tensors)
    if not tensors or resolve_impl(OP, impl, tensors[0].device) == "torch":
        return gather_words_reference(tensors)
    num_words = int(table[-1, Piece.START])
    device = tensors[0].device
    check_not_captured(OP, device, "its table leaves host memory that is gone by the replay")
    rows = torch.from_numpy(table)
    if device.type == "cuda":
        rows = rows.pin_memory()
    # `tensors` keeps the memory alive until the launch is in the stream
    words: torch.Tensor = call_op("gather_words", rows.to(device, non_blocking=True), num_words)
    return words


def piece_table(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    """Return the table of addresses that ``torch.ops.trajpack.gather_words`` reads.

    The op, in Triton alone, takes the table on the device of the tensors, and its number of words.
    Keep the tensors until it has been called, on the stream that filled them.

    Args:
        tensors: As for `gather_words`.

    Returns:
        ``[pieces + 1, 4]`` int64, see `Piece`; START of the last row is the number of words.

    Raises:
        TypeError, ValueError: As `gather_words`.

    Cost: about 0.5 µs a tensor; nothing is read from the device.

    Example:
        >>> table = piece_table([torch.zeros(3), torch.zeros(2, dtype=torch.int64)])
        >>> table[:, Piece.START], table[:2, Piece.KIND]
        (array([0, 3, 5]), array([0, 1]))
    """
    table = np.zeros((len(tensors) + 1, PIECE_WIDTH), np.int64)
    try:
        device = tensors[0].device if tensors else None
        table[:-1, Piece.KIND] = [KINDS[tensor.dtype] for tensor in tensors]
        table[:-1, Piece.ADDRESS] = [tensor.data_ptr() for tensor in tensors]
        lengths = [length for tensor in tensors for length in tensor.shape]
        fits = all(t.is_contiguous() and t.device == device for t in tensors)
    except (AttributeError, KeyError):
        fits, lengths = False, []
    if not fits or len(lengths) != len(tensors):
        first = getattr(tensors[0], "device", None)  # of what is no tensor there is none
        for index, tensor in enumerate(tensors):
            name = f"tensors[{index}]"
            check_tensor(OP, name, tensor, dtypes=tuple(KINDS), device=first)
            if not tensor.is_contiguous():
                raise ValueError(f"{OP}: {name} must be contiguous, got stride {tensor.stride(0)}")
    np.cumsum(lengths, out=table[1:, Piece.START])
    if table[-1, Piece.START] > MAX_WORDS:
        raise ValueError(f"{OP}: at most {MAX_WORDS} words, got {table[-1, Piece.START]}")
    return table


def gather_words_reference(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Define `gather_words` in plain torch: cast each tensor, concatenate all."""
    words = [
        tensor.detach().float().view(torch.int32) if tensor.is_floating_point() else tensor.int()
        for tensor in tensors
    ]
    return torch.cat(words) if words else torch.empty(0, dtype=torch.int32, device="cpu")


def _run(table: torch.Tensor, num_words: int) -> torch.Tensor:
    resolve_impl(OP, "triton", table.device)
    check_boundaries(OP, table[:, Piece.START], num_words, name="pieces", end="num_words")
    from trajpack.kernels.fields.gather_words_triton import gather_words_forward

    return gather_words_forward(table, num_words)


register_op(
    "gather_words(Tensor table, SymInt num_words) -> Tensor",
    _run,
    lambda table, num_words: table.new_empty(num_words, dtype=torch.int32),
)
