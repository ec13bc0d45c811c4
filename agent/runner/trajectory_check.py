"""Check of completions and of the trajectories that an agent returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.packing.buffer.chains import ValidatedTurns, checked_labels, located, take_numbers
from trajpack.packing.conversion import as_ids, as_logprobs
from trajpack.packing.types import Trajectory, Turn

_FEW_NUMBERS = 50_000
"""Numbers in lists that take a few milliseconds; more are checked in a thread."""
_FEW_ENTRIES = 2_000_000
"""The same, for arrays."""
_FEW_TURNS = 200
"""The same, for turns, however short."""


def checked_completion(
    name: str, ids: Any, logprobs: Any
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Return tokens and log-probabilities of a completion as arrays; errors name ``{name}_ids``.

    Raises:
        TypeError: If they are not numbers.
        ValueError: If a number is out of range, or their counts differ.
    """
    ids = as_ids(f"{name}_ids", ids)
    logprobs = as_logprobs(f"{name}_logprobs", logprobs)
    if logprobs.size != ids.size:
        raise ValueError(
            f"{name}_logprobs must have one entry per completion token, got {logprobs.size} "
            f"for {ids.size} token(s)"
        )
    return ids, logprobs


async def check_trajectories(given: Any) -> None:
    """Check that a `TrajectoryBuffer` would take the trajectories, so that no batch fails later.

    Extra fields of turns are not looked at: which ones there must be is the buffer's to say.

    Raises:
        TypeError: If it is no list of trajectories, or a value in it is of the wrong kind.
        ValueError: If a value in it is out of range, or lengths disagree.
    """
    if not isinstance(given, list | tuple):
        raise TypeError(f"the agent must return a list of trajectories, got {type(given).__name__}")
    turns = [turn for one in given if isinstance(one, Trajectory) for turn in one.turns]
    num_listed = num_entries = 0
    for turn in turns:
        for name in ("prompt_ids", "completion_ids", "completion_logprobs"):
            values = getattr(turn, name, ())
            size = len(values) if hasattr(values, "__len__") else 0
            num_entries += size
            num_listed += 0 if isinstance(values, np.ndarray) else size
    if len(turns) > _FEW_TURNS or num_listed > _FEW_NUMBERS or num_entries > _FEW_ENTRIES:
        from anyio.to_thread import run_sync

        await run_sync(_check, given)
    else:
        _check(given)


def _check(trajectories: list[Any] | tuple[Any, ...]) -> None:
    for trajectory in trajectories:
        index = -1
        try:
            checked_labels(trajectory)
            for index, turn in enumerate(trajectory.turns):  # noqa: B007 - for the error
                if not isinstance(turn, Turn):
                    raise TypeError(f"expected a Turn, got {type(turn).__name__}")
                num_prompt = as_ids("prompt_ids", turn.prompt_ids).size
                ids, _ = checked_completion(
                    "completion", turn.completion_ids, turn.completion_logprobs
                )
                if not num_prompt:
                    raise ValueError("prompt_ids must not be empty")
                take_numbers(ValidatedTurns(()), turn, num_prompt, ids.size)
        except (TypeError, ValueError) as error:
            raise located(error, trajectory, index) from error.__cause__
