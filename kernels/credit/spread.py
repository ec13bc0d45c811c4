"""From turns and trajectories to tokens: every generated token is given what its turn has."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trajpack.kernels.dispatch import LIBRARY
from trajpack.kernels.reduce.moments import masked_moments_reference
from trajpack.kernels.reduce.whiten import whiten_with_moments
from trajpack.kernels.reduce.whiten_host import moments_on_host


class Turns(NamedTuple):
    """Where the turns of a batch are."""

    turn_ids: torch.Tensor
    """int32 ``[tokens]``: turn that generated each token, or -1."""
    cu_turns: torch.Tensor
    """int32 ``[trajectories + 1]``: boundaries of the trajectories' turns."""
    spans: torch.Tensor
    """int32 ``[turns, 2]``: first token that each turn generated, and one past its last."""


class Spread(NamedTuple):
    """What turns or trajectories have, at their generated tokens."""

    rows: torch.Tensor
    """float32 ``[tokens]``, 0 where not generated."""
    others: torch.Tensor
    """float32 ``[tokens]``: the second of two, or a tensor of no tokens."""
    partials: torch.Tensor
    """float64 ``[5, chunks]``: moments of stretches of ``rows``, for `finish_spread`."""


def spread_of_trajectories(
    turns: Turns, rows: torch.Tensor | None, steps: torch.Tensor | None, weight: float, impl: str
) -> Spread:
    """Give each generated token its trajectory's row, and ``weight`` times its turn's step.

    Args:
        turns: Where they are.
        rows: ``[trajectories]`` float32, or ``None``.
        steps: ``[turns]`` float32, or ``None``; one of the two is there.
        weight: Of a step.
        impl: ``"torch"`` or ``"triton"``.

    Cost: one launch. No copy, no host synchronisation.
    """
    return Spread(*torch.ops.trajpack.spread(*turns, rows, steps, None, weight, impl))


def spread_of_turns(turns: Turns, rows: torch.Tensor, others: torch.Tensor, impl: str) -> Spread:
    """Give each generated token what stands at the first generated token of its turn, twice.

    Args:
        turns: Where they are.
        rows: ``[tokens]`` float32; read at turns' first generated tokens alone.
        others: Like ``rows``.
        impl: ``"torch"`` or ``"triton"``.

    Cost: one launch. No copy, no host synchronisation.
    """
    return Spread(*torch.ops.trajpack.spread(*turns, rows, None, others, 0.0, impl))


def finish_spread(
    spread: Spread, loss_mask: torch.Tensor, whitening: int | None, impl: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows, whitened if asked for, and what `masked_moments` says of them before.

    Args:
        spread: What is finished.
        loss_mask: ``[tokens]`` bool: which tokens count.
        whitening: ``ddof`` of `whiten`, or ``None``.
        impl: ``"torch"`` or ``"triton"``.

    Cost: one launch. No copy, no host synchronisation.
    """
    if impl == "triton":
        rows, moments = torch.ops.trajpack.finish_spread(
            spread.rows, loss_mask, spread.partials, whitening
        )
        return (spread.rows if whitening is None else rows), moments
    if whitening is not None:
        return whiten_with_moments(spread.rows, loss_mask, whitening, 0.0, True, "torch")
    return spread.rows, spread.partials[:, 0]


def _run(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    (turn_ids, cu_turns, spans, rows, steps, others, weight, impl) = inputs
    if impl == "triton":
        from trajpack.kernels.credit.spread_triton import spread_forward

        return spread_forward(Turns(turn_ids, cu_turns, spans), rows, steps, others, weight)
    if others is None:
        of_turns = spans.new_zeros(spans.shape[0], dtype=torch.float32)
        if rows is not None:
            turn = torch.arange(spans.shape[0], device=spans.device)
            of_turns = _taken(rows, torch.searchsorted(cu_turns[1:].long(), turn, right=True))
        if steps is not None:
            of_turns = of_turns + weight * steps
        spread, other = _taken(of_turns, turn_ids.long()), of_turns.new_empty(0)
    else:
        spread, other = (
            _taken(_taken(table, spans[:, 0].long()), turn_ids.long()) for table in (rows, others)
        )
    generated = turn_ids >= 0
    on_host = spread.device.type == "cpu"
    moments_of = moments_on_host if on_host else masked_moments_reference
    return spread, other, moments_of(spread, generated)[:, None]


def _taken(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``index``, 0 where there is none."""
    exists = (index >= 0) & (index < rows.shape[0])
    rows = torch.cat([rows, rows.new_zeros(1)])
    return rows[torch.where(exists, index, rows.shape[0] - 1)]


def _fake(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    turn_ids, rows, others = inputs[0], inputs[3], inputs[5]
    rows = inputs[4] if rows is None else rows
    spread = rows.new_empty(turn_ids.shape[0])
    other = rows.new_empty(0 if others is None else turn_ids.shape[0])
    return spread, other, rows.new_empty((5, 1), dtype=torch.float64)


def _finish(
    rows: torch.Tensor, loss_mask: torch.Tensor, partials: torch.Tensor, whitening: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    from trajpack.kernels.reduce.whiten_triton import merge_chunks, whiten_by_chunks

    if whitening is not None:
        return whiten_by_chunks(rows, loss_mask.view(torch.int8), partials, whitening, 0.0, True)
    return rows.new_empty(0), merge_chunks(partials, 0.0)[0]


def _fake_finish(
    rows: torch.Tensor, loss_mask: torch.Tensor, partials: torch.Tensor, whitening: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(rows[:0] if whitening is None else rows), partials.new_empty(5)


LIBRARY.define(
    "spread(Tensor turn_ids, Tensor cu_turns, Tensor spans, Tensor? rows, Tensor? steps, "
    "Tensor? others, float weight, str impl) -> (Tensor, Tensor, Tensor)"
)
LIBRARY.impl("spread", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::spread", _fake, lib=LIBRARY)
LIBRARY.define(
    "finish_spread(Tensor rows, Tensor loss_mask, Tensor partials, int? whitening) "
    "-> (Tensor, Tensor)"
)
LIBRARY.impl("finish_spread", _finish, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::finish_spread", _fake_finish, lib=LIBRARY)
