"""Trajectories as a few flat arrays, which Ray's object store hands over without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.conversion import as_ids, as_logprobs, host_tensor
from trajpack.packing.types import Trajectory, Turn, VersionSpan

_COLUMNS = 7
"""Columns of the table of turns: first token of its stream, prompt tokens, completion tokens,
truncation, first and last version, and number of version spans (-1 for ``None``)."""


@dataclass(frozen=True)
class TrajectoryArrays:
    """Trajectories in a form that is cheap to send: one array of each kind, whatever their number.

    A conversation is stored once: as long as a prompt begins with all that came before it, it
    is a view of the same stream of tokens. Where a prompt begins otherwise, a new stream does.

    Arrays that come out of an object store are read-only memory shared by all processes of a
    node; what `trajectories` returns are views of them.
    """

    tokens: npt.NDArray[np.int32]
    """``[tokens]``: all streams, one after another."""
    logprobs: npt.NDArray[np.float32]
    """``[completion tokens]``, turn after turn."""
    turns: npt.NDArray[np.int64]
    """``[turns, 7]``: where and how long its prompt and completion are, and its versions."""
    rewards: npt.NDArray[np.float64]
    """``[turns]``."""
    spans: npt.NDArray[np.int64]
    """``[spans, 3]``: version spans of the turns that have them."""
    heads: tuple[tuple[Any, ...], ...]
    """Labels and number of turns of each trajectory."""
    fields: Mapping[int, Mapping[str, tuple[str, Any]]] = field(default_factory=dict)
    """Rows of fields of a caller's own, by turn and name: their dtype, and an array."""

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> TrajectoryArrays:
        """Flatten trajectories.

        Raises:
            TypeError, ValueError: If ids are no token ids, or log-probabilities no finite
                numbers; the message names the trajectory and the turn.

        Cost: copies each new token, converts what is no array, and compares each prompt with
        what came before it.
        """
        return _Writer().write(trajectories)

    def trajectories(self) -> list[Trajectory]:
        """Return the trajectories; their arrays are views.

        Example:
            >>> path = Trajectory("a", [Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 4], [5], [-1.0])])
            >>> sent = TrajectoryArrays.of([path])
            >>> sent.tokens.tolist(), sent.trajectories() == [path]
            ([1, 2, 3, 4, 5], True)
        """
        turns = self._turns()
        return [
            Trajectory(
                id=name,
                turns=[next(turns) for _ in range(count)],
                group=group,
                turn_discount=discount,
                task_id=task_id,
                birth_time_ms=birth_time_ms,
            )
            for name, group, discount, task_id, birth_time_ms, count in self.heads
        ]

    def copied(self) -> TrajectoryArrays:
        """Return the same in memory of this process, so that an object store can let go of it.

        Cost: copies 8 bytes a token.
        """
        return TrajectoryArrays(
            tokens=self.tokens.copy(),
            logprobs=self.logprobs.copy(),
            turns=self.turns.copy(),
            rewards=self.rewards.copy(),
            spans=self.spans.copy(),
            heads=self.heads,
            fields={
                turn: {name: (dtype, array.copy()) for name, (dtype, array) in rows.items()}
                for turn, rows in self.fields.items()
            },
        )

    @property
    def num_trajectories(self) -> int:
        """How many there are."""
        return len(self.heads)

    @property
    def num_bytes(self) -> int:
        """Bytes of the flat arrays, without extra fields."""
        arrays = (self.tokens, self.logprobs, self.turns, self.rewards, self.spans)
        return sum(array.nbytes for array in arrays)

    def _turns(self) -> Iterator[Turn]:
        at_logprob = at_span = 0
        rewards = self.rewards.tolist()
        for index, row in enumerate(self.turns.tolist()):
            begin, num_prompt, num_completion, truncated, first, last, num_spans = row
            middle, end = begin + num_prompt, begin + num_prompt + num_completion
            spans = None
            if num_spans >= 0:
                told = self.spans[at_span : at_span + num_spans].tolist()
                spans, at_span = [VersionSpan(*span) for span in told], at_span + num_spans
            yield Turn(
                prompt_ids=self.tokens[begin:middle],
                completion_ids=self.tokens[middle:end],
                completion_logprobs=self.logprobs[at_logprob : at_logprob + num_completion],
                reward=rewards[index],
                truncated=bool(truncated),
                version_start=first,
                version_end=last,
                version_spans=spans,
                fields=self._fields(index),
            )
            at_logprob += num_completion

    def _fields(self, turn: int) -> dict[str, torch.Tensor] | None:
        given = self.fields.get(turn)
        if given is None:
            return None
        return {name: as_tensor(*stored) for name, stored in given.items()}


