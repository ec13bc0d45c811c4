"""Credit of one sequence in Python's own floats, each choice the way its system writes it down.

None of them is a scan: rewards are moved by hand, tokens are taken out and put back, V-trace is
the sum of its definition. A sequence is read from a batch, so that shapes come from one place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, get_args

import numpy as np
import pytest
import torch

from trajpack.kernels.scan import credit_scan_triton
from trajpack.kernels.scan.observations import Observation
from trajpack.testing import boundaries

OBSERVATIONS: tuple[Observation, ...] = get_args(Observation)
FLAGS = {"g": True, ".": False}
"""A mask in letters: tokens that were generated, and others."""

Rows: TypeAlias = tuple[list[float], list[float]]


class Walk(NamedTuple):
    """One sequence, as all loops take it."""

    rewards: list[float]
    values: list[float]
    mask: list[bool]
    gamma: float
    lam: float
    bootstrap: float = 0.0

    @property
    def generated(self) -> list[int]:
        """Places of the generated tokens."""
        return [place for place, flag in enumerate(self.mask) if flag]


class Batch(NamedTuple):
    """Sequences side by side, with a rate and a bootstrap each."""

    lengths: list[int]
    rewards: torch.Tensor
    values: torch.Tensor
    loss_mask: torch.Tensor
    gammas: torch.Tensor
    lams: torch.Tensor
    bootstrap: torch.Tensor
    logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """Boundaries of the sequences."""
        return boundaries(self.lengths)

    def options(self) -> dict[str, torch.Tensor]:
        """What a scan takes by name."""
        named = {"gamma": self.gammas, "lam": self.lams, "bootstrap": self.bootstrap}
        return named | {"loss_mask": self.loss_mask}

    def taken(self, order: Sequence[int]) -> Batch:
        """Return the sequences at these places, in this order."""
        parts = [list(rows.split(self.lengths)) for rows in (*self[1:4], *self[7:])]
        tokens = [torch.cat([part[0][:0], *[part[at] for at in order]]) for part in parts]
        each = [rows[list(order)] for rows in self[4:7]]
        return Batch([self.lengths[at] for at in order], *tokens[:3], *each, *tokens[3:])

    def walks(self) -> list[Walk]:
        """Return every sequence by itself."""
        rows = [[part.tolist() for part in r.split(self.lengths)] for r in self[1:4]]
        each = [r.tolist() for r in self[4:7]]
        return [Walk(*parts) for parts in zip(*rows, *each, strict=True)]


def batch_of(masks: Sequence[str], seed: int = 0, dtype: torch.dtype = torch.float32) -> Batch:
    """Return sequences with these masks, see `FLAGS`; rewards and values on every token."""
    rng = np.random.default_rng(seed)
    lengths = [len(mask) for mask in masks]

    def normal(num: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(num)).to(of)

    num, count = sum(lengths), len(lengths)
    flags = [FLAGS[letter] for mask in masks for letter in mask]
    rates = [torch.from_numpy(rng.uniform(0.5, 1.0, count)) for _ in range(2)]
    return Batch(
        lengths, normal(num, dtype), normal(num, dtype), torch.tensor(flags, dtype=torch.bool),
        *rates, normal(count), normal(num), normal(num),
    )  # fmt: skip


MASKS = (
    "ggg..gg..g",  # ends generated
    "..gg.g...",  # begins and ends otherwise
    "",
    "g",
    ".",
    "....",
    "gggggggggggggggggg",  # more than a small block
    "g.......g",
    ".g.g.gg.",
    "",
    "gg................",
)
"""Shapes of sequences in which something may go wrong."""


@contextmanager
def small_blocks(block: int = 16) -> Iterator[None]:
    """Let Triton's scans have blocks of a few entries, so that short sequences have several.

    Rows have two blocks; segments of more than a row are cut into rows.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("BLOCK", block), ("ROW", 2 * block), ("LONGEST_WALK", 2 * block)):
            patch.setattr(credit_scan_triton, name, size)
        yield


def plain_gae(walk: Walk) -> Rows:
    """Take all tokens as generated."""
    advantages, running, following = [0.0] * len(walk.rewards), 0.0, walk.bootstrap
    for t in reversed(range(len(walk.rewards))):
        delta = walk.rewards[t] + walk.gamma * following - walk.values[t]
        advantages[t] = running = delta + walk.gamma * walk.lam * running
        following = walk.values[t]
    return advantages, [a + v for a, v in zip(advantages, walk.values, strict=True)]


def held_gae(walk: Walk) -> Rows:
    """Hold value and advantage over a token that was not generated (verl, NeMo-RL)."""
    advantages, running, following = [0.0] * len(walk.rewards), 0.0, walk.bootstrap
    for t in reversed(range(len(walk.rewards))):
        delta = walk.rewards[t] + walk.gamma * following - walk.values[t]
        after = delta + walk.gamma * walk.lam * running
        following, running = (walk.values[t], after) if walk.mask[t] else (following, running)
        advantages[t] = running
    return advantages, [a + v for a, v in zip(advantages, walk.values, strict=True)]


def moved(walk: Walk) -> Walk:
    """Move each reward by hand to the last generated token before it."""
    rewards = [r if flag else 0.0 for r, flag in zip(walk.rewards, walk.mask, strict=True)]
    for t, flag in enumerate(walk.mask):
        before = [place for place in walk.generated if place < t]
        if before and not flag:
            rewards[before[-1]] += walk.rewards[t]
    return walk._replace(rewards=rewards)


def moved_from_the_end(walk: Walk) -> Walk:
    """Move the last token's reward to the last generated token, and no other (miles)."""
    rewards = list(walk.rewards)
    if walk.generated and not walk.mask[-1]:
        rewards[walk.generated[-1]] += rewards[-1]
    return walk._replace(rewards=rewards)


