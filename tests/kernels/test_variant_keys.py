"""`Launch` finds the variant of a kernel that Triton itself would launch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from tests.kernels.conftest import OTHERS as OTHER_VERSIONS, folder_of
from trajpack.kernels import launches
from trajpack.kernels.block_shapes import BlockShape
from trajpack.kernels.launches import Launch

ROOT = Path(__file__).parents[2]


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


class Pair(NamedTuple):
    number: int
    tensor: torch.Tensor | None


class Number(IntEnum):
    ONE = 1


FLOATS, MORE = torch.zeros(2, 64)
USUAL = (FLOATS, MORE, 7, 9, 0.5, True, (7, FLOATS), (1, "a"))
TENSORS = [FLOATS.to(dtype) for dtype in (torch.int32, torch.float64, torch.int8)]
NUMBERS = [0, 1, 2, 16, -1, -16, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1, 2**63]
OTHERS: list[list[Any]] = [
    [*TENSORS, FLOATS[1:], FLOATS[2:], FLOATS[4:], torch.nn.Parameter(FLOATS)],
    [None, *TENSORS, FLOATS[1:], FLOATS[2:]],
    NUMBERS,
    NUMBERS,
    [1.0, 16.0, -0.0, float("inf")],
    [False],
    [
        (7, None), (7, FLOATS[1:]), (1, FLOATS), (16, FLOATS), (2**31, FLOATS), (7, TENSORS[0]),
        Pair(1, FLOATS), Pair(16, FLOATS[1:]), Pair(7, None),
    ],
    [(0, "a"), (2, "a"), (1, "b")],
]  # fmt: skip
"""For each argument what differs from `USUAL`."""
CALLS = [USUAL]
CALLS += [(*USUAL[:i], one, *USUAL[i + 1 :]) for i, more in enumerate(OTHERS) for one in more]


@pytest.fixture
def launched(executor: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is launched: the compiled kernel and its arguments. Nothing is executed."""
    found: list[Any] = []
    monkeypatch.setattr(executor, "launch", lambda _, given: found.append((given[4], given[9:])))
    return found


@pytest.fixture
def searches(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launches for which Triton searched a variant."""
    found: list[Any] = []
    run = JITFunction.run

    def noted(kernel: Any, *given: Any, **named: Any) -> Any:
        found.append(kernel)
        return run(kernel, *given, **named)

    monkeypatch.setattr(JITFunction, "run", noted)
    return found


def new_launch(architecture: str = "sm_90") -> Launch:
    return Launch(BlockShape(1, 32), architecture, -1)


def test_a_later_launch_is_that_of_triton(launched: list[Any], searches: list[Any]) -> None:
    launch = new_launch()
    for given in CALLS:
        many_kinds_kernel[(1,)](*given, **launch.options)
    wanted = launched.copy()
    assert len({id(compiled) for compiled, _ in wanted}) > 25
    for most in (len(CALLS), 0):
        launched.clear(), searches.clear()
        for given in CALLS:
            launch(many_kinds_kernel, 1, *given[:5], flag=given[5], pair=given[6], FORM=given[7])
        assert [compiled for compiled, _ in launched] == [compiled for compiled, _ in wanted]
        assert len(searches) <= most


def test_arguments_in_another_order_are_put_in_that_of_the_kernel(launched: list[Any]) -> None:
    launch, names = new_launch(), many_kinds_kernel.arg_names
    for _ in range(2):
        launch(many_kinds_kernel, 1, **dict(reversed([*zip(names, USUAL, strict=True)])))
    for _, given in launched:
        assert all(one is wanted for one, wanted in zip(given, USUAL, strict=True))


def test_a_launch_of_no_program_compiles_nothing(searches: list[Any]) -> None:
    new_launch()(many_kinds_kernel, 0, *USUAL)
    assert not searches


@pytest.mark.parametrize("odd", [torch.float32, Number.ONE, "a"])
def test_an_argument_of_another_type_is_refused(odd: Any) -> None:
    with pytest.raises(TypeError, match="a kernel takes numbers, tensors, tuples of them and None"):
        new_launch()(many_kinds_kernel, 1, *USUAL[:2], odd, *USUAL[3:])


@pytest.mark.parametrize("named", [{}, {"FORM": USUAL[7], "num_stages": 2}])
def test_another_number_of_arguments_is_refused(launched: list[Any], named: dict[str, Any]) -> None:
    launch = new_launch()
    launch(many_kinds_kernel, 1, *USUAL)
    expected = f"takes 8 arguments, got 7 and {[*named]}"
    with pytest.raises(TypeError, match=re.escape(expected)):
        launch(many_kinds_kernel, 1, *USUAL[:7], **named)
    with pytest.raises(KeyError, match="FORM"):
        launch(many_kinds_kernel, 1, *USUAL[:7], SHAPE=USUAL[7])
    assert len(launched) == 1


def test_an_amd_gpu_is_left_to_triton(searches: list[Any]) -> None:
    """There a variant depends on the size of tensors, too."""
    launch = new_launch("gfx942")
    for _ in range(2):
        launch(many_kinds_kernel, 1, *USUAL)
    assert len(searches) == 2


def test_a_kernel_with_a_hook_is_left_to_triton(
    searches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = new_launch()
    launch(many_kinds_kernel, 1, *USUAL)
    monkeypatch.setattr(many_kinds_kernel, "pre_run_hooks", [lambda *_, **__: None])
    launch(many_kinds_kernel, 1, *USUAL)
    assert len(searches) == 2


@pytest.mark.parametrize(("last", "times"), [([3, 5], 2), ([99, 0], 1)])
def test_a_version_of_triton_that_is_not_known_is_left_alone(
    searches: list[Any], last: list[int], times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "KNOWN_VERSIONS", ([3, 4], last))
    launches.is_known_triton.cache_clear()
    launch = new_launch()
    launches.is_known_triton.cache_clear()
    for _ in range(2):
        launch(many_kinds_kernel, 1, *USUAL)
    assert len(searches) == times


@pytest.mark.slow
@pytest.mark.parametrize("version", OTHER_VERSIONS)
def test_so_it_is_with_other_versions(version: str, tmp_path: Path) -> None:
    folder = folder_of(version)
    if not folder.is_dir():
        pytest.skip(f"Triton {version} is not in {folder}: `make test` puts it there")
    paths = [str(folder), os.environ.get("PYTHONPATH", "")]
    environment = {k: v for k, v in os.environ.items() if k[:6] not in ("TRITON", "PYTEST")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    test = f"{Path(__file__).relative_to(ROOT)}::test_a_later_launch_is_that_of_triton"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_what_is_compiled_in_the_background_is_asked_for_again(
    launched: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(many_kinds_kernel, "run", lambda *_, **__: asked.append(1) or object())
    launch = new_launch()
    for _ in range(2):
        launch(many_kinds_kernel, 1, *USUAL)
    assert len(asked) == 2
