"""`discounted_returns` as an operator: registered, traced, without values, refusing wrong input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from trajpack.kernels.credit.discounted_returns import discounted_returns
from trajpack.testing import assert_same_bits, boundaries


def random_rewards(num: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).standard_normal(num)).to(dtype)


@pytest.mark.parametrize("dynamic", [False, True])
def test_it_compiles_into_one_graph(dynamic: bool) -> None:
    def loss(rewards: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return discounted_returns(rewards * 2, cu_seqlens, 0.5).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in ([3, 4], [1, 0, 8]):
        eager, traced = (random_rewards(sum(lengths)).requires_grad_() for _ in range(2))
        loss(eager, boundaries(lengths)).backward()
        compiled(traced, boundaries(lengths)).backward()
        assert_same_bits(traced.grad, eager.grad)  # type: ignore[arg-type]


def test_a_bound_is_traced_too() -> None:
    def returns(rewards: torch.Tensor, cu_seqlens: torch.Tensor, bound: int) -> torch.Tensor:
        return discounted_returns(rewards, cu_seqlens, 0.5, max_seqlen=bound)

    traced = torch.compile(returns, fullgraph=True, backend="aot_eager", dynamic=True)
    for bound in (5, 6, 7000):
        inputs = random_rewards(bound), boundaries([bound - 2, 2]), bound
        assert_same_bits(traced(*inputs), returns(*inputs))


@pytest.mark.parametrize("impl", ["auto", "torch", "triton"])
def test_shapes_alone_are_enough_on_the_meta_device(impl: Any) -> None:
    returns = discounted_returns(
        torch.empty(7, device="meta", dtype=torch.float64),
        torch.empty(3, device="meta", dtype=torch.int32),
        0.5,
        impl,
    )
    assert (returns.shape, returns.dtype, returns.device.type) == ((7,), torch.float32, "meta")


CU = boundaries([2, 1])
META = torch.empty(2, device="meta")


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (TypeError, r"^discounted_returns: rewards must be a tensor, got list", ([1.0], CU, 1.0)),
        (TypeError, "rewards must be float32 or float64, got int64", (torch.arange(3), CU, 1.0)),
        (ValueError, r"rewards must have 1 dim.*got shape \[1, 3\]", (torch.ones(1, 3), CU, 1.0)),
        (TypeError, "cu_seqlens must be int32, got int64", (torch.ones(3), CU.long(), 1.0)),
        (TypeError, "cu_seqlens must be a tensor, got list", (torch.ones(3), [0, 3], 1.0)),
        (ValueError, r"cu_seqlens must have 1 dim.*\[1, 3\]", (torch.ones(3), CU[None], 1.0)),
        (ValueError, r"cu_seqlens must have segments \+ 1", (torch.ones(3), CU[:0], 1.0)),
        (ValueError, "cu_seqlens must bound 3 entries, got no", (torch.ones(3), CU[:1], 1.0)),
        (ValueError, "cu_seqlens is on meta but .* on cpu", (torch.ones(3), CU.to("meta"), 1.0)),
        (TypeError, "discount must be float32 or", (torch.ones(3), CU, torch.arange(2))),
        (ValueError, "discount must have 1 dimension", (torch.ones(3), CU, torch.tensor(1.0))),
        (ValueError, "discount is on meta but", (torch.ones(3), CU, META)),
        (ValueError, r"each of 2 segment\(s\), got.*\[3\]", (torch.ones(3), CU, torch.ones(3))),
        (ValueError, "no gradient flows", (torch.ones(3), CU, torch.ones(2, requires_grad=True))),
        (ValueError, "impl must be .*, got 'nonsense'", (torch.ones(3), CU, 1.0, "nonsense")),
    ],
)
def test_wrong_input_is_named(error: type[Exception], match: str, arguments: tuple) -> None:
    with pytest.raises(error, match=match):
        discounted_returns(*arguments)


@pytest.mark.parametrize(
    ("error", "match", "max_seqlen"),
    [
        (TypeError, "^discounted_returns: max_seqlen must be an int or None, got 3.0", 3.0),
        (TypeError, "max_seqlen must be an int or None, got True", True),
        (ValueError, "max_seqlen must not be negative, got -1", -1),
    ],
)
def test_a_wrong_bound_is_named(error: type[Exception], match: str, max_seqlen: Any) -> None:
    with pytest.raises(error, match=match):
        discounted_returns(torch.ones(3), CU, 1.0, max_seqlen=max_seqlen)
