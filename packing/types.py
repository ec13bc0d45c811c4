"""`Turn` and `Trajectory`: the input of a pack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.conversion import several
from trajpack.packing.equality import same_turns
from trajpack.packing.representation import brief_repr

IntArray: TypeAlias = Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor
FloatArray: TypeAlias = Sequence[float] | npt.NDArray[np.floating[Any]] | torch.Tensor


class VersionSpan(NamedTuple):
    """Completion tokens ``[start, end)`` that one version of the policy sampled.

    Attributes:
        version: Number of weight updates before these tokens were sampled.
        start: Index of the first token in the completion.
        end: Index behind the last one.
    """

    version: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Turn:
    """One exchange: the prompt the engine saw and the completion it sampled.

    Arrays may be numpy arrays, torch tensors (CPU or CUDA) or plain sequences. A turn keeps the
    given arrays; `TrajectoryBuffer.add` converts and checks them once. Two turns are equal if
    their values are equal, whatever their containers: ids compare as integers, log-probabilities
    as float32, version spans as versions per token, rows of extra fields in the narrower of their
    two dtypes. A turn with values that are no numbers equals itself alone.

    Attributes:
        prompt_ids: Token ids of everything the engine saw: the whole conversation so far.
        completion_ids: Token ids it sampled, stop token included. May be empty.
        completion_logprobs: Natural log-probability of each completion token under the sampling
            policy.
        reward: Reward of this turn, not discounted.
        truncated: True when no end-of-sequence token was sampled.
        version_start: Policy version that sampled the first completion token.
        version_end: Policy version that sampled the last completion token.
        version_spans: ``(version, start, end)`` spans that cover the completion, where the engine
            reports them.
        fields: Rows of the fields that the buffer declares (`TokenField`), by name.

    Example:
        >>> Turn([1, 2], [3], [-0.5]) == Turn(np.array([1, 2]), torch.tensor([3]), (-0.5,))
        True
    """

    prompt_ids: IntArray
    completion_ids: IntArray
    completion_logprobs: FloatArray
    reward: float = 0.0
    truncated: bool = False
    version_start: int = 0
    version_end: int = 0
    version_spans: Sequence[VersionSpan | tuple[int, int, int]] | None = None
    fields: Mapping[str, Any] | None = None

    __repr__ = brief_repr

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Turn):
            return NotImplemented
        return self is other or same_turns(self, other)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Trajectory:
    """All turns of one agent in one episode, oldest first.

    Attributes:
        id: Name of the trajectory in errors and in the packed batch.
        turns: At least one turn.
        group: Name of the group: trajectories of one task, which estimators compare.
        turn_discount: Discount from one turn to the next; estimators have their own discounts of
            tokens.
        task_id: Kind of task, as the data set numbers it.
        birth_time_ms: Start of the episode, milliseconds since the epoch.
    """

    id: str
    turns: Sequence[Turn]
    group: str | None = None
    turn_discount: float = 1.0
    task_id: int | None = None
    birth_time_ms: int | None = None

    __repr__ = brief_repr

    def __post_init__(self) -> None:
        try:
            turns = several("turns must be a sequence of turns", self.turns)
        except (TypeError, ValueError) as error:
            raise type(error)(f"trajectory {self.id!r}: {error}") from error.__cause__
        object.__setattr__(self, "turns", turns)
