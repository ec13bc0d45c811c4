"""Hugging Face's padding-free batches and trees; `check_isolation` tests a model."""

from __future__ import annotations

from typing import Any, Literal

import torch

from trajpack.packing.adapters.huggingface_head import LMHead
from trajpack.packing.isolation.isolation import check_isolation
from trajpack.packing.isolation.trees import check_tree_attention
from trajpack.packing.rows import layout
from trajpack.packing.tree_attention.huggingface import register_tree_attention

__all__ = [
    "LMHead",
    "check_isolation",
    "check_tree_attention",
    "register_tree_attention",
    "to_padding_free",
]

IGNORED = -100
"""Label of tokens without a loss."""


def to_padding_free(
    batch: layout.Packed,
    *,
    labels: Literal["generated", "all"] = "generated",
    separator_id: int = IGNORED,
    return_position_ids: bool = True,
    return_flash_attn_kwargs: bool = False,
    return_seq_idx: bool = False,
    position_ids_start: int = 0,
) -> dict[str, Any]:
    """Return the result of transformers' ``DataCollatorWithFlattening``, with its options.

    Labels are at the token itself: the model shifts them. They are at generated tokens, or at
    ``"all"``, never at padding. Call the model with ``use_cache=False``: with a cache, or with an
    ``attention_mask``, sequences see each other without an error. Convolutions and recurrent layers
    need ``seq_idx`` and boundaries instead of positions: set these options for a hybrid model, and
    call `check_isolation` once for any model.

    Raises:
        ValueError: If ``labels`` is neither.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> batch = pack([Trajectory(name, [Turn([1, 2], [3], [-0.5])]) for name in "ab"])
        >>> to_padding_free(batch, return_seq_idx=True)["labels"]
        tensor([[-100, -100,    3, -100, -100,    3]])
    """
    if labels not in ("generated", "all"):
        raise ValueError(f"to_padding_free: labels must be 'generated' or 'all', got {labels!r}")
    holds = layout.holds_token(batch)
    labelled = torch.where(
        batch.loss_mask if labels == "generated" else holds, batch.input_ids, IGNORED
    )
    # padding may be at position 0 too, and has no label
    labelled = torch.where((batch.position_ids == 0) & holds, separator_id, labelled)
    found = {"input_ids": batch.input_ids[None], "labels": labelled[None]}
    if return_position_ids:
        start = position_ids_start  # where it is 0, positions stay a view
        found["position_ids"] = (batch.position_ids + start if start else batch.position_ids)[None]
    if return_seq_idx:
        found["seq_idx"] = batch.sequence_ids[None]
    if return_flash_attn_kwargs:
        given = batch.model_inputs()
        found |= {name: given[name] for name in given if name.startswith(("cu_", "max_"))}
    return found
