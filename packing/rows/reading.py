"""Reading rows: trajectories of tokens and a mask, as other systems store conversations.

``op`` is the operation that errors name, ``whose`` the trajectory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from trajpack.packing.conversion import FLOAT32_MAX, as_ids, as_number, host_array
from trajpack.packing.ragged import Ragged, part
from trajpack.packing.types import FloatArray, IntArray, Trajectory, Turn, VersionSpan

WHOLE_SEQUENCE_FIELDS = frozenset({"routed_experts", "teacher_ids", "teacher_logprobs"})
"""Extra fields with a row for every token, prompts included. Their `TokenField` is declared with
``generated_only=False``."""
Owner = TypeVar("Owner", bound=Hashable)


def trajectory_of(name: str, group: str | None, rows: Sequence[Mapping[str, Any]]) -> Trajectory:
    """Return a trajectory with the turns of rows, each the arguments of `turns_of`."""
    whose = f"trajectory {name!r}:"
    return Trajectory(name, [turn for row in rows for turn in turns_of(whose, **row)], group)


def turns_of(  # noqa: PLR0913 - a keyword for each column
    whose: str,
    *,
    input_ids: IntArray,
    mask: IntArray,
    logprobs: FloatArray,
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
) -> list[Turn]:
    """Return the turns of a conversation, given as tokens with a mask of the generated ones.

    Each run of generated tokens is a turn, with everything before it as prompt. Consecutive turns
    without a token between them are one turn, unless `turn_ids` differ or `versions` decrease.
    Turns that generated nothing and tokens after the last generated one are lost. If nothing was
    generated at all, it is one turn with an empty completion.

    Arrays are of ``input_ids``; ``prompt_ids`` are tokens before them. Log-probabilities and
    versions are ignored where nothing was generated. Versions are of tokens, of turns (the least
    and the greatest for all if there are not as many as turns), or a range for all turns. A turn
    gets the rewards at its tokens and after the turn before, the last turn those behind it and
    ``reward``; ``truncated`` and ``stop_reason`` are of the last turn. ``fields`` are ``[tokens,
    *]`` or `Ragged`; those of `WHOLE_SEQUENCE_FIELDS` have rows of the prompt too.

    Raises:
        TypeError: If an array has no numbers, or the reward is no number.
        ValueError: If there are no tokens, lengths differ, the mask has other values than 0 and 1,
            the first token was generated, or a reward is not finite as float32.
    """
    name = "input_ids" if prompt_ids is None else "response_ids"
    own = as_ids(f"{whose} {name}", input_ids)
    prompt = as_ids(f"{whose} prompt_ids", () if prompt_ids is None else prompt_ids)
    ids = np.concatenate([prompt, own])
    if not ids.size:
        raise ValueError(f"{whose} there must be tokens, got none")
    before, column = len(prompt), partial(_column, whose, name, len(own))
    generated = column("mask", mask)
    _check_all(f"{whose} mask must be 0 or 1", generated, (generated == 0) | (generated == 1))
    generated = generated == 1
    at_tokens = None if versions is None else column("versions", versions)
    numbers = np.zeros(len(own)) if turn_ids is None else column("turn_ids", turn_ids)
    spans = _spans(generated, numbers, at_tokens)
    if before + spans[0][0] == 0:
        raise ValueError(f"{whose} the first token must not be a generated one")
    if turn_versions:
        begins = np.diff(generated, prepend=False) & generated
        if begins.sum() == len(turn_versions):
            at_tokens = np.array([0, *turn_versions])[begins.cumsum()]
        version_range = min(turn_versions), max(turn_versions)
    of_logprobs = column("logprobs", logprobs, np.float32)
    scores = () if token_rewards is None else column("token_rewards", token_rewards, np.float64)
    rewards = _rewards(whose, [end for _, end in spans], reward, np.asarray(scores))
    rows = _checked_rows(whose, fields or {}, len(own), len(ids))
    turns = []
    for (begin, end), of_turn in zip(spans, rewards, strict=True):
        of_all, is_last = (0, before + end), end == spans[-1][1]
        turn = Turn(
            prompt_ids=ids[: before + begin],
            completion_ids=own[begin:end],
            completion_logprobs=of_logprobs[begin:end],
            reward=of_turn,
            truncated=truncated and is_last,
            stop_reason=stop_reason if is_last else None,
            fields={
                field: part(values, *(of_all if field in WHOLE_SEQUENCE_FIELDS else (begin, end)))
                for field, values in rows.items()
            }
            or None,
            **_versions(None if at_tokens is None else at_tokens[begin:end], version_range),
        )
        turns.append(turn)
    return turns


def _column(
    whose: str, of: str, size: int, field: str, values: Any, dtype: Any = None
) -> npt.NDArray[Any]:
    """Return an array over ``size`` tokens; ``of`` names the array of their ids."""
    try:
        array = host_array(values, dtype)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{whose} {field} must be numbers: {error}") from error
    if array.shape != (size,):
        raise ValueError(
            f"{whose} {field} must have shape {[size]} as {of} have, got {[*array.shape]}"
        )
    return array


def _checked_rows(
    whose: str, rows: Mapping[str, Any], num_own: int, num_all: int
) -> Mapping[str, Any]:
    """Return fields; raise a `ValueError` if one has not a row for each of its tokens."""
    for field, values in rows.items():
        size = num_all if field in WHOLE_SEQUENCE_FIELDS else num_own
        count = len(values.cu) - 1 if isinstance(values, Ragged) else (*np.shape(values), 0)[0]
        if count != size:
            raise ValueError(
                f"{whose} {field} must have {size} rows, one for each token, got {count}"
            )
    return rows


def _rewards(whose: str, ends: list[int], reward: float, scores: npt.NDArray[Any]) -> list[float]:
    """Return the reward of each turn, of those at tokens and that of the last turn."""
    rewards = [0.0] * len(ends)
    if scores.size:
        finite = np.abs(scores) <= FLOAT32_MAX
        _check_all(f"{whose} token_rewards must be finite float32", scores, finite)
        rewards = np.add.reduceat(scores, [0, *ends[:-1]]).tolist()
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
    size = len(generated)
    bounds = pairwise([0, *(np.flatnonzero(parts) + 1).tolist(), size])
    spans = [(begin, end) for begin, end in bounds if generated[begin:end].any()]
    return spans or [(size, size)]


def _versions(of: npt.NDArray[Any] | None, version_range: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments of `Turn` for the versions of a completion's tokens."""
    if of is None or not of.size:
        return {"version_start": version_range[0], "version_end": version_range[1]}
    bounds = [0, *(np.flatnonzero(np.diff(of)) + 1).tolist(), len(of)]
    spans = [VersionSpan(int(of[start]), start, stop) for start, stop in pairwise(bounds)]
    return {
        "version_start": int(of[0]),
        "version_end": int(of[-1]),
        "version_spans": spans if len(spans) > 1 else None,
    }


