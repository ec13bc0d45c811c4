"""Packed trajectories as rows of TRL: a prompt, a completion, and which of it was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from trajpack.packing.buffer.buffer import pack
from trajpack.packing.types import Trajectory


class Row(NamedTuple):
    """One completion, as TRL wants it."""

    prompt_ids: list[int]
    """What stands before the first generated token."""
    completion_ids: list[int]
    """From there to the last generated token; what follows it would train nothing."""
    env_mask: list[int]
    """1 where the completion was generated, 0 on observations."""
    logprobs: list[float]
    """As sampled, 0 on observations."""
    episode_reward: float | None = None
    """Of the episode; TRL leaves a row without one out of its group's mean."""


def masked_row(prompt_ids: Sequence[int], eos_token_id: int) -> Row:
    """Return a row that trains nothing: TRL refuses an empty completion, but not a masked one.

    Example:
        >>> masked_row([5, 6], 2)[1:]
        ([2], [0], [0.0], None)
    """
    return Row([int(id) for id in prompt_ids], [eos_token_id], [0], [0.0])


def rows_of_episodes(episodes: Sequence[Sequence[Trajectory]]) -> list[list[Row]]:
    """Pack the trajectories of all episodes and return each episode's rows.

    A row is a sequence of the merged layout: a conversation in which each turn continues the
    one before. A sequence in which nothing was generated gives no row.

    Raises:
        TypeError, ValueError: As `trajpack.pack`.

    Cost: one pack on the host; then every token becomes an object of Python, as TRL wants it.

    Example:
        >>> from trajpack import Trajectory, Turn
        >>> first, second = Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 4], [5], [-0.25])
        >>> rows_of_episodes([[Trajectory("a", [first, second])], []])[0][0][:4]
        ([1, 2], [3, 4, 5], [1, 0, 1], [-0.5, 0.0, -0.25])
    """
    batch = pack(map(_plain, chain.from_iterable(episodes)), device="cpu")
    ids, mask = batch.input_ids.numpy(), batch.loss_mask.numpy()
    logprobs = batch.rollout_logprobs.numpy()
    owners = np.repeat(np.arange(len(episodes)), [_num_turns(paths) for paths in episodes])
    episode = np.zeros(len(batch), np.int64)
    episode[batch.turn_sequence.numpy()] = owners
    rows: list[list[Row]] = [[] for _ in episodes]
    bounds = pairwise(accumulate(batch.seqlens, initial=0))
    for owner, (begin, end) in zip(episode, bounds, strict=True):
        generated = np.flatnonzero(mask[begin:end])
        if generated.size:
            of = slice(begin + generated[0], begin + generated[-1] + 1)
            given: Any = ids[begin : of.start], ids[of], mask[of].astype(int), logprobs[of]
            rows[owner].append(Row(*(values.tolist() for values in given)))
    return rows


def _num_turns(trajectories: Sequence[Trajectory]) -> int:
    return sum(len(trajectory.turns) for trajectory in trajectories)


def _plain(trajectory: Trajectory) -> Trajectory:
    """Drop the extra fields, which TRL has no room for."""
    if not any(turn.fields for turn in trajectory.turns):
        return trajectory
    return replace(trajectory, turns=[replace(turn, fields=None) for turn in trajectory.turns])
