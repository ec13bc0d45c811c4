"""Validation of trajectories, and their split into chains that store each token once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trajpack.packing.batch.breaks import is_retokenized
from trajpack.packing.conversion import (
    FLOAT32_MAX,
    INT32,
    INT32_MAX,
    NUMBER_ERRORS,
    Typecode,
    as_ids,
    as_integer,
    as_logprobs,
    as_number,
    as_version_runs,
    is_bool,
    narrow_ids,
    narrow_logprobs,
    packed_numbers,
    shown,
)
from trajpack.packing.token_fields import (
    TokenField,
    extend_rows,
    first_differing,
    rows_of_turn,
)
from trajpack.packing.turn_fields import STOP_REASONS, TYPECODES
from trajpack.packing.types import Trajectory, Turn

TINY = 256
"""Lists of fewer numbers are concatenated before their conversion."""
MOST_BREAKS = 4
"""Breaks of a call that are looked at for re-tokenized text."""

VersionRun = tuple[int, int, int]


class Labels(NamedTuple):
    """Strings and scalars of trajectories that stay on the host; a `PackedBatch` has them too."""

    ids: list[str]
    groups: list[str | None]
    task_ids: list[int | None]
    birth_times_ms: list[int | None]
    turn_discounts: list[float]
    truncated_as_given: list[bool | None]

    @classmethod
    def empty(cls) -> Labels:
        """Return labels of no trajectories."""
        return cls([], [], [], [], [], [])

    def append(self, *of_one: Any) -> None:
        """Append the labels of one trajectory."""
        column: list[Any]
        for column, value in zip(self, of_one, strict=True):
            column.append(value)

    def extend(self, other: Labels, begin: int) -> None:
        """Replace the labels from a trajectory on by others."""
        for mine, theirs in zip(self, other, strict=True):
            mine[begin:] = theirs

    def as_tuples(self, end: int | None = None) -> dict[str, tuple[Any, ...]]:
        """Return the labels of the first trajectories as a `PackedBatch` has them."""
        return {name: tuple(of[:end]) for name, of in zip(self._fields, self, strict=True)}


class ChainEnd(NamedTuple):
    """Last turn of a chain, which holds all tokens of the chain."""

    prompt: Any
    """int32 bytes; in a trajectory of one turn the given array or list."""
    completion: Any
    rows: Sequence[Any]
    """Rows of each field; of one with `TokenField.new_only` a list of those of each turn."""
    turn: int
    """Index of the turn in `ValidatedTurns`."""

    @property
    def num_tokens(self) -> int:
        """Tokens of a chain that may continue."""
        return (len(self.prompt) + len(self.completion)) // INT32.itemsize


def int64s() -> array[int]:
    """Return an empty column, which `numpy.frombuffer` reads."""
    return array("q")


@dataclass
class ValidatedTurns:
    """Validated trajectories as columns, ready to copy into a buffer."""

    fields: tuple[TokenField, ...]
    trajectories: Sequence[Trajectory] = ()
    """The trajectories, until their numbers are copied."""
    labels: Labels = field(default_factory=Labels.empty)
    num_turns: array[int] = field(default_factory=int64s)
    """Turns of each trajectory."""
    chain_sizes: array[int] = field(default_factory=int64s)
    """Tokens of each chain."""
    ids: list[Any] = field(default_factory=list)
    """int32 arrays: prompt and completion of the last turn of each chain; the caller's arrays for a
    trajectory of one turn."""
    logprobs: list[Any] = field(default_factory=list)
    """float32 arrays: log-probabilities of each turn; may be the caller's arrays."""
    rows: list[list[Any]] = field(default_factory=list)
    """Rows of each declared field: of each turn, or of each chain in pieces. `Rows` each."""
    turn_chain: array[int] = field(default_factory=int64s)
    """Chain of each turn."""
    turn_begin: array[int] = field(default_factory=int64s)
    """Prompt tokens of each turn."""
    turn_size: array[int] = field(default_factory=int64s)
    """Completion tokens of each turn."""
    numbers: dict[str, array[Any]] = field(
        default_factory=lambda: {name: array(code) for name, code in TYPECODES.items()}
    )
    """`TURN_FIELDS` of each turn, by attribute."""
    version_runs: dict[int, Sequence[VersionRun]] = field(default_factory=dict)
    """Version runs of turns with several versions, by turn."""
    num_tokens: int = 0
    """Sum of `chain_sizes`."""
    num_generated: int = 0
    """Sum of `turn_size`."""
    num_breaks: int = 0
    """Turns that begin a further chain of their trajectory."""
    has_retokenized: bool = False
    """Whether one of the first `MOST_BREAKS` breaks looks like re-tokenized text."""
    contradicted: tuple[int, str] | None = None
    """Turn, and the extra field whose rows alone made it a break; of the first `MOST_BREAKS`."""
    has_lists: bool = False
    """Whether lists are among `ids` and `logprobs`, until `validate_turns` returns."""


