"""Episodes as Parquet: export for other tools, and logs of a release that wrote segments."""

from __future__ import annotations

import json
import os
import re
import warnings
import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trajpack.packing.buffer.chains import TrajectoryLabels
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
_LISTS = {
    "trajectory_id": "binary",
    "group": "binary",
    "task_id": "int64",
    "birth_time_ms": "int64",
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
"""Columns of lists, per trajectory, chain, turn, version span or token: types of the elements."""
_NULLABLE = ("error", "trajectory_id", "group", "task_id", "birth_time_ms")
"""Columns with nulls: the error, and elements of lists of a trajectory's labels."""
_PREFIX = '{"crc32":"%08x",'
_ROW_GROUP = 256
"""Episodes of a row group of an exported file."""
_MAX_COLUMN_BYTES = 1 << 30
"""Maximum bytes of a column of an old segment."""


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


class _Listed(NamedTuple):
    """A line of the manifest: its description of a segment."""

    number: int
    num_bytes: int
    checksum: int
    max_values: int
    """Maximum values of a column."""
    episodes: tuple[str, ...]


class OldLog:
    """A log of the old form, Parquet segments and a manifest, read once to be converted.

    A segment describes itself: one without a readable line in the manifest is read like the others.

    Args:
        folder: Folder of the log.
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
            found = [_listed(said) for line in lines if (said := _checked(line)) is not None]
            self._listed = {one.number: one for one in found}
            if len(self._listed) < len(found) or min(self._listed, default=0) < 0:
                raise ValueError(f"its lines are of segments {[one.number for one in found]}")
        except (
            KeyError,
            TypeError,
            ValueError,
            AttributeError,
            RuntimeError,
            OverflowError,
        ) as error:
            raise DamagedLogError(f"{path} is damaged: {error}") from error
        names = (_SEGMENT.fullmatch(name) for name in os.listdir(folder))
        self._numbers = sorted(int(match[1]) for match in names if match)
        least = max(len(lines) - 1, *(n + 1 for n in (*self._numbers, *self._listed)), 0)
        if len(self._numbers) < least:
            there = set(self._numbers)
            missing = next(number for number in range(least) if number not in there)
            self._lose(DamagedLogError(f"{self._path(missing)} is missing"))

    def rows(self) -> Iterator[EpisodeRow]:
        """Yield all episodes in the order in which they were appended.

        Raises:
            DamagedLogError: If a segment is damaged.
        """
        for number in self._numbers:
            try:
                rows = self._segment(self._path(number), self._listed.get(number))
            except (DamagedLogError, OSError) as error:
                self._lose(error)
            else:
                yield from rows

    def _lose(self, error: Exception) -> None:
        if self._damaged == "raise":
            raise error
        warnings.warn(f"the episodes of a segment are skipped: {error}", stacklevel=4)

    def _path(self, number: int) -> Path:
        return self._folder / f"segment-{number:08d}.parquet"

    def _segment(self, path: Path, listed: _Listed | None) -> list[EpisodeRow]:
        pa, _ = _pyarrow()
        check_regular(path)
        content = path.read_bytes()
        if listed and (len(content), zlib.crc32(content)) != (listed.num_bytes, listed.checksum):
            raise DamagedLogError(f"{path} is damaged: its checksum is wrong")
        try:
            rows = _decoded(content, self.fields, listed)
            for row in rows:
                check_row(row, self.fields)
        except MemoryError:  # pyarrow's is an `ArrowException`, too, but no damage
            raise
        except (
            TypeError,
            ValueError,
            AttributeError,
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
    kinds = {"episode": pa.binary(), "error": pa.binary()}
    for name, kind in _LISTS.items():
        element = pa.field("element", getattr(pa, kind)(), nullable=name in _NULLABLE)
        kinds[name] = pa.large_list(element)
    kinds |= {f"field_{number}": pa.large_binary() for number in range(num_fields)}
    return pa.schema([pa.field(n, kind, nullable=n == "error") for n, kind in kinds.items()])


def _values(row: EpisodeRow) -> list[Any]:
    """Return an episode's value in each column."""
    chain, begin, size, truncated, *versions = _transposed(row.turns, len(TURN_COLUMNS))
    return [
        encoded_text(row.episode),
        None if row.error is None else encoded_text(row.error),
        [encoded_text(one.id) for one in row.labels],
        [None if one.group is None else encoded_text(one.group) for one in row.labels],
        [one.task_id for one in row.labels],
        [one.birth_time_ms for one in row.labels],
        [one.turn_discount for one in row.labels],
        row.num_turns,
        row.chain_sizes,
        row.token_ids,
        *(chain, begin, size),
        row.rewards,
        [bool(one) for one in truncated],
        *versions,
        *_transposed(row.spans, 3),
        row.logprobs,
        *(rows.tobytes() for rows in row.rows),
    ]


def _transposed(rows: Sequence[Sequence[int]], width: int) -> list[Sequence[int]]:
    return list(zip(*rows, strict=True)) or [()] * width


def _checked(line: bytes) -> Any:
    """Return the JSON of a manifest's line, or ``None`` where its checksum is wrong."""
    size = len(_PREFIX % 0)
    if line[:size] != (_PREFIX % zlib.crc32(line[size:])).encode():
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedLogError(f"a line is no JSON: {error}") from error


def _listed(said: Any) -> _Listed:
    episodes = tuple(said["episodes"])
    if not all(isinstance(name, str) for name in episodes):
        raise TypeError("a name is no text")
    counts = [int(said[f"num_{name}"]) for name in ("trajectories", "turns", "tokens")]
    return _Listed(
        number=int(said["segment"]),
        num_bytes=int(said["num_bytes"]),
        checksum=int(said["segment_crc32"], 16),
        max_values=sum(counts) + len(episodes),
        episodes=episodes,
    )


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
    most = _MAX_COLUMN_BYTES // 4 if listed is None else listed.max_values
    for group in range(file.metadata.num_row_groups):  # a small file may expand to much memory
        for number in range(file.metadata.num_columns):
            column = file.metadata.row_group(group).column(number)
            if column.num_values > most or column.total_uncompressed_size > _MAX_COLUMN_BYTES:
                raise ValueError(
                    f"column {column.path_in_schema!r} has {column.num_values} values, at most "
                    f"{most} are expected"
                )
    table = file.read(columns=expected.names, use_threads=False)
    for name, column in zip(table.column_names, table.columns, strict=True):
        if name not in _NULLABLE and column.null_count:
            raise ValueError(f"column {name!r} has nulls")
    return [_row(table, index, len(fields)) for index in range(len(table))]


def _row(table: pa.Table, index: int, num_fields: int) -> EpisodeRow:
    """Return the episode of a row of a segment; nulls among numbers fail its check."""
    large = ("token_ids", "rollout_logprobs")
    value = {n: table[n][index].as_py() for n in ("episode", "error", *_LISTS) if n not in large}
    # copies, which may be changed
    ids, logprobs = (table[n][index].values.to_numpy(zero_copy_only=False).copy() for n in large)
    names = [decoded_text(raw) for raw in value["trajectory_id"]]
    groups = [None if raw is None else decoded_text(raw) for raw in value["group"]]
    labels = zip(
        names,
        groups,
        value["task_id"],
        value["birth_time_ms"],
        value["turn_discount"],
        strict=True,
    )
    return EpisodeRow(
        decoded_text(value["episode"]),
        None if value["error"] is None else decoded_text(value["error"]),
        labels=[TrajectoryLabels(*one) for one in labels],
        num_turns=value["num_turns"],
        chain_sizes=value["chain_size"],
        turns=list(zip(*(value[f"turn_{name}"] for name in TURN_COLUMNS), strict=True)),
        rewards=value["turn_reward"],
        spans=list(
            zip(*(value[f"span_{name}"] for name in ("version", "start", "end")), strict=True)
        ),
        token_ids=ids,
        logprobs=logprobs,
        rows=[
            np.frombuffer(table[f"field_{number}"][index].as_buffer(), np.uint8)
            for number in range(num_fields)
        ],
    )
