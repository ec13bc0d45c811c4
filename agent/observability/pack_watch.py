"""`watch_pack`: times a pack and reports it to metrics and traces."""

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
    """Numbers of a packed batch, all known to the host.

    Attributes:
        num_trajectories: Trajectories.
        num_turns: Turns of all trajectories.
        num_sequences: Sequences in this layout.
        num_tokens: Tokens of all sequences.
        num_generated: Tokens that were sampled.
        num_continuations: Turns after the first of their trajectory; None unless the layout is
            ``"merged"`` and without padding.
        num_prefix_breaks: Continuations whose prompt does not begin with the turns before, so that
            they began another sequence; None in the same cases.
        rectangle_fill: Share of tokens in a padded rectangle, one row per sequence and as wide as
            the longest; None for a batch without tokens or a padded one.
    """

    num_trajectories: int
    num_turns: int
    num_sequences: int
    num_tokens: int
    num_generated: int
    num_continuations: int | None
    num_prefix_breaks: int | None
    rectangle_fill: float | None


@dataclass
class WatchedPack:
    """A pack that `watch_pack` watches; the caller sets its batch and its plan.

    Attributes:
        batch: The packed batch; without one, only the time is known.
        plan: Plan of its micro-batches, for its fill.
        error: Exception that ended the pack, or None.
        began_ns: Start, in nanoseconds since the epoch.
        seconds: Time on the host; a device may still be running.
    """

    batch: PackedBatch | None = None
    plan: Plan | None = None
    error: BaseException | None = None
    began_ns: int = 0
    seconds: float = 0.0

    def figures(self) -> PackFigures | None:
        """Return the numbers of the batch, if there is one, without a read from the device."""
        if self.batch is None:
            return None
        batch, num_trajectories = self.batch, len(self.batch.ids)
        has_chains = batch.num_prefix_breaks is not None
        rectangle = 0 if batch.is_padded else len(batch) * batch.max_seqlen
        return PackFigures(
            num_trajectories=num_trajectories,
            num_turns=batch.num_turns,
            num_sequences=len(batch),
            num_tokens=batch.num_tokens,
            num_generated=batch.num_generated,
            num_continuations=batch.num_turns - num_trajectories if has_chains else None,
            num_prefix_breaks=batch.num_prefix_breaks,
            rectangle_fill=batch.num_tokens / rectangle if rectangle else None,
        )


class PackObserver(Protocol):
    """Receives packs, as `RolloutMetrics` and `RolloutTracer` do."""

    def pack_ended(self, pack: WatchedPack) -> None:
        """Handle a pack that has ended, with or without an ``error``."""
        ...


@contextmanager
def watch_pack(*observers: PackObserver) -> Iterator[WatchedPack]:
    """Time a pack, and report it to observers.

    Args:
        *observers: `RolloutMetrics`, `RolloutTracer`, or objects with a method ``pack_ended`` that
            takes the `WatchedPack`.

    Errors of the block are raised to the caller; errors of an observer are logged.

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
