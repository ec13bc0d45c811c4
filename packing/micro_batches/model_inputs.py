"""Arguments of a Hugging Face causal model for packed sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def model_inputs(
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    sequence_ids: torch.Tensor,
    *,
    places: torch.Tensor,
    max_seqlen: int,
) -> dict[str, Any]:
    """Return what `PackedBatch.model_inputs` says, of sequences that lie at ``places``."""
    return {
        "input_ids": input_ids[None],
        "position_ids": position_ids[None],
        "seq_idx": sequence_ids[None],
        "use_cache": False,
        "cu_seq_lens_q": places,
        "cu_seq_lens_k": places,
        "max_length_q": max_seqlen,
        "max_length_k": max_seqlen,
    }
