"""Figures of a report: plain numbers and texts about a packed batch, ready for JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trajpack.kernels.scan.segment_sum import segment_sum
from trajpack.packing.batch.breaks import Decode
from trajpack.packing.batch.description import describe, sequence_spans
from trajpack.packing.plan.plan import plan_micro_batches
from trajpack.packing.plan.ranks import plan_ranks
from trajpack.packing.plan.units import check_count, round_up
from trajpack.packing.text import one_line, printable
from trajpack.packing.tree.pack_tree import tree_of
from trajpack.packing.tree.trie import trie_of

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.batch.breaks import PrefixBreak

Numbers = npt.NDArray[Any]

KINDS = ("prompt", "observation", "generated", "shared")
"""Kinds of tokens of a micro-batch. A shared token is a prompt or observation token in a prefix
that another sequence of the batch has too: a tree stores it once."""
PADDING = ("alignment", "tail", "dummy")
"""Causes of padding, as in `PlanStatistics`."""
MOST_BARS = 64
"""Bars of a picture of micro-batches; where there are more, a bar is the sum of several."""
MOST_GROUPS = 40
MOST_BREAKS = 100
MOST_ROWS = 1000
"""Trajectories in the table of the page."""
MOST_BYTES = 500_000
"""Bytes that the texts of trajectories take on the page."""
MOST_ROW_BYTES = 200_000
"""Bytes that the table of trajectories takes without texts."""
MOST_REWARDS = 64
"""Turns of a trajectory whose rewards are listed."""
MOST_SPAN_CHARS = 6_000
USUAL_MICRO_BATCHES = 256
_AROUND = 8


def figures_of(
    batch: PackedBatch,
    *,
    capacity: int | None = None,
    num_ranks: int = 8,
    align: int = 1,
    decode: Decode | None = None,
) -> dict[str, Any]:
    """Return all numbers and texts of a batch's report.

    Args:
        batch: Batch on any device.
        capacity: Tokens of a micro-batch; ``None`` chooses twice the longest sequence, or more
            where that would make hundreds of micro-batches.
        num_ranks: Data-parallel ranks.
        align: Each sequence takes a multiple of this many tokens.
        decode: Function from token ids to text; ``None`` shows the ids.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is below 1, or the capacity below the longest sequence.
    """
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
    kinds = kinds_of(host, shared)
    return {
        "summary": describe(host),
        "kinds": list(KINDS),
        "padding": list(PADDING),
        "tokens": _tokens(host, kinds, int(shared.sum())),
        "lengths": _lengths(host),
        "plan": _plan(host, kinds, capacity, align),
        "ranks": _ranks(host, capacity, num_ranks=num_ranks, align=align),
        "groups": _groups(host),
        "breaks": _breaks(host, decode),
        "trajectories": _trajectories(host, decode),
    }


def kinds_of(batch: PackedBatch, shared: Numbers) -> Numbers:
    """Return the tokens of each kind of `KINDS` in each sequence, int64 ``[4, sequences]``.

    Args:
        batch: Batch on the host.
        shared: `shared_prefixes` of the batch.
    """
    lengths = np.asarray(batch.seqlens, np.int64)
    starts = np.append(0, lengths.cumsum())
    generated = batch.turn_ids.numpy() >= 0
    before = np.append(0, generated.cumsum(dtype=np.int64))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    is_first = before[:-1] == before[starts[owner]]  # no generated token before in the sequence
    depth = np.arange(len(owner)) - starts[owner]
    is_shared = (depth < shared[owner]) & ~generated
    is_prompt, is_observation = ~generated & is_first, ~generated & ~is_first
    of_kinds = (is_prompt & ~is_shared, is_observation & ~is_shared, generated, is_shared)
    counts = [np.bincount(owner, one, len(lengths)).astype(np.int64) for one in of_kinds]
    return np.stack(counts) if len(lengths) else np.zeros((len(KINDS), 0), np.int64)


def shared_prefixes(batch: PackedBatch) -> Numbers:
    """Return how many first tokens of each sequence a tree takes from another one, int64."""
    lengths = np.asarray(batch.seqlens, np.int64)
    if not len(lengths):
        return lengths
    starts = np.append(0, lengths.cumsum())[:-1]
    trie = trie_of(batch.input_ids.numpy().astype(np.int32), starts, lengths)
    shared = np.zeros_like(lengths)
    shared[trie.order] = trie.shared
    return shared


def _tokens(batch: PackedBatch, kinds: Numbers, num_shared: int) -> dict[str, int]:
    end, begin = batch.turn_spans[:, 1].numpy().astype(np.int64), batch.turn_begin.numpy()
    start = batch.host_lengths.starts[batch.turn_sequence.numpy()]
    return {
        **dict(zip(KINDS, kinds.sum(1).tolist(), strict=True)),
        "turns": int((end - start).sum()),
        "merged": int((end - begin).sum()),
        "tree": batch.num_tokens - num_shared,
        "padded": batch.max_seqlen * len(batch),
        "packed": batch.num_tokens,
    }


def _lengths(batch: PackedBatch) -> dict[str, Any]:
    """Count sequences and completions by length, in steps of a factor of the square root of 2."""
    of_turns = np.diff(batch.cu_generated.numpy())
    longest = max(batch.max_seqlen, 1)
    steps = np.unique(np.ceil(2 ** (np.arange(2 * math.ceil(math.log2(longest)) + 2) / 2)))
    edges = np.append(0, steps).astype(np.int64)
    return {
        "edges": edges.tolist(),
        "sequences": np.histogram(batch.seqlens, edges)[0].tolist(),
        "completions": np.histogram(of_turns, edges)[0].tolist(),
    }


def _plan(batch: PackedBatch, kinds: Numbers, capacity: int, align: int) -> dict[str, Any] | None:
    """Return the micro-batches of the batch, by kind of token and cause of padding."""
    if not len(batch):
        return None
    plan = plan_micro_batches(batch.seqlens, capacity, align=align)
    counted = plan.statistics()
    bin_of = np.repeat(np.arange(len(plan)), np.diff(plan.cu_bins))
    of_kinds = [np.bincount(bin_of, one[plan.order], len(plan)) for one in kinds]
    is_dummy = np.diff(plan.cu_bins) == 0
    left = capacity - plan.loads
    alignment = plan.loads - np.sum(of_kinds, 0)
    of_padding = [alignment, np.where(is_dummy, 0, left), np.where(is_dummy, left, 0)]
    bars = np.stack([*of_kinds, *of_padding]).astype(np.int64)
    at_once = -(-len(plan) // MOST_BARS)
    if at_once > 1:
        bars = np.add.reduceat(bars, np.arange(0, len(plan), at_once), axis=1)
    return {
        "capacity": capacity,
        "align": align,
        "micro_batches": len(plan),
        "lower_bound": counted.lower_bound,
        "fill": round(counted.fill, 4),
        "alignment": counted.padding_alignment,
        "tail": counted.padding_tail,
        "dummy": counted.padding_dummy,
        "token_imbalance": round(counted.token_imbalance, 4),
        "at_once": at_once,
        "bars": bars.tolist(),
    }


def _ranks(batch: PackedBatch, capacity: int, *, num_ranks: int, align: int) -> dict[str, Any]:
    """Compare the ranks of a plan with ranks that take the sequences as they come."""
    if not len(batch):
        return {"num_ranks": num_ranks, "planned": None, "in_order": None}
    lengths = np.asarray(batch.seqlens, np.int64)
    pairs = lengths * (lengths + 1) // 2  # of a query and a key, in causal attention
    planned = plan_ranks(batch.seqlens, num_ranks, capacity, cost=pairs, align=align)
    owners = np.zeros(len(lengths), np.int64)
    for rank in range(num_ranks):
        owners[planned.plan(rank).order] = rank
    in_order = np.arange(len(lengths)) * num_ranks // len(lengths)
    return {
        "num_ranks": num_ranks,
        "capacity": capacity,
        "micro_batches": len(planned.plan(0)),
        **{
            name: {
                "pairs": np.bincount(one, pairs, num_ranks).astype(np.int64).tolist(),
                "tokens": np.bincount(one, lengths, num_ranks).astype(np.int64).tolist(),
            }
            for name, one in {"planned": owners, "in_order": in_order}.items()
        },
    }


def _groups(batch: PackedBatch) -> dict[str, Any]:
    """Return the scores, and the mean advantages, of the members of the first groups."""
    scores = segment_sum(batch.turn_rewards, batch.cu_turns)
    advantages = _mean_advantages(batch)
    members: dict[int, list[int]] = {}
    for trajectory, group in enumerate(batch.group_ids.tolist()):
        members.setdefault(group, []).append(trajectory)
    shown = [
        {
            "name": one_line(batch.groups[these[0]] or batch.ids[these[0]], max_chars=60),
            "scores": [_short(scores[one]) for one in these[:64]],
            "advantages": None
            if advantages is None
            else [_short(advantages[one]) for one in these[:64]],
            "left_out": max(len(these) - 64, 0),
        }
        for these in list(members.values())[:MOST_GROUPS]
    ]
    return {"shown": shown, "left_out": len(members) - len(shown)}


def _mean_advantages(batch: PackedBatch) -> Numbers | None:
    """Return the mean advantage of each trajectory's generated tokens, if there are advantages."""
    if batch.advantages is None:
        return None
    is_generated = batch.turn_ids.numpy() >= 0
    turns = batch.turn_ids.numpy()[is_generated]
    owner = np.searchsorted(batch.cu_turns.numpy(), turns, side="right") - 1
    sums = np.bincount(owner, batch.advantages.numpy()[is_generated], len(batch.ids))
    means: Numbers = sums / np.maximum(np.bincount(owner, minlength=len(batch.ids)), 1)
    return means


