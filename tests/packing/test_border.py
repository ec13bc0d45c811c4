"""What the buffer refuses, how it says so, that nothing of it stays behind, and what it takes."""

import collections
import copy
import dataclasses
import enum
import itertools
import pickle
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.packing.files.batch_files import seeded
from trajpack import TokenField, Trajectory, TrajectoryBuffer, Turn, pack
from trajpack.packing.buffer import take
from trajpack.packing.buffer.staging import Staging
from trajpack.packing.buffer.stored import Labels
from trajpack.packing.types import VersionSpan
from trajpack.testing import assert_batches_equal

GOOD = Turn([1, 2], [3, 4], [-0.5, -0.25])
KEPT = Trajectory("kept", [GOOD, Turn([1, 2, 3, 4, 5], [6], [-1.0])])
NAN, INF = float("nan"), float("inf")
IDS, LOGPROBS = "prompt_ids", "completion_logprobs"


class Listed(Sequence):
    """A sequence that is neither list nor array."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        return self.values[index]


class Number(enum.IntEnum):
    ONE = 1


def freed(dtype):
    tensor = torch.zeros(2, dtype=dtype)
    tensor.untyped_storage().resize_(4)
    return tensor


REFUSED = [
    ({IDS: []}, ValueError, "prompt_ids must not be empty"),
    ({IDS: [[1]]}, TypeError, r"prompt_ids must be integers, got \[1\] at index 0"),
    ({IDS: np.ones((1, 2), int)}, ValueError, r"one dimension, got shape \[1, 2\]"),
    ({IDS: np.array(3)}, ValueError, r"one dimension, got shape \[\]"),
    ({IDS: torch.tensor(3)}, ValueError, r"one dimension, got shape \[\]"),
    ({IDS: memoryview(b"123456").cast("B", (2, 3))}, ValueError, r"dimension, got shape \[2, 3\]"),
    ({IDS: [1, 2.5]}, TypeError, "prompt_ids must be integers, got 2.5 at index 1"),
    ({IDS: [1, None]}, TypeError, "prompt_ids must be integers, got None at index 1"),
    ({IDS: np.array([1.0])}, TypeError, "prompt_ids must be integers, got float64"),
    ({IDS: torch.tensor([1.0])}, TypeError, "prompt_ids must be integers, got float32"),
    ({IDS: torch.tensor([1 + 2j])}, TypeError, "must be integers, got complex64"),
    ({IDS: np.array([1, "a"], object)}, TypeError, "must be integers, got object"),
    ({IDS: memoryview(array("f", [1.0]))}, TypeError, "must be integers, got float32"),
    ({IDS: np.array([True])}, TypeError, "prompt_ids must be integers, got bool"),
    ({IDS: "12"}, TypeError, "prompt_ids must be an array or a sequence, got str"),
    ({IDS: b"12"}, TypeError, "prompt_ids must be an array or a sequence, got bytes"),
    ({IDS: None}, TypeError, "prompt_ids must be an array or a sequence, got NoneType"),
    ({IDS: {1, 2}}, TypeError, "must be an array or a sequence, got set"),
    ({IDS: iter([1])}, TypeError, "must be an array or a sequence, got list_iterator"),
    ({IDS: range(10**12)}, ValueError, "must have at most 2147483647 entries, got 1000000000000"),
    ({IDS: torch.ones(2, device="meta")}, TypeError, "prompt_ids cannot be read as an"),
    ({IDS: torch.eye(2).to_sparse()}, TypeError, "prompt_ids cannot be read as an array"),
    ({IDS: freed(torch.int32)}, TypeError, "cannot be read as an array: .*memory was freed"),
    ({IDS: np.ma.array([1, 2])}, TypeError, "prompt_ids must not be a masked array"),
    ({IDS: [1, -2]}, ValueError, "prompt_ids must be 0 or more, got -2 at index 1"),
    ({IDS: np.array([1, -2])}, ValueError, "prompt_ids must be 0 or more, got -2 at index 1"),
    ({IDS: [2**31]}, ValueError, "prompt_ids must be in .*, got 2147483648 at index 0"),
    ({IDS: [2**70]}, ValueError, "prompt_ids must be in .*, got 11805"),
    ({IDS: np.array([2**31])}, ValueError, "must fit int32, got 2147483648 at index 0"),
    ({IDS: np.array([2**64 - 1], np.uint64)}, ValueError, "must fit int32, got 18446"),
    ({"completion_ids": [3, -1]}, ValueError, "completion_ids must be 0 or more, got -1"),
    ({"completion_ids": [3]}, ValueError, r"one entry per completion token, got 2 for 1 token"),
    ({LOGPROBS: [0.0]}, ValueError, r"per completion token, got 1 for 2 token"),
    ({LOGPROBS: [0.0, NAN]}, ValueError, "must be finite float32, got nan at index 1"),
    ({LOGPROBS: [-INF, 0]}, ValueError, "must be finite float32, got -inf at index 0"),
    ({LOGPROBS: [-3e9, 10**400]}, ValueError, "must be finite float32, got 1000.* at"),
    ({LOGPROBS: np.array([-1e300, 0])}, ValueError, "must be finite float32"),
    ({LOGPROBS: [0.0, None]}, TypeError, "must be floats, got None at index 1"),
    ({LOGPROBS: np.array(["a", "b"])}, TypeError, "must be floats, got <U1"),
    ({LOGPROBS: np.ones(2, bool)}, TypeError, "must be floats, got bool"),
    ({LOGPROBS: np.zeros((2, 1))}, ValueError, r"one dimension, got shape \[2, 1\]"),
    ({"reward": NAN}, ValueError, "reward must be finite float32, got nan"),
    ({"reward": 1e39}, ValueError, "reward must be finite float32, got 1e"),
    ({"reward": 10**400}, ValueError, "reward must be finite float32, got inf"),
    ({"reward": np.ones(2)}, TypeError, "reward must be a number, got array"),
    ({"reward": torch.ones(2)}, TypeError, "reward must be a number, got tensor"),
    ({"reward": "1"}, TypeError, "reward must be a number, got str"),
    ({"reward": None}, TypeError, "reward must be a number, got NoneType"),
    ({"reward": True}, TypeError, "reward must be a number, got bool"),
    ({"reward": torch.tensor(True)}, TypeError, "reward must be a number, got Tensor"),
    ({"truncated": 1}, TypeError, "truncated must be a bool, got int"),
    ({"version_start": 2, "version_end": 1}, ValueError, "versions must not run backwards"),
    ({"version_start": -1}, ValueError, r"versions must be in \[0, 2147483647\], got -1 to 0"),
    ({"version_end": 2**31}, ValueError, r"versions must be in \[0, 2147483647\]"),
    ({"version_start": 0.5}, TypeError, "version_start must be an integer, got float"),
    ({"version_start": torch.tensor(1.5)}, TypeError, "version_start must be an integer, got ten"),
    ({"version_end": np.True_}, TypeError, "version_end must be an integer, got bool"),
    ({"version_spans": [(1, 0, 1)]}, ValueError, "must cover 2 completion tokens, they cover 1"),
    ({"version_spans": [(1, 1, 2)]}, ValueError, r"got \[1, 2\) where a span from 0"),
    ({"version_spans": [(1, 0, 2), (2, 1, 2)]}, ValueError, r"got \[1, 2\) where a span from 2"),
    ({"version_spans": [(2, 0, 1), (1, 1, 2)]}, ValueError, "must not run backwards"),
    ({"version_spans": [(2, 0, 1), (1, 1, 2)], "version_end": 5}, ValueError, "not run backwards"),
    ({"version_spans": [(4, 0, 2)], "version_start": 3, "version_end": 4}, ValueError, "is 3"),
    ({"version_spans": [(4, 0)]}, TypeError, r"must be \(version, start, end\) triples, got"),
    ({"version_spans": [7]}, TypeError, "must be .* triples, got 7"),
    ({"version_spans": 7}, TypeError, "version_spans must be a sequence, got int"),
    ({"version_spans": [("4", 0, 2)]}, TypeError, "version_spans must be an integer, got str"),
    ({"version_spans": [(0, 0, True), (0, True, 2)]}, TypeError, "must be an integer, got bool"),
    ({"fields": [("v", [1])]}, TypeError, "fields must be a mapping, got list"),
]


def refused(trajectories, kind, message):
    """Check that a buffer refuses them by name, and is then as it was before."""
    buffer = TrajectoryBuffer(device="cpu")
    buffer.add(KEPT)
    before = buffer.num_bytes
    with pytest.raises(kind, match=message):
        buffer.extend(trajectories)
    assert (len(buffer), buffer.num_bytes) == (1, before)
    buffer.add(KEPT)
    assert buffer.pack().unpack() == [KEPT, KEPT]


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED)
def test_a_bad_turn_is_refused_by_name_and_leaves_nothing_behind(change, kind, message):
    bad = dataclasses.replace(GOOD, **change)
    refused([Trajectory("it", [GOOD, bad])], kind, rf"^trajectory 'it', turn 1: .*{message}")
    alone = [KEPT, Trajectory("it", [bad]), KEPT]
    refused(alone, kind, rf"^trajectory 'it', turn 0: .*{message}")


@pytest.mark.parametrize(
    ("trajectory", "kind", "message"),
    [
        (Trajectory("it", []), ValueError, "'it': must have at least one turn, got none"),
        (Trajectory("it", [GOOD], task_id=2**70), ValueError, "'it': task_id must fit int64, got"),
        (Trajectory("it", [None]), TypeError, "'it', turn 0: expected a Turn, got NoneType"),
        (Trajectory(3, [GOOD]), TypeError, "trajectory id must be a str, got 3"),
        (Trajectory("it", [GOOD], group=3), TypeError, "'it': group must be a str or None, got 3"),
        (Trajectory("it", [GOOD], task_id="3"), TypeError, "'it': task_id must be an integer"),
        (Trajectory("it", [GOOD], task_id=True), TypeError, "'it': task_id must be an integer"),
        (Trajectory("it", [GOOD], turn_discount=NAN), ValueError, "'it': turn_discount must be fi"),
        (Trajectory("it", [GOOD], turn_discount=True), TypeError, "'it': turn_discount must be"),
        (Trajectory("it", [GOOD], birth_time_ms=0.5), TypeError, "birth_time_ms must be an int"),
        (GOOD, TypeError, "expected a Trajectory, got Turn"),
    ],
)  # fmt: skip
def test_a_bad_trajectory_is_refused_by_name(trajectory, kind, message):
    refused([trajectory], kind, message)


def test_turns_that_are_no_sequence_are_refused_by_name():
    with pytest.raises(TypeError, match="trajectory 'it': turns must be a sequence of turns"):
        Trajectory("it", None)


@pytest.mark.parametrize("container", [list, tuple, Listed, collections.deque])
@pytest.mark.parametrize("wrong", [True, np.False_, torch.tensor(True), np.array(True), "1"])
@pytest.mark.parametrize("size", [3, 255, 256, 8193, 20_000])
def test_one_wrong_number_of_many_is_named_by_its_place(container, wrong, size):
    """Tiny lists are converted together: those of other trajectories stand before and behind."""
    for place in (0, size - 1):
        for field in (IDS, "completion_ids", LOGPROBS):
            arrays = {name: [0, 1, 2] * size for name in (IDS, "completion_ids")}
            arrays |= {LOGPROBS: [0.0, -1.0, 1.0] * size}
            arrays = {name: values[:size] for name, values in arrays.items()}
            arrays[field][place] = wrong
            turn = Turn(**{name: container(values) for name, values in arrays.items()})
            kinds = "floats" if field == LOGPROBS else "integers"
            for number, turns in enumerate(([turn], [GOOD, turn])):
                call = [KEPT, Trajectory("a", [GOOD]), Trajectory("it", turns), KEPT]
                place_of_turn = f"^trajectory 'it', turn {number}: {field}"
                with pytest.raises(
                    TypeError, match=f"{place_of_turn} must be {kinds}, .* {place}$"
                ):
                    pack(call)


def test_numbers_of_other_kinds_are_taken():
    ids = [0, np.int64(0), Number.ONE, torch.tensor(1), np.uint8(3), 1]
    logprobs = [0, 0.0, np.float64(0.0), torch.tensor(0.0), Number.ONE, np.float32(-0.5)]
    expected = Turn([0, 0, 1, 1, 3, 1], [0, 0, 1, 1, 3, 1], [0, 0, 0, 0, 1, -0.5])
    for container in (list, tuple, Listed, collections.deque):
        turn = Turn(container(ids), container(ids), container(logprobs))
        assert pack([Trajectory("a", [turn])]).unpack()[0].turns[0] == expected
    views = Turn(memoryview(array("i", [1, 2])), memoryview(array("q", [3])), array("d", [-0.5]))
    assert pack([Trajectory("a", [views])]).unpack()[0].turns[0] == Turn([1, 2], [3], [-0.5])
    empty = Turn(range(1, 3), np.array([]), [])
    assert pack([Trajectory("a", [empty])]).unpack()[0].turns[0] == Turn([1, 2], [], [])


@pytest.mark.usefixtures("either_take")
@pytest.mark.parametrize("step", [(Staging, "reserve"), (Labels, "extend")])
def test_a_trajectory_that_memory_runs_out_for_leaves_nothing_behind(monkeypatch, step):
    monkeypatch.setattr(take, "_in_c", take._in_c if step[0] is Staging else None)
    buffer = TrajectoryBuffer()
    kept, later = (Trajectory(name, [GOOD, GOOD]) for name in ("kept", "later"))
    buffer.add(kept)

    def failing(*arguments):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(*step, failing)
        with pytest.raises(MemoryError):
            buffer.add(Trajectory("lost", [GOOD] * 9))
    assert len(buffer) == 1
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


@pytest.mark.parametrize(
    ("fill", "dtype"), [(1e300, torch.float32), (-1e30, torch.float16), (1e300, torch.complex64)]
)
def test_a_fill_that_becomes_infinite_is_refused(fill, dtype):
    with pytest.raises(ValueError, match=f"field 'v': fill must fit {dtype}, got -?1e"):
        TokenField("v", dtype, fill=fill)
    assert TokenField("v", dtype, fill=INF).fill == INF


def odd_numbers(rng, size, *, real):
    """Return numbers in any container, now and then one that is wrong."""
    values = (-rng.random(size) if real else rng.integers(0, 9, size)).tolist()
    odd = [-1, 2**31, 2**70, 0.5, NAN, INF, None, "1", True, np.bool_(0), [], np.ones(2), 10**400]
    if size and rng.random() < 0.3:
        values[rng.integers(size)] = odd[rng.integers(len(odd))]
    makers = [list, tuple, Listed, np.array, torch.tensor, lambda v: np.array(v, object)]
    makers += [lambda v: array("d" if real else "q", v), lambda v: np.array([v]), iter]
    try:
        return makers[rng.choice(len(makers), p=[0.4, *[0.1] * 5, 0.05, 0.025, 0.025])](values)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return values  # of which neither numpy nor torch makes an array


def odd_turn(rng):
    begin, size = rng.integers(1, 6), rng.integers(0, 5)
    odd = [-1, 0, 1, 2, 2**31, 2**70, 0.5, NAN, None, "1", True, np.int32(1)]
    odd += [np.ones(2), torch.tensor(1), [], (1, 2)]
    given = {
        IDS: odd_numbers(rng, begin, real=False),
        "completion_ids": odd_numbers(rng, size, real=False),
        LOGPROBS: odd_numbers(rng, size, real=True),
    }
    for name in ("reward", "truncated", "version_start", "version_end"):
        if rng.random() < 0.1:
            given[name] = odd[rng.integers(len(odd))]
    if rng.random() < 0.2:
        spans = [[1, 0, int(size)], [2, int(size), int(size)], [0, 0, 1], 3, None]
        drawn = [spans[rng.integers(len(spans))] for _ in range(rng.integers(0, 3))]
        given["version_spans"] = np.array([[1, 0, size]]) if rng.random() < 0.3 else drawn
    if rng.random() < 0.05:
        given["fields"] = odd[rng.integers(len(odd))]
    return Turn(**given)


@pytest.mark.usefixtures("either_take")
@pytest.mark.attack
def test_odd_values_are_refused_by_name_or_stored_whole(tries):
    buffer = TrajectoryBuffer(device="cpu")
    buffer.add(KEPT)
    before = buffer.pack()
    taken = 0
    labels = [None, "g", 3, True, NAN, 2**70, 0.5, ""]
    for seed in range(tries(11_000)):
        with seeded(seed) as rng:
            turns = [odd_turn(rng), *[GOOD] * int(rng.integers(0, 3))]
            rng.shuffle(turns)
            odd = {
                name: labels[rng.integers(len(labels))]
                for name in ("group", "turn_discount", "task_id", "birth_time_ms")
                if rng.random() < 0.05
            }
            call = [Trajectory("first", [GOOD]), Trajectory("it", turns, **odd)]
            call = call[int(rng.integers(2)) :]
            try:
                buffer.extend(call)
            except (TypeError, ValueError) as error:
                if not str(error).startswith("trajectory 'it'"):
                    raise
                assert (len(buffer), buffer.num_tokens) == (1, before.num_tokens)
                if seed % 50 == 0:
                    assert_batches_equal(buffer.pack(), before)
                continue
            taken += 1
            batch = buffer.pack()
            assert ((batch.input_ids >= 0) & (batch.input_ids < 2**31)).all()
            assert batch.rollout_logprobs.isfinite().all()
            assert [one.id for one in batch.unpack()] == ["kept", *(one.id for one in call)]
            assert [len(one.turns) for one in batch.unpack()][-1] == len(turns)
            buffer.clear()
            buffer.add(KEPT)
    assert taken
    assert_batches_equal(buffer.pack(), before)


SPANS = [(3, 0, 1), (4, 1, 2)]
SPANNED = dataclasses.replace(GOOD, version_spans=SPANS)
EQUAL = [
    (Turn([1], [2], [-0.1]), Turn(np.array([1]), torch.tensor([2]), torch.tensor([-0.1]))),
    (Turn([1], [2], [-0.1]), Turn([1], [2], np.array([-0.1], np.float64))),
    (Trajectory("a", [GOOD]), Trajectory("a", (GOOD,))),
    *(
        (SPANNED, dataclasses.replace(GOOD, version_spans=spans))
        for spans in (
            np.array(SPANS),
            torch.tensor(SPANS),
            ((np.int64(3), 0, 1), [4, 1, torch.tensor(2)]),
            (VersionSpan(3, 0, 1), np.array([4, 1, 2])),
            [(3, 0, 1), (3, 1, 1), (4, 1, 2)],
        )
    ),
    *(
        (
            dataclasses.replace(GOOD, version_spans=spans),
            dataclasses.replace(GOOD, version_start=3, version_end=3),
        )
        for spans in ([(3, 0, 2)], [(3, 0, 1), (3, 1, 2)], np.array([[3, 0, 2]]))
    ),
    *(
        (dataclasses.replace(GOOD, reward=0.5), dataclasses.replace(GOOD, **change))
        for change in (
            {"reward": np.float32(0.5)},
            {"reward": torch.tensor(0.5)},
            {"truncated": np.False_, "reward": np.array(0.5)},
            {"version_start": np.int64(0), "version_end": torch.tensor(0), "reward": 0.5},
        )
    ),
]
DIFFERENT = [
    GOOD,
    *(
        dataclasses.replace(GOOD, **change)
        for change in (
            {IDS: [9, 2]}, {"completion_ids": [9, 4]}, {LOGPROBS: [-0.5, -0.2]}, {"reward": 1.0},
            {"truncated": True}, {"version_spans": SPANS}, {"version_start": 3, "version_end": 4},
            {IDS: [[1], [2, 3]]}, {IDS: "12"}, {IDS: torch.ones(2, device="meta")},
            {IDS: torch.eye(2).to_sparse()}, {LOGPROBS: ["a"]}, {"reward": np.ones(2)},
            {"reward": "a"}, {"reward": 10**400}, {"reward": None}, {"truncated": np.ones(2)},
            {"version_spans": np.ones(3)}, {"version_spans": np.ones((2, 3))},
            {"version_spans": [(1, 2)]}, {"version_spans": 7}, {"version_start": 0.5},
            {"fields": {"v": ["a"]}},
        )
    ),
]  # fmt: skip
"""Turns that differ from each other; most of them no buffer takes."""


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_values_are_equal_whatever_holds_them(one, other):
    assert (one == other) is (other == one) is True
    if isinstance(other, Turn):
        given = [Trajectory("a", [one]), Trajectory("b", [other])]
        assert pack(given).unpack() == given


def test_turns_that_differ_can_be_compared():
    for one, other in itertools.combinations(DIFFERENT, 2):
        assert (one == other) is (other == one) is False
        assert (Trajectory("a", [one]) == Trajectory("a", [other])) is False
    for turn in DIFFERENT:
        assert (turn == turn) is True  # noqa: PLR0124
        assert turn in [GOOD, turn]
    assert GOOD != "a turn"
    assert Trajectory("a", [GOOD]) != Trajectory("b", [GOOD])


def test_turns_and_trajectories_have_slots_alone_and_are_copied_whole():
    whole = Trajectory("a", [GOOD, SPANNED], group="g", birth_time_ms=3)
    assert not hasattr(whole, "__dict__")
    assert not hasattr(GOOD, "__dict__")
    for copied in (copy.copy(whole), copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        assert copied == whole
    assert dataclasses.replace(whole, id="b").turns is whole.turns
    with pytest.raises(dataclasses.FrozenInstanceError):
        whole.id = "b"
