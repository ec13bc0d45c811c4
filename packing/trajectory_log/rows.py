"""Records: one episode as bytes, columns of numbers with a checksum; encoding and decoding."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.buffer.chains import TrajectoryLabels, copy_numbers, validate_turns
from trajpack.packing.conversion import FLOAT32_MAX, as_version_runs
from trajpack.packing.token_fields import TokenField
from trajpack.packing.trajectory_log.options import DamagedLogError
from trajpack.packing.types import Trajectory, Turn, VersionSpan

U8, I32, I64, F32, F64 = (np.dtype(name) for name in ("u1", "<i4", "<i8", "<f4", "<f8"))
COLUMNS: dict[str, np.dtype[Any]] = {
    "texts": U8,
    "text_sizes": I32,
    "trajectories": I64,
    "turn_discounts": F64,
    "chain_sizes": I32,
    "token_ids": I32,
    "turns": I32,
    "turn_rewards": F64,
    "version_spans": I32,
    "rollout_logprobs": F32,
}
"""Columns of a record, in order; those of extra fields follow, as bytes."""
TURN_COLUMNS = (
    "chain", "begin", "size", "truncated", "version_start", "version_end", "num_spans",
)  # fmt: skip
"""Numbers of a turn: its chain; the tokens of its prompt (the chain up to there) and of its
completion; whether it was truncated; first and last version; number of version spans."""
MAX_EPISODE_BYTES = 900_000_000
"""Maximum bytes of a record; a value of SQLite has at most 1,000,000,000."""
RECORD_MARK = b"tpe1"
"""First bytes of a record."""


@dataclass(frozen=True)
class EpisodeRow:
    """An episode in the form of the log: each token once, and tables of its turns."""

    episode: str
    """Name of the episode."""
    error: str | None
    """Reason of its failure, or ``None``."""
    labels: Sequence[TrajectoryLabels]
    """TrajectoryLabels of each trajectory."""
    num_turns: Sequence[int]
    """Number of turns of each trajectory."""
    chain_sizes: Sequence[int]
    """Number of tokens of each chain."""
    turns: Sequence[Sequence[int]]
    """`TURN_COLUMNS` of each turn."""
    rewards: Sequence[float]
    """Reward of each turn."""
    spans: Sequence[Sequence[int]]
    """``(version, start, end)`` of turns with several versions, turn after turn."""
    token_ids: npt.NDArray[np.int32]
    """int32: tokens of the chains, concatenated."""
    logprobs: npt.NDArray[np.float32]
    """float32: log-probabilities of the completions, turn after turn."""
    rows: Sequence[npt.NDArray[np.uint8]]
    """uint8: rows of each extra field, of all turns or of all chains."""


def row_of_episode(
    episode: str,
    trajectories: Sequence[Trajectory],
    error: str | None,
    *,
    fields: tuple[TokenField, ...],
) -> EpisodeRow:
    """Check and copy an episode's trajectories, as `TrajectoryBuffer.extend` does.

    Raises:
        TypeError, ValueError: As `TrajectoryBuffer.extend`, or if an array changed while it was
            read.

    Cost: as `TrajectoryBuffer.extend`.
    """
    intake = validate_turns(trajectories, fields)
    ids, logprobs = np.empty(intake.num_tokens, I32), np.empty(intake.num_generated, F32)
    copy_numbers(intake, ids, logprobs)
    spans = [intake.version_runs.get(turn, ()) for turn in range(len(intake.turn_size))]
    turns = zip(
        intake.turn_chain, intake.turn_begin, intake.turn_size, intake.truncated,
        intake.version_start, intake.version_end, map(len, spans), strict=True,
    )  # fmt: skip
    row = EpisodeRow(
        episode,
        error,
        labels=intake.labels,
        num_turns=intake.num_turns,
        chain_sizes=intake.chain_sizes,
        turns=list(turns),
        rewards=intake.reward,
        spans=[span for of_turn in spans for span in of_turn],
        token_ids=ids,
        logprobs=logprobs,
        rows=[
            np.concatenate([np.empty(0, U8), *(piece.reshape(-1) for piece in pieces)])
            for pieces in intake.rows
        ],
    )
    try:  # of the copy: another thread may have changed a field's rows
        check_row(row, fields)
    except ValueError as fault:
        raise ValueError(f"episode {episode!r} changed while it was read: {fault}") from None
    return row


def encoded(row: EpisodeRow) -> bytes:
    """Return the record of an episode.

    Raises:
        ValueError: If it is larger than `MAX_EPISODE_BYTES`.

    Cost: copies the episode once.
    """
    texts = [row.episode, row.error]
    for labels in row.labels:
        texts += (labels.id, labels.group)
    num_chars = sum(len(text) for text in texts if text is not None)
    if num_chars > MAX_EPISODE_BYTES:  # before that much memory is allocated
        raise _too_large(row.episode, num_chars)
    raw = [None if text is None else encoded_text(text) for text in texts]
    trajectories = [
        (count, *_optional(labels.task_id), *_optional(labels.birth_time_ms))
        for count, labels in zip(row.num_turns, row.labels, strict=True)
    ]
    columns = {
        "texts": np.frombuffer(b"".join(text for text in raw if text is not None), U8),
        "text_sizes": [-1 if text is None else len(text) for text in raw],
        "trajectories": trajectories,
        "turn_discounts": [labels.turn_discount for labels in row.labels],
        "chain_sizes": row.chain_sizes,
        "token_ids": row.token_ids,
        "turns": row.turns,
        "turn_rewards": row.rewards,
        "version_spans": row.spans,
        "rollout_logprobs": row.logprobs,
    }
    arrays = [np.asarray(columns[name], dtype) for name, dtype in COLUMNS.items()] + [*row.rows]
    sizes = [array.nbytes for array in arrays]
    num_bytes = _header_size(len(sizes)) + sum(map(_padded, sizes))
    if num_bytes > MAX_EPISODE_BYTES:
        raise _too_large(row.episode, num_bytes)
    parts: list[Any] = [np.array(sizes, "<u4").tobytes(), b"\0" * (-4 * len(sizes) % 8)]
    for array, size in zip(arrays, sizes, strict=True):
        parts += (array.data if size else b"", b"\0" * (-size % 8))
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([RECORD_MARK, checksum.to_bytes(4, "little"), *parts])


def decoded(content: bytes, fields: tuple[TokenField, ...]) -> EpisodeRow:
    """Return the episode of a record; its arrays are views of one copy of the record.

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
    for dtype, size in zip((*COLUMNS.values(), *(U8 for _ in fields)), sizes, strict=True):
        if size % dtype.itemsize or size > len(content) - begin:
            raise DamagedLogError(f"a column of {dtype} has {size} bytes")
        columns.append(np.frombuffer(memory, dtype, size // dtype.itemsize, begin))
        begin += -(-size // 8) * 8
    if begin != len(content):
        raise DamagedLogError(f"its columns have {sum(sizes)} bytes, it has {len(content)}")
    raw, text_sizes, table, discounts, chains, ids, turns, rewards, spans, logprobs, *rows = columns
    try:
        trajectories = table.reshape(-1, 5).tolist()
        episode, error, *labels = _texts(raw.tobytes(), text_sizes.tolist())
        row = EpisodeRow(
            episode or "",
            error,
            labels=_labels(trajectories, labels, discounts.tolist()),
            num_turns=[numbers[0] for numbers in trajectories],
            chain_sizes=chains.tolist(),
            turns=turns.reshape(-1, len(TURN_COLUMNS)).tolist(),
            rewards=rewards.tolist(),
            spans=spans.reshape(-1, 3).tolist(),
            token_ids=ids,
            logprobs=logprobs,
            rows=rows,
        )
        _require(episode is not None, "it has no name")
        check_row(row, fields)
    except (TypeError, ValueError) as fault:
        raise DamagedLogError(str(fault)) from fault
    return row


def check_row(row: EpisodeRow, fields: tuple[TokenField, ...]) -> None:
    """Raise a `ValueError` unless a row describes trajectories that a buffer would take."""
    ids, logprobs = row.token_ids, row.logprobs
    num_turns, chain_sizes = row.num_turns, row.chain_sizes
    _require(len(num_turns) == len(row.labels), "num_turns is not one of each trajectory")
    _require(row.error is None or not num_turns, "a failed episode has trajectories")
    _require(min(num_turns, default=1) > 0, "a trajectory has no turns")
    _require(sum(num_turns) == len(row.turns) == len(row.rewards), "num_turns does not add up")
    _require(min(chain_sizes, default=1) > 0, "a chain has no tokens")
    _require(sum(chain_sizes) == len(ids), "chain_sizes does not add up to the tokens")
    _require(not ids.size or ids.min() >= 0, "a token id is negative")
    _require(np.isfinite(logprobs).all(), "a log-probability is not finite")
    for number in (*row.rewards, *(labels.turn_discount for labels in row.labels)):
        _require(abs(number) <= FLOAT32_MAX, "a reward or discount is not finite float32")
    num_chains, num_generated, num_spans = len(chain_sizes), 0, 0
    for turn, (chain, begin, size, truncated, start, end, count) in enumerate(row.turns):
        if not (
            0 <= chain < num_chains
            and begin > 0 <= size
            and begin + size <= chain_sizes[chain]
            and 0 <= truncated <= 1
            and 0 <= start <= end
            and count >= 0
        ):
            raise ValueError(f"turn {turn} has impossible numbers: {row.turns[turn]}")
        num_generated += size
        if count:
            spans = row.spans[num_spans : num_spans + count]
            as_version_runs(f"turn {turn}: ", spans, start, end, num_tokens=size)
            num_spans += count
    _require(num_spans == len(row.spans), "the turns' version spans do not add up")
    _require(num_generated == len(logprobs), "the turns' sizes do not add up")
    for field, raw in zip(fields, row.rows, strict=True):
        num_rows = num_generated if field.generated_only else len(ids)
        _require(
            raw.size == num_rows * field.row_bytes, f"field {field.name!r} has {raw.size} bytes"
        )
        _require(field.dtype != torch.bool or (raw < 2).all(), f"field {field.name!r} is not bool")


def trajectories_of_row(row: EpisodeRow, fields: tuple[TokenField, ...]) -> list[Trajectory]:
    """Return the trajectories of a row; arrays of turns are views of the row's."""
    chains = list(accumulate(row.chain_sizes, initial=0))
    extra = [_rows(field, raw) for field, raw in zip(fields, row.rows, strict=True)]
    turns, generated, num_spans = list[Turn](), 0, 0
    for (chain, prompt, size, truncated, first, last, count), reward in zip(
        row.turns, row.rewards, strict=True
    ):
        start = chains[chain]
        begin, sampled = start + prompt, generated + size
        spans = row.spans[num_spans : num_spans + count]
        turns.append(
            Turn(
                row.token_ids[start:begin],
                row.token_ids[begin : begin + size],
                row.logprobs[generated:sampled],
                reward,
                bool(truncated),
                first,
                last,
                [VersionSpan(*span) for span in spans] or None,
                {
                    field.name: values[generated:sampled]
                    if field.generated_only
                    else values[start : begin + size]
                    for field, values in zip(fields, extra, strict=True)
                }
                or None,
            )
        )
        generated, num_spans = sampled, num_spans + count
    bounds = pairwise(accumulate(row.num_turns, initial=0))
    return [
        Trajectory(
            labels.id, turns[begin:end], labels.group, labels.turn_discount, labels.task_id,
            labels.birth_time_ms,
        )
        for labels, (begin, end) in zip(row.labels, bounds, strict=True)
    ]  # fmt: skip


def encoded_text(text: str) -> bytes:
    """Return a text as UTF-8; lone surrogates of a model's broken output are kept."""
    return str.encode(text, "utf-8", "surrogatepass")


def decoded_text(raw: bytes) -> str:
    """Return the text of `encoded_text`.

    Raises:
        UnicodeDecodeError: If the bytes are no such text.
    """
    return raw.decode("utf-8", "surrogatepass")


def _require(holds: Any, message: str) -> None:
    if not holds:
        raise ValueError(message)


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def _header_size(num_columns: int) -> int:
    """Return the number of bytes before the first column: mark, checksum, and columns' sizes."""
    return 8 + _padded(4 * num_columns)


def _too_large(episode: str, num_bytes: int) -> ValueError:
    return ValueError(
        f"episode {episode!r} needs {num_bytes:,} bytes with its ids and groups, a log takes at "
        f"most {MAX_EPISODE_BYTES:,} an episode"
    )


def _optional(value: int | None) -> tuple[int, int]:
    return (0, 0) if value is None else (1, value)


def _texts(raw: bytes, sizes: Sequence[int]) -> list[str | None]:
    """Return concatenated texts; one of size -1 is ``None``."""
    texts, begin = list[str | None](), 0
    for size in sizes:
        end = begin + size
        if not begin <= end <= len(raw) and size != -1:
            raise ValueError(f"a text has {size} bytes")
        texts.append(None if size < 0 else decoded_text(raw[begin:end]))
        begin = max(begin, end)
    _require(begin == len(raw), "text_sizes does not add up")
    return texts


def _labels(
    trajectories: Sequence[Sequence[int]], texts: Sequence[str | None], discounts: Sequence[float]
) -> list[TrajectoryLabels]:
    labels = []
    for (_, has_task, task_id, has_birth, birth), name, group, discount in zip(
        trajectories, texts[::2], texts[1::2], discounts, strict=True
    ):
        if name is None or not 0 <= has_task <= 1 or not 0 <= has_birth <= 1:
            raise ValueError("a trajectory has impossible labels")
        task, moment = (task_id if has_task else None), (birth if has_birth else None)
        labels.append(TrajectoryLabels(name, group, task, moment, discount))
    return labels


def _rows(field: TokenField, raw: npt.NDArray[np.uint8]) -> Any:
    """Return the rows of an extra field, as a numpy array if numpy has their dtype."""
    shape = (raw.size // field.row_bytes, *field.shape)
    if raw.size:
        values = torch.from_numpy(raw).view(field.dtype).reshape(shape)
    else:  # torch does not view an empty tensor as another dtype
        values = torch.empty(shape, dtype=field.dtype, device="cpu")
    try:
        return values.numpy()
    except TypeError:  # bfloat16 and narrower floats
        return values
