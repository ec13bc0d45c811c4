"""FlexAttention over trees: its mask from reductions over blocks of nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128
"""Queries, and keys, of a block."""


def block_mask(
    tree_end: torch.Tensor, position_ids: torch.Tensor, window: int | None = None
) -> BlockMask:
    """Return the mask of trees for FlexAttention.

    A block of queries visits a block of keys before it if one of the keys' subtrees ends behind the
    first query. It needs no test of pairs if all of them end behind the last query. Windows narrow
    both by the least and greatest depths of the blocks. Arguments are as of `TreeAttention`.
    """
    nodes = len(tree_end)
    blocks = -(-nodes // BLOCK)

    def of_blocks(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        padded = torch.cat([values, values[-1:].expand(blocks * BLOCK - nodes)])
        return torch.aminmax(padded.view(blocks, BLOCK), dim=1)

    number = torch.arange(blocks, device=tree_end.device)
    first = number[:, None] * BLOCK  # query of each block
    own, before = number[:, None] == number, number < number[:, None]
    least_end, greatest_end = of_blocks(tree_end)
    visited = before & (greatest_end > first)
    full = before & (least_end >= (first + BLOCK).clamp(max=nodes))
    if window is not None:
        least, greatest = of_blocks(position_ids)
        visited &= least[:, None] - greatest < window
        full &= greatest[:, None] - least < window

    # Numbers in a function that is compiled are tensors: torch would compile each value anew
    limit = tree_end.new_full((), nodes if window is None else window)

    def ancestor(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query) & (query < tree_end[key])

    def near_ancestor(b: Any, h: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        distance = position_ids[query] - position_ids[key]
        return ancestor(b, h, query, key) & (distance < limit)

    return BlockMask.from_kv_blocks(
        *_listed(own | (visited & ~full)),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=ancestor if window is None else near_ancestor,
        seq_lengths=(nodes, nodes),
    )


def attend_by_blocks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: BlockMask,
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention with a mask of `block_mask`, arguments as of `TreeAttention`.

    Raises:
        NotImplementedError: If gradients are wanted on the host, which torch does not compute.
    """
    # Of up to 127 nodes torch would choose its kernel for decoding, which has no tile for more than
    # 128 queries times the heads that share keys, and compiles apart from other numbers of nodes
    kernel = {"BACKEND": "TRITON"}
    options: dict[str, Any] = {"block_mask": mask, "scale": scaling, "kernel_options": kernel}
    options["enable_gqa"] = query.shape[1] != key.shape[1]
    if softcap is not None:
        cap = torch.full((), softcap, dtype=query.dtype, device=query.device)
        options["score_mod"] = lambda score, *_: cap * torch.tanh(score / cap)
    on_host = query.device.type == "cpu"
    attend: Any = flex_attention if on_host else compiled_flex()
    if sinks is None:
        attended: torch.Tensor = attend(query, key, value, **options)
        return attended
    # A sink scales the softmax: exp(lse) / (exp(lse) + exp(sink))
    attended, of_scores = attend(query, key, value, return_aux=AuxRequest(lse=True), **options)
    kept = torch.sigmoid(of_scores.lse - sinks[:, None].to(of_scores.lse.dtype))
    return attended * kept[..., None].to(attended.dtype)


def _listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of chosen columns of each row, and the columns, chosen ones first."""
    columns = chosen.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32)[None, None], columns.to(torch.int32)[None, None]


@cache
def compiled_flex() -> Callable[..., Any]:
    """Return FlexAttention, compiled with sizes as arguments: once for all numbers of nodes."""
    return torch.compile(flex_attention, dynamic=True)
