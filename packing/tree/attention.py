"""Attention over trees for Hugging Face models, by an explicit mask."""

from __future__ import annotations

from typing import Any

import torch

from trajpack.packing.optional import require

NAME = "trajpack_tree"
"""Name under which `register_tree_attention` registers the attention."""
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
STATES = ("mamba", "ssm", "linear_", "conv", "rwkv", "lru", "xlstm")
"""Parts of the names of settings that only layers with a state have."""
MESSAGE = f"{NAME} attention"


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


def register_tree_attention() -> None:
    """Register the attention ``"trajpack_tree"`` with transformers, for `TreeBatch.model_inputs`.

    Choose it with ``model.set_attn_implementation("trajpack_tree")``. Each layer makes a mask of
    ``nodes²`` bools from `TreeBatch.tree_end` and calls torch's scaled dot product attention, on
    any device. This is for trees of a few thousand nodes.

    In a forward pass a layer raises a `ValueError` for what a tree cannot have, or what this
    attention does not compute: input that is not of `TreeBatch.model_inputs`, a cache, dropout,
    soft-caps, attention sinks, and models with layers that have a recurrent state or a convolution,
    as their settings tell. A model without any attention never calls it; find such a model by
    `trajpack.packing.adapters.huggingface.check_tree_attention`.

    Raises:
        ModuleNotFoundError: If transformers is missing.

    Cost: none but the import of transformers. A layer: about ``nodes²`` bytes and the scores of all
        pairs of nodes.

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
    require("transformers")
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, tree_attention)


def tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
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
        scaling: Factor of the scores.
        dropout: Must be 0.
        sliding_window: As the window of `visible`.
        options: Further arguments of the model.

    Raises:
        ValueError: See `register_tree_attention`.
    """
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
    if dropout:
        raise ValueError(f"{MESSAGE} takes no dropout, which is not the same on a tree")
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(f"{MESSAGE} does not compute {name}")
    check_layers(getattr(module, "config", None))
    tree_end, position_ids = attention_mask[:, 0, 0]
    attended: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=visible(tree_end, position_ids, sliding_window),
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return attended.transpose(1, 2).contiguous(), None


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
