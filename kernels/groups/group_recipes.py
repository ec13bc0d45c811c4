"""Group advantages by name: each fixes the rule of `group_advantages` as its source does.

r is a score, n the size of its group, and sums are over the group. `step_advantages` groups turns
by state.
"""

from __future__ import annotations

from typing import Literal

import torch

from trajpack.kernels.dispatch import Impl
from trajpack.kernels.groups.group_advantages import (
    FLOATS,
    INTEGERS,
    Rule,
    Singleton,
    compare,
    number_pairs,
)
from trajpack.kernels.validation import check_choice, check_tensor


def grpo(
    scores: torch.Tensor, group_ids: torch.Tensor, *, num_groups: int, eps: float = 1e-6,
    singleton: Singleton = "raw", valid: torch.Tensor | None = None, impl: Impl = "auto",
) -> torch.Tensor:  # fmt: skip
    """Return ``(r - mean) / (std + eps)``, with n - 1 under the variance.

    A group of one keeps its score, as in verl; others give it 0 (``singleton="zero"``).
    Arguments, result, errors and cost are those of `group_advantages`.

    Example:
        >>> scores = torch.tensor([1.0, 0.0, 1.0, 0.0, 7.0])
        >>> grpo(scores, torch.tensor([0, 0, 0, 0, 1]), num_groups=2)
        tensor([ 0.8660, -0.8660,  0.8660, -0.8660,  7.0000])

    Reference:
        Shao et al. 2024, DeepSeekMath, arXiv 2402.03300; verl's ``grpo``.
    """
    rule = Rule("mean", "std", eps=eps, singleton=singleton)
    return compare(scores, group_ids, num_groups, rule, valid, impl)


def dr_grpo(
    scores: torch.Tensor, group_ids: torch.Tensor, *, num_groups: int,
    singleton: Singleton = "raw", valid: torch.Tensor | None = None, impl: Impl = "auto",
) -> torch.Tensor:  # fmt: skip
    """Return ``r - mean``.

    A group of one keeps its score, as in verl; prime-rl and tinker give it 0
    (``singleton="zero"``).
    Arguments, result, errors and cost are those of `group_advantages`.

    Example:
        >>> dr_grpo(torch.tensor([1.0, 0.0, 5.0]), torch.tensor([0, 0, 1]), num_groups=2)
        tensor([ 0.5000, -0.5000,  5.0000])

    Reference:
        Liu et al. 2025, Understanding R1-Zero-Like Training, arXiv 2503.20783; verl's ``grpo``
        with ``norm_adv_by_std_in_grpo=False``.
    """
    rule = Rule("mean", "none", singleton=singleton)
    return compare(scores, group_ids, num_groups, rule, valid, impl)


def rloo(
    scores: torch.Tensor, group_ids: torch.Tensor, *, num_groups: int,
    singleton: Singleton = "raw", valid: torch.Tensor | None = None, impl: Impl = "auto",
) -> torch.Tensor:  # fmt: skip
    """Return ``r`` less the mean of the others, ``(n * r - sum) / (n - 1)``.

    A group of one keeps its score, as in verl's ``rloo``; its ``rloo_vectorized`` and SkyRL give
    it 0 (``singleton="zero"``).
    Arguments, result, errors and cost are those of `group_advantages`.

    Example:
        >>> rloo(torch.tensor([10.0, 20.0, 30.0]), torch.tensor([0, 0, 0]), num_groups=1)
        tensor([-15.,   0.,  15.])

    Reference:
        Ahmadian et al. 2024, Back to Basics, arXiv 2402.14740; verl's ``rloo``.
    """
    rule = Rule("leave_one_out", "none", singleton=singleton)
    return compare(scores, group_ids, num_groups, rule, valid, impl)


