"""What is in a log: names and counts, without its tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trajpack.packing.log_manifest import SegmentEntry
from trajpack.packing.log_rows import EpisodeRow


class LogContents:
    """Names of a log's episodes, and how much there is of what; known without reading segments."""

    def __init__(self, entries: Iterable[SegmentEntry]) -> None:
        self._finished: dict[str, None] = {}
        self._failed: dict[str, None] = {}
        self.num_trajectories = 0
        """Trajectories in the log."""
        self.num_turns = 0
        """Turns in the log."""
        self.num_tokens = 0
        """Tokens in the log, each counted once."""
        for entry in entries:
            for index, episode in enumerate(entry.episodes):
                self._name(episode, failed=index in entry.failed)
            self._count(entry.num_trajectories, entry.num_turns, entry.num_tokens)

    def __len__(self) -> int:
        return len(self._finished) + len(self._failed)

    def __contains__(self, episode: object) -> bool:
        return episode in self._finished or episode in self._failed

    @property
    def finished(self) -> frozenset[str]:
        """Names of the episodes that succeeded."""
        return frozenset(self._finished.copy())  # copied in one step: threads append meanwhile

    @property
    def failed(self) -> frozenset[str]:
        """Names of the episodes that failed."""
        return frozenset(self._failed.copy())

    def check_new(self, episode: str) -> None:
        """Raise if an episode cannot be appended, for it succeeded before."""
        if episode in self._finished:
            raise ValueError(f"episode {episode!r} is in the log already")

    def add(self, row: EpisodeRow) -> None:
        """Note an episode that was appended."""
        self.check_new(row.episode)
        self._name(row.episode, failed=row.error is not None)
        self._count(len(row.labels), row.num_turns, row.num_tokens)

    def _name(self, episode: str, *, failed: bool) -> None:
        if not failed:
            self._finished[episode] = None  # before it leaves the others: who looks, finds it
            self._failed.pop(episode, None)
        elif episode not in self._finished:
            self._failed[episode] = None

    def _count(self, num_trajectories: int, num_turns: int, num_tokens: int) -> None:
        self.num_trajectories += num_trajectories
        self.num_turns += num_turns
        self.num_tokens += num_tokens


def last_of_each(entries: Sequence[SegmentEntry]) -> list[list[bool]]:
    """Tell, segment by segment, which episodes are not appended again later in the log."""
    behind: set[str] = set()
    wanted: list[list[bool]] = []
    for entry in reversed(entries):
        of_segment = []
        for name in reversed(entry.episodes):
            of_segment.append(name not in behind)
            behind.add(name)
        wanted.append(of_segment[::-1])
    return wanted[::-1]
