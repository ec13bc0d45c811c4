"""Batches that formats are tried on: turns, breaks, empty completions, sequences of one token."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import numpy as np
import torch

from trajpack import (
    PackedBatch,
    StaticBatch,
    TokenField,
    Trajectory,
    TrajectoryBuffer,
    Turn,
    pack,
)
from trajpack.packing.micro_batches.micro_batch import MicroBatch

VOCABULARY = 97
FIELDS = [
    TokenField("temperatures", torch.float32, fill=1.0),
    TokenField("ref_logprobs", torch.float32),
    TokenField("routed_experts", torch.uint8, shape=(2, 3), fill=0),
]


def conversation(rng: np.random.Generator, name: str, lengths: list[tuple[int, int]]) -> Trajectory:
    """Return a trajectory whose turns observe and generate so many tokens each.

    It begins with a token of its own, so that no two conversations begin alike.
    """
    spoken, turns = [int(name)], []
    for turn, (observed, generated) in enumerate(lengths):
        spoken = [*spoken, *rng.integers(9, VOCABULARY, observed).tolist()]
        completion = rng.integers(9, VOCABULARY, generated).tolist()
        turns.append(
            Turn(
                spoken,
                completion,
                (-rng.random(generated)).astype(np.float32),
                reward=float(rng.integers(-3, 4)),
                version_start=turn,
                version_end=turn,
                fields={
                    "temperatures": rng.random(generated, np.float32),
                    "ref_logprobs": -rng.random(generated, np.float32),
                    "routed_experts": rng.integers(0, 9, (generated, 2, 3), np.uint8),
                },
            )
        )
        spoken = [*spoken, *completion]
    return Trajectory(name, turns, group=f"group {int(name) % 2}")


def some_trajectories(seed: int = 0) -> list[Trajectory]:
    """Return conversations of one to three turns; the last is a single token, and breaks."""
    rng = np.random.default_rng(seed)
    found = [
        conversation(rng, "1", [(4, 3), (2, 5)]),
        conversation(rng, "2", [(0, 6)]),
        conversation(rng, "3", [(2, 1), (1, 0), (0, 2)]),
        conversation(rng, "4", [(7, 2), (3, 4), (1, 1)]),
    ]
    alone = {
        "temperatures": np.empty(0, np.float32),
        "ref_logprobs": np.empty(0, np.float32),
        "routed_experts": np.empty((0, 2, 3), np.uint8),
    }
    broken = dataclasses.replace(
        found[1].turns[0], prompt_ids=[6, 6, 6]
    )  # does not begin with the turn before: a sequence of its own
    return [*found, Trajectory("5", [Turn([5], [], [], fields=alone), broken], group="group 1")]


def some_batch(seed: int = 0, *, level: str = "token") -> PackedBatch:
    """Return them packed, with an advantage for each token, or for each sequence."""
    batch = pack(some_trajectories(seed), device="cpu", fields=FIELDS)
    generator = torch.Generator().manual_seed(seed)
    if level == "token":
        advantages = torch.randn(batch.num_tokens, generator=generator)
    else:
        advantages = torch.randn(len(batch), generator=generator)[batch.sequence_ids.long()]
    return dataclasses.replace(batch, advantages=torch.where(batch.loss_mask, advantages, 0.0))


def some_static_batch() -> PackedBatch:
    """Return them in a batch of fixed size, with an advantage for each token."""
    buffer = TrajectoryBuffer(device="cpu", fields=FIELDS)
    buffer.extend(some_trajectories())
    batch = buffer.pack_into(StaticBatch(capacity=96, max_turns=16, device="cpu", fields=FIELDS))
    return dataclasses.replace(batch, advantages=batch.returns)


def sequences_of(batch: PackedBatch | MicroBatch, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Cut a tensor over the tokens into its sequences, one after the other, without padding."""
    if isinstance(batch, PackedBatch):
        return list(tensor.split(batch.seqlens))
    starts = accumulate(batch.padded_seqlens, initial=0)
    return [
        tensor[start : start + length]
        for start, length in zip(starts, batch.num_kept, strict=False)
    ]
