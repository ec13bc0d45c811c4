"""TRL's own trainer, fed by our agents: a run of a few steps, and what is refused."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from trajpack.agent.agents.environment_agent import EnvironmentAgent, Opening
from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.agents.tool_agent import ToolAgent
from trajpack.agent.agents.tools import Tool
from trajpack.agent.engines.function_engine import FunctionEngine
from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.environments.questions import Question
from trajpack.agent.errors import EpisodeError
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import SamplingParams
from trajpack.agent.runner.runner import EpisodeResult
from trajpack.agent.trl.rollout import TRLRollout, episode_reward, trl_dataset_rows
from trajpack.packing.adapters.trl import to_grpo_inputs
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.buffer import pack
from trajpack.packing.credit.estimators import GRPO
from trajpack.packing.types import Trajectory

pytestmark = [
    # TRL calls what transformers has given a new name.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You are using 'rollout_func':UserWarning"),
]
torch.set_num_threads(1)
NUM_STEPS, GROUP_SIZE = 3, 4
QUESTIONS = [
    Question(f"q{k}", ({"role": "user", "content": text},), (), task_id=k)
    for k, text in enumerate(["Name a digit.", "And another digit?", "How many?"])
]


class ShareOfDigits:
    """Takes the share of digits in an answer for its success; fails where told to."""

    def __init__(self, failing: frozenset[str] = frozenset()) -> None:
        self.failing = failing

    async def reset(self) -> None:
        return None

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        qid, (answer,) = action
        if qid in self.failing:
            raise RuntimeError("no judge")
        share = sum(char.isdigit() for char in answer) / max(1, len(answer))
        return None, [share], True, False, {}


class Step(NamedTuple):
    """What the trainer knew when it computed the loss of one step."""

    inputs: dict[str, torch.Tensor]
    logprobs: torch.Tensor
    """As the trainer's model has them."""
    gradients: list[torch.Tensor]
    """Of the trainer's loss."""
    packed_gradients: list[torch.Tensor]
    """Of the same loss on our packed batch."""


class Trained(NamedTuple):
    trainer: Any
    latest: list[list[EpisodeResult]]
    """The episodes of each call, also of those after training."""
    steps: list[Step]
    results: list[list[EpisodeResult]]
    """The episodes of each step."""
    before: dict[str, torch.Tensor]
    """The weights that training began with."""


def make_rollout(agent: Any = None, environment: Any = None, **options: Any) -> TRLRollout:
    if agent is None:
        agent = MathMultiTurnAgent(SamplingParams(8), build_tiny_model()[1], None, num_turns=2)

    def make_engine(model: Any, **given: Any) -> TransformersEngine:
        return TransformersEngine(model, num_blocks=64, page_size=32, max_batch_tokens=256, **given)

    environment = environment or ShareOfDigits()
    options = {"make_engine": make_engine} | options
    return TRLRollout(agent, environment, QUESTIONS, **options)


def make_trainer(folder: Path, rollout: TRLRollout, cls: Any = None, **options: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = build_tiny_model()
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": 2 * GROUP_SIZE,
        "num_generations": GROUP_SIZE,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "max_steps": NUM_STEPS,
        "loss_type": "bnpo",
    }
    config = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        **(arguments | options),
    )
    return (cls or GRPOTrainer)(
        model,
        reward_funcs=episode_reward,
        args=config,
        train_dataset=Dataset.from_list(trl_dataset_rows(QUESTIONS)),
        processing_class=tokenizer,
        rollout_func=rollout,
    )


def packed(results: list[EpisodeResult]) -> PackedBatch:
    """Pack what the episodes of one step left, with advantages such as TRL's."""
    batch = pack([path for result in results for path in result.trajectories], device="cpu")
    return batch.with_advantages(GRPO(eps=1e-4))


