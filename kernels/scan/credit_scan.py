"""The scan over tokens behind every estimator that gives credit: what is scanned, and how.

`trajpack.kernels.gae`, `td_lambda`, `vtrace`, `turn_gae`, `discounted_returns` with a ``loss_mask``
and `credit_of_turns` are forms of it.
A first-order recurrence walks each segment from its end (see `trajpack.kernels.scan.observations`);
V-trace takes two, of which the first finds the value that follows each token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from trajpack.kernels.corrections.kl_penalty import estimate
from trajpack.kernels.scan.credit_scan_host import advantages_on_host
from trajpack.kernels.scan.exclusive_scan import (
    exclusive_scan_on_host,
    exclusive_scan_reference,
    places_of,
)
from trajpack.kernels.scan.observations import PASSING, Steps, passed_on, steps_of_tokens

KINDS = ("gae", "next_values", "vtrace", "adjoint")
"""What is scanned: advantages, the value behind each token, V-trace, a gradient."""


class Pieces(NamedTuple):
    """Stretches of tokens that are scanned one behind the other, wherever they stand.

    A piece is the part of a turn that is scanned; those of a segment follow each other.
    """

    cu_positions: torch.Tensor
    """int32 ``[pieces + 1]``: tokens in the pieces before each."""
    begins: torch.Tensor
    """int32 ``[pieces]``: first token of each."""
    spans: torch.Tensor
    """int32 ``[pieces, 2]``: first generated token of each, and one past its last."""
    rewards: torch.Tensor
    """float64 ``[pieces]``: reward of each, on its last generated token."""
    truncated: torch.Tensor | None = None
    """bool ``[pieces]``: cut off. A segment goes on with its ``bootstrap`` where its last piece is;
    every segment does without this."""


class Limits(NamedTuple):
    """Numbers that bound or weigh something."""

    kl_coefficient: float = 0.0
    kl_clamp: float = float("inf")
    reward_clip: float = float("inf")
    rho_clip: float = float("inf")
    c_clip: float = float("inf")
    advantage_rho_clip: float = float("inf")


class Scan(NamedTuple):
    """A scan over tokens; ``None`` is what it does without."""

    cu_seqlens: torch.Tensor
    """int32 ``[segments + 1]``: the segments' tokens, or their pieces."""
    num_tokens: int
    num_positions: int
    """Tokens that are scanned, at most."""
    rewards: torch.Tensor | None
    values: torch.Tensor | None
    loss_mask: torch.Tensor | None
    gamma: float
    lam: float
    observation: str
    gammas: torch.Tensor | None = None
    """float64 ``[segments]``, in the place of ``gamma``."""
    lams: torch.Tensor | None = None
    bootstrap: torch.Tensor | None = None
    """float32 ``[segments]``: value behind the last token."""
    weights: tuple[torch.Tensor, torch.Tensor] | None = None
    """Log-probabilities of the policy, and of the one that sampled."""
    kl: tuple[torch.Tensor, torch.Tensor] | None = None
    """Log-probabilities of the policy that sampled, and of the reference."""
    estimator: str | None = None
    pieces: Pieces | None = None
    turn_ids: torch.Tensor | None = None
    """int32 ``[tokens]``: piece that generated each token, or a negative number."""
    by_turn: bool = False
    """Whether a piece is one action, which its first generated token stands for."""
    limits: Limits = Limits()
    kind: str = "gae"
    max_seqlen: int | None = None

    @property
    def device(self) -> torch.device:
        """Where all of it lives."""
        return self.cu_seqlens.device

    @property
    def num_segments(self) -> int:
        """Segments that are scanned."""
        return self.cu_seqlens.shape[0] - 1

    @property
    def num_pieces(self) -> int:
        """Pieces of all segments; 0 without."""
        return 0 if self.pieces is None else self.pieces.rewards.shape[0]


class Tokens(NamedTuple):
    """What is scanned, position after position: ``[positions]`` each."""

    at: torch.Tensor | None
    """int64: token of each position, ``num_tokens`` where there is none."""
    rewards: torch.Tensor
    values: torch.Tensor | None
    generated: torch.Tensor | None
    bounds: torch.Tensor
    """int32 ``[segments + 1]``: positions of the segments."""


