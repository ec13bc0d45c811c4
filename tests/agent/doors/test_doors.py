"""An agent inside each trainer's loop, against the trainer's own classes."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.agent.doors.episodes import (
    EOS,
    EXPECTED,
    PROMPT,
    REWARDS,
    expected_turns,
    forgetful,
    plain,
    sampled,
)
from trajpack import Trajectory, Turn, pack
from trajpack.agent.doors import openrlhf as openrlhf_door, slime as slime_door
from trajpack.agent.doors.areal import rollout_workflow
from trajpack.agent.doors.episode import merged_sampling, prompt_ids_of
from trajpack.agent.doors.skyrl import AgentGenerator
from trajpack.agent.doors.torchtitan import rollouter_class
from trajpack.agent.doors.verl import agent_loop
from trajpack.agent.errors import EpisodeError
from trajpack.agent.protocols import SamplingParams
from trajpack.packing.adapters.areal import to_padded_dict


async def asking(prompt: Any, env: Any, generate: Any, **stops: Any) -> list[Trajectory]:
    """`forgetful` with a shorter length, stops, and a field of its own."""
    sampling = SamplingParams(max_new_tokens=4, **stops)

    async def shorter(ids: Any) -> Any:
        return replace(await generate(ids, sampling), fields={"note": torch.zeros(1)})

    return await forgetful(prompt, env, shorter)


brief = partial(asking, stop=(".",), stop_token_ids=(9,))
short = partial(asking, stop_token_ids=(9,))
TOKENIZER = SimpleNamespace(eos_token_id=EOS, decode=str, apply_chat_template=None)
TOKENIZER.apply_chat_template = lambda messages, **options: PROMPT
MESSAGES = [{"role": "user", "content": "2+3?"}]


def test_verl_trains_each_sequence_and_counts_the_episode_once(verl: Any) -> None:
    module = verl.load("verl.experimental.agent_loop.agent_loop")
    loop_class = agent_loop("forgetful", forgetful, None)
    assert issubclass(loop_class, module.AgentLoopBase)
    asked = []

    class Servers:
        async def generate(self, request_id: str, *, prompt_ids: Any, sampling_params: Any) -> Any:
            asked.append((request_id, sampling_params))
            tokens, logprobs = sampled(prompt_ids)
            return SimpleNamespace(
                token_ids=tokens,
                log_probs=logprobs,
                stop_reason="completed",
                extra_fields={"min_global_steps": 3, "max_global_steps": 4},
            )

    loop = object.__new__(loop_class)
    loop.server_manager, loop.tokenizer = Servers(), TOKENIZER
    row = {"raw_prompt": MESSAGES, "uid": "u", "global_steps": 4}
    outputs = asyncio.run(loop.run({"temperature": 0.7}, **row))

    assert [output.prompt_ids for output in outputs] == [one.prompt_ids for one in EXPECTED]
    assert [output.response_ids for output in outputs] == [one.response_ids for one in EXPECTED]
    assert [output.response_mask for output in outputs] == [one.response_mask for one in EXPECTED]
    assert [output.response_logprobs for output in outputs] == [one.logprobs for one in EXPECTED]
    assert [output.num_turns for output in outputs] == [4, 2]
    assert [output.reward_score for output in outputs] == [sum(REWARDS)] * 2
    for output in outputs:  # verl's own conversion, and the keys that it copies
        assert output.as_dict()["rollout_log_probs"].dtype == torch.float32
        assert output.extra_fields["reward_extra_info"] == {}
        assert output.extra_fields["min_global_steps"] == 3
    assert len({name for name, _ in asked}) == 1
    assert {params["temperature"] for _, params in asked} == {0.7}


def test_verl_without_log_probabilities_says_what_to_set(verl: Any) -> None:
    class Servers:
        async def generate(self, **request: Any) -> Any:
            return SimpleNamespace(token_ids=[1], log_probs=None, stop_reason=None, extra_fields={})

    verl.load("verl.experimental.agent_loop.agent_loop")
    loop = object.__new__(agent_loop("silent", forgetful, None))
    loop.server_manager, loop.tokenizer = Servers(), TOKENIZER
    with pytest.raises(EpisodeError, match="calculate_log_probs=True"):
        asyncio.run(loop.run({}, raw_prompt=PROMPT))


def test_areal_takes_the_rows_of_a_workflow(areal: Any) -> None:
    api = areal.load("areal.api.workflow_api")
    io = areal.load("areal.api.io_struct")
    gconfig = SimpleNamespace(max_new_tokens=8, stop_token_ids=[EOS], stop=None, n_samples=4)
    gconfig.new = lambda **changes: SimpleNamespace(**vars(gconfig) | changes)
    asked = []

    class Engine:
        async def agenerate(self, request: Any) -> Any:
            asked.append(request.gconfig)
            tokens, logprobs = sampled(request.input_ids)
            return io.ModelResponse(
                input_tokens=request.input_ids,
                output_tokens=tokens,
                output_logprobs=logprobs,
                output_versions=[5, 5, 6],
                stop_reason="stop",
            )

    workflow = rollout_workflow(brief, None, gconfig, TOKENIZER)
    assert isinstance(workflow, api.RolloutWorkflow)
    rows = asyncio.run(workflow.arun_episode(Engine(), {"messages": MESSAGES}))

    expected = to_padded_dict(pack([Trajectory("a", expected_turns())]))
    assert rows.keys() == expected.keys()
    for name in ("input_ids", "loss_mask", "logprobs", "rewards", "attention_mask"):
        torch.testing.assert_close(rows[name], expected[name], rtol=0, atol=0)
    for one in asked:
        assert (one.n_samples, one.max_new_tokens) == (1, 4)
        assert (one.stop, one.stop_token_ids) == (["."], [EOS, 9])
    assert set(rows["versions"].unique().tolist()) == {-1, 0, 5, 6}  # 0 is padding


def test_skyrl_accepts_the_output_of_the_generator(skyrl: Any) -> None:
    utils = skyrl.load("skyrl.train.utils.trainer_utils")

    class Client:
        async def generate(self, request: Any) -> dict[str, Any]:
            assert request["sampling_params"]["max_tokens"] == 4
            tokens, logprobs = sampled(request["prompt_token_ids"][0])
            return {
                "response_ids": [tokens],
                "response_logprobs": [logprobs],
                "stop_reasons": ["stop"],
            }

    names = [SimpleNamespace(instance_id="2+3", repetition_id=number) for number in range(2)]
    params = {"min_tokens": 1, "max_tokens": 8, "stop": None}  # of get_vllm_sampling_params
    batch = {"prompts": [MESSAGES] * 2, "trajectory_ids": names, "sampling_params": params}
    generator = AgentGenerator(brief, None, TOKENIZER, Client())
    output = asyncio.run(generator.generate(batch))

    utils.validate_generator_output(2, output, step_wise=True)
    assert output["response_ids"] == [one.response_ids for one in EXPECTED] * 2
    assert output["loss_masks"] == [one.response_mask for one in EXPECTED] * 2
    assert output["trajectory_ids"] == [names[0]] * 2 + [names[1]] * 2
    assert output["is_last_step"] == [False, True] * 2
    last = [
        sum(rewards)
        for rewards, is_last in zip(output["rewards"], output["is_last_step"], strict=True)
        if is_last
    ]
    assert last == [sum(REWARDS)] * 2

    async def silent(prompt: Any, env: Any, generate: Any) -> list[Trajectory]:
        return []

    with pytest.raises(ValueError, match="returned no trajectory of an episode"):
        asyncio.run(AgentGenerator(silent, None, TOKENIZER, Client()).generate(batch))


def test_openrlhf_takes_an_episode_of_one_sequence(openrlhf: Any) -> None:
    base = openrlhf.load("openrlhf.utils.agent").AgentExecutorBase
    asked: list[int] = []

    class Engine:
        async def generate(self, ids: Any, params: Any) -> Any:
            asked.append(params.max_tokens)
            tokens, logprobs = sampled(ids)
            rows = [
                {token: SimpleNamespace(logprob=value)}
                for token, value in zip(tokens, logprobs, strict=True)
            ]
            answer = SimpleNamespace(token_ids=tokens, logprobs=rows, finish_reason="stop")
            return SimpleNamespace(outputs=[answer])

    class Executor(openrlhf_door.AgentExecutor, base):
        pass

    arguments = (PROMPT, "5", SimpleNamespace(max_tokens=9), 512, TOKENIZER, Engine())
    row = asyncio.run(Executor(plain, None).execute(*arguments))
    assert asked == [512 - 3, 512 - 7]  # all that is left, as OpenRLHF's own executor
    first = PROMPT + sampled(PROMPT)[0]
    assert row["observation_tokens"] == [*first, 41, *sampled([*first, 41])[0]]
    assert row["action_ranges"] == [(3, 6), (7, 10)]
    assert row["rollout_log_probs"] == [0, 0, 0, -0.5, -0.25, -0.125, 0, -0.5, -0.25, -0.125]
    assert (row["reward"], row["truncated"], row["label"]) == (1.0, False, "5")
    with pytest.raises(ValueError, match="takes one sequence for an episode, got 2"):
        asyncio.run(Executor(forgetful, None).execute(*arguments))


def test_torchtitan_takes_the_turns_of_a_rollouter(peer: Any) -> None:
    titan = peer("torchtitan")
    types = titan.load("torchtitan.experiments.rl.rollout.types")
    rollouter_type = rollouter_class(short, None)

    async def generate_fn(*, prompt_token_ids: Any, sampling_config: Any, **request: Any) -> Any:
        assert sampling_config == SimpleNamespace(max_tokens=4, stop_token_ids=[EOS, 9])
        tokens, logprobs = sampled(prompt_token_ids)
        return SimpleNamespace(
            token_ids=tokens,
            token_logprobs=logprobs,
            finish_reason="stop",
            min_policy_version=3,
            max_policy_version=3,
        )

    class Env:
        async def init(self) -> Any:
            return SimpleNamespace(next_prompt_token_ids=PROMPT)

    rollouter = object.__new__(rollouter_type)
    sampling = SimpleNamespace(max_tokens=8, stop_token_ids=[EOS])
    rollout = asyncio.run(
        rollouter._run_single_rollout(
            generate_fn=generate_fn, env=Env(), sampling=sampling, group_id=5, rollout_id=1
        )
    )
    assert isinstance(rollout, types.Rollout)
    assert rollout.status is types.RolloutStatus.COMPLETED
    assert [turn.prompt_token_ids for turn in rollout.turns] == [
        list(turn.prompt_ids) for turn in expected_turns()
    ]
    assert [turn.completion_token_ids for turn in rollout.turns] == [
        list(turn.completion_ids) for turn in expected_turns()
    ]
    [score] = asyncio.run(rollouter.score_group([rollout], None))
    assert score.reward == sum(REWARDS)


def test_torchtitan_gets_no_turn_without_a_token(peer: Any) -> None:
    peer("torchtitan").load("torchtitan.experiments.rl.rollout.types")

    async def ended_by_abort(prompt: Any, env: Any, generate: Any) -> list[Trajectory]:
        [one] = await plain(prompt, env, generate)
        silent = Turn(one.turns[-1].prompt_ids, [], [], reward=0.5)
        return [replace(one, turns=[silent, *one.turns, silent])]

    async def generate_fn(*, prompt_token_ids: Any, **request: Any) -> Any:
        tokens, logprobs = sampled(prompt_token_ids)
        answer = SimpleNamespace(token_ids=tokens, token_logprobs=logprobs, finish_reason="stop")
        answer.min_policy_version = answer.max_policy_version = 3
        return answer

    async def init() -> Any:
        return SimpleNamespace(next_prompt_token_ids=PROMPT)

    rollouter = object.__new__(rollouter_class(ended_by_abort, None))
    rollout = asyncio.run(
        rollouter._run_single_rollout(
            generate_fn=generate_fn,
            env=SimpleNamespace(init=init),
            sampling=SimpleNamespace(max_tokens=8),
            group_id=5,
            rollout_id=1,
        )
    )
    assert [turn.env_rewards["environment"] for turn in rollout.turns] == [0.0, 2.0]
    assert all(turn.completion_token_ids for turn in rollout.turns)


class Sample(SimpleNamespace):
    """The fields of slime's class that a generate function reads or writes."""

    Status = SimpleNamespace(COMPLETED="completed", TRUNCATED="truncated")

    def get_reward_value(self, args: Any) -> float:
        return self.reward