def packed_gradients(model: Any, batch: PackedBatch) -> list[torch.Tensor]:
    """Gradients of the mean over tokens of minus ratio times advantage, with one forward."""
    logits = model(**batch.model_inputs()).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(1, batch.input_ids[1:, None])[:, 0]
    ratio = torch.exp(logprobs - logprobs.detach())
    assert batch.advantages is not None
    trained = batch.loss_mask[1:]
    loss = -(ratio * batch.advantages[1:])[trained].mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    from trl import GRPOTrainer

    steps: list[Step] = []
    results: list[list[EpisodeResult]] = []

    class Watched(GRPOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
            mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
            width = inputs["completion_ids"].shape[1]
            with torch.no_grad():
                found = self._get_per_token_logps_and_entropies(model, ids, mask, width)[0]
            loss = super()._compute_loss(model, inputs)
            parameters = list(model.parameters())
            gradients = list(torch.autograd.grad(loss, parameters, retain_graph=True))
            own = packed_gradients(model, packed(results[-1]))
            steps.append(Step(inputs, found, gradients, own))
            return loss

    rollout = make_rollout(on_results=results.append)
    trainer = make_trainer(tmp_path_factory.mktemp("trl"), rollout, Watched)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.train()
    trainer.model.load_state_dict(before)  # for the tests to come: it is hardly random any more
    return Trained(trainer, results, steps, results[:], before)


def rows_of(step: Step) -> list[dict[str, torch.Tensor]]:
    """Return the trainer's rows without padding: all tokens, what is trained, and its numbers."""
    inputs, rows = step.inputs, []
    for row in range(len(inputs["prompt_ids"])):
        prompt, completion = (
            inputs[f"{part}_ids"][row][inputs[f"{part}_mask"][row].bool()]
            for part in ("prompt", "completion")
        )
        size = len(completion)
        rows.append(
            {
                "ids": torch.cat([prompt, completion]),
                "trained": inputs["tool_mask"][row, :size].bool(),
                "sampled": inputs["sampling_per_token_logps"][row, :size],
                "logprobs": step.logprobs[row, :size],
                "advantage": inputs["advantages"][row],
            }
        )
    return rows


def sequences_of(batch: PackedBatch) -> list[slice]:
    bounds = batch.cu_seqlens.tolist()
    return [slice(begin, end) for begin, end in pairwise(bounds)]


def matched(trained: Trained) -> Iterator[tuple[dict[str, torch.Tensor], PackedBatch, slice]]:
    """Yield each row of the trainer, which shuffles them, with the sequence of ours it is."""
    for step, results in zip(trained.steps, trained.results, strict=True):
        batch = packed(results)
        ours = sequences_of(batch)
        rows = rows_of(step)
        assert len(rows) == len(ours) == 2 * GROUP_SIZE
        for row in rows:
            of = next(of for of in ours if torch.equal(batch.input_ids[of], row["ids"]))
            ours.remove(of)
            yield row, batch, of


def test_the_trainer_trains_exactly_the_sampled_tokens(trained: Trained) -> None:
    num_observations = 0
    for row, batch, of in matched(trained):
        size = len(row["trained"])
        assert torch.equal(batch.loss_mask[of][-size:], row["trained"])
        assert not batch.loss_mask[of][:-size].any()
        assert row["trained"][[0, -1]].all()
        assert torch.equal(batch.rollout_logprobs[of][-size:], row["sampled"])
        num_observations += int((~row["trained"]).sum())
    assert num_observations > NUM_STEPS * 2 * GROUP_SIZE, "feedback stands in between"
    assert {len(path.turns) for results in trained.results
            for result in results for path in result.trajectories} == {2}  # fmt: skip


def test_rewards_are_those_of_the_episodes_and_advantages_those_of_grpo(trained: Trained) -> None:
    different = set()
    for row, batch, of in matched(trained):
        assert batch.advantages is not None
        own = batch.advantages[of][batch.loss_mask[of]]
        torch.testing.assert_close(own, row["advantage"].expand_as(own), rtol=1e-4, atol=1e-5)
        different.add(row["advantage"].item())
    assert len(different) > 4, "a reward that is always the same shows nothing"
    logged = [log["rewards/episode_reward/mean"] for log in trained.trainer.state.log_history[:-1]]
    for mean, results in zip(logged, trained.results, strict=True):
        scores = [sum(turn.reward for turn in r.trajectories[0].turns) for r in results]
        assert mean == pytest.approx(sum(scores) / len(scores), rel=1e-5)
    assert trained.trainer.state.log_history[0]["episode/turns"] == 2
    assert trained.trainer.state.log_history[0]["episode/left_out"] == 0


def test_log_probabilities_are_those_of_the_trainers_weights_at_each_step(
    trained: Trained,
) -> None:
    """Where they were those of older weights, the ratio would be far from one."""
    for row, _, _ in matched(trained):
        sampled, found = row["sampled"][row["trained"]], row["logprobs"][row["trained"]]
        torch.testing.assert_close(sampled, found, rtol=0, atol=1e-4)
    model, _ = build_tiny_model()
    model.load_state_dict(trained.before)
    batch = packed(trained.results[-1])
    with torch.no_grad():
        logits = model(**batch.model_inputs()).logits[0, :-1]
    old = logits.log_softmax(-1).gather(1, batch.input_ids[1:, None])[:, 0]
    change = (old - batch.rollout_logprobs[1:])[batch.loss_mask[1:]].abs()
    assert change.max() > 0.1, "the weights have changed"
    assert batch.policy_versions[batch.loss_mask].unique().tolist() == [NUM_STEPS - 1]


def test_the_trainers_gradient_is_that_of_the_packed_batch(trained: Trained) -> None:
    for step in trained.steps:
        norm = max(gradient.abs().max().item() for gradient in step.gradients)
        assert norm > 1e-4
        for theirs, ours in zip(step.gradients, step.packed_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * norm)


def test_the_trainers_inputs_equal_those_of_the_format(trained: Trained) -> None:
    """So a trainer may be given the packed batch itself, with credit by token."""
    rows = trl_dataset_rows([question for question in QUESTIONS[:2] for _ in range(GROUP_SIZE)])
    trainer = trained.trainer
    made = trainer._generate_and_score_completions(rows)
    batch = packed(trained.latest[-1])
    expected = to_grpo_inputs(
        batch, pad_token_id=trainer.processing_class.pad_token_id, advantages="sequence"
    )
    assert sorted(made) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(tensor, made[name], rtol=1e-4, atol=1e-5, msg=name)


def ask(trained: Trained, questions: str, **options: Any) -> dict[str, list[Any]]:
    """Have the trainer's model answer questions, named by their digits."""
    asked = [list(map(dict, QUESTIONS[int(k)].messages)) for k in questions]
    return make_rollout(**options)(asked, trained.trainer)


def test_prompts_come_back_in_their_order_however_many_there_are_of_each(trained: Trained) -> None:
    found = ask(trained, "01021")
    assert found["episode_id"] == ["q0@0", "q1@0", "q0@1", "q2@0", "q1@1"]
    for row, question in enumerate("01021"):
        text = build_tiny_model()[1].decode(found["prompt_ids"][row])
        assert QUESTIONS[int(question)].text in text
    assert all(len(column) == 5 for column in found.values())
    assert found["completion_ids"][0] != found["completion_ids"][2]


def test_a_rollout_does_not_change_the_trainer(trained: Trained) -> None:
    model = trained.trainer.model
    model.train()
    attention, state = model.config._attn_implementation, torch.get_rng_state()
    rollout = make_rollout()
    asked = [list(map(dict, QUESTIONS[0].messages))]
    first, second = (rollout(asked, trained.trainer)["completion_ids"] for _ in range(2))
    assert first != second, "each call samples anew"
    assert make_rollout()(asked, trained.trainer)["completion_ids"] == first
    assert make_rollout(seed=1)(asked, trained.trainer)["completion_ids"] != first
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert model.config._attn_implementation == attention


def test_a_rollout_runs_beside_a_running_event_loop(trained: Trained) -> None:
    async def in_a_notebook() -> dict[str, list[Any]]:
        return ask(trained, "0")

    assert asyncio.run(in_a_notebook())["episode_turns"] == [2]


def test_a_failed_episode_raises_or_is_left_out(trained: Trained) -> None:
    failing = ShareOfDigits(frozenset(["q0@1"]))
    with pytest.raises(EpisodeError, match=r"episode 'q0@1': .*no judge"):
        ask(trained, "00", environment=failing)
    found = ask(trained, "00", environment=failing, failures="mask")
    assert found["episode_reward"][0] is not None
    assert found["episode_reward"][1] is None
    assert found["prompt_ids"][1] == found["prompt_ids"][0]
    assert [found[name][1] for name in ("env_mask", "logprobs")] == [[0], [0.0]]
    assert found["episode_turns"] == [2, 0]


class Rewriting:
    """Asks twice, the second time about another conversation."""

    async def run(self, prompt: Any, env: Any, generate: Any) -> list[Trajectory]:
        turns = []
        for reward, ids in ((1.0, list(prompt.input_ids)), (0.5, [7, 8, 9])):
            turn = await generate(ids, SamplingParams(4))
            turns.append(dataclasses.replace(turn, reward=reward))
        return [Trajectory(prompt.id, turns)]


def test_an_episode_of_several_sequences_raises_or_is_left_out(trained: Trained) -> None:
    with pytest.raises(EpisodeError, match="episode 'q0@0': it has 2 sequences"):
        ask(trained, "0", agent=Rewriting())
    found = ask(trained, "0", agent=Rewriting(), failures="mask")
    assert found["episode_reward"] == [None]
    assert found["env_mask"] == [[0]]


def test_prompts_are_those_of_the_agent(trained: Trained) -> None:
    sampling, (_, tokenizer) = SamplingParams(4), build_tiny_model()
    tool = Tool("width_of", "Width.", {"properties": {"ship": {"type": "string"}}}, str)
    messages = [dict(message) for message in QUESTIONS[0].messages]
    agents = [MathMultiTurnAgent(sampling, tokenizer, None), ToolAgent(sampling, tokenizer, [tool])]
    for agent in agents:
        for prompt in (messages, QUESTIONS[0].text):
            found = make_rollout(agent)([prompt], trained.trainer)
            assert found["prompt_ids"] == [agent.prompt_ids(messages)]
    assert "width_of" in tokenizer.decode(agents[1].prompt_ids(messages))

    class Says(ShareOfDigits):
        async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
            return "How wide?", [1.0], not isinstance(action, Opening), False, {}

    player = EnvironmentAgent(sampling, tokenizer)
    found = make_rollout(player, Says())([messages], trained.trainer)
    opening = player.prompt_ids(QUESTIONS[0].text)
    assert found["prompt_ids"] == [opening + player.messages.first("How wide?")]
    with pytest.raises(ValueError, match=r"is one message, the instructions; .* got 2 messages"):
        player.prompt_ids(messages * 2)


def test_the_trainer_masks_the_rows_of_truncated_trajectories_and_no_others(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, other = trained.trainer.processing_class.eos_token_id, 7
    kinds = {
        f"q0@{k}": (last, truncated)
        for k, (last, truncated) in enumerate(product((end, other), (True, False, None)))
    }

    async def engine(ids: Any, sampling: Any) -> Any:
        return [5, sampling], [-1.0, -1.0], sampling == other

    async def agent(prompt: Any, env: Any, generate: Any) -> list[Trajectory]:
        last, truncated = kinds[prompt.id]
        turn = await generate(prompt.input_ids, last)
        return [Trajectory(prompt.id, [turn], truncated=truncated)]

    rollout = make_rollout(agent, make_engine=lambda model, **_: FunctionEngine(engine))
    trainer = trained.trainer
    monkeypatch.setattr(trainer, "rollout_func", rollout)
    rows = trl_dataset_rows([QUESTIONS[0]]) * len(kinds)
    for is_masking in (False, True):
        monkeypatch.setattr(trainer.args, "mask_truncated_completions", is_masking)
        monkeypatch.setattr(trainer, "mask_truncated_completions", is_masking)
        monkeypatch.setattr(trainer, "num_generations", len(kinds))
        made = trainer._generate_and_score_completions(rows)
        loss_mask = made["completion_mask"] * made["tool_mask"]
        for trained_tokens, (last, truncated) in zip(loss_mask, kinds.values(), strict=True):
            is_truncated = last == other if truncated is None else truncated
            assert trained_tokens.sum() == (0 if is_masking and is_truncated else 2)


def test_wrong_prompts_options_and_temperatures_are_refused(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"none of the questions: .*Who\?"):
        make_rollout()([[{"role": "user", "content": "Who?"}]], trained.trainer)
    with pytest.raises(TypeError, match="a str or messages, got 7"):
        make_rollout()([7], trained.trainer)
    cold = MathMultiTurnAgent(
        SamplingParams(8, temperature=0.5), build_tiny_model()[1], None, num_turns=1
    )
    with pytest.raises(ValueError, match=r"at temperature 0\.5, but the trainer's loss is at 1\.0"):
        ask(trained, "0", agent=cold)
    monkeypatch.setattr(trained.trainer, "chat_template_kwargs", {"enable_thinking": False})
    with pytest.raises(ValueError, match=r"chat_template_kwargs=.* of the trainer: the agent"):
        ask(trained, "0")
    assert ask(trained, "0", agent=Rewriting(), failures="mask")["episode_turns"] == [2]
    with pytest.raises(ValueError, match="concurrency must be at least 1, got 0"):
        ask(trained, "0", agent=Rewriting(), concurrency=0)
    with pytest.raises(ValueError, match=r"failures must be 'raise' or 'mask', got 'drop'"):
        make_rollout(failures="drop")
    other = dataclasses.replace(QUESTIONS[0], id="other", solutions=("1",))
    with pytest.raises(ValueError, match="'q0' and 'other' have the same text"):
        TRLRollout(Rewriting(), ShareOfDigits(), [*QUESTIONS, other])
