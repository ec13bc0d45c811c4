"""Shifts of tokens by one place within sequences: they align labels with logits."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch

from trajpack.kernels.validation import (
    check_boundaries,
    check_choice,
    check_cu_seqlens,
    check_tensor,
    values_to_check,
)

End: TypeAlias = Literal["first", "last"]
Direction: TypeAlias = Literal["left", "right"]


def shift_tokens(
    x: torch.Tensor,
    cu_seqlens: torch.Tensor,
    direction: Direction,
    fill: bool | int | float = 0,
) -> torch.Tensor:
    """Move the values of tokens by one place within their sequences, and never across a boundary.

    ``"left"`` moves each token's label, mask or log-probability to the place where a model predicts
    it. ``"right"`` moves a model's output for the next token to that token's own index, as in
    ``rollout_logprobs``.

    Args:
        x: ``[tokens, *rest]`` of a dtype that torch can fill by index: neither FP8 nor uint16 to
            uint64.
        cu_seqlens: ``[sequences + 1]`` int32 boundaries in memory, of padding too: starts at 0,
            ends at ``tokens``, never decreases. A micro-batch's ``cu_seqlens_padded``.
        direction: ``"left"`` or ``"right"``.
        fill: Value of the last token of each sequence, or of the first.

    Returns:
        A tensor like ``x``. Differentiable with respect to it.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If shapes or devices disagree; on the host, where boundaries can be read for
            nothing, also if they do not go from 0 to ``tokens``.

    Example:
        >>> cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
        >>> shift_tokens(torch.arange(5), cu_seqlens, "left", fill=-100)
        tensor([   1,    2, -100,    4, -100])
        >>> shift_tokens(torch.arange(5), cu_seqlens, "right", fill=-100)
        tensor([-100,    0,    1, -100,    3])
    """
    _check("shift_tokens", x, cu_seqlens)
    check_choice("shift_tokens", "direction", direction, get_args(Direction))
    end: End = "last" if direction == "left" else "first"
    if not x.shape[0]:
        return x.clone()
    moved = x.roll(-1 if direction == "left" else 1, 0)
    return moved.index_fill(0, end_tokens(cu_seqlens, x.shape[0], end), fill)


def end_tokens(cu_seqlens: torch.Tensor, num_tokens: int, end: End) -> torch.Tensor:
    """Return the index of the first or last token of each sequence; any index if it is empty.

    Example:
        >>> end_tokens(torch.tensor([0, 3, 5, 5]), 5, "last")
        tensor([2, 4, 4])
    """
    bounds = cu_seqlens.long()
    index = bounds[:-1] if end == "first" else bounds[1:] - 1
    # an empty sequence at either end of the batch points past it: to an end that is one anyway
    return index.remainder(num_tokens)


def drop_tokens(
    x: torch.Tensor, cu_seqlens: torch.Tensor, end: End, num_sequences: int
) -> torch.Tensor:
    """Remove the first or the last token of each sequence.

    Inputs without their last tokens and labels without their first ones have the same length, and
    no label crosses a boundary.

    Args:
        x: ``[tokens, *rest]`` of any dtype.
        cu_seqlens: As for `shift_tokens`.
        end: Token that each sequence loses, ``"first"`` or ``"last"``.
        num_sequences: Sequences with tokens, known from their lengths on the host.

    Returns:
        ``[tokens - num_sequences, *rest]``. Differentiable with respect to ``x``.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: As `shift_tokens`.

    Example:
        >>> cu_seqlens = torch.tensor([0, 3, 5], dtype=torch.int32)
        >>> drop_tokens(torch.arange(5), cu_seqlens, "last", 2)
        tensor([0, 1, 3])
        >>> drop_tokens(torch.arange(5), cu_seqlens, "first", 2)
        tensor([1, 2, 4])
    """
    _check("drop_tokens", x, cu_seqlens)
    check_choice("drop_tokens", "end", end, get_args(End))
    readable = values_to_check(cu_seqlens)
    if readable is not None and (with_tokens := int((readable.diff() > 0).sum())) != num_sequences:
        raise ValueError(
            f"drop_tokens: num_sequences must be {with_tokens}, the sequences with tokens, got "
            f"{num_sequences}"
        )
    left = dropped_boundaries(cu_seqlens).long()
    place = torch.arange(x.shape[0] - num_sequences, device=x.device)
    sequence = torch.searchsorted(left, place, right=True) - 1
    kept = cu_seqlens.long()[sequence] + place - left[sequence] + (end == "first")
    return x.index_select(0, kept)


def dropped_boundaries(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return the boundaries of sequences that have each lost a token, int32.

    Example:
        >>> dropped_boundaries(torch.tensor([0, 3, 5, 5], dtype=torch.int32))
        tensor([0, 2, 3, 3], dtype=torch.int32)
    """
    left = (cu_seqlens.diff() - 1).clamp(min=0).cumsum(0, dtype=torch.int32)
    return torch.cat([cu_seqlens[:1], left])


def _check(op: str, x: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    check_tensor(op, "x", x, or_more=True)
    check_cu_seqlens(op, cu_seqlens, device=x.device)
    check_boundaries(op, cu_seqlens, x.shape[0])