_Stream: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
"""The prompt and the completion of its last turn, which a next prompt may begin with."""


class _Writer:
    """The arrays while they grow."""

    def __init__(self) -> None:
        self.pieces: list[npt.NDArray[np.int32]] = []
        self.num_tokens = 0
        self.logprobs: list[npt.NDArray[np.float32]] = []
        self.turns: list[tuple[int, ...]] = []
        self.rewards: list[float] = []
        self.spans: list[tuple[int, int, int]] = []
        self.fields: dict[int, dict[str, tuple[str, Any]]] = {}

    def write(self, trajectories: Sequence[Trajectory]) -> TrajectoryArrays:
        heads = []
        for path in trajectories:
            stream, begin = (_no_ids(), _no_ids()), self.num_tokens
            for number, turn in enumerate(path.turns):
                name = f"trajectory {path.id!r}, turn {number}: "
                stream, begin = self._add(name, turn, stream, begin)
            heads.append(
                (path.id, path.group, path.turn_discount, path.task_id, path.birth_time_ms,
                 len(path.turns))
            )  # fmt: skip
        return TrajectoryArrays(
            tokens=np.concatenate(self.pieces, dtype=np.int32) if self.pieces else _no_ids(),
            logprobs=np.concatenate([np.empty(0, np.float32), *self.logprobs], dtype=np.float32),
            turns=np.asarray(self.turns, np.int64).reshape(-1, _COLUMNS),
            rewards=np.asarray(self.rewards, np.float64),
            spans=np.asarray(self.spans, np.int64).reshape(-1, 3),
            heads=tuple(heads),
            fields=self.fields,
        )

    def _add(self, name: str, turn: Turn, stream: _Stream, begin: int) -> tuple[_Stream, int]:
        """Store what is new of a turn; return the stream that a next turn may go on with."""
        prompt = as_ids(f"{name}prompt_ids", turn.prompt_ids)
        completion = as_ids(f"{name}completion_ids", turn.completion_ids)
        logprobs = as_logprobs(f"{name}completion_logprobs", turn.completion_logprobs)
        if len(logprobs) != len(completion):
            raise ValueError(
                f"{name}expected {len(completion)} completion_logprobs, got {len(logprobs)}"
            )
        middle, known = len(stream[0]), len(stream[0]) + len(stream[1])
        goes_on = np.array_equal(prompt[:middle], stream[0])
        if not known or not goes_on or not np.array_equal(prompt[middle:known], stream[1]):
            begin, known = self.num_tokens, 0
        self.pieces += [prompt[known:], completion]
        self.num_tokens += len(prompt) - known + len(completion)
        self.logprobs.append(logprobs)
        self.rewards.append(float(turn.reward))
        num_spans = -1 if turn.version_spans is None else len(turn.version_spans)
        self.spans += [(int(v), int(s), int(e)) for v, s, e in turn.version_spans or ()]
        versions = int(turn.version_start), int(turn.version_end)
        lengths = begin, len(prompt), len(completion)
        if turn.fields is not None:
            self.fields[len(self.turns)] = {k: as_array(rows) for k, rows in turn.fields.items()}
        self.turns.append((*lengths, int(turn.truncated), *versions, num_spans))
        return (prompt, completion), begin


def _no_ids() -> npt.NDArray[np.int32]:
    return np.empty(0, np.int32)


def as_array(values: Any) -> tuple[str, npt.NDArray[Any]]:
    """Return an array of any kind as a numpy array of its bytes' width, and its dtype's name.

    Numpy has no bfloat16 or float8; such a tensor travels as integers of that size.

    Example:
        >>> as_array(torch.ones(2, dtype=torch.bfloat16))
        ('bfloat16', array([16256, 16256], dtype=int16))
    """
    tensor = host_tensor(values).contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    try:
        return name, tensor.numpy()
    except TypeError:
        width = {1: torch.uint8, 2: torch.int16}[tensor.dtype.itemsize]
        return name, tensor.view(width).numpy()


def as_tensor(dtype: str, array: npt.NDArray[Any]) -> torch.Tensor:
    """Return what `as_array` took apart; it shares the array's memory where that is writable.

    Example:
        >>> as_tensor(*as_array(torch.ones(2, dtype=torch.bfloat16)))
        tensor([1., 1.], dtype=torch.bfloat16)
    """
    return host_tensor(array).view(getattr(torch, dtype))
