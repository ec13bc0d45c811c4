"""Figures of a report: plain numbers and names of a packed batch, ready for JSON."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trajpack.kernels.scan.segment_sum import segment_sum
from trajpack.packing.batch.description import (
    describe,
    saved_rows,
    shared_prefixes,
    token_counts,
)
from trajpack.packing.plan.plan import plan_micro_batches, plan_ranks
from trajpack.packing.plan.units import check_count, round_up
from trajpack.packing.text import one_line

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch

Numbers = npt.NDArray[Any]

KINDS = ("prompt", "observation", "generated", "shared")
"""Kinds of tokens of a micro-batch. A shared token is a prompt or observation token in a prefix
that another sequence of the batch has too: a tree stores it once."""
PADDING = ("alignment", "tail", "dummy")
"""Causes of padding, as in `PlanStatistics`."""
MOST_BARS = 64
"""Bars of a picture of micro-batches; where there are more, a bar is the sum of several."""
MOST_GROUPS, MOST_MEMBERS, MOST_BREAKS, MOST_ROWS, MOST_REWARDS = 40, 64, 100, 1000, 64
USUAL_MICRO_BATCHES = 256


def figures_of(
    batch: PackedBatch, *, capacity: int | None = None, num_ranks: int = 8, align: int = 1
) -> dict[str, Any]:
    """Return all numbers of a batch's report; see `write_report` for the parameters."""
    host = batch.to("cpu")
    check_count("report", "num_ranks", num_ranks)
    check_count("report", "align", align)
    least = round_up(host.max_seqlen, align)
    if capacity is None:
        capacity = max(2 * least, 1)
        while capacity * USUAL_MICRO_BATCHES < host.num_tokens:
            capacity *= 2
    check_count("report", "capacity", capacity)
    if capacity < least:
        raise ValueError(
            f"report: capacity must be {least} or more, the aligned tokens of the longest "
            f"sequence; got {capacity}"
        )
    shared = shared_prefixes(host)
    kinds, tokens, rows = kinds_of(host, shared), token_counts(host, shared), _trajectories(host)
    breaks = host.prefix_breaks()
    return {
        "summary": describe(host),
        "saved": saved_rows(tokens),
        "tokens": {**dict(zip(KINDS, kinds.sum(1).tolist(), strict=True)), **tokens},
        "lengths": _lengths(host),
        "plan": _plan(host, kinds, capacity, align),
        "ranks": _ranks(host, capacity, num_ranks=num_ranks, align=align),
        "groups": _groups(host, rows),
        "breaks": {
            "shown": [one._asdict() for one in breaks[:MOST_BREAKS]],
            "left_out": max(len(breaks) - MOST_BREAKS, 0),
            "reasons": dict(Counter(one.reason for one in breaks).most_common()),
        },
        "trajectories": {"rows": rows[:MOST_ROWS], "left_out": max(len(rows) - MOST_ROWS, 0)},
    }


def kinds_of(batch: PackedBatch, shared: Numbers) -> Numbers:
    """Return the tokens of each kind of `KINDS` in each sequence, int64 ``[4, sequences]``.

    Args:
        batch: Batch on the host.
        shared: `shared_prefixes` of the batch.
    """
    lengths, starts = batch.host_lengths
    owner = np.repeat(np.arange(len(lengths)), lengths)
    depth = np.arange(len(owner)) - starts[owner]
    generated = batch.turn_ids.numpy() >= 0
    before = np.append(0, generated.cumsum(dtype=np.int64))
    has_generated = before[:-1] > before[starts[owner]]  # a token before it in its sequence
    kind = np.where(has_generated, KINDS.index("observation"), KINDS.index("prompt"))
    kind = np.where(depth < shared[owner], KINDS.index("shared"), kind)
    kind = np.where(generated, KINDS.index("generated"), kind)
    counts = np.bincount(kind * len(lengths) + owner, minlength=len(KINDS) * len(lengths))
    return counts.reshape(len(KINDS), len(lengths))


def _lengths(batch: PackedBatch) -> dict[str, Any]:
    """Count sequences and completions by length, in steps of a factor of the square root of 2."""
    longest = max(batch.max_seqlen, 1)
    steps = np.unique(np.ceil(2 ** (np.arange(2 * math.ceil(math.log2(longest)) + 2) / 2)))
    edges = np.append(0, steps).astype(np.int64)
    return {
        "edges": edges.tolist(),
        "sequences": np.histogram(batch.seqlens, edges)[0].tolist(),
        "completions": np.histogram(np.diff(batch.cu_generated.numpy()), edges)[0].tolist(),
    }


