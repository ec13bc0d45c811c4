"""Padding and gathering on real hardware: the bits of the host, asynchronous, capturable."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gpu.conftest import capture, device_events, no_waiting, replay
from trajpack.kernels.rearrange.pad import pad, unpad
from trajpack.testing import assert_same_bits, boundaries

pytestmark = pytest.mark.gpu

SIDES = ("left", "right")


def test_offsets_past_two_and_four_billion_elements_are_right() -> None:
    """Three rows of 1.1 billion words: 13 GB to read, 9 GB to write."""
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GB of free device memory")
    width = 65_536
    padded = torch.zeros(3, 17_000, width, dtype=torch.int32, device="cuda")
    padded[:, :, 0] = torch.arange(3 * 17_000, device="cuda", dtype=torch.int32).view(3, 17_000)
    padded[:, :, -1] = -padded[:, :, 0]
    lengths = [16_999, 3, 17_000]
    ends = boundaries(lengths).cuda()
    packed = unpad(padded, ends, sum(lengths))
    expected = torch.cat([padded[i, :length, 0] for i, length in enumerate(lengths)])
    del padded
    assert torch.equal(packed[:, 0], expected)
    assert torch.equal(packed[:, -1], -expected)
    assert not packed[:, 1:-1].any()
    again = pad(packed, ends, 17_000, value=7)
    assert torch.equal(again[2, :, 0], expected[-17_000:])
    assert torch.equal(again[0, :-1, -1], -expected[:16_999])
    assert (again[1, 3:, 5] == 7).all()


def test_unpadding_logits_takes_the_memory_of_the_result_and_no_more() -> None:
    logits = torch.zeros(8, 513, 32_000, dtype=torch.bfloat16, device="cuda")
    lengths = [512, 3, 100, 0, 512, 512, 9, 80]
    ends = boundaries(lengths).cuda()
    unpad(logits[:, :-1], ends, sum(lengths))  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed = unpad(logits[:, :-1], ends, sum(lengths))
    assert torch.cuda.max_memory_allocated() - before <= packed.nbytes + 2**22


def cases() -> list[Callable[[], torch.Tensor]]:
    lengths = [70, 0, 3, 1, 400]
    ends, packed = boundaries(lengths).cuda(), torch.randn(sum(lengths), 8, device="cuda")
    padded = torch.randn(5, 400, 8, device="cuda")
    return [
        lambda: pad(packed, ends, 400, value=0.5),
        lambda: unpad(padded, ends, sum(lengths)),
    ]


@pytest.mark.parametrize("index", range(2))
def test_nothing_waits_for_the_device(index: int) -> None:
    call = cases()[index]
    expected = call()  # compiles
    with no_waiting():
        actual = call()
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("index", range(2))
def test_each_is_one_kernel_without_a_copy_and_captured_in_a_graph(index: int) -> None:
    call = cases()[index]
    graph, captured = capture(call)
    captured.zero_()
    replay(graph)
    assert_same_bits(captured, call())
    kernel = ["pad_kernel", "unpad_kernel"][index]
    assert device_events(call) == [kernel]


def test_boundaries_that_make_no_sense_reach_no_other_memory() -> None:
    memory = torch.full((100_000,), 9, device="cuda")
    memory[50_000:50_011] = 1
    for wrong in ([0, 4, 900], [-5, -2, 3], [700, 800, 900], [0, 9, 2, 11, -(2**31), 2**31 - 1]):
        ends = torch.tensor(wrong, dtype=torch.int32, device="cuda")
        for side in SIDES:
            padded = pad(memory[50_000:50_011], ends, 5, side=side)  # type: ignore[arg-type]
            assert set(padded.unique().tolist()) <= {0, 1}
            rows = torch.ones(len(wrong) - 1, 5, device="cuda", dtype=torch.int64)
            taken = unpad(rows, ends, 11, side=side)  # type: ignore[arg-type]
            assert set(taken.unique().tolist()) <= {0, 1}
