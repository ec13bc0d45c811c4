"""Watching a pack: `RolloutMetrics` and `RolloutTracer` are told what came of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from trajpack.packing.text import one_line

if TYPE_CHECKING:
    from trajpack.packing.batch.batch import PackedBatch
    from trajpack.packing.plan.plan import Plan

_logger = logging.getLogger(__name__)


class PackFigures(NamedTuple):
    """A packed batch in numbers, all of them known to the host."""

    num_trajectories: int
    """Trajectories in the batch."""
    num_turns: int
    """Turns of them all."""
    num_sequences: int
    """Sequences it was packed to."""
    num_tokens: int
    """Tokens of all sequences."""
    num_generated: int
    """Those among them that were sampled."""
    num_continuations: int | None
    """Turns after the first of their trajectory; None where breaks were not counted."""
    num_prefix_breaks: int | None
    """Those among them whose prompt does not begin with what came before, so that they began
    a sequence of their own; None unless the layout is ``"merged"`` and without padding."""
    rectangle_fill: float | None
    """Share of tokens in a padded rectangle, as many rows as sequences and as wide as the
    longest; None for a batch without tokens, or one that is padded."""


@dataclass
class WatchedPack:
    """What `watch_pack` hands out: tell it what was packed."""

    batch: PackedBatch | None = None
    """The batch, set by whoever packs it. Without one, only the time is known."""
    plan: Plan | None = None
    """The plan of its micro-batches, where there is one: its fill is recorded."""
    error: BaseException | None = None
    """What was raised instead."""
    began_ns: int = 0
    """When it began, in nanoseconds since the epoch."""
    seconds: float = 0.0
    """How long it took the host. A device goes on with its part on its own."""

    def figures(self) -> PackFigures | None:
        """Return the numbers of the batch, if there is one.

        Cost: proportional to the number of sequences, on the host; nothing is read from
            the device.
        """
        if self.batch is None:
            return None
        batch, is_padded = self.batch, self.batch.is_padded
        num_trajectories, num_turns = len(batch.ids), batch.num_turns
        has_chains = batch.layout == "merged" and not is_padded
        room = len(batch) * batch.max_seqlen
        return PackFigures(
            num_trajectories=num_trajectories,
            num_turns=num_turns,
            num_sequences=len(batch),
            num_tokens=batch.num_tokens,
            num_generated=batch.num_generated,
            num_continuations=num_turns - num_trajectories if has_chains else None,
            num_prefix_breaks=len(batch) - num_trajectories if has_chains else None,
            rectangle_fill=batch.num_tokens / room if room and not is_padded else None,
        )


class PackObserver(Protocol):
    """Is told of packs."""

    def pack_ended(self, pack: WatchedPack) -> None:
        """A pack is over, well or with its ``error``."""
        ...


@contextmanager
def watch_pack(*observers: PackObserver) -> Iterator[WatchedPack]:
    """Time a pack, and tell ``observers`` what came of it.

    What is raised within goes on to the caller; what an observer raises is logged.

    Example:
        >>> from trajpack import Trajectory, Turn, pack
        >>> class Print:
        ...     def pack_ended(self, pack):
        ...         print(pack.figures().num_tokens, pack.error)
        >>> with watch_pack(Print()) as watched:
        ...     watched.batch = pack([Trajectory("a", [Turn([1, 2], [3], [-0.5])])])
        3 None
    """
    pack = WatchedPack(began_ns=time.time_ns())
    began = time.perf_counter()
    try:
        yield pack
    except BaseException as error:
        pack.error = error
        raise
    finally:
        pack.seconds = time.perf_counter() - began
        for observer in observers:
            try:
                observer.pack_ended(pack)
            except Exception as error:  # noqa: BLE001 - watching must not fail what is watched
                kind = type(error).__name__
                _logger.error("an observer failed: %s: %s", one_line(kind), one_line(error))
