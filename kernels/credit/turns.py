"""Credit of the turns of a batch: scans along turns, scores, and values copied to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from trajpack.kernels.block_shapes import DEFAULT, block_shape
from trajpack.kernels.dispatch import register_op
from trajpack.kernels.fields.build import check_runs
from trajpack.kernels.reduce.segment_reduce import segment_reduce_reference
from trajpack.kernels.runs import Run
from trajpack.kernels.scan.credit_scan import run_scan
from trajpack.kernels.scan.scan_inputs import Limits, Scan, ScanChunks
from trajpack.kernels.validation import (
    check_boundaries,
    check_indices,
    check_segments_within,
    values_to_check,
)


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
    valid: torch.Tensor
    """bool: False where the last turn was truncated."""
    shares: torch.Tensor
    """int32 ``[parts, 2]``: the trajectories with turns in each part of all, and those of them
    with a score that is not 0. Only valid ones count, if ``masks``."""


def credit_of_turns(  # noqa: PLR0913 - a convention is an argument
    chunks: ScanChunks,
    cu_turns: torch.Tensor,
    turn_ids: torch.Tensor,
    *,
    num_positions: int,
    max_seqlen: int | None = None,
    gamma: float,
    lam: float,
    observation: str,
    impl: str,
    values: torch.Tensor | None = None,
    bootstrap: torch.Tensor | None = None,
    weights: Sequence[torch.Tensor] = (),
    kl: Sequence[torch.Tensor] = (),
    kl_estimator: str | None = None,
    limits: Limits | None = None,
    by_turn: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan the chunks of each trajectory as one segment.

    Args:
        chunks: Scanned tokens of each turn; turns in order, trajectory after trajectory.
        cu_turns: ``[trajectories + 1]`` int32 boundaries of the trajectories' turns.
        turn_ids: ``[tokens]`` int32: turn that generated each token, or -1.
        num_positions: Upper bound of the chunks' tokens.
        max_seqlen: Upper bound of a trajectory's scanned tokens, if known. It decides how the work
            is cut. A wrong bound costs time; results of trajectories beyond 4,096 scanned tokens
            may then differ by rounding.
        gamma: Discount from one token to the next.
        lam: λ of GAE.
        observation: Convention for tokens that were not generated.
        impl: ``"torch"`` or ``"triton"``.
        values: float32 ``[tokens]``.
        bootstrap: float32 ``[trajectories]``: value behind the last token.
        weights: Log-probabilities of the trained and of the sampling policy, float32 ``[tokens]``
            each, for V-trace. Chunks then hold generated tokens alone, unless the others are steps.
        kl: Log-probabilities of the sampling and of the reference policy.
        kl_estimator: Estimator of the KL penalty.
        limits: Bounds and weights of rewards, penalties and ratios.
        by_turn: Whether a turn is one action. Its result is then at its first generated token;
            the other entries are undefined.

    Returns:
        Advantages and returns, float32 ``[tokens]``, 0 where not generated.

    Cost: one launch where ``max_seqlen`` or ``num_positions`` is at most 4,096, else two. No
        copy, no host synchronisation.
    """
    results: tuple[torch.Tensor, torch.Tensor] = torch.ops.trajpack.credit_of_turns(
        turn_ids,
        cu_turns,
        *chunks,
        values,
        bootstrap,
        list(weights),
        list(kl),
        gamma,
        lam,
        observation,
        list(limits or Limits()),
        kl_estimator,
        by_turn,
        impl,
        num_positions,
        max_seqlen,
    )
    return results


