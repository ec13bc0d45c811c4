"""Padding of micro-batches, computed on the host from lengths alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trajpack.packing.conversion import as_integer

Ints: TypeAlias = npt.NDArray[np.int64]
Tail: TypeAlias = Literal["sequence", "extend", "separate"]


def check_alignment(alignment: object) -> None:
    """Raise unless this is an `Alignment`; it often is what ``tensors`` should be."""
    if not isinstance(alignment, Alignment):
        got = type(alignment).__name__
        hint = "; pass tensors=... by name" if isinstance(alignment, Mapping) else ""
        raise TypeError(f"alignment must be an Alignment, got {got}{hint}")


class Placement(NamedTuple):
    """Lengths of a micro-batch's sequences; a padding sequence is the last.

    Attributes:
        seqlens: int64 ``[sequences]``: tokens of each as attention sees them.
        padded_seqlens: int64 ``[sequences]``: tokens of each in memory.
        num_tokens: Tokens of all sequences in memory.
    """

    seqlens: Ints
    padded_seqlens: Ints
    num_tokens: int


@dataclass(frozen=True)
class Alignment:
    """Padding of a micro-batch; none by default.

    The number of tokens is a multiple of both multiples, so that the padding behind the sequences
    divides as they do. A micro-batch without sequences is one padding sequence.

    Attributes:
        sequence_multiple: Each sequence takes a multiple of this many tokens; its padding lies
            behind its tokens, and only `MicroBatch.cu_seqlens_padded` counts it. Context
            parallelism needs twice its size.
        total_multiple: The total number of tokens is a multiple of this. Ranks of context and of
            sequence parallelism hold equal shares: multiply what a share must divide by, such as
            16, 32 or 128 for FP8, by the sizes of both.
        total: Exact total number of tokens, for fixed shapes.
        tail: Padding behind the sequences, up to the total: a separate last ``"sequence"``; tokens
            that ``"extend"`` the last sequence; or tokens ``"separate"`` from it, which
            `MicroBatch.cu_seqlens_padded` counts to the last sequence and `MicroBatch.cu_seqlens`
            to none.
        max_sequences: Maximum sequences of a micro-batch, without the padding sequence. If given,
            boundaries have one length in all micro-batches, the last one repeated, and with `total`
            `MicroBatch.max_seqlen` is that: for CUDA graphs.
        max_generated: Maximum generated tokens of a micro-batch. If given, it is
            `MicroBatch.num_generated` of all, so that log-probabilities and `MicroBatch.generated`
            have as many rows, some without a token: for CUDA graphs.
        positions: Positions of padding: ``"continue"`` counts on in its sequence, ``"zero"`` is 0.
        token_id: Token id of padding.

    Example:
        >>> Alignment(sequence_multiple=4, total_multiple=16).place(np.array([3, 5])).padded_seqlens
        array([4, 8, 4])
    """

    sequence_multiple: int = 1
    total_multiple: int = 1
    total: int | None = None
    tail: Tail = "sequence"
    max_sequences: int | None = None
    max_generated: int | None = None
    positions: Literal["continue", "zero"] = "continue"
    token_id: int = 0

    def __post_init__(self) -> None:
        limits = ("total", "max_sequences", "max_generated")
        for name in ("sequence_multiple", "total_multiple", "token_id", *limits):
            if getattr(self, name) is None and name in limits:
                continue
            value = as_integer(name, getattr(self, name))
            if value < 1 and name != "token_id":
                raise ValueError(f"{name} must be at least 1, got {value}")
            object.__setattr__(self, name, value)
        if self.total is not None and self.total % self.multiple:
            raise ValueError(
                f"total must be a multiple of {self.multiple}, as sequence_multiple and "
                f"total_multiple are, got {self.total}"
            )
        if self.tail not in ("sequence", "extend", "separate"):
            raise ValueError(f"tail must be 'sequence', 'extend' or 'separate', got {self.tail!r}")
        if self.positions not in ("continue", "zero"):
            raise ValueError(f"positions must be 'continue' or 'zero', got {self.positions!r}")

    @property
    def multiple(self) -> int:
        """The number of tokens of a micro-batch is a multiple of this."""
        return math.lcm(self.sequence_multiple, self.total_multiple)

    @property
    def num_boundaries(self) -> int | None:
        """Fixed number of boundaries; ``None`` if it follows from the sequences."""
        if self.max_sequences is None:
            return None
        return self.max_sequences + 1 + (self.tail == "sequence")

    def place(self, lengths: Ints) -> Placement:
        """Lay out sequences of these lengths, one behind the other.

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
