"""`take` in C stores what the reference stores, and raises what it raises, bit for bit."""

import sys
import threading
import time

import numpy as np
import pytest
import torch

from tests.packing.files.batch_files import seeded
from tests.packing.test_border import GOOD, odd_turn
from trajpack import Trajectory, TrajectoryBuffer, Turn
from trajpack.packing.buffer import take
from trajpack.packing.buffer.staging import Staging
from trajpack.packing.buffer.stored import CHAIN, TURN, Stored
from trajpack.packing.turn_fields import STOP_REASONS, TURN_FIELDS
from trajpack.packing.types import VersionSpan
from trajpack.testing import random_trajectory


def stored_by(monkeypatch, in_c, calls, capacity=None):
    """Return columns and words that calls leave, and what each returned or raised."""
    monkeypatch.setattr(take, "_in_c", in_c)
    stored, staging, ends = Stored.empty(), Staging(torch.device("cpu")), []
    for call in calls:
        try:
            ends.append(take.take(stored, staging, tuple(call), (), capacity))
        except (TypeError, ValueError) as error:
            ends.append((type(error), str(error)))
    words = staging.region.stream[: stored.counts[0]].tobytes()
    assert len(stored.turns) == TURN.itemsize * stored.counts[3]
    columns = stored.columns()
    bits = [part.tobytes() for part in (*columns[:-4], *columns.numbers, columns.spans)]
    return (bits, stored.labels, stored.spans, stored.counts.tolist()), words, ends


HOLDERS = [
    lambda v: v,
    lambda v: v.astype(np.int64 if v.dtype.kind == "i" else np.float64),
    torch.from_numpy,
    lambda v: v.tolist(),
    lambda v: [*v],
    lambda v: np.repeat(v, 2)[::2],
    lambda v: np.frombuffer(b"0" + v.tobytes(), v.dtype, offset=1),
    lambda v: v.astype(v.dtype.newbyteorder()),
]


def held(rng, turn):
    """Return a turn whose values are in other containers, as ones that C takes or leaves."""
    spans, size = None, len(turn.completion_ids)
    if rng.random() < 0.3:
        cut = int(rng.integers(0, size + 1))
        spans = [VersionSpan(4, 0, cut), (4 + int(rng.integers(2)), cut, size)]
    start = 0 if spans else int(rng.integers(3))
    holders = [HOLDERS[rng.integers(len(HOLDERS))] for _ in range(3)]
    values = turn.prompt_ids, turn.completion_ids, turn.completion_logprobs
    return Turn(
        *(hold(np.array(value)) for hold, value in zip(holders, values, strict=True)),
        reward=[0.5, 1, np.float64(-0.25), -1e9][rng.integers(4)],
        truncated=bool(rng.random() < 0.5),
        version_start=start,
        version_end=0 if spans else start + int(rng.integers(2)),
        version_spans=spans,
        fields={} if rng.random() < 0.1 else None,
        stop_reason=STOP_REASONS[rng.integers(len(STOP_REASONS))],
    )


def conversation(rng, number):
    """Return turns that repeat, restart, re-tokenize and interleave their histories."""
    sizes = {"num_turns": int(rng.integers(1, 5)), "prompt": (1, 40), "completion": (0, 40)}
    turns = list(random_trajectory(rng, "x", **sizes).turns)
    if rng.random() < 0.5:
        turns.insert(int(rng.integers(len(turns) + 1)), turns[int(rng.integers(len(turns)))])
    if rng.random() < 0.3:
        ids = np.array(turns[-1].prompt_ids)
        ids[rng.integers(len(ids))] += 1
        turns.append(Turn(ids, [5], np.float32([0.5 if rng.random() < 0.1 else -0.5])))
    return Trajectory(
        str(number),
        [held(rng, turn) for turn in turns],
        group=[None, "a", "b"][rng.integers(3)],
        turn_discount=[1.0, 0, np.float64(0.5)][rng.integers(3)],
        task_id=[None, 7, 2**40][rng.integers(3)],
        birth_time_ms=[None, 3][rng.integers(2)],
        truncated=[None, True, False][rng.integers(3)],
    )