def opo(
    scores: torch.Tensor, group_ids: torch.Tensor, lengths: torch.Tensor, *, num_groups: int,
    singleton: Singleton = "raw", valid: torch.Tensor | None = None, impl: Impl = "auto",
) -> torch.Tensor:  # fmt: skip
    """Return ``r - sum(length * r) / sum(length)``.

    ``lengths`` ``[members]`` int32, int64, float32 or float64 counts each response's tokens. A
    group of one keeps its score, as in verl.
    Arguments, result, errors and cost are those of `group_advantages`.

    Example:
        >>> scores, lengths = torch.tensor([1.0, 0.0]), torch.tensor([30, 10])
        >>> opo(scores, torch.tensor([0, 0]), lengths, num_groups=1)
        tensor([ 0.2500, -0.7500])

    Reference:
        Hao et al. 2025, On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585; verl's
        ``opo``.
    """
    rule = Rule("length_weighted", "none", singleton=singleton)
    return compare(scores, group_ids, num_groups, rule, valid, impl, lengths)


def reinforce_plus_plus_baseline(
    scores: torch.Tensor, group_ids: torch.Tensor, *, num_groups: int,
    singleton: Singleton = "raw", valid: torch.Tensor | None = None, impl: Impl = "auto",
) -> torch.Tensor:  # fmt: skip
    """Return ``r - mean``: the first half of the estimator.

    The second half whitens these over the tokens of the whole batch, once they stand at their
    tokens; it is the caller's to do. A group of one keeps its score, as in verl.
    Arguments, result, errors and cost are those of `group_advantages`.

    Example:
        >>> scores, group_ids = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0, 0, 1])
        >>> reinforce_plus_plus_baseline(scores, group_ids, num_groups=2)
        tensor([ 0.5000, -0.5000,  1.0000])

    Reference:
        Hu et al. 2025, REINFORCE++, arXiv 2501.03262; verl's ``reinforce_plus_plus_baseline``.
    """
    rule = Rule("mean", "none", singleton=singleton)
    return compare(scores, group_ids, num_groups, rule, valid, impl)


def max_rl(
    scores: torch.Tensor, group_ids: torch.Tensor, *, num_groups: int,
    singleton: Singleton = "zero", valid: torch.Tensor | None = None, impl: Impl = "auto",
) -> torch.Tensor:  # fmt: skip
    """Return ``(r - mean) / mean``, and 0 in groups whose mean is not positive.

    So a group that rarely succeeds counts for more than one that often does. A group of one has
    advantage 0, which is what the formula says.
    Arguments, result, errors and cost are those of `group_advantages`.

    Example:
        >>> scores = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
        >>> max_rl(scores, torch.tensor([0, 0, 0, 1, 1]), num_groups=2)
        tensor([ 2., -1., -1.,  0.,  0.])

    Reference:
        Maximum Likelihood Reinforcement Learning, arXiv 2602.02710, as prime-rl's ``max_rl``
        implements it. SkyRL's ``maxrl`` divides by a mean of either sign:
        ``group_advantages(scale="signed_mean")``.
    """
    rule = Rule("mean", "mean", singleton=singleton)
    return compare(scores, group_ids, num_groups, rule, valid, impl)


def gpg(
    scores: torch.Tensor, group_ids: torch.Tensor, *, num_groups: int,
    singleton: Singleton = "raw", valid: torch.Tensor | None = None, impl: Impl = "auto",
) -> torch.Tensor:  # fmt: skip
    """Return ``alpha * (r - mean)``, with alpha the batch's members by those not scored 0.

    ``alpha = members / max(members with r != 0, 1)`` counts the whole batch, so an advantage
    depends on all groups. A group of one has ``alpha * r``, as in verl.
    Arguments, result, errors and cost are those of `group_advantages`.

    Example:
        >>> scores = torch.tensor([1.0, 0.0, 0.0, 0.0])
        >>> gpg(scores, torch.tensor([0, 0, 1, 1]), num_groups=2)
        tensor([ 2., -2.,  0.,  0.])

    Reference:
        Chu et al. 2025, GPG, arXiv 2504.02546; verl's ``gpg`` with ``f_norm=1``.
    """
    rule = Rule("mean", "nonzero", singleton=singleton)
    return compare(scores, group_ids, num_groups, rule, valid, impl)


