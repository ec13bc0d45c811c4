"""Credit of batches by loops over trajectories in Python's floats, and batches checked by them.

Numbers of tokens are listed turn after turn, for the tokens that each turn generated. Scans are the
loops of `tests.kernels.credit.token_loops`, groups those of `tests.kernels.groups.score_loops`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.kernels.credit.token_loops import Ratios, Walk, gae_by_loop, plain_gae, vtrace_by_loop
from tests.kernels.groups.score_loops import by_loop
from tests.packing.credit.credit_cases import (
    EVERY,
    KL,
    Given,
    Rows,
    generated,
    given_beside,
    inputs_of,
    is_whitened,
    new_context,
    over_tokens,
)
from trajpack import GAE, GRPO, PackedBatch, Trajectory, Turn, TurnGAE, pack
from trajpack.packing.credit import estimators
from trajpack.packing.credit.advantages import METRICS
from trajpack.testing import assert_same_bits

MORE = {
    "GAE, k3": GAE(0.9, 0.8, kl=KL["k3"]),
    "GAE, ignore, mask": GAE(0.9, 0.8, "ignore", truncated="mask"),
    "TurnGAE, bootstrap": TurnGAE(0.9, 0.8, truncated="bootstrap", reward_clip=0.5),
    "GRPO, mask": GRPO(truncated="mask"),
}
"""More forms, by what is asked for beside."""


class Step(NamedTuple):
    """One token that is scanned."""

    generated: bool
    reward: float
    value: float
    ratio: float


def clipped(number: float, bound: float | None) -> float:
    """Bring a number within a bound on either side."""
    return number if bound is None else max(-bound, min(number, bound))


def rewards_of_tokens(turns: Sequence[Turn], clip: float | None) -> Rows:
    """Put each turn's reward on the last token generated up to its end."""
    rows = [[0.0] * len(turn.completion_ids) for turn in turns]
    for index, turn in enumerate(turns):
        holder = next((row for row in reversed(rows[: index + 1]) if row), None)
        if holder is not None:
            holder[-1] += clipped(turn.reward, clip)
    return rows


def penalty_of(kl: estimators.KLPenalty, ours: float, theirs: float) -> float:
    """Return what one token is fined."""
    x = ours - theirs
    estimate = {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) - 1 + x}[kl.estimator]
    return kl.coefficient * clipped(estimate, kl.clamp)


def steps_of(trajectory: Trajectory, estimator: Any, given: Given) -> list[list[Step]]:
    """Return the tokens new with each turn, as a scan meets them."""
    rewards = rewards_of_tokens(trajectory.turns, estimator.reward_clip)
    steps = []
    for turn, context, reward, values, logprobs, refs in zip(
        trajectory.turns, new_context(trajectory), rewards, *given[:3], strict=True
    ):
        sampled = [float(number) for number in turn.completion_logprobs]
        policy = logprobs[context:]
        if estimator.kl is not None:
            paired = zip(reward, policy, refs[context:], strict=True)
            reward[:] = [r - penalty_of(estimator.kl, ours, ref) for r, ours, ref in paired]
        ratios = [math.exp(now - then) for now, then in zip(policy, sampled, strict=True)]
        seen = [Step(False, 0.0, value, 1.0) for value in values[:context]]
        made = zip(reward, values[context:], ratios, strict=True)
        steps.append(seen + [Step(True, *rest) for rest in made])
    return steps


