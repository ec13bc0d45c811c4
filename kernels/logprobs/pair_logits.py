"""Logits of pairs of a row and a token, each a product of two gathered rows, and their gradient.

This is the way of few pairs: it reads the weights of their tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from trajpack.kernels.rearrange.repeat_rows import add_rows
from trajpack.kernels.reduce.segment_reduce import owners_of_entries

LOGITS_PER_PAIR = {"cuda": 1024, "cpu": 128}
"""Logits of a matrix product that take as long as a pair, forward and backward, by the type of
device. A pair moves about 34 bytes for each column of the LM head. The number of a CPU was measured
on two cores, that of a device is computed from its rates of products and of memory."""
CHUNK_BYTES = {"cuda": 2**27, "cpu": 2**22}
"""Bytes of gathered float32 rows."""
TOTAL_BYTES = 2**29
"""Bytes of float32 sums of the weight's gradient."""


class Logits(NamedTuple):
    """Logits of some rows of hidden states, by an LM head.

    They are ``softcap * tanh((hidden @ weight.T + bias) / softcap)``, divided by the temperature of
    the row.
    """

    hidden: torch.Tensor
    """``[tokens, H]``"""
    weight: torch.Tensor
    """``[V, H]`` of the same dtype."""
    bias: torch.Tensor | None
    """``[V]``"""
    rows: torch.Tensor
    """``[R]`` int64 indices into ``hidden``."""
    temperature: torch.Tensor | None
    """``[R]`` float32."""
    softcap: float
    """0 for none."""

    def temperature_of(self, rows: slice) -> torch.Tensor | None:
        """Return the temperatures of some rows, ``[rows, 1]``."""
        return None if self.temperature is None else self.temperature[rows, None]

    @property
    def sums(self) -> torch.dtype:
        """Dtype of sums over the vocabulary and of accumulated gradients."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32


class Pairs(NamedTuple):
    """Tokens of each row: those of row ``r`` are ``tokens[boundaries[r] : boundaries[r + 1]]``."""

    boundaries: torch.Tensor
    """``[R + 1]`` int32."""
    tokens: torch.Tensor
    """``[P]`` int64. The logit of one that is not in ``[0, V)`` is 0. No other occurs twice in a
    row."""

    @property
    def owners(self) -> torch.Tensor:
        """``[P]`` int64: row of each pair."""
        return owners_of_entries(self.boundaries, self.tokens.shape[0])[0]


class Chunk(NamedTuple):
    """Some pairs."""

    some: slice
    owners: torch.Tensor
    tokens: torch.Tensor
    """In ``[0, V)``; another one where ``inside`` is False."""
    inside: torch.Tensor


def chunks_of(logits: Logits, pairs: Pairs) -> Iterator[Chunk]:
    """Yield the pairs in order, as many at once as `CHUNK_BYTES` holds."""
    vocabulary, width = logits.weight.shape
    limit = CHUNK_BYTES["cuda" if logits.hidden.is_cuda else "cpu"]
    size, owners = max(1, limit // (4 * width)), pairs.owners
    for begin in range(0, pairs.tokens.shape[0], size):
        some = slice(begin, begin + size)
        tokens = pairs.tokens[some]
        inside = (tokens >= 0) & (tokens < vocabulary)
        yield Chunk(some, owners[some], tokens.where(inside, 0), inside)


def pair_logits(logits: Logits, pairs: Pairs) -> torch.Tensor:
    """Return the logits of ``pairs`` before the soft-cap, float64, rounded to the dtype of logits.

    Cost: two gathers and a pass for each chunk.
    """
    hidden, weight = logits.hidden.index_select(0, logits.rows), logits.weight
    found = hidden.new_empty(pairs.tokens.shape[0])
    for some, owners, tokens, inside in chunks_of(logits, pairs):
        left, right = hidden.index_select(0, owners), weight.index_select(0, tokens)
        products = left.to(logits.sums).mul_(right).sum(1).to(hidden.dtype)
        if logits.bias is not None:
            products += logits.bias[tokens]
        found[some] = products.where(inside, 0.0)
    return found.double()


def pair_gradients(
    logits: Logits, pairs: Pairs, of_picked: torch.Tensor, needs: list[bool]
) -> list[torch.Tensor | None]:
    """Return the gradients of gathered rows, weight and bias that are needed, else None.

    That of the rows is in the dtype of sums. All are added in the order of the pairs; the weight's
    in as many columns at once as `TOTAL_BYTES` holds.
    """
    hidden, weight = logits.hidden.index_select(0, logits.rows), logits.weight
    of_picked = of_picked.to(hidden.dtype).to(logits.sums)  # as a tile's
    of_hidden = torch.zeros_like(hidden, dtype=logits.sums) if needs[0] else None
    of_weight = torch.zeros_like(weight) if needs[1] else None
    of_bias = torch.zeros_like(weight[:, 0], dtype=logits.sums) if needs[2] else None
    for some, owners, tokens, inside in chunks_of(logits, pairs):
        rates = of_picked[some].where(inside, 0.0)
        if of_hidden is not None:
            right = weight.index_select(0, tokens).to(logits.sums)
            add_rows(of_hidden, owners, right.mul_(rates[:, None]))
        if of_bias is not None:
            add_rows(of_bias, tokens, rates)
    if of_weight is not None:
        step = max(1, TOTAL_BYTES // (4 * weight.shape[0]))
        for first in range(0, weight.shape[1], step):
            part = hidden[:, first : first + step].to(logits.sums)
            total = part.new_zeros(weight.shape[0], part.shape[1])
            for some, owners, tokens, inside in chunks_of(logits, pairs):
                rates = of_picked[some].where(inside, 0.0)
                add_rows(total, tokens, part.index_select(0, owners).mul_(rates[:, None]))
            of_weight[:, first : first + step] = total
    return [of_hidden, of_weight, None if of_bias is None else of_bias.to(weight.dtype)]