def _breaks(batch: PackedBatch, decode: Decode | None) -> dict[str, Any]:
    """Return where and why prefixes broke, with some tokens around."""
    if batch.layout != "merged" or not batch.num_turns:
        return {"shown": [], "left_out": 0, "reasons": {}, "known": batch.layout == "merged"}
    statistics = tree_of(batch).statistics()
    shown = [_break(batch, one, decode) for one in statistics.breaks[:MOST_BREAKS]]
    return {
        "shown": shown,
        "left_out": len(statistics.breaks) - len(shown),
        "reasons": dict(statistics.reasons.most_common()),
        "known": True,
    }


def _break(batch: PackedBatch, one: PrefixBreak, decode: Decode | None) -> dict[str, Any]:
    first = int(batch.cu_turns[one.trajectory])
    of_turns = {"history": first + one.history, "came": first + one.turn}
    around = {}
    for name, turn in of_turns.items():
        start = int(batch.cu_seqlens[int(batch.turn_sequence[turn])])
        at, end = start + one.position, int(batch.turn_spans[turn, 1])
        edges = [max(start, at - _AROUND), at, min(at + 1, end), min(at + 1 + _AROUND, end)]
        around[name] = [
            _text(batch.input_ids[begin:stop].tolist(), decode) for begin, stop in pairwise(edges)
        ]
    return {
        "trajectory": one_line(batch.ids[one.trajectory], max_chars=60),
        "index": one.trajectory,
        "turn": one.turn,
        "history_turn": one.history,
        "position": one.position,
        "expected": one.expected,
        "got": one.came,
        "reason": one.reason,
        "removed": one.removed,
        "added": one.added,
        **around,
    }


