"""One pass over the vocabulary in tiles: the statistics of rows of logits, and their gradient.

A tile is the product of some rows of hidden states and some rows of the LM head. It is folded into
running sums and overwritten by the next one, so memory holds one tile, whatever the vocabulary. The
backward pass computes the tiles again and overwrites each by its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from trajpack.kernels.dispatch import register_op
from trajpack.kernels.rearrange.repeat_rows import sum_rows

MOST_ROWS = {"cuda": 4096, "cpu": 512}
"""Rows of a tile, by the type of device."""
MOST_COLUMNS = {"cuda": 16_384, "cpu": 4096}
HALVES = (torch.float16, torch.bfloat16)


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

    def temperature_of(self, tile: Tile) -> torch.Tensor | None:
        """Return the temperatures of a tile's rows, ``[rows, 1]``."""
        return None if self.temperature is None else self.temperature[tile.rows, None]

    @property
    def sums(self) -> torch.dtype:
        """Dtype of sums over the vocabulary and of accumulated gradients."""
        return torch.float64 if self.hidden.dtype == torch.float64 else torch.float32


class Pairs(NamedTuple):
    """Logits that are returned: one for each pair of a row and a token."""

    rows: torch.Tensor
    """``[P]`` int64 in ``[0, R)``, in ascending order."""
    tokens: torch.Tensor
    """``[P]`` int64; a pair whose token is not in ``[0, V)`` has the logit 0. No pair occurs twice
    among the others."""
    per_row: int
    """Pairs of every row, 0 if that differs."""


class Tile(NamedTuple):
    """Place of a tile."""

    rows: slice
    columns: slice
    logits: torch.Tensor
    """``[rows, columns]`` before the soft-cap; a view of memory that tiles share."""
    padded: torch.Tensor
    """``[rows, stride]``: the logits, and any numbers behind them."""
    memory: torch.Tensor
    """``[rows * stride + 1]``: the padded tile, and an entry that takes what is not wanted."""


def tiles_of(logits: Logits, hidden: torch.Tensor, multiple: int = 1) -> Iterator[Tile]:
    """Yield the tiles, column of tiles by column; ``hidden`` is ``[R, H]``, the gathered rows.

    All tiles lie in the same memory. The stride is a multiple of ``multiple``.
    """
    num_rows, vocabulary = hidden.shape[0], logits.weight.shape[0]
    kind = "cuda" if hidden.is_cuda else "cpu"
    num_columns = math.ceil(vocabulary / math.ceil(vocabulary / MOST_COLUMNS[kind]))
    stride = math.ceil(num_columns / multiple) * multiple
    memory = hidden.new_zeros(min(num_rows, MOST_ROWS[kind]) * stride + 1)
    for begin in range(0, vocabulary, num_columns):
        columns = slice(begin, min(begin + num_columns, vocabulary))
        weight = logits.weight[columns]
        width = weight.shape[0]
        for first in range(0, num_rows, MOST_ROWS[kind]):
            rows = slice(first, min(first + MOST_ROWS[kind], num_rows))
            used = memory[: (rows.stop - first) * stride + 1]
            padded = used[:-1].view(-1, stride)
            product = padded[:, :width]
            torch.mm(hidden[rows], weight.T, out=product)
            if logits.bias is not None:
                product += logits.bias[columns]
            yield Tile(rows, columns, product, padded, used)


