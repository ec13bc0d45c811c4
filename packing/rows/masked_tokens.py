"""Trajectories from conversations as other systems store them: tokens and a mask."""

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
"""Extra fields with a row for every token, prompts included. Their `TokenField` is declared with
``generated_only=False``."""


@dataclass(frozen=True, eq=False)
class MaskedTokens:
    """A conversation as tokens with a mask of the generated ones.

    Each run of generated tokens is a turn, with everything before it as prompt. Consecutive turns
    without a token between them are one turn, unless `turn_ids` differ or `versions` decrease.
    Turns that generated nothing and tokens after the last generated one are lost. If nothing was
    generated at all, it is one turn with an empty completion.

    Example:
        >>> masked = MaskedTokens([1, 2, 3, 4], [0, 1, 0, 1], [0.0, -0.5, 0.0, -0.1], reward=1.0)
        >>> [turn.completion_ids.tolist() for turn in masked.trajectory("a").turns]
        [[2], [4]]
    """

    input_ids: IntArray
    """Token ids, ``[tokens]``."""
    mask: IntArray
    """1 at generated tokens, else 0, ``[tokens]``."""
    logprobs: FloatArray
    """Log-probability of each token, ``[tokens]``; ignored where nothing was generated."""
    versions: IntArray | None = None
    """Policy version of each token, ``[tokens]``; ignored where nothing was generated."""
    version_range: tuple[int, int] = (0, 0)
    """First and last policy version of the row; used for every turn when `versions` is None."""
    turn_ids: IntArray | None = None
    """Number of each token's turn, ``[tokens]``; separates turns without a token between them."""
    reward: float = 0.0
    """Reward of the last turn, in addition to `token_rewards`."""
    token_rewards: FloatArray | None = None
    """Rewards at tokens, ``[tokens]``: a turn gets those up to its last token and after the turn
    before; the last turn also gets those behind it."""
    truncated: bool = False
    """Whether the last turn was truncated."""
    fields: Mapping[str, npt.NDArray[Any]] | None = None
    """Extra fields, ``[tokens, *]`` each. A turn keeps the rows of its completion, or of prompt
    and completion for `WHOLE_SEQUENCE_FIELDS`."""

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
        """Return the tokens of a prompt and a response whose other arrays are of the response.

        Args:
            prompt_ids: Token ids of the prompt.
            response_ids: Token ids of the response.
            mask: 1 at generated tokens of the response.
            logprobs: Log-probabilities of the response.
            token_rewards: Rewards at tokens of the response.
            name: Id of the trajectory, for errors.
            fields: Rows of the response, or of all tokens for `WHOLE_SEQUENCE_FIELDS`.
            rest: Further fields of the class.

        Raises:
            TypeError: If ids are not integers, or another array has no numbers.
            ValueError: If an array has not one dimension.
        """
        of = "" if name is None else f"trajectory {name!r}: "
        prompt = as_ids(f"{of}prompt_ids", prompt_ids)
        ids = np.concatenate([prompt, as_ids(f"{of}response_ids", response_ids)])

        def joined(field: str, values: Any, dtype: npt.DTypeLike | None = None) -> npt.NDArray[Any]:
            array = _numbers(f"{of}{field}", values, dtype)
            if array.ndim != 1:
                raise ValueError(f"{of}{field} must have one dimension, got {list(array.shape)}")
            return np.concatenate([np.zeros(len(prompt), np.float32), array])

        rows = dict(fields or {})
        for field in rows.keys() - WHOLE_SEQUENCE_FIELDS:
            before = np.zeros((len(prompt), *rows[field].shape[1:]), rows[field].dtype)
            rows[field] = np.concatenate([before, rows[field]])
        rewards = token_rewards
        return cls(
            ids,
            joined("mask", mask),
            joined("logprobs", logprobs, np.float32),
            token_rewards=None if rewards is None else joined("rewards", rewards, np.float64),
            fields=rows,
            **rest,
        )

    def with_turn_versions(self, versions: Sequence[int]) -> MaskedTokens:
        """Return a copy with one policy version per turn.

        If there are not as many versions as turns, the first and the last become `version_range`.
        """
        if not len(versions):
            return self
        mask = host_array(self.mask) != 0
        begins = mask & ~np.concatenate([[False], mask[:-1]])
        if int(begins.sum()) != len(versions):
            return replace(self, version_range=(versions[0], versions[-1]))
        return replace(self, versions=np.array([0, *versions])[begins.cumsum()])

    def trajectory(self, name: str, **labels: Any) -> Trajectory:
        """Return the trajectory.

        Args:
            name: Its id, which errors name.
            labels: Further arguments of `Trajectory`: ``group``, ``task_id`` and so on.

        Raises:
            TypeError: If an array has no numbers, or the reward is no number.
            ValueError: If there are no tokens, lengths differ, the mask has other values than 0
                and 1, the first token was generated, or a reward is not finite as float32.
        """
        whose = f"trajectory {name!r}:"
        ids = as_ids(f"{whose} input_ids", self.input_ids)
        if not ids.size:
            raise ValueError(f"{whose} there must be tokens, got none")
        mask = self._array(whose, "mask", ids)
        odd = np.flatnonzero((mask != 0) & (mask != 1))
        if odd.size:
            raise ValueError(f"{whose} mask must be 0 or 1, got {mask[odd[0]]} at index {odd[0]}")
        versions = None if self.versions is None else self._array(whose, "versions", ids)
        spans = _spans(mask == 1, self._array(whose, "turn_ids", ids), versions)
        if spans[0][0] == 0:
            raise ValueError(f"{whose} the first token must not be a generated one")
        fields = self.fields or {}
        for field, rows in fields.items():
            if len(rows) != len(ids):
                raise ValueError(
                    f"{whose} {field} must have {len(ids)} rows, one for each token, "
                    f"got {len(rows)}"
                )
        logprobs = self._array(whose, "logprobs", ids, np.float32)
        rewards = self._rewards(whose, [end for _, end in spans], ids)
        turns = []
        for (begin, end), reward in zip(spans, rewards, strict=True):
            rows_of_turn = {
                field: rows[0 if field in WHOLE_SEQUENCE_FIELDS else begin : end]
                for field, rows in fields.items()
            }
            turn = Turn(
                prompt_ids=ids[:begin],
                completion_ids=ids[begin:end],
                completion_logprobs=logprobs[begin:end],
                reward=reward,
                truncated=self.truncated and end == spans[-1][1],
                fields=rows_of_turn or None,
                **self._turn_versions(versions, begin, end),
            )
            turns.append(turn)
        return Trajectory(name, turns, **labels)

    def _array(
        self, whose: str, field: str, ids: IntArray, dtype: npt.DTypeLike | None = None
    ) -> npt.NDArray[Any]:
        """Return a field on the host, zeros if it is ``None``."""
        values = getattr(self, field)
        if values is None:
            return np.zeros(len(ids), np.int32)
        array = _numbers(f"{whose} {field}", values, dtype)
        if array.shape != (len(ids),):
            raise ValueError(
                f"{whose} {field} must have shape {[len(ids)]} as input_ids have, "
                f"got {list(array.shape)}"
            )
        return array

    def _rewards(self, whose: str, ends: Sequence[int], ids: IntArray) -> list[float]:
        """Return the reward of each turn; ``ends`` are the ends of their completions."""
        rewards = [0.0] * len(ends)
        if self.token_rewards is not None:
            given = self._array(whose, "token_rewards", ids, np.float64)
            odd = np.flatnonzero(~(np.abs(given) <= FLOAT32_MAX))
            if odd.size:
                raise ValueError(
                    f"{whose} token_rewards must be finite float32, "
                    f"got {given[odd[0]]} at index {odd[0]}"
                )
            rewards = np.add.reduceat(given, [0, *ends[:-1]]).tolist()
        rewards[-1] += as_number(f"{whose} reward", self.reward)
        return [as_number(f"{whose} reward", reward) for reward in rewards]

    def _turn_versions(
        self, versions: npt.NDArray[Any] | None, begin: int, end: int
    ) -> dict[str, Any]:
        """Return the arguments of `Turn` for the versions of a completion's tokens."""
        if versions is None or begin == end:
            first, last = self.version_range
            return {"version_start": first, "version_end": last}
        of = versions[begin:end]
        found: dict[str, Any] = {"version_start": int(of[0]), "version_end": int(of[-1])}
        changes = (np.flatnonzero(np.diff(of)) + 1).tolist()
        if changes:
            found["version_spans"] = [
                VersionSpan(int(of[start]), start, stop)
                for start, stop in pairwise([0, *changes, len(of)])
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
    """Return begin and end of each turn's completion."""
    parts = (np.diff(generated) != 0) | (np.diff(turn_ids) != 0)
    if versions is not None:
        parts |= versions[1:] < versions[:-1]  # np.diff of unsigned ones would not be negative
    bounds = [0, *(np.flatnonzero(parts) + 1).tolist(), len(generated)]
    spans = [(begin, end) for begin, end in pairwise(bounds) if generated[begin]]
    return spans or [(len(generated), len(generated))]
