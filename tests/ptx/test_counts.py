"""No kernel executes more or moves more than the committed counts say."""

from __future__ import annotations

import json

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.compiled.compile_machine_code import loads_in_flight
from tests.ptx import counts
from tests.ptx.executor import on_executor


@pytest.mark.slow
def test_no_kernel_does_a_tenth_more_than_it_did() -> None:
    known, found = json.loads(counts.COUNTS.read_text()), counts.count()
    assert found.keys() == known.keys(), counts.__doc__
    assert not counts.worse(known, found), counts.__doc__


def test_the_page_shows_the_committed_counts() -> None:
    known = json.loads(counts.COUNTS.read_text())
    assert counts.PAGE.read_text() == counts.page(known, triton.__version__)


@triton.jit
def planted_kernel(source, target, TIMES: tl.constexpr, STRIDE: tl.constexpr):
    entries = tl.arange(0, 1024)
    total = tl.zeros([1024], tl.float32)
    for k in tl.static_range(TIMES):
        loaded = tl.load(source + (entries + k * 32) * STRIDE)
        total += tl.cumsum(loaded) if TIMES > 1 else loaded
    tl.store(target + entries, total)


def planted(times: int, stride: int) -> dict[str, dict[str, float]]:
    source, target = torch.zeros(16384), torch.zeros(1024)
    with on_executor(counts.ARCH, checks=False, counts=True) as executor:
        planted_kernel[(1,)](source, target, times, stride)
    return {"planted": counts.counted(executor.reports["planted_kernel"], 1024)}


@pytest.mark.parametrize(
    ("times", "stride", "expected"),
    [
        (1, 1, set()),
        (2, 1, {"instructions"}),
        (1, 8, {"read", "load_sectors", "instructions"}),
    ],
)
def test_a_planted_regression_is_found(times: int, stride: int, expected: set[str]) -> None:
    found = counts.worse(planted(1, 1), planted(times, stride))
    assert expected <= {key.removeprefix("planted: ") for key in found}
    assert bool(found) == bool(expected)


@pytest.mark.parametrize(
    ("name", "factor"), [("spills", 0), ("in_flight", 2), ("written", 0.8), ("store_sectors", 0.8)]
)
def test_each_count_is_compared(name: str, factor: float) -> None:
    found = planted(1, 1)
    found["planted"]["spills"] = 8
    known = {"planted": found["planted"] | {name: factor * found["planted"][name]}}
    assert counts.worse(known, found).keys() == {f"planted: {name}"}


LOADS = "LDG.E R4, [R2.64]\nLDG.E R5, [R2.64]\nLDG.E R6, [R2.64]\n"
ROUND = "".join(f"LDG.E R4, [R2.64]\nFADD R6, R{at}, R6\n" for at in (4, 4, 4))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("LDG.E R4, desc[UR4][R2.64]\nLDG.E R5, desc[UR4][R2.64+0x4]\nFADD R6, R4, R5", 2),
        ("LDG.E R4, desc[UR4][R2.64]\nFADD R6, R4, R6\nLDG.E R4, desc[UR4][R2.64]", 1),
        ("LDG.E.128 R4, desc[UR4][R2.64]\nLDG.E R8, desc[UR4][R7.64]", 1),
        ("LDG.E.64 R4, desc[UR4][R2.64]\n@P0 STG.E desc[UR4][R2.64], R9\nLDG.E R8, [R2.64]", 2),
        ("IADD3 R4, R2, 0x1, RZ", 0),
        (f"{LOADS}{ROUND}@P0 BRA -6", 1),
        (f"{LOADS}{LOADS}FADD R6, R4, R6\n@P0 BRA -7", 6),
        (f"FADD R6, R4, R6\n{LOADS}@P0 BRA -4", 3),
        (f"{LOADS}{ROUND}@P0 BRA -6\n@P1 BRA -7", 1),
        (f"{LOADS}LDG.E R4, [R2.64]\nFADD R6, R4, R6\n@P0 BRA -2", 4),
    ],
)
def test_loads_in_flight_are_those_before_one_is_needed_in_the_worst_loop(
    code: str, expected: int
) -> None:
    assert loads_in_flight(code) == expected
