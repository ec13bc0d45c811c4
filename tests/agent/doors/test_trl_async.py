"""TRL's asynchronous trainer on the CPU, from our agent's episodes to weights that moved."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch.nn import functional
from transformers import AttentionInterface

from trajpack import Trajectory, Turn
from trajpack.agent.doors.trl_async import AgentRolloutWorker
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import Prompt, SamplingParams

NUM_STEPS = 3


async def agent(prompt: Any, env: Any, generate: Any) -> list[Trajectory]:
    """Answer twice, then go on from the last answer alone; low tokens are better."""
    sampling = SamplingParams(max_new_tokens=4)
    first = await generate(prompt.input_ids, sampling)
    second = await generate([*prompt.input_ids, *first.completion_ids, 9], sampling)
    third = await generate([7, *second.completion_ids], sampling)
    turns = [
        replace(turn, reward=-float(turn.completion_ids[0])) for turn in (first, second, third)
    ]
    return [Trajectory(prompt.id, turns)]


def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **row: Any) -> Any:
    """TRL's tree attention by torch: its own runs on Hopper alone."""
    outputs = []
    queries, keys = row["tree_cu_seqlens_q"].tolist(), row["tree_cu_seqlens_k"].tolist()
    for begin, end, first, last in zip(queries, queries[1:], keys, keys[1:], strict=False):
        seen = row["tree_kv_index"][first:last]
        allowed = torch.ones(end - begin, last - first, dtype=torch.bool)
        outputs.append(
            functional.scaled_dot_product_attention(
                query[:, :, begin:end],
                key[:, :, seen],
                value[:, :, seen],
                attn_mask=allowed.tril(last - first - end + begin),
                scale=row.get("scaling"),
                enable_gqa=True,
            )
        )
    return torch.cat(outputs, 2).transpose(1, 2), None


@pytest.fixture
def trainer_on_the_host(trl: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """TRL's trainer, where it would ask for CUDA."""
    from trl.experimental.async_grpo import async_grpo_trainer as module

    register = module.register_tree_attention

    def register_ours() -> None:
        register()
        AttentionInterface.register(module.TREE_ATTENTION, attend)

    monkeypatch.setattr(module, "register_tree_attention", register_ours)
    monkeypatch.setattr(module, "get_peak_flops_per_device", lambda *options: None)
    return module


@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_the_asynchronous_trainer_learns_from_our_episodes(
    trainer_on_the_host: Any, tmp_path: Path
) -> None:
    from trl.experimental.async_grpo import AsyncGRPOConfig

    model, tokenizer = build_tiny_model(seed=0)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    before = copy.deepcopy(model.state_dict())
    prompts = [Prompt(f"p{number}", [10 + number, 11, 12]) for number in range(4)]
    worker = AgentRolloutWorker(model, agent, None, prompts, group_size=4, max_samples=32)
    config = AsyncGRPOConfig(
        output_dir=str(tmp_path / "run"),
        per_device_train_batch_size=4,
        num_generations=4,
        max_steps=NUM_STEPS,
        token_budget=128,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        learning_rate=1e-2,
        dtype="float32",
        logging_steps=1,
        weight_sync_steps=1,
        max_staleness=100,
    )
    trainer = trainer_on_the_host.AsyncGRPOTrainer(
        model=str(tmp_path / "model"),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "x"}]]}),
        processing_class=tokenizer,
        rollout_worker=worker,
        weight_transfer=worker,
    )
    trainer.train()

    assert trainer.state.global_step == NUM_STEPS
    assert (
        trainer.model_version == NUM_STEPS + 1
    )  # the first weights are sent before the first step
    sent = model.state_dict()  # of the engine, which has the trainer's last weights
    assert all(weight.equal(sent[name]) for name, weight in trainer.model.state_dict().items())
    moved = [name for name, weight in before.items() if not weight.equal(sent[name])]
    assert len(moved) == len(before)
    assert not worker._thread.is_alive()


@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_a_group_without_a_sampled_token_gives_no_sample(trl: Any) -> None:
    worker = AgentRolloutWorker(None, agent, None, [])
    silent = Trajectory("a", [Turn([1], [], [])], group="g")
    assert list(worker._samples([silent])) == []
    spoken = Trajectory("b", [Turn([1], [2], [-1.0], version_start=3, version_end=3)], group="g")
    assert {sample.model_version for sample in worker._samples([silent, spoken])} == {3}


def test_a_worker_whose_rollouts_fail_says_so() -> None:
    model, _ = build_tiny_model(seed=0)
    worker = AgentRolloutWorker(model, agent, None, [None])
    worker.init_weight_transfer()
    with pytest.raises(RuntimeError, match="weights of version 0, but TRL has 3"):
        worker.update_model_version(3)
    worker.start()
    worker._thread.join()
    with pytest.raises(RuntimeError, match="the rollouts failed") as caught:
        worker.check_health(60)
    assert "prompts must be Prompts" in str(caught.value.__cause__)
    worker.stop()
