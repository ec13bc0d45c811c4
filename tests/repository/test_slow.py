"""The choice of cases for `make test` and `make test-slow`."""

from __future__ import annotations

from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.slow import ELSEWHERE, leave_out_repeated_values, slow, slow_after

IMPLS, DTYPES = ("torch", "triton"), ("half", "single")


class Case:
    """What a collected case has of pytest's."""

    parent, originalname = "file", "test_it"

    def __init__(self, lists: list[str], params: dict[str, Any], *marks: str) -> None:
        self.parametrized = [pytest.mark.parametrize(names, []).mark for names in lists]
        self.callspec, self.marks = SimpleNamespace(params=params), {*marks}

    def iter_markers(self, _: str) -> Any:
        return iter(self.parametrized)

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.add(mark.name)


def kept_of(cases: list[Case]) -> list[tuple[Any, ...]]:
    leave_out_repeated_values(cases)  # type: ignore[arg-type]
    return [tuple(case.callspec.params.values()) for case in cases if "slow" not in case.marks]


def test_cases_that_stay_have_every_value_in_turn_for_each_implementation() -> None:
    names, combinations = ("impl", "dtype", "length"), product(IMPLS, DTYPES, range(6))
    cases = [Case(["length", "dtype"], dict(zip(names, one, strict=True))) for one in combinations]
    kept = kept_of(cases)
    assert len(kept) == 6 * len(IMPLS)
    for impl in IMPLS:
        own = [case for case in kept if case[0] == impl]
        assert {length for *_, length in own} == {*range(6)}
        assert Counter(dtype for _, dtype, _ in own) == {"half": 3, "single": 3}


def test_the_targets_leave_out_the_same_marks() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    *others, own = ELSEWHERE
    assert f'-m "not ({" or ".join(ELSEWHERE)})"' in makefile
    assert f'-m "{own} and not ({" or ".join(others)})"' in makefile


def test_rows_of_one_list_all_stay() -> None:
    rows = [("gae", 1), ("gae", 2), ("vtrace", 1), ("vtrace", 2)]
    cases = [Case(["kind, size"], {"kind": kind, "size": size}) for kind, size in rows]
    assert kept_of(cases) == rows


@pytest.mark.parametrize("mark", ["slow", "variants", "engines", "gpu"])
def test_a_case_of_another_target_holds_no_value(mark: str) -> None:
    others = [Case(["kind", "size"], {"kind": kind, "size": 1}, mark) for kind in ("gae", "other")]
    mine = [Case(["kind", "size"], {"kind": kind, "size": 1}) for kind in ("gae", "vtrace")]
    leave_out_repeated_values([*others, *mine])  # type: ignore[list-item]
    assert [case.marks for case in mine] == [set(), set()]
    assert [case.marks for case in others] == [{mark}, {mark}]


def test_parameters_behind_the_first_are_slow() -> None:
    found = slow_after(1, [("gae", 1), ("vtrace", 2)])
    assert [(one.values, [mark.name for mark in one.marks]) for one in found] == [
        (("gae", 1), []),
        (("vtrace", 2), ["slow"]),
    ]
    assert slow("gae").values == ("gae",)
