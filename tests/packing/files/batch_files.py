"""Batches of every origin."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from trajpack import (
    GRPO,
    PackedBatch,
    TokenField,
    Trajectory,
    TrajectoryBuffer,
    Turn,
    TurnReturns,
    pack,
    pack_resident,
)

VALUES = TokenField("values", torch.float32, (2,))
EXPERTS = TokenField("experts", torch.uint8, (2,), fill=255, generated_only=False)
FIELDS = [VALUES, EXPERTS]
Way = Callable[[list[Trajectory], Any], PackedBatch]


def some_trajectories() -> list[Trajectory]:
    """A conversation, one with a break, one of two versions, one whose completion is empty."""
    spans = [(1, 0, 1), (3, 1, 3)]
    first = Turn([1, 2], [3], [-0.5], reward=-1.0)
    return [
        Trajectory("talk", [first, Turn([1, 2, 3, 4], [5, 6], [0.0, -0.25])], "g", 0.5),
        Trajectory("break", [first, Turn([9, 8], [7], [-1.0], truncated=True)], "g", task_id=3),
        Trajectory("versions", [Turn([5], [6, 7, 8], [-0.1] * 3, 2.0, version_spans=spans)]),
        Trajectory("empty", [Turn([5, 6], [], [], version_start=2, version_end=4)]),
    ]


def with_rows(trajectory: Trajectory) -> Trajectory:
    """Give every turn rows of `FIELDS`, functions of the token alone."""
    turns = []
    for turn in trajectory.turns:
        prompt, completion = (
            torch.as_tensor(ids).long() for ids in (turn.prompt_ids, turn.completion_ids)
        )
        rows = {
            "values": (completion[:, None] % 7 + torch.arange(2)) / 4,
            "experts": (torch.cat([prompt, completion])[:, None] % 5 + torch.arange(2)).byte(),
        }
        turns.append(dataclasses.replace(turn, fields=rows))
    return dataclasses.replace(trajectory, turns=turns)


def in_two_goes(trajectories: list[Trajectory], layout: Any) -> PackedBatch:
    buffer = TrajectoryBuffer(device="cpu")
    buffer.extend(trajectories)
    buffer.pack("merged" if layout == "turns" else "turns")
    buffer.clear()
    for trajectory in trajectories:
        buffer.add(trajectory)
    return buffer.pack(layout)


def from_device(trajectories: list[Trajectory], layout: Any) -> PackedBatch:
    """Pack tensors; in layout "merged", where prompts are not compared, of first turns alone."""
    resident = [
        dataclasses.replace(
            trajectory,
            turns=[
                dataclasses.replace(
                    turn,
                    prompt_ids=torch.as_tensor(turn.prompt_ids, dtype=torch.int32),
                    completion_ids=torch.as_tensor(turn.completion_ids, dtype=torch.int32),
                    completion_logprobs=torch.as_tensor(turn.completion_logprobs).float(),
                )
                for turn in trajectory.turns[: 1 if layout == "merged" else None]
            ],
        )
        for trajectory in trajectories
    ]
    return pack_resident(resident, layout)


def with_own_credit(trajectories: list[Trajectory], layout: Any) -> PackedBatch:
    batch = pack(trajectories, layout)
    return dataclasses.replace(
        batch,
        advantages=batch.returns,  # shares its memory
        metrics=torch.tensor([0.5, float("nan")], dtype=torch.float64),
        metric_names=("clip", "kl"),
    )


def with_later_field(trajectories: list[Trajectory], layout: Any) -> PackedBatch:
    batch = pack(map(with_rows, trajectories), layout, fields=FIELDS)
    teacher = TokenField("teacher", torch.bfloat16, fill=-1.0)
    return batch.with_field(teacher, torch.arange(batch.num_tokens).bfloat16())


WAYS: dict[str, Way] = {
    "pack": pack,
    "pack by triton": lambda given, layout: pack(given, layout, impl="triton"),
    "a buffer that is filled again": in_two_goes,
    "pack with fields": lambda given, layout: pack(map(with_rows, given), layout, fields=FIELDS),
    "a field added later": with_later_field,
    "turns on a device": from_device,
    "advantages of turns": lambda given, layout: pack(given, layout).with_advantages(TurnReturns()),
    "advantages of groups": lambda given, layout: pack(given, layout).with_advantages(GRPO()),
    "advantages of one's own": with_own_credit,
    "a pickle": lambda given, layout: pickle.loads(pickle.dumps(pack(given, layout))),
}
"""Every way to make a batch that can be saved."""


@contextmanager
def seeded(seed: int) -> Iterator[np.random.Generator]:
    """Give a generator; a failure says which seed it had."""
    try:
        yield np.random.default_rng(seed)
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
