"""Stretches of rows, moved to their places in a result: without a kernel, and fast on the host.

The first touch of fresh memory dominates on the host, so only outputs are written, each byte once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.validation import HOSTS

Ints: TypeAlias = npt.NDArray[np.integer[Any]]
Array: TypeAlias = npt.NDArray[Any]

SHORT = 128
"""Mean stretch below which one gather beats a copy per stretch (measured)."""
COUNTED = 2048
"""Mean stretch below which one sum beats counting up per stretch (measured)."""


def moved(
    source: torch.Tensor,
    begin: torch.Tensor,
    origin: torch.Tensor,
    size: torch.Tensor,
    num_rows: int,
    fill: Any,
) -> torch.Tensor:
    """Return ``[num_rows, *rest]``: stretches of the rows of a source, and a fill between them.

    Stretch ``i`` is ``source[origin[i] :][: size[i]]`` and goes to ``begin[i]``; stretches are in
    the order of ``begin``. No value of a device is read, nor an address outside of the source.
    """
    if source.device.type in HOSTS:
        rows, columns = source.numpy(), [one.numpy() for one in (begin, origin, size)]
        out = np.empty((num_rows, *rows.shape[1:]), rows.dtype)
        copier(num_rows, *columns)(out, rows, np.asarray(fill))
        return torch.from_numpy(out)
    if not begin.shape[0]:
        return source.new_zeros(num_rows, *source.shape[1:])
    _, _, index, given = located(num_rows, begin, origin, size)
    return taken(source, index, given, fill)


def located(
    num_rows: int, begin: torch.Tensor, origin: torch.Tensor, size: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's stretch, its place in it, its index in the source, and if it has one."""
    row = torch.arange(num_rows, device=begin.device)
    stretch = (torch.searchsorted(begin.contiguous(), row, right=True) - 1).clamp(min=0)
    offset = row - begin[stretch]
    return stretch, offset, origin[stretch] + offset, (offset >= 0) & (offset < size[stretch])


def taken(
    source: torch.Tensor, index: torch.Tensor, given: torch.Tensor, fill: Any
) -> torch.Tensor:
    """Return ``source[index]`` where ``given`` and there is such a row, else rows of ``fill``."""
    rest = source.shape[1:]
    given = given & (index >= 0) & (index < source.shape[0])
    if source.shape[0] == 0:
        source = source.new_zeros(1, *rest)
    rows = source[torch.where(given, index, 0)]
    return torch.where(given.reshape(-1, *[1] * len(rest)), rows, fill)


def copier(
    num_rows: int, begin: Ints, origin: Ints, size: Ints
) -> Callable[[Array, Array, Any], None]:
    """Return a function that does what `moved` does, given an output, a source and a fill.

    It copies slice by slice, or gathers by an index where slices would be short. Neighbours both in
    the source and in the output are one slice.
    """
    some = size > 0
    to, come, count = begin[some], origin[some], size[some]
    follows = (to[1:] == to[:-1] + count[:-1]) & (come[1:] == come[:-1] + count[:-1])
    heads = np.flatnonzero(np.append(np.ones(min(len(to), 1), np.bool_), ~follows))
    if heads.size:
        to, come, count = to[heads], come[heads], np.add.reduceat(count, heads)
    if num_rows < SHORT * len(heads):
        return _gatherer(num_rows, to, come, count)
    here, there = slices(to, to + count), slices(come, come + count)
    gaps = slices(np.append(0, to + count), np.append(to, num_rows))

    def copied(out: Array, source: Array, fill: Any) -> None:
        for place in gaps:
            out[place] = fill
        for place, rows in zip(here, there, strict=True):
            out[place] = source[rows]

    return copied


def _gatherer(
    num_rows: int, to: Ints, come: Ints, count: Ints
) -> Callable[[Array, Array, Any], None]:
    """Return the function of `copier` that moves short stretches by an index."""
    before, total = np.cumsum(count) - count, count.sum()
    if (come - before == come[0]).all():
        place = np.arange(total) + np.repeat(to - before, count)

        def scattered(out: Array, source: Array, fill: Any) -> None:
            out[...] = fill
            out[place] = source[come[0] : come[0] + total]

        return scattered
    to, come, count = (np.append(0, column) for column in (to, come, count))
    lengths = np.diff(to, append=num_rows)
    row = np.arange(num_rows)
    index = row + np.repeat(come.astype(np.int64) - to, lengths)
    filled = row >= np.repeat(to + count, lengths) if total < num_rows else None

    def gathered(out: Array, source: Array, fill: Any) -> None:
        if out.dtype == source.dtype:
            source.take(index, 0, out, "clip")  # "raise" would copy twice
        else:
            out[:] = source.take(index, 0, mode="clip")
        if filled is not None:
            out[filled] = fill

    return gathered


def slices(begin: Ints, end: Ints) -> list[slice]:
    """Return a slice of each pair."""
    return [slice(*pair) for pair in zip(begin.tolist(), end.tolist(), strict=True)]


def count_up(out: Array, begin: Ints, first: Ints, lengths: Ints) -> None:
    """Write ``first[i]``, ``first[i] + 1`` and so on to ``out[begin[i] :][: lengths[i]]``.

    No stretch is empty, and together they are the whole output.
    """
    heads = np.flatnonzero(np.append(True, first[1:] != first[:-1] + lengths[:-1])[: first.size])
    if heads.size:
        begin, first, lengths = begin[heads], first[heads], np.add.reduceat(lengths, heads)
    if out.size < COUNTED * lengths.size:
        first = first.astype(np.int64)
        out[:] = 1
        out[begin] = first - np.append(0, (first + lengths - 1)[:-1])
        np.cumsum(out, out=out)
        return
    steps = np.arange(lengths.max(initial=0))
    for place, start, length in zip(
        slices(begin, begin + lengths), first.tolist(), lengths.tolist(), strict=True
    ):
        np.add(steps[:length], start, out=out[place])
