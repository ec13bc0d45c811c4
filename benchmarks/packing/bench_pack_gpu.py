"""Packing for a GPU: host enqueue, wall, device time, and the bytes written against a copy.

``make bench-gpu`` runs it on a machine with a CUDA device. A batch is checked against the
host's before anything is timed.
"""

import time

import pytest
import torch

from benchmarks.workloads import multi_turn
from trajpack import TrajectoryBuffer
from trajpack.testing import assert_batches_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BYTES_PER_TOKEN = 38


def filled(device):
    buffer = TrajectoryBuffer(device=device)
    for trajectory in multi_turn():
        buffer.add(trajectory)
    return buffer


def device_ms(work, repeats=20):
    """Median time between two events around ``work``, in milliseconds."""
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[repeats // 2]


@pytest.mark.parametrize("layout", ["merged", "turns"])
def bench_pack_on_the_device(benchmark, layout):
    buffer = filled("cuda")
    batch = buffer.pack(layout=layout)
    assert_batches_equal(batch, filled("cpu").pack(layout=layout))

    def pack_and_wait():
        buffer.pack(layout=layout)
        torch.cuda.synchronize()

    pack_and_wait()
    begin = time.perf_counter()
    buffer.pack(layout=layout)
    enqueued = time.perf_counter() - begin
    torch.cuda.synchronize()
    written = batch.num_tokens * BYTES_PER_TOKEN
    source = torch.empty(written // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    benchmark.extra_info.update(
        device=torch.cuda.get_device_name(),
        tokens=batch.num_tokens,
        enqueue_us=1e6 * enqueued,
        device_ms=device_ms(lambda: buffer.pack(layout=layout)),
        copy_of_the_bytes_written_ms=device_ms(lambda: target.copy_(source)),
    )
    print(f"\n{layout}: {benchmark.extra_info}")
    benchmark.pedantic(pack_and_wait, rounds=20, warmup_rounds=3)
