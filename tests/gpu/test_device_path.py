"""The device path on real hardware: correct, repeatable, asynchronous, capturable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.conftest import capture, device_events, no_waiting, replay
from trajpack import PackedBatch, Trajectory, TrajectoryBuffer, Turn
from trajpack.kernels.credit.discounted_returns import discounted_returns
from trajpack.kernels.fields.build import TokenFields, build
from trajpack.testing import assert_same_bits, boundaries, random_build_inputs

pytestmark = pytest.mark.gpu

LAYOUTS = ("merged", "turns")
SCANNED = {"turn_returns", "returns"}
"""Fields that hold sums; all others are moved, bit for bit."""


def random_trajectories(num: int, longest: int, seed: int = 0) -> list[Trajectory]:
    """Conversations of 1 to 6 turns, each with up to ``longest`` new tokens a turn."""
    rng = np.random.default_rng(seed)
    trajectories = []
    for index in range(num):
        turns, seen = [], rng.integers(0, 2**31 - 1, 0)
        for _ in range(rng.integers(1, 7)):
            prompt = np.concatenate([seen, rng.integers(0, 150_000, rng.integers(1, longest))])
            completion = rng.integers(0, 150_000, rng.integers(0, longest))
            logprobs = -rng.random(len(completion))
            version = int(rng.integers(5))
            turns.append(Turn(prompt, completion, logprobs, rng.normal(), False, version, version))
            seen = np.concatenate([prompt, completion]) if rng.random() < 0.8 else prompt[:1]
        trajectories.append(Trajectory(str(index), turns, turn_discount=rng.random()))
    return trajectories


def filled_buffer(trajectories: list[Trajectory], device: str = "cuda") -> TrajectoryBuffer:
    buffer = TrajectoryBuffer(device=device)
    for trajectory in trajectories:
        buffer.add(trajectory)
    return buffer


def assert_close_to(actual: torch.Tensor, exact: np.ndarray) -> None:
    """Assert float32 roundings of ``exact``: 1 ulp, and what float64 loses of the largest."""
    allowed = np.spacing(np.abs(exact).astype(np.float32)) + 1e-13 * np.abs(exact).max(initial=0)
    error = np.abs(actual.detach().cpu().double().numpy() - exact)
    assert (error <= allowed).all(), f"off by {(error / allowed).max():.3g} times the tolerance"


def assert_same_fields(actual: TokenFields, expected: TokenFields) -> None:
    for name, *pair in zip(TokenFields._fields, actual, expected, strict=True):
        assert_same_bits(*pair, name)


def assert_same_batch(actual: PackedBatch, expected: PackedBatch, skip: Any = ()) -> None:
    for name, tensor in expected.tensors().items():
        if name not in skip:
            assert_same_bits(actual.tensors()[name], tensor, name)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_gradients_on_the_device_are_those_on_the_host(impl: Any) -> None:
    lengths = [70, 0, 3, 1, 400]
    grads = []
    for device in ("cpu", "cuda"):
        rewards = torch.zeros(sum(lengths), dtype=torch.float64, device=device).requires_grad_()
        weight = torch.linspace(-1, 1, sum(lengths), device=device)
        chosen = impl if device == "cuda" else "torch"
        returns = discounted_returns(rewards, boundaries(lengths).to(device), 0.9, chosen)
        (returns * weight).sum().backward()
        grads.append(rewards.grad.cpu())  # type: ignore[union-attr]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("shape", ["8 million tokens", "tiny runs", "few long runs", "tile edges"])
def test_build_equals_the_host_bit_for_bit(shape: str, impl: Any) -> None:
    rng = np.random.default_rng(0)
    lengths = {
        "8 million tokens": rng.integers(50, 4000, 4096),
        "tiny runs": rng.integers(0, 9, 200_000),
        "few long runs": np.array([1_000_000, 0, 3, 70_000]),
        "tile edges": rng.choice([0, 1, 1023, 1024, 1025, 2048], 300),
    }[shape].tolist()
    *inputs, num_tokens = random_build_inputs(rng, lengths, num_turns=1000)
    expected = build(*inputs, num_tokens, "torch")  # type: ignore[arg-type]
    words, runs, returns = (tensor.cuda() for tensor in inputs)  # type: ignore[attr-defined]
    assert_same_fields(build(words, runs, returns, num_tokens, impl), expected)


def test_kernels_repeat_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    words, runs, returns, num_tokens = random_build_inputs(rng, rng.integers(0, 3000, 500).tolist())
    inputs = words.cuda(), runs.cuda(), returns.cuda(), num_tokens
    rewards, lengths = torch.randn(100_000, device="cuda"), [50_000, 49_000, *[10] * 100]
    cu_seqlens = boundaries(lengths).cuda()
    fields = build(*inputs)
    scanned = discounted_returns(rewards, cu_seqlens, 0.999)
    for _ in range(20):
        assert_same_fields(build(*inputs), fields)
        assert_same_bits(discounted_returns(rewards, cu_seqlens, 0.999), scanned)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num", "longest"), [(1, 2), (300, 20), (256, 2500)])
def test_a_batch_is_the_same_on_device_and_host(layout: Any, num: int, longest: int) -> None:
    trajectories = random_trajectories(num, longest)
    on_host, on_device = (
        filled_buffer(trajectories, device).pack(layout=layout) for device in ("cpu", "cuda")
    )
    assert_same_batch(on_device, on_host, skip=SCANNED)
    for name in SCANNED:
        assert_close_to(on_device.tensors()[name], on_host.tensors()[name].double().numpy())
    assert on_device.seqlens == on_host.seqlens
    assert on_device.unpack() == trajectories


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pack_never_waits_for_the_device(layout: Any) -> None:
    buffer = filled_buffer(random_trajectories(100, 300))
    expected = buffer.pack(layout=layout)  # compiles
    with no_waiting():
        batch = buffer.pack(layout=layout)
    assert_same_batch(batch, expected)


def test_a_wait_for_the_device_would_be_noticed() -> None:
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(3, device="cuda").sum().item()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_pack_is_captured_in_a_graph(layout: Any) -> None:
    buffer = filled_buffer(random_trajectories(100, 300))
    expected = buffer.pack(layout=layout)
    graph, captured = capture(lambda: buffer.pack(layout=layout))
    for tensor in captured.tensors().values():
        tensor.zero_()
    for _ in range(3):
        replay(graph)
    assert_same_batch(captured, expected)


def test_a_pack_keeps_to_the_current_stream() -> None:
    buffer = filled_buffer(random_trajectories(100, 300))
    expected = buffer.pack()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        batch = buffer.pack()
        assert not stream.query(), "the host did not wait for the copy or the kernels"
    stream.synchronize()
    assert_same_batch(batch, expected)


def test_a_batch_in_flight_survives_the_next_fill_of_the_buffer() -> None:
    first, second = random_trajectories(50, 2000), random_trajectories(50, 2000, seed=1)
    buffer = filled_buffer(first)
    torch.cuda._sleep(100_000_000)  # the copy has not begun when the buffer is filled again
    batch = buffer.pack()
    buffer.clear()
    for trajectory in second:
        buffer.add(trajectory)
    assert batch.unpack() == first
    assert buffer.pack().unpack() == second


def test_the_device_sees_one_copy_and_two_kernels() -> None:
    buffer = filled_buffer(random_trajectories(100, 300))
    names = device_events(buffer.pack)
    assert sum("Memcpy" in name for name in names) == 1, names
    assert sorted(n for n in names if "Mem" not in n) == ["build_kernel", "scan_kernel"], names
