"""Step groups: turns of all trajectories that start from the same state of the same task."""

from __future__ import annotations

from typing import Literal

import torch

from trajpack.kernels.dispatch import Impl
from trajpack.kernels.groups.group_advantages import Singleton, group_advantages
from trajpack.kernels.validation import check_device, check_tensor

OP = "step_advantages"
IDS = (torch.int32, torch.int64)


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
    """Compare each step with those of all trajectories that were taken in the same state.

    GiGPO's step advantage: steps of the same task and state form a group (the estimator
    `trajpack.GiGPO` gives the trajectory's group as the task), and a step has
    ``(score - mean) / (std + eps)`` of its group. Its episode advantage is
    `trajpack.kernels.grpo` of the trajectories' scores; a step's advantage in all
    is the sum of both, this one with a weight.

    Args:
        step_scores: ``[steps]`` float32 or float64, what followed each step: the discounted
            returns of its trajectory from there on (`discounted_returns`).
        task_ids: ``[steps]`` int32 or int64: the task of the step's trajectory, or its group of
            responses to one prompt.
        state_ids: ``[steps]`` int32 or int64: the state that the step was taken in, 0 or above,
            such as ``zlib.crc32(text.encode())`` (as int64). A step with a negative one is in no
            group: its advantage is 0. So Python's ``hash`` will not do: it is often negative,
            and differs between processes.
        scale: ``"std"`` divides by the group's deviation, with one less than its size under the
            variance; ``"none"`` does not.
        eps: Added to the deviation; not negative.
        singleton: Advantage of a step whose state nobody else was in: 0, or its score
            (``"raw"``).
        valid: ``[steps]`` bool. A step without it counts nowhere and has advantage 0.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others. A named
            implementation that cannot run raises.

    Returns:
        ``[steps]`` float32; statistics are made in float64. Not differentiable.

    Raises:
        TypeError: If a dtype or a type is none of the above.
        ValueError: If shapes or devices disagree, or a value or a word is none of the above.

    Cost: pairs are numbered by two stable sorts and a dozen small launches of torch; then it is
    `group_advantages` of as many groups as steps, one launch that reads ids steps² / 16 times.
    The steps of a task stand together in most batches, and then little else is read; up to
    32,768 steps it is fine where they do not. No host synchronisation.

    Example:
        >>> scores = torch.tensor([1.0, 0.0, 5.0, 4.0])
        >>> tasks, states = torch.tensor([7, 7, 7, 8]), torch.tensor([30, 30, 31, 30])
        >>> step_advantages(scores, tasks, states, scale="none")
        tensor([ 0.5000, -0.5000,  0.0000,  0.0000])

    Reference:
        Feng et al. 2025, Group-in-Group Policy Optimization, arXiv 2505.10978, section 4.2.
    """
    check_tensor(OP, "step_scores", step_scores, ndim=1, dtypes=(torch.float32, torch.float64))
    for name, ids in (("task_ids", task_ids), ("state_ids", state_ids)):
        check_tensor(OP, name, ids, ndim=1, dtypes=IDS)
        check_device(OP, name, ids, step_scores.device)
        if ids.shape != step_scores.shape:
            raise ValueError(
                f"{OP}: {name} must have one entry for each of {step_scores.shape[0]} step(s), "
                f"got shape {list(ids.shape)}"
            )
    if scale not in ("std", "none"):
        raise ValueError(f"{OP}: scale must be 'std' or 'none', got {scale!r}")
    return group_advantages(
        step_scores, number_pairs(task_ids, state_ids), num_groups=step_scores.shape[0],
        scale=scale, eps=eps, singleton=singleton, valid=valid, impl=impl,
    )  # fmt: skip


def number_pairs(task_ids: torch.Tensor, state_ids: torch.Tensor) -> torch.Tensor:
    """Number the pairs of a task and a state from 0 on, in ascending order, as int64.

    The same pair has the same number wherever it stands; -1 where the state is negative. Sorts
    of integers alone: deterministic, and no value is read by the host.

    Example:
        >>> number_pairs(torch.tensor([5, 5, 2, 5]), torch.tensor([9, 1, 9, 9]))
        tensor([2, 1, 0, 2])
    """
    if not task_ids.shape[0]:
        return task_ids.long()
    order = torch.argsort(state_ids, stable=True)
    order = order[torch.argsort(task_ids[order], stable=True)]
    tasks, states = task_ids[order], state_ids[order]
    is_new = (tasks[1:] != tasks[:-1]) | (states[1:] != states[:-1])
    numbers = torch.nn.functional.pad(is_new.long(), (1, 0)).cumsum(0)
    numbers = numbers.scatter(0, order, numbers)  # each place once
    return torch.where(state_ids < 0, -1, numbers)
