"""Order between programs: what was done before an atomic, for those who read it afterwards.

A thread that releases at an address publishes what its program did before its last barrier, and
what it did itself. A thread that acquires there knows what was published at that address so far,
and what the publishers knew; the other threads of its program know it after their next barrier.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

View = dict[int, int]
"""How many releases at an address are known, from the first."""


class Release(NamedTuple):
    place: int
    """Number of earlier releases at the address."""
    thread: int
    now: int
    """Time of the release, or of the fence before it."""
    synced: int
    """Time of the last barrier of the program until then."""


class Publications:
    """Releases and acquisitions of a launch whose programs have ``size`` threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.logs: dict[int, dict[int, list[Release]]] = {}
        self.lengths: dict[int, int] = defaultdict(int)
        self.known_at: dict[int, View] = defaultdict(dict)
        self.acquired: dict[int, list[tuple[int, int, View]]] = defaultdict(list)

    def release(self, address: int, thread: int, now: int, synced: int) -> None:
        log = self.logs.setdefault(address, defaultdict(list))
        log[self._program(thread)].append(Release(self.lengths[address], thread, now, synced))
        self.lengths[address] += 1
        self.known_at[address] = _merged(self.known_at[address], self._view(thread, synced))

    def seen_at(self, address: int) -> View:
        """Return what a thread can know that reads ``address`` now."""
        return _merged(self.known_at[address], {address: self.lengths[address]})

    def acquire(self, view: View, thread: int, now: int) -> None:
        known = self.acquired[self._program(thread)]
        if not known or known[-1][0] != thread or known[-1][2] != view:
            known.append((thread, now, view))

    def orders(self, other: int, when: int, thread: int, synced: int) -> bool:
        """Return whether ``thread`` knows what ``other`` did at a time."""
        for address, count in self._view(thread, synced).items():
            for one in self.logs.get(address, {}).get(self._program(other), ()):
                is_published = when < one.synced or (one.thread == other and when <= one.now)
                if one.place < count and is_published:
                    return True
        return False

    def _view(self, thread: int, synced: int) -> View:
        view: View = {}
        for by, now, seen in self.acquired.get(self._program(thread), ()):
            if by == thread or now < synced:
                view = _merged(view, seen)
        return view

    def _program(self, thread: int) -> int:
        return (thread - 1) // self.size


def _merged(one: View, other: View) -> View:
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in {**one, **other}}
