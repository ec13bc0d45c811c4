"""Attention over trees: `TreeAttention` computes it by one of three backends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch

from trajpack.packing.tree_attention.blocks import (
    Block,
    Depths,
    Part,
    blocks_of,
    stretches_of,
)
from trajpack.packing.tree_attention.parts import FusedCalls, JoinedAttention, TorchCalls

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Backend: TypeAlias = Literal["auto", "mask", "path", "flex"]
"""How attention is computed, see `TreeAttention`."""


def check_backend(backend: str) -> None:
    """Raise unless a backend is known."""
    if backend not in get_args(Backend):
        known = ", ".join(map(repr, get_args(Backend)))
        raise ValueError(f"backend must be one of {known}, got {backend!r}")


def visible(
    tree_end: torch.Tensor,
    position_ids: torch.Tensor,
    window: int | None = None,
    *,
    queries: slice = slice(None),
    keys: torch.Tensor | slice = slice(None),
) -> torch.Tensor:
    """Return bool ``[queries, keys]``: True where a query, the row, attends to a key, the column.

    ``tree_end`` and ``position_ids`` are ``[nodes]``; a query attends to ``window`` depths, its own
    included, or to all if ``None``.
    """
    node = torch.arange(tree_end.shape[0], device=tree_end.device)
    query, key = node[queries, None], node[keys]
    mask = (key <= query) & (query < tree_end[keys])
    if window is not None:
        mask &= position_ids[queries, None] - position_ids[keys] < window
    return mask


class TreeAttention:
    """Attention of one batch of trees: a node attends to its ancestors and itself.

    A key k is visible to a query q where ``k <= q < tree_end[k]``. Backends:

    - ``"path"``: blocks of nodes, each with two calls: over the ancestors of all of them, without a
      mask, and over the block itself, which is causal where each node is the parent of the next.
      Small branches share a block of at most 512 nodes, with a mask, where that is less counted
      work (`Block.cost`). A window computes the keys that it holds.
    - ``"flex"``: FlexAttention with a `BlockMask` of two reductions of ``tree_end`` over blocks of
      128 nodes. Compiled once for all shapes on a device. Uncompiled on the host, where torch
      computes the scores of all pairs and no gradients.
    - ``"mask"``: one call with a mask of ``nodes²`` numbers; scores of all pairs of nodes are
      computed.
    - ``"auto"``: ``"flex"`` on a device; on the host ``"mask"`` or ``"path"``, the one with less
      counted work.

    ``"path"`` and ``"mask"`` save the arguments and the result for the backward pass, which makes
    masks again. Calls are those of torch's fused kernel of the host, and of plain torch on a
    device, with a soft-cap, or where keys and values have different sizes.

    Args:
        tree_end: int32 ``[nodes]``: first node behind each subtree; nodes numbered depth first.
        position_ids: ``[nodes]`` integers: depths.
        backend: As above.

    Raises:
        ValueError: If the backend is unknown.
    """

    def __init__(
        self, tree_end: torch.Tensor, position_ids: torch.Tensor, backend: Backend = "auto"
    ) -> None:
        check_backend(backend)
        self.tree_end, self.position_ids = tree_end, position_ids
        on_device = tree_end.device.type != "cpu"
        self.backend = "flex" if backend == "auto" and on_device else backend
        self._blocks: dict[tuple[int | None, int], Sequence[Block]] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    @cached_property
    def _depths(self) -> Depths:
        return self.position_ids.cpu().numpy()

    def blocks(self, window: int | None = None, heads: int = 1) -> Sequence[Block]:
        """Return the blocks of all backends but ``"flex"``, in a window."""
        if (window, heads) not in self._blocks:
            nodes, plans = len(self.tree_end), list[Sequence[Block]]()
            if self.backend != "mask":
                plans.append(blocks_of(stretches_of(self._depths, heads), window))
            if self.backend != "path":
                plans.append([Block(0, nodes, (Part(((0, nodes),), "masked"),))][:nodes])
            self._blocks[window, heads] = min(
                plans, key=lambda blocks: sum(block.cost(heads) for block in blocks)
            )
        return self._blocks[window, heads]

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention of all nodes, ``[1, heads, nodes, value size]``.

        ``query`` is ``[1, heads, nodes, size]``, ``key`` ``[1, key heads, nodes, size]`` and
        ``value`` ``[1, key heads, nodes, value size]``; ``heads`` is a multiple of ``key heads``.
        Scores are multiplied by ``scaling``, by default one by the root of ``size``, and become
        ``softcap * tanh(score / softcap)``. A query attends to ``window`` depths, its own included,
        to all if ``None``. ``sinks``, ``[heads]``, are scores that take part in the softmax without
        a value.
        """
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        device = query.device.type
        dtype = query.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        query, key, value = (rows.to(dtype) for rows in (query, key, value))
        if self.backend == "flex":
            from trajpack.packing.tree_attention.flex import (  # imports Dynamo
                attend_by_blocks,
                block_mask,
            )

            if window not in self._block_masks:
                made = block_mask(self.tree_end, self.position_ids, window)
                self._block_masks[window] = made
            options: dict[str, Any] = {"scaling": scale, "softcap": softcap, "sinks": sinks}
            return attend_by_blocks(query, key, value, self._block_masks[window], **options)

        def mask_of(block: Block, part: Part, dtype: torch.dtype) -> torch.Tensor:
            spans = [torch.arange(*span, device=query.device) for span in part.spans]
            queries = slice(block.begin, block.end)
            seen = visible(
                self.tree_end, self.position_ids, window, queries=queries, keys=torch.cat(spans)
            )
            return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)

        sizes = {query.shape[-1], value.shape[-1]}
        fused = device == "cpu" and softcap is None and len(sizes) == 1
        calls = FusedCalls(scale) if fused else TorchCalls(scale, softcap)
        query, key, value = (
            rows if rows.stride(-1) == 1 else rows.contiguous() for rows in (query, key, value)
        )
        joined: Any = JoinedAttention  # torch declares no types of `apply`
        attended: torch.Tensor = joined.apply(
            query, key, value, sinks, self.blocks(window, query.shape[1]), mask_of, calls
        )
        return attended
