"""Inputs of a scan over tokens, and the checks of an estimator's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch

from trajpack.kernels.runs import MAX_TOKENS
from trajpack.kernels.scan.observations import OBSERVATIONS
from trajpack.kernels.validation import (
    check_choice,
    check_cu_seqlens,
    check_integer,
    check_max_seqlen,
    check_tensor,
)

FLOATS = (torch.float32, torch.float64)
KINDS = ("gae", "returns", "vtrace", "adjoint")
"""Kinds of scan: advantages and returns; discounted returns alone; V-trace; the gradient of the
first two with respect to rewards."""
FLOATS_OF_TOKENS = {
    "gae": ("values",),
    "returns": (),
    "vtrace": ("values", "logprobs", "rollout_logprobs"),
}
"""Inputs of each kind, beside rewards."""


class Limits(NamedTuple):
    """Bounds and weights of rewards, KL penalties and importance ratios."""

    kl_coefficient: float = 0.0
    kl_clamp: float = float("inf")
    reward_clip: float = float("inf")
    rho_clip: float = float("inf")
    c_clip: float = float("inf")
    advantage_rho_clip: float = float("inf")


class Scan(NamedTuple):
    """One scan over tokens: the arguments of ``torch.ops.trajpack.credit_scan``, in its order.

    Floats of tokens are float32 or float64. Optional inputs are ``None``. A scan of a batch's turns
    has chunks in place of rewards: a chunk is a stretch of tokens anywhere in the batch, the
    scanned part of one turn. Chunks of a segment follow each other, and are scanned as if they were
    contiguous; a position is an index into the concatenated chunks.
    """

    cu_seqlens: torch.Tensor
    """int32 ``[segments + 1]``: boundaries of the segments, in tokens or in chunks."""
    rewards: torch.Tensor | None = None
    """Floats ``[tokens]``."""
    values: torch.Tensor | None = None
    """Floats ``[tokens]``."""
    loss_mask: torch.Tensor | None = None
    """bool ``[tokens]``: True on generated tokens."""
    gamma: float | torch.Tensor = 1.0
    """A tensor only as an argument of `scan_tokens`, as ``lam``."""
    lam: float | torch.Tensor = 1.0
    observation: str = "carry"
    gammas: torch.Tensor | None = None
    """float64 ``[segments]``: replaces ``gamma``."""
    lams: torch.Tensor | None = None
    """float64 ``[segments]``: replaces ``lam``."""
    bootstrap: torch.Tensor | None = None
    """Floats ``[segments]``: value behind the last token."""
    logprobs: torch.Tensor | None = None
    """Log-probabilities ``[tokens]``, of the trained policy for V-trace."""
    rollout_logprobs: torch.Tensor | None = None
    """Log-probabilities ``[tokens]`` of the sampling policy, for V-trace."""
    ref_logprobs: torch.Tensor | None = None
    """Log-probabilities ``[tokens]`` of the reference policy, for a penalty with chunks."""
    estimator: str | None = None
    """Estimator of the KL penalty, one of `KL_ESTIMATORS`."""
    cu_positions: torch.Tensor | None = None
    """int32 ``[chunks + 1]``: first position of each chunk."""
    begins: torch.Tensor | None = None
    """int32 ``[chunks]``: first token of each chunk."""
    spans: torch.Tensor | None = None
    """int32 ``[chunks, 2]``: first generated token of each chunk, and one past its last."""
    turn_rewards: torch.Tensor | None = None
    """float64 ``[chunks]``: reward on the last generated token of each chunk."""
    turn_ids: torch.Tensor | None = None
    """int32 ``[tokens]``: chunk that generated each token, or a negative number."""
    num_positions: int | None = None
    """Upper bound of the number of scanned tokens; without it all may be."""
    by_turn: bool = False
    """Whether a chunk is one action. Its result is then at its first generated token; the other
    entries are undefined."""
    limits: Sequence[float] = Limits()
    kind: str = "gae"
    max_seqlen: int | None = None
    """Upper bound of a segment's length, if known. It decides how the work is cut."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the results."""
        tokens = self.turn_ids if self.rewards is None else self.rewards
        assert tokens is not None
        return tokens.shape[0]

    @property
    def positions(self) -> int:
        """Upper bound of the number of scanned tokens."""
        return self.num_tokens if self.num_positions is None else self.num_positions

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_chunks(self) -> int:
        """Number of chunks; 0 without."""
        return 0 if self.turn_rewards is None else self.turn_rewards.shape[0]


def check_scan_inputs(op: str, scan: Scan) -> None:
    """Raise unless the arguments of an estimator agree; no tensor's values are read."""
    rewards: Any = scan.rewards
    cu_seqlens = scan.cu_seqlens
    check_tensor(op, "rewards", rewards, dtypes=FLOATS, constant=scan.kind == "vtrace")
    check_integer(op, "number of entries", rewards.shape[0], most=MAX_TOKENS)
    each: dict[str, Any] = {"device": rewards.device, "entries": rewards.shape[0]}
    check_cu_seqlens(op, cu_seqlens, device=rewards.device)
    if rewards.shape[0] and cu_seqlens.shape[0] == 1:
        raise ValueError(f"{op}: cu_seqlens must bound {rewards.shape[0]} entries, got no segment")
    for name in FLOATS_OF_TOKENS[scan.kind]:
        check_tensor(op, name, getattr(scan, name), dtypes=FLOATS, constant=True, **each)
    check_choice(op, "observation", scan.observation, OBSERVATIONS)
    if scan.loss_mask is not None:
        check_tensor(op, "loss_mask", scan.loss_mask, dtypes=(torch.bool,), **each)
    if scan.bootstrap is not None:
        _check_of_segments(op, "bootstrap", scan.bootstrap, cu_seqlens)
    check_max_seqlen(op, scan.max_seqlen)


def split_rate(
    op: str, name: str, rate: float | torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[float, torch.Tensor | None]:
    """Return a discount or λ as a number, and as a float64 tensor if there is one per segment."""
    if isinstance(rate, torch.Tensor):
        _check_of_segments(op, name, rate, cu_seqlens)
        return 1.0, rate.double()
    if not isinstance(rate, Real):
        raise TypeError(f"{op}: {name} must be a number or a tensor, got {rate!r}")
    return float(rate), None


def _check_of_segments(op: str, name: str, tensor: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """Raise unless ``tensor`` has one constant float for each segment."""
    each: dict[str, Any] = {"device": cu_seqlens.device, "entries": cu_seqlens.shape[0] - 1}
    check_tensor(op, name, tensor, dtypes=FLOATS, per="segment", constant=True, **each)
