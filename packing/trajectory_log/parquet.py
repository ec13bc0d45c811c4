"""Episodes as Parquet: a file for other tools, and the logs of a release that wrote segments."""

from __future__ import annotations

import json
import os
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trajpack.packing.buffer.chains import Labels
from trajpack.packing.durable_files import replacing
from trajpack.packing.optional import require
from trajpack.packing.token_fields import TokenField, check_fields
from trajpack.packing.trajectory_log.database import check_regular
from trajpack.packing.trajectory_log.options import Damaged, DamagedLogError
from trajpack.packing.trajectory_log.rows import (
    TURN_COLUMNS,
    EpisodeRow,
    check_row,
    decoded_text,
    encoded_text,
)

if TYPE_CHECKING:
    import pyarrow as pa

MANIFEST = "manifest.jsonl"
"""File of a log of the old form: a line for the log, a line for each segment."""
_SEGMENT = re.compile(r"segment-(\d{8,})\.parquet")
_TEXTS = ("trajectory_id", "group")
_INTEGERS = ("task_id", "birth_time_ms")
_NUMBERS = {
    "turn_discount": "float64",
    "num_turns": "int32",
    "chain_size": "int32",
    "token_ids": "int32",
    "turn_chain": "int32",
    "turn_begin": "int32",
    "turn_size": "int32",
    "turn_reward": "float64",
    "turn_truncated": "bool_",
    "turn_version_start": "int32",
    "turn_version_end": "int32",
    "turn_num_spans": "int32",
    "span_version": "int32",
    "span_start": "int32",
    "span_end": "int32",
    "rollout_logprobs": "float32",
}
"""Columns of lists of numbers, per trajectory, chain, turn or token, and their types."""
_PREFIX = '{"crc32":"%08x",'
_ROW_GROUP = 256
"""Episodes of a row group of an exported file."""
_MAX_COLUMN_BYTES = 1 << 30
"""Bytes of a column of an old segment; an episode had no more."""


def write_parquet(
    path: Path,
    rows: Iterator[EpisodeRow],
    fields: Sequence[TokenField],
    *,
    compression_level: int,
) -> None:
    """Write episodes as one Parquet file; see `TrajectoryLog.export_parquet`."""
    if not 1 <= compression_level <= 22:
        raise ValueError(f"compression_level must be in [1, 22], got {compression_level}")
    pa, parquet = _pyarrow()
    said = json.dumps({"fields": [field.as_json() for field in fields]})
    schema = _schema(len(fields)).with_metadata({"trajpack": said})
    options = {"compression": "zstd", "compression_level": compression_level}
    with (
        replacing(path) as unfinished,
        parquet.ParquetWriter(unfinished, schema, **options) as writer,
    ):
        while some := [_values(row) for row in islice(rows, _ROW_GROUP)]:
            columns = zip(zip(*some, strict=True), schema.types, strict=True)
            arrays = [pa.array(values, kind) for values, kind in columns]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


@dataclass(frozen=True)
class _Listed:
    """A line of the manifest."""

    num_bytes: int
    checksum: int
    max_values: int
    """Values of a column, at most."""
    episodes: tuple[str, ...]


