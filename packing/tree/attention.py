"""Attention over trees for Hugging Face models: by an explicit mask, or along root paths."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch

from trajpack.packing.optional import require

NAME = "trajpack_tree"
"""Name under which `register_tree_attention` registers the attention."""
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
STATES = ("mamba", "ssm", "linear_", "conv", "rwkv", "lru", "xlstm")
"""Parts of the names of settings that only layers with a state have."""
MESSAGE = f"{NAME} attention"
Backend: TypeAlias = Literal["auto", "mask", "path"]
"""How scores are computed, see `register_tree_attention`."""
PAIRS_OF_CALL = 1024
"""Pairs of a query and a key that cost about as much as a call for one more stretch."""


class Stretch(NamedTuple):
    """Consecutive nodes, each the parent of the next, and the path to them."""

    begin: int
    end: int
    path: tuple[tuple[int, int], ...]
    """Stretches of nodes from the root to the parent of the first node."""
    depth: int
    """Depth of the first node: nodes of the path."""

    @property
    def pairs(self) -> int:
        """Pairs of a query of the stretch and a key of its path."""
        return (self.end - self.begin) * (self.depth + self.end - self.begin)


def visible(
    tree_end: torch.Tensor, position_ids: torch.Tensor, window: int | None = None
) -> torch.Tensor:
    """Return bool ``[nodes, nodes]``: True where a query, the row, attends to a key, the column.

    Args:
        tree_end: ``[nodes]``: first node behind each subtree.
        position_ids: ``[nodes]``: depths.
        window: Depths that a query attends to, its own included; all if ``None``.

    Cost: five small operations over ``nodes²`` bools.
    """
    node = torch.arange(tree_end.shape[0], device=tree_end.device)
    mask = (node <= node[:, None]) & (node[:, None] < tree_end)
    if window is not None:
        mask &= position_ids[:, None] - position_ids < window
    return mask


def stretches_of(position_ids: torch.Tensor) -> list[Stretch]:
    """Return the stretches of a tree with these depths, which must be on the host.

    Example:
        >>> stretches_of(torch.tensor([0, 1, 2, 1]))[1]
        Stretch(begin=3, end=4, path=((0, 1),), depth=1)
    """
    depths = position_ids.numpy()
    begins = np.flatnonzero(np.diff(depths, prepend=-2) != 1)
    ends = np.append(begins[1:], len(depths))[: begins.size]
    found, stack = list[Stretch](), list[tuple[int, int]]()  # first nodes on the path, and depths
    for begin, end, depth in zip(
        begins.tolist(), ends.tolist(), depths[begins].tolist(), strict=True
    ):
        while stack and stack[-1][1] >= depth:
            stack.pop()
        leaves = [*(below for _, below in stack[1:]), depth]
        path = tuple(
            (node, node + left - first) for (node, first), left in zip(stack, leaves, strict=False)
        )
        found.append(Stretch(begin, end, path, depth))
        stack.append((begin, depth))
    return found


def register_tree_attention(backend: Backend = "auto") -> None:
    """Register the attention ``"trajpack_tree"`` with transformers, for `TreeBatch.model_inputs`.

    Choose it with ``model.set_attn_implementation("trajpack_tree")``. Each layer calls torch's
    scaled dot product attention:

    - ``"mask"``: once, with a mask of ``nodes²`` bools made from `TreeBatch.tree_end`; scores of
      all pairs of nodes are computed. For trees of a few thousand nodes.
    - ``"path"``: for each stretch of nodes without a branch, with the keys from the root to it;
      only pairs on one path are computed. For trees with few branches, on the host: on a device
      it synchronises in each layer.
    - ``"auto"``: ``"path"`` on the host where it computes fewer pairs, a call counted as 1,024 of
      them; else ``"mask"``.

    In a forward pass a layer raises a `ValueError` for what a tree cannot have, or what this
    attention does not compute: input that is not of `TreeBatch.model_inputs`, a cache, dropout,
    soft-caps, attention sinks, and models with layers that have a recurrent state or a convolution,
    as their settings tell. A model without any attention never calls it; find such a model by
    `trajpack.packing.adapters.huggingface.check_tree_attention`.

    Args:
        backend: How scores are computed.

    Raises:
        ModuleNotFoundError: If transformers is missing.
        ValueError: If ``backend`` is unknown.

    Cost: none but the import of transformers. A layer: with ``"mask"`` about ``nodes²`` bytes, with
        ``"path"`` a copy of the keys and values of each stretch's path.

    Example:
        >>> import torch, trajpack
        >>> from trajpack.agent import build_tiny_model
        >>> register_tree_attention()
        >>> model, _ = build_tiny_model(seed=0)
        >>> model.set_attn_implementation("trajpack_tree")
        >>> turns = [trajpack.Turn([1, 2], [3], [-0.5]), trajpack.Turn([1, 2], [4], [-0.5])]
        >>> tree = trajpack.pack_tree([trajpack.Trajectory("a", turns)])
        >>> alone = trajpack.pack_tree([trajpack.Trajectory("a", turns[1:])])
        >>> logits, other = (model(**batch.model_inputs()).logits[0] for batch in (tree, alone))
        >>> torch.allclose(logits[[0, 1, 3]], other, atol=1e-5)
        True
    """
    if backend not in get_args(Backend):
        known = ", ".join(map(repr, get_args(Backend)))
        raise ValueError(f"backend must be one of {known}, got {backend!r}")
    require("transformers")
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, partial(tree_attention, backend=backend))


def tree_attention(  # noqa: PLR0913 - transformers' interface of attention
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    backend: Backend = "auto",
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of one layer, as transformers' interface of attention asks for.

    Args:
        module: The layer.
        query: ``[1, heads, nodes, size]``.
        key: ``[1, key heads, nodes, size]``.
        value: ``[1, key heads, nodes, size]``.
        attention_mask: Table of `tree_table`.
        backend: See `register_tree_attention`.
        scaling: Factor of the scores.
        dropout: Must be 0.
        sliding_window: As the window of `visible`.
        options: Further arguments of the model.

    Raises:
        ValueError: See `register_tree_attention`.
    """
    table = _checked_table(query, key, attention_mask)
    if dropout:
        raise ValueError(f"{MESSAGE} takes no dropout, which is not the same on a tree")
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"{MESSAGE} does not compute {name}")
    check_layers(getattr(module, "config", None))
    tree_end, position_ids = table
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    by_path = backend == "path" or (backend == "auto" and query.device.type == "cpu")
    stretches = stretches_of(position_ids.cpu()) if by_path else []
    pairs = sum(one.pairs + PAIRS_OF_CALL for one in stretches)
    if backend == "mask" or not stretches or (backend == "auto" and pairs > query.shape[2] ** 2):
        mask = visible(tree_end, position_ids, sliding_window)
        attended: torch.Tensor = attend(query, key, value, attn_mask=mask)
    else:
        parts = [
            attend(
                query[:, :, one.begin : one.end],
                _along(key, one),
                _along(value, one),
                attn_mask=_path_mask(one, sliding_window, query.device),
            )
            for one in stretches
        ]
        attended = torch.cat(parts, 2)
    return attended.transpose(1, 2).contiguous(), None


