"""A log returns what was appended, bit for bit and once."""

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from benchmarks import trajectory_log as benchmark
from tests.packing.trajectory_log.log_cases import (
    BY_HAND,
    assert_holds,
    episode,
    read,
    turn,
    wait_until,
    write,
)
from tests.packing.trajectory_log.old_log_cases import FIELDS, NAMES, trajectories
from trajpack import TokenField, Trajectory, TrajectoryBuffer, Turn, pack
from trajpack.packing.trajectory_log import records as log_records
from trajpack.packing.trajectory_log.database import LogFile
from trajpack.packing.trajectory_log.log import TrajectoryLog
from trajpack.packing.trajectory_log.options import LogOptions
from trajpack.packing.types import VersionSpan
from trajpack.testing import assert_batches_equal, trajectory_lists

SMALLEST = 2.0**-149
DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float64, torch.complex64,
]  # fmt: skip


def through(folder, trajectories, fields=()):
    """Log each trajectory as an episode, and check all that comes back against the originals."""
    with TrajectoryLog.open(folder, fields=fields, options=BY_HAND) as log:
        for number, trajectory in enumerate(trajectories):
            log.append(str(number), [trajectory])
    replayed = [one for logged in read(folder) for one in logged.trajectories]
    for layout in ("merged", "turns"):
        expected = pack(trajectories, layout, "cpu", fields=fields)
        assert_batches_equal(pack(replayed, layout, "cpu", fields=fields), expected)
    return replayed


@given(st.lists(trajectory_lists(2), max_size=3))
def test_replay_returns_the_appended_episodes(tmp_path_factory, episodes):
    folder = tmp_path_factory.mktemp("log")
    options = LogOptions(segment_episodes=2, flush_seconds=3600)
    with TrajectoryLog.open(folder, options=options) as log:
        for number, trajectories in enumerate(episodes):
            log.append(str(number), trajectories)
    flat = [trajectory for trajectories in episodes for trajectory in trajectories]
    with TrajectoryLog.open(folder, mode="read") as log:
        assert [list(logged.trajectories) for logged in log.replay()] == episodes
        buffer = TrajectoryBuffer("cpu")
        assert log.fill(buffer) == len(flat)
        assert (log.num_trajectories, log.num_turns) == (len(flat), buffer.num_turns)
        assert log.num_tokens == buffer.num_tokens
    for layout in ("merged", "turns"):
        assert_batches_equal(buffer.pack(layout), pack(flat, layout, "cpu"))


def test_every_bit_of_every_number_comes_back(tmp_path):
    logprobs = np.array([-0.0, SMALLEST, -3e38, -(2.0**-126), 0.0], np.float32)
    spans = [VersionSpan(3, 0, 1), VersionSpan(5, 1, 4), VersionSpan(2**31 - 1, 4, 5)]
    first = Turn(
        [0, 2**31 - 1], [1, 2, 3, 4, 5], logprobs, -0.0, True, 3, 2**31 - 1, version_spans=spans
    )
    second = Turn([7], [], [], 5e-324, version_start=1, version_end=2)  # a chain of its own
    given_trajectories = [
        Trajectory("\ud800", [first, second], "", 0.1, -(2**63), 2**63 - 1),
        Trajectory("", [second], None, -0.0),
        Trajectory("line\nbreak", [second], "\udfff\0"),
    ]
    replayed = through(tmp_path, given_trajectories)
    assert replayed == given_trajectories
    one, other = replayed[0].turns
    assert one.completion_logprobs.tobytes() == logprobs.tobytes()
    assert (one.prompt_ids.dtype, one.completion_logprobs.dtype) == (np.int32, np.float32)
    assert one.prompt_ids.flags.writeable
    assert one.version_spans == spans
    assert np.signbit([one.reward, replayed[1].turn_discount]).all()
    assert (other.reward, other.version_start, other.version_end) == (5e-324, 1, 2)
    assert [trajectory.group for trajectory in replayed] == ["", None, "\udfff\0"]


