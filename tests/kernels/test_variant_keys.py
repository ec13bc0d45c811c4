"""`Launch` finds the variant of a kernel that Triton itself would launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import BlockShape
from trajpack.kernels.launches import Launch


@triton.jit(do_not_specialize=["plain"])
def many_kinds_kernel(out, source, number, plain, rate, flag, pair, FORM: tl.constexpr):
    """Write one number that depends on every argument."""
    total = tl.load(out).to(tl.float32) + number + plain + rate + pair[0]
    if FORM[0]:
        total += FORM[0]
    if flag:
        total += 1
    if source is not None:
        total += tl.load(source).to(tl.float32)
    if pair[1] is not None:
        total += tl.load(pair[1]).to(tl.float32)
    tl.store(out, total.to(out.dtype.element_ty))


FLOATS = torch.zeros(64)
USUAL = (FLOATS, FLOATS, 7, 7, 0.5, True, (7, FLOATS), (1, "a"))
TENSORS = [FLOATS.to(dtype) for dtype in (torch.int32, torch.float64, torch.int8)]
NUMBERS = [0, 1, 2, 16, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1, 2**63]
OTHERS: list[list[Any]] = [
    [*TENSORS, FLOATS[1:], FLOATS[4:], torch.nn.Parameter(FLOATS)],
    [None, *TENSORS, FLOATS[1:]],
    NUMBERS,
    NUMBERS,
    [1.0, 16.0, -0.0, float("inf")],
    [False],
    [(7, None), (7, FLOATS[1:]), (1, FLOATS), (16, FLOATS), (2**31, FLOATS), (7, TENSORS[0])],
    [(0, "a"), (2, "a"), (1, "b")],
]
"""For each argument what differs from `USUAL`."""
CALLS = [USUAL]
CALLS += [(*USUAL[:i], one, *USUAL[i + 1 :]) for i, more in enumerate(OTHERS) for one in more]


def test_a_later_launch_is_that_of_triton(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(executor, "launch", lambda _, given: launched.append(given[4]))
    launch = Launch(BlockShape(1, 32), "sm_90", -1)
    wanted = [many_kinds_kernel[(1,)](*given, **launch.options) for given in CALLS]
    for _ in range(2):
        launched.clear()
        for given in CALLS:
            launch(many_kinds_kernel, 1, *given[:5], flag=given[5], pair=given[6], FORM=given[7])
        assert launched == wanted
        monkeypatch.setattr(type(many_kinds_kernel), "run", None)  # the second time unused
    assert len(set(map(id, wanted))) > 25


def test_arguments_in_another_order_are_put_in_the_order_of_the_kernel(
    executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(executor, "launch", lambda _, given: launched.append(given[9:]))
    launch = Launch(BlockShape(1, 32), "sm_90", -1)
    names = many_kinds_kernel.arg_names
    for _ in range(2):
        launch(many_kinds_kernel, 1, **dict(reversed([*zip(names, USUAL, strict=True)])))
    assert launched == [USUAL, USUAL]


def test_a_launch_of_no_program_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(many_kinds_kernel), "run", None)
    Launch(BlockShape(1, 32), "sm_90", -1)(many_kinds_kernel, 0, *USUAL)


def test_an_amd_gpu_is_left_to_triton(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """There a variant depends on the size of tensors, too."""
    launched: list[Any] = []
    run = type(many_kinds_kernel).run
    monkeypatch.setattr(executor, "launch", lambda *_: None)
    monkeypatch.setattr(
        type(many_kinds_kernel), "run", lambda *args, **kw: launched.append(run(*args, **kw))
    )
    launch = Launch(BlockShape(1, 64), "gfx942", -1)
    for _ in range(2):
        launch(many_kinds_kernel, 1, *USUAL)
    assert len(launched) == 2
