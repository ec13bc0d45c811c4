"""Episodes as Parquet: export for other tools, and logs of a release that wrote segments."""

from __future__ import annotations

import json
import os
import re
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trajpack.packing.buffer.chains import TrajectoryLabels
from trajpack.packing.buffer.trajectory_arrays import (
    FIRST_FLOATS,
    FIRST_INTEGERS,
    TrajectoryArrays,
    turn_tables,
)
from trajpack.packing.durable_files import replacing
from trajpack.packing.optional import require
from trajpack.packing.token_fields import TokenField, check_fields
from trajpack.packing.trajectory_log.database import check_regular
from trajpack.packing.trajectory_log.options import Damaged, DamagedLogError
from trajpack.packing.trajectory_log.records import Record, checked, decoded_text, encoded_text
from trajpack.packing.turn_fields import TURN_FIELDS

if TYPE_CHECKING:
    import pyarrow as pa

MANIFEST = "manifest.jsonl"
"""File of a log of the old form: a line for the log, a line for each segment."""
_SEGMENT = re.compile(r"segment-(\d{8,})\.parquet")
_LABELS = {
    "trajectory_id": "binary",
    "group": "binary",
    "task_id": "int64",
    "birth_time_ms": "int64",
    "turn_discount": "float64",
}
_TURNS = {
    "chain": "int32",
    "begin": "int32",
    "size": "int32",
    **{one.attribute: one.numpy_dtype.name for one in TURN_FIELDS},
    "num_spans": "int32",
}
_SPANS = ("span_version", "span_start", "span_end")
_LISTS = {
    **_LABELS,
    "num_turns": "int32",
    "chain_size": "int32",
    "token_ids": "int32",
    **{f"turn_{name}": kind for name, kind in _TURNS.items()},
    **dict.fromkeys(_SPANS, "int32"),
    "rollout_logprobs": "float32",
}
"""Columns of lists, per trajectory, chain, turn, version span or token: types of the elements."""
_LATER = {f"turn_{name}" for name in _TURNS} - {
    f"turn_{name}" for name in FIRST_INTEGERS + FIRST_FLOATS
}
"""Columns that no log of the old form has."""
_NULLABLE = ("error", "trajectory_id", "group", "task_id", "birth_time_ms")
"""Columns with nulls: the error, and elements of lists of a trajectory's labels."""
_UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError)
"""Errors of values that make no sense."""
_PREFIX = '{"crc32":"%08x",'
_ROW_GROUP = 256
"""Episodes of a row group of an exported file."""
_MAX_COLUMN_BYTES = 1 << 30
"""Maximum bytes of a column of an old segment."""


def write_parquet(
    path: Path,
    records: Iterator[Record],
    fields: Sequence[TokenField],
    *,
    compression_level: int,
) -> None:
    """Write episodes as one Parquet file; see `TrajectoryLog.export_parquet`."""
    if not 1 <= compression_level <= 22:
        raise ValueError(f"compression_level must be in [1, 22], got {compression_level}")
    pa, parquet = _pyarrow()
    described = json.dumps({"fields": [field.as_json() for field in fields]})
    schema = _schema(len(fields), _LISTS).with_metadata({"trajpack": described})
    options = {"compression": "zstd", "compression_level": compression_level}
    with (
        replacing(path) as unfinished,
        parquet.ParquetWriter(unfinished, schema, **options) as writer,
    ):
        while some := [_values(record) for record in islice(records, _ROW_GROUP)]:
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

    @classmethod
    def of(cls, said: Any) -> _Listed:
        episodes = tuple(said["episodes"])
        if not all(isinstance(name, str) for name in episodes):
            raise TypeError("a name is no text")
        counts = [int(said[f"num_{name}"]) for name in ("trajectories", "turns", "tokens")]
        return cls(
            number=int(said["segment"]),
            num_bytes=int(said["num_bytes"]),
            checksum=int(said["segment_crc32"], 16),
            max_values=sum(counts) + len(episodes),
            episodes=episodes,
        )


class OldLog:
    """A log of the old form, Parquet segments and a manifest, read once to be converted.

    A segment describes itself: one without a readable line in the manifest is read like the others.
    With ``damaged="skip"`` a segment that cannot be read is a warning, else a `DamagedLogError`.
    """

    def __init__(self, folder: Path, damaged: Damaged) -> None:
        _pyarrow()
        self._folder = folder
        self._damaged = damaged
        path = folder / MANIFEST
        check_regular(path)
        first, *lines = path.read_bytes().split(b"\n")
        header: Any = _checked_line(first) if lines else None
        try:
            if header["format"] != "trajpack.TrajectoryLog" or header["schema_version"] != 1:
                raise ValueError("it is no log of version 1")
            self.fields = check_fields(map(TokenField.from_json, header["fields"]))
            """Extra per-token fields of every turn."""
            said = (_checked_line(line) for line in lines)
            found = [_Listed.of(one) for one in said if one is not None]
            self._listed = {one.number: one for one in found}
            if len(self._listed) < len(found) or min(self._listed, default=0) < 0:
                raise ValueError(f"its lines are of segments {[one.number for one in found]}")
        except _UNREADABLE as error:
            raise DamagedLogError(f"{path} is damaged: {error}") from error
        names = (_SEGMENT.fullmatch(name) for name in os.listdir(folder))
        self._numbers = sorted(int(match[1]) for match in names if match)
        least = max(len(lines) - 1, *(n + 1 for n in (*self._numbers, *self._listed)), 0)
        if len(self._numbers) < least:
            there = set(self._numbers)
            missing = next(number for number in range(least) if number not in there)
            self._lose(DamagedLogError(f"{self._path(missing)} is missing"))

    def records(self) -> Iterator[Record]:
        """Yield all episodes in the order in which they were appended."""
        for number in self._numbers:
            try:
                records = self._segment(self._path(number), self._listed.get(number))
            except (DamagedLogError, OSError) as error:
                self._lose(error)
            else:
                yield from records

    def _lose(self, error: Exception) -> None:
        if self._damaged == "raise":
            raise error
        warnings.warn(f"the episodes of a segment are skipped: {error}", stacklevel=4)

    def _path(self, number: int) -> Path:
        return self._folder / f"segment-{number:08d}.parquet"

    def _segment(self, path: Path, listed: _Listed | None) -> list[Record]:
        pa, _ = _pyarrow()
        check_regular(path)
        content = path.read_bytes()
        if listed and (len(content), zlib.crc32(content)) != (listed.num_bytes, listed.checksum):
            raise DamagedLogError(f"{path} is damaged: its checksum is wrong")
        try:
            table = _table(content, self.fields, listed)
            records = [checked(_record(table, index, self.fields)) for index in range(len(table))]
        except MemoryError:  # pyarrow's is an `ArrowException`, too, but no damage
            raise
        except (*_UNREADABLE, OSError, pa.ArrowException) as error:
            raise DamagedLogError(f"{path} is not a readable segment: {error}") from error
        if listed and listed.episodes != tuple(record.episode for record in records):
            raise DamagedLogError(f"{path} has other episodes than the manifest says")
        return records


