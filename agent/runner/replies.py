"""Checks of what an engine and an agent return."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.agent.errors import EpisodeError, MalformedResponseError
from trajpack.agent.protocols import GenerationOutput
from trajpack.packing.buffer.trajectory_arrays import TrajectoryArrays
from trajpack.packing.conversion import as_ids, as_logprobs, as_version_runs, shown
from trajpack.packing.turn_fields import STOP_REASONS
from trajpack.packing.types import Trajectory, Turn

_FEW = 50_000
"""Numbers, or turns times 256, that are checked within milliseconds; more are in a thread."""


def checked_prompt(qid: str, token_ids: Any) -> npt.NDArray[np.int32]:
    """Return the token ids of a request as an array.

    Raises:
        EpisodeError: If they are none.
    """
    try:
        prompt_ids = as_ids("token_ids", token_ids)
    except Exception as error:
        raise EpisodeError(qid, f"the prompt was refused: {_text_of(error)}") from error
    if not prompt_ids.size:
        raise EpisodeError(qid, "the prompt has no tokens")
    return prompt_ids


def turn_of(qid: str, prompt_ids: npt.NDArray[np.int32], reply: Any) -> Turn:
    """Return the reply to the request of ``prompt_ids`` as a turn with reward 0.

    Args:
        qid: Name of the episode that asked.
        prompt_ids: Token ids that were sent.
        reply: What the engine returned.

    Raises:
        MalformedResponseError: If it is no `GenerationOutput`, does not answer the request, or
            holds values that cannot be trained.
    """
    try:
        if not isinstance(reply, GenerationOutput):
            raise TypeError(f"expected a GenerationOutput, got {type(reply).__name__}")
        if not isinstance(reply.qid, str) or reply.qid != qid:
            raise ValueError(f"the reply answers episode {reply.qid!r}")
        seen = as_ids("prompt_ids", reply.prompt_ids)
        ids = as_ids("output_ids", reply.output_ids)
        logprobs = as_logprobs("output_logprobs", reply.output_logprobs)
        if logprobs.size != ids.size:
            raise ValueError(
                f"output_logprobs must have one entry per token, got {logprobs.size} for {ids.size}"
            )
        _, first, last = as_version_runs(
            "", reply.version_spans, reply.version_start, reply.version_end, ids.size
        )
        if not isinstance(reply.no_eos, bool | np.bool_):
            raise TypeError(f"no_eos must be a bool, got {type(reply.no_eos).__name__}")
        if reply.stop_reason not in STOP_REASONS:
            raise ValueError(
                f"stop_reason must be one of {STOP_REASONS}, got {shown(reply.stop_reason)}"
            )
        if not np.array_equal(seen, prompt_ids):
            raise ValueError(
                f"the reply answers another prompt: expected the {prompt_ids.size} tokens that "
                f"were sent, got {seen.size}"
            )
    except Exception as error:
        reason = f"the reply was refused: {_text_of(error)}"
        raise MalformedResponseError(qid, reason) from error
    return Turn(
        prompt_ids=prompt_ids,
        completion_ids=ids,
        completion_logprobs=logprobs,
        truncated=bool(reply.no_eos),
        version_start=first,
        version_end=last,
        version_spans=reply.version_spans,
        fields=reply.fields,
        stop_reason=reply.stop_reason,
    )


async def check_trajectories(given: Any) -> None:
    """Check that a `TrajectoryBuffer` would take what an agent returned.

    Extra fields of turns are not looked at: which ones there must be is the buffer's to say.

    Raises:
        TypeError: If it is no list of trajectories, or a value in it is of the wrong kind.
        ValueError: If a value in it is out of range, or lengths disagree.
    """
    if not isinstance(given, list | tuple):
        raise TypeError(f"the agent must return a list of trajectories, got {type(given).__name__}")
    size = 0
    for one in given:
        if not isinstance(one, Trajectory):
            raise TypeError(f"expected a Trajectory, got {type(one).__name__}")
        for index, turn in enumerate(one.turns):
            if not isinstance(turn, Turn):
                where = f"trajectory {shown(one.id)}, turn {index}"
                raise TypeError(f"{where}: expected a Turn, got {type(turn).__name__}")
            size += 256 + (len(turn.prompt_ids) if hasattr(turn.prompt_ids, "__len__") else 0)
    if size > _FEW:
        from anyio.to_thread import run_sync

        await run_sync(TrajectoryArrays.of, given)
    else:
        TrajectoryArrays.of(given)


def _text_of(error: Exception) -> str:
    return str(error) if isinstance(error, TypeError | ValueError) else repr(error)
