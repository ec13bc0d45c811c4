"""Rows of selected tokens put back where they came from, with gradients."""

from __future__ import annotations

from typing import Any

import torch

from trajpack.kernels.dispatch import LIBRARY, Impl, resolve_impl
from trajpack.kernels.rearrange.select_tokens import check_sources, check_table, select_reference
from trajpack.kernels.rearrange.token_rows import Number, as_rows, as_units, rows_of

OP = "merge_tokens"


def merge_tokens(
    rows: torch.Tensor,
    table: torch.Tensor,
    inverse: torch.Tensor,
    num_tokens: int,
    fill: Number = 0,
    impl: Impl = "auto",
) -> torch.Tensor:
    """Lay stretches of one tensor out anew, as `select_tokens` does, and let gradients flow.

    Args:
        rows: ``[source_tokens, *rest]`` of a dtype of at most 8 bytes.
        table: Segments of the result, as for `trajpack.kernels.select_tokens`.
        inverse: Segments of ``rows``: where each stretch of it comes from, were the result given.
            Each token is taken at most once.
        num_tokens: Tokens of the result.
        fill: Value of tokens of the result that have no source.
        impl: ``"auto"`` uses Triton for CUDA tensors and torch for all others.

    Returns:
        ``[num_tokens, *rest]``. Differentiable any number of times with respect to ``rows``;
        tokens that are not used have a gradient of 0.

    Raises:
        TypeError, ValueError: As `trajpack.kernels.select_tokens`.

    Cost: one launch, as the gradient, which saves nothing but the tables. No copy, no host
    synchronisation.

    Example:
        >>> table = torch.tensor([[0, 1, 3], [2, 0, 0], [1, 2, 0]], dtype=torch.int32)
        >>> inverse = torch.tensor([[0, 2, 3], [1, 0, 0], [2, 1, 0]], dtype=torch.int32)
        >>> merge_tokens(torch.tensor([7.0, 8.0, 9.0]), table, inverse, 3)
        tensor([9., 7., 8.])
    """
    check_sources(OP, [rows])
    check_table(OP, table, num_tokens, rows.device)
    check_table(OP, inverse, rows.shape[0], rows.device)
    chosen = resolve_impl(OP, impl, rows)
    merged: torch.Tensor = torch.ops.trajpack.merge_tokens(
        rows, table.contiguous(), inverse.contiguous(), num_tokens, fill, chosen
    )
    return merged


def _run(
    rows: torch.Tensor,
    table: torch.Tensor,
    inverse: torch.Tensor,
    num_tokens: int,
    fill: Number,
    impl: str,
) -> torch.Tensor:
    if impl == "torch" and rows.device.type == "cpu":
        from trajpack.kernels.rearrange.select_tokens_host import HostSources

        return HostSources([rows], [fill]).rows(table, num_tokens)[0]
    if impl == "torch":
        return select_reference([rows], table, num_tokens, [fill]).rows[0]
    from trajpack.kernels.rearrange.select_tokens_host import check_segments
    from trajpack.kernels.rearrange.select_tokens_triton import merge_forward

    check_segments(OP, table, num_tokens, rows.shape[0])
    layout = rows_of(rows, fill)
    flat = merge_forward(as_units(rows, layout), table, num_tokens, layout)
    return as_rows(flat, rows, num_tokens)


def _fake(
    rows: torch.Tensor,
    table: torch.Tensor,
    inverse: torch.Tensor,
    num_tokens: int,
    fill: Number,
    impl: str,
) -> torch.Tensor:
    return rows.new_empty((num_tokens, *rows.shape[1:]))


def _setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    rows, table, inverse, _, _, ctx.impl = inputs
    ctx.num_rows = rows.shape[0]
    ctx.save_for_backward(table, inverse)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    table, inverse = ctx.saved_tensors
    given = torch.ops.trajpack.merge_tokens(
        grad.contiguous(), inverse, table, ctx.num_rows, 0, ctx.impl
    )
    return given, None, None, None, None, None


LIBRARY.define(
    "merge_tokens(Tensor rows, Tensor table, Tensor inverse, SymInt num_tokens, Scalar fill, "
    "str impl) -> Tensor"
)
LIBRARY.impl("merge_tokens", _run, "CompositeExplicitAutograd")
torch.library.register_fake("trajpack::merge_tokens", _fake, lib=LIBRARY)
torch.library.register_autograd(
    "trajpack::merge_tokens", _backward, setup_context=_setup_context, lib=LIBRARY
)
