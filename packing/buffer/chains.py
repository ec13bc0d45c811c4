"""The reference of `take`: it checks trajectories and splits them into chains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from trajpack.packing.batch.breaks import is_retokenized
from trajpack.packing.buffer.staging import Staging
from trajpack.packing.buffer.stored import Count, Ints, Labels, NewTurns, Stored
from trajpack.packing.conversion import (
    INT32,
    INT32_MAX,
    as_ids,
    as_integer,
    as_logprobs,
    as_number,
    as_version_runs,
    is_bool,
    narrow_ids,
    narrow_logprobs,
    shown,
)
from trajpack.packing.ragged import concatenated
from trajpack.packing.token_fields import TokenField, extend_rows, first_differing, rows_of_turn
from trajpack.packing.turn_fields import STOP_REASONS
from trajpack.packing.types import Trajectory, Turn

MOST_BREAKS = 4
"""Breaks of a call that are looked at for re-tokenized text."""


class ChainEnd(NamedTuple):
    """Last turn of a chain, which holds all tokens of the chain."""

    prompt: Any
    """int32 bytes, as `completion`; the array in a trajectory of one turn."""
    completion: Any
    rows: Sequence[Any]
    """Rows of each field; of one with `TokenField.new_only` a list of those of each turn."""
    turn: int
    """Index of the turn in `NewTurns.turns`."""

    @property
    def num_tokens(self) -> int:
        """Tokens of a chain that may continue."""
        return (len(self.prompt) + len(self.completion)) // INT32.itemsize


class Signs(NamedTuple):
    """What the turns of a call have that is worth a warning."""

    largest_logprob: float = 0.0
    """Or 0."""
    has_retokenized: bool = False
    """Whether one of the first `MOST_BREAKS` breaks looks like re-tokenized text."""
    contradicted: str = ""
    """Name of a turn, and of the extra field whose rows alone made it one of these breaks."""


@dataclass
class ValidatedTurns:
    """Checked trajectories of one call, ready to be copied into a stream."""

    fields: tuple[TokenField, ...] = ()
    new: NewTurns = field(default_factory=lambda: NewTurns([], [], [], Labels.empty(), []))
    ids: list[Any] = field(default_factory=list)
    """int32 arrays: prompt and completion of the last turn of each chain."""
    logprobs: list[Any] = field(default_factory=list)
    """float32 arrays: log-probabilities of each turn; may be the caller's arrays."""
    rows: list[list[Any]] = field(default_factory=list)
    """Rows of each declared field: of each turn, or of each chain in pieces. `Rows` each."""
    num_generated: int = 0
    num_breaks: int = 0
    """Turns that begin a further chain of their trajectory."""
    signs: Signs = field(default_factory=Signs)

    @property
    def num_tokens(self) -> int:
        """Tokens of the chains."""
        return sum(self.new.chain_sizes)


