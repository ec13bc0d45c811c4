"""A segment of a log: episodes as one Parquet file, a row each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from trajpack.packing.chains import Labels
from trajpack.packing.log_options import DamagedLogError
from trajpack.packing.log_rows import NUMBERS, EpisodeRow
from trajpack.packing.optional import require
from trajpack.packing.token_fields import TokenField

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = "trajpack.TrajectoryLog"
SCHEMA_VERSION = 1
TEXTS = ("trajectory_id", "group")
INTEGERS = ("task_id", "birth_time_ms")
HEADER_KEY = b"trajpack"
READ_ERRORS = (KeyError, IndexError, OSError, UnicodeError, json.JSONDecodeError)
"""What reading raises of content that is not right, beside pyarrow's own."""


def load_parquet() -> None:
    """Import what is needed, so that who lacks it learns so at once, and no one waits later."""
    require("pyarrow")
    import pyarrow.parquet

    pyarrow.array([0]).to_numpy()  # it looks for pandas once: half a second where there is one


def described(fields: Sequence[TokenField]) -> dict[str, Any]:
    """Return what a log says of itself, in its manifest and in each segment."""
    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "fields": [field.as_json() for field in fields],
    }


def declared_fields(place: object, header: Any) -> tuple[TokenField, ...]:
    """Return the extra fields of a log, from what it says of itself.

    Raises:
        DamagedLogError: If that is not readable.
        ValueError: If it is no log, or one that a later release wrote.
    """
    try:
        kind, version = header["format"], header["schema_version"]
        if kind != FORMAT:
            raise ValueError(f"{place} is no trajectory log: its format is {kind!r}")
        if type(version) is not int or not 1 <= version <= SCHEMA_VERSION:
            raise ValueError(
                f"{place} has schema version {version!r}, this release reads versions 1 to "
                f"{SCHEMA_VERSION}"
            )
        return tuple(TokenField.from_json(field) for field in header["fields"])
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedLogError(f"{place} does not say what it holds: {error!r}") from error


def encoded_segment(
    rows: Sequence[EpisodeRow], fields: Sequence[TokenField], compression_level: int
) -> pa.Buffer:
    """Return episodes as the bytes of a Parquet file, compressed with zstd.

    Cost: about twice the memory of the episodes; releases the interpreter's lock for most of it.
    """
    import pyarrow as pa
    from pyarrow import parquet

    columns = _columns(rows, len(fields))
    schema = pa.schema(
        [pa.field(n, c.type, nullable=n == "error") for n, c in columns.items()],
        metadata={HEADER_KEY: json.dumps(described(fields))},
    )
    sink = pa.BufferOutputStream()
    parquet.write_table(
        pa.Table.from_arrays(list(columns.values()), schema=schema),
        sink,
        row_group_size=len(rows),
        compression="zstd",
        compression_level=compression_level,
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
        # bytes of equal weight beside each other: smaller than plain, faster than a dictionary
        column_encoding={
            f"{name}.list.element": "BYTE_STREAM_SPLIT"
            for name, dtype in NUMBERS.items()
            if dtype.kind in "if"
        },
    )
    return sink.getvalue()


def decoded_segment(
    name: str, content: Any, fields: tuple[TokenField, ...], wanted: Sequence[bool] | None = None
) -> Iterator[EpisodeRow]:
    """Yield the episodes of a segment, those ``wanted``, from the bytes of its file.

    Columns that this release does not know are left alone.

    Raises:
        DamagedLogError: If it is not as `encoded_segment` makes it.
        ValueError: If a later release wrote it.
    """
    import pyarrow as pa
    from pyarrow import parquet

    extra = [f"field_{number}" for number in range(len(fields))]
    names = ["episode", "error", *TEXTS, *INTEGERS, *NUMBERS, *extra]
    try:
        source = pa.BufferReader(content)
        file = parquet.ParquetFile(source, page_checksum_verification=True)
        header = json.loads((file.schema_arrow.metadata or {}).get(HEADER_KEY, b"null"))
        if described(declared_fields(name, header))["fields"] != described(fields)["fields"]:
            raise DamagedLogError(f"{name} has other fields than its log")
        table = file.read(columns=names)
        columns = {column: _whole(table.column(column)) for column in names}
        yield from _rows(columns, extra, wanted)
    except MemoryError:  # pyarrow's is an error of its own, too, but no damage
        raise
    except (*READ_ERRORS, pa.ArrowException) as error:
        raise DamagedLogError(f"{name} is not a readable segment: {error}") from error


