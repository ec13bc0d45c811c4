"""Check of the trajectories that an agent returns, so that no batch fails for one episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trajpack.packing.buffer.chains import ValidatedTurns, checked_labels, placed, take_numbers
from trajpack.packing.conversion import as_ids, as_logprobs
from trajpack.packing.types import Trajectory, Turn

_FEW_NUMBERS = 50_000
"""Numbers in lists that take a few milliseconds; more are checked in a thread."""
_FEW_ENTRIES = 2_000_000
"""The same, for arrays."""
_FEW_TURNS = 200
"""The same, for turns, however short."""


async def check_trajectories(given: Any) -> None:
    """Check that a `TrajectoryBuffer` would take what an agent returned.

    Extra fields of turns are not looked at: which ones there must be is the buffer's to say.

    Raises:
        TypeError: If it is no list of trajectories, or a value in it is of the wrong kind.
        ValueError: If a value in it is out of range, or lengths disagree.

    Cost: reads every number once. The event loop waits for a few milliseconds at most; what
        would take longer is checked in a thread.
    """
    if not isinstance(given, list | tuple):
        raise TypeError(f"the agent must return a list of trajectories, got {type(given).__name__}")
    if _is_much(given):
        from anyio.to_thread import run_sync

        await run_sync(_check, given)
    else:
        _check(given)


def _is_much(trajectories: Sequence[Any]) -> bool:
    num_turns = num_listed = num_entries = 0
    for trajectory in trajectories:
        for turn in trajectory.turns if isinstance(trajectory, Trajectory) else ():
            if not isinstance(turn, Turn):
                continue
            num_turns += 1
            for values in (turn.prompt_ids, turn.completion_ids, turn.completion_logprobs):
                size = len(values) if hasattr(values, "__len__") else 0
                num_entries += size
                num_listed += 0 if isinstance(values, np.ndarray) else size
    return num_turns > _FEW_TURNS or num_listed > _FEW_NUMBERS or num_entries > _FEW_ENTRIES


def _check(trajectories: Sequence[Any]) -> None:
    for trajectory in trajectories:
        index = -1
        try:
            checked_labels(trajectory)
            for index, turn in enumerate(trajectory.turns):  # noqa: B007 - for the error
                _check_turn(turn)
            if index < 0:
                raise ValueError("must have at least one turn, got none")
        except (TypeError, ValueError) as error:
            raise placed(error, trajectory, index) from error.__cause__


def _check_turn(turn: Any) -> None:
    if not isinstance(turn, Turn):
        raise TypeError(f"expected a Turn, got {type(turn).__name__}")
    num_prompt = as_ids("prompt_ids", turn.prompt_ids).size
    num_completion = as_ids("completion_ids", turn.completion_ids).size
    num_logprobs = as_logprobs("completion_logprobs", turn.completion_logprobs).size
    if not num_prompt:
        raise ValueError("prompt_ids must not be empty")
    if num_logprobs != num_completion:
        raise ValueError(
            f"completion_logprobs must have one entry per completion token, got {num_logprobs} "
            f"for {num_completion} token(s)"
        )
    take_numbers(ValidatedTurns(()), turn, num_prompt, num_completion)
