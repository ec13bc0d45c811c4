"""Checks of what an engine and an agent return."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.agent.errors import EpisodeError, MalformedResponseError, reason_of
from trajpack.agent.protocols import GenerationOutput
from trajpack.packing.buffer.trajectory_arrays import TrajectoryArrays
from trajpack.packing.conversion import as_ids
from trajpack.packing.types import Trajectory, Turn

_FEW = 256
"""Turns that are checked within milliseconds; more are in a thread."""


def checked_prompt(qid: str, token_ids: Any) -> npt.NDArray[np.int32]:
    """Return the token ids of a request as an array, or raise an `EpisodeError`."""
    try:
        prompt_ids = as_ids("token_ids", token_ids)
    except Exception as error:
        raise EpisodeError(qid, f"the prompt was refused: {reason_of(error)}") from error
    if not prompt_ids.size:
        raise EpisodeError(qid, "the prompt has no tokens")
    return prompt_ids


def turn_of(qid: str, prompt_ids: npt.NDArray[np.int32], reply: Any) -> Turn:
    """Return the reply to the request of ``prompt_ids`` as a turn with reward 0.

    Raises:
        MalformedResponseError: If it is no `GenerationOutput`, does not answer the request of
            episode ``qid``, or holds values that cannot be trained.
    """
    try:
        if not isinstance(reply, GenerationOutput):
            raise TypeError(f"expected a GenerationOutput, got {type(reply).__name__}")
        if not isinstance(reply.qid, str) or reply.qid != qid:
            raise ValueError(f"the reply answers episode {reply.qid!r}")
        seen = as_ids("prompt_ids", reply.prompt_ids)
        if not np.array_equal(seen, prompt_ids):
            raise ValueError(
                f"the reply answers another prompt: expected the {prompt_ids.size} tokens that "
                f"were sent, got {seen.size}"
            )
        turn = Turn(
            prompt_ids=prompt_ids,
            completion_ids=reply.output_ids,
            completion_logprobs=reply.output_logprobs,
            truncated=reply.no_eos,
            version_start=reply.version_start,
            version_end=reply.version_end,
            version_spans=reply.version_spans,
            stop_reason=reply.stop_reason,
        )
        (checked,) = TrajectoryArrays.of([Trajectory(qid, [turn])]).trajectories()
    except Exception as error:
        reason = f"the reply was refused: {reason_of(error)}"
        raise MalformedResponseError(qid, reason) from error
    (turn,) = checked.turns
    return turn if reply.fields is None else replace(turn, fields=reply.fields)


async def checked_trajectories(trajectories: Any) -> Sequence[Trajectory]:
    """Return what an agent returned, if a `TrajectoryBuffer` would take it.

    Extra fields of turns are not looked at: which ones there must be is the buffer's to say.
    """
    if not isinstance(trajectories, list | tuple):
        kind = type(trajectories).__name__
        raise TypeError(f"the agent must return a list of trajectories, got {kind}")
    if sum(len(getattr(entry, "turns", ())) for entry in trajectories) > _FEW:
        await asyncio.to_thread(TrajectoryArrays.of, trajectories)
    else:
        TrajectoryArrays.of(trajectories)
    return trajectories
