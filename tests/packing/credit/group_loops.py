"""Credit of trajectories in Python's own floats: their scores, and what a group makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.packing.credit.credit_loops import Given, Rows, clipped
from trajpack import Trajectory
from trajpack.packing.credit import estimators


def turn_returns_of(trajectory: Trajectory) -> list[float]:
    """Return what each turn was rewarded and what followed, discounted by turns."""
    returns, later = [], 0.0
    for turn in reversed(trajectory.turns):
        later = turn.reward + trajectory.turn_discount * later
        returns.append(later)
    return returns[::-1]


def spread(trajectories: Sequence[Trajectory], of_turns: Rows) -> list[float]:
    """Give each generated token what its turn has."""
    return [
        number
        for trajectory, numbers in zip(trajectories, of_turns, strict=True)
        for turn, number in zip(trajectory.turns, numbers, strict=True)
        for _ in range(len(turn.completion_ids))
    ]


def deviation(scores: Sequence[float]) -> float:
    """Return the standard deviation with one less than the size under the variance."""
    return float(np.std(scores, ddof=1))


def centred(score: float, scores: Sequence[float], divisor: float = 1.0) -> float:
    """Return what a score exceeds the mean by, 0 where all are the same."""
    return 0.0 if len(set(scores)) == 1 else (score - float(np.mean(scores))) / divisor


def grpo_of(rule: estimators.GRPO, score: float, scores: Sequence[float]) -> float:
    """Return what a score exceeds the mean of all or of the others by, scaled."""
    if len(set(scores)) == 1:
        return 0.0
    if rule.baseline == "mean":
        return (score - float(np.mean(scores))) / (float(np.std(scores, ddof=rule.ddof)) + rule.eps)
    others = list(scores)
    others.remove(score)
    above = score - float(np.mean(others))
    if rule.scale == "leave_one_out_std":
        equal = len(set(others)) == 1
        return above if equal else above / (float(np.std(others, ddof=rule.ddof)) + rule.eps)
    aboves = []
    for index, one in enumerate(scores):
        rest = [*scores[:index], *scores[index + 1 :]]
        aboves.append(one - sum(rest) / len(rest))
    squares = sum(number * number for number in aboves)
    return above / ((squares / (len(scores) - rule.ddof)) ** 0.5 + rule.eps)


def max_rl_of(rule: estimators.MaxRL, score: float, scores: Sequence[float]) -> float:
    """Return what a score exceeds the mean by, in shares of the mean."""
    mean = float(np.mean(scores))
    if rule.scale == "signed_mean":
        return centred(score, scores, mean + rule.eps)
    return centred(score, scores, mean) if mean > 0 else 0.0


def best_of(score: float, scores: Sequence[float], scale: str, eps: float) -> float:
    """Return what the best is better by."""
    second, best = sorted(scores)[-2:]
    if score != best:
        return 0.0
    return (best - second) / (deviation(scores) + eps if scale == "std" else 1.0)


def opo_of(score: float, scores: Sequence[float], lengths: Sequence[int]) -> float:
    """Return what a score exceeds the mean over tokens by."""
    if len(set(scores)) == 1:
        return 0.0
    return score - float(np.average(scores, weights=lengths if sum(lengths) else None))


GROUP_RULES: dict[type, Callable[..., float]] = {
    estimators.GRPO: lambda e, s, all_, _: grpo_of(e, s, all_),
    estimators.GiGPO: lambda e, s, all_, _: (
        centred(s, all_, deviation(all_) + e.eps) if e.scale == "std" else centred(s, all_)
    ),
    estimators.DrGRPO: lambda _, s, all_, __: centred(s, all_),
    estimators.RLOO: lambda _, s, all_, __: (
        0.0 if len(set(all_)) == 1 else s - (sum(all_) - s) / (len(all_) - 1)
    ),
    estimators.OPO: lambda _, s, all_, lengths: opo_of(s, all_, lengths),
    estimators.ReinforcePlusPlusBaseline: lambda _, s, all_, __: centred(s, all_),
    estimators.MaxRL: lambda e, s, all_, _: max_rl_of(e, s, all_),
    estimators.GPG: lambda _, s, all_, __: centred(s, all_),
    estimators.PassAtK: lambda e, s, all_, _: best_of(s, all_, e.scale, e.eps),
}


def lengths_of(trajectories: Sequence[Trajectory]) -> list[int]:
    """Count what each trajectory generated."""
    return [sum(len(turn.completion_ids) for turn in t.turns) for t in trajectories]


def valid_of(trajectories: Sequence[Trajectory], estimator: Any) -> list[bool]:
    """Tell which trajectories count."""
    drops = estimator.truncated == "mask"
    return [not (drops and trajectory.turns[-1].truncated) for trajectory in trajectories]


def in_groups(
    keys: Sequence[Any], valid: Sequence[bool], of: Callable[[int, list[int]], float]
) -> list[float]:
    """Return 0 for who does not count, and else what ``of`` says of a member among its own."""
    numbers = []
    for index, key in enumerate(keys):
        own = [i for i, other in enumerate(keys) if other == key and valid[i]]
        numbers.append(of(index, own) if valid[index] else 0.0)
    return numbers


def episodes_of(
    trajectories: Sequence[Trajectory], estimator: Any, given_scores: Sequence[float] | None
) -> list[float]:
    """Return each trajectory's advantage in its group."""
    keys = [str(i) if t.group is None else (t.group,) for i, t in enumerate(trajectories)]
    summed = [sum(turn.reward for turn in t.turns) for t in trajectories]
    scores = [clipped(s, estimator.reward_clip) for s in given_scores or summed]
    lengths, valid = lengths_of(trajectories), valid_of(trajectories, estimator)
    alone = getattr(estimator, "singleton", "zero") == "raw"

    def of(index: int, own: list[int]) -> float:
        if len(own) == 1:
            return scores[index] if alone else 0.0
        among, sizes = [scores[i] for i in own], [lengths[i] for i in own]
        return GROUP_RULES[type(estimator)](estimator, scores[index], among, sizes)

    advantages = in_groups(keys, valid, of)
    if isinstance(estimator, estimators.GPG):
        counted = [score for score, counts in zip(scores, valid, strict=True) if counts]
        alpha = len(counted) / max(1, sum(score != 0 for score in counted))
        advantages = [alpha * advantage for advantage in advantages]
    return advantages


