"""Preparing a rollout, and putting what came of it in order."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from trajpack.agent.errors import SetupError
from trajpack.agent.rollout.rollout import Rollout, prepare_rollout
from trajpack.agent.rollout.settings import RolloutSettings

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def prepared() -> Rollout:
    return prepare_rollout(RolloutSettings(num_prompts=2, num_turns=2, max_new_tokens=8))


def test_prompts_are_the_questions_as_chats(prepared: Rollout) -> None:
    for question, prompt in zip(prepared.questions, prepared.prompts, strict=True):
        assert prompt.id == question.id
        text = prepared.tokenizer.decode(prompt.input_ids)
        assert text == f"<|im_start|>user\n{question.text}<|im_end|>\n<|im_start|>assistant\n"


def test_a_file_gives_its_first_questions(tmp_path: Path) -> None:
    lines = [{"prompt": f"{k}?", "solutions": ["1"], "task_id": k} for k in range(5)]
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    few = prepare_rollout(RolloutSettings(dataset=path, num_prompts=2))
    assert [(prompt.id, prompt.task_id) for prompt in few.prompts] == [("q-1", 0), ("q-2", 1)]
    assert len(prepare_rollout(RolloutSettings(dataset=path, num_prompts=9)).prompts) == 5


def test_a_model_the_engine_cannot_run_is_refused(
    prepared: Rollout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no such attention\nand more")

    monkeypatch.setattr(prepared.model, "init_continuous_batching", refuse)

    async def body() -> None:
        async with prepared.episodes():
            raise AssertionError("unreachable")

    with pytest.raises(SetupError, match=r"the engine cannot start: no such attention$"):
        asyncio.run(body())
