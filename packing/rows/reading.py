"""Reading rows of a trainer's rollout: keys, shapes, rewards, names and extra fields.

``op`` is the operation that errors name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.packing.conversion import as_number, host_array


def host_arrays(
    op: str, tensors: Mapping[str, Any], needed: Sequence[str], optional: Iterable[str] = ()
) -> dict[str, npt.NDArray[Any]]:
    """Return the needed tensors and those optional ones that are there, copied to the host."""
    check_keys(op, tensors, needed)
    there = (key for key in (*needed, *optional) if tensors.get(key) is not None)
    return {key: host_array(tensors[key]) for key in there}


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
    fields: Sequence[str],
    keys: Mapping[str, str],
    refused: Iterable[str] = (),
) -> None:
    """Raise a `ValueError` if a row has data that its trajectory would lose.

    Args:
        whose: Trajectory or operation that errors name.
        row: A rollout as the trainer has it.
        fields: Extra fields that the caller named.
        keys: Key of the row by the extra field that it becomes. Each must be named if it is
            there, and be there if it is named. ``routed_experts`` may stay unnamed.
        refused: Keys that no trajectory can hold, such as images.
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
        whose = f" of {of}" if of else ""
        raise ValueError(
            f"{op}: the reward{whose} is missing, expected {expected}; pass missing_reward=0.0 "
            "to take 0 instead"
        )
    return as_number("missing_reward", missing_reward)


def shared_reward(
    op: str, rewards: Sequence[Any], missing_reward: float | None, *, expected: str, of: str
) -> Any:
    """Return the reward that all rows of a trajectory have, but those that lack it.

    Else as `reward_or_missing`; a `ValueError` if they differ.
    """
    there = [reward for reward in rewards if reward is not None]
    if any(reward != there[0] for reward in there[1:]):
        raise ValueError(f"{op}: the rows of {of} must have one reward, got {there}")
    reward = there[0] if there else None
    return reward_or_missing(op, reward, missing_reward, expected=expected, of=of)


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


def filled_up(rows: npt.NDArray[Any], length: int, fill: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return ``rows`` followed by as many rows of ``fill`` as ``length`` rows need."""
    behind = (max(length - len(rows), 0), *rows.shape[1:])
    return np.concatenate([rows, np.broadcast_to(np.asarray(fill, rows.dtype), behind)])


def routes_of_all(name: str, routes: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """Return routes for ``length`` tokens, with experts 0, 1, 2, ... behind the last captured one.

    The experts of a token must differ, since trainers dispatch by their number.
    """
    if routes.ndim != 3:
        raise ValueError(
            f"{name}: routes must be [tokens, layers, k], got shape {list(routes.shape)}"
        )
    return filled_up(routes, length, np.arange(routes.shape[-1]))
