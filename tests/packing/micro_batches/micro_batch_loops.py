"""Batches, alignments, and micro-batches cut out sequence by sequence."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from trajpack import TokenField, Trajectory, pack
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.testing import assert_same_bits, random_trajectory

PADDING = {"turn_ids": -1, "policy_versions": -1, "prompt_mask": False, "loss_mask": False}
OWN = ("input_ids", "turn_ids", "prompt_mask", "loss_mask", "rollout_logprobs", "policy_versions")
OWN += ("returns",)


def lengths_by_loop(kept, alignment):
    """Return true and padded lengths, worked out one sequence at a time."""
    true, padded = list(kept), []
    for length in kept:
        room = length
        while room % alignment.sequence_multiple:
            room += 1
        padded.append(room)
    multiple = math.lcm(alignment.sequence_multiple, alignment.total_multiple)
    total = alignment.total
    if total is None:
        total = sum(padded) if kept else multiple
        while total % multiple:
            total += 1
    rest = total - sum(padded)
    if rest and (alignment.tail == "sequence" or not kept):
        true.append(rest)
        padded.append(rest)
    elif rest:
        padded[-1] += rest
        true[-1] = padded[-1] if alignment.tail == "extend" else true[-1]
    return true, padded


def check_micro_batch(micro_batch, batch, sequences, alignment, kept=None, tensors=None):
    """Raise unless a micro-batch is what slices of the batch come to."""
    kept = [batch.seqlens[s] for s in sequences] if kept is None else list(kept)
    true, padded = lengths_by_loop(kept, alignment)
    begin = batch.cu_seqlens.tolist()
    names = OWN + (("advantages",) if batch.advantages is not None else ())
    whole = {name: getattr(batch, name) for name in names}
    whole |= {**batch.fields, **(tensors or {})}
    fills = PADDING | {"input_ids": alignment.token_id}
    fills |= {field.name: field.fill for field in batch.token_fields}
    for name, source in whole.items():
        parts = []
        for number, room in enumerate(padded):
            real = number < len(kept)
            first = begin[sequences[number]] if real else 0
            part = source[first : first + (kept[number] if real else 0)]
            shape = (room - len(part), *source.shape[1:])
            parts += [part, torch.full(shape, fills.get(name, 0), dtype=source.dtype)]
        own = name in names
        actual = getattr(micro_batch, name) if own else micro_batch.fields[name]
        assert_same_bits(actual, torch.cat([source[:0], *parts]), name)
    assert set(micro_batch.fields) == set(whole) - set(names)
    check_places(micro_batch, kept, true, padded, alignment)
    assert micro_batch.sequences == tuple(sequences)
    assert micro_batch.num_kept == tuple(kept)
    assert micro_batch.num_padding == sum(padded) - sum(kept)
    assert micro_batch.is_dummy == (not kept)


def check_places(micro_batch, kept, true, padded, alignment):
    """Raise unless positions, sequences and boundaries tell one story."""
    positions, owners = [], []
    for number, room in enumerate(padded):
        real = kept[number] if number < len(kept) else 0
        counted = alignment.positions == "continue"
        positions += [place if counted or place < real else 0 for place in range(room)]
        owners += [number] * room
    assert micro_batch.position_ids.tolist() == positions
    assert micro_batch.sequence_ids.tolist() == owners
    assert micro_batch.num_tokens == len(owners)
    assert (micro_batch.seqlens, micro_batch.padded_seqlens) == (tuple(true), tuple(padded))
    for boundaries, lengths in (
        (micro_batch.cu_seqlens, true),
        (micro_batch.cu_seqlens_padded, padded),
    ):
        sums = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
        if alignment.max_sequences is not None:
            size = alignment.max_sequences + 1 + (alignment.tail == "sequence")
            sums += [sums[-1]] * (size - len(sums))
        assert boundaries.tolist() == sums
        assert boundaries.dtype == torch.int32
    inputs = micro_batch.model_inputs()
    assert inputs["seq_idx"].dtype == torch.int32
    assert inputs["seq_idx"].tolist() == [owners]
    assert inputs["seq_idx"].data_ptr() == micro_batch.sequence_ids.data_ptr()
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"] is micro_batch.cu_seqlens_padded
    fixed = alignment.total is not None and alignment.max_sequences is not None
    assert micro_batch.max_seqlen == (alignment.total if fixed else max(padded, default=0))


FIELDS = [
    TokenField("experts", torch.uint8, shape=(2, 3), fill=255),
    TokenField("reference", torch.float64, fill=-1.0),
]


def some_batch(count=7, layout="merged", fields=FIELDS, device="cpu", num_turns=3):
    """Conversations of short turns, each with a field of experts and one of numbers."""
    rng = np.random.default_rng(count)
    trajectories = []
    for index in range(count):
        drawn = random_trajectory(
            rng, str(index), num_turns=num_turns, prompt=(1, 9), completion=(0, 20)
        )
        turns = [
            dataclasses.replace(turn, fields=rows_of(rng, turn, fields)) for turn in drawn.turns
        ]
        trajectories.append(Trajectory(str(index), turns, group=str(index // 3)))
    return pack(trajectories, layout, fields=fields, device=device)


def rows_of(rng, turn, fields):
    size = len(turn.completion_ids)
    rows = {
        "experts": rng.integers(0, 9, (size, 2, 3), dtype=np.uint8),
        "reference": rng.standard_normal(size),
    }
    return {field.name: rows[field.name] for field in fields}


def of_the_loss(batch):
    """Tensors that a loss takes beside the batch's own."""
    count = batch.num_tokens
    return {
        "values": torch.linspace(0, 1, max(count, 1))[:count],
        "top": torch.arange(4 * count, dtype=torch.bfloat16).view(count, 4),
        "kept": torch.arange(count) % 2 == 0,
    }


ALIGNMENTS = {
    "none": Alignment(),
    "sequences of 8": Alignment(sequence_multiple=8),
    "total of 128": Alignment(total_multiple=128, positions="zero", token_id=5),
    "both, extending": Alignment(sequence_multiple=4, total_multiple=24, tail="extend"),
    "extending alone": Alignment(total_multiple=64, tail="extend"),
    "separate": Alignment(sequence_multiple=4, total_multiple=32, tail="separate"),
    "fixed": Alignment(sequence_multiple=2, total=2048, max_sequences=9),
    "fixed, extending": Alignment(total=1024, max_sequences=9, tail="extend", positions="zero"),
}