def validate_turns(
    trajectories: Iterable[Trajectory], fields: tuple[TokenField, ...]
) -> ValidatedTurns:
    """Convert trajectories, check everything except the stored numbers, find the chains.

    `copy_numbers` checks the stored ids and log-probabilities in bulk.

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If a value is out of range, lengths disagree, or there is no turn. Both name the
            trajectory, the turn and the value.
    """
    intake = ValidatedTurns(fields, tuple(trajectories), rows=[[] for _ in fields])
    for trajectory in intake.trajectories:
        _take_trajectory(intake, trajectory)
    intake.num_tokens, intake.num_generated = sum(intake.chain_sizes), sum(intake.turn_size)
    if intake.has_lists:
        try:
            intake.ids = _as_arrays(intake.ids, "i")
            intake.logprobs = _as_arrays(intake.logprobs, "f")
        except NUMBER_ERRORS:
            check_numbers(intake.trajectories)
            raise
    return intake


def _take_trajectory(intake: ValidatedTurns, trajectory: Trajectory) -> None:
    """Check one trajectory and append it to the columns."""
    index, tips = -1, list[ChainEnd]()
    try:
        intake.labels.append(*checked_labels(trajectory))
        alone = len(trajectory.turns) == 1
        for index, turn in enumerate(trajectory.turns):  # noqa: B007 - for the error
            _take_turn(intake, tips, turn, alone=alone)
    except (TypeError, ValueError) as error:
        raise located(error, trajectory, index) from error.__cause__
    intake.num_turns.append(len(trajectory.turns))
    for tip in tips:
        intake.chain_sizes.append(intake.turn_begin[tip.turn] + intake.turn_size[tip.turn])
        ids = tip.prompt, tip.completion
        intake.ids += ids if alone else [np.frombuffer(part or b"", INT32) for part in ids]
    for number, spec in enumerate(intake.fields):
        if not spec.generated_only:
            for tip in tips:
                intake.rows[number] += tip.rows[number] if spec.new_only else [tip.rows[number]]


