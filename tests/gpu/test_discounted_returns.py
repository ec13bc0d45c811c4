"""Discounted returns on real hardware, where the longest segment is known and where it is not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.gpu.conftest import capture, no_waiting, replay
from trajpack.kernels.credit.discounted_returns import discounted_returns
from trajpack.kernels.scan.credit_scan_triton import launch
from trajpack.kernels.scan.scan_inputs import Scan
from trajpack.testing import assert_same_bits, boundaries, returns_by_loop

pytestmark = pytest.mark.gpu

SHAPES = {
    "millions of short ones": lambda rng: rng.integers(0, 9, 2_000_000),
    "a few of a million": lambda rng: np.array([1_000_000, 0, 1_000_001, 999_999]),
    "turns": lambda rng: rng.integers(50, 4001, 1000),
    "edges": lambda rng: rng.choice([0, 1, 31, 511, 512, 513, 1024, 1025, 2049, 32_769], 200),
    "long among short": lambda rng: np.array([*rng.integers(0, 9, 9999), 300_000, 7, 70_000, 1]),
}


def inputs_of(shape: str) -> tuple[torch.Tensor, list[int], np.ndarray]:
    rng = np.random.default_rng(0)
    lengths = SHAPES[shape](rng).tolist()
    discounts = rng.choice([0.0, 0.5, 0.99, 0.9999, 1.0, -0.9], len(lengths))
    return torch.from_numpy(rng.standard_normal(sum(lengths))).float(), lengths, discounts


def on_device(
    rewards: torch.Tensor, lengths: list[int], discounts: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return rewards.cuda(), boundaries(lengths).cuda(), torch.from_numpy(discounts).cuda()


def launched(tensors: Sequence[torch.Tensor], max_seqlen: int | None) -> torch.Tensor:
    """Return what the kernels write for a bound."""
    rewards, cu_seqlens, discounts = tensors
    num = rewards.shape[0]
    scan = Scan(cu_seqlens, rewards, gammas=discounts, kind="returns")
    returns = torch.empty(num, device=rewards.device)
    launch(scan._replace(max_seqlen=max_seqlen), (returns,))
    return returns


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_known_bound_gives_the_same_bits_and_both_equal_the_loop(
    shape: str, dtype: torch.dtype
) -> None:
    rewards, lengths, discounts = inputs_of(shape)
    rewards = rewards.to(dtype)
    tensors = on_device(rewards, lengths, discounts)
    returns = launched(tensors, None)
    assert_same_bits(launched(tensors, max(lengths)), returns)
    for _ in range(3):
        assert_same_bits(discounted_returns(*tensors), returns)
    exact = returns_by_loop(rewards.numpy(), lengths, discounts)
    allowed = np.spacing(np.abs(exact).astype(np.float32)) + 1e-13 * np.abs(exact).max()
    error = np.abs(returns.cpu().double().numpy() - exact)
    assert (error <= allowed).all(), f"off by {(error / allowed).max():.3g} times the tolerance"


def test_a_segment_has_the_same_bits_whatever_it_is_packed_with() -> None:
    rewards, lengths, discounts = inputs_of("edges")
    together = discounted_returns(*on_device(rewards, lengths, discounts)).split(lengths)
    for index, part in enumerate(rewards.split(lengths)):
        alone = on_device(part, lengths[index : index + 1], discounts[index : index + 1])
        for bound in (None, lengths[index]):
            assert_same_bits(discounted_returns(*alone, max_seqlen=bound), together[index])


def test_long_segments_are_captured_in_a_graph_and_never_wait_for_the_device() -> None:
    tensors = on_device(*inputs_of("long among short"))
    graph, captured = capture(lambda: discounted_returns(*tensors))
    captured.zero_()
    replay(graph)
    with no_waiting():
        expected = discounted_returns(*tensors)
    assert_same_bits(captured, expected)
