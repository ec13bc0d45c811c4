from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.kernels.credit.token_loops import small_blocks
from trajpack.kernels.credit.discounted_returns import discounted_returns
from trajpack.kernels.scan import credit_scan_triton
from trajpack.kernels.scan.credit_scan import ENTRIES_AT_ONCE, ROW
from trajpack.testing import assert_same_bits, boundaries, returns_by_loop

pytestmark = pytest.mark.usefixtures("poisoned_memory")

LENGTHS = [3, 0, 1, 63, 64, 65, 0, 128, 129, 2, 1, 1, 1, 1, 1, 1, 1, 40]  # more than one program


@pytest.fixture(scope="module", params=["torch", "triton", "triton, blocks"])
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """Name of an implementation; the last one cuts short segments into blocks too."""
    name, *blocks = request.param.split(", ")
    if name == "triton":
        request.getfixturevalue("interpreter")
    with small_blocks(), pytest.MonkeyPatch.context() as patch:
        if blocks:
            patch.setattr(credit_scan_triton, "FEWEST_ENTRIES", 0)
        yield name


def random_rewards(num: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(num)).to(dtype)


def assert_rounds(actual: torch.Tensor, exact: np.ndarray, magnitude: float = 0.0) -> None:
    """Assert float32 roundings of ``exact``: 1 ulp, and what float64 loses of ``magnitude``."""
    assert actual.dtype == torch.float32
    allowed = np.spacing(np.abs(exact).astype(np.float32)) + 1e-13 * magnitude
    error = np.abs(actual.detach().double().numpy() - exact)
    assert (error <= allowed).all(), f"off by {(error / allowed).max():.3g} times the tolerance"


def by_matrix(rewards: torch.Tensor, lengths: list[int], discount: float) -> np.ndarray:
    """Returns as a product with the block-diagonal matrix of powers of the discount."""
    segment = np.repeat(np.arange(len(lengths)), lengths)
    gap = np.arange(len(segment)) - np.arange(len(segment))[:, None]
    reaches = (gap >= 0) & (segment == segment[:, None])
    powers = np.float64(discount) ** np.where(reaches, gap, 0)
    return np.where(reaches, powers, 0.0) @ rewards.double().numpy()


def test_rewards_flow_back_halved_at_each_step(impl: str) -> None:
    rewards = torch.tensor([-1.0, -1, 1, 1, 1])
    # last to first: 1; 1 + 1/2; 1 + 1.5/2; -1 + 1.75/2; -1 - 0.125/2
    expected = torch.tensor([-1.0625, -0.125, 1.75, 1.5, 1.0])
    assert_same_bits(discounted_returns(rewards, boundaries([5]), 0.5, impl), expected)


def test_each_segment_starts_anew(impl: str) -> None:
    rewards = torch.tensor([1.0, 2, 4, 8, 16])
    # 1 + 2/2 | | 4 + (8 + 16/2)/2
    expected = torch.tensor([2.0, 2, 12, 16, 16])
    assert_same_bits(discounted_returns(rewards, boundaries([2, 0, 3]), 0.5, impl), expected)


def test_each_segment_has_its_own_discount(impl: str) -> None:
    rewards = torch.ones(8)
    discounts = torch.tensor([0.5, 9.0, 1.0, -1.0, 0.0])
    actual = discounted_returns(rewards, boundaries([2, 0, 2, 2, 2]), discounts, impl)
    assert_same_bits(actual, torch.tensor([1.5, 1, 2, 1, 0, 1, 1, 1]))


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99, 1.0, -0.9, 1.05])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_equals_the_float64_loop(impl: str, discount: float, dtype: torch.dtype) -> None:
    rewards = random_rewards(sum(LENGTHS), dtype=dtype)
    exact = returns_by_loop(rewards.numpy(), LENGTHS, [discount] * len(LENGTHS))
    actual = discounted_returns(rewards, boundaries(LENGTHS), discount, impl)
    assert_rounds(actual, exact, np.abs(exact).max())


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0, -0.5, 1.01])
def test_it_is_the_product_with_the_matrix_of_powers(discount: float) -> None:
    rewards = random_rewards(sum(LENGTHS))
    exact = by_matrix(rewards, LENGTHS, discount)
    actual = discounted_returns(rewards, boundaries(LENGTHS), discount, "torch")
    assert_rounds(actual, exact, np.abs(exact).max())


