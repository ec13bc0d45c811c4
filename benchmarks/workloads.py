"""Named, seeded workloads: lists of trajectories, and lengths of sequences.

A, B and C are sequences of one turn; a random part of each, at least one token, is the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trajpack import Trajectory, TrajectoryBuffer, Turn
from trajpack.testing import random_trajectory

Lengths = npt.NDArray[np.int64]


def lengths_a(scale: float = 1.0) -> Lengths:
    """4,096 sequences of 50 to 4,000 tokens: 8.3 M tokens."""
    return np.random.default_rng(1).integers(50, 4001, _scaled(4096, scale))


def lengths_b(scale: float = 1.0) -> Lengths:
    """64 sequences of 32,768 tokens: 2.1 M tokens."""
    return np.full(_scaled(64, scale), 32_768, np.int64)


def lengths_c(scale: float = 1.0) -> Lengths:
    """100,000 sequences of 1 to 64 tokens: 3.2 M tokens."""
    return np.random.default_rng(3).integers(1, 65, _scaled(100_000, scale))


def lengths_power_law(scale: float = 1.0) -> Lengths:
    """2,000 sequences, density as length to the power -2, from 200 to 32,768 tokens."""
    drawn = 200 / np.random.default_rng(4).random(_scaled(2000, scale))
    return np.minimum(drawn, 32_768).astype(np.int64)


def multi_turn(num_trajectories=256, num_turns=5, seed=0):
    """Conversations of chat length; 256 of 5 turns are about 4.9 M tokens as turns."""
    generator = np.random.default_rng(seed)
    return [
        random_trajectory(
            generator,
            str(index),
            num_turns=num_turns,
            prompt=(100, 1200),
            completion=(200, 1000),
        )
        for index in range(num_trajectories)
    ]


def many_turns(num_trajectories=256, num_turns=32, seed=5):
    """Tool calls: 256 conversations of 32 short turns, about 8 M tokens as turns."""
    generator = np.random.default_rng(seed)
    return [
        random_trajectory(
            generator,
            str(index),
            num_turns=num_turns,
            prompt=(10, 30),
            completion=(20, 60),
        )
        for index in range(num_trajectories)
    ]


def single_turns(lengths: Lengths, seed: int = 2) -> list[Trajectory]:
    """Return a trajectory of one turn for each length."""
    generator = np.random.default_rng(seed)
    total = int(lengths.sum())
    ids = generator.integers(0, 32_000, total, dtype=np.int32)
    logprobs = -generator.random(total, dtype=np.float32)
    prompts = generator.integers(1, lengths + 1)
    rewards = generator.choice([-1.0, 1.0], len(lengths)).tolist()
    starts = np.cumsum(lengths) - lengths
    rows = zip(starts.tolist(), prompts.tolist(), lengths.tolist(), rewards, strict=True)
    return [
        Trajectory(
            str(index),
            [
                Turn(
                    ids[start : start + prompt],
                    ids[start + prompt : start + length],
                    logprobs[start + prompt : start + length],
                    reward,
                    version_start=index % 3,
                    version_end=index % 3,
                )
            ],
        )
        for index, (start, prompt, length, reward) in enumerate(rows)
    ]


def as_lists(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the same trajectories with plain lists in them: what an engine's JSON holds."""
    return [
        Trajectory(
            trajectory.id,
            [
                Turn(
                    turn.prompt_ids.tolist(),
                    turn.completion_ids.tolist(),
                    turn.completion_logprobs.tolist(),
                    turn.reward,
                    turn.truncated,
                    turn.version_start,
                    turn.version_end,
                )
                for turn in trajectory.turns
            ],
            turn_discount=trajectory.turn_discount,
        )
        for trajectory in trajectories
    ]


SEQUENCES: dict[str, Callable[[float], Lengths]] = {
    "A: 4,096 of U(50, 4000)": lengths_a,
    "B: 64 of 32,768": lengths_b,
    "C: 100,000 of U(1, 64)": lengths_c,
    "power law: 2,000 of 200 to 32,768": lengths_power_law,
}
"""Lengths by the workload's name; the argument scales the number of sequences."""
EVEN_SEQUENCES = tuple(SEQUENCES)[:3]
"""Those without extreme lengths."""
GAE_LENGTHS: dict[str, Lengths] = {
    "1,024: 128 sequences": np.full(128, 1024),
    "4,096: 32 sequences": np.full(32, 4096),
    "32,768: 4 sequences": np.full(4, 32_768),
    "131,072: 1 sequence": np.full(1, 131_072),
    "B: 64 of 32,768": np.full(64, 32_768),
}
"""131,072 tokens in many or few sequences, and a batch of long ones."""
GAE_MASKED_LENGTHS = tuple(GAE_LENGTHS)[::2][:2]


def conversations(name: str, scale: float = 1.0) -> list[Trajectory]:
    """Return the trajectories of a workload, of `SEQUENCES` or multi-turn, by its name."""
    if name == MULTI_TURN:
        return multi_turn(_scaled(256, scale))
    if name == MANY_TURNS:
        return many_turns(_scaled(256, scale))
    return single_turns(SEQUENCES[name](scale))


def filled(trajectories: Sequence[Trajectory], device: str = "cpu") -> TrajectoryBuffer:
    """Return a new buffer that holds all trajectories."""
    buffer = TrajectoryBuffer(device=device)
    buffer.extend(trajectories)
    return buffer


MULTI_TURN = "multi-turn: 256 x 5 turns"
MANY_TURNS = "multi-turn: 256 x 32 turns"
WORKLOADS = (*SEQUENCES, MULTI_TURN, MANY_TURNS)


class Size(NamedTuple):
    """Where a benchmark of the device runs, and how large: a rehearsal is tiny and on the host."""

    device: str = "cuda"
    scale: float = 1.0

    def scaled(self, count: int) -> int:
        """Return so many, or as many as the scale makes of them."""
        return _scaled(count, self.scale)

    def cut(self, lengths: Lengths) -> Lengths:
        """Return the lengths, or few and small ones."""
        return lengths if self.scale == 1 else np.minimum(lengths[:4], 60)


def _scaled(count: int, scale: float) -> int:
    return max(1, round(count * scale))
