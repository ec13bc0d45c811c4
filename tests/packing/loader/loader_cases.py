"""Trajectories for loaders, and what their micro-batches hold."""

import dataclasses

import numpy as np
import torch

from trajpack import Trajectory, Turn
from trajpack.packing.tree.micro_batches import TreeMicroBatch


def many(count, seed=0, vocabulary=64):
    """Return conversations of one or two turns, some of which break their prefix."""
    draw = np.random.default_rng(seed)

    def ids(size):
        return draw.integers(3, vocabulary, size).tolist()

    found = []
    for number in range(count):
        prompt, completion = ids(draw.integers(1, 12)), ids(draw.integers(1, 9))
        turns = [Turn(prompt, completion, [-0.5] * len(completion), 1.0)]
        if number % 3:
            heard = prompt + completion * (number % 3 == 1) + ids(2)
            turns.append(Turn(heard, ids(3), [-0.25] * 3))
        found.append(Trajectory(str(number), turns))
    return found


def entries_of(piece):
    return piece.entries if isinstance(piece, TreeMicroBatch) else piece


def content(pieces):
    """Return every tensor and number of micro-batches, to be compared."""
    found = []
    for piece in pieces:
        for part in {id(one): one for one in (piece, entries_of(piece))}.values():
            for field in dataclasses.fields(part):
                value = getattr(part, field.name)
                if isinstance(value, torch.Tensor):
                    value = (value.dtype, value.tolist())
                elif isinstance(value, dict):
                    value = {name: one.tolist() for name, one in value.items()}
                elif field.name == "chains":
                    value = repr(value)  # arrays of the host, compared by their values
                elif dataclasses.is_dataclass(value):
                    continue
                found.append((field.name, value))
    return found


def streams(pieces):
    """Return the generated tokens of micro-batches, each with its weight."""
    found = []
    for piece in pieces:
        tokens = entries_of(piece)
        kept = tokens.loss_mask
        weights = tokens.fields["loss_weights"]
        assert not weights[~kept].any()
        found += zip(tokens.input_ids[kept].tolist(), weights[kept].tolist(), strict=True)
    return found