def run(scan: Scan, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, float32 ``[tokens]``; a gradient comes first, alone."""
    if impl == "torch":
        on_host = scan.device.type == "cpu" and scan.kind == "gae" and scan.pieces is None
        return advantages_on_host(scan) if on_host else credit_scan_reference(scan)
    from trajpack.kernels.scan.credit_scan_triton import credit_scan_forward

    return credit_scan_forward(scan)


def credit_scan_reference(scan: Scan) -> tuple[torch.Tensor, torch.Tensor]:
    """Say in plain torch what every scan means; on the host, the recurrence itself is numpy's."""
    tokens = _tokens(scan)
    entries = tokens.rewards.shape[0]
    segment, is_last = places_of(tokens.bounds, entries)
    gamma, lam = (
        torch.full_like(tokens.rewards, rate) if each is None else each.double()[segment]
        for rate, each in ((scan.gamma, scan.gammas), (scan.lam, scan.lams))
    )
    generated = torch.ones_like(is_last) if tokens.generated is None else tokens.generated
    steps = steps_of_tokens(
        tokens.rewards, tokens.values, generated, is_last, (gamma, lam), scan.observation
    )
    if scan.kind == "adjoint":
        own = torch.where(generated, steps.reward, 0.0)
        is_first = tokens.bounds[:-1].long()[segment] == torch.arange(entries, device=scan.device)
        passes = torch.where(generated, gamma * lam, _rate_of_others(scan, gamma * lam, is_first))
        states = _states(scan, steps._replace(gift=own), _start(scan, tokens), tokens)
        return _at_tokens(scan, tokens, own + passes * states), scan.cu_seqlens
    if scan.kind == "vtrace":
        behind = _next_values(scan, tokens, steps, (gamma, is_last, generated))
        advantage, target = _vtrace(scan, tokens, steps, (gamma, lam, generated), behind)
    else:
        states = _states(scan, steps, _start(scan, tokens), tokens)
        advantage, target = steps.reward - steps.value + states, steps.reward + states
    advantages, returns = (
        _at_tokens(scan, tokens, torch.where(generated, rows, 0.0)) for rows in (advantage, target)
    )
    return advantages, returns


def _vtrace(
    scan: Scan,
    tokens: Tokens,
    steps: Steps,
    rates: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    behind: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and value targets, given what stands ``behind`` each token."""
    gamma, lam, generated = rates
    if scan.observation == "reset":
        behind = torch.where(generated, behind, 0.0)
    rho, c, advantage_rho = _clipped_ratios(scan, tokens, generated)
    surprise = steps.reward + behind - steps.value
    passes = scan.observation in PASSING
    gift = torch.where(generated | (not passes), gamma * rho * surprise, 0.0)
    steps = steps._replace(gain=torch.where(generated, steps.gain * c, steps.gain), gift=gift)
    states = _states(scan, steps, torch.zeros_like(_start(scan, tokens)), tokens)
    return advantage_rho * (surprise + states), steps.value + rho * surprise + lam * c * states


def _rate_of_others(scan: Scan, rate: torch.Tensor, is_last: torch.Tensor) -> torch.Tensor:
    """Return the factor by which the state takes in a reward on a token nobody generated."""
    if scan.observation in ("ignore", "reset"):
        return rate
    if scan.observation == "multiply":
        return torch.zeros_like(rate)
    return passed_on(torch.ones_like(rate), is_last, scan.observation)


def _start(scan: Scan, tokens: Tokens) -> torch.Tensor:
    """Return the state behind each segment's last entry."""
    if scan.bootstrap is None:
        return tokens.rewards.new_zeros(scan.num_segments)
    gamma = scan.gamma if scan.gammas is None else scan.gammas.double()
    start = gamma * scan.bootstrap.double()
    if scan.pieces is None or scan.pieces.truncated is None or not scan.num_pieces:
        return start
    ends = scan.cu_seqlens[1:].long()
    cut_off = (ends > scan.cu_seqlens[:-1]) & scan.pieces.truncated[(ends - 1).clamp(min=0)]
    return torch.where(cut_off, start, 0.0)


def _states(scan: Scan, steps: Steps, start: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Return the state behind each entry."""
    run_scan = exclusive_scan_on_host if scan.device.type == "cpu" else exclusive_scan_reference
    return run_scan(steps.gain.contiguous(), steps.gift.contiguous(), start, tokens.bounds)


def _next_values(
    scan: Scan,
    tokens: Tokens,
    steps: Steps,
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return what stands behind each token: discounted value of the next, rewards up to there."""
    gamma, is_last, generated = places
    gift, gain = gamma * steps.value, torch.zeros_like(gamma)
    if scan.observation in PASSING:
        gain = torch.where(generated, 0.0, 1.0).double()
        gift = torch.where(generated, gift, passed_on(steps.reward, is_last, scan.observation))
    return _states(scan, steps._replace(gain=gain, gift=gift), _start(scan, tokens), tokens)


def _clipped_ratios(
    scan: Scan, tokens: Tokens, generated: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert scan.weights is not None
    ours, theirs = (_of_tokens(tokens, logprobs.double()) for logprobs in scan.weights)
    ratio = torch.where(generated, ours - theirs, 0.0).exp()
    limits = scan.limits
    rho, c, advantage_rho = (
        torch.where(generated, ratio.clamp(max=cap), 1.0)
        for cap in (limits.rho_clip, limits.c_clip, limits.advantage_rho_clip)
    )
    return rho, c, advantage_rho


def _tokens(scan: Scan) -> Tokens:
    """Line up what is scanned."""
    if scan.pieces is None:
        assert scan.rewards is not None
        return Tokens(None, scan.rewards.double(), scan.values, scan.loss_mask, scan.cu_seqlens)
    cu_positions, begins, spans, rewards, _ = scan.pieces
    num_pieces = rewards.shape[0]
    position = torch.arange(scan.num_positions, device=scan.device)
    piece = torch.searchsorted(cu_positions[1:].long(), position, right=True)
    exists = piece < num_pieces
    piece = piece.clamp(max=max(num_pieces - 1, 0))
    at = begins.long()[piece] + position - cu_positions.long()[piece]
    generated = exists & (at >= spans[piece, 0])
    rewards = rewards.clamp(-scan.limits.reward_clip, scan.limits.reward_clip)
    empty = spans[:, 0] == spans[:, 1]  # the reward of a turn without tokens goes to one before
    moved = exclusive_scan_reference(
        empty.double(), torch.where(empty, rewards, 0.0), rewards[:0].new_zeros(
            scan.num_segments), scan.cu_seqlens
    )  # fmt: skip
    on_last = generated & (at == spans[piece, 1] - 1)
    reward = torch.where(on_last, (rewards + moved)[piece], 0.0)
    at = torch.where(exists, at, scan.num_tokens)
    bounds = cu_positions[scan.cu_seqlens.long()]
    tokens = Tokens(at, reward, None, generated, bounds)
    if scan.values is not None:
        tokens = tokens._replace(values=_of_tokens(tokens, scan.values))
    if scan.kl is not None:
        logprobs, ref = (_of_tokens(tokens, logprobs) for logprobs in scan.kl)
        bound = None if scan.limits.kl_clamp == float("inf") else scan.limits.kl_clamp
        penalty = scan.limits.kl_coefficient * estimate(logprobs, ref, str(scan.estimator), bound)
        tokens = tokens._replace(rewards=reward - torch.where(generated, penalty, 0.0))
    if scan.by_turn:
        tokens = tokens._replace(generated=exists & (at == spans[piece, 0]))
    return tokens


def _of_tokens(tokens: Tokens, rows: torch.Tensor) -> torch.Tensor:
    if tokens.at is None:
        return rows
    return torch.cat([rows, rows.new_zeros(1)])[tokens.at]


def _at_tokens(scan: Scan, tokens: Tokens, rows: torch.Tensor) -> torch.Tensor:
    if tokens.at is None:
        return rows.float()
    out = torch.zeros(scan.num_tokens + 1, device=scan.device)
    return out.index_copy_(0, tokens.at, rows.float())[:-1]
