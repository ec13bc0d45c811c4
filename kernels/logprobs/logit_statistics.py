"""One pass over the vocabulary in tiles: the statistics of rows of logits, and their gradient.

A tile is the product of some rows of hidden states and some rows of the LM head. It is folded into
running sums. The first tiles are kept as far as a budget goes; the others share the memory of one.
The backward pass reads what is kept, computes the others again, and makes a tile of each gradient.

Each row has tokens whose logits are returned. The sums leave them out: the sum over all other
tokens, the tail of a distribution, would be lost in rounding if it were subtracted from the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from trajpack.kernels.dispatch import register_op
from trajpack.kernels.logprobs.pair_logits import Logits, Pairs, pair_gradients, pair_logits
from trajpack.kernels.rearrange.repeat_rows import sum_rows

MOST_ROWS = {"cuda": 8192, "cpu": 512}
"""Most rows of a tile, by the type of device."""
TILE_BYTES = {"cuda": 2**28, "cpu": 2**23}
"""About the most bytes of a tile: fewer rows have more columns, and so fewer launches."""
HALVES = (torch.float16, torch.bfloat16)


class Tile(NamedTuple):
    """Place of a tile."""

    rows: slice
    columns: slice
    logits: torch.Tensor
    """``[rows, columns]`` before the soft-cap; a view of memory."""
    padded: torch.Tensor
    """``[rows, stride]``: the logits, and any numbers behind them."""
    memory: torch.Tensor
    """``[rows * stride + 1]``: the padded tile, and an entry for pairs of other tiles."""
    source: torch.Tensor
    """``[rows, stride]``: the padded tile, or one that is kept, whose gradient goes to that."""


class Cut(NamedTuple):
    """How ``[R, V]`` is cut into tiles."""

    rows: int
    columns: int
    """A multiple of a number, so that the rows of a product begin and end on 16 bytes. The last
    tiles may have fewer."""

    @classmethod
    def of(cls, hidden: torch.Tensor, num_rows: int, vocabulary: int, multiple: int) -> Cut:
        """Return the cut, in even parts, by the type of device."""
        kind = "cuda" if hidden.is_cuda else "cpu"
        rows = _even_part(num_rows, MOST_ROWS[kind])
        most = TILE_BYTES[kind] // (rows * hidden.itemsize)
        columns = _even_part(vocabulary, max(1, most))
        return cls(rows, math.ceil(columns / multiple) * multiple)

    def entries(self, rows: int) -> int:
        """Return the entries of memory of a tile: with the one for pairs, a multiple of 64."""
        return (rows * self.columns + 64) // 64 * 64

    def kept(self, num_rows: int, vocabulary: int, most: int) -> int:
        """Return the entries of as many of the first tiles as fit in ``most`` entries."""
        whole, rest = num_rows // self.rows, num_rows % self.rows
        each = self.entries(self.rows)
        column = whole * each + (self.entries(rest) if rest else 0)
        if not most or not column:
            return 0
        num_columns = math.ceil(vocabulary / self.columns)
        if most >= num_columns * column:
            return num_columns * column
        columns = most // column
        return columns * column + min((most - columns * column) // each, whole) * each


def _even_part(whole: int, most: int) -> int:
    """Return the size of each of the fewest parts of at most so many, at least 1."""
    return max(1, math.ceil(whole / math.ceil(max(1, whole) / most)))


def tiles_of(
    logits: Logits, hidden: torch.Tensor, multiple: int = 1, kept: torch.Tensor | None = None,
    *, again: bool = False,
) -> Iterator[Tile]:  # fmt: skip
    """Yield the tiles, column of tiles by column; ``hidden`` is ``[R, H]``, the gathered rows.

    The first tiles lie in ``kept``, all others in the same memory. ``again``, those that are kept
    are not computed, and are the sources of tiles in that memory.
    """
    num_rows, vocabulary = hidden.shape[0], logits.weight.shape[0]
    cut, place = Cut.of(hidden, num_rows, vocabulary, multiple), 0
    starts = range(0, num_rows, cut.rows)
    rows_of = [slice(first, min(first + cut.rows, num_rows)) for first in starts]
    parts, shared = [(rows, hidden[rows]) for rows in rows_of], None
    for begin in range(0, vocabulary, cut.columns):
        columns = slice(begin, min(begin + cut.columns, vocabulary))
        weight = logits.weight[columns]
        for rows, part in parts:
            end = place + cut.entries(part.shape[0])
            own = kept[place:end] if kept is not None and end <= kept.shape[0] else None
            if shared is None and (own is None or again):
                shared = hidden.new_zeros(cut.entries(min(num_rows, cut.rows)))
            used = shared if own is None or again else own
            assert used is not None
            used, place = used[: part.shape[0] * cut.columns + 1], end
            padded = used[:-1].view(-1, cut.columns)
            product, source = padded[:, : weight.shape[0]], padded
            if own is not None and again:
                source = own[: padded.numel()].view_as(padded)
            else:
                if weight.shape[0] < cut.columns:
                    padded[:, weight.shape[0] :].zero_()
                torch.mm(part, weight.T, out=product)
                if logits.bias is not None:
                    product += logits.bias[columns]
            yield Tile(rows, columns, product, padded, used, source)


def places_of(tile: Tile, owners: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the place of each pair in the memory of a tile, the last where it is in another."""
    row, column = owners - tile.rows.start, tokens - tile.columns.start
    num_rows, width = tile.logits.shape
    inside = (row >= 0) & (row < num_rows) & (column >= 0) & (column < width)
    place = row * tile.padded.shape[1] + column
    return torch.where(inside, place, tile.memory.shape[0] - 1)


