"""What cannot be seen from outside: regimes that share their bits, powers, the host's rows."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings, strategies as st

from trajpack.kernels.credit.discounted_returns import discounted_returns
from trajpack.kernels.scan import discounted_returns_triton
from trajpack.kernels.scan.discounted_returns_host import ROW, ROWS_AT_ONCE
from trajpack.kernels.scan.discounted_returns_steps_triton import power
from trajpack.kernels.scan.discounted_returns_triton import (
    BLOCK,
    BLOCKS,
    FEWEST_ENTRIES,
    segment_returns,
    superblock_returns,
    superblock_sums,
)
from trajpack.testing import assert_same_bits, boundaries, returns_by_loop

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def cut_small(patch: pytest.MonkeyPatch) -> None:
    """Let a level end after 8, 16 and 128 entries."""
    for name, size in {"ROWS": 4, "BLOCK": 8, "BLOCKS": 2}.items():
        patch.setattr(discounted_returns_triton, name, size)


def by_superblocks(
    rewards: torch.Tensor, cu_seqlens: torch.Tensor, discount: torch.Tensor
) -> torch.Tensor:
    sums = superblock_sums(rewards, cu_seqlens, discount)
    return superblock_returns(rewards, cu_seqlens, discount, sums)


def random_rewards(num: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(num)).float()


def assert_rounds(actual: torch.Tensor, exact: np.ndarray, magnitude: float) -> None:
    """Assert float32 roundings of ``exact``: 1 ulp, and what float64 loses of ``magnitude``."""
    allowed = np.spacing(np.abs(exact).astype(np.float32)) + 1e-13 * magnitude
    error = np.abs(actual.double().numpy() - exact)
    assert (error <= allowed).all(), f"off by {(error / allowed).max():.3g} times the tolerance"


def assert_regimes_agree(lengths: list[int], discounts: list[float]) -> None:
    """Assert that both are right, to the same bits."""
    rewards = random_rewards(sum(lengths))
    inputs = rewards, boundaries(lengths), torch.tensor(discounts, dtype=torch.float64)
    returns = segment_returns(*inputs)
    assert_same_bits(by_superblocks(*inputs), returns)
    exact = returns_by_loop(rewards.numpy(), lengths, discounts)
    assert_rounds(returns, exact, float(np.abs(exact).max(initial=0)))


@pytest.mark.parametrize("discount", [0.9, 1.0, -0.99])
def test_both_regimes_give_the_same_bits_at_every_level(
    interpreter: None, monkeypatch: pytest.MonkeyPatch, discount: float
) -> None:
    cut_small(monkeypatch)
    edges = [7, 8, 9, 15, 16, 17, 0, 31, 32, 33, 127, 128, 129, 1, 0, 144, 145, 257, 0, 2]
    assert_regimes_agree(edges, np.linspace(discount, 0.95, len(edges)).tolist())


@pytest.mark.parametrize("length", [17, 129, 257])
def test_both_regimes_give_the_same_bits_in_any_company(
    interpreter: None, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    cut_small(monkeypatch)
    discounts = torch.tensor([0.3, 0.999, 0.7], dtype=torch.float64)
    for shift in (0, 1, 15):  # moves the segment over the windows
        lengths = [shift, length, 40]
        rewards = random_rewards(sum(lengths))
        rewards[shift : shift + length] = random_rewards(length, seed=1)
        alone = rewards[shift : shift + length], boundaries([length]), discounts[1:2]
        expected = segment_returns(*alone)
        assert_same_bits(by_superblocks(*alone), expected)
        for regime in (segment_returns, by_superblocks):
            together = regime(rewards, boundaries(lengths), discounts)
            assert_same_bits(together[shift : shift + length], expected)


@given(
    lengths=st.lists(st.integers(0, 40) | st.sampled_from([130, 200]), min_size=1, max_size=8),
    discounts=st.lists(st.floats(-1.2, 1.2), min_size=8, max_size=8),
)
@settings(max_examples=6)
def test_both_regimes_give_the_same_bits_for_any_lengths(
    interpreter: None, lengths: list[int], discounts: list[float]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cut_small(patch)
        assert_regimes_agree(lengths, discounts[: len(lengths)])


def test_both_regimes_give_the_same_bits_at_full_size(interpreter: None) -> None:
    superblock = BLOCK * BLOCKS
    assert_regimes_agree([superblock - 1, superblock + 1, 5], [0.99, 0.9999, 0.9])


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_a_sum_of_nothing_carries_nothing_though_powers_overflow(
    interpreter: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small(monkeypatch)
    rewards = torch.zeros(300)
    rewards[:4] = torch.tensor([1.0, 2.0, 4.0, 8.0])
    inputs = rewards, boundaries([300]), torch.tensor([1e30], dtype=torch.float64)
    for regime in (segment_returns, by_superblocks):
        returns = regime(*inputs)
        assert_same_bits(returns[4:], torch.zeros(296))
        assert_same_bits(returns[2:4], torch.tensor([8e30, 8.0]))


@pytest.mark.parametrize(
    ("entries", "max_seqlen", "launched"),
    [
        (FEWEST_ENTRIES, None, "segments"),
        (FEWEST_ENTRIES + 1, None, "superblocks"),
        (FEWEST_ENTRIES + 1, 4096, "segments"),
        (FEWEST_ENTRIES + 1, 4097, "superblocks"),
        (FEWEST_ENTRIES, 4097, "segments"),
        (0, None, "segments"),
    ],
)
def test_the_bound_decides_what_is_launched(
    monkeypatch: pytest.MonkeyPatch, entries: int, max_seqlen: int | None, launched: str
) -> None:
    calls = []
    for name in ("segment_returns", "superblock_sums", "superblock_returns"):
        monkeypatch.setattr(discounted_returns_triton, name, lambda *_, n=name: calls.append(n))
    inputs = torch.zeros(entries), boundaries([entries]), torch.ones(1).double()
    discounted_returns_triton.discounted_returns_forward(*inputs, max_seqlen)
    expected = {
        "segments": ["segment_returns"],
        "superblocks": ["superblock_sums", "superblock_returns"],
    }
    assert calls == expected[launched]


@triton.jit
def power_kernel(gain, out, EXPONENT: tl.constexpr):
    lane = tl.arange(0, 16)
    tl.store(out + lane, power(tl.load(gain + lane), EXPONENT))


@pytest.mark.parametrize("exponent", [1, 2, 32, 1024])
def test_powers_are_rounded_once(interpreter: None, exponent: int) -> None:
    gain = torch.cat([1 - torch.logspace(-7, -1, 12, dtype=torch.float64), -torch.rand(4).double()])
    out = torch.empty_like(gain)
    power_kernel[(1,)](gain, out, EXPONENT=exponent)
    for base, got in zip(gain.tolist(), out.tolist(), strict=True):
        exact = float(Fraction(base) ** exponent)
        if abs(exact) > 1e-280:  # what is lost below has no room in a float64
            assert abs(got - exact) <= math.ulp(exact)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize(("gain", "expected"), [(2.0, math.inf), (-1e200, math.inf), (0.5, 0.0)])
def test_powers_end_where_float64_ends(interpreter: None, gain: float, expected: float) -> None:
    out = torch.empty(16, dtype=torch.float64)
    power_kernel[(1,)](torch.full((16,), gain, dtype=torch.float64), out, EXPONENT=2048)
    assert out.tolist() == [expected] * 16


def test_the_host_has_the_same_bits_in_any_company() -> None:
    lengths = [ROW, 3, ROW + 1, 0, ROW**2, ROW**2 + 1, 1, 9999, *range(150), 2 * ROW]
    lengths += [1] * ROWS_AT_ONCE
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
