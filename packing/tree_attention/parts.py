"""Attention of blocks of queries over parts of their keys, whose softmaxes are joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple, TypeAlias

import torch

from trajpack.packing.tree_attention.blocks import Block, Part

MaskOf: TypeAlias = Callable[[Block, Part, torch.dtype], torch.Tensor]
"""Makes what is added to the scores of a masked part: 0 where a query sees a key, else -inf."""
MOST_SCORES = 2**22
"""Scores that a call of plain torch holds at a time."""


class Rows(NamedTuple):
    """Operands of one call."""

    query: torch.Tensor
    """``[key heads, groups, queries, size]``."""
    key: torch.Tensor
    """``[key heads, keys, size]``."""
    value: torch.Tensor
    """``[key heads, keys, value size]``."""
    mask: torch.Tensor | None
    """``[queries, keys]``, added to the scores."""
    causal: bool
    """Whether a query sees the keys up to its own place."""


@dataclass(frozen=True)
class FusedCalls:
    """Calls of torch's fused kernel of the host.

    `torch.nn.functional.scaled_dot_product_attention` calls it, and drops the logarithms.
    """

    scale: float

    def attend(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention, and the logarithms of the sums of exponentials."""
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        key, value = (_of_groups(each, rows.query) for each in (rows.key, rows.value))
        attended, lse = kernel(
            rows.query, key, value, 0.0, rows.causal, attn_mask=rows.mask, scale=self.scale
        )
        if rows.mask is not None:  # of a query without a key the kernel returns 0
            lse = lse.masked_fill(rows.mask.amax(1) == -torch.inf, -torch.inf)
        return attended, lse

    def gradients(
        self, towards: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, rows: Rows
    ) -> tuple[torch.Tensor, ...]:
        """Return the gradients of queries, keys and values.

        ``towards`` is the gradient of the attention of all parts, ``out`` that attention and
        ``lse`` its logarithms.
        """
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        key, value = (_of_groups(each, rows.query) for each in (rows.key, rows.value))
        of_query, of_key, of_value = kernel(
            towards, rows.query, key, value, out, lse, 0.0, rows.causal,
            attn_mask=rows.mask, scale=self.scale,
        )  # fmt: skip
        return of_query, of_key.sum(1), of_value.sum(1)