def grpo_pass_at_k(
    scores: torch.Tensor, group_ids: torch.Tensor, *, num_groups: int,
    scale: Literal["std", "none"] = "none", eps: float = 1e-6,
    valid: torch.Tensor | None = None, impl: Impl = "auto",
) -> torch.Tensor:  # fmt: skip
    """Return the best score less the second best for the best of a group, and 0 for all others.

    If two tie for best, both get 0, and so does a group of one, which verl refuses.
    ``scale="std"`` divides by ``std + eps``, as verl does unless it is told not to.
    Arguments, result, errors and cost are those of `group_advantages`.

    Example:
        >>> scores = torch.tensor([3.0, 1.0, 0.0, 1.0, 1.0])
        >>> grpo_pass_at_k(scores, torch.tensor([0, 0, 0, 1, 1]), num_groups=2)
        tensor([2., 0., 0., 0., 0.])

    Reference:
        Tang et al. 2025, arXiv 2503.19595; verl's ``grpo_passk``.
    """
    rule = Rule("second_best", scale, eps=eps, singleton="zero")
    return compare(scores, group_ids, num_groups, rule, valid, impl)


def step_advantages(
    step_scores: torch.Tensor,
    task_ids: torch.Tensor,
    state_ids: torch.Tensor,
    *,
    scale: Literal["std", "none"] = "std",
    eps: float = 1e-6,
    singleton: Singleton = "zero",
    valid: torch.Tensor | None = None,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Compare each step with all steps taken in the same state of the same task.

    GiGPO's step advantage, ``(score - mean) / (std + eps)`` of the steps' group; the estimator
    `trajpack.GiGPO` takes the trajectory's group as the task, and adds this with a weight to
    `trajpack.kernels.grpo` of the trajectories' scores.

    Args:
        step_scores: ``[steps]`` float32 or float64: discounted return from each step on
            (`discounted_returns`).
        task_ids: ``[steps]`` int32 or int64: task of the step's trajectory.
        state_ids: ``[steps]`` int32 or int64: state of each step, such as
            ``zlib.crc32(text.encode())`` as int64. A step with a negative state is in no group and
            has advantage 0; Python's ``hash`` is often negative and differs between processes.
        scale: ``"std"`` divides by the group's standard deviation, ``"none"`` does not.
        eps: Added to the deviation; not negative.
        singleton: Advantage of the only step of a state: 0, or its score (``"raw"``).
        valid: As of `group_advantages`, ``[steps]``.
        impl: As of `group_advantages`.

    Returns:
        ``[steps]`` float32. Errors are those of `group_advantages`.

    Cost: two stable sorts and a dozen small launches of torch number the pairs; then that of
    `group_advantages`. Linear in the steps beside the sorts. No host synchronisation.

    Example:
        >>> scores = torch.tensor([1.0, 0.0, 5.0, 4.0])
        >>> tasks, states = torch.tensor([7, 7, 7, 8]), torch.tensor([30, 30, 31, 30])
        >>> step_advantages(scores, tasks, states, scale="none")
        tensor([ 0.5000, -0.5000,  0.0000,  0.0000])

    Reference:
        Feng et al. 2025, Group-in-Group Policy Optimization, arXiv 2505.10978, section 4.2.
    """
    op = "step_advantages"
    check_tensor(op, "step_scores", step_scores, dtypes=FLOATS)
    device, steps = step_scores.device, step_scores.shape[0]
    for name, ids in (("task_ids", task_ids), ("state_ids", state_ids)):
        check_tensor(op, name, ids, dtypes=INTEGERS, device=device, entries=steps, per="step")
    check_choice(op, "scale", scale, ("std", "none"))
    pairs = number_pairs(task_ids, state_ids)
    rule = Rule("mean", scale, eps=eps, singleton=singleton)
    return compare(step_scores, pairs, steps, rule, valid, impl)
