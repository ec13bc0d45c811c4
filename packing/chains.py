"""Chains: the fewest token streams that hold a trajectory, each token once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from trajpack.packing.conversion import (
    as_ids,
    as_integer,
    as_logprobs,
    as_number,
    as_version_runs,
)
from trajpack.packing.types import Trajectory, Turn


class Labels(NamedTuple):
    """What stays on the host of a trajectory."""

    id: str
    group: str | None
    task_id: int | None
    birth_time_ms: int | None


@dataclass(frozen=True)
class CheckedTurn:
    """A turn after the border: int32 ids, float32 log-probabilities, versions as runs."""

    prompt: npt.NDArray[np.int32]
    completion: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    reward: float
    truncated: bool
    version_runs: Sequence[tuple[int, int, int]]
    version_start: int
    version_end: int

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion."""
        return self.prompt.size + self.completion.size


def check_labels(trajectory: Trajectory) -> tuple[Labels, float]:
    """Check all of a trajectory but its turns, and return it with the discount.

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If a number is not finite or beyond int64.
    """
    if not isinstance(trajectory, Trajectory):
        raise TypeError(f"expected a Trajectory, got {type(trajectory).__name__}")
    if not isinstance(trajectory.id, str):
        raise TypeError(f"trajectory id must be a str, got {trajectory.id!r}")
    where = f"trajectory {trajectory.id!r}: "
    if not isinstance(trajectory.group, str | None):
        raise TypeError(f"{where}group must be a str or None, got {trajectory.group!r}")
    task_id, birth_time_ms = (
        None if value is None else as_integer(f"{where}{name}", value)
        for name, value in (
            ("task_id", trajectory.task_id),
            ("birth_time_ms", trajectory.birth_time_ms),
        )
    )
    labels = Labels(trajectory.id, trajectory.group, task_id, birth_time_ms)
    return labels, as_number(f"{where}turn_discount", trajectory.turn_discount)


def check_turn(trajectory_id: str, index: int, turn: Turn) -> CheckedTurn:
    """Convert one turn and check everything a buffer relies on.

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If a value is out of range or lengths differ. Both name the trajectory,
            the turn and the value.
    """
    where = f"trajectory {trajectory_id!r}, turn {index}: "
    if not isinstance(turn, Turn):
        raise TypeError(f"{where}expected a Turn, got {type(turn).__name__}")
    prompt = as_ids(f"{where}prompt_ids", turn.prompt_ids)
    completion = as_ids(f"{where}completion_ids", turn.completion_ids)
    logprobs = as_logprobs(f"{where}completion_logprobs", turn.completion_logprobs)
    if prompt.size == 0:
        raise ValueError(f"{where}prompt_ids must not be empty")
    if completion.size != logprobs.size:
        raise ValueError(
            f"{where}completion_logprobs must have one entry per completion token, "
            f"got {logprobs.size} for {completion.size} token(s)"
        )
    if not isinstance(turn.truncated, (bool, np.bool_)):
        raise TypeError(f"{where}truncated must be a bool, got {type(turn.truncated).__name__}")
    runs, start, end = as_version_runs(
        where, turn.version_spans, turn.version_start, turn.version_end, completion.size
    )
    reward = as_number(f"{where}reward", turn.reward)
    return CheckedTurn(prompt, completion, logprobs, reward, bool(turn.truncated), runs, start, end)


def find_chains(trajectory: Trajectory) -> tuple[list[CheckedTurn], list[int], list[CheckedTurn]]:
    """Check every turn of a trajectory and find the chain that holds it.

    A turn extends the longest chain whose tokens are all a prefix of its prompt (the latest
    such chain, on a tie); where there is none it opens a new one. A chain is then the prompt
    and the completion of its last turn.

    Returns:
        The checked turns, the chain of each, and the last turn of each chain.

    Raises:
        TypeError, ValueError: As `check_turn`; also for a trajectory without turns.

    Cost: the prompt of each turn is compared once, at memory speed, with a chain it may extend.
    """
    if not trajectory.turns:
        raise ValueError(f"trajectory {trajectory.id!r} must have at least one turn, got none")
    turns: list[CheckedTurn] = []
    chain_of: list[int] = []
    tips: list[CheckedTurn] = []
    for index, given in enumerate(trajectory.turns):
        turn = check_turn(trajectory.id, index, given)
        chain = _longest_prefix(tips, turn.prompt)
        if chain is None:
            chain = len(tips)
            tips.append(turn)
        else:
            tips[chain] = turn
        turns.append(turn)
        chain_of.append(chain)
    return turns, chain_of, tips


def _longest_prefix(tips: Sequence[CheckedTurn], prompt: npt.NDArray[np.int32]) -> int | None:
    """Return the chain to extend, trying the longest first and the latest of equal length."""
    fitting = [chain for chain, tip in enumerate(tips) if tip.num_tokens <= prompt.size]
    for chain in sorted(fitting, key=lambda chain: (-tips[chain].num_tokens, -chain)):
        if _is_prefix(tips[chain], prompt):
            return chain
    return None


def _is_prefix(tip: CheckedTurn, prompt: npt.NDArray[np.int32]) -> bool:
    middle, end = tip.prompt.size, tip.num_tokens
    last = tip.completion[-1] if tip.completion.size else tip.prompt[-1]
    if prompt[end - 1] != last:  # most prompts that diverge do so here: no need to read on
        return False
    return np.array_equal(prompt[middle:end], tip.completion) and np.array_equal(
        prompt[:middle], tip.prompt
    )
