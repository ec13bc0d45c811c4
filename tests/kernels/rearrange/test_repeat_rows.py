"""Rows that are read more than once: values, gradients and their order."""

import pytest
import torch
from hypothesis import given, strategies as st

from trajpack.kernels.rearrange.repeat_rows import repeat_rows, sum_rows
from trajpack.testing import assert_same_bits

OPS = torch.ops.trajpack


@given(index=st.lists(st.integers(0, 4), max_size=20), width=st.sampled_from([(), (3,), (2, 2)]))
def test_rows_are_repeated_and_their_gradients_added_in_order(index, width):
    generator = torch.Generator().manual_seed(len(index))
    x = torch.randn(5, *width, generator=generator).requires_grad_()
    rows = repeat_rows(x, torch.tensor(index, dtype=torch.int64))
    assert_same_bits(rows.detach(), x.detach()[index])
    weights = 1e4 ** torch.randn(rows.shape, generator=generator)  # another order, other bits
    (gradient,) = torch.autograd.grad(rows, x, weights)
    want = torch.zeros_like(gradient)
    for place, row in enumerate(index):
        want[row] += weights[place]
    assert_same_bits(gradient, want)


def test_both_ops_are_sound_and_differentiable_twice():
    x = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([3, 0, 3, 3, 1])
    torch.library.opcheck(OPS.repeat_rows.default, (x, index))
    wide = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(OPS.sum_rows.default, (wide, index, 4))
    assert torch.autograd.gradgradcheck(lambda x: repeat_rows(x.sin(), index).exp(), (x,))
    assert torch.autograd.gradcheck(lambda x: sum_rows(x, index, 4), (wide,))


def test_a_compiled_caller_keeps_the_order():
    index = torch.tensor([1, 1, 0, 1] * 50)
    x, weights = torch.randn(2), 1e4 ** torch.randn(200)

    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad((repeat_rows(x, index) * weights).sum(), x)[0]

    compiled = torch.compile(
        lambda x: (repeat_rows(x, index) * weights).sum(), backend="aot_eager", fullgraph=True
    )
    leaf = x.clone().requires_grad_()
    assert_same_bits(torch.autograd.grad(compiled(leaf), leaf)[0], gradient(x))


@pytest.mark.parametrize(
    ("x", "index", "error", "named"),
    [
        (torch.zeros(2), torch.tensor([0, 2]), ValueError, r"index .*2"),
        (torch.zeros(2), torch.tensor([-1]), ValueError, r"index .*-1"),
        (torch.zeros(2), torch.tensor([0], dtype=torch.int32), TypeError, "index .*int64"),
        (torch.zeros(2), [0], TypeError, "index"),
        (torch.zeros(2), torch.zeros(1, 1, dtype=torch.int64), ValueError, "index"),
        ([1.0], torch.tensor([0]), TypeError, "x must be"),
    ],
)
def test_wrong_rows_are_refused(x, index, error, named):
    with pytest.raises(error, match=f"repeat_rows: .*{named}"):
        repeat_rows(x, index)
