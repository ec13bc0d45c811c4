"""What trajectories have as a whole, by loops over their turns."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from trajpack.kernels.block_shapes import DEFAULT, block_shape
from trajpack.kernels.credit.turns import scores_of_trajectories
from trajpack.testing import assert_same_bits, boundaries

BLOCK = block_shape("scores_kernel", DEFAULT).block
TURNS = {
    "nothing": [],
    "one": [1],
    "none of them": [0, 0, 0],
    "some": [3, 0, 1, 7, 0, 2],
    "a block": [1, 2] * (BLOCK // 2),
    "more than a block": [2, 0, 1] * (BLOCK // 3 + 1),
}


def turns_of(sizes: list[int], seed: int = 0) -> tuple[torch.Tensor, ...]:
    rng = np.random.default_rng(seed)
    num = sum(sizes)
    rewards = torch.from_numpy(rng.standard_normal(num))
    truncated = torch.from_numpy(rng.random(num) < 0.5)
    return rewards, truncated, boundaries(rng.integers(0, 9, num).tolist()), boundaries(sizes)


@pytest.mark.parametrize("clip", [float("inf"), 0.75])
@pytest.mark.parametrize("name", TURNS)
def test_scores_lengths_and_who_counts_are_those_of_a_loop(
    name: str, clip: float, impl: str
) -> None:
    rewards, truncated, cu_generated, cu_turns = inputs = turns_of(TURNS[name])
    got = scores_of_trajectories(*inputs, clip=clip, impl=impl)
    scores, lengths, valid = [], [], []
    bounds = cu_turns.tolist()
    for begin, end in itertools.pairwise(bounds):
        total = 0.0
        for reward in rewards[begin:end].tolist():
            total += reward
        scores.append(max(-clip, min(total, clip)))
        lengths.append(int(cu_generated[end] - cu_generated[begin]))
        valid.append(begin == end or not bool(truncated[end - 1]))
    np.testing.assert_allclose(got.scores, scores, 1e-15, 1e-15)
    assert got.scores.dtype == torch.float64
    assert (got.lengths.tolist(), got.lengths.dtype) == (lengths, torch.int32)
    assert (got.valid.tolist(), got.valid.dtype) == (valid, torch.bool)


def test_turns_are_summed_in_their_order_whatever_the_company(impl: str) -> None:
    rewards, truncated, cu_generated, cu_turns = turns_of([5, 3, 0, 40])
    together = scores_of_trajectories(
        rewards, truncated, cu_generated, cu_turns, clip=float("inf"), impl=impl
    )
    for index, (begin, end) in enumerate(((0, 5), (5, 8), (8, 8), (8, 48))):
        alone = scores_of_trajectories(
            rewards[begin:end], truncated[begin:end], cu_generated[begin : end + 1],
            boundaries([end - begin]), clip=float("inf"), impl=impl,
        )  # fmt: skip
        for whole, one in zip(together, alone, strict=True):
            assert_same_bits(whole[index : index + 1], one)


def test_a_score_that_is_no_number_stays_one(impl: str) -> None:
    inputs = turns_of([2, 1])
    inputs[0][1] = torch.nan
    for clip in (float("inf"), 1.0):
        scores = scores_of_trajectories(*inputs, clip=clip, impl=impl).scores
        assert scores.isnan().tolist() == [True, False]


@pytest.mark.usefixtures("poisoned_memory")
def test_every_output_is_written(impl: str) -> None:
    got = scores_of_trajectories(*turns_of(TURNS["some"]), clip=1.0, impl=impl)
    assert bool(got.scores.isfinite().all())
    assert int(got.lengths.max()) < 100


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("name", TURNS)
def test_no_value_is_read_from_the_device(name: str, impl: str) -> None:
    on_meta = (tensor.to("meta") for tensor in turns_of(TURNS[name]))
    got = scores_of_trajectories(*on_meta, clip=1.0, impl=impl)
    for tensor, dtype in zip(got, (torch.float64, torch.int32, torch.bool), strict=True):
        assert (tensor.shape[0], tensor.dtype) == (len(TURNS[name]), dtype)


@pytest.mark.parametrize("name", ["nothing", "none of them", "some"])
def test_the_op_is_registered_right(name: str, impl: str) -> None:
    op = torch.ops.trajpack.scores_of_trajectories
    torch.library.opcheck(op, (*turns_of(TURNS[name]), 1.0, impl))
