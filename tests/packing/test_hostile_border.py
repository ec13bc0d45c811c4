"""Values that change or lie while a buffer reads them: refused by name, or read once."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import shared_memory
from typing import Any

import numpy as np
import pytest
import torch

from tests.packing.batch.batch_files import seeded
from trajpack import TokenField, Trajectory, TrajectoryBuffer, Turn, pack
from trajpack.packing.buffer.chains import copy_numbers, validate_turns
from trajpack.testing import assert_batches_equal

GOOD = Turn([1, 2], [3, 4], [-0.5, -0.25])
KEPT = Trajectory("kept", [GOOD, Turn([1, 2, 3, 4, 5], [6], [-1.0])])


class FailsOnce:
    """A number that cannot be read the first time."""

    def __init__(self, value: float, error: Exception) -> None:
        self.value = value
        self.errors = [error]

    def __index__(self) -> int:
        if self.errors:
            raise self.errors.pop()
        return int(self.value)

    def __float__(self) -> float:
        return float(self.__index__())


class Calls:
    """A number that does something each time it is read."""

    def __init__(self, value: int, *actions: Callable[[], object]) -> None:
        self.value = value
        self.actions = list(actions)

    def __index__(self) -> int:
        if self.actions:
            self.actions.pop(0)()
        return self.value


class Listed(Sequence[Any]):
    """A sequence that is no list; what it says of itself may be untrue."""

    def __init__(
        self, values: Sequence[Any], count: Any = None, before: Callable[[], object] | None = None
    ) -> None:
        self.values = values
        self.count = count
        self.before = before

    def __len__(self) -> int:
        if isinstance(self.count, Exception):
            raise self.count
        return len(self.values) if self.count is None else self.count

    def __getitem__(self, index: Any) -> Any:
        return self.values[index]

    def __iter__(self) -> Iterator[Any]:
        if self.before is not None:
            self.before()
        return iter(self.values)


def refused(trajectories: Sequence[Trajectory], message: str, fields: Any = ()) -> None:
    """Check that a buffer refuses them by name, and is then as it was before."""
    buffer = TrajectoryBuffer(device="cpu", fields=fields)
    if not fields:
        buffer.add(KEPT)
    before, state = buffer.pack(), (len(buffer), buffer.num_bytes, buffer.num_tokens)
    with pytest.raises((TypeError, ValueError), match=message):
        buffer.extend(trajectories)
    assert (len(buffer), buffer.num_bytes, buffer.num_tokens) == state
    assert_batches_equal(buffer.pack(), before)
    if not fields:
        buffer.add(KEPT)
        assert buffer.pack().unpack() == [KEPT, KEPT]


ERRORS = [TypeError("busy"), KeyError("busy"), RuntimeError(), MemoryError()]
SIZES = [1, 5, 255, 256, 8192, 8193, 20_000]


@pytest.mark.parametrize(
    ("size", "error"),
    [*((size, ValueError("busy")) for size in SIZES), *((5, error) for error in ERRORS)],
    ids=repr,
)
@pytest.mark.parametrize("container", [list, tuple, Listed])
@pytest.mark.parametrize("field", ["prompt_ids", "completion_ids", "completion_logprobs"])
def test_a_number_that_fails_once_is_refused_by_its_place(
    field: str, container: Any, size: int, error: Exception
) -> None:
    for place in {0, size // 2, size - 1}:
        values: list[Any] = [0, 7] * size
        del values[size:]
        values[place] = FailsOnce(5, type(error)(*error.args))
        arrays: dict[str, Any] = {name: [0] * size for name in ("prompt_ids", "completion_ids")}
        arrays |= {"completion_logprobs": [0.0] * size, field: container(values)}
        message = f"^trajectory 'it', turn 0: {field} changed while it was read, got .* {place}$"
        refused([Trajectory("it", [Turn(**arrays)])], message)


@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("count", [1, 3])
def test_of_many_lists_that_one_is_named_whose_number_fails(turn: int, count: int) -> None:
    """Tiny lists are converted together: those of other trajectories stand before and behind."""
    turns = [GOOD for _ in range(count)]
    if turn >= count:
        pytest.skip("no such turn")
    for field, place in (("prompt_ids", 1), ("completion_ids", 0), ("completion_logprobs", 1)):
        values = list(getattr(GOOD, field))
        values[place] = FailsOnce(5, ValueError("busy"))
        turns[turn] = dataclasses.replace(GOOD, **{field: values})
        plain = [Trajectory(name, [GOOD, Turn([7], [], [])]) for name in "ab"]
        singles = [Trajectory(name, [Turn([7], [], [])]) for name in "cd"]
        message = f"^trajectory 'it', turn {turn}: {field} changed .* at index {place}$"
        refused([*plain, *singles, Trajectory("it", turns), *singles, *plain], message)


def test_a_number_that_always_fails_is_refused_by_its_place() -> None:
    class Broken:
        def __index__(self) -> int:
            raise ZeroDivisionError

        __float__ = __index__

        def __repr__(self) -> str:
            raise ZeroDivisionError

    message = r"prompt_ids must be in \[0, 2147483647\], got a Broken at index 2"
    refused([Trajectory("it", [Turn([0, 1, Broken()], [], [])])], f"'it', turn 0: {message}")
    message = "completion_logprobs must be finite float32, got a Broken at index 0"
    refused([Trajectory("it", [GOOD, Turn([1], [1], [Broken()])])], f"'it', turn 1: {message}")
    for name, message in (
        ("reward", "reward must be a number, got a Broken"),
        ("version_start", "version_start must be an integer, got a Broken"),
    ):
        bad = dataclasses.replace(GOOD, **{name: Broken()})
        refused([Trajectory("it", [bad])], f"^trajectory 'it', turn 0: {message}")


@pytest.mark.parametrize("others", [[], [GOOD]])
def test_a_number_that_answers_differently_is_read_once(others: list[Turn]) -> None:
    class Counting:
        def __init__(self) -> None:
            self.answers = iter([5, 2**40, -1])

        def __index__(self) -> int:
            return next(self.answers)

        def __float__(self) -> float:
            return -float(next(self.answers))

    turn = Turn([1, Counting(), 2], (Counting(),), Listed([Counting()]))
    [trajectory] = pack([Trajectory("a", [turn, *others])]).unpack()
    assert trajectory.turns[0] == Turn([1, 5, 2], [5], [-5.0])


def test_an_array_that_a_number_changes_is_stored_as_it_was_checked() -> None:
    """The array is copied after the number was read, and looked at again after that."""
    ids = np.array([1, 2, 3], np.int32)

    def spoil() -> None:
        ids[0] = -1

    def mend() -> None:
        ids[0] = 1

    hostile = Trajectory("hostile", [Turn([5, Calls(6, spoil, mend)], [7], [0.0])])
    message = "^trajectory 'it', turn 0: prompt_ids must be 0 or more, got -1 at index 0"
    refused([hostile, Trajectory("it", [Turn(ids, [7], [0.0])])], message)


def test_an_array_that_changes_after_it_was_compared_changes_no_turn() -> None:
    ids = np.array([1, 2, 3, 4], np.int32)
    logprobs = np.array([-0.5], np.float32)

    def spoil() -> None:
        ids[0] = 9

    turns = [
        Turn([1, 2], [3], logprobs),
        Turn(ids, [5], logprobs),
        Turn(Listed([1, 2, 3, 4, 5, 6], before=spoil), [7], logprobs),
    ]
    batch = pack([Trajectory("a", turns)])
    [trajectory] = batch.unpack()
    assert [list(turn.prompt_ids) for turn in trajectory.turns] == [
        [1, 2],
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5, 6],
    ]


def test_rows_that_change_after_they_were_compared_change_no_turn() -> None:
    rows = torch.tensor([1, 2, 3], dtype=torch.int32)
    field = TokenField("v", torch.int32, generated_only=False)

    def spoil() -> None:
        rows[0] = 9

    turns = [
        Turn([1, 2], [3], [0.0], fields={"v": rows}),
        Turn([1, 2, 3], Listed([4], before=spoil), [0.0], fields={"v": [1, 2, 3, 4]}),
    ]
    [trajectory] = pack([Trajectory("a", turns)], fields=[field]).unpack()
    assert trajectory.turns[0].fields["v"].tolist() == [1, 2, 3]


def test_a_number_that_uses_the_buffer_leaves_it_whole() -> None:
    buffer = TrajectoryBuffer(device="cpu")
    other = Trajectory("other", [Turn([8, 9], [7], [-2.0])])
    outer = Trajectory("outer", [Turn([1, Calls(2, lambda: buffer.add(other))], [3], [-1.0])])
    buffer.add(outer)
    buffer.extend([Trajectory("last", [Turn([1, Calls(2, buffer.pack)], [3], [-1.0])])])
    plain = [Trajectory(name, [Turn([1, 2], [3], [-1.0])]) for name in ("outer", "last")]
    assert buffer.pack().unpack() == [other, *plain]
    buffer.add(Trajectory("again", [Turn([1, Calls(2, buffer.clear)], [3], [-1.0])]))
    assert [trajectory.id for trajectory in buffer.pack().unpack()] == ["again"]


@pytest.mark.parametrize("count", [0, 1, 2, 4, 5, 300, 2**40, 2**62, -1, ValueError("busy")])
@pytest.mark.parametrize("base", [Listed, list, tuple, np.ndarray, array, torch.Tensor])
def test_a_length_that_lies_is_refused(base: Any, count: Any) -> None:
    class Liar(base):  # type: ignore[misc]
        def __len__(self) -> int:
            if isinstance(count, Exception):
                raise count
            return int(count)

    makers: dict[Any, Callable[[], Any]] = {
        Listed: lambda: Liar([1, 2, 3]),
        np.ndarray: lambda: np.array([1, 2, 3], np.int32).view(Liar),
        array: lambda: Liar("i", [1, 2, 3]),
        torch.Tensor: lambda: torch.tensor([1, 2, 3], dtype=torch.int32).as_subclass(Liar),
    }
    made = makers.get(base, lambda: Liar([1, 2, 3]))()
    for others in ([], [GOOD]):
        message = "^trajectory 'it', turn 0: prompt_ids (changed while it was read|cannot be read)"
        refused([Trajectory("it", [Turn(made, [7], [-0.1]), *others])], message)
    spans = dataclasses.replace(GOOD, version_spans=Listed([(0, 0, 2)], count))
    if count != 1:
        refused([Trajectory("it", [spans])], "version_spans (changed while|cannot be read)")


@pytest.mark.parametrize("kind", [list, tuple, Listed])
def test_a_sequence_without_end_is_refused(kind: Any) -> None:
    class Endless(kind):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            return itertools.count(1)

    message = "prompt_ids changed while it was read: its length is not 2"
    refused([Trajectory("it", [Turn(Endless([1, 2]), [3], [0.0])])], message)


def test_what_a_subclass_of_an_array_says_of_itself_is_not_asked() -> None:
    class Liar(np.ndarray[Any, Any]):
        dtype = np.dtype(np.int64)  # type: ignore[assignment]
        size = 7  # type: ignore[assignment]
        ndim = 1  # type: ignore[assignment]

        def __getitem__(self, index: Any) -> Any:
            raise AssertionError

        __iter__ = __array__ = min = astype = copy = tobytes = __getitem__  # type: ignore

    class Tensor(torch.Tensor):
        ndim = 7  # type: ignore[assignment]

    ids = np.array([1, 2], np.int32).view(Liar)
    assert len(ids) == 2
    turn = Turn(ids, torch.tensor([3]).as_subclass(Tensor), np.array([0.5]).view(Liar))
    for others in ([], [GOOD]):
        [trajectory] = pack([Trajectory("a", [turn, *others])]).unpack()
        assert trajectory.turns[0] == Turn([1, 2], [3], [0.5])


def test_a_trajectory_without_a_readable_name_is_refused() -> None:
    class Odd(Trajectory):
        @property
        def id(self) -> str:  # type: ignore[override]
            raise ZeroDivisionError("odd")

        def __init__(self) -> None:
            object.__setattr__(self, "turns", (GOOD,))

    refused([Odd()], r"^it cannot be read: ZeroDivisionError\('odd'\)")


def test_errors_of_the_callers_classes_are_named() -> None:
    class Odd(Listed):
        def __iter__(self) -> Iterator[int]:
            raise ZeroDivisionError("odd")

    class OddTurn(Turn):
        @property
        def reward(self) -> float:  # type: ignore[override]
            raise ZeroDivisionError("odd")

        def __init__(self) -> None:
            object.__setattr__(self, "prompt_ids", [1])
            for name in ("completion_ids", "completion_logprobs"):
                object.__setattr__(self, name, [])
            for name in ("version_spans", "fields"):
                object.__setattr__(self, name, None)
            object.__setattr__(self, "truncated", False)

    class OddFields(dict[str, Any]):
        def keys(self) -> Any:
            raise ZeroDivisionError("odd")

        def __len__(self) -> int:
            return 1

    message = r"prompt_ids cannot be read as a sequence: ZeroDivisionError\('odd'\)"
    refused([Trajectory("it", [Turn(Odd([1]), [], [])])], f"^trajectory 'it', turn 0: {message}")
    message = r"it cannot be read: ZeroDivisionError\('odd'\)"
    refused([Trajectory("it", [OddTurn()])], f"^trajectory 'it', turn 0: {message}")
    bad = dataclasses.replace(GOOD, fields=[("v", [1])])
    refused([Trajectory("it", [bad])], "'it', turn 0: fields must be a mapping, got list")
    bad = dataclasses.replace(GOOD, version_spans=[7])
    refused([Trajectory("it", [bad])], "'it', turn 0: version_spans must be .* triples, got 7")
    bad = dataclasses.replace(GOOD, version_spans={(0, 0, 2): 1})
    refused([Trajectory("it", [bad])], "'it', turn 0: version_spans must be an array or a seq")


@pytest.mark.parametrize("num_bytes", [0, 4, 11])
def test_tensors_whose_memory_is_gone_are_refused(num_bytes: int) -> None:
    def freed(dtype: torch.dtype, first: int = 0, step: int = 1) -> torch.Tensor:
        tensor = torch.zeros(3, dtype=dtype)
        view = tensor[first::step]
        tensor.untyped_storage().resize_(num_bytes)
        return view

    field = TokenField("v", torch.int32, generated_only=False)
    for change in (
        {"prompt_ids": freed(torch.int32)},
        {"prompt_ids": freed(torch.int64)},
        {"completion_ids": freed(torch.int32, first=1)},
        {"completion_logprobs": freed(torch.float32, step=2)},
    ):
        bad = dataclasses.replace(GOOD, **change)
        message = (
            f"^trajectory 'it', turn 1: {next(iter(change))} cannot be read .*memory was freed"
        )
        refused([Trajectory("it", [GOOD, bad])], message)
    bad = dataclasses.replace(GOOD, fields={"v": freed(torch.int32)})
    refused([Trajectory("it", [bad])], "'it', turn 0: field 'v' cannot be read", [field])


def test_labels_are_plain_texts() -> None:
    class Text(str):
        __slots__ = ()

        def __eq__(self, other: object) -> bool:
            raise AssertionError

        __repr__ = __str__ = __eq__  # type: ignore[assignment]
        __hash__ = __eq__  # type: ignore[assignment]

    batch = pack([Trajectory(Text("a"), [GOOD], group=Text("g"))])
    assert (type(batch.ids[0]), batch.ids, batch.groups) == (str, ("a",), ("g",))
    refused([Trajectory(Text("it"), [None])], "^trajectory 'it', turn 0: expected a Turn")


def test_lists_that_grow_or_shrink_while_they_are_read_are_refused() -> None:
    for size in (3, 300, 9000):
        for change in (list.pop, lambda ids: ids.append(1)):
            ids = [1] * size
            bad = Trajectory("it", [Turn(ids, [2], [0.0])])
            hostile = [Calls(5, lambda ids=ids, change=change: change(ids)), *[1] * 300]
            first = Trajectory("first", [Turn(hostile, [2], [0.0])])
            message = "^trajectory 'it', turn 0: prompt_ids changed while it was read$"
            refused([first, bad], message)


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize("container", [list, tuple, Listed, collections.deque])
@pytest.mark.parametrize(
    "true", [True, np.True_, torch.tensor(True), np.array(True)], ids=["bool", "np", "torch", "0d"]
)
def test_a_bool_in_a_list_is_refused_as_in_an_array(true: Any, container: Any) -> None:
    for size in (1, 3, 300, 9000):
        for value in (true, type(true)(False) if isinstance(true, (bool, np.bool_)) else true):
            ids = [0, 1, 2] * size
            place = size // 2
            ids[place] = value
            bad = Turn(container(ids), [2], [0.0])
            for others in ([], [GOOD]):
                trajectory = Trajectory("it", [*others, bad])
                message = (
                    f"turn {len(others)}: prompt_ids must be integers, got .* at index {place}"
                )
                refused([trajectory], message)
            bad = Turn(
                [1], [2] * len(ids), container([float(entry) for entry in ids[:-1]] + [value])
            )
            refused(
                [Trajectory("it", [bad])],
                f"completion_logprobs must be floats, got .* at index {len(ids) - 1}",
            )


@pytest.mark.parametrize("true", [True, np.True_, torch.tensor(True)])
@pytest.mark.parametrize("name", ["reward", "version_start", "version_end"])
def test_a_bool_is_no_number(name: str, true: Any) -> None:
    bad = dataclasses.replace(GOOD, **{name: true})
    refused([Trajectory("it", [bad])], f"'it', turn 0: {name} must be an? .*, got ")
    refused([Trajectory("it", [GOOD], turn_discount=true)], "'it': turn_discount must be a number")
    refused([Trajectory("it", [GOOD], task_id=true)], "'it': task_id must be an integer")
    spans = dataclasses.replace(GOOD, version_spans=[(0, 0, true), (0, true, 2)])
    refused([Trajectory("it", [spans])], "'it', turn 0: version_spans must be an integer, got ")


def test_numbers_of_other_kinds_are_taken() -> None:
    ids = [0, np.int64(0), Number.ONE, torch.tensor(1), np.uint8(3), 1]
    logprobs = [0, 0.0, np.float64(0.0), torch.tensor(0.0), Number.ONE, np.float32(-0.5)]
    expected = Turn([0, 0, 1, 1, 3, 1], [0, 0, 1, 1, 3, 1], [0, 0, 0, 0, 1, -0.5])
    for container in (list, tuple, Listed, collections.deque):
        turn = Turn(container(ids), container(ids), container(logprobs))
        assert pack([Trajectory("a", [turn])]).unpack()[0].turns[0] == expected
    views = Turn(memoryview(array("i", [1, 2])), memoryview(array("q", [3])), array("d", [-0.5]))
    assert pack([Trajectory("a", [views])]).unpack()[0].turns[0] == Turn([1, 2], [3], [-0.5])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (memoryview(array("f", [1.0])), "must be integers, got float32"),
        (memoryview(b"123456").cast("B", (2, 3)), r"one dimension, got shape \[2, 3\]"),
        (memoryview(b"12").cast("?"), "must be integers, got bool"),
        (np.array(3), r"one dimension, got shape \[\]"),
        (torch.tensor(3), r"one dimension, got shape \[\]"),
        (np.array([1, "a"], object), "must be integers, got object"),
        ({1, 2}, "must be an array or a sequence, got set"),
        (iter([1]), "must be an array or a sequence, got list_iterator"),
        (torch.tensor([1 + 2j]), "must be integers, got complex64"),
    ],
)
def test_other_containers_are_refused(values: Any, message: str) -> None:
    refused(
        [Trajectory("it", [Turn(values, [1], [0.0])])], f"^trajectory 'it', turn 0: .*{message}"
    )


def writers() -> dict[str, Callable[[int], tuple[Any, Any, Callable[[], object]]]]:
    """Containers of ids and log-probabilities, and what writes to the memory of both."""

    def numpy_arrays(size: int, kind: Any = np.int32, real: Any = np.float32) -> Any:
        return np.full(size, 5, kind), np.full(size, -0.5, real)

    def tensors(size: int) -> Any:
        ids, logprobs = (torch.from_numpy(array) for array in numpy_arrays(size, np.int64))
        return ids, logprobs, ids.numpy(), logprobs.numpy()

    def views(size: int) -> Any:
        ids, logprobs = numpy_arrays(size)
        return memoryview(ids), memoryview(logprobs), ids, logprobs

    return {
        "numpy": lambda size: (*(given := numpy_arrays(size)), *given),
        "wide numpy": lambda size: (*(given := numpy_arrays(size, np.int64, np.float64)), *given),
        "torch": tensors,
        "memoryview": views,
    }


@pytest.mark.attack
@pytest.mark.parametrize("kind", writers())
def test_arrays_that_another_thread_writes_are_stored_as_they_were_checked(
    kind: str, tries: Callable[[int], int]
) -> None:
    ids, logprobs, id_memory, logprob_memory = writers()[kind](20_000)
    over = threading.Event()
    low = -1 if id_memory.dtype == np.int32 else 2**33 + 7

    def write() -> None:
        while not over.is_set():
            id_memory[100], logprob_memory[100] = low, np.nan
            id_memory[100], logprob_memory[100] = 5, -0.5

    check_concurrently(write, over, (ids, logprobs), tries(1500))


@pytest.mark.attack
def test_shared_memory_that_is_written_is_stored_as_it_was_checked(
    tries: Callable[[int], int],
) -> None:
    memory = shared_memory.SharedMemory(create=True, size=8 * 20_000)
    try:
        add_shared(memory, tries(300))  # whose views of it are gone when it is closed
    finally:
        memory.close()
        memory.unlink()


def add_shared(memory: shared_memory.SharedMemory, num_tries: int) -> None:
    ids = np.ndarray(20_000, np.int32, memory.buf)
    logprobs = np.ndarray(20_000, np.float32, memory.buf, 4 * 20_000)
    ids[:], logprobs[:] = 5, -0.5
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            ids[7], logprobs[7] = -1, np.inf
            ids[7], logprobs[7] = 5, -0.5

    check_concurrently(write, over, (ids, logprobs), num_tries)


def check_concurrently(
    write: Callable[[], None], over: threading.Event, given: tuple[Any, Any], num_tries: int
) -> None:
    """Add arrays while ``write`` changes them: every batch is right, every refusal has a name."""
    ids, logprobs = given
    buffer = TrajectoryBuffer(device="cpu")
    writer = threading.Thread(target=write)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    writer.start()
    taken = refusals = 0
    try:
        for number in range(num_tries):
            turn = Turn(ids, ids, logprobs)
            buffer.clear()
            try:
                buffer.add(Trajectory("it", [turn] if number % 2 else [turn, GOOD]))
            except ValueError as error:
                refusals += str(error).startswith("trajectory 'it', turn 0: ")
                assert not len(buffer)
                continue
            batch = buffer.pack()
            valid = (batch.input_ids >= 0).all() and batch.rollout_logprobs.isfinite().all()
            taken += bool(valid and (batch.input_ids[batch.input_ids > 4] == 5).all())
    finally:
        over.set()
        writer.join()
        sys.setswitchinterval(interval)
    assert taken + refusals == num_tries


def test_an_array_that_changes_its_length_is_refused() -> None:
    """Where it is copied: another thread may come between the check of its length and this."""
    for change in ("shape", "dtype"):
        ids = np.array([1, 2, 3, 4], np.int32)
        intake = validate_turns([Trajectory("a", [Turn(ids, [2], [0.0])])], ())
        if change == "shape":
            ids.resize(3, refcheck=False)
        else:
            ids.dtype = np.int16
        out = np.empty(5, np.int32), np.empty(1, np.float32)
        with pytest.raises(
            ValueError, match=r"^trajectory 'a': an array changed while it was read"
        ):
            copy_numbers(intake, *out)


def hostile_numbers(rng: np.random.Generator, size: int, *, real: bool) -> Any:
    """Return a container of numbers, of which one or the container itself is odd."""
    ids: list[Any] = rng.integers(0, 9, size).tolist()
    values: list[Any] = [-float(entry) for entry in ids] if real else ids
    odd: list[Any] = [
        -1, 2**31 - 1, 2**31, 2**63, 10**400, 0.5, -0.0, float("nan"), float("inf"), 1e39, None,
        "1", b"1", "", True, False, np.True_, np.int8(-1), np.uint64(2**64 - 1), np.float16(1.5),
        torch.tensor(3), torch.tensor(2.5), torch.tensor(True), torch.ones(2), [1], (), 1j,
        FailsOnce(3, ValueError("busy")), FailsOnce(3, KeyError("busy")), Number.ONE,
    ]  # fmt: skip
    if size and rng.random() < 0.7:
        values[rng.integers(size)] = odd[rng.integers(len(odd))]
    kind = rng.integers(12)
    if kind < 4:
        return values  # of which neither numpy nor torch makes an array
    try:
        made: list[Callable[[], Any]] = [
            lambda: tuple(values),
            lambda: Listed(values),
            lambda: Listed(values, int(rng.integers(-1, 2 * size + 2))),
            lambda: np.array(values),
            lambda: np.array(values, rng.choice(["i4", "i8", "u1", "f4", "f8", ">i4", "O", "?"])),
            lambda: torch.tensor(values),
            lambda: array("d" if real else "i", values),
            lambda: collections.deque(values),
            lambda: odd[rng.integers(len(odd))],
        ]
        return made[rng.integers(len(made))]()
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, Warning):
        return values  # of which neither numpy nor torch makes an array


def hostile_turn(rng: np.random.Generator) -> Turn:
    begin, size = rng.integers(1, 6), rng.integers(0, 5)
    odd: list[Any] = [-1, 0, 1, 2, 2**31, 2**70, 0.5, float("nan"), None, "1", True, np.int32(1)]
    odd += [np.ones(2), torch.tensor(1), FailsOnce(1, RuntimeError()), [], (1, 2)]
    given: dict[str, Any] = {
        "prompt_ids": hostile_numbers(rng, begin, real=False),
        "completion_ids": rng.integers(0, 9, size).tolist(),
        "completion_logprobs": [-0.5] * size,
    }
    if rng.random() < 0.3:
        given["completion_ids"] = hostile_numbers(rng, size, real=False)
    if rng.random() < 0.3:
        given["completion_logprobs"] = hostile_numbers(rng, size, real=True)
    for name in ("reward", "truncated", "version_start", "version_end"):
        if rng.random() < 0.1:
            given[name] = odd[rng.integers(len(odd))]
    if rng.random() < 0.2:
        spans: list[Any] = [[1, 0, int(size)], [2, int(size), int(size)], [0, 0, 1], 3, None]
        drawn = [spans[rng.integers(len(spans))] for _ in range(rng.integers(0, 3))]
        given["version_spans"] = np.array([[1, 0, size]]) if rng.random() < 0.3 else drawn
    if rng.random() < 0.05:
        given["fields"] = odd[rng.integers(len(odd))]
    return Turn(**given)


@pytest.mark.attack
def test_hostile_values_are_refused_by_name_or_stored_whole(tries: Callable[[int], int]) -> None:
    buffer = TrajectoryBuffer(device="cpu")
    buffer.add(KEPT)
    before = buffer.pack()
    taken = 0
    for seed in range(tries(22_000)):
        with seeded(seed) as rng:
            turns: list[Any] = [hostile_turn(rng)]
            turns += [GOOD] * int(rng.integers(0, 3))
            rng.shuffle(turns)
            odd: list[Any] = [
                None,
                "g",
                3,
                True,
                float("nan"),
                2**70,
                0.5,
                "",
                FailsOnce(1, KeyError()),
            ]
            labels = {
                name: odd[rng.integers(len(odd))]
                for name in ("group", "turn_discount", "task_id", "birth_time_ms")
                if rng.random() < 0.05
            }
            hostile = Trajectory("it", turns, **labels)
            call = [Trajectory("first", [GOOD]), hostile][int(rng.integers(2)) :]
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


def several(says: Any, entries: Any) -> list[Any]:
    """Return a list that says another length, or whose iterator does as it likes."""

    class Several(list[Any]):
        def __len__(self) -> int:
            return int(says)

        def __iter__(self) -> Iterator[Any]:
            return iter(entries())

    return Several()


def raising() -> Iterator[Any]:
    raise RuntimeError("boom")


@pytest.mark.parametrize(
    ("says", "entries", "message"),
    [
        (3, raising, r"what cannot be read: RuntimeError\('boom'\)"),
        (2**70, list, "what cannot be read: OverflowError"),
        (3, itertools.count, "4 or more entries of what has length 3"),
        (3, lambda: [1], "1 or more entries of what has length 3"),
    ],
)
def test_a_container_whose_own_methods_fail_or_lie_is_refused_by_name(
    says: Any, entries: Any, message: str
) -> None:
    with pytest.raises(
        (TypeError, ValueError), match=f"^trajectory 'a': turns must be .*{message}"
    ):
        Trajectory("a", several(says, entries))
    buffer = TrajectoryBuffer()
    said = f"^expected a list of Trajectory, .*{message}"
    with pytest.raises((TypeError, ValueError), match=said):
        buffer.extend(several(says, entries))
    assert len(buffer) == 0


def test_a_turn_whose_spans_raise_anything_equals_itself_alone() -> None:
    class Spans(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            raise KeyError("spans")

    turn = Turn([1], [2], [-0.5], version_spans=Spans())
    assert turn == turn  # noqa: PLR0124 - the very same
    assert turn != Turn([1], [2], [-0.5])


def test_turns_with_an_endless_container_are_compared_in_little_memory() -> None:
    endless = several(2, itertools.count)
    good = Turn([1, 2], [3], [-0.5])
    for changes in (
        {"prompt_ids": endless},
        {"version_spans": endless},
        {"fields": {"a": endless}},
    ):
        assert dataclasses.replace(good, **changes) != dataclasses.replace(
            good, **{name: {"a": [1, 2]} if name == "fields" else [1, 2] for name in changes}
        )


class Shrinks:
    """A number that makes the list in which it stands shorter when it is read."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.within: list[Any] = []

    def __index__(self) -> int:
        del self.within[9000:]
        return int(self.value)

    def __float__(self) -> float:
        del self.within[9000:]
        return self.value


