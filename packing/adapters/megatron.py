"""Megatron-Core's ``PackedSeqParams``."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from trajpack.packing.optional import require
from trajpack.packing.rows import layout

Lengths = Literal["both", "padded"]


def packed_seq_params_kwargs(batch: layout.Packed, *, lengths: Lengths = "both") -> dict[str, Any]:
    """Return the fields of a ``PackedSeqParams`` by their names in Megatron-Core.

    `to_packed_seq_params` omits what an older version of the class lacks. Fields about the ranks,
    ``cp_group`` and ``local_cp_size``, are for the caller. Sequences of a micro-batch must be
    multiples of twice the context-parallel ranks times the tensor-parallel ones.

    With ``lengths="padded"`` padded lengths stand for the true ones too, and ``pad_between_seqs``
    is False: for engines that treat padding as tokens.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> batch = pack([Trajectory(name, [Turn([1, 2], [3], [-0.5])]) for name in "ab"])
        >>> packed_seq_params_kwargs(batch)["cu_seqlens_q_padded"]
        tensor([0, 3, 6], dtype=torch.int32)
    """
    if lengths not in ("both", "padded"):
        raise ValueError(
            f"packed_seq_params_kwargs: lengths must be 'both' or 'padded', got {lengths!r}"
        )
    places = layout.memory_of(batch).places
    sums = batch.cu_seqlens if lengths == "both" else places
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": sums,
        "cu_seqlens_kv": sums,
        "cu_seqlens_q_padded": places,
        "cu_seqlens_kv_padded": places,
        "max_seqlen_q": batch.max_seqlen,
        "max_seqlen_kv": batch.max_seqlen,
        "pad_between_seqs": sums is not places,
        "total_tokens": batch.num_tokens,
        "seq_idx": batch.sequence_ids[None],
    }


def to_packed_seq_params(batch: layout.Packed, *, lengths: Lengths = "both") -> Any:
    """Return the ``PackedSeqParams`` of the installed Megatron-Core for the batch's tokens.

    The model takes it with ``input_ids[None]``, ``position_ids[None]`` and no attention mask. Has
    those fields of `packed_seq_params_kwargs` that the installed version has.
    """
    require("megatron")
    from megatron.core.packed_seq_params import PackedSeqParams

    fields = {field.name for field in dataclasses.fields(PackedSeqParams)}
    given = packed_seq_params_kwargs(batch, lengths=lengths)
    later = {name: given.pop(name) for name in ("total_tokens", "seq_idx")}
    params = PackedSeqParams(**{name: value for name, value in given.items() if name in fields})
    for name, value in later.items():
        if name in fields:
            setattr(params, name, value)
    return params
