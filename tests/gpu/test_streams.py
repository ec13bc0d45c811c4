"""On real hardware: a batch that is packed on one stream and read on another."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trajpack import PackedBatch, TrajectoryBuffer
from trajpack.testing import assert_same_bits, random_trajectory

pytestmark = pytest.mark.gpu


def filled_buffer(seed: int = 0) -> TrajectoryBuffer:
    rng = np.random.default_rng(seed)
    buffer = TrajectoryBuffer(device="cuda")
    buffer.extend([random_trajectory(rng, str(i), num_turns=3) for i in range(40)])
    return buffer


def addresses(batch: PackedBatch) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in batch.tensors().values()}


def packed_beside(side: torch.cuda.Stream, buffer: TrajectoryBuffer) -> PackedBatch:
    with torch.cuda.stream(side):
        batch = buffer.pack()
    torch.cuda.current_stream().wait_stream(side)
    return batch


def test_memory_that_another_stream_reads_is_not_handed_out() -> None:
    buffer, side = filled_buffer(), torch.cuda.Stream()
    expected = buffer.pack()
    packed_beside(side, buffer)  # compiles
    torch.cuda.synchronize()
    batch = packed_beside(side, buffer)
    batch.record_stream(torch.cuda.current_stream())
    held, last = addresses(batch), batch.cu_turns
    torch.cuda._sleep(2_000_000_000)
    read = {name: tensor.clone() for name, tensor in batch.tensors().items()}
    del batch, last
    again = packed_beside(side, buffer)
    assert not held & addresses(again), "the sleeping stream has not read it yet"
    torch.cuda.synchronize()
    for name, tensor in expected.tensors().items():
        assert_same_bits(read[name], tensor, name)


def test_without_a_record_it_is_handed_out_at_once() -> None:
    """The hazard that `record_stream` is for; and so that the test above can fail."""
    buffer, side = filled_buffer(), torch.cuda.Stream()
    packed_beside(side, buffer)
    torch.cuda.synchronize()
    batch = packed_beside(side, buffer)
    held = addresses(batch)
    del batch
    assert held & addresses(packed_beside(side, buffer))
    torch.cuda.synchronize()
