"""One episode as columns of plain numbers: what a log stores of it, and the way back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.chains import Intake, Labels, copy_numbers, take_in
from trajpack.packing.token_fields import TokenField
from trajpack.packing.types import Trajectory, Turn, VersionSpan

I32, F32, F64 = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.float64)
NUMBERS: dict[str, np.dtype[Any]] = {
    "turn_discount": F64,
    "num_turns": I32,
    "chain_size": I32,
    "token_ids": I32,
    "turn_chain": I32,
    "turn_begin": I32,
    "turn_size": I32,
    "turn_reward": F64,
    "turn_truncated": np.dtype(np.bool_),
    "turn_version_start": I32,
    "turn_version_end": I32,
    "turn_num_spans": I32,
    "span_version": I32,
    "span_start": I32,
    "span_end": I32,
    "rollout_logprobs": F32,
}
"""Columns that hold a list of numbers for each episode, per trajectory, chain, turn or token."""
MAX_EPISODE_BYTES = 1 << 30
"""Bytes of one episode: what a page of a Parquet file safely takes."""


@dataclass(frozen=True)
class EpisodeRow:
    """An episode as a log stores it: each token once, and tables of its turns."""

    episode: str
    """Name."""
    error: str | None
    """Why it failed, or ``None``."""
    labels: Sequence[Labels]
    """Of each trajectory."""
    numbers: Mapping[str, npt.NDArray[Any]]
    """The columns of `NUMBERS`."""
    rows: Sequence[npt.NDArray[np.uint8]]
    """Of each extra field: the rows of all turns, or of all chains, as bytes."""

    @property
    def num_turns(self) -> int:
        """Turns of all its trajectories."""
        return len(self.numbers["turn_size"])

    @property
    def num_tokens(self) -> int:
        """Tokens it stores, each counted once."""
        return len(self.numbers["token_ids"])

    @cached_property
    def num_bytes(self) -> int:
        """Memory it takes, about."""
        arrays = sum(column.nbytes for column in (*self.numbers.values(), *self.rows))
        return arrays + 2 * len(self.episode) + 2 * len(self.error or "") + 256


def row_of_episode(
    episode: str,
    trajectories: Sequence[Trajectory],
    error: str | None,
    fields: tuple[TokenField, ...],
) -> EpisodeRow:
    """Check an episode's trajectories as `TrajectoryBuffer.extend` does, and copy them.

    Raises:
        TypeError, ValueError: As `TrajectoryBuffer.extend`, or where the episode is too large.

    Cost: as `TrajectoryBuffer.extend`.
    """
    intake = take_in(trajectories, fields)
    ids, logprobs = np.empty(intake.num_tokens, I32), np.empty(intake.num_generated, F32)
    copy_numbers(intake, ids, logprobs)
    numbers = _tables(intake) | {"token_ids": ids, "rollout_logprobs": logprobs}
    rows = [
        _joined([piece.reshape(-1) for piece in pieces], np.dtype(np.uint8))
        for pieces in intake.rows
    ]
    row = EpisodeRow(episode, error, intake.labels, numbers, rows)
    if row.num_bytes > MAX_EPISODE_BYTES:
        raise ValueError(
            f"episode {episode!r} needs {row.num_bytes:,} bytes, a log takes at most "
            f"{MAX_EPISODE_BYTES:,} an episode"
        )
    return row


def trajectories_of_row(row: EpisodeRow, fields: tuple[TokenField, ...]) -> list[Trajectory]:
    """Return what `row_of_episode` was given: turns whose arrays are views of the row's."""
    columns = {
        name: column if name in ("token_ids", "rollout_logprobs") else column.tolist()
        for name, column in row.numbers.items()
    }
    turns = _turns(columns, _extra_rows(row, fields))
    bounds = list(accumulate(columns["num_turns"], initial=0))
    return [
        Trajectory(
            id=labels.id,
            turns=turns[begin:end],
            group=labels.group,
            turn_discount=labels.turn_discount,
            task_id=labels.task_id,
            birth_time_ms=labels.birth_time_ms,
        )
        for labels, (begin, end) in zip(row.labels, pairwise(bounds), strict=True)
    ]


def _joined(pieces: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Copy arrays behind each other: the caller's are not held."""
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)


def _tables(intake: Intake) -> dict[str, npt.NDArray[Any]]:
    spans = [intake.version_runs.get(turn, ()) for turn in range(len(intake.turn_size))]
    flat = np.array([span for of_turn in spans for span in of_turn], I32).reshape(-1, 3)
    columns: dict[str, Any] = {
        "turn_discount": [labels.turn_discount for labels in intake.labels],
        "num_turns": intake.num_turns,
        "chain_size": intake.chain_sizes,
        "turn_chain": intake.turn_chain,
        "turn_begin": intake.turn_begin,
        "turn_size": intake.turn_size,
        "turn_reward": intake.rewards,
        "turn_truncated": intake.truncated,
        "turn_version_start": intake.version_start,
        "turn_version_end": intake.version_end,
        "turn_num_spans": [len(of_turn) for of_turn in spans],
        "span_version": flat[:, 0],
        "span_start": flat[:, 1],
        "span_end": flat[:, 2],
    }
    return {name: np.array(column, NUMBERS[name]) for name, column in columns.items()}


def _turns(columns: Mapping[str, Any], extra: Sequence[tuple[TokenField, Any]]) -> list[Turn]:
    ids, logprobs = columns["token_ids"], columns["rollout_logprobs"]
    chains = list(accumulate(columns["chain_size"], initial=0))
    turns = []
    generated = spans = 0
    for turn, chain in enumerate(columns["turn_chain"]):
        start, size = chains[chain], columns["turn_size"][turn]
        begin = start + columns["turn_begin"][turn]
        end, sampled = begin + size, generated + size
        rows = {
            field.name: values[generated:sampled] if field.generated_only else values[start:end]
            for field, values in extra
        }
        of_turn = range(spans, spans := spans + columns["turn_num_spans"][turn])
        turns.append(
            Turn(
                prompt_ids=ids[start:begin],
                completion_ids=ids[begin:end],
                completion_logprobs=logprobs[generated:sampled],
                reward=columns["turn_reward"][turn],
                truncated=columns["turn_truncated"][turn],
                version_start=columns["turn_version_start"][turn],
                version_end=columns["turn_version_end"][turn],
                version_spans=[_span(columns, span) for span in of_turn] or None,
                fields=rows or None,
            )
        )
        generated = sampled
    return turns


def _span(columns: Mapping[str, Any], span: int) -> VersionSpan:
    version, start, end = (columns[name] for name in ("span_version", "span_start", "span_end"))
    return VersionSpan(version[span], start[span], end[span])


def _extra_rows(row: EpisodeRow, fields: tuple[TokenField, ...]) -> list[tuple[TokenField, Any]]:
    """Return the rows of each extra field, as numpy has them where numpy has their dtype."""
    extra: list[tuple[TokenField, Any]] = []
    for field, raw in zip(fields, row.rows, strict=True):
        shape = (raw.size // field.row_bytes, *field.shape)
        if raw.size:
            values = torch.from_numpy(raw).view(field.dtype).reshape(shape)
        else:  # which torch does not view as another dtype
            values = torch.empty(shape, dtype=field.dtype, device="cpu")
        try:
            extra.append((field, values.numpy()))
        except TypeError:  # bfloat16 and narrower floats
            extra.append((field, values))
    return extra