class _Budget:
    """Bytes that are left on the page."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    def take(self, value: Any) -> bool:
        """Subtract what ``value`` takes on the page; return whether there was room."""
        self.left -= len(page_json(value).encode())
        return self.left >= 0


def page_json(value: Any) -> str:
    """Return compact JSON that can stand between the tags of a script."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c")


def _trajectories(batch: PackedBatch, decode: Decode | None) -> dict[str, Any]:
    """Return a row for each of the first trajectories, with text as far as there is room."""
    scores = segment_sum(batch.turn_rewards, batch.cu_turns)
    advantages, bounds = _mean_advantages(batch), batch.cu_turns.tolist()
    lengths = np.diff(batch.cu_generated.numpy())
    of_rows, of_texts = _Budget(MOST_ROW_BYTES), _Budget(MOST_BYTES)
    pieces, rows = _Pieces(decode, of_texts), list[dict[str, Any]]()
    for index in range(min(len(batch.ids), MOST_ROWS)):
        turns = range(bounds[index], bounds[index + 1])
        group = batch.groups[index]
        rewards = batch.turn_rewards[turns.start : turns.stop][:MOST_REWARDS].tolist()
        row: dict[str, Any] = {
            "id": one_line(batch.ids[index], max_chars=80),
            "group": None if group is None else one_line(group, max_chars=80),
            "score": _short(scores[index]),
            "advantage": None if advantages is None else _short(advantages[index]),
            "turns": len(turns),
            "rewards": [_short(one) for one in rewards],
            "generated": int(lengths[turns.start : turns.stop].sum()),
            "truncated": bool(batch.truncated[index]),
        }
        if not of_rows.take(row):
            break
        if of_texts.left > 0:
            row["sequences"] = _texts(batch, turns, pieces)
        rows.append(row)
    return {
        "rows": rows,
        "left_out": len(batch.ids) - len(rows),
        "without_text": sum("sequences" not in row for row in rows),
    }


