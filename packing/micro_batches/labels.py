"""Labels of packed batches and micro-batches, in the conventions that trainers have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from trajpack.kernels.rearrange.shift import Direction, End, drop_tokens, end_tokens, shift_tokens
from trajpack.packing.micro_batches.model_inputs import places_of

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.micro_batches.micro_batch import MicroBatch

Convention: TypeAlias = Literal["next", "own", "drop_last"]


def labels(  # noqa: D417 - a method of batches
    batch: PackedBatch | MicroBatch,
    convention: Convention = "next",
    *,
    ignore: int = -100,
    generated_only: bool = True,
) -> torch.Tensor:
    """Return the tokens to predict; no label crosses a boundary, and none is padding.

    Args:
        convention: Index of a token's label.

            - ``"next"``: where the model predicts the token, one place earlier. Masks,
              advantages and rollout log-probabilities are moved to it by ``shift("left")``.
              The convention of verl, AReaL, slime and Megatron.
            - ``"own"``: the token's own index, for models that shift by themselves, such as
              those of Hugging Face. The first token of a sequence has none.
            - ``"drop_last"``: as ``"next"``, with all sequences one token shorter; its inputs
              are ``drop(input_ids, "last")``. The convention of torchtitan and tinker.
        ignore: Value where there is no label.
        generated_only: Whether the tokens of `loss_mask` have labels, or all but padding: those
            that `PackedBatch.with_loss_mask` dropped too.

    Returns:
        int64 ``[tokens]``; one token less for each sequence with ``"drop_last"``.

    Raises:
        ValueError: If there is no such convention.

    Example:
        >>> import trajpack
        >>> turn = trajpack.Turn([1, 2], [3, 4], [-0.5, -0.5])
        >>> batch = trajpack.pack([trajpack.Trajectory(name, [turn]) for name in "ab"])
        >>> batch.labels()
        tensor([-100,    3,    4, -100, -100,    3,    4, -100])
        >>> batch.labels("own")
        tensor([-100, -100,    3,    4, -100, -100,    3,    4])
        >>> batch.labels("drop_last")
        tensor([-100,    3,    4, -100,    3,    4])
    """
    counted = batch.loss_mask if generated_only else batch.prompt_mask | (batch.turn_ids >= 0)
    own = torch.where(counted, batch.input_ids, ignore)
    if convention == "next":
        return shift(batch, own, "left", ignore)
    if convention == "drop_last":
        return drop(batch, own, "first")
    if convention != "own":
        raise ValueError(f"convention must be 'next', 'own' or 'drop_last', got {convention!r}")
    if not batch.num_tokens:
        return own
    return own.index_fill_(0, end_tokens(places_of(batch), batch.num_tokens, "first"), ignore)


def shift(
    batch: PackedBatch | MicroBatch,
    x: torch.Tensor,
    direction: Direction,
    fill: bool | int | float = 0,
) -> torch.Tensor:
    """Move values ``[tokens, ...]`` by one place within their sequences.

    ``"left"`` brings the next token's value, ``"right"`` that of the token before; where there
    is none, the value is ``fill``.

    Raises:
        TypeError: If ``x`` is no tensor, or ``None`` as missing advantages are.
        ValueError: If ``x`` has another number of tokens, or ``direction`` is neither.
    """
    _check_given(batch, "shift", x)
    return shift_tokens(x, places_of(batch), direction, fill)


def drop(batch: PackedBatch | MicroBatch, x: torch.Tensor, end: End) -> torch.Tensor:
    """Return values ``[tokens, ...]`` without that of each sequence's first or last token.

    So inputs without their last tokens and labels without their first ones have the same
    length. Boundaries are then those of `trajpack.kernels.rearrange.shift.dropped_boundaries`.

    Raises:
        TypeError: If ``x`` is no tensor, or ``None`` as missing advantages are.
        ValueError: If ``x`` has another number of tokens, or ``end`` is neither.
    """
    _check_given(batch, "drop", x)
    lengths = getattr(batch, "padded_seqlens", batch.seqlens)
    return drop_tokens(x, places_of(batch), end, sum(length > 0 for length in lengths))


def _check_given(batch: PackedBatch | MicroBatch, op: str, x: torch.Tensor | None) -> None:
    if x is None and batch.advantages is None:
        raise TypeError(
            f"{op}: x must be a tensor, got None; the batch has no advantages: "
            "call with_advantages first"
        )
