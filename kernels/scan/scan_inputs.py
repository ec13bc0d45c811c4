"""Inputs of a scan over tokens: the tuples that implementations share, and the argument checks."""

from __future__ import annotations

from numbers import Real
from typing import Any, NamedTuple

import torch

from trajpack.kernels.scan.observations import OBSERVATIONS
from trajpack.kernels.validation import (
    check_choice,
    check_cu_seqlens,
    check_max_seqlen,
    check_tensor,
)

FLOATS = (torch.float32, torch.float64)
KINDS = ("gae", "returns", "vtrace", "adjoint")
"""Kinds of scan: advantages and returns; discounted returns alone; V-trace; the gradient of the
first two with respect to rewards."""


class ScanChunks(NamedTuple):
    """Stretches of tokens, anywhere in a batch, that are scanned as if they were contiguous.

    A chunk is the scanned part of one turn; the chunks of a segment follow each other. A position
    is an index into the concatenated chunks.
    """

    cu_positions: torch.Tensor
    """int32 ``[chunks + 1]``: first position of each chunk."""
    begins: torch.Tensor
    """int32 ``[chunks]``: first token of each chunk."""
    spans: torch.Tensor
    """int32 ``[chunks, 2]``: first generated token of each chunk, and one past its last."""
    rewards: torch.Tensor
    """float64 ``[chunks]``: reward on the last generated token of each chunk."""
    truncated: torch.Tensor | None = None
    """bool ``[chunks]``: True where the turn was cut off. Only segments whose last chunk was use
    their ``bootstrap``; without this tensor all do."""


class Limits(NamedTuple):
    """Bounds and weights of rewards, KL penalties and importance ratios."""

    kl_coefficient: float = 0.0
    kl_clamp: float = float("inf")
    reward_clip: float = float("inf")
    rho_clip: float = float("inf")
    c_clip: float = float("inf")
    advantage_rho_clip: float = float("inf")


class Scan(NamedTuple):
    """One scan over tokens; optional inputs are ``None``."""

    cu_seqlens: torch.Tensor
    """int32 ``[segments + 1]``: boundaries of the segments, in tokens or in chunks."""
    num_tokens: int
    """Tokens of the outputs."""
    num_positions: int
    """Upper bound of the number of scanned tokens."""
    rewards: torch.Tensor | None = None
    """float32 or float64 ``[tokens]``; ``None`` with chunks."""
    values: torch.Tensor | None = None
    """float32 or float64 ``[tokens]``."""
    loss_mask: torch.Tensor | None = None
    """bool ``[tokens]``: True on generated tokens."""
    gamma: float = 1.0
    lam: float = 1.0
    observation: str = "carry"
    gammas: torch.Tensor | None = None
    """float64 ``[segments]``: replaces ``gamma``."""
    lams: torch.Tensor | None = None
    """float64 ``[segments]``: replaces ``lam``."""
    bootstrap: torch.Tensor | None = None
    """float32 or float64 ``[segments]``: value behind the last token."""
    weights: tuple[torch.Tensor, torch.Tensor] | None = None
    """Log-probabilities ``[tokens]`` of the trained and of the sampling policy."""
    kl: tuple[torch.Tensor, torch.Tensor] | None = None
    """Log-probabilities ``[tokens]`` of the sampling and of the reference policy."""
    estimator: str | None = None
    """Estimator of the KL penalty, one of `KL_ESTIMATORS`."""
    chunks: ScanChunks | None = None
    turn_ids: torch.Tensor | None = None
    """int32 ``[tokens]``: chunk that generated each token, or a negative number."""
    by_turn: bool = False
    """Whether a chunk is one action, represented by its first generated token."""
    limits: Limits = Limits()
    kind: str = "gae"
    max_seqlen: int | None = None
    """Upper bound of a segment's length, if known."""

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.cu_seqlens.device

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_chunks(self) -> int:
        """Number of chunks; 0 without."""
        return 0 if self.chunks is None else self.chunks.rewards.shape[0]


def check_scan_inputs(
    op: str,
    rewards: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    loss_mask: torch.Tensor | None,
    observation: str,
    bootstrap: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    **over_tokens: torch.Tensor,
) -> None:
    """Raise unless the arguments of an estimator agree; no tensor's values are read.

    ``over_tokens`` are float tensors ``[tokens]`` without a gradient, by argument name.
    """
    check_tensor(op, "rewards", rewards, dtypes=FLOATS)
    each: dict[str, Any] = {"device": rewards.device, "entries": rewards.shape[0]}
    check_cu_seqlens(op, cu_seqlens, device=rewards.device)
    if rewards.shape[0] and cu_seqlens.shape[0] == 1:
        raise ValueError(f"{op}: cu_seqlens must bound {rewards.shape[0]} entries, got no segment")
    for name, tensor in over_tokens.items():
        check_tensor(op, name, tensor, dtypes=FLOATS, constant=True, **each)
    check_choice(op, "observation", observation, OBSERVATIONS)
    if loss_mask is not None:
        check_tensor(op, "loss_mask", loss_mask, dtypes=(torch.bool,), **each)
    if bootstrap is not None:
        _check_of_segments(op, "bootstrap", bootstrap, cu_seqlens)
    check_max_seqlen(op, max_seqlen)


def split_rate(
    op: str, name: str, rate: float | torch.Tensor, cu_seqlens: torch.Tensor
) -> tuple[float, torch.Tensor | None]:
    """Return a discount or λ as a number, and as a float64 tensor if there is one per segment."""
    if isinstance(rate, torch.Tensor):
        _check_of_segments(op, name, rate, cu_seqlens)
        return 1.0, rate.double().contiguous()
    if not isinstance(rate, Real):
        raise TypeError(f"{op}: {name} must be a number or a tensor, got {rate!r}")
    return float(rate), None


def _check_of_segments(op: str, name: str, tensor: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """Raise unless ``tensor`` has one constant float for each segment."""
    num_segments, device = cu_seqlens.shape[0] - 1, cu_seqlens.device
    check_tensor(
        op,
        name,
        tensor,
        dtypes=FLOATS,
        device=device,
        entries=num_segments,
        per="segment",
        constant=True,
    )
