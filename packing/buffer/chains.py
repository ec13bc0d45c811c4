"""Validation of trajectories, and their split into chains that store each token once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from trajpack.packing.buffer.breaks import is_retokenized
from trajpack.packing.conversion import (
    FLOAT32_MAX,
    INT32,
    INT32_MAX,
    NotPackedError,
    Typecode,
    as_integer,
    as_number,
    as_version_runs,
    is_bool,
    narrow_ids,
    narrow_logprobs,
    not_packed,
    packed_numbers,
    shown,
)
from trajpack.packing.token_fields import Rows, TokenField, rows_of_turn
from trajpack.packing.turn_fields import TURN_FIELDS, TurnField
from trajpack.packing.types import Trajectory, Turn

TINY = 256
"""Lists of fewer numbers are concatenated before their conversion."""
MOST_BREAKS = 4
"""Breaks of a call that are looked at for re-tokenized text."""

VersionRun = tuple[int, int, int]
ID_FIELDS = ("prompt_ids", "completion_ids")
_CHECKED = {"reward", "truncated", "version_start", "version_end"}
_PLAIN_FIELDS = [one for one in TURN_FIELDS if one.attribute not in _CHECKED]
"""Numbers of a turn that `take_numbers` checks by their dtype alone."""


class TrajectoryLabels(NamedTuple):
    """Strings and scalars of a trajectory that stay on the host."""

    id: str
    group: str | None
    task_id: int | None
    birth_time_ms: int | None
    turn_discount: float


class ChainEnd(NamedTuple):
    """Last turn of a chain, which holds all tokens of the chain."""

    prompt: Any
    """int32 bytes; in a trajectory of one turn the given array or list."""
    completion: Any
    rows: Sequence[Rows]
    turn: int
    """Index of the turn in `ValidatedTurns`."""


@dataclass
class ValidatedTurns:
    """Validated trajectories as columns, ready to copy into a buffer."""

    fields: tuple[TokenField, ...]
    labels: list[TrajectoryLabels] = field(default_factory=list)
    num_turns: list[int] = field(default_factory=list)
    """Turns of each trajectory."""
    chain_sizes: list[int] = field(default_factory=list)
    """Tokens of each chain."""
    last_turns: list[int] = field(default_factory=list)
    """Last turn of each chain."""
    ids: list[Any] = field(default_factory=list)
    """int32 arrays: prompt and completion of the last turn of each chain; the caller's arrays for a
    trajectory of one turn."""
    logprobs: list[Any] = field(default_factory=list)
    """float32 arrays: log-probabilities of each turn; may be the caller's arrays."""
    rows: list[list[Any]] = field(default_factory=list)
    """Rows of each declared field: of each turn, or of each chain in pieces. `Rows` each."""
    turn_chain: list[int] = field(default_factory=list)
    """Chain of each turn."""
    turn_begin: list[int] = field(default_factory=list)
    """Prompt tokens of each turn."""
    turn_size: list[int] = field(default_factory=list)
    """Completion tokens of each turn."""
    numbers: dict[str, list[Any]] = field(
        default_factory=lambda: {one.attribute: [] for one in TURN_FIELDS}
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

    def sizes(self, typecode: Typecode) -> list[int]:
        """Return how many numbers each piece of `ids` (``"i"``) or `logprobs` (``"f"``) has."""
        begin, size = self.turn_begin, self.turn_size
        if typecode == "f":
            return size
        return [count for turn in self.last_turns for count in (begin[turn], size[turn])]


def validate_turns(
    trajectories: Iterable[Trajectory], fields: tuple[TokenField, ...]
) -> ValidatedTurns:
    """Convert trajectories, check everything except the ids and log-probabilities, find the chains.

    `copy_numbers` checks the stored ids and log-probabilities in bulk. Each number is read from the
    caller's arrays once, so the checked values are the stored values.

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If a value is out of range, lengths disagree, there is no turn, or a sequence
            changed while it was read. Both name the trajectory, the turn and the value.

    Cost: each prompt of a trajectory of several turns is copied once and compared with the chains
    it may extend, at memory speed.
    """
    intake = ValidatedTurns(fields, rows=[[] for _ in fields])
    for trajectory in trajectories:
        _take_trajectory(intake, trajectory)
    intake.num_tokens, intake.num_generated = sum(intake.chain_sizes), sum(intake.turn_size)
    if intake.has_lists:
        intake.ids = _as_arrays(intake, "i", intake.ids)
        intake.logprobs = _as_arrays(intake, "f", intake.logprobs)
    return intake


def _take_trajectory(intake: ValidatedTurns, trajectory: Trajectory) -> None:
    """Check one trajectory and append it to the columns."""
    turn_index = -1
    try:
        intake.labels.append(checked_labels(trajectory))
        turns = tuple(trajectory.turns)
        alone = len(turns) == 1
        tips: list[ChainEnd] = []
        for turn_index, turn in enumerate(turns):  # noqa: B007 - for the error
            _take_turn(intake, tips, turn, alone=alone)
        if turn_index < 0:
            raise ValueError("must have at least one turn, got none")
    except MemoryError:
        raise
    except (TypeError, ValueError) as error:
        raise placed(error, trajectory, turn_index) from error.__cause__
    except Exception as error:  # raised by a class of the caller
        unread = ValueError(f"it cannot be read: {shown(error)}")
        raise placed(unread, trajectory, turn_index) from error
    intake.num_turns.append(turn_index + 1)
    for tip in tips:
        intake.chain_sizes.append(intake.turn_begin[tip.turn] + intake.turn_size[tip.turn])
        intake.last_turns.append(tip.turn)
        ids = tip.prompt, tip.completion
        intake.ids += ids if alone else [np.frombuffer(part or b"", INT32) for part in ids]
    for number, spec in enumerate(intake.fields):
        if not spec.generated_only:
            intake.rows[number].extend(tip.rows[number] for tip in tips)


def copy_numbers(
    intake: ValidatedTurns, ids: npt.NDArray[np.int32], logprobs: npt.NDArray[np.float32]
) -> None:
    """Copy the token ids and log-probabilities of ``intake`` to the stream, and check the copies.

    Another thread may write the caller's arrays, so only the copies are checked. The intake
    releases the arrays.

    Args:
        intake: Result of `validate_turns`; can be copied once.
        ids: ``[intake.num_tokens]``.
        logprobs: ``[intake.num_generated]``.

    Raises:
        ValueError: If an id is negative, a log-probability is not finite, or an array changed its
            length. The error names trajectory and turn; ``ids`` and ``logprobs`` are undefined.
    """
    pieces = {"i": intake.ids, "f": intake.logprobs}
    intake.ids, intake.logprobs = [], []
    outs: dict[Typecode, npt.NDArray[Any]] = {"i": ids, "f": logprobs}
    for typecode, out in outs.items():
        try:
            if pieces[typecode]:
                np.concatenate(pieces[typecode], out=out)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{named(intake.labels)}: an array changed while it was read"
            ) from error
    if ids.size and ids.min() < 0:
        place = int((ids < 0).argmax())
        where, index = _located(intake, "i", 0, index=place)
        raise ValueError(f"{where} must be 0 or more, got {ids[place]} at index {index}")
    with np.errstate(all="ignore"):
        # a sum is cheaper than a test of each number, but may overflow if all are finite
        all_finite = np.isfinite(logprobs.sum()) or np.isfinite(logprobs).all()
    if not all_finite:
        place = int(np.isfinite(logprobs).argmin())
        where, index = _located(intake, "f", 0, index=place)
        raise ValueError(f"{where} must be finite float32, got {logprobs[place]} at index {index}")


