"""How a micro-batch is padded: worked out on the host, from lengths alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trajpack.packing.conversion import as_integer

Ints: TypeAlias = npt.NDArray[np.int64]
Tail: TypeAlias = Literal["sequence", "extend", "separate"]
TAILS = ("sequence", "extend", "separate")


class Placement(NamedTuple):
    """Where the sequences of a micro-batch lie."""

    seqlens: Ints
    """Tokens of each sequence as attention shall see them; the padding sequence is the last."""
    padded_seqlens: Ints
    """Tokens that each takes in memory."""
    num_tokens: int
    """Of all together."""


@dataclass(frozen=True)
class Alignment:
    """How a micro-batch is padded; not at all as it stands.

    A micro-batch has a multiple of both multiples in tokens, so that whatever divides the
    sequences divides the padding behind them, too. One without sequences is one padding sequence.

    Example:
        >>> Alignment(sequence_multiple=4, total_multiple=16).place(np.array([3, 5])).padded_seqlens
        array([4, 8, 4])
    """

    sequence_multiple: int = 1
    """Each sequence takes a multiple of this many tokens; its padding lies behind its tokens, and
    `MicroBatch.cu_seqlens_padded` alone counts it. Context parallelism wants twice its size."""
    total_multiple: int = 1
    """All tokens together are a multiple of this. Ranks of context and of sequence parallelism
    hold equal shares of them: what a share must divide by, such as 16, 32 or 128 for FP8, is
    multiplied by the sizes of both."""
    total: int | None = None
    """All tokens together are exactly so many, where shapes must not change."""
    tail: Tail = "sequence"
    """What stands behind the sequences, up to the total: a ``"sequence"`` of its own, the last
    one; tokens that ``"extend"`` the last sequence; or padding ``"separate"`` from it, which
    `MicroBatch.cu_seqlens_padded` counts to the last sequence and `MicroBatch.cu_seqlens` to
    none."""
    max_sequences: int | None = None
    """Sequences of a micro-batch at most. Given, boundaries have one length in all micro-batches,
    the last one repeated, and with `total` their longest sequence is that: what a CUDA graph
    needs. The padding sequence comes on top."""
    positions: Literal["continue", "zero"] = "continue"
    """Positions of padding: ``"continue"`` counts on in its sequence, ``"zero"`` is 0."""
    token_id: int = 0
    """Token id of padding."""

    def __post_init__(self) -> None:
        for name in ("sequence_multiple", "total_multiple", "total", "max_sequences"):
            value = getattr(self, name)
            if value is None and name in ("total", "max_sequences"):
                continue
            value = as_integer(name, value)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
            object.__setattr__(self, name, value)
        if self.total is not None and self.total % self.multiple:
            raise ValueError(
                f"total must be a multiple of {self.multiple}, as sequence_multiple and "
                f"total_multiple are, got {self.total}"
            )
        if self.tail not in TAILS:
            raise ValueError(f"tail must be 'sequence', 'extend' or 'separate', got {self.tail!r}")
        if self.positions not in ("continue", "zero"):
            raise ValueError(f"positions must be 'continue' or 'zero', got {self.positions!r}")
        object.__setattr__(self, "token_id", as_integer("token_id", self.token_id))

    @property
    def multiple(self) -> int:
        """Tokens of which a micro-batch has a multiple."""
        return math.lcm(self.sequence_multiple, self.total_multiple)

    @property
    def num_boundaries(self) -> int | None:
        """Entries of the boundaries; ``None`` where they are as many as sequences need."""
        if self.max_sequences is None:
            return None
        return self.max_sequences + 1 + (self.tail == "sequence")

    def place(self, lengths: Ints) -> Placement:
        """Place sequences of so many tokens, one behind the other.

        Raises:
            ValueError: If there are more than `max_sequences`, or more tokens than `total`.
        """
        if self.max_sequences is not None and len(lengths) > self.max_sequences:
            raise ValueError(
                f"a micro-batch must have at most max_sequences={self.max_sequences} sequences, "
                f"got {len(lengths)}"
            )
        padded = -(-lengths // self.sequence_multiple) * self.sequence_multiple
        used = int(padded.sum())
        total = self.total
        if total is None:
            total = -(-max(used, not len(lengths)) // self.multiple) * self.multiple
        if used > total:
            raise ValueError(
                f"a micro-batch must have at most total={total} tokens, its sequences take {used}"
            )
        lengths, rest = lengths.copy(), total - used
        if rest and (self.tail == "sequence" or not len(lengths)):
            lengths, padded = np.append(lengths, rest), np.append(padded, rest)
        elif rest:
            padded[-1] += rest
            if self.tail == "extend":
                lengths[-1] = padded[-1]
        return Placement(lengths, padded, total)
