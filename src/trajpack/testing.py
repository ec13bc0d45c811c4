"""Comparison, references and inputs for tests of packed batches.

`trajectories` and `trajectory_lists` are hypothesis strategies and need that package.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.runs import RUN_WIDTH, Run
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.optional import require
from trajpack.packing.turn_fields import STOP_REASONS
from trajpack.packing.types import Trajectory, Turn, VersionSpan

if TYPE_CHECKING:
    from hypothesis import strategies as st


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, name: str = "tensor") -> None:
    """Raise unless both tensors have the same dtype, shape and bits; NaN equals the same NaN.

    Example:
        >>> assert_same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
        Traceback (most recent call last):
        AssertionError: tensor: 1 of 1 entries differ, first at [0]: 0.0 instead of -0.0
    """
    got, want = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (actual, expected))
    if got != want:
        raise AssertionError(f"{name}: expected {want}, got {got}")
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    differ = (_bytes(actual) != _bytes(expected)).any(1).reshape(actual.shape)
    if differ.any():
        first = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(differ.sum())} of {differ.numel()} entries differ, first at "
            f"{list(first)}: {actual[first].item()} instead of {expected[first].item()}"
        )


def assert_batches_equal(actual: PackedBatch, expected: PackedBatch) -> None:
    """Raise unless two batches agree in every field, bit for bit, wherever they live."""
    for mine, theirs in ((actual.tensors(), expected.tensors()), (actual.fields, expected.fields)):
        if set(mine) != set(theirs):
            raise AssertionError(f"tensors: {set(mine)} instead of {set(theirs)}")
        for name, tensor in theirs.items():
            assert_same_bits(mine[name], tensor, name)
    for name, value in expected.host_values().items():
        if value != getattr(actual, name):
            raise AssertionError(f"{name}: {getattr(actual, name)!r} instead of {value!r}")


def returns_by_loop(
    rewards: Sequence[float] | npt.NDArray[np.floating],
    lengths: Sequence[int],
    discounts: Sequence[float] | npt.NDArray[np.floating],
) -> npt.NDArray[np.float64]:
    """Discount each segment's rewards backward, one entry at a time, in float64."""
    returns = [float(reward) for reward in rewards]
    start = 0
    for length, discount in zip(lengths, discounts, strict=True):
        for index in range(start + length - 2, start - 1, -1):
            returns[index] += float(discount) * returns[index + 1]
        start += length
    return np.array(returns, np.float64)


def boundaries(lengths: Sequence[int]) -> torch.Tensor:
    """Return int32 boundaries of segments: 0, 2, 2, 3 of lengths 2, 0, 1."""
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))