def _as_arrays(intake: ValidatedTurns, typecode: Typecode, pieces: Sequence[Any]) -> list[Any]:
    """Convert the lists among ``pieces`` to arrays; consecutive tiny lists are converted together.

    Raises:
        TypeError: If an entry of a list is no number.
        ValueError: If a number does not fit, or the length of a piece changed after its check.
    """
    arrays: list[Any] = []
    joined: list[Any] = []  # the `total` numbers of the pieces from `first` on
    first = total = 0
    for number, (piece, size) in enumerate(zip(pieces, intake.sizes(typecode), strict=True)):
        if type(piece) is list and size < TINY:
            joined += piece
            total += size
            if len(joined) != total:
                raise _changed(intake, typecode, number)
            continue
        if joined:
            arrays.append(_packed(intake, typecode, first, numbers=joined))
            joined = []
        first, total = number + 1, 0
        is_list = type(piece) is list
        arrays.append(_packed(intake, typecode, number, numbers=piece) if is_list else piece)
        if len(arrays[-1]) != size:
            raise _changed(intake, typecode, number)
    if joined:
        arrays.append(_packed(intake, typecode, first, numbers=joined))
    return arrays


def _packed(
    intake: ValidatedTurns, typecode: Typecode, piece: int, *, numbers: list[Any]
) -> npt.NDArray[Any]:
    """Convert numbers; ``piece`` is the first piece they come from."""
    try:
        return packed_numbers(numbers, typecode)
    except NotPackedError as error:
        where, index = _located(intake, typecode, piece, index=error.index)
        refused = NotPackedError(index, error.value)
        raise not_packed(where, refused, typecode) from error.__cause__