def of_tokens(
    trajectories: Sequence[Trajectory], estimator: Any, given: Given
) -> tuple[list[float], list[float]]:
    """Return advantages, not whitened, and returns of the generated tokens."""
    advantages, returns, first = [], [], 0
    for index, trajectory in enumerate(trajectories):
        past = first + len(trajectory.turns)
        own = given._replace(
            values=given.values[first:past],
            logprobs=given.logprobs[first:past],
            ref_logprobs=given.ref_logprobs[first:past],
        )
        first = past
        turns = steps_of(trajectory, estimator, own)
        ends = estimator.truncated != "bootstrap" or not trajectory.is_truncated
        behind = 0.0 if ends else given.bootstrap[index]
        rates = float(estimator.gamma), float(getattr(estimator, "lam", 1.0)), behind
        if isinstance(estimator, estimators.TurnGAE):
            actions = [[step for step in turn if step.generated] for turn in turns]
            actions = [turn for turn in actions if turn]
            rewards = [math.fsum(step.reward for step in turn) for turn in actions]
            values = [turn[0].value for turn in actions]
            rows = plain_gae(Walk(rewards, values, [True] * len(actions), *rates))
            sizes = [len(turn) for turn in actions]
            own_rows = [np.repeat(row, sizes).tolist() for row in rows]
        else:
            steps = [step for turn in turns for step in turn]
            mask = [step.generated for step in steps]
            bare = isinstance(estimator, estimators.ReinforcePlusPlus)
            values = [0.0 if bare else step.value for step in steps]
            walk = Walk([step.reward for step in steps], values, mask, *rates)
            if isinstance(estimator, estimators.VTrace):
                clips = estimator.rho_clip, estimator.c_clip, estimator.advantage_rho_clip
                ratios = Ratios([step.ratio for step in steps], *clips)
                rows = vtrace_by_loop(walk, ratios, estimator.observation)
            else:
                rows = gae_by_loop(walk, estimator.observation)
            own_rows = [[row[t] for t in walk.generated] for row in rows]
        advantages += own_rows[0]
        returns += own_rows[1]
    return advantages, returns


def turn_returns_of(trajectory: Trajectory) -> list[float]:
    """Return the return of each turn, discounted over turns."""
    returns, later = [], 0.0
    for turn in reversed(trajectory.turns):
        later = turn.reward + trajectory.turn_discount * later
        returns.append(later)
    return returns[::-1]


def spread(trajectories: Sequence[Trajectory], of_turns: Sequence[Sequence[Any]]) -> list[Any]:
    """Give each generated token the number of its turn."""
    return [
        number
        for trajectory, numbers in zip(trajectories, of_turns, strict=True)
        for turn, number in zip(trajectory.turns, numbers, strict=True)
        for _ in range(len(turn.completion_ids))
    ]


def lengths_of(trajectories: Sequence[Trajectory]) -> list[int]:
    """Count the generated tokens of each trajectory."""
    return [sum(len(turn.completion_ids) for turn in t.turns) for t in trajectories]


def valid_of(trajectories: Sequence[Trajectory], estimator: Any) -> np.ndarray:
    """Tell which trajectories count."""
    drops = estimator.truncated == "mask"
    return np.array([not (drops and t.is_truncated) for t in trajectories], bool)


RULES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"scale": "none"},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "opo": {"baseline": "length_weighted", "scale": "none"},
    "reinforce_plus_plus_baseline": {"scale": "none"},
    "max_rl": {"scale": "mean", "singleton": "zero"},
    "gpg": {"scale": "nonzero"},
    "pass_at_k": {"baseline": "second_best", "scale": "none", "singleton": "zero"},
}
"""Formulas of recipes."""


def numbered(keys: Sequence[Any]) -> np.ndarray:
    """Return a number for each key, the same for equal keys and -1 for ``None``."""
    known = {key: index for index, key in enumerate(dict.fromkeys(keys)) if key is not None}
    return np.array([known.get(key, -1) for key in keys], np.int64)


def of_groups(
    trajectories: Sequence[Trajectory], estimator: Any, given: Given, with_scores: bool
) -> list[float]:
    """Return advantages, not whitened, of the generated tokens."""
    tasks = [(i,) if t.group is None else t.group for i, t in enumerate(trajectories)]
    summed = [sum(turn.reward for turn in t.turns) for t in trajectories]
    scores = given.scores if with_scores else summed
    names = ["baseline", "scale", "eps", "singleton"]
    names += ["ddof"] * (estimator.whitening is None)
    own = {name: getattr(estimator, name) for name in names}
    rule = RULES[estimator.recipe] | {n: value for n, value in own.items() if value is not None}
    valid = valid_of(trajectories, estimator)
    episodes = by_loop(
        np.array([clipped(score, estimator.reward_clip) for score in scores]),
        numbered(tasks),
        len(tasks),
        lengths=np.array(lengths_of(trajectories)),
        valid=valid,
        **rule,
    )
    rows = [[float(e)] * len(t.turns) for e, t in zip(episodes, trajectories, strict=True)]
    if isinstance(estimator, estimators.GiGPO):
        owner = [index for index, t in enumerate(trajectories) for _ in t.turns]
        pairs = zip(owner, given.state_ids, strict=True)
        keys = [None if state < 0 else (tasks[index], state) for index, state in pairs]
        returns = np.array([number for t in trajectories for number in turn_returns_of(t)])
        steps = iter(by_loop(returns, numbered(keys), len(keys), valid=valid[owner], **rule))
        rows = [[e + estimator.step_weight * float(next(steps)) for e in row] for row in rows]
    return spread(trajectories, rows)