def take_reference(
    stored: Stored,
    staging: Staging,
    trajectories: Sequence[Trajectory],
    fields: tuple[TokenField, ...],
    capacity: int | None,
) -> Signs:
    """Check trajectories and append them to the stream of ``staging`` and to ``stored``.

    Args:
        stored: Rows of the turns, chains and trajectories before.
        staging: Memory of the stream.
        trajectories: One or more.
        fields: Extra fields, those of ``stored``.
        capacity: Most tokens that may be stored.

    Raises:
        TypeError, ValueError: As `TrajectoryBuffer.extend`; ``stored`` is then as before.
    """
    intake = validate_turns(trajectories, fields)
    num_tokens, reached = intake.num_tokens, stored.counts[Count.TOKENS]
    if capacity is not None and reached + num_tokens > capacity:
        first, *others = intake.new.labels.ids
        more = f" with {len(others)} more" if others else ""
        raise ValueError(
            f"trajectory {first!r}{more} needs {num_tokens} tokens, but {capacity - reached} of "
            f"the buffer's {capacity} are left; pack and clear it, or give it more capacity"
        )
    used = stored.counts[Count.WORDS]
    logprobs = used + num_tokens
    blocks = list[tuple[int, list[Any]]]()
    end, begins, values = logprobs + intake.num_generated, list[int](), list[Ints]()
    sizes = [turn[SIZE] for turn in intake.new.turns]
    for declared, rows in zip(fields, intake.rows, strict=True):
        begin = -(-end // 4) * 4  # words: a multiple of 16 bytes
        begins.append(4 * begin)
        if declared.ragged:
            end = place_ragged(declared, rows, begin, sizes, blocks, values)
        else:
            blocks.append((4 * begin, rows))
            end = begin + -(-sum(piece.nbytes for piece in rows) // 4)
    if end > INT32_MAX:
        raise ValueError(f"a buffer holds at most {INT32_MAX} words, this one needs {end}")
    stream = staging.reserve(end, used)
    ids = stream[used:logprobs]
    floats = stream[logprobs : logprobs + intake.num_generated].view(np.float32)
    np.concatenate(intake.ids, out=ids)
    np.concatenate(intake.logprobs, out=floats)
    for begin, pieces in blocks:
        flat = [piece.reshape(-1) for piece in pieces]
        size = sum(piece.size for piece in flat)
        np.concatenate(flat, out=stream.view(np.uint8)[begin : begin + size])
    if ids.min() < 0 or not np.isfinite(floats).all():
        _check_numbers(trajectories)
    stored.append(intake.new, logprobs, end, list(zip(fields, begins, strict=True)), values)
    return intake.signs._replace(largest_logprob=float(floats.max(initial=0.0)))


def _check_numbers(trajectories: Sequence[Trajectory]) -> None:
    """Raise the error of the first turn with a negative id, or an infinite log-probability."""
    for trajectory in trajectories:
        for index, turn in enumerate(trajectory.turns):
            try:
                as_ids("prompt_ids", turn.prompt_ids)
                as_ids("completion_ids", turn.completion_ids)
                as_logprobs("completion_logprobs", turn.completion_logprobs)
            except (TypeError, ValueError) as error:
                raise located(error, trajectory, index) from error.__cause__


def place_ragged(
    declared: TokenField,
    rows: Sequence[Any],
    begin: int,
    sizes: Sequence[int],
    blocks: list[tuple[int, list[Any]]],
    values: list[Ints],
) -> int:
    """Append where the rows of a ragged field go, and two numbers of each turn; return the end."""
    cu, flat = concatenated(rows)
    without = np.append(0, (np.diff(cu) == 0).cumsum(dtype=np.int64))
    bounds = np.append(0, np.array(sizes, np.int64).cumsum())
    values += [np.diff(cu[bounds]), np.diff(without[bounds])]
    unit = math.lcm(4, declared.value_bytes) // 4  # words
    place = -(-(begin + 2 * (len(cu) - 1)) // unit) * unit
    first = cu + 4 * place // declared.value_bytes
    if first[-1] > INT32_MAX:
        raise ValueError(f"field {declared.name!r} must have its values in {INT32_MAX}")
    spans = np.stack([first[:-1], np.diff(cu)], 1).astype(np.int32).view(np.uint8)
    blocks += [(4 * begin, [spans]), (4 * place, [flat])]
    return place + -(-int(flat.size) // (4 * unit)) * unit


def validate_turns(
    trajectories: Sequence[Trajectory], fields: tuple[TokenField, ...]
) -> ValidatedTurns:
    """Convert and check trajectories, and find their chains.

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If a value is out of range, lengths disagree, or there is no turn. Both name the
            trajectory, the turn and the value.
    """
    intake = ValidatedTurns(fields, rows=[[] for _ in fields])
    for trajectory in trajectories:
        index, tips = -1, list[ChainEnd]()
        try:
            intake.new.labels.append(*checked_labels(trajectory))
            for index, turn in enumerate(trajectory.turns):
                _take_turn(intake, tips, turn, (trajectory.id, index, len(trajectory.turns)))
        except (TypeError, ValueError) as error:
            raise located(error, trajectory, index) from error.__cause__
        intake.new.num_turns.append(index + 1)
        for tip in tips:
            intake.new.chain_sizes.append(sum(intake.new.turns[tip.turn][BEGIN : SIZE + 1]))
            ids = tip.prompt, tip.completion
            intake.ids += [np.frombuffer(part, INT32) for part in ids] if index else ids
        for number, spec in enumerate(fields):
            if not spec.generated_only:
                for tip in tips:
                    intake.rows[number] += tip.rows[number] if spec.new_only else [tip.rows[number]]
    return intake


def located(error: Exception, trajectory: Any, turn: int) -> TypeError | ValueError:
    """Return the error with the names of the trajectory and, unless it is -1, the turn."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    if not isinstance(trajectory, Trajectory):
        return kind(str(error))
    place = "" if turn < 0 else f", turn {turn}"
    return kind(f"trajectory {trajectory.id!r}{place}: {error}")


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
    discount = _as_number("turn_discount", trajectory.turn_discount)
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
    if type(value) is not float and is_bool(value):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    return as_number(name, value)


def _take_turn(
    intake: ValidatedTurns, tips: list[ChainEnd], turn: Turn, place: tuple[str, int, int]
) -> None:
    """Check one turn, append it to the columns, and extend or open its chain in ``tips``."""
    if not isinstance(turn, Turn):
        raise TypeError(f"expected a Turn, got {type(turn).__name__}")
    prompt: Any = narrow_ids("prompt_ids", turn.prompt_ids)
    completion: Any = narrow_ids("completion_ids", turn.completion_ids)
    logprobs = narrow_logprobs("completion_logprobs", turn.completion_logprobs)
    begin, size = len(prompt), len(completion)
    if begin == 0:
        raise ValueError("prompt_ids must not be empty")
    if len(logprobs) != size:
        raise ValueError(
            f"completion_logprobs must have one entry per completion token, got {len(logprobs)} "
            f"for {size} token(s)"
        )
    rows: list[Any] = []
    if intake.fields or turn.fields:
        rows = rows_of_turn(intake.fields, turn.fields, (begin, size))
    if place[2] > 1:  # bytes are compared fastest
        prompt, completion = prompt.tobytes(), completion.tobytes()
    tip = ChainEnd(prompt, completion, rows, len(intake.new.turns))
    chain = _longest_prefix(tips, tip, intake.fields) if tips else None
    history = ((), 0) if chain is None else (tips[chain].rows, tips[chain].num_tokens)
    extend_rows(intake.fields, rows, history, begin + size)
    if chain is None:
        chain = len(tips)
        tips.append(tip)
        if chain:
            _look_at_break(intake, tips, place)
    else:
        tips[chain] = tip
    take_numbers(intake, turn, len(intake.new.chain_sizes) + chain, (begin, size))
    intake.logprobs.append(logprobs)
    for number, spec in enumerate(intake.fields):
        if spec.generated_only:
            intake.rows[number].append(rows[number])


def _look_at_break(
    intake: ValidatedTurns, tips: Sequence[ChainEnd], place: tuple[str, int, int]
) -> None:
    """Count a break, and note what it looks like.

    That is re-tokenized text, or rows of an extra field that differ where the tokens agree.
    """
    intake.num_breaks += 1
    if intake.num_breaks > MOST_BREAKS:
        return
    signs, (history, turn) = intake.signs, tips[-2:]
    if is_retokenized(history.prompt, history.completion, turn.prompt):
        signs = signs._replace(has_retokenized=True)
    if intake.fields and turn.prompt.startswith(history.prompt + history.completion):
        differing = _first_differing(intake.fields, history, turn)
        name, number, _ = place
        broken = f"trajectory {name!r}, turn {number}: field {differing!r}"
        signs = signs._replace(contradicted=signs.contradicted or broken)
    intake.signs = signs


def take_numbers(intake: ValidatedTurns, turn: Turn, chain: int, sizes: tuple[int, int]) -> None:
    """Validate the numbers of a turn and append its row.

    Args:
        intake: What the turn is appended to.
        turn: The turn.
        chain: Its chain, counted from those of the call.
        sizes: Tokens of its prompt and of its completion.

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If a number is not finite, or versions make no sense.
    """
    begin, size = sizes
    truncated = _as_bool("truncated", turn.truncated)
    reward = _as_number("reward", turn.reward)
    if turn.stop_reason not in STOP_REASONS:
        known = ", ".join(map(repr, STOP_REASONS))
        raise ValueError(f"stop_reason must be one of {known}, got {shown(turn.stop_reason)}")
    reason = STOP_REASONS.index(turn.stop_reason)
    versions = turn.version_spans, turn.version_start, turn.version_end
    start, end, spans = version_rows(len(intake.new.turns), *versions, size)
    intake.new.spans.extend(spans)
    row = (reward, intake.num_generated, chain, begin, size, start, end, truncated, reason)
    intake.new.turns.append(row)
    intake.num_generated += size


BEGIN, SIZE = 3, 4
"""Places of the sizes in a row of `take_numbers`, which is one of `TURN`."""


def version_rows(
    turn: int, spans: Any, version_start: Any, version_end: Any, size: int
) -> tuple[int, int, list[tuple[int, ...]]]:
    """Check the versions of a turn; return its start and end, and its rows of `Stored.spans`."""
    plain = spans is None and type(version_start) is type(version_end) is int
    if plain and 0 <= version_start <= version_end <= INT32_MAX:
        return version_start, version_end, []
    runs, start, end = as_version_runs("", spans, version_start, version_end, size)
    if len(runs) == 1 and runs[0][0] == start:
        return start, end, []
    return start, end, [(turn, *run) for run in runs]


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
