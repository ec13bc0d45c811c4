"""Device work of `pack`: launches, compiled variants, one copy, no synchronisation."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.conftest import builds
from trajpack import PackedBatch, Trajectory, TrajectoryBuffer, Turn
from trajpack.kernels.fields.build import TOKEN_BYTES
from trajpack.kernels.runs import TILE
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


@builds("90")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pack_makes_two_launches_at_any_size(compiled: Any, layout: str) -> None:
    cases = [case for case in compiled["launches"] if case["layout"] == layout]
    assert {case["num_trajectories"] for case in cases} == {0, 1, 10, 16, 1000}
    for case in cases:
        kernels = [kernel for kernel, _ in case["launches"]]
        expected = ["scan_kernel", "build_kernel"] if case["num_tokens"] else []
        assert kernels == expected, case


@builds("90")
def test_grids_cover_the_batch_and_no_more(compiled: Any) -> None:
    """Up to 32 trajectories of a few turns share a program of the scan: four blocks of 256."""
    for case in compiled["launches"]:
        if case["num_tokens"]:
            tiles = -(-case["num_tokens"] // TILE)
            walked = case["num_trajectories"]
            width = -(-case["num_turns"] // walked) + 8
            share = 1024 // width if width <= 128 else 1
            assert [grid for _, grid in case["launches"]] == [
                [-(-walked // min(share, 32)) if share > 1 else -(-walked // 32) * 32, 1, 1],
                [tiles, 1, 1],
            ], case


@builds("90")
def test_fields_are_allocated_in_whole_tiles_for_the_unmasked_stores(
    compiled: Any,
) -> None:
    for case in compiled["launches"]:
        if case["num_tokens"]:
            tiles = -(-case["num_tokens"] // TILE)
            assert case["field_bytes"] == [tiles * TILE * TOKEN_BYTES], case


@builds("90")
def test_ragged_sizes_share_the_compiled_variants(compiled: Any) -> None:
    tokens = {case["num_tokens"] for case in compiled["launches"]}
    assert len(tokens) > 12, "sizes that divide by 16 and sizes that do not"
    assert [case["variants"] for case in compiled["launches"]] == [
        2 if case["num_trajectories"] else 0 for case in compiled["launches"]
    ]


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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pack_needs_no_value_from_the_device(layout: Any) -> None:
    on_host, on_meta = (filled_buffer(device).pack(layout=layout) for device in ("cpu", "meta"))
    for name, tensor in on_host.tensors().items():
        same = on_meta.tensors()[name]
        assert (same.shape, same.dtype, same.device.type) == (tensor.shape, tensor.dtype, "meta")
    assert on_meta.seqlens == on_host.seqlens
    assert on_meta.max_seqlen == on_host.max_seqlen


def test_a_value_read_from_the_device_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    returns_of_turns = buffer_module.returns_of_turns

    def reading_returns(region: Any, counts: Any, impl: Any) -> Any:
        assert int(region.table("runs", counts.spans + 1)[-1, 0].item()) == counts.tokens
        return returns_of_turns(region, counts, impl)

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
