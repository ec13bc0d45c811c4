"""`take`: checks trajectories and stores them, in C where that is built and the call is plain."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.packing.batch.breaks import is_retokenized
from trajpack.packing.buffer.chains import Signs, take_reference, version_rows
from trajpack.packing.buffer.staging import Staging
from trajpack.packing.buffer.stored import Count, Stored
from trajpack.packing.conversion import INT32_MAX, as_ids, as_logprobs
from trajpack.packing.token_fields import TokenField
from trajpack.packing.turn_fields import STOP_REASONS
from trajpack.packing.types import Trajectory, Turn

CHOICE = os.environ.get("TRAJPACK_TAKE", "")
"""``"c"``, ``"python"``, or nothing: C where it is built."""
NOTHING = Signs()


def take(
    stored: Stored,
    staging: Staging,
    trajectories: tuple[Trajectory, ...],
    fields: tuple[TokenField, ...] = (),
    capacity: int | None = None,
) -> Signs:
    """Do what `take_reference` does, in C if it can.

    C takes a call without declared fields whose values are plain: ids and log-probabilities in
    lists or in arrays and tensors of any kind, Python's numbers and bools. Other calls, and those
    with an error, are the reference's.
    """
    if _in_c is not None and not fields:
        room = INT32_MAX if capacity is None else capacity - stored.counts[Count.TOKENS]
        taken = _in_c(stored, staging, trajectories, room)
        if taken is True:
            return NOTHING
        if taken is not None:
            largest, breaks = taken
            return Signs(largest, _have_retokenized(trajectories, breaks))
    return take_reference(stored, staging, trajectories, fields, capacity)


def is_compiled() -> bool:
    """Return whether `take` runs in C."""
    return _in_c is not None


def _have_retokenized(
    trajectories: Sequence[Trajectory], breaks: Sequence[tuple[int, int, int]]
) -> bool:
    """Return whether a break looks like re-tokenized text: of a trajectory, its history, a turn."""
    for trajectory, history, broken in breaks:
        turns = trajectories[trajectory].turns
        earlier, later = turns[history], turns[broken]
        given = earlier.prompt_ids, earlier.completion_ids, later.prompt_ids
        if is_retokenized(*(as_ids("ids", ids).tobytes() for ids in given)):
            return True
    return False


def _contiguous_ids(values: Any) -> npt.NDArray[np.int32]:
    return np.ascontiguousarray(as_ids("ids", values))


def _contiguous_logprobs(values: Any) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(as_logprobs("logprobs", values))


def _load() -> Any:
    """Return the compiled function, or ``None``; raise if it was asked for and is not there."""
    if CHOICE not in ("", "c", "python"):
        raise ValueError(f"TRAJPACK_TAKE must be 'c' or 'python', got {CHOICE!r}")
    if CHOICE == "python":
        return None
    try:
        from trajpack.packing.buffer import take_c  # type: ignore[attr-defined]
    except ImportError as error:
        if CHOICE == "c":
            raise ImportError(
                "TRAJPACK_TAKE=c, but trajpack.packing.buffer.take_c is not built: install trajpack"
                " where a C compiler is, or leave the variable out"
            ) from error
        return None
    return bound(take_c)


def bound(module: Any) -> Any:
    """Return the function of a compiled module, which from now on knows what it refers to."""
    converters = _contiguous_ids, _contiguous_logprobs, version_rows
    module.bind((Trajectory, Turn, np.ndarray, *converters, STOP_REASONS))
    return module.take


_in_c = _load()
