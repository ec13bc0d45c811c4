"""Preparing a rollout, and putting what came of it in order."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.errors import EngineEndedError, EpisodeError, SetupError
from trajpack.agent.protocols import Prompt
from trajpack.agent.rollout.rollout import Rollout, RolloutOutcome, prepare_rollout
from trajpack.agent.rollout.settings import RolloutSettings
from trajpack.agent.runner.runner import EpisodeResult, Progress
from trajpack.packing.buffer.buffer import pack
from trajpack.packing.types import Trajectory, Turn

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def prepared() -> Rollout:
    return prepare_rollout(RolloutSettings(num_prompts=2, num_turns=2, max_new_tokens=8))


def write_questions(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_prompts", 0),
        ("num_prompts", 10_000_001),
        ("num_turns", 0),
        ("group_size", -1),
        ("concurrency", 0),
        ("max_new_tokens", 0),
        ("turn_discount", float("inf")),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(SetupError, match=f"{name} must be .*, got {value}"):
        RolloutSettings(**{name: value})


def test_prompts_are_the_questions_as_chats(prepared: Rollout) -> None:
    assert prepared.num_episodes == 4
    for question, prompt in zip(prepared.questions, prepared.prompts, strict=True):
        assert prompt.id == question.id
        text = prepared.tokenizer.decode(prompt.input_ids)
        assert text == f"<|im_start|>user\n{question.text}<|im_end|>\n<|im_start|>assistant\n"


def test_a_file_gives_its_first_questions(tmp_path: Path) -> None:
    lines = [{"prompt": f"{k}?", "solutions": ["1"], "task_id": k} for k in range(5)]
    path = write_questions(tmp_path / "q.jsonl", *lines)
    few = prepare_rollout(RolloutSettings(dataset=path, num_prompts=2))
    assert [(prompt.id, prompt.task_id) for prompt in few.prompts] == [("q-1", 0), ("q-2", 1)]
    assert len(prepare_rollout(RolloutSettings(dataset=path, num_prompts=9)).prompts) == 5


def test_a_question_that_does_not_fit_the_model_is_named(tmp_path: Path) -> None:
    path = write_questions(
        tmp_path / "q.jsonl",
        {"prompt": "short?", "solutions": ["1"]},
        {"prompt": "%" * 9000, "solutions": ["1"]},
    )
    with pytest.raises(SetupError, match=r"question 'q-2' is too long: 9,\d+ tokens and 32 new"):
        prepare_rollout(RolloutSettings(dataset=path))


def test_the_rest_of_a_file_is_not_read(tmp_path: Path) -> None:
    path = write_questions(tmp_path / "q.jsonl", {"prompt": "1?", "solutions": ["1"]})
    with path.open("a") as file:
        file.write("no JSON\n")
    assert len(prepare_rollout(RolloutSettings(dataset=path, num_prompts=1)).prompts) == 1


def test_results_are_put_in_the_order_of_prompts_and_samples(prepared: Rollout) -> None:
    first, second = prepared.prompts

    def result(prompt: Prompt, sample: int) -> EpisodeResult:
        name = f"{prompt.id}@{sample}"
        return EpisodeResult(prompt, (Trajectory(name, [Turn([1], [2], [-1.0])]),), sample=sample)

    failed = EpisodeResult(first, (), error=EpisodeError("q", "lost"), sample=1)
    outcome = prepared.outcome([result(second, 1), failed, result(first, 0), result(second, 0)])
    names = [f"{first.id}@0", f"{second.id}@0", f"{second.id}@1"]
    assert [trajectory.id for trajectory in outcome.trajectories] == names
    assert outcome.failures == {"lost": 1}
    assert pack(outcome.trajectories).ids == tuple(names)


@pytest.mark.usefixtures("warm_judge")
def test_episodes_give_a_result_for_each_sample(prepared: Rollout) -> None:
    seen: list[Progress] = []

    async def body() -> list[EpisodeResult]:
        async with prepared.episodes(seen.append) as results:
            return [result async for result in results]

    outcome = prepared.outcome(asyncio.run(body()))
    assert [result.sample for result in outcome.results] == [0, 1, 0, 1]
    assert [len(trajectory.turns) for trajectory in outcome.trajectories] == [2] * 4
    assert seen[-1].num_finished == 4


def test_a_model_the_engine_cannot_run_is_refused(
    prepared: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no such attention\nand more")

    monkeypatch.setattr(prepared.model, "init_continuous_batching", refuse)

    async def body() -> None:
        async with prepared.episodes():
            raise AssertionError("unreachable")

    with pytest.raises(SetupError, match=r"cannot run this model: no such attention$"):
        asyncio.run(body())


@pytest.mark.usefixtures("warm_judge")
def test_a_conversation_ends_before_it_outgrows_the_engine(
    prepared: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(len(prompt.input_ids) for prompt in prepared.prompts)
    monkeypatch.setattr(TransformersEngine, "max_request_tokens", longest + 10)

    async def body() -> list[EpisodeResult]:
        async with prepared.episodes() as results:
            return [result async for result in results]

    outcome = prepared.outcome(asyncio.run(body()))
    assert [len(trajectory.turns) for trajectory in outcome.trajectories] == [1] * 4


def test_a_question_that_does_not_fit_the_engine_is_named(
    prepared: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransformersEngine, "max_request_tokens", 15)

    async def body() -> None:
        async with prepared.episodes():
            raise AssertionError("unreachable")

    with pytest.raises(SetupError, match=r"is too long: .* 8 new ones, the engine takes 15$"):
        asyncio.run(body())


def test_an_outcome_tells_why_the_engine_ended() -> None:
    prompt = Prompt("q", [1])
    lost = EpisodeResult(prompt, (), EpisodeError("q@0", "lost"))
    ended = EpisodeResult(prompt, (), EngineEndedError("q@1", "generation has died"), sample=1)
    assert RolloutOutcome((lost,)).engine_failure is None
    assert RolloutOutcome((lost, ended)).engine_failure == "generation has died"


def test_an_outcome_without_results_is_empty() -> None:
    assert not RolloutOutcome(()).trajectories
    assert not RolloutOutcome(()).failures
