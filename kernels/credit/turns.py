"""Credit of the turns of a batch: scans along turns, scores, and values copied to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from trajpack.kernels.dispatch import register_op
from trajpack.kernels.reduce.segment_reduce import segment_reduce_torch
from trajpack.kernels.reduce.whiten import run_moments
from trajpack.kernels.scan.credit_scan import run_scan
from trajpack.kernels.scan.scan_inputs import Limits, Scan, ScanChunks
from trajpack.kernels.validation import (
    check_boundaries,
    check_indices,
    check_segments_within,
    values_to_check,
)


class Turns(NamedTuple):
    """Location of the turns of a batch."""

    turn_ids: torch.Tensor
    """int32 ``[tokens]``: turn that generated each token, or -1."""
    cu_turns: torch.Tensor
    """int32 ``[trajectories + 1]``: boundaries of the trajectories' turns."""
    spans: torch.Tensor
    """int32 ``[turns, 2]``: first generated token of each turn, and one past its last."""


class Scores(NamedTuple):
    """Trajectories as members of their groups: ``[trajectories]`` each."""

    scores: torch.Tensor
    """float64: sum of the turns' rewards."""
    lengths: torch.Tensor
    """int32: number of generated tokens."""
    valid: torch.Tensor
    """bool: False where the last turn was truncated."""


class TokenSpread(NamedTuple):
    """Values at the generated tokens, and their moments."""

    rows: torch.Tensor
    """float32 ``[tokens]``, 0 where not generated."""
    others: torch.Tensor
    """float32 ``[tokens]``: the second of two values; else empty."""
    moments: torch.Tensor
    """float64 ``[8]``: `masked_moments`, then `moment_sums`, of the generated tokens' ``rows``."""


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


def scores_of_trajectories(
    turn_rewards: torch.Tensor,
    turn_truncated: torch.Tensor,
    cu_generated: torch.Tensor,
    cu_turns: torch.Tensor,
    *,
    clip: float,
    impl: str,
) -> Scores:
    """Sum the rewards and the generated tokens of each trajectory's turns.

    ``turn_rewards`` are float64, ``cu_generated`` int32 ``[turns + 1]``: generated tokens before
    each turn. Scores are clipped to ``[-clip, clip]``.

    Cost: one launch. No copy, no host synchronisation.
    """
    return Scores(
        *torch.ops.trajpack.scores_of_trajectories(
            turn_rewards, turn_truncated, cu_generated, cu_turns, clip, impl
        )
    )


def spread_of_trajectories(
    turns: Turns,
    rows: torch.Tensor | None,
    steps: torch.Tensor | None,
    *,
    weight: float,
    impl: str,
) -> TokenSpread:
    """Give each generated token its trajectory's row plus ``weight`` times its turn's step.

    ``rows`` are float32 ``[trajectories]``, ``steps`` float32 ``[turns]``; one of them may be
    ``None``, for 0.

    Cost: one launch. No copy, no host synchronisation.
    """
    return TokenSpread(*torch.ops.trajpack.spread(*turns, rows, steps, None, weight, impl))


def spread_of_turns(
    turns: Turns, rows: torch.Tensor, others: torch.Tensor, impl: str
) -> TokenSpread:
    """Give each generated token two values from the first generated token of its turn.

    ``rows`` and ``others`` are float32 ``[tokens]``, read at the turns' first tokens alone.

    Cost: one launch. No copy, no host synchronisation.
    """
    return TokenSpread(*torch.ops.trajpack.spread(*turns, rows, None, others, 0.0, impl))


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
    clip: float,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_turns = turn_rewards.shape[0]
    check_boundaries("scores_of_trajectories", cu_turns, num_turns, name="cu_turns", end="turns")
    if impl == "triton":
        from trajpack.kernels.credit.turns_triton import scores_forward

        return scores_forward(turn_rewards, turn_truncated, cu_generated, cu_turns, clip)
    scores = segment_reduce_torch(turn_rewards, cu_turns, None, "sum").clamp(-clip, clip)
    ends = cu_turns[1:].long()
    lengths = cu_generated[cu_turns.long()].diff()
    if not turn_rewards.shape[0]:
        return scores, lengths, torch.ones_like(lengths, dtype=torch.bool)
    has_turns = ends > cu_turns[:-1]
    return scores, lengths, ~(has_turns & turn_truncated[(ends - 1).clamp(min=0)])


def _run_spread(
    turn_ids: torch.Tensor,
    cu_turns: torch.Tensor,
    spans: torch.Tensor,
    rows: torch.Tensor | None,
    steps: torch.Tensor | None,
    others: torch.Tensor | None,
    weight: float,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    num_turns = spans.shape[0]
    check_boundaries("spread", cu_turns, num_turns, name="cu_turns", end="turns")
    check_segments_within("spread", "spans", spans, turn_ids.shape[0])
    if impl == "triton":
        from trajpack.kernels.credit.turns_triton import spread_forward

        check_indices("spread", "turn_ids", turn_ids, num_turns, least=-1)
        turns = Turns(turn_ids, cu_turns, spans)
        return spread_forward(turns, rows, steps, others=others, weight=weight)
    if others is not None:
        assert rows is not None
        first = spans[:, 0].long()
        spread, other = (_take(_take(table, first), turn_ids.long()) for table in (rows, others))
    else:
        of_turns = spans.new_zeros(spans.shape[0], dtype=torch.float32)
        if rows is not None:
            turn = torch.arange(spans.shape[0], device=spans.device)
            of_turns = _take(rows, torch.searchsorted(cu_turns[1:].long(), turn, right=True))
        if steps is not None:
            of_turns = of_turns + weight * steps
        spread, other = _take(of_turns, turn_ids.long()), of_turns.new_empty(0)
    return spread, other, run_moments(spread, turn_ids >= 0, 0.0, "torch")


def _take(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows at ``index``; 0 where it is out of range."""
    exists = (index >= 0) & (index < rows.shape[0])
    rows = torch.cat([rows, rows.new_zeros(1)])
    return rows[torch.where(exists, index, rows.shape[0] - 1)]


def _fake_credit(turn_ids: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = torch.empty_like(turn_ids, dtype=torch.float32)
    return advantages, torch.empty_like(advantages)


def _fake_scores(
    turn_rewards: torch.Tensor, *inputs: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scores = turn_rewards.new_empty(inputs[2].shape[0] - 1)
    lengths = torch.empty_like(scores, dtype=torch.int32)
    return scores, lengths, torch.empty_like(scores, dtype=torch.bool)


def _fake_spread(
    turn_ids: torch.Tensor, *inputs: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    spread = turn_ids.new_empty(turn_ids.shape[0], dtype=torch.float32)
    other = spread.new_empty(0) if inputs[4] is None else torch.empty_like(spread)
    return spread, other, spread.new_empty(8, dtype=torch.float64)


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
    "Tensor cu_turns, float clip, str impl) -> (Tensor, Tensor, Tensor)",
    _run_scores,
    _fake_scores,
)
register_op(
    "spread(Tensor turn_ids, Tensor cu_turns, Tensor spans, Tensor? rows, Tensor? steps, "
    "Tensor? others, float weight, str impl) -> (Tensor, Tensor, Tensor)",
    _run_spread,
    _fake_spread,
)
