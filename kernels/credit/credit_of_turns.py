"""Scans along the generated tokens of turns, wherever they are in a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trajpack.kernels.dispatch import register_op
from trajpack.kernels.scan.credit_scan import run_scan
from trajpack.kernels.scan.scan_inputs import Limits, Scan, ScanChunks


class Conventions(NamedTuple):
    """Settings of a scan along turns that are not tensors."""

    gamma: float
    lam: float
    observation: str = "carry"
    limits: Limits = Limits()
    estimator: str | None = None
    by_turn: bool = False


class TokenInputs(NamedTuple):
    """Tensors that a scan along turns reads: float32 ``[tokens]`` each, but for ``bootstrap``."""

    values: torch.Tensor | None = None
    bootstrap: torch.Tensor | None = None
    """float32 ``[trajectories]``: value behind the last token."""
    weights: tuple[torch.Tensor, torch.Tensor] | None = None
    """Log-probabilities of the trained and of the sampling policy; V-trace with, GAE without."""
    kl: tuple[torch.Tensor, torch.Tensor] | None = None
    """Log-probabilities of the sampling and of the reference policy."""


def credit_of_turns(
    chunks: ScanChunks,
    cu_turns: torch.Tensor,
    turn_ids: torch.Tensor,
    *,
    inputs: TokenInputs,
    conventions: Conventions,
    num_positions: int,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan the chunks of each trajectory as one segment.

    Args:
        chunks: Scanned tokens of each turn; turns in order, trajectory after trajectory.
        cu_turns: ``[trajectories + 1]`` int32 boundaries of the trajectories' turns.
        turn_ids: ``[tokens]`` int32: turn that generated each token, or -1.
        inputs: Values, bootstraps and log-probabilities. With ``weights``, chunks must hold
            generated tokens alone, unless the tokens between are steps.
        conventions: Discounts and conventions. With ``by_turn`` the result of a turn is at its
            first generated token; the other entries are undefined.
        num_positions: Upper bound of the chunks' tokens; decides how the work is cut.
        impl: ``"torch"`` or ``"triton"``.

    Returns:
        Advantages and returns, float32 ``[tokens]``, 0 where not generated.

    Cost: one launch for up to 8,192 positions, else two. No copy, no host synchronisation.
    """
    results: tuple[torch.Tensor, torch.Tensor] = torch.ops.trajpack.credit_of_turns(
        turn_ids,
        cu_turns,
        *chunks,
        inputs.values,
        inputs.bootstrap,
        list(inputs.weights or ()),
        list(inputs.kl or ()),
        conventions.gamma,
        conventions.lam,
        conventions.observation,
        list(conventions.limits),
        conventions.estimator,
        conventions.by_turn,
        impl,
        num_positions,
    )
    return results


def _run(turn_ids: torch.Tensor, cu_turns: torch.Tensor, *inputs: Any) -> tuple[Any, Any]:
    chunks, (values, bootstrap, weights, kl) = inputs[:5], inputs[5:9]
    gamma, lam, observation, limits, estimator, by_turn, impl, num_positions = inputs[9:]
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
        chunks=ScanChunks(*chunks),
        turn_ids=turn_ids,
        by_turn=by_turn,
        limits=Limits(*limits),
        kind="vtrace" if weights else "gae",
    )
    return run_scan(scan, impl)


def _fake(turn_ids: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = torch.empty_like(turn_ids, dtype=torch.float32)
    return advantages, torch.empty_like(advantages)


register_op(
    "credit_of_turns(Tensor turn_ids, Tensor cu_turns, Tensor cu_positions, Tensor begins, "
    "Tensor spans, Tensor rewards, Tensor? truncated, Tensor? values, Tensor? bootstrap, "
    "Tensor[] weights, Tensor[] kl, float gamma, float lam, str observation, float[] limits, "
    "str? estimator, bool by_turn, str impl, SymInt num_positions) -> (Tensor, Tensor)",
    _run,
    _fake,
)
