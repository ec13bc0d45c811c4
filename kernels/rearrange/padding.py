"""What `pad` and `unpad` share: the words of padding, its places, and the checks."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

Side: TypeAlias = Literal["left", "right"]

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""By bytes of an element, a dtype that every op moves unchanged; values are never looked at."""

MAX_ROWS = 2**31 - 4096
"""Tokens, and ``max_seqlen``, at most: the kernels count them in int32, a tile further on."""


def sequence_places(
    cu_seqlens: torch.Tensor, max_seqlen: int, side: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return where each sequence begins, ends, and how much padding stands before it."""
    begin, end = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    room = (max_seqlen - (end - begin)).clamp(min=0)
    return begin, end, room if side == "left" else torch.zeros_like(room)


def check_tokens(op: str, name: str, tensor: torch.Tensor, ndim: int, side: str) -> None:
    """Raise unless ``tensor`` has ``ndim`` dimensions or more, and ``side`` is one."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(tensor).__name__}")
    if tensor.ndim < ndim:
        shape = list(tensor.shape)
        raise ValueError(f"{op}: {name} must have at least {ndim} dimension(s), got shape {shape}")
    if side not in ("left", "right"):
        raise ValueError(f"{op}: side must be 'left' or 'right', got {side!r}")


def check_count(op: str, name: str, count: int) -> None:
    """Raise unless the kernels can count as far."""
    if not isinstance(count, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an integer, got {count!r}")
    if not 0 <= count <= MAX_ROWS:
        raise ValueError(f"{op}: {name} must be in [0, {MAX_ROWS}], got {count}")
