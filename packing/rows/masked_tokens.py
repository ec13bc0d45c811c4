"""Trajectories from conversations as other systems store them: tokens and a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.packing.conversion import FLOAT32_MAX, as_ids, as_number, host_array
from trajpack.packing.ragged import Ragged, part
from trajpack.packing.types import FloatArray, IntArray, Trajectory, Turn, VersionSpan

WHOLE_SEQUENCE_FIELDS = frozenset({"routed_experts", "teacher_ids", "teacher_logprobs"})
"""Extra fields with a row for every token, prompts included. Their `TokenField` is declared with
``generated_only=False``."""


def masked_trajectory(  # noqa: PLR0913 - a keyword for each column
    name: str,
    input_ids: IntArray,
    mask: IntArray,
    logprobs: FloatArray,
    *,
    prompt_ids: IntArray | None = None,
    versions: IntArray | None = None,
    turn_versions: Sequence[int] = (),
    version_range: tuple[int, int] = (0, 0),
    turn_ids: IntArray | None = None,
    reward: float = 0.0,
    token_rewards: FloatArray | None = None,
    truncated: bool = False,
    stop_reason: str | None = None,
    fields: Mapping[str, Any] | None = None,
    group: str | None = None,
) -> Trajectory:
    """Return the trajectory of a conversation, given as tokens with a mask of the generated ones.

    Each run of generated tokens is a turn, with everything before it as prompt. Consecutive turns
    without a token between them are one turn, unless `turn_ids` differ or `versions` decrease.
    Turns that generated nothing and tokens after the last generated one are lost. If nothing was
    generated at all, it is one turn with an empty completion.

    Args:
        name: Id of the trajectory.
        input_ids: Token ids, ``[tokens]``.
        mask: 1 at generated tokens, else 0.
        logprobs: Log-probability of each token; ignored where nothing was generated.
        prompt_ids: Token ids before `input_ids`. All other arrays are then of `input_ids` alone,
            but for `WHOLE_SEQUENCE_FIELDS`.
        versions: Policy version of each token; ignored where nothing was generated.
        turn_ids: Number of each token's turn.
        turn_versions: Policy version of each turn; the least and the greatest for every turn if
            there are not as many as turns.
        version_range: First and last policy version of every turn, if no others are given.
        reward: Reward of the last turn, in addition to `token_rewards`.
        token_rewards: Rewards at tokens, ``[tokens]``: a turn gets those up to its last token and
            after the turn before; the last turn also gets those behind it.
        truncated: Of the last turn.
        stop_reason: Of the last turn.
        fields: Extra fields, ``[tokens, *]`` each, or `Ragged`. A turn keeps the rows of its
            completion, or of prompt and completion for `WHOLE_SEQUENCE_FIELDS`.
        group: Group of the trajectory.

    Raises:
        TypeError: If an array has no numbers, or the reward is no number.
        ValueError: If there are no tokens, lengths differ, the mask has other values than 0 and 1,
            the first token was generated, or a reward is not finite as float32.

    Example:
        >>> found = masked_trajectory("a", [1, 2, 3, 4], [0, 1, 0, 1], [0.0, -0.5, 0.0, -0.1])
        >>> [turn.completion_ids.tolist() for turn in found.turns]
        [[2], [4]]
    """
    whose = f"trajectory {name!r}:"
    ids = as_ids(f"{whose} {'input' if prompt_ids is None else 'response'}_ids", input_ids)
    num_prompt = 0
    if prompt_ids is not None:
        prompt = as_ids(f"{whose} prompt_ids", prompt_ids)
        num_prompt, ids = len(prompt), np.concatenate([prompt, ids])
    if not ids.size:
        raise ValueError(f"{whose} there must be tokens, got none")
    column = partial(_column, whose, num_prompt, len(ids))
    generated = column("mask", mask)
    _check_all(f"{whose} mask must be 0 or 1", generated, (generated == 0) | (generated == 1))
    generated = generated == 1
    of_tokens = None if versions is None else column("versions", versions)
    numbers = np.zeros(len(ids)) if turn_ids is None else column("turn_ids", turn_ids)
    spans = _spans(generated, numbers, of_tokens)
    if spans[0][0] == 0:
        raise ValueError(f"{whose} the first token must not be a generated one")
    if turn_versions:
        begins = np.diff(generated, prepend=False) & generated
        if begins.sum() == len(turn_versions):
            of_tokens = np.array([0, *turn_versions])[begins.cumsum()]
        version_range = min(turn_versions), max(turn_versions)
    rows = _field_rows(whose, fields or {}, num_prompt, len(ids))
    of_logprobs = column("logprobs", logprobs, np.float32)
    given = None if token_rewards is None else column("token_rewards", token_rewards, np.float64)
    rewards = _rewards(whose, [end for _, end in spans], reward, given)
    turns = []
    for (begin, end), of_turn in zip(spans, rewards, strict=True):
        firsts = {field: 0 if field in WHOLE_SEQUENCE_FIELDS else begin for field in rows}
        turn = Turn(
            prompt_ids=ids[:begin],
            completion_ids=ids[begin:end],
            completion_logprobs=of_logprobs[begin:end],
            reward=of_turn,
            truncated=truncated and end == spans[-1][1],
            stop_reason=stop_reason if end == spans[-1][1] else None,
            fields={field: part(rows[field], first, end) for field, first in firsts.items()}
            or None,
            **_versions(None if of_tokens is None else of_tokens[begin:end], version_range),
        )
        turns.append(turn)
    return Trajectory(name, turns, group)


def joined_trajectory(
    name: str, group: str | None, rows: Sequence[Mapping[str, Any]]
) -> Trajectory:
    """Return a trajectory with the turns of rows, each the arguments of `masked_trajectory`."""
    turns = [turn for row in rows for turn in masked_trajectory(name, **row).turns]
    return Trajectory(name, turns, group)


def _column(
    whose: str, num_prompt: int, num_tokens: int, field: str, values: Any, dtype: Any = None
) -> npt.NDArray[Any]:
    """Return an array over all tokens; 0 at the prompt if it is of a response."""
    try:
        array = host_array(values, dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{whose} {field} must be numbers: {error}") from error
    if num_prompt and array.ndim == 1:
        array = np.concatenate([np.zeros(num_prompt, array.dtype), array])
    if array.shape != (num_tokens,):
        raise ValueError(
            f"{whose} {field} must have shape {[num_tokens]} as input_ids have, "
            f"got {list(array.shape)}"
        )
    return array


def _field_rows(
    whose: str, fields: Mapping[str, Any], num_prompt: int, num_tokens: int
) -> dict[str, Any]:
    """Return rows of extra fields for all tokens; 0 at the prompt if they are of a response."""
    found = dict[str, Any]()
    for field, given in fields.items():
        rows, is_ragged = given, isinstance(given, Ragged)
        if is_ragged:
            rows = Ragged(np.append(np.zeros(num_prompt, np.int64), given.cu), given.values)
        elif num_prompt and field not in WHOLE_SEQUENCE_FIELDS:
            rows = np.concatenate([np.zeros((num_prompt, *rows.shape[1:]), rows.dtype), rows])
        num_rows = len(rows.cu) - 1 if is_ragged else len(rows)
        if num_rows != num_tokens:
            raise ValueError(
                f"{whose} {field} must have {num_tokens} rows, one for each token, got {num_rows}"
            )
        found[field] = rows
    return found


def _rewards(
    whose: str, ends: list[int], reward: float, given: npt.NDArray[Any] | None
) -> list[float]:
    """Return the reward of each turn, of those at tokens and that of the last turn."""
    rewards = [0.0] * len(ends)
    if given is not None:
        finite = np.abs(given) <= FLOAT32_MAX
        _check_all(f"{whose} token_rewards must be finite float32", given, finite)
        rewards = np.add.reduceat(given, [0, *ends[:-1]]).tolist()
    rewards[-1] += as_number(f"{whose} reward", reward)
    return [as_number(f"{whose} reward", of_turn) for of_turn in rewards]


def _check_all(rule: str, values: npt.NDArray[Any], allowed: npt.NDArray[np.bool_]) -> None:
    """Raise a `ValueError` that names the first value that is not allowed."""
    if not allowed.all():
        first = int(allowed.argmin())
        raise ValueError(f"{rule}, got {values[first]} at index {first}")


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


def _versions(of: npt.NDArray[Any] | None, version_range: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments of `Turn` for the versions of a completion's tokens."""
    if of is None or not of.size:
        return {"version_start": version_range[0], "version_end": version_range[1]}
    found: dict[str, Any] = {"version_start": int(of[0]), "version_end": int(of[-1])}
    changes = (np.flatnonzero(np.diff(of)) + 1).tolist()
    if changes:
        found["version_spans"] = [
            VersionSpan(int(of[start]), start, stop)
            for start, stop in pairwise([0, *changes, len(of)])
        ]
    return found
