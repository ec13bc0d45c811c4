"""Values of turns and trajectories, copied to every token that they generated."""

from __future__ import annotations

from typing import NamedTuple

import torch

from trajpack.kernels.dispatch import register_op
from trajpack.kernels.reduce.whiten import masked_moments_torch, whiten_with_moments


class Turns(NamedTuple):
    """Location of the turns of a batch."""

    turn_ids: torch.Tensor
    """int32 ``[tokens]``: turn that generated each token, or -1."""
    cu_turns: torch.Tensor
    """int32 ``[trajectories + 1]``: boundaries of the trajectories' turns."""
    spans: torch.Tensor
    """int32 ``[turns, 2]``: first generated token of each turn, and one past its last."""


class TokenSpread(NamedTuple):
    """Values at the generated tokens, and their moments."""

    rows: torch.Tensor
    """float32 ``[tokens]``, 0 where not generated."""
    others: torch.Tensor
    """float32 ``[tokens]``: the second of two values; else empty."""
    partials: torch.Tensor
    """float64 ``[5, chunks]``: moments of chunks of ``rows``, for `finish_spread`."""


def spread_of_trajectories(
    turns: Turns,
    rows: torch.Tensor | None,
    steps: torch.Tensor | None,
    *,
    weight: float,
    impl: str,
) -> TokenSpread:
    """Give each generated token its trajectory's row plus ``weight`` times its turn's step.

    Args:
        turns: Location of the turns.
        rows: ``[trajectories]`` float32, or ``None`` for 0.
        steps: ``[turns]`` float32, or ``None`` for 0; not both are ``None``.
        weight: Factor of the steps.
        impl: ``"torch"`` or ``"triton"``.

    Cost: one launch. No copy, no host synchronisation.
    """
    return TokenSpread(*torch.ops.trajpack.spread(*turns, rows, steps, None, weight, impl))


def spread_of_turns(
    turns: Turns, rows: torch.Tensor, others: torch.Tensor, impl: str
) -> TokenSpread:
    """Give each generated token two values from the first generated token of its turn.

    Args:
        turns: Location of the turns.
        rows: ``[tokens]`` float32, read at the turns' first generated tokens alone.
        others: The second value, in the same form.
        impl: ``"torch"`` or ``"triton"``.

    Cost: one launch. No copy, no host synchronisation.
    """
    return TokenSpread(*torch.ops.trajpack.spread(*turns, rows, None, others, 0.0, impl))


def finish_spread(
    spread: TokenSpread, loss_mask: torch.Tensor, whitening: int | None, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows, whitened if asked for, and their `masked_moments` before whitening.

    Args:
        spread: Rows and their partial moments.
        loss_mask: ``[tokens]`` bool: tokens that count.
        whitening: ``ddof`` of `whiten`, or ``None`` for no whitening.
        impl: ``"torch"`` or ``"triton"``.

    Cost: one launch. No copy, no host synchronisation.
    """
    if impl == "triton":
        rows, moments = torch.ops.trajpack.finish_spread(
            spread.rows, loss_mask, spread.partials, whitening
        )
        return (spread.rows if whitening is None else rows), moments
    if whitening is not None:
        return whiten_with_moments(spread.rows, loss_mask, ddof=whitening, impl="torch")
    return spread.rows, spread.partials[:, 0]


def _run(
    turn_ids: torch.Tensor,
    cu_turns: torch.Tensor,
    spans: torch.Tensor,
    rows: torch.Tensor | None,
    steps: torch.Tensor | None,
    others: torch.Tensor | None,
    weight: float,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if impl == "triton":
        from trajpack.kernels.credit.spread_triton import spread_forward

        turns = Turns(turn_ids, cu_turns, spans)
        return spread_forward(turns, rows, steps, others=others, weight=weight)
    if others is None:
        of_turns = spans.new_zeros(spans.shape[0], dtype=torch.float32)
        if rows is not None:
            turn = torch.arange(spans.shape[0], device=spans.device)
            of_turns = _take(rows, torch.searchsorted(cu_turns[1:].long(), turn, right=True))
        if steps is not None:
            of_turns = of_turns + weight * steps
        spread, other = _take(of_turns, turn_ids.long()), of_turns.new_empty(0)
    else:
        assert rows is not None
        spread, other = (
            _take(_take(table, spans[:, 0].long()), turn_ids.long()) for table in (rows, others)
        )
    moments = masked_moments_torch(spread, turn_ids >= 0)
    return spread, other, moments[:, None]


def _take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows at ``index``; 0 where it is out of range."""
    exists = (index >= 0) & (index < rows.shape[0])
    rows = torch.cat([rows, rows.new_zeros(1)])
    return rows[torch.where(exists, index, rows.shape[0] - 1)]


def _fake(
    turn_ids: torch.Tensor,
    cu_turns: torch.Tensor,
    spans: torch.Tensor,
    rows: torch.Tensor | None,
    steps: torch.Tensor | None,
    others: torch.Tensor | None,
    *_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    spread = turn_ids.new_empty(turn_ids.shape[0], dtype=torch.float32)
    other = spread.new_empty(0) if others is None else torch.empty_like(spread)
    return spread, other, spread.new_empty((5, 1), dtype=torch.float64)


def _finish(
    rows: torch.Tensor, loss_mask: torch.Tensor, partials: torch.Tensor, whitening: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    from trajpack.kernels.reduce.whiten_triton import merge_chunks, whiten_by_chunks

    if whitening is not None:
        return whiten_by_chunks(rows, loss_mask.view(torch.int8), partials, ddof=whitening)
    return rows.new_empty(0), merge_chunks(partials, 0.0)[0]


def _fake_finish(
    rows: torch.Tensor, loss_mask: torch.Tensor, partials: torch.Tensor, whitening: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows[:0] if whitening is None else rows), partials.new_empty(5)


register_op(
    "spread(Tensor turn_ids, Tensor cu_turns, Tensor spans, Tensor? rows, Tensor? steps, "
    "Tensor? others, float weight, str impl) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
register_op(
    "finish_spread(Tensor rows, Tensor loss_mask, Tensor partials, int? whitening) "
    "-> (Tensor, Tensor)",
    _finish,
    _fake_finish,
)
