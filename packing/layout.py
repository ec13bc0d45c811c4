"""Layouts: which stretch of which chain becomes which sequence, as a table of runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trajpack.kernels.runs import MAX_TOKENS, RUN_WIDTH, Run

Layout: TypeAlias = Literal["merged", "turns"]
LAYOUTS = ("merged", "turns")

Ints: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Spans:
    """Generated stretches in the order they were added: one for each version in each turn.

    All columns are int64 ``[spans]``. Every turn has at least one span, maybe an empty one.
    """

    turn: Ints
    """Turn that generated the span."""
    chain: Ints
    """Chain that holds it."""
    begin: Ints
    """Index of its first token in the chain."""
    end: Ints
    """Index past its last token in the chain."""
    version: Ints
    """Policy version that sampled it."""
    logprob: Ints
    """Position of its first log-probability in the word stream."""
    source: Ints
    """Position of its chain's first token in the word stream."""

    def __getitem__(self, order: Ints | slice) -> Spans:
        return Spans(*(getattr(self, column)[order] for column in SPAN_COLUMNS))


SPAN_COLUMNS = ("turn", "chain", "begin", "end", "version", "logprob", "source")


class Origin(NamedTuple):
    """Tokens and turns of the spans before."""

    num_tokens: int = 0
    num_turns: int = 0


@dataclass(frozen=True)
class Arrangement:
    """Layout of some spans, computed on the host."""

    order: Ints
    """Span of each run."""
    runs: npt.NDArray[np.int32]
    """Run table for `trajpack.kernels.build`, its last row left out."""
    starts: npt.NDArray[np.int32]
    """First token of each sequence."""
    num_tokens: int
    """End of the last sequence."""
    turn_sequence: npt.NDArray[np.int32]
    """``[turns]`` sequence that holds each turn's completion."""
    turn_spans: npt.NDArray[np.int32]
    """``[turns, 2]`` first index of each turn's completion in the batch, and one past its last."""
    turn_begin: npt.NDArray[np.int32]
    """``[turns]`` index in the batch of the first token that is new in its chain with the turn."""


def arrange(layout: Layout, spans: Spans, origin: Origin) -> Arrangement:
    """Lay spans out as sequences: one for each chain (``"merged"``) or turn (``"turns"``).

    Either way a sequence is a prefix of one chain, and a run is a span with the context before
    it that nobody generated in this sequence. The spans of a trajectory come together, so that
    the sequences of later ones follow those of earlier ones.

    Raises:
        ValueError: If the batch would pass 2³¹ tokens.
    """
    order = by_chain = np.arange(len(spans.turn))
    if (np.diff(spans.chain) < 0).any():
        by_chain = np.argsort(spans.chain, kind="stable")
    held = np.empty_like(order)  # tokens of its chain that are older than each span and its context
    held[by_chain] = _ends_before(spans.end[by_chain], _opens(spans.chain[by_chain]))
    if layout == "merged":
        order, spans, held = by_chain, spans[by_chain], held[by_chain]
    sequence = spans.chain if layout == "merged" else spans.turn
    opens = _opens(sequence)
    context = _ends_before(spans.end, opens)
    ends = origin.num_tokens + np.cumsum(spans.end - context)
    num_tokens = int(ends[-1]) if ends.size else origin.num_tokens
    if num_tokens > MAX_TOKENS:
        raise ValueError(
            f"a batch holds at most {MAX_TOKENS} tokens, layout {layout!r} needs {num_tokens}"
        )
    starts = np.append(origin.num_tokens, ends[:-1])[: ends.size]
    turn = spans.turn - origin.num_turns
    num_turns = int(turn.max()) + 1 if turn.size else 0
    turn_sequence = np.empty(num_turns, np.int32)
    turn_sequence[turn] = sequence
    turn_spans = np.empty((num_turns, 2), np.int32)
    turn_spans[turn[::-1], 0] = (ends - (spans.end - spans.begin))[::-1]  # a turn's first span
    turn_spans[turn, 1] = ends  # and its last
    turn_begin = np.empty(num_turns, np.int32)
    turn_begin[turn[::-1]] = (starts - context + held)[::-1]
    return Arrangement(
        order=order,
        runs=_run_table(spans, starts, context, sequence),
        starts=starts[opens].astype(np.int32),
        num_tokens=num_tokens,
        turn_sequence=turn_sequence,
        turn_spans=turn_spans,
        turn_begin=turn_begin,
    )


def _opens(sequence: Ints) -> npt.NDArray[np.bool_]:
    """Tell which spans are the first of their sequence."""
    opens: npt.NDArray[np.bool_] = np.diff(sequence, prepend=-1) != 0
    return opens


def _ends_before(ends: Ints, opens: npt.NDArray[np.bool_]) -> Ints:
    """Return where the span before each one ended, 0 for the first of a sequence."""
    return np.where(opens, 0, np.roll(ends, 1))


def _run_table(spans: Spans, starts: Ints, context: Ints, sequence: Ints) -> npt.NDArray[np.int32]:
    """Return a row for each span with the context behind the ``context`` first tokens."""
    runs = np.empty((len(sequence), RUN_WIDTH), np.int32)
    runs[:, Run.START] = starts
    runs[:, Run.SOURCE] = spans.source + context
    runs[:, Run.GENERATED] = spans.begin - context
    runs[:, Run.LOGPROB] = spans.logprob
    runs[:, Run.POSITION] = context
    runs[:, Run.SEQUENCE] = sequence
    runs[:, Run.TURN] = spans.turn
    runs[:, Run.VERSION] = spans.version
    return runs


def check_layout(layout: str) -> None:
    """Raise unless ``layout`` is known."""
    if layout not in LAYOUTS:
        known = " or ".join(repr(name) for name in LAYOUTS)
        raise ValueError(f"layout must be {known}, got {layout!r}")


def number_groups(
    groups: Iterable[str | None], known: dict[str, int], num_groups: int
) -> tuple[list[int], int]:
    """Number groups in order of first appearance; ``None`` is always a group of its own.

    Args:
        groups: Group of each trajectory.
        known: Number of each group named before. Groups that are new are added, and what a call
            added that did not count, at its end, is removed first.
        num_groups: Groups before.

    Returns:
        The number of each trajectory's group, and how many groups there are then.

    Example:
        >>> number_groups(["b", None, "a", "b", None], {}, 0)
        ([0, 1, 2, 0, 3], 4)
    """
    while known and next(reversed(known.values())) >= num_groups:
        known.popitem()
    numbers = []
    for group in groups:
        number = num_groups if group is None else known.setdefault(group, num_groups)
        num_groups += number == num_groups
        numbers.append(number)
    return numbers, num_groups