def _columns(rows: Sequence[EpisodeRow], num_fields: int) -> dict[str, pa.Array]:
    import pyarrow as pa

    columns: dict[str, pa.Array] = {
        "episode": pa.array([_encoded(row.episode) for row in rows], pa.binary()),
        "error": pa.array([_encoded(row.error) for row in rows], pa.binary()),
    }
    for name in TEXTS:
        key = "id" if name == "trajectory_id" else name
        columns[name] = _label_list(rows, pa.binary(), key, _encoded)
    for name in INTEGERS:
        columns[name] = _label_list(rows, pa.int64(), name, int)
    for name in NUMBERS:
        arrays = [row.numbers[name] for row in rows]
        columns[name] = _lists(pa.array(np.concatenate(arrays)), [len(array) for array in arrays])
    for number in range(num_fields):
        blobs = [row.rows[number].tobytes() for row in rows]
        columns[f"field_{number}"] = pa.array(blobs, pa.large_binary())
    return columns


def _rows(
    columns: dict[str, pa.Array], extra: Sequence[str], wanted: Sequence[bool] | None
) -> Iterator[EpisodeRow]:
    episodes = [_decoded(name) for name in columns["episode"].to_pylist()]
    errors = [_decoded(text) for text in columns["error"].to_pylist()]
    numbers = {name: _offsets_and_values(columns[name]) for name in NUMBERS}
    labels = {name: columns[name] for name in (*TEXTS, *INTEGERS)}
    for index, (episode, error) in enumerate(zip(episodes, errors, strict=True)):
        if wanted is not None and not wanted[index]:
            continue
        own = {
            # copied, so that an episode that is kept does not keep its whole segment
            name: values[offsets[index] : offsets[index + 1]].astype(NUMBERS[name], copy=True)
            for name, (offsets, values) in numbers.items()
        }
        of_row = {name: column[index].as_py() for name, column in labels.items()}
        yield EpisodeRow(
            episode=episode or "",
            error=error,
            labels=_labels(of_row, own["turn_discount"].tolist()),
            numbers=own,
            rows=[_own_bytes(columns[name][index]) for name in extra],
        )


def _labels(of_row: dict[str, list[Any]], discounts: list[float]) -> list[Labels]:
    ids, groups = ([_decoded(text) for text in of_row[name]] for name in TEXTS)
    listed = zip(ids, groups, *(of_row[name] for name in INTEGERS), discounts, strict=True)
    return [Labels(name or "", *others) for name, *others in listed]


def _encoded(text: str | None) -> bytes | None:
    # a name may hold what UTF-8 cannot: half of a pair, from a model's broken output
    return None if text is None else text.encode("utf-8", "surrogatepass")


def _decoded(text: bytes | None) -> str | None:
    return None if text is None else text.decode("utf-8", "surrogatepass")


def _own_bytes(blob: pa.Scalar) -> npt.NDArray[np.uint8]:
    return np.frombuffer(blob.as_buffer(), np.uint8).copy()


def _label_list(rows: Sequence[EpisodeRow], kind: Any, key: str, convert: Any) -> pa.Array:
    import pyarrow as pa

    values = [getattr(labels, key) for row in rows for labels in row.labels]
    converted = [None if value is None else convert(value) for value in values]
    return _lists(pa.array(converted, kind), [len(row.labels) for row in rows], nullable=True)


def _lists(values: pa.Array, lengths: Sequence[int], *, nullable: bool = False) -> pa.Array:
    import pyarrow as pa

    offsets = pa.array(np.cumsum([0, *lengths], dtype=np.int64))
    kind = pa.large_list(pa.field("element", values.type, nullable=nullable))
    return pa.LargeListArray.from_arrays(offsets, values, type=kind)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _offsets_and_values(lists: pa.Array) -> tuple[list[int], npt.NDArray[Any]]:
    return lists.offsets.to_pylist(), lists.values.to_numpy(zero_copy_only=False)