def test_slime_gets_a_sample_for_each_sequence_of_a_rollout() -> None:
    calls = itertools.count(1)

    async def post(url: str, payload: dict[str, Any]) -> dict[str, Any]:
        assert url == "http://host:1/generate"
        tokens, logprobs = sampled(payload["input_ids"])
        rows = [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)]
        meta = {"output_token_logprobs": rows, "weight_version": str(len(tokens) + next(calls))}
        return {"meta_info": meta | {"finish_reason": {"type": "stop"}}}

    generate = slime_door.generate_function(forgetful, None, TOKENIZER, post)
    args = SimpleNamespace(sglang_router_ip="host", sglang_router_port=1)
    sample = Sample(prompt=MESSAGES, index=3, group_index=0)
    made = asyncio.run(generate(args, sample, {"max_new_tokens": 9}))

    assert [one.tokens for one in made] == [one.prompt_ids + one.response_ids for one in EXPECTED]
    assert [one.loss_mask for one in made] == [one.response_mask for one in EXPECTED]
    assert [one.rollout_log_probs for one in made] == [one.logprobs for one in EXPECTED]
    assert [one.rollout_id for one in made] == [3, 3]
    assert [one.weight_versions for one in made] == [["4", "5"], ["6"]]  # of its own turns
    assert [one.response for one in made] == [str(one.response_ids) for one in EXPECTED]
    assert {(one.status, one.index, one.group_index) for one in made} == {("completed", 3, 0)}
    other = Sample(group_index=0, rollout_id=4, reward=0.0)
    raw, scores = slime_door.post_process_rewards(SimpleNamespace(), [*made, other])
    assert raw == [1.0, 1.0, 0.0]
    assert scores == pytest.approx([0.70710578, 0.70710578, -0.70710578])  # 0.5 / (0.5**0.5 + 1e-6)
    alone = Sample(group_index=0, rollout_id=None, reward=0.0)  # its place is another's rollout
    taken = Sample(group_index=0, rollout_id=0, reward=1.0)
    assert slime_door.post_process_rewards(SimpleNamespace(), [alone, taken])[0] == [0, 1]
    made[0].reward = 2.0
    with pytest.raises(ValueError, match="samples of rollout 3 have different rewards"):
        slime_door.post_process_rewards(SimpleNamespace(), made)


def test_sampling_has_the_length_of_the_agent_and_the_rest_of_the_trainer() -> None:
    params = {"temperature": 0.5, "max_tokens": 16, "stop": ["a"]}
    own = SamplingParams(max_new_tokens=8, temperature=1.0, stop=("b",))
    merged = merged_sampling(params, own, "max_tokens")
    assert merged == {"temperature": 0.5, "max_tokens": 8, "stop": ["a", "b"]}
    assert merged_sampling(params, params, "max_tokens") == params
    assert merged_sampling(merged, own, "max_tokens") == merged


def test_prompts_are_encoded_by_the_agent_the_template_or_not_at_all() -> None:
    agent = SimpleNamespace(prompt_ids=lambda messages: [len(messages)])
    assert prompt_ids_of(agent, TOKENIZER, MESSAGES) == [1]
    assert prompt_ids_of(None, TOKENIZER, MESSAGES) == PROMPT
    assert prompt_ids_of(agent, TOKENIZER, [7, 8]) == [7, 8]
