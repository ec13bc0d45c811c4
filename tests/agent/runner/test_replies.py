"""What an engine returned is the turn that was asked for, or refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from trajpack.agent.errors import EpisodeError, MalformedResponseError
from trajpack.agent.protocols import GenerationOutput
from trajpack.agent.runner.replies import checked_prompt, checked_trajectories, turn_of
from trajpack.packing.ragged import Ragged
from trajpack.packing.types import Trajectory, Turn


def says(**changes: Any) -> GenerationOutput:
    values: dict[str, Any] = {
        "qid": "q0@0",
        "prompt_ids": [5, 6],
        "output_ids": [7, 8],
        "output_logprobs": [-0.5, -0.25],
        "no_eos": False,
        "version_start": 0,
        "version_end": 0,
    }
    return GenerationOutput(**(values | changes))


def turn(reply: Any) -> Turn:
    return turn_of("q0@0", checked_prompt("q0@0", [5, 6]), reply)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_a_reply_that_belongs_is_a_turn_of_arrays(kind: Any) -> None:
    lists = {"prompt_ids": [5, 6], "output_ids": [7, 8], "output_logprobs": [-0.5, -0.25]}
    made = turn(says(**{name: kind(values) for name, values in lists.items()}))
    assert made == Turn([5, 6], [7, 8], [-0.5, -0.25])
    arrays: Any = (made.prompt_ids, made.completion_ids, made.completion_logprobs)
    assert [array.dtype for array in arrays] == [np.int32, np.int32, np.float32]


def test_a_turn_has_what_its_reply_says_besides() -> None:
    mask, spans = Ragged([0, 2, 3], [7, 9, 8]), [(3, 0, 1), (4, 1, 2)]
    more: dict[str, Any] = {"fields": {"sampling_mask": mask}, "version_spans": spans}
    made = turn(says(**more, no_eos=np.bool_(True), stop_reason="length"))
    assert (made.fields, made.version_spans) == ({"sampling_mask": mask}, spans)
    assert (made.version_start, made.version_end) == (3, 4)
    assert (made.truncated, made.stop_reason, made.reward) == (True, "length", 0.0)
    assert len(turn(says(output_ids=[], output_logprobs=[])).completion_ids) == 0


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (says(qid="q1"), "the reply answers episode 'q1'"),
        (says(qid=np.array(["q0@0", "q1"])), "the reply answers episode"),
        (says(prompt_ids=[1]), "expected the 2 tokens that were sent, got 1"),
        (says(prompt_ids=None), "prompt_ids must be an array or a sequence"),
        (
            says(output_logprobs=[-0.5]),
            "completion_logprobs must have one entry per .* got 1 for 2",
        ),
        (says(output_logprobs=[-0.5, float("nan")]), "completion_logprobs must be finite float32"),
        (says(output_logprobs=[-0.5, -1e300]), "completion_logprobs must be finite float32"),
        (says(output_logprobs=["a", "b"]), "completion_logprobs must be floats"),
        (says(output_ids=[0.5, 1.0]), r"completion_ids must be integers, got 0\.5"),
        (says(output_ids=np.array([[1, 2]])), "completion_ids must have one dimension"),
        (says(output_ids=[1, [2]]), "completion_ids must be integers"),
        (says(output_ids=[1, -1]), "completion_ids must be 0 or more"),
        (says(output_ids=[1, 2**31]), r"completion_ids must be in \[0, 2147483647\]"),
        (says(output_ids=None), "completion_ids must be an array or a sequence"),
        (says(version_start=1), "versions must not run backwards"),
        (says(version_start=-1), "versions must be in"),
        (says(version_end="0"), "version_end must be an integer, got str"),
        (says(version_start=None), "version_start must be an integer, got NoneType"),
        (says(version_spans=[(0, 0, 1)]), "version_spans must cover 2 completion tokens"),
        (says(version_spans=[(1, 0, 1), (0, 1, 2)]), "must not run backwards"),
        (says(version_spans=[(0, 2)]), r"version_spans must be \(version, start, end\)"),
        (says(version_spans=3), "version_spans must be a sequence, got int"),
        (says(no_eos=np.array([False, True])), "truncated must be a bool, got ndarray"),
        (says(no_eos=None), "truncated must be a bool, got NoneType"),
        (says(stop_reason="eos"), "stop_reason must be one of .*, got 'eos'"),
        ("a string", "expected a GenerationOutput, got str"),
        (None, "expected a GenerationOutput, got NoneType"),
    ],
)
def test_a_reply_that_does_not_belong_is_refused(reply: Any, message: str) -> None:
    with pytest.raises(MalformedResponseError, match=f"'q0@0': the reply was refused: .*{message}"):
        turn(reply)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "the prompt has no tokens"),
        ([-1], "token_ids must be 0 or more, got -1"),
        (np.array(5), "token_ids must have one dimension"),
        (None, "token_ids must be an array or a sequence"),
    ],
)
def test_a_request_without_token_ids_is_refused(token_ids: Any, message: str) -> None:
    with pytest.raises(EpisodeError, match=f"'q0@0': .*{message}"):
        checked_prompt("q0@0", token_ids)


def test_many_short_turns_are_checked_beside_the_event_loop() -> None:
    turns = [Turn([1, 2, 3], [4, 5], [-1.0, -1.0]) for _ in range(5000)]

    async def body() -> int:
        checking = asyncio.create_task(checked_trajectories([Trajectory("long", turns)]))
        rounds = 0
        while not checking.done():
            await asyncio.sleep(0)
            rounds += 1
        await checking
        return rounds

    assert asyncio.run(body()) > 3
