"""What the buffer refuses, how it says so, and that nothing of it stays behind."""

import dataclasses

import numpy as np
import pytest
import torch

from trajpack import Trajectory, TrajectoryBuffer, Turn, pack
from trajpack.packing.buffer import buffer as buffer_module
from trajpack.packing.buffer.staging import Staging
from trajpack.packing.buffer.tables import GrowingArray
from trajpack.packing.types import VersionSpan

GOOD = Turn([1, 2], [3, 4], [-0.5, -0.25])
NAN, INF = float("nan"), float("inf")

REFUSED = [
    ({"prompt_ids": []}, ValueError, "prompt_ids must not be empty"),
    ({"prompt_ids": [[1]]}, TypeError, r"prompt_ids must be integers, got \[1\] at index 0"),
    ({"prompt_ids": np.ones((1, 2), int)}, ValueError, r"one dimension, got shape \[1, 2\]"),
    ({"prompt_ids": [1, 2.5]}, TypeError, "prompt_ids must be integers, got 2.5 at index 1"),
    ({"prompt_ids": [1, None]}, TypeError, "prompt_ids must be integers, got None at index 1"),
    ({"prompt_ids": np.array([1.0])}, TypeError, "prompt_ids must be integers, got float64"),
    ({"prompt_ids": torch.tensor([1.0])}, TypeError, "prompt_ids must be integers, got float32"),
    ({"prompt_ids": np.array([True])}, TypeError, "prompt_ids must be integers, got bool"),
    ({"prompt_ids": [1, True]}, TypeError, "prompt_ids must be integers, got True at index 1"),
    ({"prompt_ids": [0, np.False_]}, TypeError, "must be integers, got np.False_ at index 1"),
    ({"completion_logprobs": [0.0, True]}, TypeError, "must be floats, got True at index 1"),
    (
        {"completion_logprobs": [0.0, np.True_]},
        TypeError,
        "must be floats, got np.True_ at index 1",
    ),
    ({"completion_logprobs": np.ones(2, bool)}, TypeError, "must be floats, got bool"),
    ({"reward": True}, TypeError, "reward must be a number, got bool"),
    ({"reward": np.True_}, TypeError, "reward must be a number, got bool"),
    ({"prompt_ids": "12"}, TypeError, "prompt_ids must be an array or a sequence, got str"),
    ({"prompt_ids": b"12"}, TypeError, "prompt_ids must be an array or a sequence, got bytes"),
    ({"prompt_ids": None}, TypeError, "prompt_ids must be an array or a sequence, got NoneType"),
    ({"prompt_ids": [1, -2]}, ValueError, "prompt_ids must be 0 or more, got -2 at index 1"),
    ({"prompt_ids": [2**31]}, ValueError, "prompt_ids must be in .*, got 2147483648 at index 0"),
    ({"prompt_ids": [2**70]}, ValueError, "prompt_ids must be in .*, got 11805"),
    ({"prompt_ids": np.array([2**31])}, ValueError, "must fit int32, got 2147483648 at index 0"),
    ({"prompt_ids": np.array([2**64 - 1], np.uint64)}, ValueError, "must fit int32, got 18446"),
    ({"completion_ids": [3, -1]}, ValueError, "completion_ids must be 0 or more, got -1"),
    ({"completion_ids": [3]}, ValueError, r"one entry per completion token, got 2 for 1 token"),
    ({"completion_logprobs": [0.0]}, ValueError, r"per completion token, got 1 for 2 token"),
    ({"completion_logprobs": [0.0, NAN]}, ValueError, "must be finite float32, got nan at index 1"),
    ({"completion_logprobs": [-INF, 0]}, ValueError, "must be finite float32, got -inf at index 0"),
    ({"completion_logprobs": np.array([-1e300, 0])}, ValueError, "must be finite float32"),
    ({"completion_logprobs": [0.0, None]}, TypeError, "must be floats, got None at index 1"),
    ({"completion_logprobs": np.array(["a", "b"])}, TypeError, "must be floats, got <U1"),
    ({"completion_logprobs": np.zeros((2, 1))}, ValueError, r"one dimension, got shape \[2, 1\]"),
    ({"reward": NAN}, ValueError, "reward must be finite float32, got nan"),
    ({"reward": INF}, ValueError, "reward must be finite float32, got inf"),
    ({"reward": 1e39}, ValueError, "reward must be finite float32, got 1e"),
    ({"reward": 10**400}, ValueError, "reward must be finite float32, got inf"),
    ({"reward": np.ones(2)}, TypeError, "reward must be a number, got array"),
    ({"reward": torch.ones(2)}, TypeError, "reward must be a number, got tensor"),
    ({"reward": "1"}, TypeError, "reward must be a number, got str"),
    ({"reward": None}, TypeError, "reward must be a number, got NoneType"),
    ({"truncated": 1}, TypeError, "truncated must be a bool, got int"),
    ({"version_start": 2, "version_end": 1}, ValueError, "versions must not run backwards"),
    ({"version_start": -1}, ValueError, r"versions must be in \[0, 2147483647\], got -1 to 0"),
    ({"version_end": 2**31}, ValueError, r"versions must be in \[0, 2147483647\]"),
    ({"version_start": 0.5}, TypeError, "version_start must be an integer, got float"),
    ({"version_start": torch.tensor(1.5)}, TypeError, "version_start must be an integer, got ten"),
    ({"prompt_ids": torch.ones(2, device="meta")}, TypeError, "prompt_ids cannot be read as an"),
    ({"prompt_ids": torch.eye(2).to_sparse()}, TypeError, "prompt_ids cannot be read as an array"),
    ({"prompt_ids": np.ma.array([1, 2])}, TypeError, "prompt_ids must not be a masked array"),
    ({"completion_logprobs": [-3e9, 10**400]}, ValueError, "must be finite float32, got 1000.* at"),
    ({"version_spans": [(1, 0, 1)]}, ValueError, "must cover 2 completion tokens, they cover 1"),
    ({"version_spans": [(1, 1, 2)]}, ValueError, r"got \[1, 2\) where a span from 0"),
    ({"version_spans": [(1, 0, 2), (2, 1, 2)]}, ValueError, r"got \[1, 2\) where a span from 2"),
    ({"version_spans": [(2, 0, 1), (1, 1, 2)]}, ValueError, "must not run backwards"),
    ({"version_spans": [(2, 0, 1), (1, 1, 2)], "version_end": 5}, ValueError, "not run backwards"),
    ({"version_spans": [(4, 0, 2)], "version_start": 3, "version_end": 4}, ValueError, "is 3"),
    ({"version_spans": [(4, 0)]}, TypeError, r"must be \(version, start, end\) triples, got"),
    ({"version_spans": [("4", 0, 2)]}, TypeError, "version_spans must be an integer, got str"),
]


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED)
def test_a_bad_turn_is_refused_by_name_and_leaves_nothing_behind(change, kind, message):
    buffer = TrajectoryBuffer()
    kept = Trajectory("kept", [GOOD])
    buffer.add(kept)
    before = buffer.num_bytes
    bad = dataclasses.replace(GOOD, **change)
    with pytest.raises(kind, match=rf"^trajectory 'it', turn 1: .*{message}"):
        buffer.add(Trajectory("it", [GOOD, bad]))
    assert buffer.num_bytes == before
    assert buffer.pack().unpack() == [kept]


