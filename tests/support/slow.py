"""Which cases of a test `make test` leaves to `make test-slow`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

ELSEWHERE = ("slow", "variants", "engines", "gpu")
"""Marks of what other targets than `make test` run."""


def slow(*values: Any) -> Any:
    """Return values of parameters that `make test-slow` has."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_behind(count: int, cases: Iterable[Any]) -> list[Any]:
    """Return parameters: `make test` has the first ``count``, and `make test-slow` the others."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [*(pytest.param(*row) for row in rows[:count]), *(slow(*row) for row in rows[count:])]


def mark_repeats(items: list[pytest.Item]) -> None:
    """Mark cases of a product of parameters as slow, of which other cases have every value.

    A parameter is one `parametrize`, whose values are whole rows, or one fixture. The cases that
    stay have each value of each parameter at least once: first the case with most values that none
    before had, of several the last, since implementations are ordered from simple to compiled.
    """
    cases: dict[Any, list[tuple[pytest.Item, set[Any]]]] = defaultdict(list)
    for item in items:
        is_left_out = any(item.get_closest_marker(name) for name in ELSEWHERE)
        if (values := _values_of(item)) and not is_left_out:
            cases[item.parent, item.originalname].append((item, values))  # type: ignore[attr-defined]
    for of_test in cases.values():
        missing = set().union(*(values for _, values in of_test))
        of_test.reverse()
        while missing:
            chosen = max(of_test, key=lambda case: len(case[1] & missing))
            of_test.remove(chosen)
            missing -= chosen[1]
        for item, _ in of_test:
            item.add_marker(pytest.mark.slow)


def _values_of(item: pytest.Item) -> set[Any]:
    """Return the values of a case, by identity: values that are equal may be different objects."""
    call = getattr(item, "callspec", None)
    left = dict(call.params) if call else {}
    values: set[Any] = set()
    for mark in item.iter_markers("parametrize"):
        given = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in given.split(",")] if isinstance(given, str) else given
        row = tuple((name, id(left.pop(name))) for name in names if name in left)
        values.add(row)
    return values | {(name, id(value)) for name, value in left.items()}