def scores_of_trajectories(  # noqa: PLR0913 - tables of a batch
    turn_rewards: torch.Tensor,
    turn_truncated: torch.Tensor,
    cu_generated: torch.Tensor,
    cu_turns: torch.Tensor,
    group_ids: torch.Tensor,
    *,
    clip: float,
    impl: str,
    given: torch.Tensor | None = None,
    masks: bool = False,
) -> Scores:
    """Sum the rewards and the generated tokens of each trajectory's turns.

    ``turn_rewards`` are float64, ``cu_generated`` int32 ``[turns + 1]``: generated tokens before
    each turn. ``group_ids`` are int32 ``[trajectories]``, negative for padding, which
    `Scores.shares` leave out. ``given`` are floats ``[trajectories]`` in place of the sums. Scores
    are clipped to ``[-clip, clip]``.

    Cost: one launch. No copy, no host synchronisation.
    """
    return Scores(
        *torch.ops.trajpack.scores_of_trajectories(
            turn_rewards,
            turn_truncated,
            cu_generated,
            cu_turns,
            group_ids,
            given,
            clip,
            masks,
            impl,
        )
    )


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

    Cost: one launch, which writes 4 bytes of a token and reads the run table. No copy, no host
    synchronisation.
    """
    found: tuple[torch.Tensor, torch.Tensor] = torch.ops.trajpack.spread(
        *turns, values, steps, index, others, weight, impl
    )
    return found


def _run_credit(turn_ids: torch.Tensor, cu_turns: torch.Tensor, *inputs: Any) -> tuple[Any, Any]:
    chunks, (values, bootstrap, weights, kl) = ScanChunks(*inputs[:5]), inputs[5:9]
    gamma, lam, observation, limits, estimator, by_turn, impl, num_positions, longest = inputs[9:]
    _check_chunks(chunks, cu_turns, turn_ids.shape[0], num_positions)
    scan = Scan(
        cu_turns,
        turn_ids.shape[0],
        num_positions,
        values=values,
        gamma=gamma,
        lam=lam,
        observation=observation,
        bootstrap=bootstrap,
        weights=tuple(weights) or None,
        kl=tuple(kl) or None,
        estimator=estimator,
        chunks=chunks,
        turn_ids=turn_ids,
        by_turn=by_turn,
        limits=Limits(*limits),
        kind="vtrace" if weights else "gae",
        max_seqlen=longest,
    )
    return run_scan(scan, impl)


def _check_chunks(
    chunks: ScanChunks, cu_turns: torch.Tensor, num_tokens: int, num_positions: int
) -> None:
    """Raise if the values of the tables can be read and lead out of the tokens."""
    op, num_chunks = "credit_of_turns", chunks.rewards.shape[0]
    check_boundaries(op, cu_turns, num_chunks, name="cu_turns", end="turns")
    check_segments_within(op, "spans", chunks.spans, num_tokens)
    check_segments_within(op, "cu_positions", chunks.cu_positions, num_positions)
    readable = values_to_check(chunks.cu_positions)
    if readable is not None:
        begins = chunks.begins.cpu()
        scanned = torch.stack([begins, begins + readable.diff()], 1)
        check_segments_within(op, "chunks from begins", scanned, num_tokens)


def _run_scores(
    turn_rewards: torch.Tensor,
    turn_truncated: torch.Tensor,
    cu_generated: torch.Tensor,
    cu_turns: torch.Tensor,
    *inputs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    group_ids, given, clip, masks, impl = inputs
    num_turns = turn_rewards.shape[0]
    check_boundaries("scores_of_trajectories", cu_turns, num_turns, name="cu_turns", end="turns")
    if impl == "triton":
        from trajpack.kernels.credit.turns_triton import scores_forward

        tables = turn_rewards, turn_truncated, cu_generated, cu_turns, group_ids
        return scores_forward(*tables, given, clip=clip, masks=masks)
    scores = given
    if scores is None:
        scores = segment_reduce_reference(turn_rewards, cu_turns, None, "sum")
    scores = scores.double().clamp(-clip, clip)
    ends = cu_turns[1:].long()
    lengths = cu_generated[cu_turns.long()].diff()
    has_turns = ends > cu_turns[:-1]
    valid = torch.ones_like(has_turns)
    if num_turns:
        valid = ~(has_turns & turn_truncated[(ends - 1).clamp(min=0)])
    counted = (group_ids >= 0) & valid if masks else group_ids >= 0
    shares = torch.stack([counted.sum(), (counted & (scores != 0)).sum()]).int()[None]
    return scores, lengths, valid, shares


def _run_spread(
    turn_ids: torch.Tensor, runs: torch.Tensor, *inputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    values, steps, index, others, weight, impl = inputs
    if index is not None:
        check_indices("spread", "index", index, values.shape[0] + 1)  # an empty turn may end them
    if impl == "triton":
        from trajpack.kernels.credit.turns_triton import spread_forward

        turns = next(one for one in (index, steps, values) if one is not None).shape[0]
        check_runs("spread", runs, turn_ids.shape[0])
        if (table := values_to_check(runs)) is not None:
            generates = table[:, Run.START].diff() > table[:-1, Run.GENERATED]
            check_indices("spread", "turns of runs", table[:-1, Run.TURN][generates], turns)
        return spread_forward(turn_ids.shape[0], runs, *inputs[:4], weight=weight)
    turn = turn_ids.long()
    place = turn if index is None else _take(index, turn)
    spread = torch.zeros_like(turn_ids, dtype=torch.float32)
    if values is not None:
        spread = _take(values, torch.where(turn < 0, -1, place.long()))
    if steps is not None:
        spread = spread + weight * _take(steps, turn)
    if others is None:
        return spread, spread.new_empty(0)
    return spread, _take(others, torch.where(turn < 0, -1, place.long()))


def _take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows at ``index``; 0 where it is negative."""
    return torch.cat([rows, rows.new_zeros(1)])[index]


def _fake_credit(turn_ids: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = torch.empty_like(turn_ids, dtype=torch.float32)
    return advantages, torch.empty_like(advantages)


def _fake_scores(turn_rewards: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, ...]:
    scores = turn_rewards.new_empty(inputs[2].shape[0] - 1)
    lengths = torch.empty_like(scores, dtype=torch.int32)
    valid = torch.empty_like(scores, dtype=torch.bool)
    parts = 1
    if inputs[-1] == "triton":
        parts = -(-scores.shape[0] // block_shape("scores_kernel", DEFAULT).block)
    return scores, lengths, valid, lengths.new_empty((parts, 2))


def _fake_spread(turn_ids: torch.Tensor, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    spread = torch.empty_like(turn_ids, dtype=torch.float32)
    return spread, spread.new_empty(0) if inputs[4] is None else torch.empty_like(spread)


register_op(
    "credit_of_turns(Tensor turn_ids, Tensor cu_turns, Tensor cu_positions, Tensor begins, "
    "Tensor spans, Tensor rewards, Tensor? truncated, Tensor? values, Tensor? bootstrap, "
    "Tensor[] weights, Tensor[] kl, float gamma, float lam, str observation, float[] limits, "
    "str? estimator, bool by_turn, str impl, SymInt num_positions, "
    "SymInt? max_seqlen) -> (Tensor, Tensor)",
    _run_credit,
    _fake_credit,
)
register_op(
    "scores_of_trajectories(Tensor turn_rewards, Tensor turn_truncated, Tensor cu_generated, "
    "Tensor cu_turns, Tensor group_ids, Tensor? given, float clip, bool masks, str impl) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _run_scores,
    _fake_scores,
)
register_op(
    "spread(Tensor turn_ids, Tensor runs, Tensor? values, Tensor? steps, Tensor? index, "
    "Tensor? others, float weight, str impl) -> (Tensor, Tensor)",
    _run_spread,
    _fake_spread,
)
