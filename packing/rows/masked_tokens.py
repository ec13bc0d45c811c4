"""Trajectories from the form other systems give them: tokens, and a mask of those generated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.packing.conversion import FLOAT32_MAX, as_ids, as_number, host_array
from trajpack.packing.types import FloatArray, IntArray, Trajectory, Turn, VersionSpan

WHOLE_SEQUENCE_FIELDS = frozenset({"routed_experts", "teacher_ids", "teacher_logprobs"})
"""Extra fields that trainers have for prompts too: a `TokenField` of these names is declared with
``generated_only=False``, and a turn brings rows for its prompt and its completion."""


@dataclass(frozen=True, eq=False)
class MaskedTokens:
    """A conversation as a stretch of tokens, of which a mask says what was generated.

    A run of generated tokens is a turn; its prompt is all that stands before it. Turns that
    followed each other without a token between them are one, unless `turn_ids` tells them apart
    or `versions` run backwards; a turn that generated nothing leaves no trace, and tokens behind
    the last generated one are in no turn. Where nothing was generated at all, it is one turn with
    an empty completion.

    Example:
        >>> masked = MaskedTokens([1, 2, 3, 4], [0, 1, 0, 1], [0.0, -0.5, 0.0, -0.1], reward=1.0)
        >>> [turn.completion_ids.tolist() for turn in masked.trajectory("a").turns]
        [[2], [4]]
    """

    input_ids: IntArray
    """Tokens of the conversation."""
    mask: IntArray
    """1 where the token was generated, else 0; as many."""
    logprobs: FloatArray
    """Log-probability of each token, as many; what stands at tokens that were not generated,
    NaN too, is not looked at."""
    versions: IntArray | None = None
    """Version of the policy that sampled each token, as many. Looked at where a token was
    generated alone."""
    version_range: tuple[int, int] = (0, 0)
    """Without `versions`, the first and the last of the whole: every turn gets both."""
    turn_ids: IntArray | None = None
    """Tells turns apart that follow each other without a token between; as many as tokens."""
    reward: float = 0.0
    """Reward of the whole; the last turn gets it."""
    token_rewards: FloatArray | None = None
    """Rewards at tokens, as many: a turn gets those up to its last token since the one of the
    turn before, the last turn also those behind."""
    truncated: bool = False
    """Whether the last turn was cut off."""
    fields: Mapping[str, npt.NDArray[Any]] | None = None
    """Rows of extra fields, one for each token, which the turns take over: those of their
    completion, or of their prompt and completion where `WHOLE_SEQUENCE_FIELDS` has the name."""

    @classmethod
    def of_response(
        cls,
        prompt_ids: IntArray,
        response_ids: IntArray,
        mask: IntArray,
        logprobs: FloatArray,
        token_rewards: FloatArray | None = None,
        *,
        name: str | None = None,
        fields: Mapping[str, npt.NDArray[Any]] | None = None,
        **rest: Any,
    ) -> MaskedTokens:
        """Put a prompt before a response that has a mask, log-probabilities and so on alone.

        Errors begin with ``name``, that of the trajectory to be, if it is known. Rows of
        ``fields`` are those of the response, or of all tokens in `WHOLE_SEQUENCE_FIELDS`.

        Raises:
            TypeError: If ids are no integers, or the rest no numbers.
            ValueError: If one of them has not one dimension.
        """
        of = "" if name is None else f"trajectory {name!r}: "
        prompt = as_ids(f"{of}prompt_ids", prompt_ids)
        response = as_ids(f"{of}response_ids", response_ids)
        before = np.zeros(len(prompt), np.float32)

        def joined(field: str, values: Any, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
            array = _numbers(f"{of}{field}", values, dtype)
            if array.ndim != 1:
                raise ValueError(f"{of}{field} must have one dimension, got {list(array.shape)}")
            return np.concatenate([before, array])

        def with_prompt(field: str, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
            if field in WHOLE_SEQUENCE_FIELDS:
                return rows
            return np.concatenate([np.zeros((len(prompt), *rows.shape[1:]), rows.dtype), rows])

        rewards = token_rewards
        return cls(
            np.concatenate([prompt, response]),
            joined("mask", mask),
            joined("logprobs", logprobs, np.float32),
            token_rewards=None if rewards is None else joined("rewards", rewards, np.float64),
            fields=fields and {field: with_prompt(field, rows) for field, rows in fields.items()},
            **rest,
        )

    def with_turn_versions(self, versions: Sequence[int]) -> MaskedTokens:
        """Return the same with a version for each turn, if there are as many as turns.

        Otherwise every turn gets the first and the last of them as `version_range`.
        """
        if not len(versions):
            return self
        mask = host_array(self.mask) != 0
        begins = mask & ~np.concatenate([[False], mask[:-1]])
        if int(begins.sum()) != len(versions):
            return replace(self, version_range=(versions[0], versions[-1]))
        of = np.array([0, *versions])[begins.cumsum()]
        return replace(self, versions=of)

    def trajectory(self, name: str, **labels: Any) -> Trajectory:
        """Return it as a trajectory.

        Args:
            name: Its id; errors name it.
            labels: Further arguments of `Trajectory`: ``group``, ``task_id`` and so on.

        Raises:
            TypeError: If arrays hold no numbers, or the reward is none.
            ValueError: If a reward is not finite as float32, arrays are not of one length,
                the mask is neither 0 nor 1 somewhere, or the first token was
                generated: a turn needs a prompt; if a field has not a row for each token.
        """
        ids = as_ids(f"trajectory {name!r}: input_ids", self.input_ids)
        if not ids.size:
            raise ValueError(f"trajectory {name!r}: there must be tokens, got none")
        generated = self._generated(name, len(ids))
        versions = None if self.versions is None else self._array(name, "versions", len(ids))
        spans = _spans(generated, self._array(name, "turn_ids", len(ids)), versions)
        if spans[0][0] == 0:
            raise ValueError(f"trajectory {name!r}: the first token must not be a generated one")
        for field, rows in (self.fields or {}).items():
            if len(rows) != len(ids):
                raise ValueError(
                    f"trajectory {name!r}: {field} must have {len(ids)} rows, one for each token, "
                    f"got {len(rows)}"
                )
        logprobs = self._array(name, "logprobs", len(ids), np.float32)
        rewards = self._rewards(name, [end for _, end in spans], len(ids))
        turns = [
            Turn(
                prompt_ids=ids[:begin],
                completion_ids=ids[begin:end],
                completion_logprobs=logprobs[begin:end],
                reward=reward,
                truncated=self.truncated and end == spans[-1][1],
                fields=self._field_rows(begin, end),
                **self._versions(versions, begin, end),
            )
            for (begin, end), reward in zip(spans, rewards, strict=True)
        ]
        return Trajectory(name, turns, **labels)

    def _generated(self, name: str, length: int) -> npt.NDArray[np.bool_]:
        mask = self._array(name, "mask", length)
        generated = mask == 1
        odd = np.flatnonzero(~(generated | (mask == 0)))
        if odd.size:
            raise ValueError(
                f"trajectory {name!r}: mask must be 0 or 1, got {mask[odd[0]]} at index {odd[0]}"
            )
        return np.asarray(generated, np.bool_)

    def _array(
        self, name: str, field: str, length: int, dtype: npt.DTypeLike | None = None
    ) -> npt.NDArray[Any]:
        """Return a field on the host, zeros where it is ``None``."""
        values = getattr(self, field)
        if values is None:
            return np.zeros(length, np.int32)
        array = _numbers(f"trajectory {name!r}: {field}", values, dtype)
        if array.shape != (length,):
            raise ValueError(
                f"trajectory {name!r}: {field} must have shape {[length]} as input_ids have, "
                f"got {list(array.shape)}"
            )
        return array

    def _rewards(self, name: str, ends: Sequence[int], length: int) -> list[float]:
        rewards = [0.0] * len(ends)
        if self.token_rewards is not None:
            given = self._array(name, "token_rewards", length, np.float64)
            odd = np.flatnonzero(~(np.abs(given) <= FLOAT32_MAX))
            if odd.size:
                raise ValueError(
                    f"trajectory {name!r}: token_rewards must be finite float32, "
                    f"got {given[odd[0]]} at index {odd[0]}"
                )
            rewards = np.add.reduceat(given, [0, *ends[:-1]]).tolist()
        rewards[-1] += as_number(f"trajectory {name!r}: reward", self.reward)
        return [as_number(f"trajectory {name!r}: reward", reward) for reward in rewards]

    def _field_rows(self, begin: int, end: int) -> dict[str, npt.NDArray[Any]] | None:
        """Return what `Turn` has of the fields, for a completion from ``begin`` to ``end``."""
        if not self.fields:
            return None
        return {
            field: rows[:end] if field in WHOLE_SEQUENCE_FIELDS else rows[begin:end]
            for field, rows in self.fields.items()
        }

    def _versions(self, versions: npt.NDArray[Any] | None, begin: int, end: int) -> dict[str, Any]:
        """Return what `Turn` says of the versions of a completion's tokens."""
        if versions is None or begin == end:
            first, last = self.version_range
            return {"version_start": first, "version_end": last}
        of = versions[begin:end]
        found: dict[str, Any] = {"version_start": int(of[0]), "version_end": int(of[-1])}
        changes = np.flatnonzero(np.diff(of)) + 1
        if changes.size:
            bounds = pairwise([0, *changes.tolist(), len(of)])
            found["version_spans"] = [
                VersionSpan(int(of[start]), start, stop) for start, stop in bounds
            ]
        return found


def _numbers(name: str, values: Any, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
    try:
        return host_array(values, dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be numbers: {error}") from error


def _spans(
    generated: npt.NDArray[Any], turn_ids: npt.NDArray[Any], versions: npt.NDArray[Any] | None
) -> list[tuple[int, int]]:
    """Return where each turn's completion begins and ends."""
    parts = (np.diff(generated) != 0) | (np.diff(turn_ids) != 0)
    if versions is not None:
        parts |= versions[1:] < versions[:-1]  # np.diff of unsigned ones would not be negative
    bounds = [0, *(np.flatnonzero(parts) + 1).tolist(), len(generated)]
    spans = [(begin, end) for begin, end in pairwise(bounds) if generated[begin]]
    return spans or [(len(generated), len(generated))]
