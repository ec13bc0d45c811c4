"""The arithmetic to learn: questions, teacher, tokenizer and environment."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.environments.questions import (
    ExactAnswerEnvironment,
    Question,
    arithmetic_questions,
)
from trajpack.agent.models.tiny_model import build_arithmetic_model
from trajpack.agent.protocols import GenerationOutput, Observation, Prompt, Reply, SamplingParams
from trajpack.agent.training.arithmetic import encode_question, lazy_demonstrations
from trajpack.packing.types import Trajectory

MODEL, TOKENIZER = build_arithmetic_model()


def test_a_question_is_a_sum_up_to_nine_and_the_seed_decides_which() -> None:
    questions = arithmetic_questions(500, seed=3)
    assert len({question.id for question in questions}) == 500
    assert len({question.text for question in questions}) == 36
    for question in questions:
        left, right = map(int, question.text.split("+"))
        assert left >= 1
        assert right >= 1
        assert question.solutions == (str(left + right),)
        assert left + right <= 9
    assert arithmetic_questions(500, seed=3) == questions
    assert arithmetic_questions(500, seed=4) != questions


def test_every_digit_is_a_token_and_text_survives() -> None:
    (question,) = arithmetic_questions(1, seed=0)
    ids = encode_question(question, TOKENIZER)
    assert len(ids) == 5
    text = "Zwölf is 12, 120 is not -7."
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text
    for number in ("12", "120", "-7"):
        assert len(TOKENIZER.encode(number, add_special_tokens=False)) == len(number)


def test_equal_seeds_build_equal_models() -> None:
    again, _ = build_arithmetic_model(0)
    other, _ = build_arithmetic_model(1)
    name = "model.embed_tokens.weight"
    assert again.state_dict()[name].equal(MODEL.state_dict()[name])
    assert not other.state_dict()[name].equal(MODEL.state_dict()[name])


async def converse(question: Question, completions: list[list[int]]) -> Trajectory:
    """Have the agent converse with an engine that says what it is told to."""
    agent = MathMultiTurnAgent(
        SamplingParams(max_new_tokens=3), TOKENIZER, None, num_turns=3, stop_on_success=True
    )
    asked: asyncio.Queue[Observation] = asyncio.Queue()
    replies: asyncio.Queue[Reply] = asyncio.Queue()
    prompt = Prompt(question.id, encode_question(question, TOKENIZER))
    environment = ExactAnswerEnvironment([question])
    episode = asyncio.create_task(agent.collect_trajectory(prompt, environment, asked, replies))
    for completion in completions:
        qid, ids, _ = await asked.get()
        logprobs = [0.0] * len(completion)
        replies.put_nowait(GenerationOutput(qid, ids, completion, logprobs, False, 0, 0))
    (trajectory,) = await episode
    return trajectory


def test_demonstrations_equal_the_agents_turns_with_the_same_answers() -> None:
    demonstrations = lazy_demonstrations(30, TOKENIZER, num_turns=3, seed=5)
    questions = arithmetic_questions(30, seed=5)
    assert {len(one.turns) for one in demonstrations} == {1, 2, 3}
    for question, shown in zip(questions, demonstrations, strict=True):
        told = asyncio.run(converse(question, [list(turn.completion_ids) for turn in shown.turns]))
        for turn, expected in zip(shown.turns, told.turns, strict=True):
            assert list(turn.prompt_ids) == list(expected.prompt_ids)
            assert list(turn.completion_ids) == list(expected.completion_ids)
            assert turn.reward == expected.reward


def test_the_teacher_is_right_with_the_probability_of_its_skill() -> None:
    counts = Counter(
        turn.reward
        for one in lazy_demonstrations(2000, TOKENIZER, num_turns=3, skill=0.25)
        for turn in one.turns
    )
    assert 0.22 < counts[1.0] / counts.total() < 0.28
    perfect = lazy_demonstrations(50, TOKENIZER, num_turns=3, skill=1.0)
    assert all(len(one.turns) == 1 and one.turns[0].reward == 1 for one in perfect)


def test_a_task_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        arithmetic_questions(0, seed=0)
    with pytest.raises(ValueError, match="num_turns must be at least 1, got 0"):
        lazy_demonstrations(1, TOKENIZER, num_turns=0)
    with pytest.raises(ValueError, match=r"skill must be in \[0, 1\], got 1.5"):
        lazy_demonstrations(1, TOKENIZER, num_turns=1, skill=1.5)


def judged(environment: ExactAnswerEnvironment, qid: str, *answers: str) -> list[bool]:
    return asyncio.run(environment.step((qid, answers)))[1]


def test_an_answer_is_right_word_for_word() -> None:
    ask = ({"role": "user", "content": "2+3"},)
    environment = ExactAnswerEnvironment([Question("q", ask, ("5", "five"))])
    assert judged(environment, "q@7", "5", " five\n", "2+3", "55", "") == [
        True,
        True,
        False,
        False,
        False,
    ]
    with pytest.raises(ValueError, match="no question has the id 'p@0'"):
        judged(environment, "p@0", "5")
    with pytest.raises(TypeError, match="must be a list of strings"):
        asyncio.run(environment.step(("q", "5")))


def test_questions_without_answers_or_names_of_their_own_are_refused() -> None:
    question = Question("q", (), ("1",))
    with pytest.raises(ValueError, match="question id 'q' appears twice"):
        ExactAnswerEnvironment([question, question])
    with pytest.raises(ValueError, match="question 'q' has no solutions"):
        ExactAnswerEnvironment([Question("q", (), ())])