def _pyarrow() -> tuple[Any, Any]:
    require("pyarrow")
    import pyarrow
    from pyarrow import parquet

    return pyarrow, parquet


def _checked_line(line: bytes) -> Any:
    """Return the JSON of a manifest's line, or ``None`` where its checksum is wrong."""
    size = len(_PREFIX % 0)
    if line[:size] != (_PREFIX % zlib.crc32(line[size:])).encode():
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DamagedLogError(f"a line is no JSON: {error}") from error


def _schema(num_fields: int, lists: Iterable[str]) -> pa.Schema:
    """Return names and types of the columns."""
    pa, _ = _pyarrow()
    kinds = {"episode": pa.binary(), "error": pa.binary()}
    for name in lists:
        element = pa.type_for_alias(_LISTS[name])
        kinds[name] = pa.large_list(pa.field("element", element, nullable=name in _NULLABLE))
    kinds |= {f"field_{number}": pa.large_binary() for number in range(num_fields)}
    return pa.schema([pa.field(n, kind, nullable=n == "error") for n, kind in kinds.items()])


def _values(record: Record) -> list[Any]:
    """Return an episode's value in each column."""
    arrays = record.arrays
    ids, groups, *labels = list(zip(*arrays.labels, strict=True)) or [()] * len(_LABELS)
    return [
        encoded_text(record.episode),
        None if record.error is None else encoded_text(record.error),
        [encoded_text(text) for text in ids],
        [None if text is None else encoded_text(text) for text in groups],
        *labels,
        arrays.num_turns,
        arrays.chain_sizes,
        arrays.tokens,
        *(arrays.column(name).astype(kind) for name, kind in _TURNS.items()),
        *arrays.spans.T,
        arrays.logprobs,
        *(rows.tobytes() for rows in arrays.rows),
    ]


def _table(content: bytes, fields: Sequence[TokenField], listed: _Listed | None) -> pa.Table:
    """Return the table of a segment, after its size was checked."""
    pa, parquet = _pyarrow()
    file = parquet.ParquetFile(pa.BufferReader(content), page_checksum_verification=True)
    header = json.loads((file.schema_arrow.metadata or {}).get(b"trajpack", b"null"))
    expected = _schema(len(fields), [name for name in _LISTS if name not in _LATER])
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
    for name, values in zip(table.column_names, table.columns, strict=True):
        if name not in _NULLABLE and values.null_count:
            raise ValueError(f"column {name!r} has nulls")
    return table


def _record(table: pa.Table, index: int, fields: tuple[TokenField, ...]) -> Record:
    """Return the episode of a row of a segment; nulls among numbers are a `TypeError`."""
    large = ("token_ids", "rollout_logprobs")
    names = [name for name in table.column_names if name not in large and name[:6] != "field_"]
    value = {name: table[name][index].as_py() for name in names}
    # copies, which may be changed
    ids, logprobs = (table[n][index].values.to_numpy(zero_copy_only=False).copy() for n in large)
    value["trajectory_id"] = map(decoded_text, value["trajectory_id"])
    value["group"] = [None if raw is None else decoded_text(raw) for raw in value["group"]]
    labels = zip(*(value[name] for name in _LABELS), strict=True)
    turns, numbers = turn_tables(
        {name: value[f"turn_{name}"] for name in _TURNS if f"turn_{name}" in value}
    )
    arrays = TrajectoryArrays(
        labels=tuple(TrajectoryLabels(*one) for one in labels),
        num_turns=np.array(value["num_turns"], np.int64),
        chain_sizes=np.array(value["chain_size"], np.int32),
        tokens=ids,
        turns=turns,
        numbers=numbers,
        spans=np.array([value[name] for name in _SPANS], np.int32).T,
        logprobs=logprobs,
        token_fields=fields,
        rows=tuple(
            np.frombuffer(table[f"field_{number}"][index].as_buffer(), np.uint8)
            for number in range(len(fields))
        ),
    )
    error = value["error"]
    return Record(
        decoded_text(value["episode"]), None if error is None else decoded_text(error), arrays
    )
