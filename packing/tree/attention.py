"""Attention over trees: `TreeAttention` computes it by one of three backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

Backend: TypeAlias = Literal["auto", "mask", "path", "flex"]
"""How attention is computed, see `TreeAttention`."""
MOST_QUERIES = 512
"""Queries of one call of the path backend, if it has a mask."""
PAIRS_OF_CALL = 1024
"""Pairs of a query and a key that cost about as much as one call."""
PAIRS_OF_ROW = 32
"""Pairs of a query and a key that cost about as much as gathering one node's key and value."""


class QueryBlock(NamedTuple):
    """Consecutive nodes that the path backend computes with one gather of keys."""

    begin: int
    end: int
    depth: int
    """Ancestors of the first node. They and the block hold all ancestors of its nodes."""
    is_run: bool
    """Whether each node is the parent of the next."""

    @property
    def num_keys(self) -> int:
        """Nodes from the root to the first node, and those of the block."""
        return self.depth + self.end - self.begin

    @property
    def is_causal(self) -> bool:
        """Whether a query attends to all keys up to its own: the block begins at a root."""
        return self.is_run and not self.depth

    def pairs(self, causal: bool = True) -> int:
        """Pairs of a query and a key that are computed; with or without calls without a mask."""
        size = self.end - self.begin
        if causal and self.is_causal:
            return size * (size + 1) // 2
        ends = range(MOST_QUERIES, size, MOST_QUERIES)
        return size * self.num_keys - MOST_QUERIES * sum(size - end for end in ends)

    @property
    def cost(self) -> int:
        """Work of the block, in pairs."""
        calls = 1 if self.is_causal else -(-(self.end - self.begin) // MOST_QUERIES)
        return self.pairs() + PAIRS_OF_ROW * self.num_keys + PAIRS_OF_CALL * calls


def query_blocks(depths: npt.NDArray[np.integer[Any]]) -> list[QueryBlock]:
    """Return the blocks of trees with these depths: runs, the small ones joined where that is less.

    Example:
        >>> query_blocks(np.array([0, 1, 2, 1]))
        [QueryBlock(begin=0, end=4, depth=0, is_run=False)]
    """
    begins = np.flatnonzero(np.diff(depths, prepend=-2) != 1)
    ends = np.append(begins[1:], len(depths))[: begins.size]
    found: list[QueryBlock] = []
    for begin, end, depth in zip(
        begins.tolist(), ends.tolist(), depths[begins].tolist(), strict=True
    ):
        run = QueryBlock(begin, end, depth, is_run=True)
        if found:  # the run's parent lies in the block before it, or on the path to that block
            last = found[-1]
            joined = QueryBlock(last.begin, end, last.depth, is_run=False)
            if end - last.begin <= MOST_QUERIES and joined.cost <= last.cost + run.cost:
                found[-1] = joined
                continue
        found.append(run)
    return found


def visible(
    tree_end: torch.Tensor,
    position_ids: torch.Tensor,
    window: int | None = None,
    *,
    queries: slice = slice(None),
    keys: torch.Tensor | slice = slice(None),
) -> torch.Tensor:
    """Return bool ``[queries, keys]``: True where a query, the row, attends to a key, the column.

    Args:
        tree_end: ``[nodes]``: first node behind each subtree.
        position_ids: ``[nodes]``: depths.
        window: Depths that a query attends to, its own included; all if ``None``.
        queries: Nodes of the rows; all by default.
        keys: Nodes of the columns; all by default.

    Cost: five small operations over a bool for each pair.
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

    - ``"mask"``: one call of torch's scaled dot product attention with a mask of ``nodes²``
      numbers; scores of all pairs of nodes are computed.
    - ``"path"``: calls of at most 512 queries; keys and values are gathered along the path from the
      root, `path_rows` of them. A root's run is one causal call without a mask.
    - ``"flex"``: FlexAttention with a `BlockMask` of two reductions of ``tree_end`` over blocks of
      128 nodes. Compiled once for all shapes on a device. Uncompiled on the host, where torch
      computes the scores of all pairs and no gradients.
    - ``"auto"``: ``"flex"`` on a device; on the host the one of the two others with less counted
      work: pairs of a query and a key, a gathered row as 32 of them and a call as 1,024.

    Masks are made once for each window and dtype, and kept with the object.

    Args:
        tree_end: int32 ``[nodes]``: first node behind each subtree; nodes numbered depth first.
        position_ids: ``[nodes]`` integers: depths.
        backend: As above.

    Raises:
        ValueError: If the backend is unknown.

    Cost: the path backend, and the choice on the host, read the depths on the host once
        (synchronises on a device). Nothing else synchronises.
    """

    def __init__(
        self, tree_end: torch.Tensor, position_ids: torch.Tensor, backend: Backend = "auto"
    ) -> None:
        check_backend(backend)
        self.tree_end, self.position_ids = tree_end, position_ids
        self.backend: Backend = self._least_work() if backend == "auto" else backend
        self._masks: dict[Any, Any] = {}

    def _least_work(self) -> Backend:
        if self.tree_end.device.type != "cpu":
            return "flex"
        of_mask = len(self.tree_end) ** 2 + PAIRS_OF_CALL
        return "path" if sum(block.cost for block in self.blocks) < of_mask else "mask"

    @cached_property
    def blocks(self) -> list[QueryBlock]:
        """Blocks of queries of the path backend."""
        return query_blocks(self.position_ids.cpu().numpy())

    @property
    def path_rows(self) -> int:
        """Keys, and values, that the path backend gathers in a layer."""
        rows = sum(block.num_keys for block in self.blocks)
        return 0 if rows == len(self.tree_end) else rows

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

        Args:
            query: ``[1, heads, nodes, size]``.
            key: ``[1, key heads, nodes, size]``; ``heads`` is a multiple of ``key heads``.
            value: ``[1, key heads, nodes, value size]``.
            scaling: Factor of the scores, by default one by the root of ``size``.
            window: Depths that a query attends to, its own included; all if ``None``.
            softcap: Scores become ``softcap * tanh(score / softcap)``.
            sinks: ``[heads]``: a score of each head that takes part in the softmax without a value.
        """
        plain = softcap is None and sinks is None
        options: dict[str, Any] = {"scaling": scaling, "softcap": softcap, "sinks": sinks}
        if self.backend == "flex":
            from trajpack.packing.tree.flex import attend_by_blocks, block_mask  # imports Dynamo

            mask = self._kept(window, lambda: block_mask(self.tree_end, self.position_ids, window))
            return attend_by_blocks(query, key, value, mask, **options)
        if self.backend == "mask" or not len(self.tree_end):
            mask = self._kept((window, query.dtype), lambda: self._mask(window, query.dtype))
            return _attend(query, key, value, mask, **options)
        causal = plain and window is None
        rows, calls = self._kept(
            (window, query.dtype, causal), lambda: self._calls(window, query.dtype, causal=causal)
        )
        if rows is not None:
            key, value = key.index_select(2, rows), value.index_select(2, rows)
        sizes = [block.num_keys for block in self.blocks]
        keys, values = key.split(sizes, 2), value.split(sizes, 2)
        parts = [
            _attend(
                part,
                keys[call.block][:, :, : call.num_keys],
                values[call.block][:, :, : call.num_keys],
                call.mask,
                **options,
            )
            for call, part in zip(
                calls, query.split([call.num_queries for call in calls], 2), strict=True
            )
        ]
        return torch.cat(parts, 2)

    def _kept(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._masks:
            self._masks[key] = make()
        return self._masks[key]

    def _mask(
        self,
        window: int | None,
        dtype: torch.dtype,
        queries: slice = slice(None),
        keys: torch.Tensor | slice = slice(None),
    ) -> torch.Tensor:
        """Return what is added to scores: 0 where a query attends to a key, else -infinity.

        Torch makes this of a bool mask in each layer, and keeps it for the backward pass.
        """
        seen = visible(self.tree_end, self.position_ids, window, queries=queries, keys=keys)
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)

    def _calls(
        self, window: int | None, dtype: torch.dtype, *, causal: bool
    ) -> tuple[torch.Tensor | None, list[_Call]]:
        """Return the nodes of the keys of all blocks, ``None`` if they are all nodes; the calls."""
        calls, gathered = list[_Call](), list[npt.NDArray[np.int64]]()
        for block, nodes in zip(self.blocks, self._nodes_of_blocks(), strict=True):
            number, size = len(gathered), block.end - block.begin
            gathered.append(nodes)
            if causal and block.is_causal:
                calls.append(_Call(number, size, size, None))
                continue
            for begin in range(0, size, MOST_QUERIES):
                end = min(begin + MOST_QUERIES, size)
                keys = torch.from_numpy(nodes[: block.depth + end]).to(self.tree_end.device)
                queries = slice(block.begin + begin, block.begin + end)
                mask = self._mask(window, dtype, queries, keys)
                calls.append(_Call(number, end - begin, block.depth + end, mask))
        rows = torch.from_numpy(np.concatenate(gathered)).to(self.tree_end.device)
        return (rows if self.path_rows else None), calls

    def _nodes_of_blocks(self) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the nodes of the keys of each block: the path to its first node, and its own."""
        depths = self.position_ids.cpu().numpy()
        latest = np.empty(len(depths), np.int64)  # last node so far of each depth
        for begin, end, depth, _ in self.blocks:
            own = np.arange(begin, end)
            yield np.concatenate([latest[:depth], own])
            latest[depths[begin:end]] = own


class _Call(NamedTuple):
    """One call of the path backend."""

    block: int
    num_queries: int
    num_keys: int
    """Keys of the block that the queries may attend to; they come first."""
    mask: torch.Tensor | None
    """What is added to scores ``[queries, keys]``; causal if ``None``."""


def check_backend(backend: str) -> None:
    """Raise unless a backend is known."""
    if backend not in get_args(Backend):
        known = ", ".join(map(repr, get_args(Backend)))
        raise ValueError(f"backend must be one of {known}, got {backend!r}")


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return attention with a mask that is added to scores; causal if it is ``None``."""
    groups = query.shape[1] // key.shape[1]
    if mask is None or (softcap is None and sinks is None):
        attended: torch.Tensor = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=groups > 1
        )
        return attended
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if sinks is not None:
        sink = sinks.to(scores.dtype)[:, None, None].expand(1, -1, scores.shape[2], 1)
        scores = torch.cat([scores, sink], 3)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(3, exact).to(scores.dtype)
    return weights[..., : key.shape[2]] @ value