def host_arrays(
    op: str, tensors: Mapping[str, Any], needed: Sequence[str], optional: Iterable[str] = ()
) -> dict[str, npt.NDArray[Any]]:
    """Return the needed tensors and those optional ones that are there, copied to the host."""
    check_keys(op, tensors, needed)
    there = (key for key in (*needed, *optional) if tensors.get(key) is not None)
    return {key: host_array(tensors[key]) for key in there}


def stretches(
    arrays: Mapping[str, npt.NDArray[Any]], columns: Mapping[str, str], mask: npt.NDArray[Any]
) -> list[dict[str, npt.NDArray[Any]]]:
    """Return of each row what a mask selects, by the argument of `turns_of` for each key."""
    return [
        {name: arrays[key][row][kept] for name, key in columns.items()}
        for row, kept in enumerate(mask != 0)
    ]


def check_shapes(
    op: str, arrays: Mapping[str, npt.NDArray[Any]], expected: Mapping[str, Sequence[int]]
) -> None:
    """Raise a `ValueError` that names the first array of another shape."""
    for key, shape in expected.items():
        if key in arrays and list(arrays[key].shape) != list(shape):
            raise ValueError(
                f"{op}: {key} must have shape {list(shape)}, got {list(arrays[key].shape)}"
            )


def check_keys(op: str, row: Mapping[str, Any], needed: Iterable[str]) -> None:
    """Raise a `ValueError` that names the keys that are missing or ``None``."""
    there = {key for key, values in row.items() if values is not None}
    missing = [key for key in needed if key not in there]
    if missing:
        raise ValueError(f"{op}: {missing} are missing, got {sorted(there)}")


def fields_of(name: str, row: Any) -> Mapping[str, Any]:
    """Return the fields of a mapping or of an object with attributes; else a `TypeError`."""
    if isinstance(row, Mapping):
        return row
    if not hasattr(row, "__dict__"):
        raise TypeError(f"{name} must be a mapping or have attributes, got {type(row).__name__}")
    fields: dict[str, Any] = vars(row)
    return fields


def check_known_fields(op: str, fields: Sequence[str], known: Iterable[str]) -> None:
    """Raise a `ValueError` if ``fields`` has a name that the format does not carry."""
    unknown = sorted(set(fields) - set(known))
    if unknown:
        raise ValueError(f"{op}: fields must be of {sorted(known)}, got {unknown}")


def check_carried(
    whose: str,
    row: Mapping[str, Any],
    *,
    fields: Sequence[str] = (),
    keys: Mapping[str, str],
    refused: Iterable[str] = (),
) -> None:
    """Raise a `ValueError` if a row has data that its trajectory would lose.

    ``keys`` has the key of the row by the extra field that it becomes: each must be named in
    ``fields`` if it is there, but ``routed_experts``, and be there if it is named. ``refused`` are
    keys that no trajectory can hold, such as images.
    """
    for key in refused:
        value = row.get(key)
        if value is not None and (not hasattr(value, "__len__") or len(value)):
            raise ValueError(f"{whose}: {key} are there, which are not carried")
    for field, key in keys.items():
        is_there = row.get(key) is not None
        if field in fields and not is_there:
            raise ValueError(f"{whose}: {key} are missing")
        if is_there and field not in fields and field != "routed_experts":
            raise ValueError(f"{whose}: {key} are there: name {field} in fields, or take them out")


