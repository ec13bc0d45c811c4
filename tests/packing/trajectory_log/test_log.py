"""A log returns what was appended, bit for bit and once."""

import os
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from benchmarks import trajectory_log as benchmark
from tests.packing.trajectory_log.log_cases import append, assert_holds, begin, read, turn, write
from trajpack import TokenField, Trajectory, TrajectoryBuffer, Turn, pack
from trajpack.packing.trajectory_log import log as trajectory_log, records as log_records
from trajpack.packing.trajectory_log.log import TrajectoryLog
from trajpack.packing.types import VersionSpan
from trajpack.testing import assert_batches_equal, trajectory_lists

SMALLEST = 2.0**-149
DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
    torch.float8_e4m3fn, torch.float64, torch.complex64,
]  # fmt: skip
GOOD = Trajectory("good", [turn()])


def through(folder, trajectories, fields=()):
    """Log each trajectory as an episode, and check all that comes back against the originals."""
    with begin(folder, fields=fields) as log:
        for number, trajectory in enumerate(trajectories):
            log.append(str(number), [trajectory])
    replayed = [trajectory for logged in read(folder) for trajectory in logged.trajectories]
    for layout in ("merged", "turns"):
        expected = pack(trajectories, layout, "cpu", fields=fields)
        assert_batches_equal(pack(replayed, layout, "cpu", fields=fields), expected)
    return replayed


@given(st.lists(trajectory_lists(2), max_size=3))
def test_replay_returns_the_appended_episodes(tmp_path_factory, episodes):
    folder = tmp_path_factory.mktemp("log")
    with begin(folder, flush_episodes=2) as log:
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
    originals = [
        Trajectory("\ud800", [first, second], "", 0.1, -(2**63), 2**63 - 1),
        Trajectory("", [second], None, -0.0),
        Trajectory("line\nbreak", [second], "\udfff\0"),
    ]
    replayed = through(tmp_path, originals)
    assert replayed == originals
    begun, ended = replayed[0].turns
    assert begun.completion_logprobs.tobytes() == logprobs.tobytes()
    assert (begun.prompt_ids.dtype, begun.completion_logprobs.dtype) == (np.int32, np.float32)
    assert begun.prompt_ids.flags.writeable
    assert begun.version_spans == spans
    assert np.signbit([begun.reward, replayed[1].turn_discount]).all()
    assert (ended.reward, ended.version_start, ended.version_end) == (5e-324, 1, 2)
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
    for back in (*replayed[0].turns, *replayed[1].turns):
        assert torch.as_tensor(back.fields[field.name]).dtype == dtype


def test_fields_are_those_the_log_was_begun_with(tmp_path):
    field = TokenField("v", torch.float32, fill=float("nan"))
    write(tmp_path, fields=[field])
    with TrajectoryLog.open(tmp_path, fields=[field]) as log:
        assert [declared.as_json() for declared in log.fields] == [field.as_json()]
        with pytest.raises(ValueError, match=r"turn 0: fields must be those declared, \['v'\]"):
            log.append("a", [GOOD])
        assert "a" not in log
        with pytest.raises(ValueError, match=r"begun with fields \['v'\], got \[\]"):
            log.fill(TrajectoryBuffer("cpu"))
    with pytest.raises(ValueError, match=r"begun with fields \['v'\], got \['v'\]; names, dtypes"):
        TrajectoryLog.open(tmp_path, fields=[TokenField("v", torch.float64)], mode="read")
    with pytest.raises(ValueError, match=r"begun with fields \['v'\], got \[\]"):
        TrajectoryLog.open(tmp_path, fields=[])


