"""Logits of pairs of a row and a token, each a product of two gathered rows, and their gradient.

This is the way of few pairs: it reads the weights of their tokens alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from trajpack.kernels.rearrange.repeat_rows import add_rows, sum_rows
from trajpack.kernels.segments import owners_of_entries

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
    each: bool = False
    """Whether every row is known to have one."""

    @property
    def owners(self) -> torch.Tensor:
        """``[P]`` int64: row of each pair."""
        if self.each:
            return torch.arange(self.tokens.shape[0], device=self.tokens.device)
        return owners_of_entries(self.boundaries, self.tokens.shape[0])[0]

    def within(self, vocabulary: int) -> torch.Tensor:
        """Return which tokens are in ``[0, vocabulary)``, bool ``[P]``."""
        return (self.tokens >= 0) & (self.tokens < vocabulary)


def pair_logits(logits: Logits, pairs: Pairs) -> torch.Tensor:
    """Return the logits of ``pairs`` before the soft-cap, in float64 rounded to their dtype."""
    hidden, weight = logits.hidden.index_select(0, logits.rows), logits.weight
    owners, inside = pairs.owners, pairs.within(weight.shape[0])
    tokens, found = pairs.tokens.where(inside, 0), hidden.new_empty(pairs.tokens.shape[0])
    for some in _chunks(logits, pairs):
        left, right = hidden.index_select(0, owners[some]), weight.index_select(0, tokens[some])
        found[some] = left.to(logits.sums).mul_(right).sum(1)
    if logits.bias is not None:
        found += logits.bias[tokens]
    return found.where(inside, 0.0).double()


def pair_gradients(
    logits: Logits, pairs: Pairs, of_picked: torch.Tensor, needs: list[bool]
) -> list[torch.Tensor | None]:
    """Return the gradients of gathered rows, weight and bias that are needed, else None.

    That of the rows is in the dtype of sums. All are added in the order of the pairs; the weight's
    in as many columns at once as `TOTAL_BYTES` holds.
    """
    hidden, weight, sums = logits.hidden.index_select(0, logits.rows), logits.weight, logits.sums
    owners, inside = pairs.owners, pairs.within(weight.shape[0])
    tokens = pairs.tokens.where(inside, 0)
    rates = of_picked.to(hidden.dtype).to(sums).where(inside, 0.0)[:, None]
    of_hidden, of_weight, of_bias = None, None, None
    if needs[0]:
        of_hidden = torch.zeros_like(hidden, dtype=sums)
        for some in _chunks(logits, pairs):
            right = weight.index_select(0, tokens[some]).to(sums)
            add_rows(of_hidden, owners[some], right.mul_(rates[some]))
    if needs[1]:
        of_weight = weight.new_empty(weight.shape)
        step = max(1, TOTAL_BYTES // (4 * weight.shape[0]))
        for part, of_part in zip(*(one.split(step, 1) for one in (hidden, of_weight)), strict=True):
            total = torch.zeros_like(of_part, dtype=sums)
            for some in _chunks(logits, pairs):
                left = part.index_select(0, owners[some]).to(sums)
                add_rows(total, tokens[some], left.mul_(rates[some]))
            of_part.copy_(total)
    if needs[2]:
        of_bias = sum_rows(rates[:, 0], tokens, weight.shape[0]).to(weight.dtype)
    return [of_hidden, of_weight, of_bias]


def _chunks(logits: Logits, pairs: Pairs) -> Iterator[slice]:
    limit = CHUNK_BYTES["cuda" if logits.hidden.is_cuda else "cpu"]
    size = max(1, limit // (4 * logits.hidden.shape[1]))
    return (slice(begin, begin + size) for begin in range(0, pairs.tokens.shape[0], size))
