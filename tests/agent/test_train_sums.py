"""``examples/train_sums.py``: a policy that learns, with the real engine, agent and trainer."""

from __future__ import annotations

import asyncio
import copy
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trajpack
from tests.commands.command import call
from trajpack import PackedBatch, Trajectory, Turn, load
from trajpack.agent import MathMultiTurnAgent, Prompt, SamplingParams
from trajpack.agent.environments.questions import (
    ExactAnswerEnvironment,
    Question,
    arithmetic_questions,
)
from trajpack.agent.models.tiny_model import build_arithmetic_model
from trajpack.agent.runner.episode import run_episode
from trajpack.packing.adapters.huggingface import LMHead

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "train_sums.py"))
MODEL, TOKENIZER = build_arithmetic_model()
SMALL = ["--warm-up", "2", "--prompts", "2"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def train(tmp_path: Path, *arguments: str) -> str:
    """Train, and return the page."""
    out = tmp_path / "new" / "train.html"
    EXAMPLE["main"]([*arguments, "--out", str(out)])
    return out.read_text()


def shares(said: str) -> list[int]:
    """Return the right answers of each step, in percent, of what the training printed."""
    return [int(share) for share in re.findall(r"step +\d+: +(\d+)% right", said)]


@pytest.mark.slow
def test_the_share_of_right_answers_rises_from_a_third_to_two_thirds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, "--steps", "18")
    said = capsys.readouterr().out
    right = shares(said)
    first, last = right[0], sum(right[-5:]) / 5
    assert len(right) == 18
    assert 20 < first < 45
    assert last > max(60, first + 25)
    staleness = [float(mean) for mean in re.findall(r"staleness (\S+)", said)]
    assert staleness[0] == 0
    assert max(staleness) > 0.2  # episodes went on meanwhile


def test_a_training_leaves_a_page_and_its_last_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "demo" / "batch.safetensors"
    page = train(tmp_path, "--steps", "2", *SMALL, "--batch", str(file))
    said = capsys.readouterr().out
    assert len(shares(said)) == 2
    assert "right answers: " in said
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 7
    assert page.count("<pre>") == 4  # a conversation of each question, of the first and last step
    assert "&lt;|assistant|&gt;" in page
    assert "<script" not in page
    batch = load(file)
    assert batch.advantages is not None
    assert len(batch.ids) == 16
    assert "<|assistant|>" in call("inspect", file).stdout  # the tokenizer is beside it


def test_a_divergence_names_weights_and_writes_the_page(tmp_path: Path) -> None:
    options = ["--steps", "3", "--warm-up", "30", "--prompts", "4", "--learning-rate", "1e30"]
    words = r"train_sums: step \d: the training diverged: NaN or infinity in model\.\S+ and \d+ ot"
    with pytest.raises(SystemExit, match=words):
        train(tmp_path, *options)
    page = (tmp_path / "new" / "train.html").read_text()
    assert "right answers" in page
    assert re.search(r"Sums by GRPO: \d of 3 steps", page)


def sampled() -> PackedBatch:
    """Return groups of a right and a wrong answer, with the log-probabilities of `MODEL`."""

    def pack(logprobs: list[float]) -> PackedBatch:
        trajectories = []
        for at in range(8):
            number, reward = at // 2, 1.0 - 2 * (at % 2)
            completion = [20 + number + int(reward > 0), 3]
            turn = Turn([1, 20 + number, 2], completion, logprobs[2 * at :][:2], reward)
            trajectories.append(Trajectory(str(at), [turn], group=str(number)))
        return trajpack.pack(trajectories).with_advantages(trajpack.GRPO())

    with torch.no_grad():
        return pack(LMHead(MODEL).logprobs(pack([0.0] * 16)).tolist())


def test_a_trainer_that_disagrees_with_the_engine_is_caught() -> None:
    model = copy.deepcopy(MODEL)
    with torch.no_grad():
        model.lm_head.weight[21] += 0.01
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    measured = EXAMPLE["train_step"](model, optimizer, sampled(), 0)
    with pytest.raises(RuntimeError, match=r"trainer and engine differ by .* at equal weights"):
        EXAMPLE["check_step"](model, measured)
    measured = EXAMPLE["train_step"](model, optimizer, sampled(), 1)  # sampled by older weights
    EXAMPLE["check_step"](model, measured)
    assert (measured["log-probability gap"], measured["staleness"]) == (0, 1)


async def converse(question: Question, completions: list[list[int]]) -> Trajectory:
    """Have the agent converse with an engine that says what it is told to."""
    agent = MathMultiTurnAgent(
        SamplingParams(max_new_tokens=3), TOKENIZER, None, num_turns=3, stop_on_success=True
    )
    said = iter(completions)

    async def generate(token_ids: Any, sampling: Any = None) -> Turn:
        completion = next(said)
        return Turn(list(token_ids), np.array(completion), [0.0] * len(completion))

    prompt = Prompt(question.id, EXAMPLE["encode_question"](question, TOKENIZER))
    environment = ExactAnswerEnvironment([question])
    (trajectory,) = await run_episode(agent, environment, prompt, generate)
    return trajectory


def plain(trajectory: Trajectory) -> list[Any]:
    turns = trajectory.turns
    return [(list(turn.prompt_ids), list(turn.completion_ids), turn.reward) for turn in turns]


def test_demonstrations_equal_the_agents_turns_with_the_same_answers() -> None:
    demonstrations = EXAMPLE["lazy_demonstrations"](30, TOKENIZER, seed=5)
    assert {len(shown.turns) for shown in demonstrations} == {1, 2, 3}
    for question, shown in zip(arithmetic_questions(30, seed=5), demonstrations, strict=True):
        completions = [list(turn.completion_ids) for turn in shown.turns]
        assert plain(asyncio.run(converse(question, completions))) == plain(shown)