def _of_groups(rows: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return keys or values once for each query head, without a copy."""
    return rows[:, None].expand(-1, query.shape[1], -1, -1)


@dataclass(frozen=True)
class TorchCalls:
    """The same by plain torch, on any device and with a soft-cap, for some queries at a time."""

    scale: float
    softcap: float | None

    def attend(self, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """As `FusedCalls.attend`."""
        outs, logarithms = [], []
        for chunk in self._chunks(rows):
            some, scores, _ = self._scores(rows, chunk)
            lse = scores.logsumexp(3)
            least = torch.finfo(lse.dtype).min  # of a query without a key
            weights = (scores - lse.clamp(min=least)[..., None]).exp().to(some.value.dtype)
            outs.append((weights.flatten(1, 2) @ some.value).view(*lse.shape, -1))
            logarithms.append(lse)
        return torch.cat(outs, 2), torch.cat(logarithms, 2)

    def gradients(
        self, towards: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, rows: Rows
    ) -> tuple[torch.Tensor, ...]:
        """As `FusedCalls.gradients`."""
        of_query = torch.empty_like(rows.query)
        of_key, of_value = (torch.zeros_like(x, dtype=lse.dtype) for x in (rows.key, rows.value))
        for chunk in self._chunks(rows):
            some, scores, slope = self._scores(rows, chunk)
            weights = (scores - lse[:, :, chunk, None]).exp()
            given = towards[:, :, chunk].flatten(1, 2)
            of_weights = (given @ some.value.mT).view(weights.shape)
            mean = (towards[:, :, chunk] * out[:, :, chunk]).sum(3, keepdim=True)
            of_scores = weights * (of_weights - mean) * slope * self.scale
            flat = of_scores.to(given.dtype).flatten(1, 2)
            of_query[:, :, chunk] = (flat @ some.key).view(some.query.shape)
            of_key[:, : some.key.shape[1]] += flat.mT @ some.query.flatten(1, 2)
            of_value[:, : some.key.shape[1]] += weights.to(given.dtype).flatten(1, 2).mT @ given
        return of_query, of_key, of_value

    def _chunks(self, rows: Rows) -> list[slice]:
        heads, groups, queries, _ = rows.query.shape
        size = max(1, MOST_SCORES // (heads * groups * rows.key.shape[1]))
        return [slice(begin, min(begin + size, queries)) for begin in range(0, queries, size)]

    def _scores(self, rows: Rows, chunk: slice) -> tuple[Rows, torch.Tensor, torch.Tensor | float]:
        """Return operands and scores of some queries, and the slope of the soft-cap."""
        some = rows._replace(query=rows.query[:, :, chunk])
        if rows.causal:
            some = some._replace(key=rows.key[:, : chunk.stop], value=rows.value[:, : chunk.stop])
        shape = (*some.query.shape[:3], some.key.shape[1])
        scores = (some.query.flatten(1, 2) @ some.key.mT).view(shape) * self.scale
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        slope: torch.Tensor | float = 1.0
        if self.softcap is not None:
            capped = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * capped, 1 - capped.square()
        if rows.mask is not None:
            scores = scores + rows.mask[chunk]
        if rows.causal:
            seen = torch.ones(shape[2:], dtype=torch.bool, device=scores.device).tril(chunk.start)
            scores = scores.masked_fill(~seen, -torch.inf)
        return some, scores, slope


class JoinedAttention(torch.autograd.Function):
    """Attention of blocks, each over one or several parts of its keys.

    The logarithms of the sums of exponentials weight the parts of a block. Saved for the backward
    pass are the operands, the result and its logarithms, ``[heads, nodes]``. Masks and gathered
    keys live as long as their call; the backward pass makes them again.
    """

    @staticmethod
    def forward(  # noqa: D102 - of torch
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        blocks: Sequence[Block],
        mask_of: MaskOf,
        calls: FusedCalls | TorchCalls,
    ) -> torch.Tensor:
        exact = torch.promote_types(query.dtype, torch.float32)
        grouped = _grouped(query, key)
        heads, groups, nodes, _ = grouped.shape
        out = query.new_empty(nodes, heads, groups, value.shape[3]).permute(1, 2, 0, 3)
        lse = query.new_empty(heads, groups, nodes, dtype=exact)
        for block in blocks:
            parts = [
                calls.attend(_rows(grouped, key, value, block, part, mask_of))
                for part in block.parts
            ]
            joined, total = parts[0]
            if len(parts) > 1:
                total = torch.stack([of_part for _, of_part in parts]).logsumexp(0)
                joined = reduce(
                    add, (x * (of_part - total).exp()[..., None] for x, of_part in parts)
                )
            out[:, :, block.begin : block.end] = joined
            lse[:, :, block.begin : block.end] = total
        if sinks is not None:  # scores without values
            total = torch.logaddexp(lse, sinks.to(exact).view(heads, groups, 1))
            out *= (lse - total).exp()[..., None]
            lse = total
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.plan = blocks, mask_of, calls
        return out.flatten(0, 1)[None]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, towards: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: D102
        query, key, value, sinks, out, lse = ctx.saved_tensors
        blocks, mask_of, calls = ctx.plan
        grouped, given = _grouped(query, key), _grouped(towards.contiguous(), key)
        of_query = torch.empty_like(query)
        into = _grouped(of_query, key)
        of_keys = [torch.zeros_like(x[0], dtype=lse.dtype) for x in (key, value)]
        for block in blocks:
            here = slice(block.begin, block.end)
            of_block = given[:, :, here], out[:, :, here], lse[:, :, here]
            of_rows = []
            for part in block.parts:
                rows = _rows(grouped, key, value, block, part, mask_of)
                of_part, *found = calls.gradients(*of_block, rows)
                of_rows.append(of_part)
                sizes = [end - begin for begin, end in part.spans]
                for total, added in zip(of_keys, found, strict=True):
                    for span, piece in zip(part.spans, added.split(sizes, 1), strict=True):
                        total[:, slice(*span)] += piece
            into[:, :, here] = reduce(add, of_rows)
        of_sinks = None
        if sinks is not None:
            shares = (sinks.to(lse.dtype)[:, None] - lse.flatten(0, 1)).exp()
            of_sinks = -(shares * (given * out).sum(3).flatten(0, 1)).sum(1).to(sinks.dtype)
        of_key, of_value = (x.to(query.dtype)[None] for x in of_keys)
        return of_query, of_key, of_value, of_sinks, None, None, None


def _grouped(rows: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return rows of query heads by key heads, ``[key heads, groups, nodes, size]``."""
    grouped: torch.Tensor = rows[0].unflatten(0, (key.shape[1], -1))
    return grouped


def _rows(
    grouped: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block: Block,
    part: Part,
    mask_of: MaskOf,
) -> Rows:
    """Return the operands of a part; several spans of keys are copied."""

    def taken(rows: torch.Tensor) -> torch.Tensor:
        pieces = [rows[0, :, begin:end] for begin, end in part.spans]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)

    mask = mask_of(block, part, grouped.dtype) if part.kind == "masked" else None
    query = grouped[:, :, block.begin : block.end]
    return Rows(query, taken(key), taken(value), mask, part.kind == "causal")