def step_advantages_of(
    trajectories: Sequence[Trajectory], estimator: Any, state_ids: Sequence[int]
) -> list[float]:
    """Return each turn's advantage among those from its state, turn after turn."""
    owner = [index for index, t in enumerate(trajectories) for _ in t.turns]
    tasks = [t.group if t.group is not None else i for i, t in enumerate(trajectories)]
    keys = [
        (index, tasks[own]) if state < 0 else (state, tasks[own], "state")
        for index, (own, state) in enumerate(zip(owner, state_ids, strict=True))
    ]
    counted = valid_of(trajectories, estimator)
    returns = [number for t in trajectories for number in turn_returns_of(t)]

    def of(index: int, own: list[int]) -> float:
        among = [returns[i] for i in own]
        if len(own) == 1 or len(set(among)) == 1:
            return 0.0
        return centred(
            returns[index],
            among,
            deviation(among) + estimator.eps if estimator.scale == "std" else 1.0,
        )

    return in_groups(keys, [counted[own] for own in owner], of)


def of_groups(
    trajectories: Sequence[Trajectory], estimator: Any, given: Given, with_scores: bool
) -> list[float]:
    """Return advantages, not whitened, of what all trajectories generated."""
    episodes = episodes_of(trajectories, estimator, given.scores if with_scores else None)
    rows: Rows = [[e] * len(t.turns) for e, t in zip(episodes, trajectories, strict=True)]
    if isinstance(estimator, estimators.GiGPO):
        steps = iter(step_advantages_of(trajectories, estimator, given.state_ids))
        rows = [[e + estimator.step_weight * next(steps) for e in row] for row in rows]
    return spread(trajectories, rows)
