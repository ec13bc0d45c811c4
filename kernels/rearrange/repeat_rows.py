"""Rows that are read more than once, and their gradients added in a fixed order."""

from __future__ import annotations

from typing import Any

import torch

from trajpack.kernels.dispatch import register_op
from trajpack.kernels.validation import check_indices, check_tensor


def repeat_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows ``x[index]``; the gradients of a row are added in the order of ``index``.

    The backward pass of ``x[index]`` adds with atomic operations where torch decides so, and then
    two runs may differ. This one adds in one order in every run.

    Args:
        x: ``[rows, *rest]`` floats.
        index: ``[n]`` int64 in ``[0, rows)``.

    Returns:
        ``[n, *rest]``, differentiable with respect to ``x``, any number of times.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If the devices differ; on the host also if an index is out of its range.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> repeat_rows(x, torch.tensor([1, 0, 1])).tolist()
        [2.0, 1.0, 2.0]
        >>> repeat_rows(x, torch.tensor([1, 0, 1])).sum().backward()
        >>> x.grad
        tensor([1., 2.])
    """
    op = "repeat_rows"
    check_tensor(op, "x", x, or_more=True)
    check_tensor(op, "index", index, dtypes=(torch.int64,), device=x.device)
    check_indices(op, "index", index, x.shape[0])
    repeated: torch.Tensor = torch.ops.trajpack.repeat_rows(x, index)
    return repeated


def sum_rows(x: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return ``[num_rows, *rest]`` zeros to which row ``i`` of ``x`` was added at ``index[i]``.

    Rows with one index are added in their order, so every run gives the same bits: on a device
    ``index_put_`` sorts the indices and adds without atomic operations.
    """
    return add_rows(x.new_zeros(num_rows, *x.shape[1:]), index, x)


def add_rows(total: torch.Tensor, index: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Add row ``i`` of ``x`` to ``total[index[i]]``, in the order of `sum_rows`."""
    if x.is_cuda:
        return total.index_put_((index,), x, accumulate=True)
    return total.index_add_(0, index, x)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.num_rows = inputs[0].shape[0]
    ctx.save_for_backward(inputs[1])


def _backward_of_repeat(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.ops.trajpack.sum_rows(gradient, *ctx.saved_tensors, ctx.num_rows), None


def _backward_of_sum(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    return torch.ops.trajpack.repeat_rows(gradient, *ctx.saved_tensors), None, None


register_op(
    "repeat_rows(Tensor x, Tensor index) -> Tensor",
    lambda x, index: x.index_select(0, index),
    lambda x, index: x.new_empty(index.shape[0], *x.shape[1:]),
    setup_context=_save,
    backward=_backward_of_repeat,
)
# an op of its own: a compiler would make atomic operations of its body
register_op(
    "sum_rows(Tensor x, Tensor index, int num_rows) -> Tensor",
    sum_rows,
    lambda x, _, num_rows: x.new_empty(num_rows, *x.shape[1:]),
    setup_context=_save,
    backward=_backward_of_sum,
)