@pytest.mark.parametrize("count", [9001, 10_000, 16_384, 16_385, 30_000])
@pytest.mark.parametrize("num_turns", [1, 2])
@pytest.mark.parametrize("place", range(3))
def test_a_list_that_shrinks_while_it_is_read_is_refused_by_name(
    place: int, num_turns: int, count: int
) -> None:
    for _ in range(5):  # what lies in fresh memory is another thing each time
        number = Shrinks((7, 7, -0.5)[place])
        values: list[Any] = [number, *[number.value] * (count - 1)]
        number.within = values
        given: list[Any] = [[5], [7] * count, [-0.5] * count]
        given[place] = values
        with pytest.raises(ValueError, match=r"^trajectory 'a', turn 0: .* changed while it was"):
            pack([Trajectory("a", [Turn(*given)] * num_turns)])


class Lost:
    """A number whose class, or whatever else is asked of it, raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("lost")


class Classless:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("gone")


class Untyped:
    @property
    def dtype(self) -> Any:
        raise RuntimeError("gone")

    def __index__(self) -> int:
        return 1

    def __float__(self) -> float:
        return float("nan")


@pytest.mark.parametrize("number", [Lost, Classless, Untyped])
@pytest.mark.parametrize("container", [list, tuple])
@pytest.mark.parametrize("place", range(3))
def test_numbers_of_which_nothing_can_be_asked_are_named_or_read(
    place: int, container: Any, number: Any
) -> None:
    for num_turns in (1, 2):
        given: list[Any] = [[1, 2], [3, 4], [-0.5, -0.5]]
        given[place] = container([given[place][0], number()])
        turns = [Turn(*given)] * num_turns
        if number is Untyped and place < 2:
            assert pack([Trajectory("a", turns)]).input_ids.tolist()[2 * place + 1] == 1
            continue
        with pytest.raises((TypeError, ValueError), match=r"^trajectory 'a', turn 0: "):
            pack([Trajectory("a", turns)])


def test_fields_with_endless_names_are_refused_in_little_memory() -> None:
    class Endless(dict[str, Any]):
        def __iter__(self) -> Iterator[Any]:
            return itertools.repeat("a")

    buffer = TrajectoryBuffer(fields=[TokenField("a", torch.float32)])
    turn = Turn([1], [2], [-0.5], fields=Endless(a=[0.0]))
    with pytest.raises(
        ValueError, match=r"^trajectory 'a', turn 0: fields must be a mapping, got 2"
    ):
        buffer.add(Trajectory("a", [turn]))
