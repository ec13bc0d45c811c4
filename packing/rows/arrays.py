"""Arrays of rows as formats bring them: on the host, there, and of one shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.packing.conversion import as_number, host_array


def host_arrays(
    op: str, tensors: Mapping[str, Any], needed: Sequence[str], optional: Iterable[str] = ()
) -> dict[str, npt.NDArray[Any]]:
    """Return what must be there and what may be, as arrays on the host.

    Raises:
        ValueError: If something that must be there is missing or ``None``.

    Cost: a copy of each to the host, which synchronises a device.
    """
    there = {key: values for key, values in tensors.items() if values is not None}
    missing = [key for key in needed if key not in there]
    if missing:
        raise ValueError(f"{op}: {missing} are missing, got {sorted(there)}")
    return {key: host_array(there[key]) for key in (*needed, *optional) if key in there}


def fields_of(name: str, row: Any) -> Mapping[str, Any]:
    """Return the fields of an object or a mapping.

    Raises:
        TypeError: If it is neither, as ``None`` is.
    """
    if isinstance(row, Mapping):
        return row
    if not hasattr(row, "__dict__"):
        raise TypeError(f"{name} must be a mapping or have attributes, got {type(row).__name__}")
    fields: dict[str, Any] = vars(row)
    return fields


def reward_or_missing(
    op: str, reward: Any, missing_reward: float | None, *, expected: str, of: str = ""
) -> Any:
    """Return a reward as it is, or the one that the caller agreed to where it is ``None``.

    Args:
        op: Named by errors.
        reward: Of a row, or of a token.
        missing_reward: As the caller gave it.
        expected: Where a reward is looked for.
        of: The row that lacks it, if it is one of several.

    Raises:
        ValueError: If the reward is ``None`` and the caller agreed to no other.
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


def check_shapes(
    op: str, arrays: Mapping[str, npt.NDArray[Any]], expected: Mapping[str, Sequence[int]]
) -> None:
    """Raise a `ValueError` that names the first array that is there in another shape."""
    for key, shape in expected.items():
        if key in arrays and list(arrays[key].shape) != list(shape):
            raise ValueError(
                f"{op}: {key} must have shape {list(shape)}, got {list(arrays[key].shape)}"
            )


def filled_up(rows: npt.NDArray[Any], length: int, fill: npt.ArrayLike) -> npt.NDArray[Any]:
    """Return ``rows`` with rows of ``fill`` behind, so that there are ``length`` of them."""
    behind = (max(length - len(rows), 0), *rows.shape[1:])
    return np.concatenate([rows, np.broadcast_to(np.asarray(fill, rows.dtype), behind)])


def routes_of_all(name: str, routes: npt.NDArray[Any], length: int) -> npt.NDArray[Any]:
    """Return a route for each of ``length`` tokens: experts 0, 1, 2, ... behind the last captured.

    Experts of a token must be distinct, as trainers dispatch that many tokens to each.

    Raises:
        ValueError: If routes are not ``[tokens, layers, k]``.
    """
    if routes.ndim != 3:
        raise ValueError(
            f"{name}: routes must be [tokens, layers, k], got shape {list(routes.shape)}"
        )
    return filled_up(routes, length, np.arange(routes.shape[-1]))