def statistics(
    logits: Logits, pairs: Pairs, kept: torch.Tensor | None = None, *, with_mean: bool, impl: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-sum-exp and mean of each row's other logits, and those of ``pairs``; float64.

    Without ``with_mean`` the means are 0. ``kept`` gets the first tiles, in which the logits of
    pairs are replaced: their gradients are not computed from them.
    """
    hidden = logits.hidden.index_select(0, logits.rows)
    running = hidden.new_zeros(3, hidden.shape[0], dtype=logits.sums)
    running[0] = -torch.inf
    picked = hidden.new_zeros(pairs.tokens.shape[0], dtype=torch.float64)
    fold, _, held, multiple = way_of(impl, pairs)
    for tile in tiles_of(logits, hidden, multiple, kept):
        fold(logits, tile, held, running, picked, with_mean=with_mean)
    most, total, weighted = running.double().unbind()
    total = torch.where(most == torch.inf, torch.nan, total)
    logsumexp = torch.where(total == 0, -torch.inf, most + total.log())
    mean = torch.where(total == 0, 0.0, most + weighted / total) if with_mean else weighted
    return logsumexp, mean, picked


def way_of(impl: str, pairs: Pairs) -> tuple[Any, ...]:
    """Return what folds a tile, what overwrites it, the pairs for both, and the stride's unit."""
    if impl == "torch":
        return fold_reference, slope_reference, (pairs.owners, pairs.tokens), 1
    from trajpack.kernels.logprobs.logit_statistics_triton import BLOCK, fold_forward, slope_forward

    return fold_forward, slope_forward, pairs, BLOCK


def transformed(
    z: torch.Tensor, softcap: float, temperature: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return logits after soft-cap and temperature, and their derivative by ``z``.

    Minus infinity stays what it is.
    """
    slope: torch.Tensor | float = 1.0
    if softcap:
        capped = (z / softcap).tanh()
        z, slope = torch.where(z == -torch.inf, z, capped * softcap), 1 - capped * capped
    if temperature is not None:
        z, slope = z / temperature, slope / temperature.to(z.dtype)
    return z, slope


def fold_reference(
    logits: Logits, tile: Tile, pairs: tuple[torch.Tensor, ...], running: torch.Tensor,
    picked: torch.Tensor, *, with_mean: bool,
) -> None:  # fmt: skip
    """Fold a tile into maximum, sum of exponentials, and sum of logits weighted by them.

    Both sums are relative to the maximum. The logits of pairs go to ``picked`` instead.
    """
    places = places_of(tile, *pairs)
    tile.memory[-1] = 0.0
    picked += tile.memory[places]
    tile.memory[places] = -torch.inf
    z, _ = transformed(
        tile.logits.to(running.dtype), logits.softcap, logits.temperature_of(tile.rows)
    )
    most, total, weighted = (one[tile.rows] for one in running)
    new_most = torch.maximum(most, z.amax(1))
    shift = torch.where(new_most == -torch.inf, 0.0, new_most)
    old, z = (most - shift).exp(), z - shift[:, None]
    exponentials = z.exp()
    if with_mean:
        weighted.add_(torch.where(most == -torch.inf, 0.0, total * (most - shift))).mul_(old)
        weighted.add_(torch.where(exponentials == 0, 0.0, exponentials * z).sum(1))
    total.mul_(old).add_(exponentials.sum(1))
    most.copy_(new_most)


def slope_reference(
    logits: Logits, tile: Tile, pairs: tuple[torch.Tensor, ...], rates: torch.Tensor,
    of_picked: torch.Tensor, *, with_mean: bool,
) -> None:  # fmt: skip
    """Make a tile the gradient with respect to its source; the mean has one if ``with_mean``.

    ``rates`` has four rows of ``[R]``: the gradients of log-sum-exp and mean, and their values.
    ``of_picked`` are the gradients of the logits of pairs.
    """
    of_logsumexp, of_mean, logsumexp, mean = rates[:, tile.rows, None].unbind()
    z = tile.source[:, : tile.logits.shape[1]].to(rates.dtype)
    z, slope = transformed(z, logits.softcap, logits.temperature_of(tile.rows))
    probability = (z - torch.where(logsumexp == -torch.inf, 0.0, logsumexp)).exp()
    rate = of_logsumexp + of_mean * (1 + z - mean) if with_mean else of_logsumexp
    tile.logits.copy_(torch.where(probability == 0, 0.0, probability * rate * slope))
    tile.memory[places_of(tile, *pairs)] = of_picked


def gradients(
    logits: Logits, pairs: Pairs, rates: torch.Tensor, of_picked: torch.Tensor,
    kept: torch.Tensor | None = None, *, needs: list[bool], with_mean: bool, impl: str,
) -> list[torch.Tensor | None]:  # fmt: skip
    """Return the gradients of gathered rows, weight and bias that are needed, else None.

    That of the rows is in the dtype of sums. Products are added in float32 and in the order of the
    tiles; the only one of a part of the weight is rounded as it is. ``rates`` are those of
    `slope_reference`.
    """
    hidden = logits.hidden.index_select(0, logits.rows)
    sums, num_rows = logits.sums, hidden.shape[0]
    of_hidden = torch.zeros_like(hidden, dtype=sums) if needs[0] else None
    of_weight = hidden.new_empty(logits.weight.shape) if needs[1] else None
    of_bias = hidden.new_empty((logits.weight.shape[0], 1)) if needs[2] else None
    by_column = [
        (total, right, hidden.new_empty(0, dtype=sums))
        for total, right in ((of_weight, hidden), (of_bias, hidden.new_ones(num_rows, 1)))
        if total is not None
    ]
    for total, *_ in by_column if not num_rows else ():
        total.zero_()  # no tile writes it
    rates, of_picked = rates.to(sums), of_picked.to(hidden.dtype)
    _, change, held, multiple = way_of(impl, pairs)
    for tile in tiles_of(logits, hidden, multiple, kept, again=True):
        change(logits, tile, held, rates, of_picked, with_mean=with_mean)
        if of_hidden is not None:
            add_product(of_hidden[tile.rows], tile.logits, logits.weight[tile.columns])
        for total, right, part in by_column:
            if tile.rows == slice(0, num_rows):
                set_product(total[tile.columns], tile.logits.T, right)
                continue
            if not tile.rows.start:
                part.resize_(tile.logits.shape[1], right.shape[1]).zero_()
            add_product(part, tile.logits.T, right[tile.rows])
            if tile.rows.stop == num_rows:
                total[tile.columns] = part
    return [of_hidden, of_weight, None if of_bias is None else of_bias[:, 0]]


def set_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Write a matrix product, which is added in float32 at least, to ``total``."""
    if left.dtype in HALVES and not left.is_cuda:
        total.copy_(left.float() @ right.float())
    else:
        torch.mm(left, right, out=total)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add a matrix product to ``total``, rounded to no narrower dtype than that of ``total``."""
    if left.dtype not in HALVES:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def _given(arguments: tuple[Any, ...]) -> tuple[Logits, Pairs, bool, dict[str, Any]]:
    """Return what the arguments of the ops say: logits, pairs, whether all logits, and options."""
    *head, boundaries, tokens, softcap, whole, with_mean, impl = arguments
    options = {"with_mean": with_mean, "impl": impl}
    return Logits._make((*head, softcap)), Pairs(boundaries, tokens), whole, options


def _memory_kept(arguments: tuple[Any, ...]) -> torch.Tensor:
    """Return memory for the tiles that are kept."""
    logits, pairs, whole, options = _given(arguments[:-1])
    hidden, vocabulary, most = logits.hidden, logits.weight.shape[0], arguments[-1]
    if not whole or not most:
        return hidden.new_empty(0)
    num_rows = logits.rows.shape[0]
    cut = Cut.of(hidden, num_rows, vocabulary, way_of(options["impl"], pairs)[-1])
    return hidden.new_empty(cut.kept(num_rows, vocabulary, most // hidden.itemsize))


def _run(*arguments: Any) -> tuple[torch.Tensor, ...]:
    logits, pairs, whole, options = _given(arguments[:-1])
    kept = _memory_kept(arguments)
    if whole:
        return *statistics(logits, pairs, kept, **options), kept
    mean = logits.hidden.new_zeros(logits.rows.shape[0], dtype=torch.float64)
    return mean - torch.inf, mean, pair_logits(logits, pairs), kept


def _fake(*arguments: Any) -> tuple[torch.Tensor, ...]:
    hidden, rows, tokens = arguments[0], arguments[3], arguments[6]
    sizes = rows.shape[0], rows.shape[0], tokens.shape[0]
    floats = (hidden.new_empty(size, dtype=torch.float64) for size in sizes)
    return *floats, _memory_kept(arguments)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    """Save inputs and statistics; tiles that are kept go past hooks of saved tensors.

    Hooks would move them to the host, or, as activation checkpointing, compare their sizes.
    """
    ctx.save_for_backward(*inputs[:7], *output[:2])
    ctx.options, ctx.kept = inputs[7:-1], output[3]
    ctx.mark_non_differentiable(output[3])
    ctx.set_materialize_grads(False)  # that of the tiles would be as large as they


def _backward(ctx: Any, *of_outputs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients; the first call lets go of the tiles that were kept."""
    *inputs, logsumexp, mean = ctx.saved_tensors
    kept, ctx.kept = ctx.kept, None
    needs, like = list(ctx.needs_input_grad[:3]), (logsumexp, mean, inputs[6])
    of_logsumexp, of_mean, of_picked = (
        logsumexp.new_zeros(other.shape) if one is None else one
        for one, other in zip(of_outputs[:3], like, strict=True)
    )
    rates = torch.stack((of_logsumexp, of_mean, logsumexp, mean))
    found = torch.ops.trajpack.logit_gradients(*inputs, *ctx.options, rates, of_picked, kept, needs)
    grads = [one if need else None for one, need in zip(found, needs, strict=True)]
    return *grads, *[None] * 9


def _run_gradients(*arguments: Any) -> tuple[torch.Tensor, ...]:
    *inputs, rates, of_picked, kept, needs = arguments
    logits, pairs, whole, options = _given(tuple(inputs))
    if whole:
        of_rows, *of_head = gradients(logits, pairs, rates, of_picked, kept, needs=needs, **options)
    else:
        of_rows, *of_head = pair_gradients(logits, pairs, of_picked, needs)
    hidden = logits.hidden
    if of_rows is not None:
        of_rows = sum_rows(of_rows, logits.rows, hidden.shape[0]).to(hidden.dtype)
    return tuple(hidden.new_empty(0) if one is None else one for one in (of_rows, *of_head))


def _fake_gradients(*arguments: Any) -> tuple[torch.Tensor, ...]:
    hidden, weight, needs = arguments[0], arguments[1], arguments[-1]
    like = hidden, weight, weight[:, 0]
    shapes = (one.shape if need else (0,) for one, need in zip(like, needs, strict=True))
    return tuple(hidden.new_empty(shape) for shape in shapes)


def _refuse(ctx: Any, *_of_outputs: torch.Tensor) -> None:
    raise RuntimeError("log-probabilities of hidden states are differentiable once")


ARGUMENTS = (
    "Tensor hidden, Tensor weight, Tensor? bias, Tensor rows, Tensor? temperature, "
    "Tensor boundaries, Tensor tokens, float softcap, bool whole, bool with_mean, str impl"
)
register_op(
    f"logit_statistics({ARGUMENTS}, int keep) -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
)
register_op(
    f"logit_gradients({ARGUMENTS}, Tensor rates, Tensor of_picked, Tensor? kept, bool[] needs) "
    "-> (Tensor, Tensor, Tensor)",
    _run_gradients,
    _fake_gradients,
    backward=_refuse,
)