def random_build_inputs(
    rng: np.random.Generator, lengths: Sequence[int], num_turns: int = 7
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Return arguments of `trajpack.kernels.fields.build.build` for runs of these lengths.

    The words are arbitrary bits. Sources may overlap; many runs go on where the one before ends.
    """
    words = rng.integers(-(2**31), 2**31, sum(lengths) + 1000, dtype=np.int32)
    count = len(lengths)
    runs = rng.integers(0, 1000, (count + 1, RUN_WIDTH), dtype=np.int32)
    runs[:, Run.START] = np.cumsum([0, *lengths])
    for column in (Run.SOURCE, Run.POSITION):
        for row in np.flatnonzero(rng.random(count) < 0.7)[1:]:
            runs[row, column] = runs[row - 1, column] + lengths[row - 1]
    spread = np.append(lengths, 0).astype(np.int64)
    context = rng.integers(-spread // 3, spread + spread // 3 + 1).clip(0, spread)
    runs[:, Run.GENERATED] = context if num_turns else spread
    runs[rng.random(count + 1) < 0.1, Run.SOURCE] = -1
    runs[:, Run.TURN] = rng.integers(0, max(num_turns, 1), count + 1)
    runs[-1, Run.SOURCE :] = 0
    turn_returns = rng.standard_normal(num_turns).astype(np.float32)
    tensors = (torch.from_numpy(array) for array in (words, runs, turn_returns))
    return (*tensors, int(runs[-1, Run.START]))  # type: ignore[return-value]


def random_trajectory(
    generator: np.random.Generator,
    name: str,
    *,
    num_turns: int = 5,
    prompt: tuple[int, int] = (50, 400),
    completion: tuple[int, int] = (50, 1000),
    vocabulary: int = 32_000,
) -> Trajectory:
    """Return a conversation with the id ``name`` in which every prompt repeats what came before.

    ``prompt`` limits the tokens of the first prompt and of each observation, ``completion`` those
    of a completion; the upper limits are exclusive. Token ids are below ``vocabulary``.
    """
    spoken = np.empty(0, np.int32)
    turns = []
    for turn in range(num_turns):
        observed = generator.integers(0, vocabulary, generator.integers(*prompt), dtype=np.int32)
        sampled = generator.integers(0, vocabulary, generator.integers(*completion), dtype=np.int32)
        heard = np.concatenate([spoken, observed])
        logprobs = -generator.random(sampled.size, dtype=np.float32)
        reward = float(generator.choice([-1.0, 1.0]))
        turns.append(Turn(heard, sampled, logprobs, reward, version_start=turn, version_end=turn))
        spoken = np.concatenate([heard, sampled])
    return Trajectory(name, turns, turn_discount=0.9)


def trajectories(name: str | None = None) -> st.SearchStrategy[Trajectory]:
    """Draw trajectories with prefix breaks, branches, empty completions and version changes."""
    require("hypothesis")
    from hypothesis import strategies as st

    # few values, so that prefixes meet by chance too; one at the edge of int32
    some_id = st.sampled_from([0, 1, 2, 2**31 - 1])
    containers: st.SearchStrategy[Any] = st.sampled_from([list, tuple, np.array, torch.tensor])

    @st.composite
    def turn(draw: st.DrawFn, prompt: list[int], completion: list[int]) -> Turn:
        size, finite = len(completion), st.floats(-100.0, 0.0, width=32)
        logprobs = draw(st.lists(finite, min_size=size, max_size=size))
        start = draw(st.integers(0, 3))
        spans: list[VersionSpan] | None = [] if draw(st.booleans()) else None
        version, begin = start, 0
        while spans is not None and begin < size:
            end = draw(st.integers(begin + 1, size))
            spans.append(VersionSpan(version, begin, end))
            version, begin = version + draw(st.integers(0, 2)), end
        return Turn(
            prompt_ids=draw(containers)(prompt),
            completion_ids=completion,
            completion_logprobs=draw(containers)(logprobs),
            reward=draw(st.floats(-10.0, 10.0)),
            truncated=draw(st.booleans()),
            version_start=start,
            version_end=spans[-1].version if spans else start + draw(st.integers(0, 2)),
            version_spans=spans,
            stop_reason=draw(st.sampled_from(STOP_REASONS)),
        )

    @st.composite
    def trajectory(draw: st.DrawFn) -> Trajectory:
        contexts: list[list[int]] = [[]]
        turns: list[Turn] = []
        for _ in range(draw(st.integers(1, 5))):
            known = draw(st.sampled_from(contexts))  # the turn goes on, branches or repeats
            prompt = known + draw(st.lists(some_id, min_size=0 if known else 1, max_size=6))
            completion = draw(st.lists(some_id, max_size=6))
            turns.append(draw(turn(prompt, completion)))
            contexts.append(prompt + completion)
        return Trajectory(
            id=draw(st.text(max_size=5)) if name is None else name,
            turns=turns,
            group=draw(st.none() | st.text(max_size=3)),
            turn_discount=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
            task_id=draw(st.none() | st.integers(0, 9)),
            birth_time_ms=draw(st.none() | st.integers(0, 2**45)),
            truncated=draw(st.none() | st.booleans()),
        )

    return trajectory()


def trajectory_lists(max_size: int = 4) -> st.SearchStrategy[list[Trajectory]]:
    """Draw lists of trajectories, maybe empty."""
    require("hypothesis")
    from hypothesis import strategies as st

    return st.lists(trajectories(), max_size=max_size)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    raw = flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)
    return raw.reshape(flat.shape[0], tensor.element_size())
