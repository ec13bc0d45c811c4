"""A batch cut into micro-batches by a plan: in one pass, or sequence by sequence as trainers do.

Everybody is given the same packed batch and the same plan, and writes the same eleven tensors of
every micro-batch; boundaries and longest sequence too. The plan is not timed.
"""

import functools

import numpy as np
import pytest
import torch

from benchmarks.contest import OURS, Contender, Contest
from benchmarks.packing.whole_job import assert_equal
from benchmarks.workloads import EVEN_SEQUENCES, MANY_TURNS, MULTI_TURN, conversations
from trajpack import GRPO, pack
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.plan.plan import plan_micro_batches

PLAIN = "micro-batches of 32,768 tokens"
ALIGNED = "micro-batches of 32,768 tokens, each sequence a multiple of 16"
MULTIPLES = {PLAIN: 1, ALIGNED: 16}
CAPACITY = 32_768
COPIED = ("input_ids", "turn_ids", "prompt_mask", "loss_mask", "rollout_logprobs")
COPIED += ("policy_versions", "returns", "advantages")
MADE = ("position_ids", "sequence_ids", "cu_seqlens", "cu_seqlens_padded")
PADDING = {"turn_ids": -1, "policy_versions": -1}
WROTE = "10 fields, boundaries"
WORKLOADS = (*EVEN_SEQUENCES, MULTI_TURN, MANY_TURNS)


@functools.lru_cache(maxsize=2)
def inputs(workload, scale=1.0, device="cpu"):
    """Return a batch with advantages, in layout "turns" as the collators have it."""
    batch = pack(conversations(workload, scale), "turns", device=device)
    return batch.with_advantages(GRPO())


def ours(batch, plan, alignment):
    return [
        {name: getattr(one, name) for name in (*COPIED, *MADE)}
        for one in batch.split(plan, alignment)
    ]


def one_by_one(batch, plan, alignment):
    """Each micro-batch is let go before the next is made; what is returned is made once more."""
    for one in batch.micro_batches(plan, alignment):
        del one


def places(lengths, padded, device):
    """Return positions, sequences and boundaries of a micro-batch, a piece for each sequence."""
    numbers = enumerate(padded)
    owners = [torch.full((room,), number, device=device) for number, room in numbers]
    counted = [torch.arange(room, device=device) for room in padded]
    boundaries = {"cu_seqlens": lengths, "cu_seqlens_padded": padded}
    return {
        "position_ids": torch.cat(counted),
        "sequence_ids": torch.cat(owners).int(),
    } | {
        name: torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device=device)
        for name, counts in boundaries.items()
    }


def cuts(batch, plan, alignment):
    """Yield first tokens, lengths, and padded lengths of the sequences of each micro-batch."""
    bounds = np.cumsum([0, *batch.seqlens]).tolist()
    multiple = alignment.sequence_multiple
    for sequences in plan:
        chosen = sequences.tolist()
        lengths = [batch.seqlens[sequence] for sequence in chosen]
        padded = [-(-length // multiple) * multiple for length in lengths]
        yield [bounds[sequence] for sequence in chosen], lengths, padded


def by_slices(batch, plan, alignment):
    """Slice every field for every sequence, pad the slice, and concatenate: the usual loop."""
    multiple = alignment.sequence_multiple
    micro_batches = []
    for begins, lengths, padded in cuts(batch, plan, alignment):
        fields = {}
        for name in COPIED:
            whole = getattr(batch, name)
            pairs = zip(begins, lengths, strict=True)
            parts = [whole[begin : begin + length] for begin, length in pairs]
            if multiple > 1:
                parts = [
                    torch.nn.functional.pad(part, (0, room - len(part)), value=PADDING.get(name, 0))
                    for part, room in zip(parts, padded, strict=True)
                ]
            fields[name] = torch.cat(parts)
        micro_batches.append(fields | places(lengths, padded, batch.device))
    return micro_batches


def by_index(batch, plan, alignment):
    """Work out which token goes where, once for a micro-batch, and gather each field by that."""
    multiple = alignment.sequence_multiple
    micro_batches = []
    for begins, lengths, padded in cuts(batch, plan, alignment):
        made = places(lengths, padded, batch.device)
        owners = made["sequence_ids"].long()
        index = torch.tensor(begins, device=batch.device)[owners] + made["position_ids"]
        fields = {}
        if multiple > 1:
            real = made["position_ids"] < torch.tensor(lengths, device=batch.device)[owners]
            index = torch.where(real, index, 0)
        for name in COPIED:
            rows = getattr(batch, name)[index]
            if multiple > 1:
                rows = torch.where(real, rows, rows.new_tensor(PADDING.get(name, 0)))
            fields[name] = rows
        micro_batches.append(fields | made)
    return micro_batches


def by_numpy(batch, plan, alignment):
    """As by slices, with numpy, into arrays of the right size."""
    multiple = alignment.sequence_multiple
    whole = {name: getattr(batch, name).numpy() for name in COPIED}
    micro_batches = []
    for begins, lengths, padded in cuts(batch, plan, alignment):
        starts = np.cumsum([0, *padded]).tolist()
        fields = {}
        for name, source in whole.items():
            fill = PADDING.get(name, 0)
            out = np.full(starts[-1], fill, source.dtype) if multiple > 1 else None
            out = np.empty(starts[-1], source.dtype) if out is None else out
            for begin, start, length in zip(begins, starts, lengths, strict=False):
                out[start : start + length] = source[begin : begin + length]
            fields[name] = torch.from_numpy(out)
        micro_batches.append(fields | places(lengths, padded, batch.device))
    return micro_batches


RIVALS = {
    "slices and torch.cat, field by field": by_slices,
    "index made once, then field by field": by_index,
    "numpy slices, field by field": by_numpy,
}


def check(micro_batches, expected):
    assert len(micro_batches) == len(expected)
    for got, want in zip(micro_batches, expected, strict=True):
        for name, tensor in want.items():
            assert_equal(got[name].cpu(), tensor, name)


def contest(job, workload, scale=1.0, device="cpu"):
    batch = inputs(workload, scale, device)
    multiple = MULTIPLES[job]
    alignment = Alignment(sequence_multiple=multiple)
    plan = plan_micro_batches(batch.seqlens, CAPACITY, align=multiple)
    given = batch, plan, alignment
    expected = by_slices(inputs(workload, scale), plan, alignment)
    contest = Contest(job, workload, batch.num_tokens, functools.partial(check, expected=expected))
    alone = Contender(
        f"{OURS}, one by one", lambda: one_by_one(*given), WROTE, check=lambda result: None
    )
    rivals = [
        Contender(name, functools.partial(way, *given), WROTE, tunes_threads=way is not by_numpy)
        for name, way in RIVALS.items()
    ]
    return contest, [Contender(OURS, lambda: ours(*given), WROTE), alone, *rivals]


CASES = [(workload, PLAIN) for workload in WORKLOADS]
CASES += [(workload, ALIGNED) for workload in (EVEN_SEQUENCES[0], MULTI_TURN)]


@pytest.mark.parametrize(("workload", "job"), CASES)
def bench_micro_batches(hold, workload, job):
    hold(*contest(job, workload))