def _plan(batch: PackedBatch, kinds: Numbers, capacity: int, align: int) -> dict[str, Any] | None:
    """Return the micro-batches of the batch, by kind of token and cause of padding."""
    if not len(batch):
        return None
    plan = plan_micro_batches(batch.seqlens, capacity, align=align)
    statistics = plan.statistics()
    bin_of = np.repeat(np.arange(len(plan)), np.diff(plan.cu_bins))
    of_kinds = [np.bincount(bin_of, one[plan.order], len(plan)) for one in kinds]
    is_dummy, left = np.diff(plan.cu_bins) == 0, capacity - plan.loads
    alignment = plan.loads - np.sum(of_kinds, 0)
    of_padding = [alignment, np.where(is_dummy, 0, left), np.where(is_dummy, left, 0)]
    bars = np.stack([*of_kinds, *of_padding]).astype(np.int64)
    at_once = -(-len(plan) // MOST_BARS)
    bars = np.add.reduceat(bars, np.arange(0, len(plan), at_once), axis=1)
    return {
        "capacity": capacity,
        "align": align,
        "micro_batches": len(plan),
        "lower_bound": statistics.lower_bound,
        "fill": round(statistics.fill, 4),
        "alignment": statistics.padding_alignment,
        "tail": statistics.padding_tail,
        "dummy": statistics.padding_dummy,
        "token_imbalance": round(statistics.cost_imbalance, 4),
        "at_once": at_once,
        "bars": bars.tolist(),
    }


def _ranks(batch: PackedBatch, capacity: int, *, num_ranks: int, align: int) -> dict[str, Any]:
    """Compare the ranks of a plan with ranks that take the sequences as they come."""
    lengths = batch.host_lengths.seqlens
    pairs = lengths * (lengths + 1) // 2  # of a query and a key, in causal attention
    in_order, planned = np.arange(len(lengths)) * num_ranks // max(len(lengths), 1), pairs * 0
    if len(lengths):
        plans = plan_ranks(batch.seqlens, num_ranks, capacity, cost=pairs, align=align)
        for rank in range(num_ranks):
            planned[plans.plan(rank).order] = rank
    found: dict[str, Any] = {"num_ranks": num_ranks}
    for name, rank_of in (("planned", planned), ("in_order", in_order)):
        sums = {"pairs": pairs, "tokens": lengths}
        counts = {key: np.bincount(rank_of, one, num_ranks) for key, one in sums.items()}
        found[name] = {key: one.astype(np.int64).tolist() for key, one in counts.items()}
    return found


def _groups(batch: PackedBatch, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the scores, and the mean advantages, of the members of the first groups."""
    members: dict[int, list[dict[str, Any]]] = {}
    for group, row in zip(batch.group_ids.tolist(), rows, strict=True):
        members.setdefault(group, []).append(row)
    shown = [
        {
            "name": these[0]["group"] or these[0]["id"],
            "scores": [one["score"] for one in these[:MOST_MEMBERS]],
            "advantages": [one["advantage"] for one in these[:MOST_MEMBERS]],
            "left_out": max(len(these) - MOST_MEMBERS, 0),
        }
        for these in list(members.values())[:MOST_GROUPS]
    ]
    return {"shown": shown, "left_out": len(members) - len(shown)}


def _trajectories(batch: PackedBatch) -> list[dict[str, Any]]:
    """Return names and numbers of each trajectory."""
    scores = segment_sum(batch.turn_rewards, batch.cu_turns).tolist()
    rewards, means = batch.turn_rewards.tolist(), [None] * len(batch.ids)
    generated = np.diff(batch.cu_generated.numpy()[batch.cu_turns.numpy()])
    if batch.advantages is not None:
        is_generated = batch.turn_ids.numpy() >= 0
        owner = batch.tables.group_order.owners.numpy()[batch.turn_ids.numpy()[is_generated]]
        sums = np.bincount(owner, batch.advantages.numpy()[is_generated], len(batch.ids))
        means = (sums / np.maximum(generated, 1)).tolist()
    return [
        {
            "id": one_line(batch.ids[index], max_chars=80),
            "group": batch.groups[index] and one_line(batch.groups[index], max_chars=80),
            "score": short(scores[index]),
            "advantage": short(means[index]),
            "turns": end - begin,
            "rewards": [short(one) for one in rewards[begin:end][:MOST_REWARDS]],
            "generated": int(generated[index]),
            "truncated": bool(batch.truncated[index]),
        }
        for index, (begin, end) in enumerate(pairwise(batch.cu_turns.tolist()))
    ]


def short(number: float | None) -> float | str | None:
    """Round to four digits; a number that JSON lacks is said in words."""
    if number is None:
        return None
    return float(f"{number:.4g}") if math.isfinite(number) else "not finite"