class OldLog:
    """A log of the old form, Parquet segments and a manifest, read once to be converted.

    A segment says what it holds: one that no line of the manifest names, since the line was torn
    or damaged, is read like the others.

    Args:
        folder: Of the log.
        damaged: ``"skip"`` warns of a segment that cannot be read, and goes on.

    Raises:
        DamagedLogError: If the manifest is not readable, or a segment is missing.
        ImportError: If pyarrow is missing.
    """

    def __init__(self, folder: Path, damaged: Damaged) -> None:
        _pyarrow()
        self._folder = folder
        self._damaged = damaged
        path = folder / MANIFEST
        check_regular(path)
        first, *lines = path.read_bytes().split(b"\n")
        header: Any = _checked(first) if lines else None
        try:
            if header["format"] != "trajpack.TrajectoryLog" or header["schema_version"] != 1:
                raise ValueError("it is no log of version 1")
            self.fields = check_fields(map(TokenField.from_json, header["fields"]))
            """Extra per-token fields of every turn."""
            said = [_listed(told) for line in lines if (told := _checked(line)) is not None]
            self._listed = dict(said)
            if len(self._listed) < len(said) or min(self._listed, default=0) < 0:
                raise ValueError(f"its lines are of segments {[number for number, _ in said]}")
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            RuntimeError,
            OverflowError,
        ) as error:
            raise DamagedLogError(f"{path} is damaged: {error}") from error
        found = (_SEGMENT.fullmatch(name) for name in os.listdir(folder))
        self._numbers = sorted(int(match[1]) for match in found if match)
        least = max(len(lines) - 1, *(n + 1 for n in (*self._numbers, *self._listed)), 0)
        if len(self._numbers) < least:
            there = set(self._numbers)
            missing = next(number for number in range(least) if number not in there)
            self._lose(DamagedLogError(f"{self._place(missing)} is missing"))

    def rows(self) -> Iterator[EpisodeRow]:
        """Yield all episodes in the order in which they were appended.

        Raises:
            DamagedLogError: If a segment is not as it was written.
        """
        for number in self._numbers:
            path = self._place(number)
            try:
                check_regular(path)
                rows = self._segment(path, path.read_bytes(), self._listed.get(number))
            except (DamagedLogError, OSError) as error:
                self._lose(error)
            else:
                yield from rows

    def _lose(self, error: Exception) -> None:
        if self._damaged == "raise":
            raise error
        warnings.warn(f"the episodes of a segment are skipped: {error}", stacklevel=4)

    def _place(self, number: int) -> Path:
        return self._folder / f"segment-{number:08d}.parquet"

    def _segment(self, path: Path, content: bytes, listed: _Listed | None) -> list[EpisodeRow]:
        pa, _ = _pyarrow()
        if listed and (len(content), zlib.crc32(content)) != (listed.num_bytes, listed.checksum):
            raise DamagedLogError(f"{path} is damaged: it is not what was written")
        try:
            rows = _decoded(content, self.fields, listed)
            for row in rows:
                check_row(row, self.fields)
        except MemoryError:  # pyarrow's is an error of its own, too, but no damage
            raise
        except (
            TypeError,
            ValueError,
            LookupError,
            OverflowError,
            OSError,
            pa.ArrowException,
        ) as error:
            raise DamagedLogError(f"{path} is not a readable segment: {error}") from error
        if listed and listed.episodes != tuple(row.episode for row in rows):
            raise DamagedLogError(f"{path} has other episodes than the manifest says")
        return rows


def _pyarrow() -> tuple[Any, Any]:
    require("pyarrow")
    import pyarrow
    from pyarrow import parquet

    return pyarrow, parquet


def _schema(num_fields: int) -> pa.Schema:
    """Return names and types of the columns, the same as in segments of the old form."""
    pa, _ = _pyarrow()

    def lists(kind: Any, *, nullable: bool) -> Any:
        return pa.large_list(pa.field("element", kind, nullable=nullable))

    kinds = {"episode": pa.binary(), "error": pa.binary()}
    kinds |= {name: lists(pa.binary(), nullable=True) for name in _TEXTS}
    kinds |= {name: lists(pa.int64(), nullable=True) for name in _INTEGERS}
    kinds |= {name: lists(getattr(pa, kind)(), nullable=False) for name, kind in _NUMBERS.items()}
    kinds |= {f"field_{number}": pa.large_binary() for number in range(num_fields)}
    return pa.schema([pa.field(n, kind, nullable=n == "error") for n, kind in kinds.items()])


def _values(row: EpisodeRow) -> list[Any]:
    """Return an episode's value in each column."""
    turns = list(zip(*row.turns, strict=True)) or [()] * len(TURN_COLUMNS)
    spans = list(zip(*row.spans, strict=True)) or [()] * 3
    chain, begin, size, truncated, first, last, num_spans = turns
    return [
        encoded_text(row.episode),
        None if row.error is None else encoded_text(row.error),
        [encoded_text(labels.id) for labels in row.labels],
        [None if one.group is None else encoded_text(one.group) for one in row.labels],
        [labels.task_id for labels in row.labels],
        [labels.birth_time_ms for labels in row.labels],
        [labels.turn_discount for labels in row.labels],
        row.num_turns, row.chain_sizes, row.token_ids, chain, begin, size, row.rewards,
        [bool(one) for one in truncated], first, last, num_spans, *spans, row.logprobs,
        *(rows.tobytes() for rows in row.rows),
    ]  # fmt: skip


