"""The table of block shapes: conditions of correct kernels, and its lookup."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.ptx.calls import Drawn, counted_calls
from tests.ptx.executor import on_executor
from trajpack.kernels import block_shapes, launches
from trajpack.kernels.block_shapes import DEFAULT, SHAPES, BlockShape, block_shape
from trajpack.kernels.launches import launch_on
from trajpack.kernels.runs import TILE


@pytest.fixture(autouse=True)
def _on_executor() -> None:
    """No kernel runs here, and the executor would give the host an architecture."""


@pytest.fixture
def on_architecture(monkeypatch: pytest.MonkeyPatch):
    """Make every device one of some architecture."""

    def set_architecture(name: str) -> None:
        monkeypatch.setattr(launches, "architecture_of", lambda _: name)
        launch_on.cache_clear()

    yield set_architecture
    launch_on.cache_clear()


@pytest.mark.parametrize("kernel", SHAPES)
def test_every_shape_can_be_launched(kernel: str) -> None:
    shape = SHAPES[kernel]
    assert shape.block & (shape.block - 1) == 0, "a power of 2"
    assert shape.threads in (32, 64, 128, 256, 512)
    if kernel.startswith(("build_kernel", "gather_fields_kernel", "select_tokens_kernel")):
        assert TILE % shape.block == 0, "outputs are allocated in tiles, and written to their end"


def test_a_kernel_has_its_shape_on_architectures_without_one_of_their_own() -> None:
    assert block_shape("whiten", "sm_999") == SHAPES["whiten"]


@pytest.mark.parametrize("kernel", ["credit_scan", "wide_scan", "whiten"])
def test_blocks_that_settle_the_order_of_sums_are_the_same_everywhere(kernel: str) -> None:
    shapes = [shape for name, shape in SHAPES.items() if name.startswith(kernel)]
    assert {shape.block for shape in shapes} == {SHAPES[kernel].block}
    assert SHAPES["credit_scan"].block == SHAPES["wide_scan"].block


def test_an_architecture_has_a_shape_of_its_own(on_architecture, monkeypatch) -> None:
    monkeypatch.setitem(SHAPES, "build_kernel", BlockShape(1024, 256))
    monkeypatch.setitem(SHAPES, "build_kernel on sm_100", BlockShape(512, 64))
    shapes = {}
    for name in ("sm_90", "sm_100"):
        on_architecture(name)
        launch = launch_on("build_kernel", 0)
        shapes[name] = launch.block, launch.options
    assert shapes == {
        "sm_90": (1024, {"num_warps": 8, "enable_fp_fusion": False}),
        "sm_100": (512, {"num_warps": 2, "enable_fp_fusion": False}),
    }


def test_waves_are_wider_than_warps_and_have_no_limit_of_registers(on_architecture) -> None:
    options = {}
    for name in ("sm_80", "gfx942", "gfx1100"):
        on_architecture(name)
        options[name] = launch_on("build_kernel", 0).options
    assert options == {
        "sm_80": {"num_warps": 8, "enable_fp_fusion": False, "maxnreg": 48},
        "gfx942": {"num_warps": 4, "enable_fp_fusion": False},
        "gfx1100": {"num_warps": 8, "enable_fp_fusion": False},
    }


@pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        ("spread_kernel", BlockShape(1024, 128)),
        ("spread_kernel", BlockShape(2048, 128)),
        ("group_advantages_kernel, small", BlockShape(512, 32)),
        ("sum_slots_kernel", BlockShape(512, 64)),
    ],
)
def test_a_shape_that_is_set_is_launched_and_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, kernel: str, shape: BlockShape
) -> None:
    """So a process can time several shapes in turn."""
    calls = dict(counted_calls(Drawn(np.array([3, 1, 40, 2500] * 20))))

    def results() -> list[tuple[int, torch.Tensor]]:
        found = []
        for name in ("GRPO", "loss_weights"):
            with on_executor(counts=True) as executor:
                result = calls[name]("triton")
            programs = sum(report.programs for report in executor.reports.values())
            found.append((programs, getattr(result, "advantages", result)))
        return found

    before = results()
    monkeypatch.setitem(SHAPES, kernel, shape)
    after = results()
    assert [programs for programs, _ in before] != [programs for programs, _ in after]
    for (_, expected), (_, found) in zip(before, after, strict=True):
        assert torch.equal(found, expected)


def test_architectures_of_amd_are_named_without_their_features(monkeypatch) -> None:
    found = SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    assert block_shapes.architecture_of(0) == "gfx942"


def test_the_host_has_the_default() -> None:
    assert block_shapes.architecture_of(torch.zeros(1).get_device()) == DEFAULT
    assert block_shapes.architecture_of(torch.zeros(1, device="meta").get_device()) == DEFAULT