@pytest.mark.parametrize(
    ("trajectory", "kind", "message"),
    [
        (Trajectory("it", []), ValueError, "'it': must have at least one turn, got none"),
        (Trajectory("it", [GOOD], task_id=2**70), ValueError, "'it': task_id must fit int64, got"),
        (Trajectory("it", [None]), TypeError, "'it', turn 0: expected a Turn, got NoneType"),
        (Trajectory(3, [GOOD]), TypeError, "trajectory id must be a str, got 3"),
        (Trajectory("it", [GOOD], group=3), TypeError, "'it': group must be a str or None, got 3"),
        (Trajectory("it", [GOOD], task_id="3"), TypeError, "'it': task_id must be an integer"),
        (Trajectory("it", [GOOD], turn_discount=NAN), ValueError, "'it': turn_discount must be fi"),
        (Trajectory("it", [GOOD], birth_time_ms=0.5), TypeError, "birth_time_ms must be an int"),
        (GOOD, TypeError, "expected a Trajectory, got Turn"),
    ],
)
def test_a_bad_trajectory_is_refused_by_name(trajectory, kind, message):
    buffer = TrajectoryBuffer()
    with pytest.raises(kind, match=message):
        buffer.add(trajectory)
    assert len(buffer) == buffer.num_bytes == 0


def test_turns_that_are_no_sequence_are_refused_by_name():
    with pytest.raises(TypeError, match="trajectory 'it': turns must be a sequence of turns"):
        Trajectory("it", None)


@pytest.mark.parametrize("step", range(7))
def test_a_trajectory_that_memory_runs_out_for_leaves_nothing_behind(monkeypatch, step):
    monkeypatch.setattr(buffer_module, "MOST_WAITING", 1)  # tables are worked out in every call
    buffer = TrajectoryBuffer()
    kept, lost, later = (Trajectory(name, [GOOD, GOOD]) for name in ("kept", "lost", "later"))
    buffer.add(kept)
    calls = iter(range(100))

    def failing(genuine):
        def call(*arguments, **options):
            if next(calls) == step:
                raise MemoryError
            return genuine(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "reserve", failing(Staging.reserve))
        patch.setattr(GrowingArray, "write", failing(GrowingArray.write))
        if step < 5:
            with pytest.raises(MemoryError):
                buffer.add(lost)
    buffer.add(later)
    assert buffer.pack().unpack() == [kept, later]
    assert buffer.num_tokens == buffer.pack().num_tokens