def _checked(line: bytes) -> Any:
    """Return what a line of a manifest says, or ``None`` where it is not as it was written."""
    size = len(_PREFIX % 0)
    if line[:size] != (_PREFIX % zlib.crc32(line[size:])).encode():
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedLogError(f"a line is no JSON: {error}") from error


def _listed(said: Any) -> tuple[int, _Listed]:
    """Return number and description of the segment that a line names."""
    episodes = tuple(said["episodes"])
    if not all(isinstance(name, str) for name in episodes):
        raise TypeError("a name is no text")
    counts = [int(said[f"num_{name}"]) for name in ("trajectories", "turns", "tokens")]
    checksum = int(said["segment_crc32"], 16)
    listed = _Listed(int(said["num_bytes"]), checksum, sum(counts) + len(episodes), episodes)
    return int(said["segment"]), listed


def _decoded(
    content: bytes, fields: Sequence[TokenField], listed: _Listed | None
) -> list[EpisodeRow]:
    """Return the episodes of a segment."""
    pa, parquet = _pyarrow()
    file = parquet.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
    header = json.loads((file.schema_arrow.metadata or {}).get(b"trajpack", b"null"))
    expected = _schema(len(fields))
    schema = pa.schema([file.schema_arrow.field(name) for name in expected.names])
    if header["fields"] != [field.as_json() for field in fields] or schema != expected:
        raise ValueError("its columns are not those of its log")
    _check_size(file.metadata, listed)
    table = file.read(columns=expected.names, use_threads=False)
    columns = {name: table.column(name).combine_chunks() for name in expected.names}
    for name in ("episode", *_NUMBERS, *(f"field_{number}" for number in range(len(fields)))):
        flat = columns[name].flatten() if name in _NUMBERS else columns[name]
        if columns[name].null_count or flat.null_count:
            raise ValueError(f"column {name!r} has nulls")
    lists = {name: _lists(columns[name]) for name in _NUMBERS}
    return [
        _row(
            {name: column[index] for name, column in columns.items()},
            {name: column[index] for name, column in lists.items()},
            len(fields),
        )
        for index in range(len(table))
    ]


def _row(
    values: dict[str, Any], numbers: dict[str, npt.NDArray[Any]], num_fields: int
) -> EpisodeRow:
    """Return the episode of a row of a segment."""
    listed = {name: column.tolist() for name, column in numbers.items()}
    ids, groups = ([_text(text) for text in values[name].as_py()] for name in _TEXTS)
    if None in ids:
        raise ValueError("a trajectory has no id")
    integers = [values[name].as_py() for name in _INTEGERS]
    labels = zip(ids, groups, *integers, listed["turn_discount"], strict=True)
    return EpisodeRow(
        _text(values["episode"].as_py()) or "",
        _text(values["error"].as_py()),
        labels=[Labels(*one) for one in labels],
        num_turns=listed["num_turns"],
        chain_sizes=listed["chain_size"],
        turns=list(zip(*(listed[f"turn_{name}"] for name in TURN_COLUMNS), strict=True)),
        rewards=listed["turn_reward"],
        spans=list(
            zip(*(listed[f"span_{name}"] for name in ("version", "start", "end")), strict=True)
        ),
        token_ids=numbers["token_ids"],
        logprobs=numbers["rollout_logprobs"],
        rows=[np.frombuffer(values[f"field_{k}"].as_buffer(), np.uint8) for k in range(num_fields)],
    )


def _check_size(metadata: Any, listed: _Listed | None) -> None:
    """Raise for a small file that would take much memory."""
    most = _MAX_COLUMN_BYTES // 4 if listed is None else listed.max_values
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            if column.num_values > most or column.total_uncompressed_size > _MAX_COLUMN_BYTES:
                raise ValueError(
                    f"column {column.path_in_schema!r} has {column.num_values} values, at most "
                    f"{most} are expected"
                )


def _text(raw: bytes | None) -> str | None:
    return None if raw is None else decoded_text(raw)


def _lists(column: pa.Array) -> list[npt.NDArray[Any]]:
    """Return the lists of a column, each in memory of its own."""
    values = column.values.to_numpy(zero_copy_only=False)
    bounds = column.offsets.to_pylist()
    return [values[begin:end].copy() for begin, end in pairwise(bounds)]