def _changed(intake: ValidatedTurns, typecode: Typecode, piece: int) -> ValueError:
    """Return the error for a piece whose length changed after its check."""
    if typecode == "f":
        turn, name = piece, "completion_logprobs"
    else:
        turn, name = intake.last_turns[piece // 2], ID_FIELDS[piece % 2]
    return ValueError(f"{labelled(intake, turn)}: {name} changed while it was read")


def _located(
    intake: ValidatedTurns, typecode: Typecode, piece: int, *, index: int
) -> tuple[str, int]:
    """Return trajectory, turn and field of a number as text, and its index in that field.

    ``index`` counts from the beginning of ``piece``, a piece of `ValidatedTurns.ids` (``"i"``) or
    `ValidatedTurns.logprobs` (``"f"``).
    """
    sizes = intake.sizes(typecode)
    while index >= sizes[piece]:
        index -= sizes[piece]
        piece += 1
    if typecode == "f":
        return f"{labelled(intake, piece)}: completion_logprobs", index
    chain = piece // 2
    place = index + piece % 2 * intake.turn_begin[intake.last_turns[chain]]
    for turn, of in enumerate(intake.turn_chain):  # the first turn with the token
        begin = intake.turn_begin[turn]
        if of == chain and place < begin + intake.turn_size[turn]:
            break
    is_completion = place >= begin
    name = f"{labelled(intake, turn)}: {ID_FIELDS[is_completion]}"
    return name, place - begin if is_completion else place


def labelled(intake: ValidatedTurns, turn: int) -> str:
    """Return the name of a turn, an index of the intake, for an error message."""
    trajectory = 0
    while turn >= intake.num_turns[trajectory]:
        turn -= intake.num_turns[trajectory]
        trajectory += 1
    return f"trajectory {intake.labels[trajectory].id!r}, turn {turn}"


def placed(error: Exception, trajectory: Any, index: int) -> TypeError | ValueError:
    """Return the error with the names of the trajectory and the turn."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    try:
        name = str.__str__(trajectory.id) if isinstance(trajectory, Trajectory) else None
    except Exception:  # noqa: BLE001 - no str
        name = None
    if name is None:
        return kind(str(error))
    turn = f", turn {index}" if index >= 0 else ""
    return kind(f"trajectory {name!r}{turn}: {error}")


def checked_labels(trajectory: Trajectory) -> TrajectoryLabels:
    """Check the fields of a trajectory except its turns."""
    if not isinstance(trajectory, Trajectory):
        raise TypeError(f"expected a Trajectory, got {type(trajectory).__name__}")
    name, group = trajectory.id, trajectory.group
    if not isinstance(name, str):
        raise TypeError(f"trajectory id must be a str, got {shown(name)}")
    if group is not None and not isinstance(group, str):
        raise TypeError(f"group must be a str or None, got {shown(group)}")
    if type(name) is not str:
        name = str.__str__(name)  # a plain str, not the subclass
    if group is not None and type(group) is not str:
        group = str.__str__(group)
    task_id, birth_time_ms = trajectory.task_id, trajectory.birth_time_ms
    if task_id is not None:
        task_id = as_integer("task_id", task_id)
    if birth_time_ms is not None:
        birth_time_ms = as_integer("birth_time_ms", birth_time_ms)
    discount = trajectory.turn_discount
    if type(discount) is not float or not -FLOAT32_MAX <= discount <= FLOAT32_MAX:
        discount = _as_number("turn_discount", discount)
    return TrajectoryLabels(name, group, task_id, birth_time_ms, discount)


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
    if not alone:  # the compared values must be the stored values
        prompt, completion = prompt.tobytes(), completion.tobytes()
        begin, size = len(prompt) // INT32.itemsize, len(completion) // INT32.itemsize
    if begin == 0:
        raise ValueError("prompt_ids must not be empty")
    if len(logprobs) != size:
        raise ValueError(
            f"completion_logprobs must have one entry per completion token, got {len(logprobs)} "
            f"for {size} token(s)"
        )
    rows: Sequence[Rows] = ()
    given = turn.fields
    if intake.fields or given:
        rows = rows_of_turn(intake.fields, given, (begin, size), compared=not alone)
    tip = ChainEnd(prompt, completion, rows, len(intake.turn_size))
    take_numbers(intake, turn, begin, size)
    chain = _longest_prefix(tips, tip, intake.fields) if tips else None
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
    if truncated is not True and truncated is not False and not isinstance(truncated, np.bool_):
        raise TypeError(f"truncated must be a bool, got {type(truncated).__name__}")
    if type(reward) is not float or not -FLOAT32_MAX <= reward <= FLOAT32_MAX:
        reward = _as_number("reward", reward)
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
    numbers["truncated"].append(bool(truncated))
    numbers["version_start"].append(start)
    numbers["version_end"].append(end)
    for one in _PLAIN_FIELDS:
        numbers[one.attribute].append(_checked_number(one, getattr(turn, one.attribute)))


def _checked_number(field: TurnField, value: Any) -> float:
    """Check a number of a turn by its dtype alone."""
    name = field.attribute
    if field.dtype == torch.bool:
        if not isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
        return bool(value)
    if field.dtype.is_floating_point:
        return _as_number(name, value)
    number = as_integer(name, value)
    if not -INT32_MAX <= number <= INT32_MAX:
        raise ValueError(f"{name} must fit int32, got {number}")
    return number


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
    end = (len(history.prompt) + len(history.completion)) // INT32.itemsize
    for spec, mine, theirs in zip(fields, history.rows, turn.rows, strict=True):
        if not spec.generated_only and not np.array_equal(mine, theirs[:end]):
            return spec.name
    return ""


def named(labels: Sequence[TrajectoryLabels]) -> str:
    """Return the name of a call's trajectories for an error message."""
    first = f"trajectory {labels[0].id!r}"
    return first if len(labels) == 1 else f"{first} with {len(labels) - 1} more"