def statistics(
    logits: Logits, pairs: Pairs, *, with_mean: bool, impl: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-sum-exp and mean logit of each row, and the logits of ``pairs``, all float64."""
    hidden = logits.hidden.index_select(0, logits.rows)
    running = hidden.new_zeros(3, hidden.shape[0], dtype=logits.sums)
    running[0] = -torch.inf
    picked = hidden.new_zeros(pairs.tokens.shape[0], dtype=torch.float64)
    fold, multiple = fold_reference, 1
    if impl == "triton":
        from trajpack.kernels.logprobs.logit_statistics_triton import BLOCK, fold_forward

        fold, multiple = fold_forward, BLOCK
    for tile in tiles_of(logits, hidden, multiple):
        fold(logits, tile, running, with_mean=with_mean)
        some, inside, place = places_in(tile, pairs)
        picked[some] = torch.where(inside, tile.memory[place].double(), picked[some])
    most, total, weighted = running.double().unbind()
    total = torch.where(most == torch.inf, torch.nan, total)
    logsumexp = torch.where(total == 0, -torch.inf, most + total.log())
    return logsumexp, torch.where(total == 0, 0.0, weighted / total), picked


def places_in(tile: Tile, pairs: Pairs) -> tuple[slice, torch.Tensor, torch.Tensor]:
    """Return the pairs that may be in a tile, which of them are, and their places in its memory.

    The place of the others is the last entry of the memory.
    """
    some = slice(None)
    if pairs.per_row:
        some = slice(tile.rows.start * pairs.per_row, tile.rows.stop * pairs.per_row)
    rows, tokens = pairs.rows[some], pairs.tokens[some]
    inside = (tokens >= tile.columns.start) & (tokens < tile.columns.stop)
    if not pairs.per_row:
        inside &= (rows >= tile.rows.start) & (rows < tile.rows.stop)
    stride = tile.padded.shape[1]
    place = (rows - tile.rows.start) * stride + tokens - tile.columns.start
    return some, inside, place.where(inside, tile.memory.shape[0] - 1)


def transformed(
    z: torch.Tensor, softcap: float, temperature: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return logits after soft-cap and temperature, and their derivative by ``z``."""
    slope: torch.Tensor | float = 1.0
    if softcap:
        capped = (z / softcap).tanh()
        z, slope = capped * softcap, 1 - capped * capped
    if temperature is not None:
        z, slope = z / temperature, slope / temperature.to(z.dtype)
    return z, slope


def fold_reference(logits: Logits, tile: Tile, running: torch.Tensor, *, with_mean: bool) -> None:
    """Fold a tile into maximum, sum of exponentials, and sum of logits weighted by them."""
    z, _ = transformed(tile.logits.to(running.dtype), logits.softcap, logits.temperature_of(tile))
    most, total, weighted = (one[tile.rows] for one in running)
    new_most = torch.maximum(most, z.amax(1))
    shift = torch.where(new_most == -torch.inf, 0.0, new_most)
    old, exponentials = (most - shift).exp(), (z - shift[:, None]).exp()
    total.mul_(old).add_(exponentials.sum(1))
    if with_mean:
        weighted.mul_(old).add_(torch.where(exponentials == 0, 0.0, exponentials * z).sum(1))
    most.copy_(new_most)


def slope_reference(logits: Logits, tile: Tile, rates: torch.Tensor, *, with_mean: bool) -> None:
    """Overwrite a tile by the gradient of the statistics with respect to it.

    The mean has a gradient only if ``with_mean``.

    ``rates`` has four rows of ``[R]``: the gradients of log-sum-exp and mean, and their values.
    """
    temperature = logits.temperature_of(tile)
    z = tile.logits.to(rates.dtype)
    tile.logits.copy_(slope_of(z, rates[:, tile.rows, None], logits.softcap, temperature))


def slope_of(
    z: torch.Tensor, rates: torch.Tensor, softcap: float, temperature: torch.Tensor | None
) -> torch.Tensor:
    """Return the gradient of log-sum-exp and mean with respect to logits ``z``."""
    of_logsumexp, of_mean, logsumexp, mean = rates.unbind()
    z, slope = transformed(z, softcap, temperature)
    probability = (z - logsumexp).exp()
    gradient = probability * (of_logsumexp + of_mean * (1 + z - mean)) * slope
    return torch.where(probability == 0, 0.0, gradient)


def gradients(
    logits: Logits,
    pairs: Pairs,
    rates: torch.Tensor,
    picked: torch.Tensor,
    of_picked: torch.Tensor,
    *,
    needs: list[bool],
    with_mean: bool,
    impl: str,
) -> list[torch.Tensor | None]:
    """Return the gradients of hidden states, weight and bias that are needed, else None.

    Every product is added in float32 and in the order of the tiles. A gradient of a row that
    occurs more than once is added in the order of ``logits.rows``.
    """
    hidden = logits.hidden.index_select(0, logits.rows)
    sums, num_rows = logits.sums, hidden.shape[0]
    of_hidden = torch.zeros_like(hidden, dtype=sums)
    of_weight = torch.zeros_like(logits.weight) if needs[1] else None
    of_bias = torch.zeros_like(logits.weight[:, :1]) if needs[2] else None
    by_column = [
        (total, right, hidden.new_empty(0, dtype=sums))
        for total, right in ((of_weight, hidden), (of_bias, hidden.new_ones(num_rows, 1)))
        if total is not None
    ]
    temperature = None if logits.temperature is None else logits.temperature[pairs.rows]
    exact = slope_of(picked, rates[:, pairs.rows], logits.softcap, temperature) + of_picked
    rates = rates.to(sums)
    change, multiple = slope_reference, 1
    if impl == "triton":
        from trajpack.kernels.logprobs.logit_statistics_triton import BLOCK, slope_forward

        change, multiple = slope_forward, BLOCK
    for tile in tiles_of(logits, hidden, multiple):
        change(logits, tile, rates, with_mean=with_mean)
        some, _, place = places_in(tile, pairs)
        tile.memory[place] = exact[some].to(hidden.dtype)
        if needs[0]:
            add_product(of_hidden[tile.rows], tile.logits, logits.weight[tile.columns])
        for total, right, part in by_column:
            if not tile.rows.start:
                part.resize_(tile.logits.shape[1], right.shape[1]).zero_()
            add_product(part, tile.logits.T, right[tile.rows])
            if tile.rows.stop == num_rows:
                total[tile.columns] = part
    return [
        sum_rows(of_hidden, logits.rows, len(logits.hidden)).to(hidden.dtype) if needs[0] else None,
        of_weight,
        None if of_bias is None else of_bias[:, 0],
    ]


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a matrix product to ``total``, rounded to no narrower dtype than that of ``total``."""
    if left.dtype not in HALVES:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    temperature: torch.Tensor | None,
    pair_rows: torch.Tensor,
    pair_tokens: torch.Tensor,
    *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    per_row, softcap, with_mean, impl = options
    logits = Logits(hidden, weight, bias, rows, temperature, softcap)
    pairs = Pairs(pair_rows, pair_tokens, per_row)
    return statistics(logits, pairs, with_mean=with_mean, impl=impl)


def _fake(hidden: torch.Tensor, _weight: Any, _bias: Any, rows: torch.Tensor, *others: Any) -> Any:
    num_rows, num_pairs = rows.shape[0], others[2].shape[0]
    return tuple(
        hidden.new_empty(size, dtype=torch.float64) for size in (num_rows, num_rows, num_pairs)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.options = inputs[7:]


def _backward(ctx: Any, *of_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *inputs, logsumexp, mean, picked = ctx.saved_tensors
    of_logsumexp, of_mean, of_picked = of_outputs
    needs = list(ctx.needs_input_grad[:3])
    rates = torch.stack((of_logsumexp, of_mean, logsumexp, mean))
    found = torch.ops.trajpack.logit_gradients(
        *inputs, *ctx.options, rates, picked, of_picked, needs
    )
    grads = [one if need else None for one, need in zip(found, needs, strict=True)]
    return *grads, *[None] * 8


def _run_gradients(*arguments: Any) -> tuple[torch.Tensor, ...]:
    hidden, weight, bias, rows, temperature, pair_rows, pair_tokens = arguments[:7]
    per_row, softcap, with_mean, impl, rates, picked, of_picked, needs = arguments[7:]
    logits = Logits(hidden, weight, bias, rows, temperature, softcap)
    pairs = Pairs(pair_rows, pair_tokens, per_row)
    found = gradients(
        logits, pairs, rates, picked, of_picked, needs=needs, with_mean=with_mean, impl=impl
    )
    return tuple(hidden.new_empty(0) if one is None else one for one in found)


def _fake_gradients(*arguments: Any) -> tuple[torch.Tensor, ...]:
    hidden, weight, needs = arguments[0], arguments[1], arguments[-1]
    like = hidden, weight, weight[:, 0]
    return tuple(
        torch.empty(one.shape, dtype=one.dtype, device=one.device) if need else hidden.new_empty(0)
        for one, need in zip(like, needs, strict=True)
    )


ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor rows, Tensor? temperature, "
    "Tensor pair_rows, Tensor pair_tokens, int per_row, float softcap, bool with_mean, str impl"
)
register_op(
    f"logit_statistics({ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
)
register_op(
    f"logit_gradients({ARGUMENTS}, Tensor rates, Tensor picked, Tensor of_picked, bool[] needs) "
    "-> (Tensor, Tensor, Tensor)",
    _run_gradients,
    _fake_gradients,
)