@pytest.mark.parametrize("generated_only", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fields_of_any_dtype_and_shape_come_back(tmp_path, dtype, generated_only):
    field = TokenField("\ud800 f", dtype, (2, 3), fill=1, generated_only=generated_only)
    rng = np.random.default_rng(0)

    def rows(count):
        raw = rng.integers(0, 2 if dtype == torch.bool else 256, 9 * field.row_bytes)
        return torch.from_numpy(raw.astype(np.uint8)).view(dtype).reshape(9, 2, 3)[:count]

    context = rows(3)
    longer = context if generated_only else torch.cat([context, rows(2)])
    empty = turn((9,), (), fields={field.name: rows(0 if generated_only else 1)})
    turns = [
        turn(fields={field.name: context[:1] if generated_only else context}),
        turn((1, 2, 3, 4), (5,), fields={field.name: longer[-1:] if generated_only else longer}),
        empty,
    ]
    replayed = through(tmp_path, [Trajectory("a", turns), Trajectory("b", [empty])], [field])
    for one in (*replayed[0].turns, *replayed[1].turns):
        assert torch.as_tensor(one.fields[field.name]).dtype == dtype


def test_fields_are_those_the_log_was_begun_with(tmp_path):
    field = TokenField("v", torch.float32, fill=float("nan"))
    write(tmp_path, fields=[field])
    with TrajectoryLog.open(tmp_path, fields=[field]) as log:
        assert [one.as_json() for one in log.fields] == [field.as_json()]
        with pytest.raises(ValueError, match=r"turn 0: fields must be those declared, \['v'\]"):
            log.append("a", [Trajectory("a", [turn()])])
        assert "a" not in log
        with pytest.raises(ValueError, match=r"begun with fields \['v'\], got \[\]"):
            log.fill(TrajectoryBuffer("cpu"))
    with pytest.raises(ValueError, match=r"begun with fields \['v'\], got \['v'\]; names, dtypes"):
        TrajectoryLog.open(tmp_path, fields=[TokenField("v", torch.float64)], mode="read")
    with pytest.raises(ValueError, match=r"begun with fields \['v'\], got \[\]"):
        TrajectoryLog.open(tmp_path, fields=[])


def test_an_episode_is_logged_once_unless_it_failed(tmp_path):
    with TrajectoryLog.open(tmp_path, options=LogOptions(max_error_chars=4)) as log:
        log.append("lost", [], error="no\ud800thing")
        log.append("e1", [episode(1)])
        log.append("late", [], error="timeout")
        assert (log.failed, log.finished) == ({"lost", "late"}, {"e1"})
        log.flush()
        log.append("late", [episode(2)])
        assert (log.failed, log.finished) == ({"lost"}, {"e1", "late"})
        for error in (None, "again"):
            with pytest.raises(ValueError, match="episode 'e1' is in the log already"):
                log.append("e1", [], error=error)
    for _ in range(2):
        with TrajectoryLog.open(tmp_path) as log:
            assert (log.failed, log.finished) == ({"lost"}, {"e1", "late"})
            assert log.episodes == {"lost", "e1", "late"}
            assert ("late" in log, "other" in log, len(log)) == (True, False, 3)
            with pytest.raises(ValueError, match="episode 'late' is in the log already"):
                log.append("late", [])
            replayed = [(one.episode, one.error, len(one.trajectories)) for one in log.replay()]
    assert replayed == [("lost", "no\ud800t", 0), ("e1", None, 1), ("late", None, 1)]


def test_a_refused_episode_leaves_no_trace(tmp_path):
    good, bad = episode(0), Trajectory("b", [turn(), Turn([1], [2], [float("nan")])])
    negative = Trajectory("c", [Turn([1], [-2], [0.0])])
    with TrajectoryLog.open(tmp_path) as log:
        for given_trajectories, error, message in [
            ([good, bad], None, "'b', turn 1: completion_logprobs must be finite"),
            ([good, negative], None, "'c', turn 0: completion_ids must be 0 or more, got -2"),
            ([good, Trajectory("d", [])], None, "'d': must have at least one turn"),
            ([good], "late", "episode 'x' failed, but comes with 1 trajectories"),
        ]:
            with pytest.raises(ValueError, match=message):
                log.append("x", given_trajectories, error=error)
        with pytest.raises(TypeError, match="episode must be a str, got int"):
            log.append(1, [good])
        with pytest.raises(TypeError, match="error must be a str or None, got ValueError"):
            log.append("x", [], error=ValueError())
        assert (len(log), log.num_pending, log.num_tokens) == (0, 0, 0)
    assert read(tmp_path) == []


def test_the_callers_arrays_are_not_held(tmp_path):
    ids, logprobs = np.array([5, 6]), np.zeros(2, np.float32)
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as log:
        log.append("a", [Trajectory("a", [Turn([1], ids, logprobs)])])
        ids[:], logprobs[:] = 9, 9
    (logged,) = read(tmp_path)
    assert logged.trajectories[0].turns[0] == Turn([1], [5, 6], [0.0, 0.0])


def test_a_thread_writes_when_a_limit_is_reached(tmp_path):
    limits = {"segment_episodes": 2, "segment_bytes": 1, "max_pending_bytes": 1}
    for name, limit in (limits | {"flush_seconds": 0.01}).items():
        folder = tmp_path / name
        options = LogOptions(**{"flush_seconds": 3600, name: limit})
        with TrajectoryLog.open(folder, options=options) as log:
            log.append("e0", [episode(0)])
            log.append("e1", [episode(1)])
            wait_until(lambda log=log: not log.num_pending)
            assert_holds(folder, [0, 1])  # while the writer is at work
    long = "x" * (1 << 20)  # ids and groups count among what waits
    options = LogOptions(max_pending_bytes=1 << 20, flush_seconds=3600)
    with TrajectoryLog.open(tmp_path / "long", options=options) as log:
        for number in range(4):
            log.append(f"e{number}", [Trajectory(long, [turn()])])
        wait_until(lambda: not log.num_pending)


def test_transactions_keep_to_their_limits(tmp_path, monkeypatch):
    sizes = []

    def append(file, before, episodes, add=LogFile.append):
        sizes.append(len(episodes))
        return add(file, before, episodes)

    monkeypatch.setattr(LogFile, "append", append)
    for most, limit in ((2, {"segment_episodes": 2}), (1, {"segment_bytes": 1})):
        sizes.clear()
        write(tmp_path / str(most), range(5), options=LogOptions(flush_seconds=3600, **limit))
        assert (sum(sizes), max(sizes)) == (5, most)
        assert_holds(tmp_path / str(most), range(5))


def test_counts_are_right_while_a_thread_writes(tmp_path):
    options = LogOptions(segment_episodes=2, flush_seconds=0.001)
    with TrajectoryLog.open(tmp_path, options=options) as log:
        for number in range(60):
            log.append(f"e{number}", [], error="once")
            log.append(f"e{number}", [episode(number)])
            for _ in range(20):
                assert len(log) == log.num_trajectories == number + 1
                assert f"e{number}" in log
                assert len(log.finished) == number + 1
                assert not log.failed


def test_one_of_two_concurrent_appends_of_an_episode_is_refused(tmp_path):
    class Rival(list):
        def __iter__(self):
            if "x" not in log:
                log.append("x", [episode(0)])
            return super().__iter__()

    with TrajectoryLog.open(tmp_path) as log:
        with pytest.raises(ValueError, match="episode 'x' is in the log already"):
            log.append("x", [Trajectory("x", [Turn(Rival([1]), [2], [0.0])])])
        assert (len(log), log.num_trajectories, log.num_pending) == (1, 1, 1)


def test_a_closed_log_refuses_episodes(tmp_path):
    log = TrajectoryLog.open(tmp_path)
    log.append("e0", [episode(0)])
    log.close()
    log.close()
    with pytest.raises(ValueError, match="is closed"):
        log.append("e1", [episode(1)])
    with TrajectoryLog.open(tmp_path, mode="read") as log, pytest.raises(ValueError, match="readi"):
        log.flush()
    assert_holds(tmp_path, [0])


def test_a_subclass_of_str_is_taken_for_its_text(tmp_path):
    class Name(str):
        def __hash__(self):
            raise AssertionError("asked")

        def encode(self, *_):
            return b"another"

    with TrajectoryLog.open(tmp_path) as log:
        log.append(Name("e0"), [Trajectory(Name("t"), [turn()], Name("g"))])
        log.append(Name("e1"), [], error=Name("why"))
    one, other = read(tmp_path)
    assert (one.episode, one.trajectories[0].id, one.trajectories[0].group) == ("e0", "t", "g")
    assert (other.episode, other.error) == ("e1", "why")


def test_a_pending_failure_is_replaced_by_a_success(tmp_path):
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as log:
        log.append("late", [], error="timeout")
        log.append("e0", [episode(0)])
        log.append("late", [episode(1)])
        assert (len(log), log.num_pending) == (2, 2)
        assert (log.failed, log.finished) == (frozenset(), {"late", "e0"})
        assert (log.num_trajectories, log.num_turns) == (2, 4)
        with pytest.raises(ValueError, match="'late' is in the log already"):
            log.append("late", [], error="once more")
    assert [one.episode for one in read(tmp_path)] == ["e0", "late"]


def test_an_episode_that_is_too_large_is_refused_alone(tmp_path, monkeypatch):
    """Its ids and groups count, which many trajectories may share in memory."""
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as log:
        log.append("good", [episode(0)])
        long = "x" * (2 << 20)
        for given_trajectories in (
            [Trajectory(long, [turn()]) for _ in range(450)],
            [Trajectory("a", [turn()], long) for _ in range(450)],
        ):
            with pytest.raises(
                ValueError, match=r"episode 'big' needs 9\d\d,\d{3},\d{3} bytes with"
            ):
                log.append("big", given_trajectories)
        monkeypatch.setattr(log_records, "MAX_EPISODE_BYTES", 5000)
        with pytest.raises(ValueError, match="a log takes at most 5,000 an episode"):
            log.append("big", [Trajectory("a", [Turn([1] * 2000, [2], [-0.5])])])
        assert (len(log), log.num_pending) == (1, 1)
        log.append("also good", [episode(1)])
    assert [one.episode for one in read(tmp_path)] == ["good", "also good"]


def test_the_benchmark_runs(tmp_path, monkeypatch, capsys):
    options = f"--episodes 20 --tokens 64 --flush-every 5 --folder {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["trajectory_log", *options.split()])
    benchmark.main()
    assert capsys.readouterr().out.count(" s of the processor") == 4


def test_a_log_without_references_is_closed(tmp_path):
    TrajectoryLog.open(tmp_path, options=BY_HAND).append("e0", [episode(0)])
    assert_holds(tmp_path, [0])


def test_a_log_that_an_earlier_release_wrote_is_read_and_continued(tmp_path):
    folder = shutil.copytree(Path(__file__).with_name("stored_log"), tmp_path / "log")
    with TrajectoryLog.open(folder, fields=FIELDS) as log:
        assert (log.failed, log.num_trajectories, log.num_turns) == ({"lost"}, 7, 11)
        log.append("new", trajectories("a"))
    replayed = read(folder)
    assert [one.episode for one in replayed] == [*NAMES, "new"]
    for one in replayed:
        name = "a" if one.episode == "new" else one.episode
        originals = [] if one.error else trajectories(name)
        assert list(one.trajectories) == originals
        expected = pack(originals, device="cpu", fields=FIELDS)
        assert_batches_equal(pack(one.trajectories, device="cpu", fields=FIELDS), expected)