def call_of(rng, number, odd):
    """Return several conversations; maybe one has a turn with odd values."""
    call = [conversation(rng, f"{number}.{index}") for index in range(int(rng.integers(1, 5)))]
    if rng.random() < odd:
        turns = [GOOD, odd_turn(rng), *[GOOD] * int(rng.integers(2))]
        call.insert(int(rng.integers(len(call) + 1)), Trajectory("it", turns))
    return call


@pytest.mark.parametrize("odd", [0.0, 0.5])
def test_c_stores_what_the_reference_stores(monkeypatch, in_c, odd):
    for seed in range(60):
        with seeded(seed) as rng:
            calls = [call_of(rng, number, odd) for number in range(6)]
        rows, words, ends = stored_by(monkeypatch, None, calls)
        assert stored_by(monkeypatch, in_c, calls) == (rows, words, ends)
        room = rows[3][1] // 2
        assert stored_by(monkeypatch, in_c, calls, room) == stored_by(
            monkeypatch, None, calls, room
        )


def test_plain_calls_do_not_reach_the_reference(monkeypatch, in_c):
    rng = np.random.default_rng(0)
    calls = [call_of(rng, number, 0.0) for number in range(30)]
    for holder in (HOLDERS[6], HOLDERS[7]):  # memory that is read as bytes alone
        monkeypatch.setattr(
            sys.modules[__name__], "HOLDERS", [h for h in HOLDERS if h is not holder]
        )
    calls = [call_of(rng, number, 0.0) for number in range(30)]
    monkeypatch.setattr(take, "take_reference", None)
    rows, _, _ = stored_by(monkeypatch, in_c, calls)
    assert len(rows[1].ids) == sum(map(len, calls))


def test_rows_are_those_of_the_fields_of_turns(in_c):
    names = {field.attribute: field.numpy_dtype for field in TURN_FIELDS}
    assert {name: TURN[name] for name in names} == names
    assert (TURN.itemsize, CHAIN.itemsize) == (40, 8), "as in take.c"


def test_the_copy_holds_no_lock_of_the_interpreter(monkeypatch, in_c):
    monkeypatch.setattr(take, "_in_c", in_c)
    ids = np.zeros(20_000_000, np.int32)
    long = Trajectory("a", [Turn(ids, [1], [-0.5]), Turn(np.append(ids, [1, 2]), [1], [-0.5])])
    buffer = TrajectoryBuffer(device="cpu")
    buffer.add(long)  # its memory is there
    buffer.clear()
    ended, seen = threading.Event(), []

    def watch():
        while not ended.is_set():
            seen.append(0)
            time.sleep(0)

    watching, before = threading.Thread(target=watch), sys.getswitchinterval()
    sys.setswitchinterval(100)  # nobody takes the lock, it must be given
    try:
        watching.start()
        while not seen:
            time.sleep(0)
        count = len(seen)
        buffer.add(long)
        count = len(seen) - count
    finally:
        sys.setswitchinterval(before)
        ended.set()
        watching.join()
    assert count > 0


def test_values_may_be_none_of_the_kinds_that_c_knows(monkeypatch, in_c):
    class Own(Turn):
        __slots__ = ()

    calls = [
        [Trajectory("a", [Own([1], [2], [-0.5])])],
        [Trajectory("a", [object.__new__(Turn)])],
        [object.__new__(Trajectory)],
        [Trajectory("a", [GOOD], task_id=2**63)],
        [Trajectory("a", [Turn([1], [2], [-0.5], fields={"x": [1]})])],
        [Trajectory("a", [Turn([1], [2], [-0.5], reward=10**400)])],
    ]
    for call in calls:
        outcomes = []
        for chosen in (None, in_c):
            try:
                outcomes.append(stored_by(monkeypatch, chosen, [call]))
            except AttributeError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_the_variable_chooses_and_c_that_is_not_built_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "trajpack.packing.buffer.take_c", None)
    monkeypatch.delattr("trajpack.packing.buffer.take_c", raising=False)
    for choice in ("", "python"):
        monkeypatch.setattr(take, "CHOICE", choice)
        assert take._load() is None
    monkeypatch.setattr(take, "CHOICE", "c")
    with pytest.raises(ImportError, match=r"TRAJPACK_TAKE=c, but trajpack\..*take_c is not built"):
        take._load()
    monkeypatch.setattr(take, "CHOICE", "C")
    with pytest.raises(ValueError, match="TRAJPACK_TAKE must be 'c' or 'python', got 'C'"):
        take._load()