def _texts(batch: PackedBatch, turns: range, pieces: _Pieces) -> list[Any]:
    """Return the spans of the trajectory's sequences, with their text."""
    found = []
    for sequence in dict.fromkeys(batch.turn_sequence[turns.start : turns.stop].tolist()):
        spans = []
        for span in sequence_spans(batch, sequence):
            one: dict[str, Any] = {"kind": span.kind, "tokens": span.end - span.start}
            if span.kind == "generated":
                one["turn"] = span.turn - turns.start
                one["pieces"], num_shown = pieces.of_tokens(batch, span.start, span.end)
            else:
                one["text"], num_shown = pieces.plain(batch, span.start, span.end)
            one["left_out"] = one["tokens"] - num_shown
            spans.append(one)
        found.append(spans)
    return found


class Piece(NamedTuple):
    """Some generated tokens whose text cannot be parted."""

    text: str
    logprob: float | str
    """Mean of the tokens."""
    advantage: float | str | None
    version: int


class _Pieces:
    """Texts of tokens; a token that is a part of a character is joined with those behind it."""

    def __init__(self, decode: Decode | None, budget: _Budget) -> None:
        self.decode, self.budget = decode, budget
        self.known: dict[int, str] = {}

    def plain(self, batch: PackedBatch, begin: int, end: int) -> tuple[str, int]:
        """Return the text of the first tokens, as many as there is room for, and their number."""
        room = max(min(self.budget.left, MOST_SPAN_CHARS), 0)
        stop = min(end, begin + room)
        text = _text(batch.input_ids[begin:stop].tolist(), self.decode)
        while len(text) > room:
            stop = begin + (stop - begin) * room // (len(text) + 1)
            text = _text(batch.input_ids[begin:stop].tolist(), self.decode)
        self.budget.take(text)
        return text, stop - begin

    def of_tokens(self, batch: PackedBatch, begin: int, end: int) -> tuple[list[Piece], int]:
        """Return the pieces of the first tokens, as many as there is room for, and their number."""
        room = min(self.budget.left, MOST_SPAN_CHARS)
        stop = min(end, begin + max(room, 0))
        ids, versions = batch.input_ids[begin:stop].tolist(), batch.policy_versions[begin:stop]
        logprobs, advantages = batch.rollout_logprobs[begin:stop].numpy(), batch.advantages
        weights = None if advantages is None else advantages[begin:stop].numpy()
        found, at = list[Piece](), 0
        while at < len(ids) and room > 0 and self.budget.left > 0:
            text, size = self._next(ids, at)
            some = slice(at, at + size)
            advantage = None if weights is None else _short(weights[some].mean())
            found.append(Piece(text, _short(logprobs[some].mean()), advantage, int(versions[at])))
            self.budget.take(found[-1])
            at, room = at + size, room - len(text) - 1
        return found, at

    def _next(self, ids: Sequence[int], at: int) -> tuple[str, int]:
        if self.decode is None:
            return f"{ids[at]} ", 1
        text = self.known.get(ids[at])
        if text is None:
            text = self.known.setdefault(ids[at], self.decode([ids[at]]))
        if "\ufffd" in text:
            for size in range(2, min(5, len(ids) - at + 1)):
                joined = self.decode(list(ids[at : at + size]))
                if "\ufffd" not in joined:
                    return _shown(joined), size
        return _shown(text), 1


def _text(ids: Sequence[int], decode: Decode | None) -> str:
    return _shown(decode(ids)) if decode is not None else " ".join(map(str, ids))


def _shown(text: str) -> str:
    return printable(text, keep="\n")


def _short(value: Any) -> float | str:
    """Round to four digits, so that a page stays small; a number that JSON lacks in words."""
    number = float(value)
    return float(f"{number:.4g}") if math.isfinite(number) else "not finite"


def rows_of(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what packing saved, in words: a name and a value."""
    tokens = figures["tokens"]
    for name, label in (("turns", "every turn with its whole prompt"), ("padded", "padded rows")):
        if tokens[name] > tokens["packed"]:
            saved = 1 - tokens["packed"] / tokens[name]
            yield f"saved against {label}", f"{saved:.0%} of {tokens[name]:,} tokens"
    if tokens["tree"] < tokens["packed"]:
        saved = 1 - tokens["tree"] / tokens["packed"]
        yield "a tree would save another", f"{saved:.0%}: {tokens['tree']:,} nodes"
