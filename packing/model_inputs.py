"""What a Hugging Face causal model takes of packed sequences."""

from __future__ import annotations

from typing import Any

import torch


def model_inputs(
    input_ids: torch.Tensor, position_ids: torch.Tensor, places: torch.Tensor, max_seqlen: int
) -> dict[str, Any]:
    """Return what `PackedBatch.model_inputs` says, of sequences that lie at ``places``."""
    return {
        "input_ids": input_ids[None],
        "position_ids": position_ids[None],
        "use_cache": False,
        "cu_seq_lens_q": places,
        "cu_seq_lens_k": places,
        "max_length_q": max_seqlen,
        "max_length_k": max_seqlen,
    }
