"""Layouts: which stretch of which chain becomes which sequence, as a table of runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from trajpack.kernels.runs import MAX_TOKENS, RUN_WIDTH, Run

Layout: TypeAlias = Literal["merged", "turns"]
LAYOUTS = ("merged", "turns")


@dataclass(frozen=True)
class Spans:
    """Generated stretches in the order they were added: one for each version in each turn.

    All columns are int64 ``[spans]``. Every turn has at least one span, maybe an empty one.
    """

    turn: npt.NDArray[np.int64]
    """Turn that generated the span."""
    chain: npt.NDArray[np.int64]
    """Chain that holds it."""
    begin: npt.NDArray[np.int64]
    """Index of its first token in the chain."""
    end: npt.NDArray[np.int64]
    """Index past its last token in the chain."""
    version: npt.NDArray[np.int64]
    """Policy version that sampled it."""
    logprob: npt.NDArray[np.int64]
    """Where its log-probabilities begin in the word stream."""

    def __getitem__(self, order: npt.NDArray[np.int64]) -> Spans:
        return Spans(*(getattr(self, column)[order] for column in SPAN_COLUMNS))


SPAN_COLUMNS = ("turn", "chain", "begin", "end", "version", "logprob")


@dataclass(frozen=True)
class Arrangement:
    """A layout worked out for one batch, on the host."""

    runs: npt.NDArray[np.int32]
    """Run table for `trajpack.kernels.build`."""
    cu_seqlens: npt.NDArray[np.int32]
    """``[sequences + 1]`` boundaries."""
    turn_sequence: npt.NDArray[np.int32]
    """``[turns]`` sequence that holds each turn's completion."""
    turn_spans: npt.NDArray[np.int32]
    """``[turns, 2]`` first index of each turn's completion in the batch, and one past its last."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return int(self.cu_seqlens[-1])


def arrange(
    layout: Layout, spans: Spans, chain_words: npt.NDArray[np.int64], num_turns: int
) -> Arrangement:
    """Lay spans out as sequences: one for each chain (``"merged"``) or turn (``"turns"``).

    Either way a sequence is a prefix of one chain, cut into a context run before each span
    (what nobody generated in this sequence) and a generated run for the span itself.

    Args:
        layout: ``"merged"`` or ``"turns"``.
        spans: What was generated.
        chain_words: Where each chain's tokens begin in the word stream.
        num_turns: Turns in all.

    Raises:
        ValueError: If ``layout`` is unknown, or the batch would pass 2³¹ tokens.
    """
    check_layout(layout)
    if layout == "merged":
        spans = spans[np.argsort(spans.chain, kind="stable")]
    sequence = spans.chain if layout == "merged" else spans.turn
    opens = np.diff(sequence, prepend=-1) != 0
    context = np.where(opens, 0, np.roll(spans.end, 1))  # where the span before it ended

    bounds = np.zeros(2 * len(sequence) + 1, np.int64)
    bounds[1::2] = spans.begin - context
    bounds[2::2] = spans.end - spans.begin
    np.cumsum(bounds, out=bounds)
    if bounds[-1] > MAX_TOKENS:
        raise ValueError(
            f"a batch holds at most {MAX_TOKENS} tokens, layout {layout!r} needs {bounds[-1]}"
        )
    turn_sequence = np.empty(num_turns, np.int32)
    turn_sequence[spans.turn] = sequence
    turn_spans = np.empty((num_turns, 2), np.int32)
    turn_spans[spans.turn[::-1], 0] = bounds[1::2][::-1]  # of a turn's spans the first stays
    turn_spans[spans.turn, 1] = bounds[2::2]  # and here the last
    return Arrangement(
        runs=_run_table(spans, sequence, context, bounds, chain_words),
        cu_seqlens=np.append(bounds[:-1:2][opens], bounds[-1]).astype(np.int32),
        turn_sequence=turn_sequence,
        turn_spans=turn_spans,
    )


def check_layout(layout: str) -> None:
    """Raise unless ``layout`` is known."""
    if layout not in LAYOUTS:
        known = " or ".join(repr(name) for name in LAYOUTS)
        raise ValueError(f"layout must be {known}, got {layout!r}")


def _run_table(
    spans: Spans,
    sequence: npt.NDArray[np.int64],
    context: npt.NDArray[np.int64],
    bounds: npt.NDArray[np.int64],
    chain_words: npt.NDArray[np.int64],
) -> npt.NDArray[np.int32]:
    runs = np.zeros((len(sequence) + 1, RUN_WIDTH), np.int32)
    runs[:, Run.START] = bounds[::2]
    rows = runs[:-1]
    rows[:, Run.SOURCE] = chain_words[spans.chain] + context
    rows[:, Run.GENERATED] = spans.begin - context
    rows[:, Run.LOGPROB] = spans.logprob
    rows[:, Run.POSITION] = context
    rows[:, Run.SEQUENCE] = sequence
    rows[:, Run.TURN] = spans.turn
    rows[:, Run.VERSION] = spans.version
    return runs
