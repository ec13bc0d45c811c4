"""Records: one episode as bytes, columns of numbers with a checksum."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trajpack.packing.buffer.stored import Labels
from trajpack.packing.buffer.trajectory_arrays import FLOATS, INTEGERS, TrajectoryArrays
from trajpack.packing.token_fields import TokenField

COLUMNS: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind)
    for name, kind in {
        "texts": "u1",
        "text_sizes": "<i4",
        "trajectories": "<i8",
        "turn_discounts": "<f8",
        "chain_sizes": "<i4",
        "token_ids": "<i4",
        "turns": "<i4",
        "turn_rewards": "<f8",
        "version_spans": "<i4",
        "rollout_logprobs": "<f4",
    }.items()
}
"""Columns of a record, in order; those of extra fields follow, as bytes."""
MAX_EPISODE_BYTES = 900_000_000
"""Maximum bytes of a record; a value of SQLite has at most 1,000,000,000."""
RECORD_MARK = b"tpe1"
"""First bytes of a record."""


class DamagedLogError(ValueError):
    """Bytes of a log's file changed or are missing."""


class Record(NamedTuple):
    """An episode in the form of the log."""

    episode: str
    """Name of the episode."""
    error: str | None
    """Reason of its failure, or ``None``."""
    arrays: TrajectoryArrays
    """Its trajectories."""


def encoded(record: Record) -> bytes:
    """Return the bytes of a record; a `ValueError` if they exceed `MAX_EPISODE_BYTES`."""
    arrays = record.arrays
    labels = arrays.labels
    texts = [record.episode, record.error]
    for both in zip(labels.ids, labels.groups, strict=True):
        texts += both
    raw = [None if text is None else encoded_text(text) for text in texts]
    columns = {
        "texts": np.frombuffer(b"".join(text for text in raw if text is not None), np.uint8),
        "text_sizes": [-1 if text is None else len(text) for text in raw],
        "trajectories": [
            (
                count,
                *_optional(task_id),
                *_optional(birth_time_ms),
                -1 if truncated is None else truncated,
            )
            for count, task_id, birth_time_ms, truncated in zip(
                arrays.num_turns.tolist(),
                labels.task_ids,
                labels.birth_times_ms,
                labels.truncated_as_given,
                strict=True,
            )
        ],
        "turn_discounts": labels.turn_discounts,
        "chain_sizes": arrays.chain_sizes,
        "token_ids": arrays.tokens,
        "turns": arrays.turns,
        "turn_rewards": arrays.numbers,
        "version_spans": arrays.spans,
        "rollout_logprobs": arrays.logprobs,
    }
    values = [np.ascontiguousarray(columns[name], dtype) for name, dtype in COLUMNS.items()]
    values += arrays.rows
    sizes = [one.nbytes for one in values]
    num_bytes = _header_size(len(sizes)) + sum(map(_padded, sizes))
    if num_bytes > MAX_EPISODE_BYTES:
        raise ValueError(
            f"episode {record.episode!r} needs {num_bytes:,} bytes with its ids and groups, a log "
            f"takes at most {MAX_EPISODE_BYTES:,} an episode"
        )
    parts: list[Any] = [np.array(sizes, "<u4").tobytes(), b"\0" * (-4 * len(sizes) % 8)]
    for value, size in zip(values, sizes, strict=True):
        parts += (value.data if size else b"", b"\0" * (-size % 8))
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([RECORD_MARK, checksum.to_bytes(4, "little"), *parts])


def decoded(content: bytes, fields: tuple[TokenField, ...]) -> Record:
    """Return a record from its bytes; its arrays are views of one copy of them.

    Raises:
        DamagedLogError: If it is no record of trajectories that a buffer with these fields takes.
    """
    num_columns = len(COLUMNS) + len(fields)
    begin = _header_size(num_columns)
    if content[:4] != RECORD_MARK or len(content) < begin:
        raise DamagedLogError("it is no record of an episode")
    if zlib.crc32(memoryview(content)[8:]) != int.from_bytes(content[4:8], "little"):
        raise DamagedLogError("its checksum is wrong")
    sizes = np.frombuffer(content, "<u4", num_columns, 8).tolist()
    memory, columns = bytearray(content), list[npt.NDArray[Any]]()  # writable arrays
    kinds = (*COLUMNS.values(), *(np.dtype(np.uint8) for _ in fields))
    for dtype, size in zip(kinds, sizes, strict=True):
        columns.append(np.frombuffer(memory, dtype, size // dtype.itemsize, begin))
        begin += _padded(size)
    if begin != len(content):
        raise DamagedLogError(f"its columns have {sum(sizes)} bytes, it has {len(content)}")
    raw, text_sizes, table, discounts, chains, ids, turns, numbers, spans, logprobs, *rows = columns
    try:
        episode, error, *texts = _texts(raw.tobytes(), text_sizes.tolist())
        trajectories = table.reshape(-1, 6)
        arrays = TrajectoryArrays(
            labels=_labels(trajectories.tolist(), texts, discounts.tolist()),
            num_turns=trajectories[:, 0],
            chain_sizes=chains,
            tokens=ids,
            turns=turns.reshape(-1, len(INTEGERS)),
            numbers=numbers.reshape(-1, len(FLOATS)),
            spans=spans.reshape(-1, 3),
            logprobs=logprobs,
            token_fields=fields,
            rows=tuple(rows),
        )
        arrays.check()
        return Record(episode or "", error, arrays)
    except (TypeError, ValueError) as fault:
        raise DamagedLogError(str(fault)) from fault


def encoded_text(text: str) -> bytes:
    """Return a text as UTF-8; lone surrogates of a model's broken output are kept."""
    return str.encode(text, "utf-8", "surrogatepass")


def decoded_text(raw: bytes) -> str:
    """Return the text of `encoded_text`."""
    return raw.decode("utf-8", "surrogatepass")


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _header_size(num_columns: int) -> int:
    """Return the number of bytes before the first column: mark, checksum, and columns' sizes."""
    return 8 + _padded(4 * num_columns)


def _optional(value: int | None) -> tuple[int, int]:
    return (0, 0) if value is None else (1, value)


def _texts(raw: bytes, sizes: Sequence[int]) -> list[str | None]:
    """Return concatenated texts; one of size -1 is ``None``."""
    texts, begin = list[str | None](), 0
    for size in sizes:
        texts.append(None if size < 0 else decoded_text(raw[begin : begin + size]))
        begin += max(size, 0)
    return texts


def _labels(
    trajectories: Sequence[Sequence[int]], texts: Sequence[str | None], discounts: Sequence[float]
) -> Labels:
    labels = Labels.empty()
    for (_, has_task, task_id, has_birth, birth, truncated), name, group, discount in zip(
        trajectories, texts[::2], texts[1::2], discounts, strict=True
    ):
        task, moment = (task_id if has_task else None), (birth if has_birth else None)
        cut = None if truncated < 0 else bool(truncated)
        labels.append(name, group, task, moment, discount, cut)
    return labels
