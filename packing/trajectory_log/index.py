"""The episodes that a log has: those that wait to be written, and those in its file."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from typing import NamedTuple

from trajpack.packing.trajectory_log.database import Entry, LogFile, State
from trajpack.packing.trajectory_log.options import Damaged, DamagedLogError


class PendingEpisode(NamedTuple):
    """An episode that is not on the disk yet."""

    order: int
    """Place among all that were appended."""
    since: float
    """Moment at which it was appended, by the monotonic clock, in seconds."""
    name: str
    """Name of the episode."""
    entry: Entry
    """Its row in the table ``episodes``, as far as it is known."""
    content: bytes
    """Its record."""


class EpisodeIndex:
    """Names and counts of the episodes in a log.

    Of several rows with one name the last one counts, but a failure never replaces a success.

    Signal handlers may use the log that they interrupt, or raise. So no method waits for another
    thread while it holds the lock, and a method that any thread may call does not call anything
    and has no loop while it holds it: between such steps the interpreter runs no handler.

    Args:
        file: Of the log.
        damaged: ``"skip"`` reads all contents, warns of each that is damaged, and leaves its
            row out; ``"raise"`` reads none.

    Raises:
        DamagedLogError: If the table ``episodes`` is not as it was written.
    """

    def __init__(self, file: LogFile, damaged: Damaged) -> None:
        self._file = file
        self._lock = threading.Lock()
        self.pending: dict[str, PendingEpisode] = {}
        """Episodes that wait, by name; one that is appended again takes its predecessor's place."""
        self.num_pending_bytes = 0
        """Bytes of their records."""
        self.is_closed = False
        """Whether no episode can be appended any more."""
        self._finished: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        self._num_rows = 0
        self.num_episodes = 0
        """Episodes, those that wait included, as in the other counts."""
        self.num_trajectories = 0
        self.num_turns = 0
        self.num_tokens = 0
        self._read(damaged)

    def _read(self, damaged: Damaged) -> None:
        file, state, faults = self._file, self._file.start, dict[int, DamagedLogError]()
        for entries, state in file.entries(file.start, file.state.num_episodes):  # noqa: B007
            for entry, row in file.rows(entries if damaged == "skip" else ()):
                if isinstance(row, DamagedLogError):
                    faults[entry.number] = row
            for entry in entries:
                replaced = self._finished.get(entry.text)
                if entry.number in faults or (entry.failed and replaced is not None):
                    continue
                self._add(entry)
                self._count(entry, 1)
                if replaced is not None:  # damaged once, skipped and logged again
                    ((old,), _) = next(file.entries(State(replaced, 0), replaced + 1))
                    self._count(old, -1)
        file.check_end(state)
        self._num_rows = state.num_episodes
        self.num_episodes = len(self._finished) + len(self._failed)
        for fault in faults.values():
            warnings.warn(f"1 episode skipped: {fault}", stacklevel=5)

    def __contains__(self, name: object) -> bool:
        # in the order in which an episode passes through them, so that none is missed on its way
        return name in self.pending or name in self._failed or name in self._finished

    @property
    def finished(self) -> frozenset[str]:
        """Names of the episodes that succeeded. A copy."""
        waiting = [name for name, one in self.pending.copy().items() if not one.entry.failed]
        return frozenset(self._finished).union(waiting)

    @property
    def failed(self) -> frozenset[str]:
        """Names of the episodes that failed, and were not appended again since. A copy."""
        waiting = self.pending.copy()
        again = {name for name, one in waiting.items() if one.entry.failed}
        known = frozenset(self._failed).difference(waiting).union(again)
        return known.difference(self._finished)

    def check_new(self, name: str) -> None:
        """Raise a `ValueError` if an episode cannot be appended, for it has succeeded before."""
        waiting = self.pending.get(name)
        if (waiting and not waiting.entry.failed) or name in self._finished:
            raise _known(name)

    def take(self, episode: PendingEpisode) -> None:
        """Add an episode that waits to be written.

        Raises:
            ValueError: If it has succeeded before, or the log is closed.
        """
        name, entry = episode.name, episode.entry
        with self._lock:
            waits = name in self.pending
            is_known = name in self._finished or (waits and not self.pending[name].entry.failed)
            if not is_known and not self.is_closed:
                if waits:
                    self.num_pending_bytes -= self.pending[name].entry.num_bytes
                elif name not in self._failed:
                    self.num_episodes += 1
                self.num_trajectories += entry.num_trajectories
                self.num_turns += entry.num_turns
                self.num_tokens += entry.num_tokens
                self.num_pending_bytes += entry.num_bytes
                self.pending[name] = episode
                return
        raise _known(name) if is_known else self.closed_error()

    def move(self, batch: Sequence[PendingEpisode], entries: Sequence[Entry]) -> None:
        """Tell that episodes are in the file, with their rows. Telling it twice does no harm.

        Only the writer's thread, which runs no signal handlers, may call it.
        """
        with self._lock:
            for one, entry in zip(batch, entries, strict=True):
                self._add(entry)  # before it leaves `pending`: it is always in one
                if self.pending.get(one.name) is one:
                    del self.pending[one.name]
                    self.num_pending_bytes -= entry.num_bytes
                self._num_rows = entry.number + 1

    def close(self) -> None:
        """Take no episode any more."""
        with self._lock:
            self.is_closed = True

    def give_up(self) -> None:
        """Forget the episodes that wait."""
        with self._lock:
            lost, self.pending, self.num_pending_bytes = self.pending, {}, 0
        for one in lost.values():
            self._count(one.entry, -1)
            self.num_episodes -= one.name not in self._failed

    def lose(self, entry: Entry) -> None:
        """Forget a row whose content is damaged."""
        name, number = entry.text, entry.number
        with self._lock:
            if name in self._finished and self._finished[name] == number:
                del self._finished[name]
            elif name in self._failed and self._failed[name] == number:
                del self._failed[name]
            else:
                return
            self.num_episodes -= name not in self.pending
        self._count(entry, -1)

    def counting(self) -> tuple[int, set[int]]:
        """Return the number of rows of the log, and those of them that count."""
        with self._lock:
            num_rows, failed, finished = self._num_rows, {**self._failed}, {**self._finished}
        return num_rows, {*failed.values(), *finished.values()}

    def closed_error(self) -> ValueError:
        """Return what is raised for a closed log."""
        return ValueError(f"log {self._file.path.parent} is closed")

    def _add(self, entry: Entry) -> None:
        name = entry.text
        if not entry.failed:
            self._finished[name] = entry.number  # before it leaves `_failed`: it is always in one
            self._failed.pop(name, None)
        elif name not in self._finished:
            self._failed[name] = entry.number

    def _count(self, entry: Entry, sign: int) -> None:
        self.num_trajectories += sign * entry.num_trajectories
        self.num_turns += sign * entry.num_turns
        self.num_tokens += sign * entry.num_tokens


def _known(name: str) -> ValueError:
    return ValueError(f"episode {name!r} is in the log already")
