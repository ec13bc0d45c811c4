"""Trajectories whose arrays are tensors on a device, where an engine beside it left them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from trajpack import Trajectory


def on_device(trajectories: Sequence[Trajectory], device: str) -> list[Trajectory]:
    """Return the same trajectories over tensors; slices of one of ids and one of logprobs."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    parts = [part for turn in turns for part in (turn.prompt_ids, turn.completion_ids)]
    ids = iter(_sliced(parts, device))
    logprobs = iter(_sliced([turn.completion_logprobs for turn in turns], device))
    return [
        dataclasses.replace(
            trajectory,
            turns=[
                dataclasses.replace(
                    turn,
                    prompt_ids=next(ids),
                    completion_ids=next(ids),
                    completion_logprobs=next(logprobs),
                )
                for turn in trajectory.turns
            ],
        )
        for trajectory in trajectories
    ]


def _sliced(parts: Sequence[np.ndarray], device: str) -> tuple[torch.Tensor, ...]:
    whole = torch.from_numpy(np.concatenate(parts)).to(device)
    return whole.split([len(part) for part in parts])
