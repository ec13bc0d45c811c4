"""Random trajectories for tests and benchmarks, of this library and of those that use it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from trajpack.packing.batch import PackedBatch
from trajpack.packing.types import Trajectory, Turn, VersionSpan


def random_trajectory(
    generator: np.random.Generator,
    name: str,
    *,
    num_turns: int = 5,
    prompt: tuple[int, int] = (50, 400),
    completion: tuple[int, int] = (50, 1000),
    vocabulary: int = 32_000,
) -> Trajectory:
    """Return a conversation in which every prompt repeats all that came before.

    Args:
        generator: Source of randomness; the same state gives the same trajectory.
        name: Its id.
        num_turns: Turns of the conversation.
        prompt: Least and most tokens of the first prompt and of each observation.
        completion: Least and most tokens of a completion.
        vocabulary: Token ids are below it.
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


def assert_batches_equal(left: PackedBatch, right: PackedBatch) -> None:
    """Raise unless two batches agree in every field, bit for bit, wherever they live."""
    for name, tensor in left.tensors().items():
        other = right.tensors()[name]
        if tensor.dtype != other.dtype or not torch.equal(_bits(tensor), _bits(other)):
            raise AssertionError(f"{name} differs:\n{tensor}\n{other}")
    for name, value in vars(left).items():
        if not isinstance(value, torch.Tensor) and value != getattr(right, name):
            raise AssertionError(f"{name} differs: {value!r} and {getattr(right, name)!r}")


@st.composite
def trajectories(draw: st.DrawFn, name: str | None = None) -> Trajectory:
    """Draw a trajectory with prefix breaks, branches, empty completions and version changes."""
    contexts: list[list[int]] = [[]]
    turns: list[Turn] = []
    for _ in range(draw(st.integers(1, 5))):
        known = draw(st.sampled_from(contexts))  # an earlier context: goes on, branches, repeats
        prompt = known + draw(_ids(min_size=0 if known else 1))
        completion = draw(_ids())
        turns.append(draw(_turns(prompt, completion)))
        contexts.append(prompt + completion)
    return Trajectory(
        id=draw(st.text(max_size=5)) if name is None else name,
        turns=turns,
        group=draw(st.none() | st.text(max_size=3)),
        turn_discount=draw(st.sampled_from([0.0, 0.5, 0.9, 1.0])),
        task_id=draw(st.none() | st.integers(0, 9)),
        birth_time_ms=draw(st.none() | st.integers(0, 2**45)),
    )


def trajectory_lists(max_size: int = 4) -> st.SearchStrategy[list[Trajectory]]:
    """Draw lists of trajectories, maybe empty."""
    return st.lists(trajectories(), max_size=max_size)


def _ids(min_size: int = 0) -> st.SearchStrategy[list[int]]:
    # few values, so that prefixes meet by chance too; one at the edge of int32
    return st.lists(st.sampled_from([0, 1, 2, 2**31 - 1]), min_size=min_size, max_size=6)


@st.composite
def _turns(draw: st.DrawFn, prompt: list[int], completion: list[int]) -> Turn:
    finite = st.floats(-100.0, 0.0, width=32)
    logprobs = draw(st.lists(finite, min_size=len(completion), max_size=len(completion)))
    start = draw(st.integers(0, 3))
    spans = draw(_spans(start, len(completion))) if draw(st.booleans()) else None
    containers: list[Any] = [list, tuple, np.array, torch.tensor]
    return Turn(
        prompt_ids=draw(st.sampled_from(containers))(prompt),
        completion_ids=completion,
        completion_logprobs=draw(st.sampled_from(containers))(logprobs),
        reward=draw(st.floats(-10.0, 10.0)),
        truncated=draw(st.booleans()),
        version_start=start,
        version_end=spans[-1].version if spans else start + draw(st.integers(0, 2)),
        version_spans=spans,
    )


@st.composite
def _spans(draw: st.DrawFn, version: int, num_tokens: int) -> list[VersionSpan]:
    spans = []
    begin = 0
    while begin < num_tokens:
        end = draw(st.integers(begin + 1, num_tokens))
        spans.append(VersionSpan(version, begin, end))
        version, begin = version + draw(st.integers(0, 2)), end
    return spans


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View floats as integers, so that comparison is of bits: -0.0 is not 0.0, NaN is NaN."""
    host = tensor.cpu().contiguous()
    widths = {torch.float32: torch.int32, torch.float64: torch.int64}
    return host.view(widths.get(host.dtype, host.dtype))
