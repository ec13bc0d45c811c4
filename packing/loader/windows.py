"""Windows of trajectories from lists, data sets, logs and iterators."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np

from trajpack.packing.conversion import shown
from trajpack.packing.types import Trajectory

Window: TypeAlias = list[Trajectory]


def is_readable(source: Any) -> bool:
    """Return whether a source has items: by number, by iteration or as a log."""
    return any(hasattr(source, name) for name in ("__getitem__", "__iter__", "__aiter__", "replay"))


def is_asynchronous(source: Any) -> bool:
    """Return whether a source is read by ``async for``."""
    return hasattr(source, "__aiter__")


def is_consumed(source: Any) -> bool:
    """Return whether a source does not give its items again."""
    return isinstance(source, Iterator) or is_asynchronous(source)


def windows_of(
    source: Any, size: int, *, seed: Sequence[int] | None, first: int
) -> Iterator[Window]:
    """Yield the trajectories of each window of ``size`` items, from the window ``first`` on.

    Items that have numbers are taken in an order that the seed decides, in their own if it is None.
    An iterator goes on where it is; other sources are read from their start, and the items of
    earlier windows are dropped.
    """
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        order = np.arange(len(source))
        if seed is not None:
            order = np.random.default_rng(seed).permutation(order)
        for begin in range(first * size, len(order), size):
            yield _window(source[at] for at in order[begin : begin + size].tolist())
        return
    items = iter(source.replay() if hasattr(source, "replay") else source)
    if not is_consumed(source):
        next(islice(items, first * size, first * size), None)
    while some := list(islice(items, size)):
        yield _window(some)


async def async_windows_of(source: Any, size: int) -> AsyncIterator[Window]:
    """Yield the trajectories of each window of ``size`` items of an asynchronous iterable."""
    some = []
    async for item in source:
        some.append(item)
        if len(some) == size:
            yield _window(some)
            some = []
    if some:
        yield _window(some)


def _window(items: Iterable[Any]) -> Window:
    return [trajectory for item in items for trajectory in _trajectories_of(item)]


def _trajectories_of(item: Any) -> Sequence[Trajectory]:
    if isinstance(item, Trajectory):
        return (item,)
    found = getattr(item, "trajectories", item)
    if isinstance(found, list | tuple) and all(isinstance(one, Trajectory) for one in found):
        return found
    raise TypeError(
        "PackedDataset: an item must be a Trajectory, several, or have `trajectories`, got "
        f"{shown(item)}; trajpack.agent.conversations_to_trajectories makes them of rows"
    )
