"""What goes into a log comes out of it, bit for bit and once."""

import shutil
import sys
import threading
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
from trajpack import TokenField, Trajectory, TrajectoryBuffer, Turn, VersionSpan, pack
from trajpack.packing.buffer import chains, trajectory_arrays
from trajpack.packing.trajectory_log import records as log_records
from trajpack.packing.trajectory_log.database import LogFile
from trajpack.packing.trajectory_log.log import TrajectoryLog
from trajpack.packing.trajectory_log.options import LogOptions
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
def test_a_log_gives_back_what_it_was_given(tmp_path_factory, episodes):
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


def test_what_is_refused_leaves_nothing(tmp_path):
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
    limits = [
        LogOptions(segment_episodes=2, flush_seconds=3600),
        LogOptions(segment_bytes=1, flush_seconds=3600),
        LogOptions(max_pending_bytes=1, flush_seconds=3600),
        LogOptions(flush_seconds=0.01),
    ]
    for number, options in enumerate(limits):
        folder = tmp_path / str(number)
        with TrajectoryLog.open(folder, options=options) as log:
            log.append("e0", [episode(0)])
            log.append("e1", [episode(1)])
            wait_until(lambda log=log: not log.num_pending)
            assert_holds(folder, [0, 1])  # while the writer is at work


def test_transactions_keep_to_their_limits(tmp_path, monkeypatch):
    sizes = []

    def append(file, before, episodes, add=LogFile.append):
        sizes.append(len(episodes))
        return add(file, before, episodes)

    monkeypatch.setattr(LogFile, "append", append)
    limits = [
        (LogOptions(segment_episodes=2, flush_seconds=3600), 2),
        (LogOptions(segment_bytes=1, flush_seconds=3600), 1),
    ]
    for number, (options, most) in enumerate(limits):
        sizes.clear()
        write(tmp_path / str(number), range(5), options=options)
        assert (sum(sizes), max(sizes)) == (5, most)
        assert_holds(tmp_path / str(number), range(5))


def test_threads_append_and_flush_at_once(tmp_path):
    refused = []

    def work(log, worker):
        for number in range(40):
            try:
                log.append(f"e{number}", [episode(number)])
            except ValueError:
                refused.append(number)
            if number % 10 == worker:
                log.flush()

    options = LogOptions(segment_episodes=3, max_pending_bytes=20_000)
    with TrajectoryLog.open(tmp_path, options=options) as log:
        threads = [threading.Thread(target=work, args=(log, n)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(log) == 40
    assert len(refused) == 3 * 40
    assert sorted(one.episode for one in read(tmp_path)) == sorted(f"e{n}" for n in range(40))


def test_what_is_counted_is_right_while_a_thread_writes(tmp_path):
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


def test_of_two_that_append_an_episode_at_once_one_is_refused(tmp_path):
    class Rival(list):
        def __iter__(self):
            if "x" not in log:
                log.append("x", [episode(0)])
            return super().__iter__()

    with TrajectoryLog.open(tmp_path) as log:
        with pytest.raises(ValueError, match="episode 'x' is in the log already"):
            log.append("x", [Trajectory("x", [Turn(Rival([1]), [2], [0.0])])])
        assert (len(log), log.num_trajectories, log.num_pending) == (1, 1, 1)


def test_a_log_is_closed_once_and_then_takes_nothing(tmp_path):
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


def test_a_failure_that_still_waits_is_replaced_by_a_success(tmp_path):
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


def test_an_episode_that_a_file_cannot_hold_is_refused_and_harms_no_other(tmp_path, monkeypatch):
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


def test_ids_and_groups_count_among_what_waits(tmp_path):
    options = LogOptions(max_pending_bytes=1 << 20, flush_seconds=3600)
    with TrajectoryLog.open(tmp_path, options=options) as log:
        for number in range(4):
            log.append(f"e{number}", [Trajectory("x" * (1 << 20), [turn()])])
        wait_until(lambda: not log.num_pending)


def test_an_array_that_changes_while_it_is_read_is_refused(tmp_path, monkeypatch):
    ids, logprobs = np.array([5, 6], np.int32), np.zeros(2, np.float32)
    changes = {
        "completion_ids must be 0 or more, got -1 at index 1": (ids, -1),
        "completion_logprobs must be finite float32, got nan at index 1": (logprobs, np.nan),
        "completion_logprobs must be finite float32, got -inf at index 1": (logprobs, -np.inf),
    }
    with TrajectoryLog.open(tmp_path) as log:
        for message, (array, value) in changes.items():

            def validate_turns(*values, array=array, value=value):
                intake = chains.validate_turns(*values)
                array[1] = value
                return intake

            with monkeypatch.context() as patched:
                patched.setattr(trajectory_arrays, "validate_turns", validate_turns)
                with pytest.raises(ValueError, match=f"^trajectory 'a', turn 0: {message}$"):
                    log.append("a", [Trajectory("a", [Turn([1], ids, logprobs)])])
            ids[1], logprobs[1] = 6, 0
        assert (len(log), log.num_pending) == (0, 0)


@pytest.mark.parametrize("fails", ["later", "never"])
def test_a_number_that_is_another_at_each_look_is_refused_or_kept_as_it_was(tmp_path, fails):
    class Fickle(int):
        looks = 0

        def __index__(self):
            type(self).looks += 1
            if fails == "later" and type(self).looks % 2:
                raise ValueError("not now")
            return 7

    with TrajectoryLog.open(tmp_path) as log:
        for number in range(6):
            try:
                log.append(f"e{number}", [Trajectory("a", [Turn([1, Fickle(7)], [2], [0.0])])])
            except (TypeError, ValueError) as error:
                assert "'a'" in str(error) or f"'e{number}'" in str(error)  # noqa: PT017
    for logged in read(tmp_path):
        assert logged.trajectories[0].turns[0] == Turn([1, 7], [2], [0.0])


@pytest.mark.attack
def test_arrays_that_threads_write_to_meanwhile_leave_no_bad_number(tmp_path, tries):
    ids, logprobs = np.arange(2000, dtype=np.int32), np.zeros(1000, np.float32)
    ids[-1000:] = 7
    done = threading.Event()

    def write_to_them():
        while not done.is_set():
            ids[1500], logprobs[500] = -3, np.nan
            ids[1500], logprobs[500] = 7, 0.0

    writing = threading.Thread(target=write_to_them)
    writing.start()
    refused = 0
    try:
        with TrajectoryLog.open(tmp_path) as log:
            for number in range(tries(300) * 3):
                try:
                    log.append(str(number), [Trajectory("a", [Turn(ids, ids[1000:], logprobs)])])
                except ValueError:
                    refused += 1
    finally:
        done.set()
        writing.join()
    logged = read(tmp_path)
    assert len(logged) + refused == tries(300) * 3
    for one in logged:
        (only,) = one.trajectories[0].turns
        assert min(only.prompt_ids.min(), only.completion_ids.min()) >= 0
        assert np.isfinite(only.completion_logprobs).all()


def test_the_benchmark_runs(tmp_path, monkeypatch, capsys):
    options = [
        "--episodes",
        "20",
        "--tokens",
        "64",
        "--flush-every",
        "5",
        "--folder",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["trajectory_log", *options])
    benchmark.main()
    assert capsys.readouterr().out.count(" s of the processor") == 4


def test_a_log_that_is_forgotten_is_closed(tmp_path):
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