def reward_or_missing(
    op: str, reward: Any, missing_reward: float | None, *, expected: str, of: str = ""
) -> Any:
    """Return a reward, or ``missing_reward`` if it is ``None``; a `ValueError` if both are.

    ``expected`` is the key or argument that should hold it, ``of`` the row that lacks it.
    """
    if reward is not None:
        return reward
    if missing_reward is None:
        raise ValueError(
            f"{op}: the reward{' of ' if of else ''}{of} is missing, expected {expected}; pass "
            "missing_reward=0.0 to take 0 instead"
        )
    return as_number("missing_reward", missing_reward)


def joined(
    op: str,
    owned: Iterable[tuple[tuple[str, str | None], Sequence[int]]],
    row_of: Callable[[int, str], dict[str, Any]],
    *,
    rewards: Sequence[Any],
    missing_reward: float | None,
    expected: str,
) -> list[Trajectory]:
    """Return a trajectory for each name and group with the indices of its rows.

    Its last turn has the reward that all its rows have, but those that lack it, else as
    `reward_or_missing`; a `ValueError` if they differ. ``row_of`` returns the arguments of
    `turns_of` for an index and the words with which errors begin.
    """
    trajectories = []
    for (name, group), own in owned:
        whose = f"trajectory {name!r}"
        there = [rewards[row] for row in own if rewards[row] is not None]
        if any(reward != there[0] for reward in there[1:]):
            raise ValueError(f"{op}: the rows of {whose} must have one reward, got {there}")
        reward = there[0] if there else None
        reward = reward_or_missing(
            op, reward, missing_reward, expected=expected.format(own[-1]), of=whose
        )
        rows = [row_of(row, whose) for row in own]
        rows[-1]["reward"] = reward
        trajectories.append(trajectory_of(name, group, rows))
    return trajectories


def row_ids(op: str, ids: Iterable[str] | None, groups: Sequence[object]) -> list[str]:
    """Return the ids of rows: as given, or each row's group and its number in the group."""
    if ids is not None:
        return labels_of(op, "ids", ids, len(groups))
    seen: Counter[object] = Counter()
    names = []
    for group in groups:
        names.append(str(seen[group]) if group is None else f"{group}_{seen[group]}")
        seen[group] += 1
    return names


def labels_of(
    op: str, name: str, labels: Iterable[Any] | None, num_rows: int, *, of: str = "row"
) -> list[Any]:
    """Return the labels of rows, all ``None`` if none were given; one for each, or `ValueError`."""
    given = [None] * num_rows if labels is None else list(labels)
    if len(given) != num_rows:
        raise ValueError(f"{op}: {name} must be {num_rows}, one a {of}, got {len(given)}")
    return given


def rows_by(owners: Iterable[Owner]) -> dict[Owner, list[int]]:
    """Return the indices of each owner's rows, owners in the order of their first row."""
    found: dict[Owner, list[int]] = {}
    for row, owner in enumerate(owners):
        found.setdefault(owner, []).append(row)
    return found


def filled_up(rows: npt.NDArray[Any], length: int, fill: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return ``rows`` followed by as many rows of ``fill`` as ``length`` rows need."""
    behind = (max(length - len(rows), 0), *rows.shape[1:])
    return np.concatenate([rows, np.broadcast_to(np.asarray(fill, rows.dtype), behind)])


def routes_of_all(whose: str, routes: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """Return routes for ``length`` tokens, with experts 0, 1, 2, ... behind the last captured one.

    The experts of a token must differ, since trainers dispatch by their number.
    """
    if routes.ndim != 3:
        raise ValueError(
            f"{whose}: routes must be [tokens, layers, k], got shape {[*routes.shape]}"
        )
    return filled_up(routes, length, np.arange(routes.shape[-1]))


def as_integers(values: Any) -> npt.NDArray[np.int32]:
    """Return numbers, or the int32 numbers in a ``bytes`` object, as an int32 array."""
    numbers = np.frombuffer(values, np.int32) if isinstance(values, bytes) else values
    return host_array(numbers, np.int32)


def mask_of_counts(whose: str, ids: Any, counts: Any) -> Ragged:
    """Return a sampling mask of `as_integers`: the ids of all tokens, the number of each token's.

    Raises a `ValueError` if counts do not add up to the ids.
    """
    ids, counts = as_integers(ids), as_integers(counts)
    if (counts < 0).any() or counts.sum() != len(ids):
        raise ValueError(
            f"{whose}: sampling mask has {len(ids)} tokens, but counts of {counts.sum()}"
        )
    return Ragged(np.append(0, counts).cumsum(dtype=np.int64), ids)
