from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trajpack.agent.agents.conversation import Conversation, Exchange
from trajpack.agent.errors import (
    EnvironmentFailedError,
    EpisodeCancelledError,
    EpisodeError,
    EpisodeTimeoutError,
    GenerationError,
    MalformedResponseError,
)
from trajpack.agent.protocols import GenerationOutput
from trajpack.packing.ragged import Ragged


class Judge:
    """An environment that returns, or raises, what it was given."""

    def __init__(self, outcome: Any = None, *, ended: Any = True) -> None:
        self.outcome, self.ended = outcome, ended

    async def reset(self) -> Any:
        return self._outcome()

    async def step(self, action: Any) -> Any:
        assert action == ("q0@0", ["2"])
        return None, self._outcome(), self.ended, False, {}

    def _outcome(self) -> Any:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def says(**changes: Any) -> GenerationOutput:
    fields: dict[str, Any] = {
        "qid": "q0@0",
        "prompt_ids": [5, 6],
        "output_ids": [7, 8],
        "output_logprobs": [-0.5, -0.25],
        "no_eos": False,
        "version_start": 0,
        "version_end": 0,
    }
    return GenerationOutput(**(fields | changes))


def episode(outcome: Any = None) -> Conversation:
    return Conversation("q0@0", Judge(outcome), asyncio.Queue(), asyncio.Queue(), token_ids=[5, 6])


def ask(reply: Any, started: Conversation | None = None) -> Exchange:
    async def answered() -> Exchange:
        asked = started or episode()
        asked.act_queue.put_nowait(reply)
        return await asked.ask("sampling", timeout=None)

    return asyncio.run(answered())


@pytest.mark.parametrize("kind", [list, tuple, np.array], ids=["list", "tuple", "numpy"])
def test_a_reply_that_belongs_is_kept_as_arrays(kind: Any) -> None:
    lists = {"prompt_ids": [5, 6], "output_ids": [7, 8], "output_logprobs": [-0.5, -0.25]}
    reply = says(**{name: kind(values) for name, values in lists.items()})
    completion = ask(reply)
    assert (completion.start, completion.reply) == (2, reply)
    assert (completion.ids.tolist(), completion.logprobs.tolist()) == ([7, 8], [-0.5, -0.25])
    assert (completion.ids.dtype, completion.logprobs.dtype) == (np.int32, np.float32)


def test_a_turn_has_the_rows_and_versions_of_its_reply() -> None:
    held = episode()
    mask, spans = Ragged([0, 2, 3], [7, 9, 8]), [(3, 0, 1), (4, 1, 2)]
    needs_gradient = torch.tensor([-0.5, -0.25], requires_grad=True)
    held.keep(ask(says(fields={"sampling_mask": mask}, version_spans=spans), held))
    qid, token_ids, gconfig = held.obs_queue.get_nowait()
    assert (qid, token_ids, gconfig) == ("q0@0", [5, 6], "sampling")
    assert token_ids is not held.token_ids
    more = {"output_logprobs": needs_gradient, "no_eos": np.bool_(True)}
    held.keep(ask(says(prompt_ids=[5, 6, 7, 8], **more), held))
    first, second = held.turns()
    assert (first.fields, second.fields) == ({"sampling_mask": mask}, None)
    assert (first.version_start, first.version_end, first.version_spans) == (3, 4, spans)
    assert (list(second.completion_logprobs), second.truncated) == ([-0.5, -0.25], True)
    refusal = GenerationError("q0@0", "too long")
    with pytest.raises(GenerationError) as caught:
        ask(refusal)
    assert caught.value is refusal


def test_the_turns_are_views_of_one_conversation() -> None:
    held = episode()
    held.keep(replace(ask(says(), held), reward=1.0))
    held.token_ids += [9]
    reply = says(prompt_ids=[5, 6, 7, 8, 9], output_ids=[], output_logprobs=[], no_eos=True)
    held.keep(replace(ask(reply, held), reward=-1.0))
    first, second = held.turns()
    assert [list(turn.prompt_ids) for turn in (first, second)] == [[5, 6], [5, 6, 7, 8, 9]]
    assert [list(turn.completion_ids) for turn in (first, second)] == [[7, 8], []]
    assert [turn.reward for turn in (first, second)] == [1.0, -1.0]
    assert [turn.truncated for turn in (first, second)] == [False, True]
    assert np.shares_memory(first.prompt_ids, second.prompt_ids)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (says(qid="q1"), "the reply answers episode 'q1'"),
        (says(prompt_ids=[1]), "expected the 2 tokens that were sent, got 1"),
        (says(output_logprobs=[-0.5]), "output_logprobs must have one entry per .* got 1 for 2"),
        (says(output_logprobs=[-0.5, float("nan")]), "output_logprobs must be finite float32"),
        (says(output_logprobs=[-0.5, -1e300]), "output_logprobs must be finite float32"),
        (says(output_logprobs=["a", "b"]), "output_logprobs must be floats"),
        (says(output_ids=[0.5, 1.0]), r"output_ids must be integers, got 0\.5"),
        (says(output_ids=np.array([[1, 2]])), "output_ids must have one dimension"),
        (says(output_ids=[1, [2]]), "output_ids must be integers"),
        (says(output_ids=[1, -1]), "output_ids must be 0 or more"),
        (says(output_ids=[1, 2**31]), r"output_ids must be in \[0, 2147483647\]"),
        (says(output_ids=None), "output_ids must be an array or a sequence"),
        (says(prompt_ids=None), "prompt_ids must be an array or a sequence"),
        (says(version_start=1), "versions must not run backwards"),
        (says(version_start=-1), "versions must be in"),
        (says(version_end="0"), "version_end must be an integer, got str"),
        (says(version_end=0.5), "version_end must be an integer, got float"),
        (says(version_start=None), "version_start must be an integer, got NoneType"),
        (says(version_spans=[(0, 0, 1)]), "version_spans must cover 2 completion tokens"),
        (says(version_spans=[(0, 1, 2)]), "version_spans must follow each other from 0"),
        (says(version_spans=[(1, 0, 1), (0, 1, 2)]), "must not run backwards"),
        (says(version_spans=[(0, 2)]), r"version_spans must be \(version, start, end\)"),
        (says(version_spans=3), "refused"),
        (says(no_eos=np.array([False, True])), "no_eos must be a bool, got ndarray"),
        (says(no_eos=None), "no_eos must be a bool, got NoneType"),
        (says(qid=np.array(["q0@0", "q1"])), "the reply answers episode"),
        (GenerationError("q1", "too long"), "an error of another episode came: episode 'q1'"),
        ("a string", "expected a GenerationOutput, got str"),
    ],
)
def test_a_reply_that_does_not_belong_is_refused(reply: Any, message: str) -> None:
    with pytest.raises(MalformedResponseError, match=f"'q0@0': turn 0: .*{message}"):
        ask(reply)