@given(
    lengths=st.lists(st.integers(0, 70), max_size=20),
    discounts=st.lists(st.floats(-1.2, 1.2), min_size=20, max_size=20),
    seed=st.integers(0, 1000),
)
def test_any_lengths_and_discounts_equal_the_loop(
    impl: str, lengths: list[int], discounts: list[float], seed: int
) -> None:
    rewards = random_rewards(sum(lengths), seed)
    discounts = discounts[: len(lengths)]
    exact = returns_by_loop(rewards.numpy(), lengths, discounts)
    per_segment = torch.tensor(discounts, dtype=torch.float64)
    actual = discounted_returns(rewards, boundaries(lengths), per_segment, impl)
    assert_rounds(actual, exact, float(np.abs(exact).max(initial=0)))


def test_a_long_segment_loses_no_precision(impl: str) -> None:
    length = 100_000 if impl == "torch" else 2_000  # the interpreter is slow
    rewards = random_rewards(length)
    exact = returns_by_loop(rewards.numpy(), [length], [0.9999])
    actual = discounted_returns(rewards, boundaries([length]), 0.9999, impl)
    assert_rounds(actual, exact, np.abs(exact).max())


@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0], [1], [0, 1, 0]])
def test_nothing_and_next_to_nothing_are_fine(impl: str, lengths: list[int]) -> None:
    rewards = random_rewards(sum(lengths))
    assert_same_bits(discounted_returns(rewards, boundaries(lengths), 0.5, impl), rewards)


@pytest.mark.parametrize("value", [100.0, math.inf, -math.inf, math.nan])
def test_a_changed_segment_changes_no_other(impl: str, value: float) -> None:
    rewards = random_rewards(sum(LENGTHS))
    cu_seqlens = boundaries(LENGTHS)
    before = discounted_returns(rewards, cu_seqlens, 0.9, impl)
    for segment in (3, 4, 7):
        begin, end = cu_seqlens[segment : segment + 2].tolist()
        changed = rewards.clone()
        changed[begin:end] = value
        after = discounted_returns(changed, cu_seqlens, 0.9, impl)
        assert_same_bits(after[:begin], before[:begin])
        assert_same_bits(after[end:], before[end:])
        assert not torch.equal(after[begin:end], before[begin:end])


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_spreads_only_to_earlier_entries(impl: str, value: float) -> None:
    rewards = random_rewards(130)
    rewards[65] = value
    actual = discounted_returns(rewards, boundaries([130]), 0.5, impl)
    assert not actual[:66].isfinite().any()
    exact = returns_by_loop(rewards[66:].numpy(), [64], [0.5])
    assert_rounds(actual[66:], exact, 1.0)


@given(
    segments=st.lists(
        st.lists(st.sampled_from([-0.0, 0.0, 1.0, -1.0, 0.1, 1e-3, -7.7]), max_size=70),
        max_size=20,
    ),
    discount=st.sampled_from([0.0, 0.3, 0.99, 1.0, -0.7]),
)
@settings(max_examples=10)
def test_a_segment_has_the_same_bits_whatever_it_is_packed_with(
    impl: str, segments: list[list[float]], discount: float
) -> None:
    def returns_of(*parts: list[float]) -> torch.Tensor:
        rewards = torch.tensor([reward for part in parts for reward in part])
        return discounted_returns(rewards, boundaries([len(p) for p in parts]), discount, impl)

    alone = [returns_of(segment) for segment in segments]
    assert_same_bits(returns_of(*segments), torch.cat([torch.empty(0), *alone]))


@pytest.mark.parametrize("max_seqlen", [None, 0, 3, 129, 10**12])
def test_a_bound_right_or_wrong_changes_no_bit(impl: str, max_seqlen: int | None) -> None:
    rewards = random_rewards(sum(LENGTHS))
    expected = discounted_returns(rewards, boundaries(LENGTHS), 0.9, impl)
    actual = discounted_returns(rewards, boundaries(LENGTHS), 0.9, impl, max_seqlen=max_seqlen)
    assert_same_bits(actual, expected)


