"""Attention over trees as an attention implementation of Hugging Face transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from trajpack.kernels.segments import owners_of_entries
from trajpack.kernels.validation import values_to_check
from trajpack.packing.optional import require
from trajpack.packing.tree_attention.attention import Backend, TreeAttention, check_backend

NAME = "trajpack_tree"
"""Name under which `register_tree_attention` registers the attention."""
MESSAGE = f"{NAME} attention"
ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
STATES = ("mamba", "ssm", "linear_", "conv", "rwkv", "lru", "xlstm")
"""Parts of the names of settings that only layers with a state have."""
DROPOUTS = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)
"""Modules that draw random numbers in training."""
RANDOM = ("dropout", "pdrop", "dropout_rate", "dropout_prob", "jitter_noise", "jitter_eps")
"""Ends of the names of settings that draw random numbers in training."""
REFUSED = {
    "output_attentions": "it computes no weights of all pairs",
    "output_router_logits": "the auxiliary loss of a router would count a shared token once",
}
"""Arguments of a model that a tree cannot have, or that its attention does not compute."""
_MADE = WeakTensorKeyDictionary()
"""Attention by backend, for each table that layers have got, as long as the table lives."""


def register_tree_attention(backend: Backend = "auto") -> None:
    """Register the attention ``"trajpack_tree"`` with transformers, for trees and packed rows.

    It takes `TreeBatch.model_inputs`, and `PackedBatch.model_inputs` and `MicroBatch.model_inputs`:
    a sequence is a tree without branches. Where FlashAttention is missing its time grows with the
    lengths of sequences; that of sdpa and eager attention with the square of a row's tokens.

    Choose it with ``model.set_attn_implementation("trajpack_tree")``, and another one, such as
    ``"sdpa"``, before the model generates. Log-probabilities and gradients are those of separate
    sequences. Sliding windows count depths; soft-caps and attention sinks are applied.

    In a forward pass a layer raises a `ValueError` for what this attention does not compute: other
    inputs, a cache, ``output_attentions``, dropout of weights, attention in chunks, position
    biases, attention that is not causal, and windows that a model's attention does not hand on. Of
    a tree also for ``labels`` (a model reads the row before a label, `TreeBatch.logprobs` the
    parent), ``output_router_logits``, other dropout or noise in training, layers with a recurrent
    state or a convolution, and models that take no ``position_ids``.

    A model without any attention never calls it, and a model may have settings of its own.
    `trajpack.packing.adapters.huggingface.check_tree_attention` finds both;
    `trajpack.packing.adapters.huggingface.LMHead` calls it once.

    Args:
        backend: How attention is computed, see
            `trajpack.packing.tree_attention.attention.TreeAttention`: ``"auto"`` takes
            ``"flex"`` on a device, ``"path"`` on the host.

    Raises:
        ModuleNotFoundError: If transformers is missing.
        ValueError: If ``backend`` is unknown.

    Example:
        >>> from trajpack.agent import build_tiny_model
        >>> from trajpack.packing.adapters.huggingface import check_tree_attention
        >>> register_tree_attention()
        >>> model, _ = build_tiny_model(seed=0)
        >>> model.set_attn_implementation("trajpack_tree")
        >>> check_tree_attention(model)
    """
    check_backend(backend)
    require("transformers")
    from transformers import AttentionInterface

    outside: Any = torch.compiler.disable(_attention_of)  # imports Dynamo, as transformers does
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
    attention_of: Callable[..., Callable[..., torch.Tensor]],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of one layer, as transformers' interface of attention asks for.

    ``attention_mask`` is a table of `tree_table`, or ``None`` with the boundaries of a row's
    sequences among ``options``; ``attention_of`` makes the attention of a table or of boundaries,
    once, and checks the call of the model. Tensors, scaling, window, soft-cap and sinks (``s_aux``)
    are as of `TreeAttention`; ``options`` are further arguments of the model.

    Raises:
        ValueError: See `register_tree_attention`.
    """
    num_nodes, shape = query.shape[2], getattr(attention_mask, "shape", None)
    table, is_tree = attention_mask, attention_mask is not None
    if not is_tree:
        table = options.get("cu_seq_lens_q")
    if (
        table is None
        or table.dtype != torch.int32
        or (is_tree and shape != (2, 2, 1, num_nodes))
        or key.shape[2] != num_nodes
        or query.shape[0] != 1
    ):
        raise ValueError(
            f"{MESSAGE} takes TreeBatch.model_inputs() or those of a packed row, and no cache, got "
            f"{key.shape[2]} keys for {num_nodes} queries and the mask "
            f"{shape and list(shape)}; for other inputs, and to generate, choose another "
            "attention: model.set_attn_implementation('sdpa')"
        )
    if dropout:
        raise ValueError(f"{MESSAGE} takes no dropout, which is not the same on a tree")
    for name, why in REFUSED.items():
        if options.get(name) and (is_tree or name == "output_attentions"):
            raise ValueError(f"{MESSAGE} refuses {name}: {why}")
    if options.get("position_bias") is not None:
        raise ValueError(f"{MESSAGE} does not compute position_bias")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{MESSAGE} is causal, {type(module).__name__} asks for another")
    check_settings(module, sliding_window, is_tree=is_tree)
    attend = attention_of(table, module, num_nodes=num_nodes)
    attended = attend(
        query, key, value, scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return attended.transpose(1, 2).contiguous(), None


def _attention_of(
    table: Any, module: Any, num_nodes: int, backend: Backend
) -> Callable[..., torch.Tensor]:
    """Return the attention of a table, or of the boundaries of a row: the same for all layers.

    In the first one the call with a tree is checked.
    """
    is_tree = table.ndim > 1
    if is_tree and not getattr(module, "layer_idx", 0):
        check_call()
    made: dict[Backend, Any] = _MADE.setdefault(table, {})
    if backend not in made:
        if is_tree:
            tree_end, position_ids = table[:, 0, 0].clone()  # a view would keep the table
        else:
            tree_end, position_ids = _tables_of_row(table, num_nodes)
        attention = TreeAttention(tree_end, position_ids, backend)
        is_compiled = attention.backend == "flex"  # others have a plan for each tree
        made[backend] = attention if is_compiled else torch.compiler.disable(attention.__call__)
    attend: Callable[..., torch.Tensor] = made[backend]
    return attend


def _tables_of_row(boundaries: torch.Tensor, num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ends and depths of the tokens of a row: each sequence is a tree without branches."""
    readable = values_to_check(boundaries)
    if readable is not None and (not len(readable) or int(readable[-1]) != num_nodes):
        ends = readable[-1:].tolist()
        raise ValueError(f"{MESSAGE} takes boundaries that end at {num_nodes}, got {ends}")
    owners, _ = owners_of_entries(boundaries, num_nodes)
    places = torch.arange(num_nodes, dtype=torch.int32, device=boundaries.device)
    return boundaries[1:][owners], places - boundaries[:-1][owners]


def check_call() -> None:
    """Raise if the model that is running was called with what a tree cannot have.

    A layer does not get what the models around it were given. The stack of calls has it: the
    arguments of their ``forward``, also where torch compiles a model or a function that calls it. A
    backward pass that computes a layer again runs without them; the forward pass has checked it.

    Raises:
        ValueError: Names the argument or the module; also if the stack does not show the call.
    """
    if torch._C._current_graph_task_id() >= 0:  # of a backward pass
        return
    if getattr(sys.modules.get("torch._dynamo.config"), "nested_graph_breaks", False):
        raise ValueError(
            f"{MESSAGE} cannot check a model's arguments with torch._dynamo.config."
            "nested_graph_breaks, which hides the calls of compiled models: switch it off"
        )
    from transformers import PreTrainedModel

    models, takes_positions, frame = list[Any](), False, sys._getframe(1)
    while (above := frame.f_back) is not None:  # the inner models first
        frame, code, held = above, above.f_code, above.f_locals
        if code.co_name != "forward" or not isinstance(held.get("self"), PreTrainedModel):
            continue
        models.append(held["self"])
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        takes_positions |= "position_ids" in names and "position_ids" in held
        if "labels" in names and held.get("labels") is not None:
            raise ValueError(
                f"{MESSAGE} refuses labels: {type(models[-1]).__name__} would read the row before "
                "a label, at a branch another node than its parent; call TreeBatch.logprobs"
            )
    if not models:
        raise ValueError(f"{MESSAGE} finds no call of a model of transformers, which it checks")
    if not takes_positions:
        raise ValueError(
            f"{MESSAGE} needs position_ids, which {type(models[0]).__name__} does not take"
        )
    check_dropouts(models[-1])  # the outermost


def check_dropouts(model: nn.Module) -> None:
    """Raise a `ValueError` that names the module if one is dropout in training."""
    for name, part in model.named_modules():
        if isinstance(part, DROPOUTS) and part.training and part.p:
            raise ValueError(f"{MESSAGE} takes no dropout in training, {name} drops {part.p}")


def tree_table(tree_end: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Return what a tree needs of a mask, int32 ``[2, 2, 1, nodes]``: ends and depths, repeated.

    Transformers hands a mask of four dimensions to every layer as it is. A layer of another kind
    fails on this one: it is neither bool nor float, and has the shape of two rows with two heads.
    """
    table = torch.stack([tree_end, position_ids.int()])
    return table[:, None, None].expand(2, 2, 1, -1)


def check_settings(module: Any, window: int | None, *, is_tree: bool = True) -> None:
    """Raise a `ValueError` if the settings of a layer's model tell of what a tree cannot have.

    ``window`` is the sliding window that the layer's model hands on. A row may have other layers,
    dropout, and a router's loss, but no attention in chunks.
    """
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    others = sorted(set(kinds) - ATTENTION_LAYERS)
    settings = vars(config) if hasattr(config, "__dict__") else {}
    found = others or [name for name in settings if name.startswith(STATES)]
    if not is_tree:
        found = [name for name in others if "chunk" in name]
    if found:
        raise ValueError(
            f"{MESSAGE} serves models of attention layers alone; "
            f"{type(config).__name__} has {', '.join(found)}"
        )
    if is_tree:
        _check_settings_of_tree(module, config, settings)
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


def _check_settings_of_tree(module: Any, config: Any, settings: dict[str, Any]) -> None:
    for name, why in REFUSED.items():
        if getattr(config, name, None):
            raise ValueError(f"{MESSAGE} refuses {name}: {why}")
    drawn = [name for name in settings if name.endswith(RANDOM) and settings[name]]
    drawn = [name for name in drawn if not name.startswith("classifier")]
    if drawn and getattr(module, "training", False):
        raise ValueError(f"{MESSAGE} takes no dropout or noise in training, got {', '.join(drawn)}")