def test_a_full_observation_queue_counts_towards_the_timeout() -> None:
    async def asked() -> None:
        queue: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)
        queue.put_nowait("in the way")
        await Conversation("q0@0", Judge(), queue, asyncio.Queue()).ask(None, timeout=0.01)

    with pytest.raises(EpisodeTimeoutError, match=r"'q0@0': turn 0: no reply within 0\.01 s"):
        asyncio.run(asked())


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [
        ([], "the prompt has no tokens"),
        ([1, -2], "the prompt was refused: prompt_ids must be 0 or more"),
        ([1.5], "the prompt was refused: prompt_ids must be integers"),
    ],
)
def test_a_prompt_that_is_no_prompt_is_refused(prompt_ids: list[int], message: str) -> None:
    with pytest.raises(EpisodeError, match=f"'q0@0': turn 0: {message}"):
        asyncio.run(episode().begin(prompt_ids))


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (ZeroDivisionError("oh"), EnvironmentFailedError, "oh"),
        (asyncio.CancelledError(), EpisodeCancelledError, "it was cancelled"),
    ],
)
def test_a_failing_environment_is_the_cause_of_the_error(
    failure: BaseException, kind: Any, text: str
) -> None:
    reason = f"'q0@0': turn 0: the environment's {{}} failed: .*{text}"
    with pytest.raises(kind, match=reason.format("step")) as caught:
        asyncio.run(episode(failure).judge("2"))
    assert caught.value.__cause__ is failure
    with pytest.raises(kind, match=reason.format("reset")) as caught:
        asyncio.run(episode(failure).begin([1]))
    assert caught.value.__cause__ is failure


@pytest.mark.parametrize(
    ("successes", "words"),
    [
        *((value, "") for value in (None, [], [1, 0], ["x"], [float("nan")], 1)),
        (1.0, "the rewards, must be a list of one number, got float"),
    ],
)
def test_an_environment_must_return_one_success(successes: Any, words: str) -> None:
    with pytest.raises(EnvironmentFailedError, match=f"'q0@0': turn 0: .*environment.*{words}"):
        asyncio.run(episode(successes).judge("2"))


def test_a_qid_is_a_string_and_an_end_is_one_truth_value() -> None:
    queues = asyncio.Queue[Any](), asyncio.Queue[Any]()
    with pytest.raises(EpisodeError, match="episode 7: turn 0: the qid must be a str, got int"):
        asyncio.run(Conversation(7, Judge(), *queues).begin([1]))  # type: ignore[arg-type]
    ended = Judge([1], ended=np.array([True, False]))
    with pytest.raises(EpisodeError, match="'q0@0': turn 0: the environment's step failed"):
        asyncio.run(Conversation("q0@0", ended, *queues).judge("2"))


@pytest.mark.parametrize("success", [True, 1, 1.0, np.bool_(True), np.float32(1)])
def test_a_success_may_be_any_number(success: Any) -> None:
    assert asyncio.run(episode([success]).judge("2")) == (1.0, True)


@pytest.mark.parametrize("failure", [asyncio.CancelledError(), ZeroDivisionError("oh")])
def test_an_engine_whose_queues_fail_is_an_error_of_the_episode(failure: BaseException) -> None:
    class Fails(asyncio.Queue[Any]):
        async def get(self) -> Any:
            raise failure

    asked = Conversation("q0@0", Judge(), asyncio.Queue(), Fails())
    with pytest.raises(EpisodeError, match="'q0@0': turn 0: the engine's queues failed") as caught:
        asyncio.run(asked.ask(None, timeout=1.0))
    assert caught.value.__cause__ is failure
