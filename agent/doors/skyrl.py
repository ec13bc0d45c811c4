"""SkyRL 0.4: a generator."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from trajpack.agent.doors.episode import (
    completion_of,
    joined,
    merged_sampling,
    packed,
    prompt_ids_of,
    run_episode,
)
from trajpack.agent.protocols import GenerationOutput, Prompt
from trajpack.packing.adapters.skyrl import TrajectoryID, to_generator_output
from trajpack.packing.rows.layout import row_trajectories


class AgentGenerator:
    """A ``GeneratorInterface`` of SkyRL: episodes of an agent on SkyRL's inference engines.

    Return it from ``get_generator`` of your ``BasePPOExp``. With agents whose histories may be
    rewritten, set ``generator.step_wise_trajectories``: an episode then has an entry for each of
    its sequences, next to each other, the last of which has its whole reward.

    Args:
        agent: Agent of the episodes. Its ``prompt_ids(messages)`` encodes the prompts; without it
            ``tokenizer`` does.
        environment: Environment of all episodes, or a function that makes one of the prompt's
            ``env_extras``.
        tokenizer: The tokenizer of the model.
        client: SkyRL's inference engine client.
        version: Called without arguments: number of the weights that sample now.
    """

    def __init__(
        self, agent: Any, environment: Any, tokenizer: Any, client: Any, *, version: Any = int
    ) -> None:
        self.agent, self.environment, self.tokenizer = agent, environment, tokenizer
        self.client, self.version = client, version

    async def generate(self, input_batch: Mapping[str, Any]) -> dict[str, Any]:
        """Run an episode for each prompt and return a ``GeneratorOutput`` in their order.

        Raises:
            EpisodeError: If an episode failed; the others are cancelled.
        """
        prompts = input_batch["prompts"]
        ids = input_batch.get("trajectory_ids") or [
            TrajectoryID(str(number), 0) for number in range(len(prompts))
        ]
        extras = input_batch.get("env_extras") or [None] * len(prompts)
        params = dict(input_batch.get("sampling_params") or {})
        async with asyncio.TaskGroup() as group:
            episodes = [
                group.create_task(self._episode(*one, params))
                for one in zip(prompts, ids, extras, strict=True)
            ]
        batch = packed([joined(episode.result()) for episode in episodes])
        return to_generator_output(batch) | {
            "trajectory_ids": [ids[number] for number in row_trajectories(batch)]
        }

    async def _episode(self, messages: Any, name: Any, extra: Any, params: dict[str, Any]) -> Any:
        session = f"{name.instance_id}_{name.repetition_id}"

        async def generate(ids: Any, sampling: Any) -> GenerationOutput:
            version = self.version()
            output = await self.client.generate(
                {
                    "prompt_token_ids": [list(ids)],
                    "sampling_params": merged_sampling(params, sampling, "max_tokens"),
                    "session_ids": [session],
                }
            )
            logprobs = output.get("response_logprobs")
            return completion_of(
                ids,
                output["response_ids"][0],
                None if logprobs is None else logprobs[0],
                stop_reason=output["stop_reasons"][0],
                versions=(version, version),
                missing="set logprobs in generator.sampling_params",
            )

        ids = prompt_ids_of(self.agent, self.tokenizer, messages)
        prompt = Prompt(str(name.instance_id), ids)
        return await run_episode(
            self.agent, self.environment, prompt, generate, row=extra, sampling=params
        )