def located(error: Exception, trajectory: Any, turn: int) -> TypeError | ValueError:
    """Return the error with the names of the trajectory and, unless it is -1, the turn."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    if not isinstance(trajectory, Trajectory):
        return kind(str(error))
    place = "" if turn < 0 else f", turn {turn}"
    return kind(f"trajectory {trajectory.id!r}{place}: {error}")


def copy_numbers(
    intake: ValidatedTurns, ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]
) -> None:
    """Copy the token ids and log-probabilities of ``intake`` to the stream, and check the copies.

    The intake releases the arrays.

    Args:
        intake: Result of `validate_turns`; can be copied once.
        ids: ``[intake.num_tokens]``.
        logprobs: ``[intake.num_generated]``.

    Raises:
        ValueError: If an id is negative or a log-probability is not finite. The error names
            trajectory and turn; ``ids`` and ``logprobs`` are undefined.
    """
    for pieces, out in ((intake.ids, ids), (intake.logprobs, logprobs)):
        if pieces:
            np.concatenate(pieces, out=out)
    with np.errstate(all="ignore"):
        # a sum is cheaper than a test of each number, but may overflow if all are finite
        all_finite = np.isfinite(logprobs.sum()) or np.isfinite(logprobs).all()
    if not all_finite or (ids.size and ids.min() < 0):
        check_numbers(intake.trajectories)
        raise ValueError(f"{named(intake.labels)}: an array changed while it was read")
    intake.trajectories, intake.ids, intake.logprobs = (), [], []


def check_numbers(trajectories: Sequence[Trajectory]) -> None:
    """Raise the error of the first turn with a wrong number, which checks in bulk do not name."""
    for trajectory in trajectories:
        for index, turn in enumerate(trajectory.turns):
            try:
                as_ids("prompt_ids", turn.prompt_ids)
                as_ids("completion_ids", turn.completion_ids)
                as_logprobs("completion_logprobs", turn.completion_logprobs)
            except (TypeError, ValueError) as error:
                raise located(error, trajectory, index) from error.__cause__


def _as_arrays(pieces: Sequence[Any], typecode: Typecode) -> list[Any]:
    """Convert the lists among ``pieces``; consecutive tiny lists are converted together."""
    arrays: list[Any] = []
    joined: list[Any] = []
    for piece in pieces:
        if type(piece) is list and len(piece) < TINY:
            joined += piece
            continue
        if joined:
            arrays.append(packed_numbers(joined, typecode))
            joined = []
        arrays.append(packed_numbers(piece, typecode) if type(piece) is list else piece)
    if joined:
        arrays.append(packed_numbers(joined, typecode))
    return arrays


def labelled(intake: ValidatedTurns, turn: int) -> str:
    """Return the name of a turn, an index of the intake, for an error message."""
    trajectory = 0
    while turn >= intake.num_turns[trajectory]:
        turn -= intake.num_turns[trajectory]
        trajectory += 1
    return f"trajectory {intake.labels.ids[trajectory]!r}, turn {turn}"


def checked_labels(trajectory: Trajectory) -> tuple[Any, ...]:
    """Check and return the fields of a trajectory except its turns, which must be one or more."""
    if not isinstance(trajectory, Trajectory):
        raise TypeError(f"expected a Trajectory, got {type(trajectory).__name__}")
    name, group = trajectory.id, trajectory.group
    if not isinstance(name, str):
        raise TypeError(f"trajectory id must be a str, got {shown(name)}")
    if group is not None and not isinstance(group, str):
        raise TypeError(f"group must be a str or None, got {shown(group)}")
    if not trajectory.turns:
        raise ValueError("must have at least one turn, got none")
    task_id, birth_time_ms = trajectory.task_id, trajectory.birth_time_ms
    if task_id is not None:
        task_id = as_integer("task_id", task_id)
    if birth_time_ms is not None:
        birth_time_ms = as_integer("birth_time_ms", birth_time_ms)
    discount = trajectory.turn_discount
    if type(discount) is not float or not -FLOAT32_MAX <= discount <= FLOAT32_MAX:
        discount = _as_number("turn_discount", discount)
    truncated = trajectory.truncated
    if truncated is not None:
        truncated = _as_bool("truncated", truncated)
    return name, group, task_id, birth_time_ms, discount, truncated


def _as_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return bool(value)


def _as_number(name: str, value: Any) -> float:
    """Convert a number; a bool is an error, as it is for tokens."""
    if is_bool(value):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    return as_number(name, value)


def _take_turn(intake: ValidatedTurns, tips: list[ChainEnd], turn: Turn, *, alone: bool) -> None:
    """Check one turn, append it to the columns, and extend or open its chain in ``tips``."""
    if not isinstance(turn, Turn):
        raise TypeError(f"expected a Turn, got {type(turn).__name__}")
    prompt: Any = turn.prompt_ids
    completion: Any = turn.completion_ids
    logprobs: Any = turn.completion_logprobs
    if alone and type(prompt) is type(completion) is type(logprobs) is list:
        intake.has_lists = True
    else:
        prompt = narrow_ids("prompt_ids", prompt)
        completion = narrow_ids("completion_ids", completion)
        logprobs = narrow_logprobs("completion_logprobs", logprobs)
    begin, size = len(prompt), len(completion)
    if not alone:  # bytes are compared fastest
        prompt, completion = prompt.tobytes(), completion.tobytes()
    if begin == 0:
        raise ValueError("prompt_ids must not be empty")
    if len(logprobs) != size:
        raise ValueError(
            f"completion_logprobs must have one entry per completion token, got {len(logprobs)} "
            f"for {size} token(s)"
        )
    rows: list[Any] = []
    given = turn.fields
    if intake.fields or given:
        rows = rows_of_turn(intake.fields, given, (begin, size))
    tip = ChainEnd(prompt, completion, rows, len(intake.turn_size))
    take_numbers(intake, turn, begin, size)
    chain = _longest_prefix(tips, tip, intake.fields) if tips else None
    history = ((), 0) if chain is None else (tips[chain].rows, tips[chain].num_tokens)
    extend_rows(intake.fields, rows, history, begin + size)
    if chain is None:
        chain = len(tips)
        tips.append(tip)
        _look_at_break(intake, tips)
    else:
        tips[chain] = tip
    intake.logprobs.append(logprobs)
    for number, spec in enumerate(intake.fields):
        if spec.generated_only:
            intake.rows[number].append(rows[number])
    intake.turn_chain.append(len(intake.chain_sizes) + chain)


def _look_at_break(intake: ValidatedTurns, tips: list[ChainEnd]) -> None:
    """Count a break, if there is one, and note what it looks like.

    That is re-tokenized text, or rows of an extra field that differ where the tokens agree.
    """
    intake.num_breaks += len(tips) > 1
    if len(tips) > 1 and intake.num_breaks <= MOST_BREAKS:
        history, turn = tips[-2:]
        intake.has_retokenized |= is_retokenized(history.prompt, history.completion, turn.prompt)
        if intake.fields and turn.prompt.startswith(history.prompt + history.completion):
            differing = _first_differing(intake.fields, history, turn)
            intake.contradicted = intake.contradicted or (turn.turn, differing)


def take_numbers(intake: ValidatedTurns, turn: Turn, begin: int, size: int) -> None:
    """Validate the scalars of a turn and append them to the columns.

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If a number is not finite, or versions make no sense.
    """
    truncated, reward = turn.truncated, turn.reward
    if truncated is not True and truncated is not False:
        truncated = _as_bool("truncated", truncated)
    if type(reward) is not float or not -FLOAT32_MAX <= reward <= FLOAT32_MAX:
        reward = _as_number("reward", reward)
    reason = turn.stop_reason
    if reason not in STOP_REASONS:
        known = ", ".join(map(repr, STOP_REASONS))
        raise ValueError(f"stop_reason must be one of {known}, got {shown(reason)}")
    start, end, spans = turn.version_start, turn.version_end, turn.version_spans
    plain = spans is None and type(start) is int and type(end) is int
    if not plain or not 0 <= start <= end <= INT32_MAX:
        runs, start, end = as_version_runs("", spans, start, end, size)
        if len(runs) > 1 or runs[0][0] != start:
            intake.version_runs[len(intake.turn_size)] = runs
    intake.turn_begin.append(begin)
    intake.turn_size.append(size)
    numbers = intake.numbers
    numbers["reward"].append(reward)
    numbers["truncated"].append(truncated)
    numbers["version_start"].append(start)
    numbers["version_end"].append(end)
    numbers["stop_reason"].append(STOP_REASONS.index(reason))


def _longest_prefix(
    tips: Sequence[ChainEnd], turn: ChainEnd, fields: Sequence[TokenField]
) -> int | None:
    """Return the chain to extend, trying the longest first and the latest of equal length."""
    prompt: bytes = turn.prompt
    sizes = [len(tip.prompt) + len(tip.completion) for tip in tips]
    for chain in sorted(range(len(tips)), key=lambda chain: (-sizes[chain], -chain)):
        tip = tips[chain]
        # the completion first: most prompts that diverge do so there
        if not prompt.startswith(tip.completion, len(tip.prompt)):
            continue
        if prompt.startswith(tip.prompt) and not _first_differing(fields, tip, turn):
            return chain
    return None


def _first_differing(fields: Sequence[TokenField], history: ChainEnd, turn: ChainEnd) -> str:
    """Return the first field whose rows differ between a chain and a prompt that repeats it."""
    return first_differing(fields, history.rows, turn.rows, history.num_tokens)


def named(labels: Labels) -> str:
    """Return the name of a call's trajectories for an error message."""
    first, *others = labels.ids
    return f"trajectory {first!r}" + (f" with {len(others)} more" if others else "")
