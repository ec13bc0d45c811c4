"""Batches for tests of formats, and rows made of them one token at a time."""

from __future__ import annotations

import dataclasses
from itertools import accumulate

import numpy as np
import torch

from trajpack import (
    GRPO,
    PackedBatch,
    TokenField,
    Trajectory,
    Turn,
    pack,
)

FIELDS = [
    TokenField("temperatures", torch.float32, fill=1.0),
    TokenField("ref_logprobs", torch.float32),
    TokenField("routed_experts", torch.uint8, shape=(2, 3), fill=0),
]


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
    """Return a batch with a rewritten history, a completion of nothing and an episode cut off."""
    forked = Trajectory(
        "forked",
        [
            Turn([1, 2], [3, 4], [-0.5, -0.25], 1.0, version_start=3, version_end=4),
            Turn([1, 2, 3, 4, 5], [], [], 2.0, version_start=4, version_end=4),
            Turn([9, 9], [6], [-2.0], 4.0, version_start=5, version_end=5),
            Turn([1, 2, 3, 4, 5, 8], [7], [-1.0], 8.0, version_start=5, version_end=6),
        ],
        "task",
        truncated=True,
    )
    silent = Trajectory("silent", [Turn([1, 2, 3], [], [], 16.0)], "task")
    return pack([forked, silent, conversation("long", 3)], **options)


def field_batch(*names, dtype=torch.float32, advantages=False):
    """Return a batch of one turn with two generated tokens, 0.5 and 0.25 in each of the fields."""
    turn = Turn([1], [2, 3], [-1.0, -2.0], fields={name: [0.5, 0.25] for name in names})
    batch = pack([Trajectory("a", [turn])], fields=[TokenField(name, dtype) for name in names])
    return batch.with_advantages(GRPO()) if advantages else batch


def some_trajectories(seed: int = 0) -> list[Trajectory]:
    """Return conversations of one to three turns with `FIELDS`; the last is a token, and breaks."""
    rng = np.random.default_rng(seed)

    def turn(heard, num_generated, version=0):
        fields = {
            "temperatures": rng.random(num_generated, np.float32),
            "ref_logprobs": -rng.random(num_generated, np.float32),
            "routed_experts": rng.integers(0, 9, (num_generated, 2, 3), np.uint8),
        }
        said = rng.integers(9, 97, num_generated).tolist()
        logprobs = -rng.random(num_generated, np.float32)
        versions = {"version_start": version, "version_end": version}
        return Turn(heard, said, logprobs, float(rng.integers(-3, 4)), fields=fields, **versions)

    found = []
    for name, lengths in {
        "1": [(4, 3), (2, 5)],
        "2": [(0, 6)],
        "3": [(2, 1), (1, 0), (0, 2)],
        "4": [(7, 2), (3, 4), (1, 1)],
    }.items():
        heard, turns = [int(name)], []  # no two conversations begin alike
        for version, (num_observed, num_generated) in enumerate(lengths):
            heard = [*heard, *rng.integers(9, 97, num_observed).tolist()]
            turns.append(turn(heard, num_generated, version))
            heard = [*heard, *turns[-1].completion_ids]
        found.append(Trajectory(name, turns, group=f"group {int(name) % 2}"))
    return [*found, Trajectory("5", [turn([5], 0), turn([6, 6, 6], 6)], group="group 1")]


def some_batch(seed: int = 0, *, level: str = "token") -> PackedBatch:
    """Return them packed, with an advantage for each token, or for each sequence."""
    batch = pack(some_trajectories(seed), device="cpu", fields=FIELDS)
    generator = torch.Generator().manual_seed(seed)
    if level == "token":
        advantages = torch.randn(batch.num_tokens, generator=generator)
    else:
        advantages = torch.randn(len(batch), generator=generator)[batch.sequence_ids.long()]
    return dataclasses.replace(batch, advantages=torch.where(batch.loss_mask, advantages, 0.0))


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
    """Return that many random rows of a field; experts of a token are distinct."""
    if field.ragged:
        made = [rng.permutation(16)[: rng.integers(1, 5)] for _ in range(count)]
        shape = (-1, *[1] * len(field.shape))
        return [np.broadcast_to(r.reshape(shape), (len(r), *field.shape)).tolist() for r in made]
    if field.dtype.is_floating_point:
        return -rng.random((count, *field.shape), np.float32)
    rows = rng.random((count, *field.shape[:-1], 16)).argsort(-1)[..., : field.shape[-1]]
    return torch.from_numpy(rows).to(field.dtype).numpy()


def sequences_of(batch, tensor):
    """Cut a tensor over the tokens into its sequences, without the padding of a micro-batch."""
    if isinstance(batch, PackedBatch):
        return list(tensor.split(batch.seqlens))
    starts = accumulate(batch.padded_seqlens, initial=0)
    return [
        tensor[start : start + length]
        for start, length in zip(starts, batch.num_kept, strict=False)
    ]


def rows_by_loop(batch):
    """Return prompt, response and the response's mask and log-probabilities of each sequence."""
    rows = []
    columns = (batch.input_ids, batch.loss_mask, batch.rollout_logprobs)
    for row in zip(*(sequences_of(batch, column) for column in columns), strict=True):
        ids, mask, logprobs = (values.tolist() for values in row)
        split = mask.index(True) if True in mask else len(ids)
        rows.append((ids[:split], ids[split:], mask[split:], logprobs[split:]))
    return rows


def padded(values, width, value, side="right"):
    """Return a list brought to ``width``."""
    filling = [value] * (width - len(values))
    return [*filling, *values] if side == "left" else [*values, *filling]


def told_of(trajectory):
    """Return prompt, completion, log-probabilities, reward and truncation of each turn."""
    return [
        (
            [*turn.prompt_ids],
            [*turn.completion_ids],
            [*turn.completion_logprobs],
            turn.reward,
            turn.truncated,
        )
        for turn in trajectory.turns
    ]


def packed_logprobs(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """Return the log-probability of each token, in one pass over the packed batch."""
    logits = model(**batch.model_inputs()).logits[0].float().log_softmax(-1)
    following = logits[:-1].gather(1, batch.input_ids[1:, None])[:, 0]
    return torch.cat([following.new_zeros(1), following])


def clipped_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Return the mean over the mask of a policy loss clipped at 0.8 and 1.2."""
    ratio = (logprobs - old).exp()
    gains = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -(gains * mask).sum() / mask.sum()
