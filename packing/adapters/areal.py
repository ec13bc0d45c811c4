"""AReaL's legacy ``SequenceSample``: what its multi-turn agents return and its PPO consumes."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise
from typing import Any

import torch

from trajpack.packing.batch import PackedBatch


def to_sequence_sample(batch: PackedBatch) -> dict[str, Any]:
    """Return the keyword arguments of a ``SequenceSample`` that holds the batch.

    One batch element for each trajectory, in it one sequence for each turn:

    ================== ======= ================ =============================================
    key                dtype   length           content
    ================== ======= ================ =============================================
    packed_input_ids   int64   L, each turn     prompt and completion
    prompt_mask        bool    L, each turn     True on the prompt
    packed_logprobs    float32 L - 1, each turn entry j belongs to token j + 1; 0 on prompts
    seq_no_eos_mask    bool    1, each turn     True where no end of sequence was sampled
    rewards            float32 1, each turn     discounted backward over the turns
    version_start      int32   1, each turn     policy version of the first sampled token
    version_end        int32   1, each turn     policy version of the last sampled token
    packed_prompts     int64   once             the first turn's prompt
    birth_time         int64   once             milliseconds since the epoch, if all have one
    task_ids           int64   once             kind of task, if all have one
    ================== ======= ================ =============================================

    Not carried: groups, per-token versions, undiscounted rewards.

    Args:
        batch: In layout ``"turns"``.

    Returns:
        ``keys, ids, dtypes, trailing_shapes, seqlens, data``; tensors on the batch's device.

    Raises:
        ValueError: If the batch is in another layout or padded, an id occurs twice, or only some
            trajectories have a birth time or a task id.

    Cost: reads the turn tables back to the host, which synchronises a device; one gather.
    """
    batch.check_unpadded()
    if batch.layout != "turns":
        raise ValueError(f"to_sequence_sample needs layout 'turns', got {batch.layout!r}")
    repeated = sorted(name for name, count in Counter(batch.ids).items() if count > 1)
    if repeated:
        raise ValueError(f"ids must differ within a SequenceSample, repeated: {repeated}")
    bounds = batch.cu_turns.tolist()
    turns = [slice(begin, end) for begin, end in pairwise(bounds)]
    lengths = [list(batch.seqlens[of]) for of in turns]
    starts = list(accumulate(batch.seqlens, initial=0))
    completions = batch.turn_spans[:, 0].tolist()
    prompts = [batch.input_ids[starts[of.start] : completions[of.start]] for of in turns]
    fields: dict[str, tuple[torch.Tensor, list[list[int]]]] = {
        "packed_input_ids": (batch.input_ids, lengths),
        "prompt_mask": (batch.prompt_mask, lengths),
        "packed_logprobs": (_shifted_logprobs(batch), [[n - 1 for n in of] for of in lengths]),
        "packed_prompts": (_concatenated(batch, prompts), [[len(prompt)] for prompt in prompts]),
    }
    for key, values in (
        ("seq_no_eos_mask", batch.turn_truncated),
        ("rewards", batch.turn_returns),
        ("version_start", batch.turn_version_start),
        ("version_end", batch.turn_version_end),
    ):
        fields[key] = values, [[1] * len(of) for of in lengths]
    for key, labels in (("birth_time", batch.birth_times_ms), ("task_ids", batch.task_ids)):
        column = _labels(batch, key, labels)
        if column is not None:
            fields[key] = column, [[1] for _ in lengths]
    return {
        "keys": set(fields),
        "ids": list(batch.ids),
        "dtypes": {key: values.dtype for key, (values, _) in fields.items()},
        "trailing_shapes": dict.fromkeys(fields, ()),
        "seqlens": {key: of for key, (_, of) in fields.items()},
        "data": {key: values for key, (values, _) in fields.items()},
    }


def _shifted_logprobs(batch: PackedBatch) -> torch.Tensor:
    """Drop each sequence's first entry, so that entry j belongs to token j + 1."""
    kept = batch.num_tokens - len(batch)
    sequence = torch.repeat_interleave(batch.cu_seqlens.diff() - 1, output_size=kept)
    index = torch.arange(1, kept + 1, device=batch.device) + sequence
    return batch.rollout_logprobs[index]


def _concatenated(batch: PackedBatch, pieces: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(pieces) if pieces else batch.input_ids[:0]


def _labels(batch: PackedBatch, key: str, labels: tuple[int | None, ...]) -> torch.Tensor | None:
    present = [label for label in labels if label is not None]
    if not present:
        return None
    if len(present) != len(labels):
        missing = batch.ids[labels.index(None)]
        raise ValueError(
            f"{key} must be given for all trajectories or for none, {missing!r} has none"
        )
    return torch.tensor(present, dtype=torch.int64, device=batch.device)
