"""slime and miles: the hooks ``--custom-generate-function-path`` and of rewards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from statistics import mean, stdev
from typing import Any

from trajpack.agent.doors.episode import (
    completion_of,
    merged_sampling,
    packed_episode,
    prompt_ids_of,
    run_episode,
)
from trajpack.agent.protocols import GenerationOutput, Prompt
from trajpack.packing.adapters.slime import to_samples

TASK_KEYS = {"index", "group_index"}
"""Keys of a sample that stay as slime filled them, also with ``None``."""
Post = Callable[[str, dict[str, Any]], Awaitable[dict[str, Any]]]


def generate_function(
    agent: Any, environment: Any, tokenizer: Any, post: Post
) -> Callable[[Any, Any, dict[str, Any]], Awaitable[list[Any]]]:
    """Return slime's ``generate(args, sample, sampling_params)`` by an agent.

    Write ``generate = generate_function(agent, environment, tokenizer, post)`` in a module of
    yours and name it in ``--custom-generate-function-path``. An episode has a sample for each of
    its sequences; they share ``rollout_id`` and have the reward of the episode: use
    `post_process_rewards` with them.

    Args:
        agent: Agent of the episodes. Its ``prompt_ids(messages)`` encodes ``sample.prompt``;
            without it the tokenizer does.
        environment: Environment of all episodes, or a function that makes one of the sample.
        tokenizer: Tokenizer of the model.
        post: ``slime.utils.http_utils.post``, or that of miles.
    """

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[Any]:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"

        async def ask(ids: Any, sampling: Any) -> GenerationOutput:
            params = merged_sampling(sampling_params, sampling, "max_new_tokens")
            payload = {"input_ids": list(ids), "sampling_params": params, "return_logprob": True}
            meta = (await post(url, payload))["meta_info"]
            rows, version = meta["output_token_logprobs"], str(meta.get("weight_version", ""))
            number = int(version) if version.isdecimal() else 0
            return completion_of(
                ids,
                [row[1] for row in rows],
                [row[0] for row in rows],
                stop_reason=meta["finish_reason"]["type"],
                versions=(number, number),
                missing="SGLang returns one for each token",
            )

        if isinstance(sample.prompt, str):
            ids = tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        else:
            ids = prompt_ids_of(agent, tokenizer, sample.prompt)
        prompt = Prompt(str(sample.index), ids)
        trajectories = await run_episode(
            agent, environment, prompt, ask, row=sample, sampling=sampling_params
        )
        made = []
        for fields in to_samples(packed_episode(trajectories), like=sample):
            if not any(fields["loss_mask"]):
                continue
            part = copy(sample)
            vars(part).update((key, fields[key]) for key in fields.keys() - TASK_KEYS)
            part.response = tokenizer.decode(part.tokens[-part.response_length :])
            part.status = getattr(type(sample).Status, part.status.upper())
            made.append(part)
        return made

    return generate


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return the raw rewards and those compared within groups, an episode counted once.

    slime's hook ``--custom-reward-post-process-path``. A group is a ``group_index``, an episode a
    ``rollout_id``: the mean and the deviation (n - 1) are over episodes, however many samples each
    has. With ``args.grpo_std_normalization`` rewards are divided by the deviation + 1e-6.

    Raises:
        ValueError: If samples of one episode have different rewards.
    """
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    episodes: defaultdict[Any, dict[Any, float]] = defaultdict(dict)
    for index, (sample, reward) in enumerate(zip(samples, raw, strict=True)):
        rollout = getattr(sample, "rollout_id", None)
        key = ("sample", index) if rollout is None else rollout
        if episodes[sample.group_index].setdefault(key, reward) != reward:
            raise ValueError(f"samples of rollout {key} have different rewards")
    scores = []
    for sample, reward in zip(samples, raw, strict=True):
        own = list(episodes[sample.group_index].values())
        score = reward - mean(own)
        if getattr(args, "grpo_std_normalization", True) and len(own) > 1:
            score /= stdev(own) + 1e-6
        scores.append(score)
    return raw, scores
