"""flash-attn's variable-length interface: boundaries of queries and keys."""

from __future__ import annotations

from typing import Any

from trajpack.packing.rows import layout


def to_varlen(batch: layout.Packed) -> dict[str, Any]:
    """Return keyword arguments of ``flash_attn_varlen_func`` beside query, key and value.

    Query, key and value are ``[tokens, heads, head size]``, of the batch's tokens in their order.
    Padding behind a sequence belongs to it: causal attention keeps it from the tokens before.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> batch = pack([Trajectory(name, [Turn([1, 2], [3], [-0.5])]) for name in "ab"])
        >>> to_varlen(batch)["cu_seqlens_q"], to_varlen(batch)["max_seqlen_q"]
        (tensor([0, 3, 6], dtype=torch.int32), 3)
    """
    places, longest = layout.memory_of(batch).places, batch.max_seqlen
    return {
        "cu_seqlens_q": places,
        "cu_seqlens_k": places,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "causal": True,
    }