@pytest.mark.parametrize("is_pending", [True, False])
def test_an_episode_is_logged_once_unless_it_failed(tmp_path, is_pending):
    with begin(tmp_path) as log:
        log.append("lost", [], error="no\ud800thing" * 1000)
        log.append("good", [GOOD])
        log.append("late", [], error="timeout")
        assert (log.failed, log.finished) == ({"lost", "late"}, {"good"})
        if not is_pending:
            log.flush()
        log.append("late", [GOOD])
        assert (len(log), log.num_trajectories, log.num_turns) == (3, 2, 2)
        for name in ("good", "late"):
            for error in (None, "again"):
                with pytest.raises(ValueError, match=f"episode '{name}' is in the log already"):
                    log.append(name, [], error=error)
    for _ in range(2):
        with TrajectoryLog.open(tmp_path) as log:
            assert (log.failed, log.finished) == ({"lost"}, {"good", "late"})
            assert log.episodes == {"lost", "good", "late"}
            assert ("late" in log, "other" in log, len(log)) == (True, False, 3)
            with pytest.raises(ValueError, match="episode 'late' is in the log already"):
                log.append("late", [])
            replayed = [(back.episode, back.error, len(back.trajectories)) for back in log.replay()]
    reason = ("no\ud800thing" * 1000)[:2000]
    assert replayed == [("lost", reason, 0), ("good", None, 1), ("late", None, 1)]


NOT_FINITE = Trajectory("b", [turn(), Turn([1], [2], [float("nan")])])
NEGATIVE = Trajectory("c", [Turn([1], [-2], [0.0])])
SEVERAL = "episode 'x': trajectories must be a sequence of Trajectory, got"


@pytest.mark.parametrize(
    ("name", "trajectories", "error", "words"),
    [
        ("x", [GOOD, NOT_FINITE], None, "'b', turn 1: completion_logprobs must be finite"),
        ("x", [GOOD, NEGATIVE], None, "'c', turn 0: completion_ids must be 0 or more, got -2"),
        ("x", [GOOD, Trajectory("d", [])], None, "'d': must have at least one turn"),
        ("x", [GOOD], "late", "episode 'x' failed, but comes with 1 trajectories"),
        ("x", None, None, f"{SEVERAL} NoneType"),
        ("x", GOOD, None, f"{SEVERAL} Trajectory"),
        (1, [GOOD], None, "episode must be a str, got int"),
        ("x", [], ValueError(), "error must be a str or None, got ValueError"),
    ],
)
def test_a_refused_episode_leaves_no_trace(tmp_path, name, trajectories, error, words):
    with begin(tmp_path) as log:
        with pytest.raises((TypeError, ValueError), match=words):
            log.append(name, trajectories, error=error)
        assert (len(log), log.num_pending, log.num_tokens) == (0, 0, 0)
    assert read(tmp_path) == []


def test_an_episode_that_is_too_large_is_refused_alone(tmp_path, monkeypatch):
    """Its ids and groups count."""
    with begin(tmp_path) as log:
        monkeypatch.setattr(log_records, "MAX_EPISODE_BYTES", 5000)
        for trajectory in (
            Trajectory("a", [Turn([1] * 2000, [2], [-0.5])]),
            Trajectory("a" * 5000, [turn()]),
            Trajectory("a", [turn()], "g" * 5000),
        ):
            with pytest.raises(
                ValueError, match=r"episode 'big' needs \d,\d{3} bytes with its ids"
            ):
                log.append("big", [trajectory])
        assert (len(log), log.num_pending) == (0, 0)
        append(log, 0)
    assert_holds(tmp_path, [0])


