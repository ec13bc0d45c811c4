"""Export of episodes as Parquet, for other tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from trajpack.packing.durable_files import replacing
from trajpack.packing.optional import require
from trajpack.packing.token_fields import TokenField
from trajpack.packing.trajectory_log.records import Record, encoded_text
from trajpack.packing.turn_fields import TURN_FIELDS

_LABELS = {
    "trajectory_id": "binary",
    "group": "binary",
    "task_id": "int64",
    "birth_time_ms": "int64",
    "turn_discount": "float64",
    "truncated": "bool",
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
_NULLABLE = ("trajectory_id", "group", "task_id", "birth_time_ms", "truncated")
"""Columns of lists whose elements may be null."""
_ROW_GROUP = 256
"""Episodes of a row group of an exported file."""


def write_parquet(path: Path, records: Iterator[Record], fields: Sequence[TokenField]) -> None:
    """Write episodes as one Parquet file; see `TrajectoryLog.export_parquet`."""
    require("pyarrow")
    import pyarrow as pa
    from pyarrow import parquet

    kinds = {"episode": pa.binary(), "error": pa.binary()}
    for name, kind in _LISTS.items():
        element = pa.field("element", pa.type_for_alias(kind), nullable=name in _NULLABLE)
        kinds[name] = pa.large_list(element)
    kinds |= {f"field_{number}": pa.large_binary() for number in range(len(fields))}
    columns = [pa.field(name, kind, nullable=name == "error") for name, kind in kinds.items()]
    described = json.dumps({"fields": [field.as_json() for field in fields]})
    schema = pa.schema(columns).with_metadata({"trajpack": described})
    with (
        replacing(path) as unfinished,
        parquet.ParquetWriter(unfinished, schema, compression="zstd") as writer,
    ):
        while some := [_values(record) for record in islice(records, _ROW_GROUP)]:
            typed = zip(zip(*some, strict=True), schema.types, strict=True)
            arrays = [pa.array(values, kind) for values, kind in typed]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


def _values(record: Record) -> list[Any]:
    """Return an episode's value in each column."""
    arrays = record.arrays
    ids, groups, *labels = arrays.labels
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
