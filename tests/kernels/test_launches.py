"""Device work of `pack`: launches, compiled variants, one copy, no synchronisation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.conftest import builds
from trajpack import PackedBatch, Trajectory, TrajectoryBuffer, Turn
from trajpack.kernels.runs import TILE, in_tiles
from trajpack.packing.buffer import buffer as buffer_module

LAYOUTS = ("merged", "turns")
VIEWS = {"aten.slice.Tensor", "aten.view.default", "aten.view.dtype"}
VIEWS |= {"aten.detach.default", "aten.empty.memory_format"}
VIEWS |= {"aten.set_.source_Storage_storage_offset"}
OPS = {"trajpack.credit_scan.default": 1, "trajpack.build.default": 1}


class RecordedOps(TorchDispatchMode):
    """Counts the ops that run on the device, or bring something to it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, op: Any, types: Any, arguments: Any = (), keywords: Any = None
    ) -> Any:
        result = op(*arguments, **(keywords or {}))
        results = result if isinstance(result, (list, tuple)) else [result]
        if any(isinstance(r, torch.Tensor) and r.device.type == self.device for r in results):
            self.counts[str(op)] += 1
        return result


def filled_buffer(device: str = "meta", num_trajectories: int = 3) -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(device=device)
    for index in range(num_trajectories):
        first = Turn([1, 2], [3] * index, [-0.5] * index, reward=1.0)
        second = Turn([1, 2, *[3] * index, 4], [5, 6], [-1.0, -2.0])
        buffer.add(Trajectory(str(index), [first, second], turn_discount=0.5))
    return buffer


def ops_of_pack(buffer: TrajectoryBuffer, layout: Any) -> Counter[str]:
    with RecordedOps(buffer.device.type) as recorded:
        buffer.pack(layout=layout)
    return recorded.counts


def unexecuted(executor: Any, work: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """Return what work returns, and the kernels that it launches, with their programs."""
    executor.is_running = False
    executor.launched.clear()
    executor.programs.clear()
    result = work()
    return result, dict(zip(executor.launched, executor.programs, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("num_trajectories", "num_turns"), [(0, 0), (1, 1), (1, 17), (1, 400), (16, 1), (1000, 5)]
)
def test_a_pack_makes_two_launches_that_cover_it_at_any_size(
    layout: Any, num_trajectories: int, num_turns: int, executor: Any
) -> None:
    """Up to 32 trajectories of a few turns share a program of the scan: four blocks of 256."""
    turns = [Turn([1, 2] * (i + 1), [3], [-0.5]) for i in range(num_turns)]
    buffer = TrajectoryBuffer(device="cpu")
    buffer.extend(Trajectory(str(i), turns) for i in range(num_trajectories))
    batch, launched = unexecuted(executor, lambda: buffer.pack(layout, impl="triton"))
    width = num_turns + 8
    share = min(1024 // width if width <= 128 else 1, 32)
    walks = -(-num_trajectories // share)
    expected = {
        "scan_kernel": walks if share > 1 else -(-walks // 32) * 32,
        "build_kernel": -(-batch.num_tokens // TILE),
    }
    assert launched == (expected if num_trajectories else {})
    assert in_tiles(batch.num_tokens) % TILE == 0, "stores are not masked"


@builds("90")
def test_the_launchers_read_no_value(compiled: Any) -> None:
    on_meta = compiled["launches_on_meta"]  # every launch of the build ran on tensors without
    assert sum(on_meta["launches"].values()) >= on_meta["launchers"] > 0


@builds("90")
def test_padding_and_gathering_are_one_launch_each(compiled: Any) -> None:
    launches = compiled["launches_on_meta"]["launches"]
    kernels = ("pad_kernel", "unpad_kernel", "gather_fields_kernel")
    for kernel in kernels:
        assert launches[kernel] == len(compiled.variants(kernel))


@builds("90")
def test_triton_without_a_gpu_is_refused_with_a_way_out(compiled: Any) -> None:
    assert compiled["refusal"] == (
        "pack: impl='triton' needs cuda tensors, got tensors on cpu; "
        "use impl='torch', or set TRITON_INTERPRET=1 to run the kernel on the host"
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_trajectories", [1, 3, 50])
def test_a_pack_copies_once_and_computes_only_in_its_own_ops(
    layout: str, num_trajectories: int
) -> None:
    counts = ops_of_pack(filled_buffer(num_trajectories=num_trajectories), layout)
    assert counts.pop("aten._to_copy.default") == 1
    assert {op: count for op, count in counts.items() if op not in VIEWS} == OPS


def test_a_value_read_from_the_device_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    returns_of_turns = buffer_module.returns_of_turns

    def reading_returns(region: Any, most_turns: int, impl: Any) -> Any:
        assert int(region.tables["runs"][-1, 0].item()) > 0
        return returns_of_turns(region, most_turns, impl)

    monkeypatch.setattr(buffer_module, "returns_of_turns", reading_returns)
    assert isinstance(filled_buffer("cpu").pack(), PackedBatch)
    with pytest.raises(RuntimeError, match="meta"):
        filled_buffer().pack()


def test_a_second_copy_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    credit_scan = buffer_module.credit_scan

    def copying_scan(scan: Any, *names: str) -> Any:
        ones = torch.ones(scan.gammas.shape, dtype=torch.float64).to(scan.gammas.device)
        return credit_scan(scan._replace(gammas=ones), *names)

    monkeypatch.setattr(buffer_module, "credit_scan", copying_scan)
    assert ops_of_pack(filled_buffer(), "merged")["aten._to_copy.default"] == 2
