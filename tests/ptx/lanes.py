"""Instructions in which threads meet: barriers, shuffles, votes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.parse import Instruction
from tests.ptx.traffic import distinct

if TYPE_CHECKING:
    from tests.ptx.program import Program

Step = Callable[[Any, Any], Any]
NAMES = {"bar", "barrier", "shfl", "redux", "vote", "match", "activemask", "nanosleep"}
REDUCTIONS = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
LANE = np.arange(32)
BIT = np.uint32(1) << LANE.astype(np.uint32)
EVERYONE = 0xFFFFFFFF


def compile_lanes(p: Program, one: Instruction) -> Step:
    name, words = one.words[0], one.words
    step: Step | None = None
    if name == "nanosleep":
        step = lambda m, s: None  # noqa: E731
    elif name in ("bar", "barrier"):
        step = _barrier(one)
    elif name == "activemask":
        put = p.target(one.operands[0], "b32")
        step = lambda m, s: put(m, s, _active(s))  # noqa: E731
    elif name == "shfl" and words[3] == "b32":
        step = _shuffle(p, one)
    elif name == "redux" and words[3][0] != "f":
        step = _whole_warps(p, one, words[3], words[3], _reducer(words[2]))
    elif name == "vote" and words[2] in VOTES:
        result = "b32" if words[2] == "ballot" else "pred"
        step = _whole_warps(p, one, "pred", result, VOTES[words[2]])
    elif name == "match" and words[1] == "any":
        step = _whole_warps(p, one, words[3], "b32", _matching)
    if step is None:
        raise NotImplementedError(str(one))
    return step


def _barrier(one: Instruction) -> Step:
    """All threads of a program, or of a warp, have come: this block begins with the barrier."""
    if one.words[1:3] == ["warp", "sync"]:
        if int(one.operands[0], 0) not in (EVERYONE, -1):
            raise NotImplementedError(str(one))
        return lambda m, s: m.clock.warp_barrier(distinct(s.numbers >> 5))
    if one.words[1] != "sync" or len(one.operands) > 1:
        raise NotImplementedError(str(one))
    return lambda m, s: m.clock.barrier(distinct(s.numbers // m.threads))


def _active(s: Any) -> Any:
    masks = np.zeros(int(s.numbers[-1] >> 5) + 1, np.uint32)
    np.bitwise_or.at(masks, s.numbers >> 5, BIT[s.numbers & 31])
    return masks[s.numbers >> 5]


def _check_members(one: Instruction, members: Any) -> None:
    if not np.all(members == EVERYONE):
        raise NotImplementedError(f"{one} by a part of a warp")


def _whole_warps(p: Program, one: Instruction, kind: str, result: str, function: Any) -> Step:
    source, put = p.source(one.operands[1], kind), p.target(one.operands[0], result)
    members = p.source(one.operands[2], "b32")

    def run(m: Any, s: Any) -> None:
        _check_members(one, members(m, s))
        rows = np.broadcast_to(source(m, s), (s.count,)).reshape(-1, 32)
        found = function(rows)
        put(m, s, np.ascontiguousarray(np.broadcast_to(found, rows.shape)).ravel())

    return run


def _reducer(how: str) -> Callable[[Any], Any]:
    function = REDUCTIONS[how]
    return lambda rows: function.reduce(rows, axis=1, dtype=rows.dtype, keepdims=True)


def _ballot(rows: Any) -> Any:
    return np.bitwise_or.reduce(np.where(rows, BIT, np.uint32(0)), axis=1, keepdims=True)


def _matching(rows: Any) -> Any:
    return np.bitwise_or.reduce(
        np.where(rows[:, :, None] == rows[:, None, :], BIT, np.uint32(0)), axis=2
    )


VOTES = {
    "ballot": _ballot,
    "any": lambda rows: rows.any(1, keepdims=True),
    "all": lambda rows: rows.all(1, keepdims=True),
    "uni": lambda rows: (rows == rows[:, :1]).all(1, keepdims=True),
}


def _shuffle(p: Program, one: Instruction) -> Step:
    how = one.words[2]
    target, _, found = one.operands[0].partition("|")
    value, distance, control, members = (p.source(text, "b32") for text in one.operands[1:5])
    put, tell = p.target(target, "b32"), p.target(found, "pred") if found else None

    def run(m: Any, s: Any) -> None:
        _check_members(one, members(m, s))
        rows = np.broadcast_to(value(m, s), (s.count,)).reshape(-1, 32)
        by, bounds = distance(m, s), control(m, s)
        if np.ndim(by) or np.ndim(bounds):
            given = (np.asarray(each).astype(np.int64) for each in (by, bounds))
            by, bounds = (each.reshape(-1, 32) if each.ndim else each for each in given)
            other, is_inside = _partners(how, by & 31, bounds)
            taken = np.take_along_axis(rows, np.broadcast_to(other, rows.shape), 1)
        else:
            other, is_inside = _same_partners(how, int(by) & 31, int(bounds))
            taken = rows.take(other, 1)
        put(m, s, taken.ravel())
        if tell is not None:
            tell(m, s, np.broadcast_to(is_inside, rows.shape).ravel())

    return run


def _partners(how: str, distance: Any, control: Any) -> tuple[Any, Any]:
    """Return the lane that each lane reads, and whether it is within its segment."""
    clamp, segment = control & 31, control >> 8 & 31
    last = (LANE & segment) | (clamp & ~segment & 31)
    other = {
        "up": LANE - distance, "down": LANE + distance, "bfly": LANE ^ distance,
        "idx": (LANE & segment) | (distance & ~segment & 31),
    }[how]  # fmt: skip
    is_inside = other >= last if how == "up" else other <= last
    return np.where(is_inside, other, LANE), is_inside


@cache
def _same_partners(how: str, distance: int, control: int) -> tuple[Any, Any]:
    """Return the `_partners` of a warp whose lanes have the same distance and control."""
    return _partners(how, distance, control)
