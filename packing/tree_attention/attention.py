"""Attention over trees: `TreeAttention` computes it by one of two backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Backend: TypeAlias = Literal["auto", "path", "flex"]
"""How attention is computed, see `TreeAttention`."""
QUERIES = 256
"""Queries of a call of ``"path"``."""


class Call(NamedTuple):
    """Consecutive queries, and the keys that one of them attends to."""

    queries: slice
    keys: torch.Tensor
    """int64 ``[keys]``, ascending."""
    mask: torch.Tensor
    """``[queries, keys]``, added to the scores: 0 where a query sees a key, else -inf."""


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
) -> torch.Tensor:
    """Return bool ``[queries, nodes]``: True where a query, the row, attends to a key, the column.

    ``tree_end`` and ``position_ids`` are ``[nodes]``; a query attends to ``window`` depths, its own
    included, or to all if ``None``.
    """
    node = torch.arange(tree_end.shape[0], device=tree_end.device)
    query = node[queries, None]
    mask = (node <= query) & (query < tree_end)
    if window is not None:
        mask &= position_ids[queries, None] - position_ids < window
    return mask


class TreeAttention:
    """Attention of one batch of trees: a node attends to its ancestors and itself.

    A key k is visible to a query q where ``k <= q < tree_end[k]``. Backends:

    - ``"path"``: a call for each 256 nodes, over the keys that one of them attends to: ancestors of
      the first, and the nodes themselves. Several branches below one path share a call.
    - ``"flex"``: FlexAttention with a `BlockMask` of two reductions of ``tree_end`` over blocks of
      128 nodes. Compiled once for all shapes on a device. Uncompiled on the host, where torch
      computes the scores of all pairs and no gradients.
    - ``"auto"``: ``"flex"`` on a device, ``"path"`` on the host.

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
        on_host = tree_end.device.type == "cpu"
        self.backend = ("path" if on_host else "flex") if backend == "auto" else backend
        self._calls: dict[tuple[int | None, torch.dtype], list[Call]] = {}
        self._block_masks: dict[int | None, BlockMask] = {}

    def calls(self, window: int | None, dtype: torch.dtype) -> list[Call]:
        """Return the calls of ``"path"`` in a window: the same for all layers."""
        if (window, dtype) not in self._calls:
            made = self._calls[window, dtype] = list[Call]()
            for begin in range(0, len(self.tree_end), QUERIES):
                queries = slice(begin, begin + QUERIES)
                seen = visible(self.tree_end, self.position_ids, window, queries=queries)
                keys = seen.any(0).nonzero()[:, 0]
                hidden = ~seen[:, keys]
                mask = torch.zeros_like(hidden, dtype=dtype).masked_fill_(hidden, -torch.inf)
                made.append(Call(queries, keys, mask))
        return self._calls[window, dtype]

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

        attended = [
            _attended(
                *(query[:, :, call.queries], key[:, :, call.keys], value[:, :, call.keys]),
                mask=call.mask, scaling=scale, softcap=softcap, sinks=sinks,
            )
            for call in self.calls(window, dtype)
        ]  # fmt: skip
        return torch.cat(attended or [query[..., : value.shape[-1]]], 2)


def _attended(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return the attention of some queries, as of `TreeAttention`; ``mask`` is of a `Call`."""
    if softcap is None and sinks is None:
        return scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
        )
    groups = query.shape[1] // key.shape[1]
    key, value = (rows.repeat_interleave(groups, 1) for rows in (key, value))
    scores = query @ key.mT * scaling
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if sinks is not None:  # scores without values
        column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], 3)
    weights = scores.softmax(3)[..., : key.shape[2]].to(value.dtype)
    return weights @ value
