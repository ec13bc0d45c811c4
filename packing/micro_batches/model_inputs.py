"""Arguments of a model for packed batches and micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.micro_batches.micro_batch import MicroBatch


def places_of(batch: PackedBatch | MicroBatch) -> torch.Tensor:
    """Return the boundaries of sequences in memory, padding included."""
    bounds: torch.Tensor = getattr(batch, "cu_seqlens_padded", batch.cu_seqlens)
    return bounds


def model_inputs(  # noqa: D417 - a method of batches
    batch: PackedBatch | MicroBatch, *, mrope: bool = False
) -> dict[str, Any]:
    """Return keyword arguments for a Hugging Face causal model's ``forward``.

    The inputs are one row with all sequences. Different layers need different arguments to keep
    the sequences apart:

    ================================= =========================================================
    layer                             argument
    ================================= =========================================================
    flash attention                   ``cu_seq_lens_q``, ``cu_seq_lens_k``, their maxima
    eager and sdpa attention          ``position_ids``, without cache and ``attention_mask``:
                                      a mask of ones lets sequences attend to each other
    short convolution, Mamba2         ``seq_idx``
    gated delta rule (Qwen3.5)        ``cu_seq_lens_q``; its convolution ``seq_idx``
    ================================= =========================================================

    Some models ignore an argument that their layers need, without an error: Mamba2, Jamba,
    LFM3, GPT-OSS on eager attention, among others. Call
    `trajpack.packing.adapters.huggingface.check_isolation` once, before a model's first batch.

    Args:
        mrope: Whether ``position_ids`` are int64 ``[4, 1, tokens]``, all rows alike: the
            positions of text and of mRoPE. Classes for images and text such as
            ``Qwen2_5_VLForConditionalGeneration`` need it, also without an image.

    Returns:
        ``input_ids`` and ``position_ids``, int64 ``[1, tokens]``; ``seq_idx``, int32
        ``[1, tokens]``: `sequence_ids`; ``cu_seq_lens_q`` and ``cu_seq_lens_k``, int32
        ``[sequences + 1]``: boundaries in memory; ``max_length_q`` and ``max_length_k``, integers;
        ``use_cache=False``. Padding ends the sequence before it or is a separate sequence, so that
        no token of another one sees it.
    """
    places, longest = places_of(batch), batch.max_seqlen
    return {
        "input_ids": batch.input_ids[None],
        "position_ids": batch.position_ids.expand(4, 1, -1) if mrope else batch.position_ids[None],
        "seq_idx": batch.sequence_ids[None],
        "use_cache": False,
        "cu_seq_lens_q": places,
        "cu_seq_lens_k": places,
        "max_length_q": longest,
        "max_length_k": longest,
    }
