"""Chains: the fewest token streams that hold a trajectory, each token once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trajpack.packing.conversion import (
    FLOAT32_MAX,
    INT32_MAX,
    as_ids,
    as_integer,
    as_logprobs,
    as_number,
    as_version_runs,
    narrow_ids,
    narrow_logprobs,
)
from trajpack.packing.token_fields import Bytes, TokenField, rows_of_turn
from trajpack.packing.types import Trajectory, Turn

VersionRun = tuple[int, int, int]


class Labels(NamedTuple):
    """What stays on the host of a trajectory."""

    id: str
    group: str | None
    task_id: int | None
    birth_time_ms: int | None
    turn_discount: float


class Tip(NamedTuple):
    """The last turn of a chain: its prompt and completion are the chain."""

    size: int
    prompt: Any
    """int32 array; the list it came in where no other turn is compared with it."""
    completion: Any
    rows: Sequence[Bytes]


@dataclass
class Intake:
    """Trajectories on their way into a buffer, column by column, in the order they came."""

    fields: tuple[TokenField, ...]
    labels: list[Labels] = field(default_factory=list)
    num_turns: list[int] = field(default_factory=list)
    """Turns of each trajectory."""
    chain_sizes: list[int] = field(default_factory=list)
    """Tokens of each chain."""
    ids: list[npt.NDArray[np.int32] | list[int]] = field(default_factory=list)
    """The chains' tokens, chain after chain, in pieces."""
    logprobs: list[npt.NDArray[np.float32] | list[float]] = field(default_factory=list)
    """Log-probabilities of each turn. Lists are converted where they are stored."""
    rows: list[list[Bytes]] = field(default_factory=list)
    """Of each declared field: rows of each turn, or in pieces of each chain."""
    turn_chain: list[int] = field(default_factory=list)
    """Chain of each turn."""
    turn_begin: list[int] = field(default_factory=list)
    """Prompt tokens of each turn."""
    turn_size: list[int] = field(default_factory=list)
    """Completion tokens of each turn."""
    rewards: list[float] = field(default_factory=list)
    truncated: list[bool] = field(default_factory=list)
    version_start: list[int] = field(default_factory=list)
    version_end: list[int] = field(default_factory=list)
    version_runs: dict[int, Sequence[VersionRun]] = field(default_factory=dict)
    """Of the turns that more than one version sampled."""

    @property
    def num_tokens(self) -> int:
        """Tokens to be stored."""
        return sum(self.chain_sizes)

    @property
    def num_generated(self) -> int:
        """Generated tokens to be stored."""
        return sum(self.turn_size)


def take_in(trajectories: Sequence[Trajectory], fields: tuple[TokenField, ...]) -> Intake:
    """Convert trajectories, check all but single ids and log-probabilities, and find the chains.

    Those are checked in bulk, where they are stored; `name_fault` then says which one it was.

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If a value is out of range, lengths disagree, or there is no turn. Both
            name the trajectory, the turn and the value.

    Cost: the prompt of each turn is compared once, at memory speed, with a chain it may extend.
    """
    intake = Intake(fields, rows=[[] for _ in fields])
    for trajectory in trajectories:
        turn_index = -1
        try:
            intake.labels.append(checked_labels(trajectory))
            tips: list[Tip] = []
            only = len(trajectory.turns) == 1
            for turn_index, turn in enumerate(trajectory.turns):  # noqa: B007 - for the error
                _take_turn(intake, tips, turn, as_lists=only)
            if turn_index < 0:
                raise ValueError("must have at least one turn, got none")
        except (TypeError, ValueError) as error:
            raise placed(error, trajectory, turn_index) from error.__cause__
        intake.num_turns.append(turn_index + 1)
        for tip in tips:
            intake.chain_sizes.append(tip.size)
            intake.ids += (tip.prompt, tip.completion)
        for number, spec in enumerate(fields):
            if not spec.generated_only:
                intake.rows[number].extend(tip.rows[number] for tip in tips)
    return intake


def name_fault(trajectories: Sequence[Trajectory]) -> None:
    """Raise for the first token id or log-probability that cannot be stored."""
    for trajectory in trajectories:
        for index, turn in enumerate(trajectory.turns):
            try:
                as_ids("prompt_ids", turn.prompt_ids)
                as_ids("completion_ids", turn.completion_ids)
                as_logprobs("completion_logprobs", turn.completion_logprobs)
            except (TypeError, ValueError) as error:
                raise placed(error, trajectory, index) from None


