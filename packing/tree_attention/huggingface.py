"""Attention over trees as an attention implementation of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from trajpack.packing.optional import require
from trajpack.packing.tree_attention.attention import Backend, TreeAttention, check_backend

NAME = "trajpack_tree"
"""Name under which `register_tree_attention` registers the attention."""
MESSAGE = f"{NAME} attention"
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
STATES = ("mamba", "ssm", "linear_", "conv", "rwkv", "lru", "xlstm")
"""Parts of the names of settings that only layers with a state have."""
RANDOM = ("dropout", "pdrop", "dropout_rate", "dropout_prob", "jitter_noise", "jitter_eps")
"""Ends of the names of settings that draw random numbers in training."""
_MADE = WeakTensorKeyDictionary()
"""`TreeAttention` by backend, for each table that layers have got, as long as the table lives."""


def register_tree_attention(backend: Backend = "auto") -> None:
    """Register the attention ``"trajpack_tree"`` with transformers, for `TreeBatch.model_inputs`.

    Choose it with ``model.set_attn_implementation("trajpack_tree")``. Log-probabilities and
    gradients are those of separate sequences. Sliding windows count depths; soft-caps and attention
    sinks are applied.

    In a forward pass a layer raises a `ValueError` for what a tree cannot have, or what this
    attention does not compute:

    - input that is not of `TreeBatch.model_inputs`, and a cache;
    - models with layers that have a recurrent state, a convolution, or attention in chunks, as
      their settings tell;
    - dropout and noise of a router in training, as the settings tell;
    - auxiliary losses of a router (``output_router_logits``), which count tokens;
    - position biases, attention that is not causal, and windows that a model's attention does not
      hand on.

    A model without any attention never calls it, and a model may have settings of its own; find
    both by `trajpack.packing.adapters.huggingface.check_tree_attention`. Pass no ``labels``: a
    model reads the row before a label, which at a branch is another node than the parent.

    Args:
        backend: How attention is computed, see
            `trajpack.packing.tree_attention.attention.TreeAttention`: ``"auto"`` takes FlexAttention on a
            device, and on the host ``"mask"`` or ``"path"`` by counted work.

    Raises:
        ModuleNotFoundError: If transformers is missing.
        ValueError: If ``backend`` is unknown.

    Cost: none but the import of transformers. Masks are made in the first layer of a forward pass,
        and kept as long as the ``attention_mask`` of the inputs.

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
    check_backend(backend)
    require("transformers")
    from transformers import AttentionInterface

    outside: Any = torch.compiler.disable(_attention_of)  # imports Dynamo
    AttentionInterface.register(
        NAME, partial(tree_attention, attention_of=partial(outside, backend=backend))
    )


def tree_attention(  # noqa: PLR0913 - transformers' interface of attention
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    attention_of: Callable[[torch.Tensor], TreeAttention],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of one layer, as transformers' interface of attention asks for.

    Args:
        module: The layer.
        query: ``[1, heads, nodes, size]``.
        key: ``[1, key heads, nodes, size]``.
        value: ``[1, key heads, nodes, size]``.
        attention_mask: Table of `tree_table`.
        attention_of: Makes the attention of a table, once.
        scaling: Factor of the scores.
        dropout: Must be 0.
        sliding_window: Depths that a query attends to.
        softcap: As of `TreeAttention`.
        s_aux: Sinks of the heads, as of `TreeAttention`.
        options: Further arguments of the model.

    Raises:
        ValueError: See `register_tree_attention`.
    """
    _check_table(query, key, attention_mask)
    if dropout:
        raise ValueError(f"{MESSAGE} takes no dropout, which is not the same on a tree")
    if options.get("position_bias") is not None:
        raise ValueError(f"{MESSAGE} does not compute position_bias")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{MESSAGE} is causal, {type(module).__name__} asks for another")
    check_settings(module, sliding_window)
    assert attention_mask is not None
    attended = attention_of(attention_mask)(
        query,
        key,
        value,
        scaling=scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return attended.transpose(1, 2).contiguous(), None


def _check_table(
    query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None
) -> None:
    """Raise unless a mask is a `tree_table` of the queries, which are the keys too."""
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


def _attention_of(table: Any, backend: Backend) -> TreeAttention:
    """Return the attention of a table, the same for all layers."""
    made: dict[Backend, TreeAttention] = _MADE.setdefault(table, {})
    if backend not in made:
        tree_end, position_ids = table[:, 0, 0].clone()  # a view would keep the table
        made[backend] = TreeAttention(tree_end, position_ids, backend)
    return made[backend]


def tree_table(tree_end: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return what a tree needs of a mask, int32 ``[2, 2, 1, nodes]``: ends and depths, repeated.

    Transformers hands a mask of four dimensions to every layer as it is. A layer of another kind
    fails on this one: it is neither bool nor float, and has the shape of two rows with two heads.
    """
    table = torch.stack([tree_end, position_ids.int()])
    return table[:, None, None].expand(2, 2, 1, -1)


def check_settings(module: Any, window: int | None) -> None:
    """Raise if the settings of a layer's model tell of what a tree cannot have.

    Args:
        module: The layer.
        window: Sliding window that its model hands on.

    Raises:
        ValueError: Names the layers or the setting.
    """
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    others = sorted(set(kinds) - ATTENTION_LAYERS)
    settings = vars(config) if hasattr(config, "__dict__") else {}
    found = others or [name for name in settings if name.startswith(STATES)]
    if found:
        raise ValueError(
            f"{MESSAGE} serves models of attention layers alone; "
            f"{type(config).__name__} has {', '.join(found)}"
        )
    if settings.get("output_router_logits"):
        raise ValueError(
            f"{MESSAGE} refuses output_router_logits: the auxiliary loss of a router would count a "
            "shared token once"
        )
    drawn = [name for name in settings if name.endswith(RANDOM) and settings[name]]
    drawn = [name for name in drawn if not name.startswith("classifier")]
    if drawn and getattr(module, "training", False):
        raise ValueError(f"{MESSAGE} takes no dropout or noise in training, got {', '.join(drawn)}")
    number = getattr(module, "layer_idx", None)
    if kinds and number is not None and number < len(kinds):
        slides = kinds[number] == "sliding_attention"
    else:
        slides = settings.get("use_sliding_window") is not False and not kinds
        slides = slides and settings.get("sliding_window") is not None
    if slides and window is None:
        raise ValueError(
            f"{MESSAGE} needs the sliding window of a layer, {type(module).__name__} hands none on"
        )