def gathered(walk: Walk) -> Walk:
    """Take out what was not generated."""
    rows = ([row[t] for t in walk.generated] for row in (walk.rewards, walk.values, walk.mask))
    return Walk(*rows, *walk[3:])


def scattered(walk: Walk, rows: Rows) -> Rows:
    """Put rows of the generated tokens back in their places."""
    parts = [dict(zip(walk.generated, row, strict=True)) for row in rows]
    advantages, returns = ([part.get(t, 0.0) for t in range(len(walk.mask))] for part in parts)
    return advantages, returns


def multiplied(walk: Walk) -> Walk:
    """Multiply rewards and values by the mask (OpenRLHF)."""
    rewards, values = (
        [number * flag for number, flag in zip(row, walk.mask, strict=True)]
        for row in (walk.rewards, walk.values)
    )
    return walk._replace(rewards=rewards, values=values)


def reset_gae(walk: Walk) -> Rows:
    """Gate what is carried by the mask of the token itself (open-instruct)."""
    advantages, running, following = [0.0] * len(walk.rewards), 0.0, walk.bootstrap
    for t in reversed(range(len(walk.rewards))):
        gate = float(walk.mask[t])
        delta = walk.rewards[t] + walk.gamma * following * gate - walk.values[t]
        advantages[t] = running = delta + walk.gamma * walk.lam * gate * running
        following = walk.values[t]
    return advantages, [a + v for a, v in zip(advantages, walk.values, strict=True)]


GAE_LOOPS: dict[str, Callable[[Walk], Rows]] = {
    "carry": lambda walk: held_gae(moved(walk)),
    "carry_drop": held_gae,
    "compact": lambda walk: scattered(walk, plain_gae(gathered(moved_from_the_end(walk)))),
    "ignore": plain_gae,
    "multiply": lambda walk: plain_gae(multiplied(walk)),
    "reset": reset_gae,
}


def gae_by_loop(walk: Walk, observation: str) -> Rows:
    """Return advantages and returns of one sequence, 0 where nothing was generated."""
    advantages, returns = (
        [number if flag else 0.0 for number, flag in zip(row, walk.mask, strict=True)]
        for row in GAE_LOOPS[observation](walk)
    )
    return advantages, returns


class Ratios(NamedTuple):
    """Importance ratios of a sequence's tokens, and the clips of those that were generated."""

    ratios: list[float]
    rho_clip: float
    c_clip: float
    advantage_rho_clip: float


def vtrace_by_sum(walk: Walk, ratios: Ratios, gates: Sequence[float]) -> Rows:
    """Return advantages and targets by the sum in IMPALA; a gate of 0 ends what is behind."""
    num, gamma = len(walk.rewards), walk.gamma
    weighed = list(zip(ratios.ratios, walk.mask, strict=True))
    rho, c, advantage_rho = ([min(w, cap) if g else 1.0 for w, g in weighed] for cap in ratios[1:])
    following = [*walk.values[1:], walk.bootstrap]
    deltas = [
        rho[t] * (walk.rewards[t] + gates[t] * gamma * following[t] - walk.values[t])
        for t in range(num)
    ]
    targets = [
        walk.values[s]
        + math.fsum(
            math.prod(gamma * walk.lam * c[i] * gates[i] for i in range(s, t)) * deltas[t]
            for t in range(s, num)
        )
        for s in range(num)
    ]
    following = [*targets[1:], walk.bootstrap]
    advantages = [
        advantage_rho[t] * (walk.rewards[t] + gates[t] * gamma * following[t] - walk.values[t])
        for t in range(num)
    ]
    return advantages, targets


def vtrace_by_loop(walk: Walk, ratios: Ratios, observation: str) -> Rows:
    """Return advantages and targets of one sequence, 0 where nothing was generated."""
    open_gates = [1.0] * len(walk.rewards)
    if observation in ("ignore", "multiply", "reset"):
        gates = [float(flag) for flag in walk.mask] if observation == "reset" else open_gates
        walked = multiplied(walk) if observation == "multiply" else walk
        rows = vtrace_by_sum(walked, ratios, gates)
        return scattered(walk, tuple([row[t] for t in walk.generated] for row in rows))  # type: ignore[arg-type]
    if observation == "carry":
        walk = moved(walk)
    elif observation == "compact":
        walk = moved_from_the_end(walk)
    kept = [ratios.ratios[t] for t in walk.generated]
    return scattered(walk, vtrace_by_sum(gathered(walk), ratios._replace(ratios=kept), open_gates))


def joined(rows: Iterator[Rows] | Sequence[Rows]) -> tuple[np.ndarray, np.ndarray]:
    """Lay the rows of all sequences end to end."""
    first, second = zip(*rows, strict=True)
    return np.array([x for row in first for x in row]), np.array([x for row in second for x in row])


def gae_of(batch: Batch, observation: str) -> tuple[np.ndarray, np.ndarray]:
    """Return advantages and returns of a batch, float64."""
    return joined([gae_by_loop(walk, observation) for walk in batch.walks()])


def assert_rounds(actual: torch.Tensor, exact: Any, magnitude: float = 10.0) -> None:
    """Assert float32 roundings of ``exact``: 1 ulp, and what float64 loses of ``magnitude``."""
    assert actual.dtype == torch.float32
    allowed = np.spacing(np.abs(exact).astype(np.float32)) + 1e-13 * magnitude
    error = np.abs(actual.detach().double().numpy() - exact)
    assert actual.shape == exact.shape
    assert (error <= allowed).all(), f"off by {(error / allowed).max():.3g} times the tolerance"
