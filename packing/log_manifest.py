"""The manifest of a log: a line for each segment that is there, and what it holds."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajpack.packing.log_files import append_durably, write_durably
from trajpack.packing.log_options import DamagedLogError
from trajpack.packing.log_rows import EpisodeRow
from trajpack.packing.log_segments import declared_fields, described
from trajpack.packing.token_fields import TokenField

MANIFEST = "manifest.jsonl"
PREFIX = '{"crc32":"%08x",'
PREFIX_SIZE = len(PREFIX % 0)


@dataclass(frozen=True)
class SegmentEntry:
    """What the manifest says of a segment."""

    segment: int
    """Its number; segments count from 0."""
    num_bytes: int
    """Length of its file."""
    checksum: int
    """CRC-32 of its file."""
    num_trajectories: int
    """Trajectories in it."""
    num_turns: int
    """Turns in it."""
    num_tokens: int
    """Tokens in it, each stored once."""
    episodes: Sequence[str]
    """Names of its episodes, in the order in which they were appended."""
    failed: frozenset[int]
    """Which of them failed, by index."""

    @classmethod
    def of(cls, segment: int, content: Any, rows: Iterable[EpisodeRow]) -> SegmentEntry:
        """Describe episodes and the bytes that hold them."""
        listed = list(rows)
        return cls(
            segment=segment,
            num_bytes=len(content),
            checksum=zlib.crc32(content),
            num_trajectories=sum(len(row.labels) for row in listed),
            num_turns=sum(row.num_turns for row in listed),
            num_tokens=sum(row.num_tokens for row in listed),
            episodes=tuple(row.episode for row in listed),
            failed=frozenset(i for i, row in enumerate(listed) if row.error is not None),
        )


class Manifest:
    """The manifest of a folder, as far as it can be trusted.

    A line is JSON and begins with the CRC-32 of the rest of it. The last line may be torn, or
    lack its end: then it does not count. Any other bad line is damage.

    Raises:
        FileNotFoundError: If the folder has none.
        DamagedLogError: If a line but the last is not as it was written.
        ValueError: If a later release wrote it.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / MANIFEST
        content = self.path.read_bytes()
        lines = content.split(b"\n")
        header = _checked(lines[0]) if len(lines) > 1 else None
        if header is None:
            raise DamagedLogError(f"{self.path}: line 1 is damaged")
        self.fields = declared_fields(self.path, header)
        self._begin = len(lines[0]) + 1
        self._lines: list[tuple[SegmentEntry, int]] = []
        for index, line in enumerate(lines[1:-1]):
            said = _checked(line)
            if said is None and index == len(lines) - 3 and not lines[-1]:
                break
            self._lines.append((self._entry(index, said), self.num_bytes + len(line) + 1))

    @property
    def entries(self) -> list[SegmentEntry]:
        """Segments that are there, oldest first."""
        return [entry for entry, _ in self._lines]

    @property
    def num_bytes(self) -> int:
        """Bytes of the file that count."""
        return self._lines[-1][1] if self._lines else self._begin

    @property
    def num_segments(self) -> int:
        """Segments that are there."""
        return len(self._lines)

    @classmethod
    def begin(cls, folder: Path, fields: Sequence[TokenField]) -> Manifest:
        """Write the manifest of a new log."""
        write_durably(folder / MANIFEST, _line(described(fields)))
        return cls(folder)

    def append(self, entry: SegmentEntry) -> None:
        """Say that a segment is there; it is, for good, when this returns.

        Raises:
            OSError: If the line cannot be written: then the segment is not there.
        """
        line = _line(
            {
                "segment": entry.segment,
                "num_bytes": entry.num_bytes,
                "segment_crc32": f"{entry.checksum:08x}",
                "num_trajectories": entry.num_trajectories,
                "num_turns": entry.num_turns,
                "num_tokens": entry.num_tokens,
                "episodes": list(entry.episodes),
                "failed": sorted(entry.failed),
            }
        )
        append_durably(self.path, self.num_bytes, line)
        self._lines.append((entry, self.num_bytes + len(line)))  # both or, interrupted, neither

    def _entry(self, index: int, said: Any) -> SegmentEntry:
        try:
            entry = SegmentEntry(
                segment=int(said["segment"]),
                num_bytes=int(said["num_bytes"]),
                checksum=int(said["segment_crc32"], 16),
                num_trajectories=int(said["num_trajectories"]),
                num_turns=int(said["num_turns"]),
                num_tokens=int(said["num_tokens"]),
                episodes=tuple(said["episodes"]),
                failed=frozenset(said["failed"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedLogError(f"{self.path}: line {index + 2} is damaged") from error
        if entry.segment != index:
            raise DamagedLogError(
                f"{self.path}: line {index + 2} should be of segment {index}, "
                f"it is of segment {entry.segment}"
            )
        return entry


def _line(said: dict[str, Any]) -> bytes:
    rest = json.dumps(said, separators=(",", ":"))[1:]
    return f"{PREFIX % zlib.crc32(rest.encode())}{rest}\n".encode()


def _checked(line: bytes) -> Any:
    """Return what a line says, or ``None`` where it is not as it was written."""
    if line[:PREFIX_SIZE] != (PREFIX % zlib.crc32(line[PREFIX_SIZE:])).encode():
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
