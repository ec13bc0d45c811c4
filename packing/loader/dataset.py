"""`PackedDataset`: micro-batches of a stream of trajectories."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from trajpack.packing.batch.batch import UNALIGNED
from trajpack.packing.buffer.trajectory_arrays import TrajectoryArrays
from trajpack.packing.conversion import as_integer
from trajpack.packing.loader.cuts import CutOptions, Cuts, LoaderLayout, Piece
from trajpack.packing.loader.windows import (
    Window,
    async_windows_of,
    is_asynchronous,
    is_consumed,
    is_readable,
    windows_of,
)
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.plan.units import Policy, check_choice, check_count
from trajpack.packing.token_fields import TokenField, check_fields
from trajpack.packing.trajectory_log.records import Record, decoded, encoded

OP = "PackedDataset"


@dataclass
class _Place:
    """Place in the stream of a rank."""

    epoch: int = 0
    window: int = 0
    """Number of the window that is cut."""
    before: int = 0
    """Micro-batches in the windows before it."""
    taken: int = 0
    """Micro-batches from the start of the epoch that need not be made again."""
    begin: int = 0
    """Micro-batch at which the loader began: its first worker makes this one."""


def _check_end(place: _Place) -> None:
    """Raise at the end of an epoch that has fewer micro-batches than a state says were taken."""
    if place.taken > place.before:
        raise ValueError(
            f"{OP}: the state has taken={place.taken}, epoch {place.epoch} has {place.before} "
            "micro-batches"
        )


class PackedDataset(IterableDataset[Piece]):
    """Micro-batches of trajectories: full, shuffled, dealt out to ranks and workers, resumable.

    ``lookahead`` items of the source are packed at a time and cut by a plan. All ranks and workers
    make the same plan of the same items, and each cuts its own micro-batches. So ranks have as many
    micro-batches without communication, and the stream of a rank does not depend on its workers.

    The field ``"loss_weights"`` of a micro-batch (of trees, of its ``entries``) is 1 over the
    generated tokens of an optimizer step of all ranks. Sum the losses of a step's micro-batches and
    the gradients of the ranks: the loss is then the mean over these tokens.

    Iterate over it, or give it to a `torch.utils.data.DataLoader` with ``batch_size=None``.

    Args:
        trajectories: A list or another data set with a length, a `TrajectoryLog`, or any iterable.
            An item is a `Trajectory`, several of them, or has ``trajectories``, as a
            ``LoggedEpisode`` and an ``EpisodeResult`` have. An asynchronous iterable is read by
            ``async for micro_batch in dataset``.
        capacity: Maximum tokens of a micro-batch, of trees nodes.
        seed: Seed of the order of items and micro-batches. Items without a number are shuffled
            within their window alone. None keeps the order of the items, and that of the plan.
        rank: Data-parallel rank.
        num_ranks: Number of data-parallel ranks.
        accumulate: Micro-batches of a rank in an optimizer step. A window has whole steps.
        lookahead: Items that are packed at a time.
        layout: ``"merged"``, ``"turns"`` or ``"tree"``.
        alignment: Padding of the micro-batches.
        oversized: Treatment of sequences longer than the capacity, see
            `trajpack.packing.plan.units.Policy`. Trees know ``"raise"`` alone.
        fields: Extra fields of the turns; by default those of a log, else none.

    Raises:
        TypeError: If an argument is of a wrong kind.
        ValueError: If an argument is out of range.

    Example:
        >>> from trajpack import Trajectory, Turn
        >>> trajectories = [Trajectory(str(n), [Turn([1] * n, [2], [0.0])]) for n in range(1, 6)]
        >>> for micro_batch in PackedDataset(trajectories, capacity=10):
        ...     print(micro_batch)
        MicroBatch(3 sequences; 10 tokens, 0 of padding; longest 5; cpu)
        MicroBatch(2 sequences; 10 tokens, 0 of padding; longest 6; cpu)
    """

    def __init__(  # noqa: PLR0913
        self,
        trajectories: Any,
        capacity: int,
        seed: int | None = 0,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        accumulate: int = 1,
        lookahead: int = 1024,
        layout: LoaderLayout = "merged",
        alignment: Alignment = UNALIGNED,
        oversized: Policy = "raise",
        fields: Sequence[TokenField] | None = None,
    ) -> None:
        counts = {"capacity": capacity, "num_ranks": num_ranks, "accumulate": accumulate}
        for name, count in {**counts, "lookahead": lookahead}.items():
            check_count(OP, name, count)
        if seed is not None:
            check_count(OP, "seed", seed, least=0)
        if not 0 <= as_integer("rank", rank) < num_ranks:
            raise ValueError(f"{OP}: rank must be in [0, {num_ranks - 1}], got {rank}")
        check_choice(OP, "layout", layout, choices=LoaderLayout)
        check_choice(OP, "oversized", oversized, choices=Policy)
        if layout == "tree" and oversized != "raise":
            raise ValueError(f"{OP}: oversized must be 'raise' for trees, got {oversized!r}")
        if not is_readable(trajectories):
            kind = type(trajectories).__name__
            raise TypeError(f"{OP}: trajectories must be an iterable or a data set, got {kind}")
        if fields is None:
            fields = trajectories.fields if hasattr(trajectories, "replay") else ()
        self._source, self._rank, self._fields = trajectories, rank, check_fields(fields)
        self._options = CutOptions(
            capacity, seed, num_ranks, accumulate, lookahead, layout, oversized, alignment
        )
        self._place, self._is_resumed = _Place(), False
        self._read: Window | None = None
        """Window that is cut, where the source cannot give it again."""

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration begin an epoch, which has an order of its own.

        Does nothing in the epoch that a loaded state is of.
        """
        check_count(OP, "epoch", epoch, least=0)
        if epoch != self._place.epoch:
            self._place, self._read, self._is_resumed = _Place(epoch), None, False

    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the last micro-batch, as plain values, for `load_state_dict`.

        Where the source is an iterator, which does not give its items again, the state holds the
        trajectories of a window as bytes; the iterator of the data set that loads it goes on
        behind them.
        """
        state = vars(self._place) | self._described()
        if self._read is not None:
            arrays = TrajectoryArrays.of(self._read, self._fields)
            state["read"] = encoded(Record("window", None, arrays))
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on at a place, bit for bit.

        Args:
            state: Result of `state_dict`, of any rank. ``{"epoch": e, "taken": n}`` is enough: the
                iteration goes on behind ``n`` micro-batches, of which a loader's workers made
                parts. Windows before that are then read and planned again.

        Raises:
            TypeError: If the state is no mapping, or a number no integer.
            ValueError: If the state is of a data set with other options, or a number is negative;
                at the end of the iteration if it has more micro-batches than the epoch.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"{OP}: the state must be a mapping, got {type(state).__name__}")
        for name, value in self._described().items():
            if state.get(name, value) != value:
                raise ValueError(
                    f"{OP}: the state has {name}={state[name]!r}, this data set {value!r}"
                )
        place = vars(_Place()) | {name: state[name] for name in vars(_Place()) if name in state}
        for name, number in place.items():
            check_count(OP, f"{name} of the state", number, least=0)
        of_state = decoded(state["read"], self._fields) if "read" in state else None
        self._read = None if of_state is None else of_state.arrays.trajectories()
        self._place, self._is_resumed = _Place(**place), True
        if get_worker_info() is None:  # in a worker its loader goes on
            self._place.begin = self._place.taken

    def __iter__(self) -> Iterator[Piece]:
        if is_asynchronous(self._source):
            raise TypeError(f"{OP}: the source is asynchronous: use `async for`")
        place, size = self._begin(), self._options.lookahead
        yield from self._cut(self._read, place)
        seed = None if self._options.seed is None else [self._options.seed, place.epoch]
        for window in windows_of(self._source, size, seed=seed, first=place.window):
            yield from self._cut(window, place)
        _check_end(place)

    async def __aiter__(self) -> AsyncIterator[Piece]:
        place = self._begin()
        for piece in self._cut(self._read, place):
            yield piece
        async for window in async_windows_of(self._source, self._options.lookahead):
            for piece in self._cut(window, place):
                yield piece
        _check_end(place)

    def _described(self) -> dict[str, Any]:
        """Return the options that a state must agree with, as plain values."""
        names = (one.name for one in dataclasses.fields(CutOptions) if one.name != "alignment")
        return {name: getattr(self._options, name) for name in names}

    def _begin(self) -> _Place:
        """Return the place at which an iteration begins."""
        if not self._is_resumed:
            self._place, self._read = _Place(self._place.epoch), None
        self._is_resumed = False
        return self._place

    def _cut(self, window: Window | None, place: _Place) -> Iterator[Piece]:
        """Yield the micro-batches of a window that this rank and this worker have to make."""
        if window is None:
            return
        number, options = place.window, self._options
        if window:
            self._read = window if is_consumed(self._source) else None
            cuts = Cuts.of(window, self._fields, options)
            order = np.arange(len(cuts))
            if options.seed is not None:
                draw = np.random.default_rng([options.seed, place.epoch, number + 1])
                order = draw.permutation(order)
            steps = np.empty_like(order)
            steps[order] = np.arange(len(cuts)) // options.accumulate
            own = np.arange(max(place.taken - place.before, 0), len(cuts))
            worker = get_worker_info()
            if worker is not None:  # a loader takes one from each worker in turn
                turns = place.before + own - place.begin
                own = own[turns % worker.num_workers == worker.id]
            weights = cuts.loss_weights(steps)
            pieces = cuts.pieces(self._rank, order[own], weights, options.alignment)
            for at, piece in zip(own.tolist(), pieces, strict=True):
                place.taken = place.before + at + 1
                yield piece
            place.before += len(cuts)
        place.window, place.taken = number + 1, max(place.taken, place.before)
        self._read = None
