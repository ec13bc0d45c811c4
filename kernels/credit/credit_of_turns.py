"""Scans over what turns generated, wherever it stands in a batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from trajpack.kernels.dispatch import LIBRARY
from trajpack.kernels.scan.credit_scan import Limits, Pieces, Scan, run


class Conventions(NamedTuple):
    """How a scan over turns gives credit: everything about it that is no tensor."""

    gamma: float
    lam: float
    observation: str = "carry"
    limits: Limits = Limits()
    estimator: str | None = None
    by_turn: bool = False


class TokenInputs(NamedTuple):
    """What a scan over turns reads of tokens, float32 ``[tokens]`` each, and behind them."""

    values: torch.Tensor | None = None
    bootstrap: torch.Tensor | None = None
    """float32 ``[trajectories]``: value behind the last token."""
    weights: tuple[torch.Tensor, torch.Tensor] | None = None
    kl: tuple[torch.Tensor, torch.Tensor] | None = None


def credit_of_turns(
    pieces: Pieces,
    cu_turns: torch.Tensor,
    turn_ids: torch.Tensor,
    inputs: TokenInputs,
    conventions: Conventions,
    num_positions: int,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scan the pieces of each trajectory, one behind the other.

    Args:
        pieces: What is scanned of each turn, turns in order, trajectory after trajectory.
        cu_turns: ``[trajectories + 1]`` int32 boundaries of the trajectories' turns.
        turn_ids: ``[tokens]`` int32: turn that generated each token, or -1.
        inputs: With ``weights`` it is V-trace, without it GAE. The pieces of V-trace hold generated
            tokens alone, unless those between are steps.
        conventions: How credit is given. With ``by_turn``, what is put out for a turn stands at its
            first generated token alone; the other entries are undefined.
        num_positions: The pieces have no more tokens; decides how the work is cut.
        impl: ``"torch"`` or ``"triton"``.

    Returns:
        Advantages and returns, float32 ``[tokens]``, 0 where nothing was generated.

    Cost: one launch for up to 8,192 positions, else two. No copy, no host synchronisation.
    """
    advantages, returns = torch.ops.trajpack.credit_of_turns(
        *pieces, cu_turns, turn_ids, inputs.values, inputs.bootstrap,
        list(inputs.weights or ()), list(inputs.kl or ()), conventions.gamma, conventions.lam,
        list(conventions.limits), conventions.observation, conventions.estimator,
        conventions.by_turn, impl, num_positions,
    )  # fmt: skip
    return advantages, returns


def _run(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pieces, (cu_turns, turn_ids, values, bootstrap, weights, kl) = inputs[:5], inputs[5:11]
    gamma, lam, limits, observation, estimator, by_turn, impl, num_positions = inputs[11:]
    scan = Scan(
        cu_turns, turn_ids.shape[0], num_positions, None, values, None, gamma, lam, observation,
        bootstrap=bootstrap, weights=tuple(weights) or None, kl=tuple(kl) or None,
        estimator=estimator, pieces=Pieces(*pieces), turn_ids=turn_ids, by_turn=by_turn,
        limits=Limits(*limits), kind="vtrace" if weights else "gae",
    )  # fmt: skip
    return run(scan, impl)


def _fake(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    advantages = torch.empty_like(inputs[6], dtype=torch.float32)
    return advantages, torch.empty_like(advantages)


LIBRARY.define(
    "credit_of_turns(Tensor cu_positions, Tensor begins, Tensor spans, Tensor rewards, "
    "Tensor? truncated, Tensor cu_turns, Tensor turn_ids, Tensor? values, Tensor? bootstrap, "
    "Tensor[] weights, Tensor[] kl, float gamma, float lam, float[] limits, str observation, "
    "str? estimator, bool by_turn, str impl, SymInt num_positions) -> (Tensor, Tensor)"
)
LIBRARY.impl("credit_of_turns", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::credit_of_turns", _fake, lib=LIBRARY)