def test_append_flushes_at_a_limit(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(trajectory_log.time, "monotonic", lambda: now[0])
    with begin(tmp_path / "episodes", flush_episodes=2) as log:
        append(log, 0)
        assert log.num_pending == 1
        append(log, 1)
        assert log.num_pending == 0
        assert_holds(tmp_path / "episodes", [0, 1])  # while the writer is at work
        append(log, 2)
    with begin(tmp_path / "seconds", flush_seconds=5.0) as log:
        for seconds, pending in ((4.0, 1), (5.0, 0), (9.0, 1), (10.5, 0), (12.0, 1)):
            now[0] = seconds
            append(log, int(seconds))
            assert log.num_pending == pending
    monkeypatch.setattr(trajectory_log, "_FLUSH_BYTES", 10_000)
    with begin(tmp_path / "bytes") as log:
        for name, pending in (("a", 1), ("b", 0)):
            log.append(name, [Trajectory("x" * 6000, [turn()])])
            assert log.num_pending == pending


def test_replay_yields_what_was_durable_at_open_and_what_was_flushed_since(tmp_path):
    with begin(tmp_path) as log:
        append(log, 0)
        log.flush()
        reader = TrajectoryLog.open(tmp_path, mode="read")
        append(log, 1)
        assert [logged.episode for logged in log.replay()] == ["e0"]
        log.flush()
        assert [logged.episode for logged in log.replay()] == ["e0", "e1"]
        assert ([logged.episode for logged in reader.replay()], len(reader)) == (["e0"], 1)
    assert [logged.episode for logged in log.replay()] == ["e0", "e1"]  # also when it is closed


def test_a_log_that_is_closed_or_read_refuses_episodes(tmp_path):
    log = begin(tmp_path)
    append(log, 0)
    log.close()
    log.close()
    reader = TrajectoryLog.open(tmp_path, mode="read")
    for refusing, words in ((log, "is closed"), (reader, "is opened for reading")):
        with pytest.raises(ValueError, match=words):
            append(refusing, 1)
        with pytest.raises(ValueError, match=words):
            refusing.flush()
    assert_holds(tmp_path, [0])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mode": "w"}, ValueError, "mode must be 'append' or 'read', got 'w'"),
        ({"damaged": "no"}, ValueError, "damaged must be 'raise' or 'skip', got 'no'"),
        ({"flush_episodes": 0}, ValueError, "flush_episodes must be at least 1, got 0"),
        ({"flush_episodes": "1"}, TypeError, "flush_episodes must be an integer"),
        ({"flush_seconds": 0}, ValueError, "flush_seconds must be more than 0, got 0"),
        ({"flush_seconds": "1"}, TypeError, "flush_seconds must be a"),
        ({"mode": "read"}, FileNotFoundError, "holds no trajectory log: it has no log.sqlite"),
        ({}, ValueError, r"neither empty nor a trajectory log.* 'thesis\.txt'"),
    ],
)
def test_options_and_folders_that_are_refused(tmp_path, options, error, words):
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(error, match=words):
        TrajectoryLog.open(tmp_path, **options)


def test_files_of_others_may_lie_in_a_folder_that_is_a_log(tmp_path):
    for left in ("log.sqlite.tmp", "writer.lock"):  # by a creation that was interrupted
        (tmp_path / left).touch()
    write(tmp_path, [0])
    assert not (tmp_path / "log.sqlite.tmp").exists()
    (tmp_path / "rollout.json").write_text("mine")
    write(tmp_path, [1])
    assert_holds(tmp_path, [0, 1])
    assert (tmp_path / "rollout.json").read_text() == "mine"


def test_a_relative_path_means_the_folder_that_it_named_when_the_log_was_opened(
    tmp_path, monkeypatch
):
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    with begin("log") as log:
        append(log, 0)
        monkeypatch.chdir(tmp_path)
        log.flush()
        reader = TrajectoryLog.open(os.path.join("a", "log"), mode="read")
        monkeypatch.chdir("/")
        assert [logged.episode for logged in reader.replay()] == ["e0"]
        append(log, 1)
    assert_holds(tmp_path / "a" / "log", range(2))
    assert not (tmp_path / "log").exists()


def test_a_path_may_be_a_link_or_hold_characters_that_are_special_in_urls(tmp_path):
    folder = tmp_path / "a?b#c%41 ü;mode=ro&\udcff'"
    write(folder, [0])
    (tmp_path / "link").symlink_to(folder)
    write(tmp_path / "link", [1])
    assert_holds(folder, range(2))


def test_the_benchmark_runs(tmp_path, monkeypatch, capsys):
    options = f"--episodes 20 --tokens 64 --flush-every 5 --folder {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["trajectory_log", *options.split()])
    benchmark.main()
    assert capsys.readouterr().out.count(" s of the processor") == 4
