"""A policy that learns: the whole loop, with the real engine, agent and trainer."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.packing.isolation.tiny_models import tiny_model
from trajpack import GRPO, Trajectory, Turn
from trajpack.agent.engines import transformers_batching
from trajpack.agent.errors import EpisodeError, SetupError
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.runner import EpisodeResult
from trajpack.agent.training import grpo
from trajpack.agent.training.grpo import (
    StepRecord,
    Training,
    check_logprobs,
    pack_episodes,
    shares,
)
from trajpack.agent.training.policy_trainer import StepOutcome
from trajpack.agent.training.settings import TrainSettings
from trajpack.commands.train import rise

torch.set_num_threads(1)
SMALL = TrainSettings(num_steps=3, num_prompts=2, group_size=4, warm_up_steps=2)


def learn(training: Training) -> list[StepRecord]:
    records: list[StepRecord] = []
    asyncio.run(training.learn(records.append))
    return records


@pytest.mark.slow
def test_the_share_of_right_answers_rises_from_a_third_to_two_thirds() -> None:
    training = Training(TrainSettings(num_steps=18, seed=0))
    losses = list(training.warm_up())
    assert losses[-1] < losses[0] / 4
    records = learn(training)
    first, last = rise(records)
    assert 0.2 < first < 0.45
    assert last > 0.6
    assert last > first + 0.25
    assert records[-1].num_generated < records[0].num_generated  # fewer answers are enough
    outcomes = [record.outcome for record in records]
    assert max(outcome.max_staleness for outcome in outcomes) >= 1  # episodes went on meanwhile
    assert all(outcome.logprob_gap <= 1e-5 for outcome in outcomes)
    assert sum(outcome.num_on_policy > 50 for outcome in outcomes) > 9  # and that means something
    assert outcomes[0].num_on_policy == records[0].num_generated


def test_every_question_is_answered_and_every_step_recorded() -> None:
    training = Training(SMALL)
    assert len(list(training.warm_up())) == 2
    records = learn(training)
    assert [record.step for record in records] == [1, 2, 3]
    assert training.trainer.version == 3
    for record in records:
        assert 0 <= record.success <= record.solved <= 1
        assert -3 <= record.reward <= 1
        assert 0 < record.num_generated < record.num_tokens
        assert record.tokens_per_s == pytest.approx(record.num_generated / record.seconds)


def test_trees_are_trained_as_conversations_are() -> None:
    by_tree, merged = Training(replace(SMALL, layout="tree")), Training(SMALL)
    assert list(by_tree.warm_up()) == pytest.approx(list(merged.warm_up()), abs=1e-4)
    records = learn(by_tree)
    assert [record.step for record in records] == [1, 2, 3]
    assert records[0].outcome.num_on_policy == records[0].num_generated
    for record in records:
        assert record.outcome.logprob_gap <= 1e-5
        questions, feedback = 2 * 5, 2 * 4 * 2 * 4  # a question once for its four episodes
        assert 0 < record.num_tokens <= questions + feedback + record.num_generated
        assert 0 < record.outcome.fill <= 1


def test_the_same_settings_begin_with_the_same_weights_and_questions() -> None:
    one, other = Training(SMALL), Training(SMALL)
    assert list(one.warm_up()) == list(other.warm_up())
    assert one.questions == other.questions
    assert Training(replace(SMALL, seed=1)).questions != one.questions


def test_a_model_that_leaks_between_sequences_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def leaking_model(seed: int) -> tuple[Any, None]:
        return tiny_model("mamba2"), None

    monkeypatch.setattr(grpo, "build_arithmetic_model", leaking_model)
    with pytest.raises(SetupError, match=r"cannot be trained: Mamba2ForCausalLM lets sequences"):
        Training(SMALL)


def test_an_update_that_the_engine_cannot_do_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_pause(*_: Any) -> None:
        raise RuntimeError("weight updates in flight need transformers 5.19 or newer")

    monkeypatch.setattr(transformers_batching, "load_weights", no_pause)
    with pytest.raises(SetupError, match=r"cannot run this: weight updates in flight need tr"):
        learn(Training(SMALL))


def test_a_trainer_that_disagrees_with_the_engine_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(SMALL)
    make_engine = Training._make_engine

    def engine_of_other_weights(self: Training, concurrency: int) -> Any:
        engine = make_engine(self, concurrency)
        with torch.no_grad():
            self.model.lm_head.weight[3] += 0.01
        return engine

    monkeypatch.setattr(Training, "_make_engine", engine_of_other_weights)
    with pytest.raises(RuntimeError, match=r"trainer and engine differ by .*, expected at most"):
        learn(training)


@pytest.mark.parametrize(
    ("name", "value", "limits"),
    [
        ("num_steps", 0, "from 1 to 10,000"),
        ("num_prompts", 1001, "from 1 to 1,000"),
        ("group_size", 1, "from 2 to 1,000"),
        ("num_turns", 17, "from 1 to 16"),
        ("warm_up_steps", 0, "from 1 to 10,000"),
        ("capacity", 127, "from 128 to 1,000,000"),
        ("seed", -1, "from 0 to 4,294,967,295"),
        *(("learning_rate", rate, "positive") for rate in (0.0, -1.0, math.nan, math.inf)),
    ],
)
def test_settings_out_of_range_are_refused(name: str, value: float, limits: str) -> None:
    with pytest.raises(SetupError, match=f"{name} must be {limits}, got {value:,}"):
        replace(SMALL, **{name: value})  # type: ignore[arg-type]


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(SetupError, match="layout must be one of merged, turns, tree, got 'rows'"):
        replace(SMALL, layout="rows")  # type: ignore[arg-type]


def episode(prompt: str, sample: int, *rewards: float) -> EpisodeResult:
    ids: list[int] = [1]
    turns = []
    for reward in rewards:
        turns.append(Turn(list(ids), [2, 3], [-0.1, -0.2], reward))
        ids += [2, 3, 4]
    trajectory = Trajectory(f"{prompt}@{sample}", turns, group=prompt)
    return EpisodeResult(Prompt(prompt, [1]), (trajectory,), sample=sample)


def test_a_failed_episode_ends_the_training_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def step(self: Any, action: Any) -> None:
        raise EpisodeError("a@0", "the dog ate it")

    monkeypatch.setattr(grpo.ExactAnswerEnvironment, "step", step)
    with pytest.raises(SetupError, match=r"an episode failed: .*the dog ate it"):
        learn(Training(SMALL))


def test_a_batch_is_credited_and_recorded_group_by_group() -> None:
    episodes = [
        episode("a", 0, -1.0, 1.0), episode("a", 1, -1.0, -1.0, -1.0),
        episode("b", 0, 1.0), episode("b", 1, 1.0),
    ]  # fmt: skip
    batch = pack_episodes(episodes)
    assert batch.groups == ("a", "a", "b", "b")
    assert batch.advantages is not None
    of_turns = batch.advantages[batch.turn_spans[:, 0].long()]
    solved, unsolved = of_turns[0].item(), of_turns[2].item()
    assert solved == -unsolved > 0
    assert of_turns[-2:].tolist() == [0.0, 0.0]
    expected = pack_episodes(episodes).with_advantages(GRPO()).advantages
    assert batch.advantages.equal(expected)  # type: ignore[arg-type]
    assert shares(episodes) == (3 / 7, 3 / 4, pytest.approx((0 - 3 + 1 + 1) / 4))


def outcome(**values: Any) -> StepOutcome:
    known = {
        "loss": 0.5, "gradient_norm": 1.0, "clip_fraction": 0.1, "num_micro_batches": 2,
        "fill": 0.75, "mean_staleness": 0.5, "max_staleness": 1, "num_on_policy": 9,
        "logprob_gap": 1e-6,
    }  # fmt: skip
    return StepOutcome(**(known | values))


@pytest.mark.parametrize("gap", [1.1e-5, float("nan")])
def test_a_gap_beyond_rounding_is_an_error(gap: float) -> None:
    check_logprobs(outcome(logprob_gap=grpo.MAX_LOGPROB_GAP))
    with pytest.raises(RuntimeError, match="differ by"):
        check_logprobs(outcome(logprob_gap=gap))
