"""Hugging Face's padding-free batches: what ``DataCollatorWithFlattening`` collates."""

from __future__ import annotations

from typing import Any, Literal

import torch

from trajpack.packing.adapters.packed import Packed, check_unpadded, holds_token

_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
IGNORED = -100
"""The label that no loss is taken at."""


def to_padding_free(
    batch: Packed,
    *,
    labels: Literal["generated", "all"] = "generated",
    separator_id: int = IGNORED,
    return_position_ids: bool = True,
    return_flash_attn_kwargs: bool = False,
    return_seq_idx: bool = False,
    position_ids_start: int = 0,
) -> dict[str, Any]:
    """Return what transformers' ``DataCollatorWithFlattening`` returns, with its options.

    ================================ ===== ========= ===============================================
    key                              dtype shape     content
    ================================ ===== ========= ===============================================
    input_ids                        int64 [1, T]    tokens, sequence after sequence
    labels                           int64 [1, T]    the token itself; ``separator_id`` where a
                                                     sequence begins, -100 where no loss is
    position_ids                     int64 [1, T]    from ``position_ids_start`` in every sequence
    seq_idx                          int32 [1, T]    number of the token's sequence
    cu_seq_lens_q, cu_seq_lens_k     int32 [n + 1]   where sequences lie
    max_length_q, max_length_k       int             tokens of the longest
    ================================ ===== ========= ===============================================

    Labels stand at the token itself: the model shifts them. Give the model ``use_cache=False``
    besides: with a cache, and as with an ``attention_mask``, sequences see each other, silently.

    Not carried: log-probabilities, versions, returns, advantages; turns.

    Args:
        batch: A batch or a micro-batch; its padding has the label -100.
        labels: ``"generated"`` has a label at generated tokens alone, ``"all"`` at all tokens.
        separator_id: Label where a sequence begins.
        return_position_ids: Whether to return `position_ids`.
        return_flash_attn_kwargs: Whether to return boundaries and lengths.
        return_seq_idx: Whether to return `seq_idx`.
        position_ids_start: Position of the first token of a sequence.

    Raises:
        ValueError: If ``labels`` is neither; if it is ``"all"`` and the batch that of a
            `StaticBatch`, whose padding would have labels.

    Cost: labels take some launches over the tokens, positions one where they do not start at 0;
    the rest are views. No synchronisation.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> batch = pack([Trajectory(name, [Turn([1, 2], [3], [-0.5])]) for name in "ab"])
        >>> to_padding_free(batch, return_seq_idx=True)["labels"]
        tensor([[-100, -100,    3, -100, -100,    3]])
    """
    flattened = {
        "input_ids": batch.input_ids[None],
        "labels": _labels(batch, labels, separator_id)[None],
    }
    if return_position_ids:
        positions = batch.position_ids
        flattened["position_ids"] = (
            positions + position_ids_start if position_ids_start else positions
        )[None]
    if return_seq_idx:
        flattened["seq_idx"] = batch.sequence_ids[None]
    if return_flash_attn_kwargs:
        inputs = batch.model_inputs()
        flattened |= {name: inputs[name] for name in _BOUNDARIES}
    return flattened


def _labels(batch: Packed, labels: str, separator_id: int) -> torch.Tensor:
    if labels not in ("generated", "all"):
        raise ValueError(f"to_padding_free: labels must be 'generated' or 'all', got {labels!r}")
    holds = holds_token(batch)
    if labels == "all":
        check_unpadded(batch)
    places = torch.where(
        batch.loss_mask if labels == "generated" else holds, batch.input_ids, IGNORED
    )
    # padding may be at position 0 throughout, and is to have no label at all
    return torch.where((batch.position_ids == 0) & holds, separator_id, places)