def test_permuted_segments_give_permuted_returns(impl: str) -> None:
    parts = list(random_rewards(sum(LENGTHS)).split(LENGTHS))
    discounts = torch.linspace(0.1, 1.1, len(LENGTHS))
    order = np.random.default_rng(1).permutation(len(LENGTHS)).tolist()

    def returns_in(order: list[int]) -> list[torch.Tensor]:
        lengths = [LENGTHS[i] for i in order]
        rewards = torch.cat([parts[i] for i in order])
        returns = discounted_returns(rewards, boundaries(lengths), discounts[order], impl)
        return list(returns.split(lengths))

    plain = returns_in(list(range(len(LENGTHS))))
    for place, permuted in zip(order, returns_in(order), strict=True):
        assert_same_bits(permuted, plain[place])


def test_the_same_call_gives_the_same_bits(impl: str) -> None:
    rewards = random_rewards(sum(LENGTHS))
    first, second = (discounted_returns(rewards, boundaries(LENGTHS), 0.9, impl) for _ in range(2))
    assert_same_bits(first, second)


def test_the_gradient_is_the_numerical_one(impl: str) -> None:
    lengths = [2, 0, 3, 1]
    rewards = random_rewards(6, dtype=torch.float64).requires_grad_()
    # the op is linear: a step of 1 makes the difference quotient exact but for float32
    assert torch.autograd.gradcheck(
        lambda r: discounted_returns(r, boundaries(lengths), 0.75, impl).double(),
        (rewards,),
        eps=1.0,
        atol=1e-5,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_gradient_is_that_of_a_loop(impl: str, dtype: torch.dtype) -> None:
    lengths, discounts = [70, 0, 3, 1], torch.tensor([0.9, 0.0, -0.5, 2.0])
    rewards = random_rewards(74, dtype=dtype).requires_grad_()
    weight = random_rewards(74, seed=1)
    (weight * discounted_returns(rewards, boundaries(lengths), discounts, impl)).sum().backward()

    leaf = rewards.detach().double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for part, weights, discount in zip(
        leaf.split(lengths), weight.double().split(lengths), discounts.double(), strict=True
    ):
        later = torch.zeros((), dtype=torch.float64)
        for reward, each in zip(reversed(part), reversed(weights), strict=True):
            later = reward + discount * later
            total = total + each * later
    total.backward()
    assert rewards.grad is not None
    assert rewards.grad.dtype == dtype
    torch.testing.assert_close(rewards.grad.double(), leaf.grad, rtol=1e-6, atol=1e-6)


def test_a_gradient_that_is_expanded_is_read_right(impl: str) -> None:
    rewards = torch.zeros(3, requires_grad=True)
    discounted_returns(rewards, boundaries([3]), 0.5, impl).sum().backward()
    # entry t counts in the returns of entries 0 to t: 1, 1 + 1/2, 1 + 1/2 + 1/4
    assert rewards.grad is not None
    assert_same_bits(rewards.grad, torch.tensor([1.0, 1.5, 1.75]))


def test_the_host_has_the_same_bits_in_any_company() -> None:
    lengths = [ROW, 3, ROW + 1, 0, ROW**2, ROW**2 + 1, 1, 9999, *range(150), 2 * ROW]
    lengths += [1] * (ENTRIES_AT_ONCE // ROW)
    rewards = random_rewards(sum(lengths))
    discounts = torch.linspace(-1, 1.001, len(lengths), dtype=torch.float64)
    together = discounted_returns(rewards, boundaries(lengths), discounts, "torch").split(lengths)
    for index, part in list(enumerate(rewards.split(lengths)))[:200]:
        alone = discounted_returns(
            part, boundaries([len(part)]), discounts[index : index + 1], "torch"
        )
        assert_same_bits(alone, together[index])


@pytest.mark.parametrize("discount", [0.9, 0.99999, 1.0, -0.9999])
def test_the_host_loses_no_precision_over_a_long_segment(discount: float) -> None:
    lengths = [300_000, 5, 70_000]
    rewards = random_rewards(sum(lengths))
    exact = returns_by_loop(rewards.numpy(), lengths, [discount] * 3)
    actual = discounted_returns(rewards, boundaries(lengths), discount, "torch")
    assert_rounds(actual, exact, np.abs(exact).max())


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_a_sum_of_zeros_carries_0_though_powers_overflow(impl: str) -> None:
    rewards = torch.zeros(300)
    rewards[:4] = torch.tensor([1.0, 2.0, 4.0, 8.0])
    returns = discounted_returns(rewards, boundaries([300]), 1e15, impl)
    assert_same_bits(returns[4:], torch.zeros(296))
    assert_same_bits(returns[2:4], torch.tensor([8e15, 8.0]))
