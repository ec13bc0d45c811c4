"""Which cases of a test `make test` leaves to `make test-slow`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

ELSEWHERE = ("gpu", "engines", "variants", "slow")
"""Marks of tests that `make test` leaves out."""


def slow(*values: Any) -> Any:
    """Return values of parameters that only `make test-slow` has."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_after(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return parameters: `make test` has the first ``count``, and `make test-slow` the others.

    A tuple is the values of several parameters.
    """
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [*(pytest.param(*row) for row in rows[:count]), *(slow(*row) for row in rows[count:])]


def leave_out_repeated_values(items: list[pytest.Item]) -> None:
    """Mark as slow each case whose values other cases of its test have.

    A value is a row of one `parametrize`, or of a parametrized fixture. Each implementation
    (``impl``) of a test has all values. The case with the most values not seen yet is kept next;
    of several the one whose values were kept least often, and of these the last. The choice
    depends on the cases that were collected.
    """
    cases: dict[Any, list[tuple[pytest.Item, set[Any]]]] = defaultdict(list)
    for item in items:
        is_elsewhere = any(item.get_closest_marker(name) for name in ELSEWHERE)
        if hasattr(item, "callspec") and not is_elsewhere:
            implementation = id(item.callspec.params.get("impl"))
            test = item.parent, item.originalname, implementation  # type: ignore[attr-defined]
            cases[test].append((item, _values_of(item, item.callspec.params)))
    for left in cases.values():
        missing, kept = set[Any]().union(*(values for _, values in left)), Counter[Any]()
        left.reverse()
        while missing:
            chosen = max(
                left, key=lambda case: (len(case[1] & missing), -sum(kept[one] for one in case[1]))
            )
            left.remove(chosen)
            missing -= chosen[1]
            kept.update(chosen[1])
        for item, _ in left:
            item.add_marker(pytest.mark.slow)


def _values_of(item: pytest.Item, params: dict[str, Any]) -> set[Any]:
    """Return the values of a case, by identity: values that are equal may be different objects."""
    left = dict(params)
    values: set[Any] = set()
    for mark in item.iter_markers("parametrize"):
        given = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
        values.add(tuple((name, id(left.pop(name))) for name in names if name in left))
    return values | {(name, id(value)) for name, value in left.items()}