def _checked_table(
    query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None
) -> torch.Tensor:
    """Return ends and depths, ``[2, nodes]``, of a mask that is a `tree_table`."""
    num_nodes = query.shape[2]
    if (
        attention_mask is None
        or attention_mask.dtype != torch.int32
        or attention_mask.shape != (2, 2, 1, num_nodes)
        or key.shape[2] != num_nodes
        or query.shape[0] != 1
    ):
        raise ValueError(
            f"{MESSAGE} takes TreeBatch.model_inputs() and no cache, got "
            f"{key.shape[2]} keys for {num_nodes} queries and the mask "
            f"{None if attention_mask is None else list(attention_mask.shape)}"
        )
    return attention_mask[:, 0, 0]


def _along(rows: torch.Tensor, stretch: Stretch) -> torch.Tensor:
    """Return the rows of the nodes from the root to the end of a stretch."""
    places = (*stretch.path, (stretch.begin, stretch.end))
    return torch.cat([rows[:, :, begin:end] for begin, end in places], 2)


def _path_mask(stretch: Stretch, window: int | None, device: torch.device) -> torch.Tensor:
    """Return which keys of its path each query of a stretch attends to."""
    size = stretch.end - stretch.begin
    mask = torch.ones(size, stretch.depth + size, dtype=torch.bool, device=device)
    mask = mask.tril_(stretch.depth)
    return mask if window is None else mask.triu_(stretch.depth - window + 1)


def tree_table(tree_end: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return what a tree needs of a mask, int32 ``[2, 2, 1, nodes]``: ends and depths, repeated.

    Transformers hands a mask of four dimensions to every layer as it is. A layer of another kind
    fails on this one: it is neither bool nor float, and has the shape of two rows with two heads.
    """
    table = torch.stack([tree_end, position_ids.int()])
    return table[:, None, None].expand(2, 2, 1, -1)


def check_layers(config: Any) -> None:
    """Raise if the settings of a model tell of layers with a state.

    Raises:
        ValueError: Names the layers or the setting.
    """
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    others = sorted(set(kinds) - ATTENTION_LAYERS)
    settings = vars(config) if hasattr(config, "__dict__") else {}
    found = others or [name for name in settings if name.startswith(STATES)]
    if found:
        raise ValueError(
            f"{MESSAGE} serves models of attention layers alone; "
            f"{type(config).__name__} has {', '.join(found)}"
        )
