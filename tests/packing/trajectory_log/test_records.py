"""Records of episodes: any bytes give a named error, or an episode that a buffer takes."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.packing.trajectory_log.log_cases import begin, read, turn
from trajpack import TokenField, Trajectory, TrajectoryBuffer, Turn
from trajpack.packing.buffer.trajectory_arrays import INTEGERS, TrajectoryArrays
from trajpack.packing.trajectory_log import log as trajectory_log
from trajpack.packing.trajectory_log.log import TrajectoryLog
from trajpack.packing.trajectory_log.records import (
    DamagedLogError,
    Record,
    decoded,
    encoded,
)
from trajpack.packing.types import VersionSpan

FIELDS = (TokenField("v", torch.float32), TokenField("b", torch.bool, generated_only=False))


def with_fields(one, num_tokens):
    size = len(one.completion_ids)
    return replace(one, fields={"v": np.ones(size, np.float32), "b": np.ones(num_tokens, bool)})


SPANS = [VersionSpan(0, 0, 1), VersionSpan(1, 1, 2)]
TRAJECTORIES = [
    Trajectory("e", [
        with_fields(Turn(
            [1, 2, 3], [4, 5], [-0.1, -0.2], version_end=1, version_spans=SPANS, stop_reason="tool"
        ), 5),
        with_fields(turn((1, 2, 3, 4, 5, 6), (7,), version_start=1, version_end=1), 7),
    ], "g", 0.5, 3),
    Trajectory("e2", [with_fields(turn((9,), (8,)), 2)], birth_time_ms=-(2**63)),
]  # fmt: skip


@pytest.fixture(scope="module")
def record():
    return Record("name", None, TrajectoryArrays.of(TRAJECTORIES, FIELDS))


def changed(record, **changes):
    """Return a record with other arrays, columns or names."""
    own = {name: changes.pop(name) for name in ("episode", "error") if name in changes}
    arrays = replace(record.arrays, **changes)
    return record._replace(**own, arrays=arrays)


def test_a_failure_has_a_record_too():
    for error in ("", "late", "\udfff"):
        record = Record("e", error, TrajectoryArrays.of([], FIELDS))
        back = decoded(encoded(record), FIELDS)
        assert (back.episode, back.error, back.arrays.trajectories()) == ("e", error, [])


TURNS = [(0, 3, 2, 2, 0, 0, 1, 3), (0, 6, 1, 0, 0, 1, 1, 0), (1, 1, 1, 0, 0, 0, 0, 0)]


def with_turn(number, **changes):
    turns = [list(one) for one in TURNS]
    for name, value in changes.items():
        turns[number][INTEGERS.index(name)] = value
    return turns


WRONG = [
    *(("turns", with_turn(0, **{name: value})) for name, value in (
        ("chain", -1), ("chain", 5), ("chain", 1), ("begin", -2), ("begin", 100), ("begin", 0),
        ("begin", 2**31 - 1), ("size", -1), ("size", 2**31 - 1), ("size", 1), ("truncated", 2),
        ("truncated", -1), ("stop_reason", 6), ("version_start", -5), ("version_start", 2),
        ("version_end", 2), ("num_spans", -1), ("num_spans", 2**31 - 1), ("num_spans", 0),
        ("num_spans", 1),
    )),
    ("turns", with_turn(1, num_spans=2)), ("turns", TURNS[:2]), ("turns", []),
    ("turns", with_turn(1, begin=5)), ("turns", with_turn(1, chain=1)), ("num_turns", [1, 2]),
    ("num_turns", [2, 2]), ("num_turns", [0, 3]), ("num_turns", [-1, 4]), 
    ("num_turns", []), ("chain_sizes", [-7, 2]), ("chain_sizes", [9, 0]), ("chain_sizes", []),
    ("chain_sizes", [2**31 - 1, 2]), ("tokens", []), ("tokens", [-1] * 9),
    ("tokens", [1] * 8), ("logprobs", [float("nan")] * 4), ("logprobs", []),
    ("logprobs", [float("-inf")] * 4), ("spans", []), ("spans", [(1, 0, 1), (0, 1, 2)]),
    ("spans", [(0, 0, 1), (2, 1, 2)]), ("spans", [(0, 0, 1), (1, 0, 2)]),
    ("spans", [(0, 0, 1), (1, 1, 3)]), ("spans", [(0, 0, 2), (1, 1, 2)]),
    ("numbers", [float("nan")] * 3), ("numbers", [1e300] * 3), ("numbers", []),
]  # fmt: skip


def first_of(labels, count):
    return labels._make(column[:count] for column in labels)


def test_the_fixture_has_the_expected_tables(record):
    arrays = record.arrays
    assert arrays.turns.tolist() == [list(one) for one in TURNS]
    assert (arrays.num_turns.tolist(), arrays.chain_sizes.tolist()) == ([2, 1], [7, 2])


@pytest.mark.parametrize(("name", "values"), WRONG, ids=str)
def test_columns_that_disagree_are_damage(record, name, values):
    wrong = {name: np.array(values, getattr(record.arrays, name).dtype)}
    if name == "num_turns":  # of which there is one for each trajectory, else it is not written
        wrong["labels"] = first_of(record.arrays.labels, len(values))
    with pytest.raises(DamagedLogError):
        decoded(encoded(changed(record, **wrong)), FIELDS)


def test_labels_fields_and_texts_that_disagree_are_damage(record):
    labels, rows = record.arrays.labels, record.arrays.rows
    for wrong in (
        {"labels": first_of(labels, 1), "num_turns": np.array([2])},
        {"labels": labels._replace(turn_discounts=[float("inf"), 1.0])},
        {"labels": labels._replace(turn_discounts=[float("nan"), 1.0])},
        {"rows": (rows[0][:-1], rows[1])},
        {"rows": (rows[0], rows[1][:-1])},
        {"rows": (rows[0], rows[1] * 2)},
        {"rows": rows[:1]},
        {"rows": (*rows, rows[0])},
    ):
        with pytest.raises(DamagedLogError):
            decoded(encoded(changed(record, **wrong)), FIELDS)


def test_bytes_that_are_no_record_are_damage(record):
    content = encoded(record)
    for size in range(len(content)):
        with pytest.raises(DamagedLogError):
            decoded(content[:size], FIELDS)
    for changed in (content + b"\0", b"x" + content[1:]):
        with pytest.raises(DamagedLogError):
            decoded(changed, FIELDS)


def test_every_flipped_bit_is_found(record):
    content = encoded(record)
    for index in range(8 * len(content)):
        wrong = bytearray(content)
        wrong[index // 8] ^= 1 << index % 8
        with pytest.raises(DamagedLogError):
            decoded(bytes(wrong), FIELDS)


def test_an_impossible_episode_with_a_right_checksum_is_named(tmp_path, monkeypatch, record):
    wrong = encoded(changed(record, turns=np.array(with_turn(0, chain=9))))
    monkeypatch.setattr(trajectory_log, "encoded", lambda _: wrong)
    with begin(tmp_path, fields=FIELDS) as log:
        log.append("name", TRAJECTORIES)
    monkeypatch.undo()
    with pytest.raises(DamagedLogError, match=r"log\.sqlite is damaged: episode 'name'"):
        read(tmp_path)
    with TrajectoryLog.open(tmp_path) as log, pytest.raises(DamagedLogError, match="'name'"):
        log.fill(TrajectoryBuffer("cpu", fields=FIELDS))
    with pytest.warns(UserWarning, match="skipped: .*'name'"):
        assert read(tmp_path, damaged="skip") == []


@pytest.mark.parametrize("shape", ["turns", "trajectories", "version spans"])
def test_a_record_takes_at_most_twenty_times_its_bytes_while_it_is_read(shape):
    count, spans = 2_000, None
    turns = [Turn([1000], [1001], [-0.5], 1.5, version_start=2000, version_end=2000)] * count
    trajectories = [Trajectory("a", turns)]
    if shape == "trajectories":
        trajectories = [Trajectory("a", turns[:1], task_id=3000, birth_time_ms=4000)] * count
    elif shape == "version spans":
        spans = [VersionSpan(2000 + k, k, k + 1) for k in range(count)]
        long = Turn([1], [2] * count, [-0.5] * count, 1.5, False, 2000, 1999 + count, spans)
        trajectories = [Trajectory("a", [long])]
    content = encoded(Record("e", None, TrajectoryArrays.of(trajectories, ())))
    tracemalloc.start()
    try:
        held = decoded(content, ()).arrays.trajectories()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held == trajectories
    assert peak <= 20 * len(content)