def expected_of(
    trajectories: Sequence[Trajectory], estimator: Any, given: Given, with_scores: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return advantages before they are whitened, which tokens count, and returns."""
    of_turns = spread(trajectories, [turn_returns_of(t) for t in trajectories])
    valid = valid_of(trajectories, estimator)
    counts = spread(
        trajectories, [[own] * len(t.turns) for own, t in zip(valid, trajectories, strict=True)]
    )
    if over_tokens(estimator):
        advantages, returns = of_tokens(trajectories, estimator, given)
    elif isinstance(estimator, estimators.GroupEstimator):
        advantages, returns = of_groups(trajectories, estimator, given, with_scores), of_turns
    else:
        advantages, returns = of_turns, of_turns
    return np.where(counts, advantages, 0.0), np.array(counts, bool), np.array(returns)


def whitened(advantages: np.ndarray, counts: np.ndarray, ddof: int) -> np.ndarray:
    """Return the same with mean 0 and standard deviation 1 over what counts."""
    own = advantages[counts]
    return np.where(counts, (advantages - own.mean()) / own.std(ddof=ddof), 0.0)


def check(
    trajectories: Sequence[Trajectory],
    estimator: Any,
    impl: Any = "torch",
    layout: Any = "merged",
    with_scores: bool = False,
) -> PackedBatch:
    """Raise unless a batch's advantages, returns and metrics are those of the loops."""
    given = given_beside(trajectories)
    advantages, counts, returns = expected_of(trajectories, estimator, given, with_scores)
    batch = pack(trajectories, layout, device="cpu")
    inputs = inputs_of(batch, estimator, given)
    if with_scores:
        inputs["scores"] = torch.tensor(given.scores)
    credited = batch.with_advantages(estimator, impl=impl, **inputs)
    own = advantages[counts]
    measured = [len(own), own.mean(), own.size * own.var(), own.min(), own.max()]
    assert credited.metric_names == METRICS
    assert credited.metrics is not None
    np.testing.assert_allclose(credited.metrics, measured, 1e-4, 1e-5)
    if is_whitened(estimator):
        advantages = whitened(advantages, counts, estimator.whitening)
    for name, numbers in (("advantages", advantages), ("returns", returns)):
        rows = getattr(credited, name)
        assert rows.dtype == torch.float32
        np.testing.assert_allclose(generated(batch, rows), numbers, 2e-5, 2e-5, err_msg=name)
    return credited


def named(name: str) -> Any:
    """Return an estimator by its name in `EVERY` or `MORE`."""
    return (EVERY | MORE)[name]


def credited(
    trajectories: Sequence[Trajectory],
    estimator: Any,
    layout: Any = "merged",
    beside: Given | None = None,
    impl: Any = "auto",
) -> PackedBatch:
    """Return trajectories packed, with advantages."""
    batch = pack(trajectories, layout, device="cpu")
    beside = given_beside(trajectories) if beside is None else beside
    return batch.with_advantages(estimator, impl=impl, **inputs_of(batch, estimator, beside))


def assert_close(actual: torch.Tensor, expected: torch.Tensor, estimator: Any) -> None:
    """Assert the same bits, but for rounding where a batch's moments were made in two orders."""
    if is_whitened(estimator):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    else:
        assert_same_bits(actual, expected)
