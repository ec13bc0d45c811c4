"""Batches for the tests of formats made of rows, and rows made of them one token at a time."""

import dataclasses

import numpy as np
import torch

from trajpack import Trajectory, Turn, pack


def conversation(name, num_turns=2, first=10, **labels):
    """Return turns of which each prompt repeats all before and then observes two tokens."""
    heard, turns = [first, first + 1], []
    for turn in range(num_turns):
        said = [100 + 10 * turn + token for token in range(turn + 1)]
        logprobs = [-0.5 - token / 8 - turn for token in range(turn + 1)]
        turns.append(
            Turn(heard, said, logprobs, reward=1.0 + turn, version_start=turn, version_end=turn)
        )
        heard = [*heard, *said, 7, 8]
    return Trajectory(name, turns, **labels)


def plain_batch(**options):
    """Return a batch of which each trajectory is one sequence, of different lengths."""
    trajectories = [
        conversation("a", 2, group="task"),
        conversation("b", 1, group="task"),
        conversation("c", 3),
    ]
    return pack(trajectories, **options)


def forked_batch(**options):
    """Return a batch with a rewritten history, a completion of nothing and a truncated turn."""
    forked = Trajectory(
        "forked",
        [
            Turn([1, 2], [3, 4], [-0.5, -0.25], 1.0, version_start=3, version_end=4),
            Turn([1, 2, 3, 4, 5], [], [], 2.0, version_start=4, version_end=4),
            Turn([9, 9], [6], [-2.0], 4.0, truncated=True, version_start=5, version_end=5),
            Turn([1, 2, 3, 4, 5, 8], [7], [-1.0], 8.0, version_start=5, version_end=6),
        ],
        "task",
    )
    silent = Trajectory("silent", [Turn([1, 2, 3], [], [], 16.0)], "task")
    return pack([forked, silent, conversation("long", 3)], **options)


def random_batch(rng, *, fields=(), **options):
    """Return a batch of a few random trajectories, with advantages; some break their history.

    Each of ``fields`` has a random row for every generated token, or for every token.
    """
    trajectories = []
    for number in range(int(rng.integers(1, 6))):
        heard, turns = rng.integers(9, 90, rng.integers(1, 6)).tolist(), []
        for _ in range(int(rng.integers(1, 4))):
            said = rng.integers(9, 90, rng.integers(1, 7)).tolist()
            rows = {
                field.name: random_rows(
                    rng, field, len(said) if field.generated_only else len(heard) + len(said)
                )
                for field in fields
            }
            logprobs = -rng.random(len(said), np.float32)
            turns.append(Turn(heard, said, logprobs, float(rng.normal()), fields=rows or None))
            heard = [*heard, *said, *rng.integers(9, 90, rng.integers(0, 4)).tolist()]
            if rng.random() < 0.2:
                heard = rng.integers(9, 90, 3).tolist()  # a rewritten history
        trajectories.append(Trajectory(str(number), turns, f"group {number % 2}"))
    batch = pack(trajectories, device="cpu", fields=fields, **options)
    advantages = torch.from_numpy(rng.normal(size=batch.num_tokens)).float()
    return dataclasses.replace(batch, advantages=torch.where(batch.loss_mask, advantages, 0.0))


def random_rows(rng, field, count):
    """Return that many random rows of a field; experts of a token are distinct.

    Where the field is filled with -1, rows have -1 behind their last number.
    """
    if field.dtype.is_floating_point:
        return -rng.random((count, *field.shape), np.float32)
    rows = rng.random((count, *field.shape[:-1], 16)).argsort(-1)[..., : field.shape[-1]]
    if field.fill == -1:
        known = rng.integers(1, field.shape[-1] + 1, (count, 1))
        rows = np.where(np.arange(field.shape[-1]) < known, rows, -1)
    return torch.from_numpy(rows).to(field.dtype).numpy()


def rows_by_loop(batch):
    """Return prompt, response and the response's mask and log-probabilities of each sequence."""
    rows, begin = [], 0
    for length in batch.seqlens:
        of = slice(begin, begin + length)
        ids, mask = batch.input_ids[of].tolist(), batch.loss_mask[of].tolist()
        split = mask.index(True) if True in mask else length
        logprobs = batch.rollout_logprobs[of].tolist()
        rows.append((ids[:split], ids[split:], mask[split:], logprobs[split:]))
        begin += length
    return rows


def padded(values, width, value, side="right"):
    """Return a list brought to ``width``."""
    filling = [value] * (width - len(values))
    return [*filling, *values] if side == "left" else [*values, *filling]