def test_one_bad_trajectory_of_many_leaves_nothing_of_the_call_behind():
    buffer = TrajectoryBuffer()
    good = [Trajectory(str(index), [GOOD]) for index in range(100)]
    bad = Trajectory("it", [dataclasses.replace(GOOD, completion_ids=[3, -1])])
    with pytest.raises(ValueError, match=r"^trajectory 'it', turn 0: completion_ids must be 0"):
        buffer.extend([*good, bad])
    assert len(buffer) == buffer.num_turns == buffer.num_tokens == 0
    buffer.extend(iter(good))
    assert buffer.pack().unpack() == good


def test_turns_are_equal_when_their_values_are():
    assert Turn([1], [2], [-0.1]) == Turn(np.array([1]), torch.tensor([2]), torch.tensor([-0.1]))
    assert Turn([1], [2], [-0.1]) == Turn([1], [2], np.array([-0.1], np.float64))
    assert Turn([1], [2], [-0.1]) != Turn([1], [2], [-0.2])
    assert Turn([1], [2], [-0.1]) != Turn([3], [2], [-0.1])
    assert Turn([1], [2], [-0.1]) != Turn([1], [2], [-0.1], reward=1.0)
    assert Turn([1], [2], [-0.1]) != Turn([1], [2], [-0.1], truncated=True)
    assert Turn([1], [2], [-0.1]) != "a turn"


def test_turns_are_equal_when_their_spans_say_the_same():
    def turn(spans=None, start=0, end=0):
        return Turn([1], [2, 3], [0.0, 0.0], 0.0, False, start, end, spans)

    assert turn([(3, 0, 2)]) == turn(None, 3, 3)
    assert turn([(3, 0, 1), (3, 1, 2)]) == turn([VersionSpan(3, 0, 2)], 3, 3)
    assert turn([(3, 0, 1), (3, 1, 1), (4, 1, 2)]) == turn([(3, 0, 1), (4, 1, 2)], 3, 4)
    assert turn([(3, 0, 1), (4, 1, 2)]) != turn(None, 3, 4)


def test_trajectories_compare_their_turns_whatever_sequence_holds_them():
    assert Trajectory("a", [GOOD]) == Trajectory("a", (GOOD,))
    assert Trajectory("a", [GOOD]) != Trajectory("b", [GOOD])


@pytest.mark.parametrize(
    "spans",
    [
        np.array([[3, 0, 1], [4, 1, 2]]),
        torch.tensor([[3, 0, 1], [4, 1, 2]]),
        ((np.int64(3), 0, 1), [4, 1, torch.tensor(2)]),
        (VersionSpan(3, 0, 1), np.array([4, 1, 2])),
    ],
)
def test_spans_are_equal_whatever_holds_them(spans):
    plain = dataclasses.replace(GOOD, version_spans=[(3, 0, 1), (4, 1, 2)])
    other = dataclasses.replace(GOOD, version_spans=np.array([[3, 0, 2]]))
    turn = dataclasses.replace(GOOD, version_spans=spans)
    assert (turn == plain) is (plain == turn) is (turn == turn) is True  # noqa: PLR0124
    assert (turn == other) is (other == turn) is (turn == GOOD) is False
    assert (Trajectory("a", [turn]) == Trajectory("a", [plain])) is True
    assert (Trajectory("a", [turn]) == Trajectory("a", [other])) is False
    trajectory = Trajectory("a", [turn, other])
    assert pack([trajectory]).unpack() == [trajectory]


@pytest.mark.parametrize(
    "change",
    [
        {"reward": np.float32(0.5)},
        {"reward": np.array([0.5])[0]},
        {"reward": torch.tensor(0.5)},
        {"truncated": np.False_, "reward": np.array(0.5)},
        {"version_start": np.int64(0), "version_end": torch.tensor(0), "reward": 0.5},
    ],
)
def test_numbers_of_other_kinds_compare_as_numbers(change):
    plain = dataclasses.replace(GOOD, reward=0.5)
    assert (dataclasses.replace(GOOD, **change) == plain) is True
    assert (dataclasses.replace(GOOD, **change) == GOOD) is False


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_ids": [[1], [2, 3]]},
        {"prompt_ids": "12"},
        {"prompt_ids": torch.ones(2, device="meta")},
        {"prompt_ids": torch.eye(2).to_sparse()},
        {"completion_logprobs": ["a"]},
        {"reward": np.ones(2)},
        {"reward": "a"},
        {"reward": 10**400},
        {"reward": None},
        {"truncated": np.ones(2)},
        {"version_spans": np.ones(3)},
        {"version_spans": np.ones((2, 3))},
        {"version_spans": [(1, 2)]},
        {"version_spans": 7},
        {"version_start": 0.5},
        {"fields": {"v": ["a"]}},
    ],
)
def test_turns_that_no_buffer_takes_can_be_compared(change):
    bad = dataclasses.replace(GOOD, **change)
    assert (bad == bad) is True  # noqa: PLR0124
    assert (bad == GOOD) is GOOD.__eq__(bad) is False
    assert (Trajectory("a", [bad]) == Trajectory("a", [GOOD])) is False
    assert bad in [GOOD, bad]
