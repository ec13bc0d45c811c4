"""A dictionary that forgets, so that what is never taken out of it does not add up."""

from __future__ import annotations

from typing import TypeVar

V = TypeVar("V")

_MAX_VALUES = 1 << 16


class RecentValues(dict[str, V]):
    """A value for each of the names that were put last, of which there is a most.

    Args:
        max_values: Names it holds at most.

    Example:
        >>> moments = RecentValues(max_values=2)
        >>> for value, name in enumerate(("a", "b", "a", "c")):
        ...     moments.put(name, value)
        >>> moments
        {'a': 2, 'c': 3}
    """

    def __init__(self, max_values: int = _MAX_VALUES) -> None:
        super().__init__()
        self._max_values = max_values

    def put(self, name: str, value: V) -> None:
        """Set the value of a name and make it the latest; the oldest goes where there is no room.

        Cost: constant.
        """
        self.pop(name, None)
        if len(self) >= self._max_values:
            del self[next(iter(self))]
        self[name] = value