def placed(error: Exception, trajectory: Any, index: int) -> TypeError | ValueError:
    """Say where an error happened."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    if not isinstance(trajectory, Trajectory) or not isinstance(trajectory.id, str):
        return kind(str(error))
    turn = f", turn {index}" if index >= 0 else ""
    return kind(f"trajectory {trajectory.id!r}{turn}: {error}")


def checked_labels(trajectory: Trajectory) -> Labels:
    """Check all of a trajectory but its turns."""
    if not isinstance(trajectory, Trajectory):
        raise TypeError(f"expected a Trajectory, got {type(trajectory).__name__}")
    name, group = trajectory.id, trajectory.group
    if not isinstance(name, str):
        raise TypeError(f"trajectory id must be a str, got {name!r}")
    if group is not None and not isinstance(group, str):
        raise TypeError(f"group must be a str or None, got {group!r}")
    task_id, birth_time_ms = trajectory.task_id, trajectory.birth_time_ms
    if task_id is not None:
        task_id = as_integer("task_id", task_id)
    if birth_time_ms is not None:
        birth_time_ms = as_integer("birth_time_ms", birth_time_ms)
    discount = trajectory.turn_discount
    if type(discount) is not float or not -FLOAT32_MAX <= discount <= FLOAT32_MAX:
        discount = as_number("turn_discount", discount)
    return Labels(name, group, task_id, birth_time_ms, discount)


def _take_turn(intake: Intake, tips: list[Tip], turn: Turn, *, as_lists: bool) -> None:
    """Check one turn, append it to the columns, and extend or open its chain in ``tips``."""
    if not isinstance(turn, Turn):
        raise TypeError(f"expected a Turn, got {type(turn).__name__}")
    prompt: Any = turn.prompt_ids
    completion: Any = turn.completion_ids
    logprobs: Any = turn.completion_logprobs
    if not (as_lists and type(prompt) is type(completion) is type(logprobs) is list):
        prompt = narrow_ids("prompt_ids", prompt)
        completion = narrow_ids("completion_ids", completion)
        logprobs = narrow_logprobs("completion_logprobs", logprobs)
    begin, size = len(prompt), len(completion)
    if begin == 0:
        raise ValueError("prompt_ids must not be empty")
    if len(logprobs) != size:
        raise ValueError(
            f"completion_logprobs must have one entry per completion token, got {len(logprobs)} "
            f"for {size} token(s)"
        )
    rows: Sequence[Bytes] = ()
    if intake.fields or turn.fields:
        rows = rows_of_turn(intake.fields, turn.fields, begin, size)
    take_numbers(intake, turn, begin, size)
    tip = Tip(begin + size, prompt, completion, rows)
    chain = _longest_prefix(tips, tip, intake.fields) if tips else None
    if chain is None:
        chain = len(tips)
        tips.append(tip)
    else:
        tips[chain] = tip
    intake.logprobs.append(logprobs)
    for number, spec in enumerate(intake.fields):
        if spec.generated_only:
            intake.rows[number].append(rows[number])
    intake.turn_chain.append(len(intake.chain_sizes) + chain)


def take_numbers(intake: Intake, turn: Turn, begin: int, size: int) -> None:
    """Check what a turn says of itself and append it to the columns.

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If a number is not finite, or versions make no sense.
    """
    truncated, reward = turn.truncated, turn.reward
    if truncated is not True and truncated is not False and not isinstance(truncated, np.bool_):
        raise TypeError(f"truncated must be a bool, got {type(truncated).__name__}")
    if type(reward) is not float or not -FLOAT32_MAX <= reward <= FLOAT32_MAX:
        reward = as_number("reward", reward)
    start, end = turn.version_start, turn.version_end
    plain = turn.version_spans is None and type(start) is int and type(end) is int
    if not plain or not 0 <= start <= end <= INT32_MAX:
        runs, start, end = as_version_runs("", turn.version_spans, start, end, size)
        if len(runs) > 1 or runs[0][0] != start:
            intake.version_runs[len(intake.turn_size)] = runs
    intake.version_start.append(start)
    intake.version_end.append(end)
    intake.turn_begin.append(begin)
    intake.turn_size.append(size)
    intake.rewards.append(reward)
    intake.truncated.append(bool(truncated))


def _longest_prefix(tips: Sequence[Tip], turn: Tip, fields: Sequence[TokenField]) -> int | None:
    """Return the chain to extend, trying the longest first and the latest of equal length."""
    room = len(turn.prompt)
    if len(tips) == 1:
        return 0 if tips[0].size <= room and _is_prefix(tips[0], turn, fields) else None
    fitting = [chain for chain, tip in enumerate(tips) if tip.size <= room]
    for chain in sorted(fitting, key=lambda chain: (-tips[chain].size, -chain)):
        if _is_prefix(tips[chain], turn, fields):
            return chain
    return None


def _is_prefix(tip: Tip, turn: Tip, fields: Sequence[TokenField]) -> bool:
    prompt, middle, end = turn.prompt, len(tip.prompt), tip.size
    last = tip.completion[-1] if end > middle else tip.prompt[-1]
    if prompt[end - 1] != last:  # most prompts that diverge do so here: no need to read on
        return False
    # bytes compare faster than entries, even after a copy
    if prompt[middle:end].tobytes() != tip.completion.tobytes():
        return False
    if prompt[:middle].tobytes() != tip.prompt.tobytes():
        return False
    return all(
        spec.generated_only or np.array_equal(mine, theirs[:end])
        for spec, mine, theirs in zip(fields, tip.rows, turn.rows, strict=True)
    )
