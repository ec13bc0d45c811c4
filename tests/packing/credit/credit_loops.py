"""Credit of tokens in Python's own floats, from turns and trajectories: no batch, no tensor.

What a token is given is listed turn after turn, for the tokens that each turn generated. What a
turn brings that is new, context and completion, comes with a `Given`: the rows that a batch is
handed beside the turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from trajpack import Trajectory, Turn
from trajpack.packing.credit import estimators

Rows: TypeAlias = list[list[float]]
"""A number for each token that a turn generated, turn after turn."""


class Given(NamedTuple):
    """What stands beside trajectories; rows have an entry for every token new with a turn."""

    values: Rows
    logprobs: Rows
    ref_logprobs: Rows
    bootstrap: list[float]
    scores: list[float]
    state_ids: list[int]


class Step(NamedTuple):
    """One token that is scanned."""

    generated: bool
    reward: float
    value: float
    ratio: float


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


def scanned(steps: list[Step], observation: str) -> list[tuple[Step, float]]:
    """Return the steps that count, and 0 for each that ends what comes behind it, else 1."""
    if observation in ("carry", "carry_drop", "compact"):
        return [(step, 1.0) for step in steps if step.generated]
    if observation == "multiply":
        return [(s if s.generated else Step(False, 0.0, 0.0, 1.0), 1.0) for s in steps]
    return [(s, 0.0 if observation == "reset" and not s.generated else 1.0) for s in steps]


def gae_of(
    steps: list[Step], gamma: float, lam: float, observation: str, behind: float
) -> tuple[list[float], list[float]]:
    """Return advantages and returns of the generated tokens of one trajectory."""
    advantages, returns, running, following = [], [], 0.0, behind
    for step, gate in reversed(scanned(steps, observation)):
        delta = step.reward + gamma * gate * following - step.value
        running = delta + gamma * lam * gate * running
        following = step.value
        if step.generated:
            advantages.append(running)
            returns.append(running + step.value)
    return advantages[::-1], returns[::-1]


def vtrace_of(
    steps: list[Step], rule: estimators.VTrace, behind: float
) -> tuple[list[float], list[float]]:
    """Return advantages and targets of the generated tokens of one trajectory."""
    advantages, targets, surplus, following, target = [], [], 0.0, behind, behind
    for step, gate in reversed(scanned(steps, rule.observation)):
        clips = rule.rho_clip, rule.c_clip, rule.advantage_rho_clip
        rho, c, by = (min(step.ratio, cap) if step.generated else 1.0 for cap in clips)
        advantage = by * (step.reward + rule.gamma * gate * target - step.value)
        delta = rho * (step.reward + rule.gamma * gate * following - step.value)
        surplus = delta + rule.gamma * rule.lam * c * gate * surplus
        following, target = step.value, step.value + surplus
        if step.generated:
            advantages.append(advantage)
            targets.append(target)
    return advantages[::-1], targets[::-1]


def turn_gae_of(
    steps: list[list[Step]], rule: estimators.TurnGAE, behind: float
) -> tuple[list[float], list[float]]:
    """Return the same of turns that generated something, each for all its tokens."""
    actions = [[step for step in turn if step.generated] for turn in steps]
    whole = [
        Step(True, math.fsum(step.reward for step in turn), turn[0].value, 1.0)
        for turn in actions
        if turn
    ]
    sizes = [len(turn) for turn in actions if turn]
    rows = gae_of(whole, rule.gamma, rule.lam, "carry", behind)
    advantages, returns = (
        [number for number, size in zip(row, sizes, strict=True) for _ in range(size)]
        for row in rows
    )
    return advantages, returns


def of_tokens(
    trajectories: Sequence[Trajectory], estimator: Any, given: Given
) -> tuple[list[float], list[float]]:
    """Return advantages, not whitened, and returns of what all trajectories generated."""
    advantages, returns, first = [], [], 0
    for index, trajectory in enumerate(trajectories):
        past = first + len(trajectory.turns)
        own = given._replace(
            values=given.values[first:past],
            logprobs=given.logprobs[first:past],
            ref_logprobs=given.ref_logprobs[first:past],
        )
        first = past
        steps = steps_of(trajectory, estimator, own)
        ends = estimator.truncated != "bootstrap" or not trajectory.turns[-1].truncated
        behind = 0.0 if ends else given.bootstrap[index]
        every = [step for turn in steps for step in turn]
        if isinstance(estimator, estimators.TurnGAE):
            rows = turn_gae_of(steps, estimator, behind)
        elif isinstance(estimator, estimators.VTrace):
            rows = vtrace_of(every, estimator, behind)
        elif isinstance(estimator, estimators.ReinforcePlusPlus):
            bare = [step._replace(value=0.0) for step in every]
            rows = gae_of(bare, estimator.gamma, 1.0, estimator.observation, behind)
        else:
            rows = gae_of(every, estimator.gamma, estimator.lam, estimator.observation, behind)
        advantages += rows[0]
        returns += rows[1]
    return advantages, returns
