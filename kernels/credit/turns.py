"""Credit of the turns of a batch: scores of trajectories, and values copied to tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trajpack.kernels.block_shapes import block_shape
from trajpack.kernels.dispatch import register_op
from trajpack.kernels.fields.build import check_runs
from trajpack.kernels.runs import Run
from trajpack.kernels.scan.segment_sum import segment_sum_reference
from trajpack.kernels.validation import check_boundaries, check_indices, values_to_check


class Turns(NamedTuple):
    """Location of the turns' generated tokens."""

    turn_ids: torch.Tensor
    """int32 ``[tokens]``: turn that generated each token, or -1. Read by ``impl="torch"`` alone."""
    runs: torch.Tensor
    """int32 ``[runs + 1, 8]``, see `trajpack.kernels.runs.Run`. Read by Triton alone."""


class Scores(NamedTuple):
    """Trajectories as members of their groups: ``[trajectories]`` each."""

    scores: torch.Tensor
    """float64: sum of the turns' rewards, or the scores that were given."""
    lengths: torch.Tensor
    """int32: number of generated tokens."""
    shares: torch.Tensor
    """int32 ``[parts, 2]``: the trajectories with turns in each part of all, and those of them
    with a score that is not 0. None of these was truncated."""


def scores_of_trajectories(
    turn_rewards: torch.Tensor,
    cu_generated: torch.Tensor,
    cu_turns: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    clip: float,
    impl: str,
    given: torch.Tensor | None = None,
    truncated: torch.Tensor | None = None,
) -> Scores:
    """Sum the rewards and the generated tokens of each trajectory's turns.

    ``turn_rewards`` are float64, ``cu_generated`` int32 ``[turns + 1]``: generated tokens before
    each turn. ``group_ids`` are int32 ``[trajectories]``, negative for padding, which
    `Scores.shares` leave out as those that ``truncated``, bool ``[trajectories]``, has. ``given``
    are floats ``[trajectories]`` in place of the sums. Scores are clipped to ``[-clip, clip]``.
    """
    tables = turn_rewards, cu_generated, cu_turns, group_ids
    return Scores(*torch.ops.trajpack.scores_of_trajectories(*tables, given, truncated, clip, impl))


def spread(
    turns: Turns,
    values: torch.Tensor | None,
    steps: torch.Tensor | None = None,
    *,
    impl: str,
    index: torch.Tensor | None = None,
    others: torch.Tensor | None = None,
    weight: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Give each generated token ``values[index[turn]] + weight * steps[turn]`` of its turn.

    ``values`` and ``others``, read at the same ``index``, are float32, ``steps`` float32
    ``[turns]``, and ``index`` int32 ``[turns]``; without it a turn's value is at its own number.

    Returns:
        float32 ``[tokens]``, 0 where not generated; and the same of ``others``, else an empty
        tensor.
    """
    rows = values, steps, index, others
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.trajpack.spread(
        *turns, *rows, weight, impl
    )
    return found


def _run_scores(*inputs: Any) -> tuple[torch.Tensor, ...]:
    *tables, given, truncated, clip, impl = inputs
    turn_rewards, cu_generated, cu_turns, group_ids = tables
    num_turns = turn_rewards.shape[0]
    check_boundaries("scores_of_trajectories", cu_turns, num_turns, name="cu_turns", end="turns")
    if impl == "triton":
        from trajpack.kernels.credit.turns_triton import scores_forward

        return scores_forward(*tables, given=given, truncated=truncated, clip=clip)
    scores = given
    if scores is None:
        scores = segment_sum_reference(turn_rewards, cu_turns)
    scores = scores.double().clamp(-clip, clip)
    counted = group_ids >= 0 if truncated is None else (group_ids >= 0) & ~truncated
    shares = torch.stack([counted.sum(), (counted & (scores != 0)).sum()]).int()[None]
    return scores, cu_generated[cu_turns.long()].diff(), shares


def _fake_scores(turn_rewards: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    scores = turn_rewards.new_empty(inputs[1].shape[0] - 1)
    lengths = torch.empty_like(scores, dtype=torch.int32)
    parts = 1
    if inputs[-1] == "triton":
        parts = -(-scores.shape[0] // block_shape("scores_kernel").block)
    return scores, lengths, lengths.new_empty((parts, 2))


def _run_spread(
    turn_ids: torch.Tensor, runs: torch.Tensor, *inputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    values, steps, index, others, weight, impl = inputs
    if index is not None:
        check_indices("spread", "index", index, values.shape[0] + 1)  # an empty turn may end them
    turns = next(one for one in (index, steps, values) if one is not None).shape[0]
    if impl == "triton":
        from trajpack.kernels.credit.turns_triton import spread_forward

        check_runs("spread", runs, turn_ids.shape[0])
        if (table := values_to_check(runs)) is not None:
            generates = table[:, Run.START].diff() > table[:-1, Run.GENERATED]
            check_indices("spread", "turns of runs", table[:-1, Run.TURN][generates], turns)
        return spread_forward(turn_ids.shape[0], runs, *inputs[:4], weight=weight)
    check_indices("spread", "turn_ids", turn_ids, turns, -1)
    turn = turn_ids.long()
    place = turn if index is None else _take(index, turn).long().where(turn >= 0, -1)
    spread = torch.zeros_like(turn_ids, dtype=torch.float32)
    if values is not None:
        spread = _take(values, place)
    if steps is not None:
        spread = spread + weight * _take(steps, turn)
    return spread, spread.new_empty(0) if others is None else _take(others, place)


def _take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows at ``index``; 0 where it is negative."""
    return torch.cat([rows, rows.new_zeros(1)])[index]


def _fake_spread(turn_ids: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    spread = torch.empty_like(turn_ids, dtype=torch.float32)
    return spread, spread.new_empty(0) if inputs[4] is None else torch.empty_like(spread)


register_op(
    "scores_of_trajectories(Tensor turn_rewards, Tensor cu_generated, Tensor cu_turns, "
    "Tensor group_ids, Tensor? given, Tensor? truncated, float clip, str impl) "
    "-> (Tensor, Tensor, Tensor)",
    _run_scores,
    _fake_scores,
)
register_op(
    "spread(Tensor turn_ids, Tensor runs, Tensor? values, Tensor? steps, Tensor? index, "
    "Tensor? others, float weight, str impl) -> (Tensor, Tensor)",
    _run_spread,
    _fake_spread,
)
