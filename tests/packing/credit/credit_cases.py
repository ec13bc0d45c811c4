"""Trajectories with all that credit may trip over, estimators, and rows to give them beside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, get_args

import numpy as np
import pytest
import torch

from trajpack import Trajectory, Turn
from trajpack.kernels.scan import credit_scan_triton
from trajpack.kernels.scan.observations import Observation
from trajpack.packing import PackedBatch
from trajpack.packing.credit import estimators
from trajpack.packing.credit.estimators import DrGRPO, GroupEstimator, KLPenalty

LAYOUTS: tuple[Any, ...] = ("merged", "turns")
OBSERVATIONS: tuple[Observation, ...] = get_args(Observation)
EVERY: dict[str, Any] = {
    "GAE": estimators.GAE(0.9, 0.8),
    **{f"GAE, {o}": estimators.GAE(0.9, 0.8, o) for o in OBSERVATIONS[1:]},
    "GAE, whitened": estimators.GAE(0.99, 0.95, whiten=True),
    "GAE, whitened by n": estimators.GAE(0.99, 0.95, whiten=True, ddof=0),
    "TurnGAE": estimators.TurnGAE(0.9, 0.8),
    "TurnGAE, whitened": estimators.TurnGAE(0.9, 0.8, whiten=True),
    **{f"VTrace, {o}": estimators.VTrace(0.9, 0.8, 0.9, 0.7, 1.2, o) for o in OBSERVATIONS},
    **{
        f"ReinforcePlusPlus, {o}": estimators.ReinforcePlusPlus(0.9, o, whiten=o == "ignore")
        for o in OBSERVATIONS
    },
    "ReinforcePlusPlus": estimators.ReinforcePlusPlus(0.9),
    "TurnReturns": estimators.TurnReturns(),
    "TurnReturns, whitened": estimators.TurnReturns(whiten=True),
    "TurnReturns, whitened by n": estimators.TurnReturns(whiten=True, ddof=0),
    "GRPO": estimators.GRPO(),
    "GRPO, zero": estimators.GRPO(eps=0.1, singleton="zero"),
    "GRPO, others": estimators.GRPO(
        singleton="zero", baseline="leave_one_out", scale="leave_one_out_std"
    ),
    "GRPO, about others": estimators.GRPO(
        eps=0.1, baseline="leave_one_out", scale="std_about_baseline", ddof=0
    ),
    "dr_grpo": DrGRPO(),
    "RLOO": estimators.RLOO(),
    "opo": GroupEstimator("opo"),
    "reinforce_plus_plus_baseline": GroupEstimator("reinforce_plus_plus_baseline"),
    "reinforce_plus_plus_baseline by n": GroupEstimator("reinforce_plus_plus_baseline", ddof=0),
    "max_rl": GroupEstimator("max_rl"),
    "max_rl, signed": GroupEstimator("max_rl", singleton="raw", scale="signed_mean", eps=0.01),
    "gpg": GroupEstimator("gpg"),
    "pass_at_k": GroupEstimator("pass_at_k"),
    "pass_at_k, std": GroupEstimator("pass_at_k", scale="std"),
    "GiGPO": estimators.GiGPO(0.5),
    "GiGPO, none": estimators.GiGPO(0.5, scale="none"),
}
"""Every estimator, in every form that is computed its own way."""
KL = {kind: KLPenalty(0.1, kind, 0.6) for kind in ("k1", "k2", "k3")}


Rows: TypeAlias = list[list[float]]
"""Numbers of tokens, turn after turn."""


class Given(NamedTuple):
    """What stands beside trajectories; rows have an entry for every token new with a turn."""

    values: Rows
    logprobs: Rows
    ref_logprobs: Rows
    bootstrap: list[float]
    scores: list[float]
    state_ids: list[int]


def new_context(trajectory: Trajectory) -> list[int]:
    """Count the prompt tokens that are new with each turn: those that no chain held before."""
    chains: list[list[int]] = []
    counts = []
    for turn in trajectory.turns:
        prompt, completion = (list(map(int, ids)) for ids in (turn.prompt_ids, turn.completion_ids))
        fitting = [chain for chain in chains if prompt[: len(chain)] == chain]
        held = max(fitting, key=len, default=[])
        if held:
            chains.remove(held)
        chains.append(prompt + completion)
        counts.append(len(prompt) - len(held))
    return counts


def is_whitened(estimator: estimators.Estimator) -> bool:
    """Tell whether what it puts out depends on all of a batch, by mean and deviation."""
    return estimator.whitening is not None


def over_tokens(estimator: estimators.Estimator) -> bool:
    """Tell whether it walks tokens."""
    return isinstance(estimator, estimators.TokenEstimator)


def trajectory_of(rng: np.random.Generator, index: int, longest: int) -> Trajectory:
    """Return turns that go on with a chain of before, branch off, or forget; some say nothing."""
    contexts, turns = [[]], []
    for _ in range(rng.integers(1, 6)):
        known = contexts[rng.integers(len(contexts))]
        new = rng.integers(0, 9, rng.integers(0 if known else 1, longest)).tolist()
        size = 0 if rng.random() < 0.25 else int(rng.integers(1, longest))
        completion = rng.integers(0, 9, size).tolist()
        logprobs = (-rng.random(size)).astype(np.float32).tolist()
        reward, cut = float(rng.choice([-2.5, -1.0, 0.0, 0.5, 1.0, 3.0])), bool(rng.random() < 0.4)
        turns.append(Turn([*known, *new], completion, logprobs, reward, cut))
        contexts.append([*known, *new, *completion])
    group = [None, "x", "y", "z"][rng.choice(4, p=[0.1, 0.4, 0.4, 0.1])]
    discount = float(rng.choice([0.5, 0.9, 1.0]))
    ended = rng.choice([None, None, True, False])
    return Trajectory(str(index), turns, group, discount, truncated=ended)


def some_trajectories(num: int = 12, longest: int = 9, seed: int = 0) -> list[Trajectory]:
    """Return random trajectories, behind some that are special."""
    rng = np.random.default_rng(seed)
    silent = Turn([5, 6, 7], [], [], 2.0)
    special = [
        Trajectory("silent", [silent, silent], "x"),
        Trajectory("late", [silent, Turn([5, 6, 7, 8], [1, 2], [-0.5, -1.0], 1.0)], "y"),
        Trajectory("one", [Turn([1], [2], [-0.25], -1.0, truncated=True)], "x"),
        Trajectory("ends", [Turn([1], [2, 3], [-0.25, -2.0], 1.0), silent, silent], "y"),
    ]
    return special[: num // 2] + [trajectory_of(rng, i, longest) for i in range(num - num // 2)]


def given_beside(trajectories: Sequence[Trajectory], seed: int = 0) -> Given:
    """Draw what estimators need beside trajectories."""
    rng = np.random.default_rng([seed, 1])
    sizes = [
        context + len(turn.completion_ids)
        for trajectory in trajectories
        for context, turn in zip(new_context(trajectory), trajectory.turns, strict=True)
    ]

    def normal(num: int, mean: float = 0.0) -> list[float]:
        return rng.normal(mean, 1.0, num).astype(np.float32).tolist()

    values, logprobs, refs = ([normal(size, mean) for size in sizes] for mean in (0.0, -1.0, -1.0))
    num = len(trajectories)
    states = rng.integers(-1, 3, len(sizes)).tolist()
    return Given(values, logprobs, refs, normal(num), normal(num), states)


def laid_out(batch: PackedBatch, rows: list[list[float]]) -> torch.Tensor:
    """Put rows of turns where a batch has what is new with each; all else is NaN."""
    tokens = np.full(batch.num_tokens, np.nan, np.float32)
    ends = batch.turn_spans[:, 1].tolist()
    for begin, end, row in zip(batch.turn_begin.tolist(), ends, rows, strict=True):
        tokens[begin:end] = row
    return torch.from_numpy(tokens)


def inputs_of(batch: PackedBatch, estimator: Any, given: Given) -> dict[str, torch.Tensor]:
    """Return the tensors that an estimator asks for beside a batch."""
    inputs = {}
    if isinstance(estimator, (estimators.GAE, estimators.TurnGAE, estimators.VTrace)):
        inputs["values"] = laid_out(batch, given.values)
    if isinstance(estimator, estimators.VTrace) or getattr(estimator, "kl", None) is not None:
        inputs["logprobs"] = laid_out(batch, given.logprobs)
    if getattr(estimator, "kl", None) is not None:
        inputs["ref_logprobs"] = laid_out(batch, given.ref_logprobs)
    if estimator.truncated == "bootstrap":
        inputs["bootstrap"] = torch.tensor(given.bootstrap)
    if isinstance(estimator, estimators.GiGPO):
        inputs["state_ids"] = torch.tensor(given.state_ids, dtype=torch.int64)
    return inputs


def generated(batch: PackedBatch, rows: torch.Tensor) -> torch.Tensor:
    """Return what generated tokens have, turn after turn; all others have 0."""
    assert not rows[~batch.loss_mask].any()
    parts = [rows[begin:end] for begin, end in batch.turn_spans.tolist()]
    return torch.cat([rows[:0], *parts])


@contextmanager
def small_scans(longest: int = 8) -> Iterator[None]:
    """Let Triton's scans be cut where segments pass ``longest`` entries: the executor is slow."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in (("BLOCK", 16), ("ROW", 16), ("LONGEST_WALK", longest)):
            patch.setattr(credit_scan_triton, name, size)
        yield
