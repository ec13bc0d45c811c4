"""The folder of a log: which segments there are, read from it and added to it."""

from __future__ import annotations

import os
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from trajpack.packing.log_contents import last_of_each
from trajpack.packing.log_files import LOCK, write_durably
from trajpack.packing.log_manifest import MANIFEST, Manifest, SegmentEntry
from trajpack.packing.log_options import Damaged, DamagedLogError, LogOptions
from trajpack.packing.log_rows import EpisodeRow
from trajpack.packing.log_segments import (
    decoded_segment,
    described,
    encoded_segment,
    load_parquet,
)
from trajpack.packing.token_fields import TokenField

SEGMENT = "segment-{:08d}.parquet"
SEGMENT_NAME = re.compile(r"segment-(\d{8,})\.parquet")


class LogFolder:
    """Segments and manifest of a log; see `TrajectoryLog.open` for what is raised."""

    def __init__(self, folder: Path, damaged: Damaged) -> None:
        if not (folder / MANIFEST).exists():
            raise FileNotFoundError(f"{folder} holds no trajectory log: it has no {MANIFEST}")
        self.path = folder
        self.damaged = damaged
        self.manifest = Manifest(folder)
        self.fields = self.manifest.fields
        self._lost: set[int] = set()
        self._check_lengths()

    @classmethod
    def make(cls, folder: Path, fields: Sequence[TokenField], damaged: Damaged) -> LogFolder:
        """Open the log of a folder that this process may write, or begin one."""
        if not (folder / MANIFEST).exists():
            known = {LOCK, f"{MANIFEST}.tmp"}
            foreign = sorted({entry.name for entry in os.scandir(folder)} - known)
            if foreign:
                raise ValueError(
                    f"{folder} is neither empty nor a trajectory log: it has no {MANIFEST}, "
                    f"but holds {foreign[0]!r}"
                )
            Manifest.begin(folder, fields)
        return cls(folder, damaged)

    @property
    def entries(self) -> list[SegmentEntry]:
        """What the manifest says of the segments that can be read, oldest first."""
        return [entry for entry in self.manifest.entries if entry.segment not in self._lost]

    def adopt(self) -> None:
        """Take in segments that were written whole, but not yet said to be there.

        A segment has its name only when all of it is on the disk, so what a crash leaves
        between that and the manifest's line is as good as any other.
        """
        while (path := self._place(number := self.manifest.num_segments)).exists():
            content = path.read_bytes()
            rows = self._adoptable(path, content)
            self.manifest.append(SegmentEntry.of(number, content, rows))
        beyond = [number for number in self._sizes() if number >= self.manifest.num_segments]
        if beyond:
            raise DamagedLogError(
                f"{self._place(self.manifest.num_segments)} is missing, but "
                f"{SEGMENT.format(min(beyond))} is there"
            )
        for left in self.path.glob("*.tmp"):
            if left.name == f"{MANIFEST}.tmp" or SEGMENT_NAME.fullmatch(left.stem):
                with suppress(OSError):
                    left.unlink()

    def add(self, rows: Sequence[EpisodeRow], options: LogOptions) -> SegmentEntry:
        """Write episodes as the next segment; they are there, for good, when this returns.

        Raises:
            OSError: If they cannot be written; then nothing of them is there.
        """
        number = self.manifest.num_segments
        content = encoded_segment(rows, self.fields, options.compression_level)
        entry = SegmentEntry.of(number, content, rows)
        write_durably(self._place(number), content)
        self.manifest.append(entry)
        return entry

    def episodes(self) -> Iterator[tuple[int, EpisodeRow]]:
        """Yield the last record of each episode, in order, with the number of its segment."""
        load_parquet()
        entries = self.entries
        for entry, wanted in zip(entries, last_of_each(entries), strict=True):
            if any(wanted):
                for row in self._read(entry, wanted):
                    yield entry.segment, row

    def check_fields(self, fields: Sequence[TokenField] | None) -> None:
        """Raise unless a log of these fields is what this one is; ``None`` takes any."""
        if fields is not None and described(fields) != described(self.fields):
            raise ValueError(
                f"log {self.path} was begun with fields {[field.name for field in self.fields]}, "
                f"got {[field.name for field in fields]}; names, dtypes, shapes, fills and order "
                "must be the same"
            )

    def _adoptable(self, path: Path, content: bytes) -> list[EpisodeRow]:
        """Return the episodes of a segment that no line names; none of one that is skipped."""
        try:
            return list(decoded_segment(str(path), content, self.fields))
        except DamagedLogError as error:
            if self.damaged == "raise":
                raise
            warnings.warn(f"all episodes skipped: {error}", stacklevel=2)
            return []

    def _read(self, entry: SegmentEntry, wanted: Sequence[bool]) -> Iterator[EpisodeRow]:
        """Yield the episodes of a segment that are ``wanted``; nothing where it is skipped."""
        try:
            path = self._place(entry.segment)
            content = path.read_bytes()
            if len(content) != entry.num_bytes or zlib.crc32(content) != entry.checksum:
                raise DamagedLogError(f"{path} is damaged: it is not what was written")
            yield from decoded_segment(str(path), content, self.fields, wanted)
        except (DamagedLogError, OSError) as error:
            self._lose(entry, error)

    def _check_lengths(self) -> None:
        sizes = self._sizes()
        for entry in self.manifest.entries:
            path, size = self._place(entry.segment), sizes.get(entry.segment)
            if size is None:
                self._lose(entry, DamagedLogError(f"{path} is missing"))
            elif size != entry.num_bytes:
                said = f"{path} is damaged: {size} bytes instead of {entry.num_bytes}"
                self._lose(entry, DamagedLogError(said))

    def _lose(self, entry: SegmentEntry, error: Exception) -> None:
        if self.damaged == "raise":
            raise error
        self._lost.add(entry.segment)
        warnings.warn(f"{len(entry.episodes)} episodes skipped: {error}", stacklevel=2)

    def _sizes(self) -> dict[int, int]:
        """Return the length of each segment's file, by number."""
        found = ((SEGMENT_NAME.fullmatch(entry.name), entry) for entry in os.scandir(self.path))
        return {int(match[1]): entry.stat().st_size for match, entry in found if match}

    def _place(self, number: int) -> Path:
        return self.path / SEGMENT.format(number)
