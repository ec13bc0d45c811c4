"""Packing on the host against the way of agents that extend Python lists token by token.

``make bench`` prints both. Every contender's result is checked against the batch before it is
timed. The lists hold what the list-based agent this library replaces collects: token ids,
prompt mask and log-probabilities; the batch holds nine fields.
"""

import time

import numpy as np
import pytest
import torch

from benchmarks.workloads import multi_turn
from trajpack import TrajectoryBuffer

REQUIRED_RATIO = 10


@pytest.fixture(scope="module")
def trajectories():
    return multi_turn()


@pytest.fixture(scope="module")
def buffer(trajectories):
    filled = TrajectoryBuffer(device="cpu")
    for trajectory in trajectories:
        filled.add(trajectory)
    return filled


@pytest.fixture(scope="module")
def turns_as_lists(trajectories):
    """What an engine returns: plain lists, made beforehand and not timed."""
    return [
        (turn.prompt_ids.tolist(), turn.completion_ids.tolist(), turn.completion_logprobs.tolist())
        for trajectory in trajectories
        for turn in trajectory.turns
    ]


def assemble_from_lists(turns):
    input_ids, prompt_mask, logprobs = [], [], []
    for prompt, completion, completion_logprobs in turns:
        input_ids.extend(prompt)
        input_ids.extend(completion)
        prompt_mask.extend([True] * len(prompt))
        prompt_mask.extend([False] * len(completion))
        logprobs.extend([0.0] * len(prompt))
        logprobs.extend(completion_logprobs)
    return (
        torch.tensor(input_ids, dtype=torch.int64),
        torch.tensor(prompt_mask, dtype=torch.bool),
        torch.tensor(logprobs, dtype=torch.float32),
    )


def check(batch, assembled):
    for left, right in zip(
        (batch.input_ids, batch.prompt_mask, batch.rollout_logprobs), assembled, strict=True
    ):
        assert torch.equal(left, right)


@pytest.mark.parametrize("layout", ["turns", "merged"])
def bench_pack_from_a_filled_buffer(benchmark, buffer, layout):
    batch = buffer.pack(layout=layout)
    benchmark.extra_info.update(tokens=batch.num_tokens, bytes=38 * batch.num_tokens)
    benchmark.pedantic(buffer.pack, kwargs={"layout": layout}, rounds=20, warmup_rounds=3)


def bench_add_from_arrays(benchmark, trajectories):
    buffer = TrajectoryBuffer(device="cpu")

    def fill():
        buffer.clear()
        for trajectory in trajectories:
            buffer.add(trajectory)

    benchmark.pedantic(fill, rounds=10, warmup_rounds=2)
    assert buffer.pack("turns").unpack() == trajectories


def bench_python_lists(benchmark, buffer, turns_as_lists):
    check(buffer.pack(layout="turns"), assemble_from_lists(turns_as_lists))
    benchmark.pedantic(assemble_from_lists, args=(turns_as_lists,), rounds=3)


def bench_pack_is_ten_times_faster_than_lists(benchmark, buffer, turns_as_lists):
    """Both in turn, in one run, so that a busy machine slows both."""
    check(buffer.pack(layout="turns"), assemble_from_lists(turns_as_lists))

    def both():
        begin = time.perf_counter()
        assemble_from_lists(turns_as_lists)
        middle = time.perf_counter()
        buffer.pack(layout="turns")
        return (middle - begin) / (time.perf_counter() - middle)

    ratios = [both() for _ in range(5)]
    benchmark.pedantic(both, rounds=1)
    ratio = float(np.median(ratios))
    benchmark.extra_info["ratio"] = ratio
    print(f"\npack from a filled buffer is {ratio:.1f} times faster than Python lists")
    assert ratio >= REQUIRED_RATIO
