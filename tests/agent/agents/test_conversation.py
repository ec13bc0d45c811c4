"""Conversations: replies of environments, limits, refusals, and how a trajectory ends."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.agent.agents.chat_cases import END, Characters, collect
from trajpack.agent.agents.chat_agent import ChatAgent
from trajpack.agent.agents.conversation import (
    Conversation,
    ConversationLimits,
    Exchange,
    with_max_new_tokens,
)
from trajpack.agent.errors import (
    EnvironmentFailedError,
    EpisodeError,
    RequestRefusedError,
)
from trajpack.agent.protocols import Action, Prompt, SamplingParams
from trajpack.packing.types import Turn


class Judge:
    """An environment that returns, or raises, what it was given."""

    def __init__(self, outcome: Any = None, *, ended: Any = True, truncated: bool = False) -> None:
        self.outcome, self.ended, self.truncated = outcome, ended, truncated

    async def reset(self) -> Any:
        return self._outcome()

    async def step(self, action: Any) -> Any:
        assert action == ("apple@2", ["2"])
        assert action.task == "apple"
        return None, self._outcome(), self.ended, self.truncated, {}

    def _outcome(self) -> Any:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def episode(outcome: Any = None, prompt_ids: Any = (5, 6), **how: Any) -> Conversation:
    async def generate(token_ids: Any, sampling: Any = None) -> Turn:
        return Turn(np.array(token_ids, np.int32), np.array([7, 8], np.int32), [-0.5, -0.25])

    prompt = Prompt("apple@2", prompt_ids)
    return Conversation(prompt, Judge(outcome, **how), generate, [*prompt_ids])


def answer(text: str) -> Exchange:
    return Exchange(Turn([1], [2], [-0.5]), np.array([2], np.int32), text)


def test_the_prompts_of_turns_are_views_of_one_conversation() -> None:
    async def body() -> Any:
        held = episode()
        first = await held.ask(None, ConversationLimits())
        assert first is not None
        held.token_ids += [9]
        await held.ask(None, ConversationLimits())
        first.reward = 1.0
        return held.trajectory(0.5)

    trajectory = asyncio.run(body())
    first, second = trajectory.turns
    assert [list(turn.prompt_ids) for turn in (first, second)] == [[5, 6], [5, 6, 7, 8, 9]]
    assert [turn.reward for turn in (first, second)] == [1.0, 0.0]
    assert np.shares_memory(first.prompt_ids, second.prompt_ids)
    assert (trajectory.id, trajectory.turn_discount) == ("apple@2", 0.5)


@pytest.mark.parametrize(
    ("prompt_ids", "message"),
    [
        ([1, -2], "prompt_ids must be 0 or more"),
        ([1.5], "prompt_ids must be integers"),
    ],
)
def test_a_prompt_that_is_no_prompt_is_refused(prompt_ids: list[int], message: str) -> None:
    agent = Chatty(SamplingParams(8), Characters())
    with pytest.raises((TypeError, ValueError), match=message):
        collect(agent, Game(), [], prompt=Prompt("q@0", prompt_ids))


@pytest.mark.parametrize(
    ("outcome", "ended", "words"),
    [
        *((value, True, "") for value in (None, [], [1, 0], ["x"], [float("nan")], 1)),
        (1.0, True, "the rewards, must be a list of one number, got float"),
        ([1], np.array([True, False]), "truth value"),
    ],
)
def test_an_environment_must_return_one_success_and_one_end(
    outcome: Any, ended: Any, words: str
) -> None:
    expected = f"'apple@2': turn .*environment's answer was refused: .*{words}"
    with pytest.raises(EnvironmentFailedError, match=expected):
        asyncio.run(episode(outcome, ended=ended).judge(answer("2")))


@pytest.mark.parametrize("success", [True, 1, 1.0, np.bool_(True), np.float32(1), np.array(1)])
@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_successes_may_be_of_any_kind(success: Any, kind: Any) -> None:
    judged = answer("2")
    ended = asyncio.run(episode(kind([success]), ended=np.bool_(False)).judge(judged))
    assert (type(judged.reward), judged.reward, judged.success) == (float, 1.0, True)
    assert ended is False


def test_an_action_is_a_pair_that_knows_its_task() -> None:
    assert Action("apple@12", ["x"]) == ("apple@12", ["x"])
    tasks = {"apple@12": "apple", "apple": "apple", "a@b": "a@b", "a@b@0": "a@b", "@1": "@1"}
    assert {qid: Action(qid, []).task for qid in tasks} == tasks


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(9, 0.5), {"max_new_tokens": 9, "n": 1}],
)
def test_a_budget_replaces_one_option(sampling: Any) -> None:
    plain = sampling if isinstance(sampling, dict) else vars(sampling)
    less = with_max_new_tokens(sampling, 4)
    assert type(less) is type(sampling)
    assert (less if isinstance(less, dict) else vars(less)) == {**plain, "max_new_tokens": 4}
    assert plain["max_new_tokens"] == 9
    assert with_max_new_tokens(sampling, 9) is sampling


# limits and ends


class Game:
    """An environment whose steps end it as it is told, and the calls that it got."""

    def __init__(self, *ends: str) -> None:
        self.ends = list(ends)
        self.answers: list[str] = []

    async def reset(self) -> None:
        return None

    async def step(self, action: Any) -> Any:
        self.answers.append(action.answers[0])
        end = self.ends.pop(0) if self.ends else ""
        return None, [1.0], end == "terminated", end == "truncated", {}


class Chatty(ChatAgent):
    """Is answered with one token, and asks again until its environment ends it."""

    async def respond(self, conversation: Conversation, exchange: Exchange) -> list[int] | None:
        return None if await conversation.judge(exchange) else [ord("!")]


PROMPT = Prompt("q@0", [ord("?")] * 10)
REFUSED = RequestRefusedError("q@0", "longer than the model's context")


@pytest.mark.parametrize(
    ("limits", "texts", "ends", "num_turns", "truncated"),
    [
        ({"max_turns": 2}, ["a", "b", "c"], [], 2, True),
        ({}, ["a", "b"], ["", "truncated"], 2, True),
        ({}, ["a", "b"], ["", "terminated"], 2, None),
        ({}, ["a", "b", REFUSED], [], 2, True),
        ({"max_total_tokens": 13}, ["a", "b"], [], 1, True),
        ({"max_total_tokens": 14}, ["a", "b"], [], 2, True),
    ],
)
def test_a_trajectory_says_whether_a_limit_ended_it(
    limits: dict[str, int], texts: Any, ends: list[str], num_turns: int, truncated: bool | None
) -> None:
    agent = Chatty(SamplingParams(8), Characters(), limits=ConversationLimits(**limits))
    said = [text if isinstance(text, Exception) else text + END for text in texts]
    trajectory, _ = collect(agent, Game(*ends), said, prompt=PROMPT)
    assert (len(trajectory.turns), trajectory.truncated) == (num_turns, truncated)
    assert [turn.truncated for turn in trajectory.turns[-1:]] == [bool(truncated)]


def test_the_last_request_asks_for_what_is_left() -> None:
    from tests.agent.agents.chat_cases import Script

    script = Script(["a" + END] * 9)
    agent = Chatty(SamplingParams(8), Characters(), limits=ConversationLimits(99, 24))
    asyncio.run(agent.run(PROMPT, Game(), script))
    assert [one.max_new_tokens for one in script.samplings] == [8, 8, 8, 5, 2]
    assert script.samplings[0] is agent.gconfig


@pytest.mark.parametrize("said", [REFUSED, None])
def test_an_episode_without_a_finished_turn_fails(said: Any) -> None:
    limits = ConversationLimits(max_total_tokens=None if said else 10)
    agent = Chatty(SamplingParams(8), Characters(), limits=limits)
    with pytest.raises(EpisodeError) as caught:
        collect(agent, Game(), [said], prompt=PROMPT)
    assert caught.value is said or "leaves no room" in caught.value.reason
