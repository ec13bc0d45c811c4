"""OpenRLHF 0.11: an agent executor."""

from __future__ import annotations

from copy import deepcopy
from itertools import groupby
from typing import Any
from uuid import uuid4

from trajpack.agent.doors.episode import (
    completion_of,
    is_truncated,
    prompt_ids_of,
    reward_of,
    run_episode,
    sequences_of,
)
from trajpack.agent.protocols import GenerationOutput, Prompt


class AgentExecutor:
    """OpenRLHF's executor of ``--agent_func_path``: subclass it without arguments.

    OpenRLHF takes one sequence for an episode. An agent that rewrites its history is refused.

    Args:
        agent: Agent of the episodes. The prompt is OpenRLHF's text, encoded by its tokenizer.
        environment: Environment of all episodes, or a function that makes one of the ``label``.

    Example:
        In the file that ``--agent_func_path`` names::

            class AgentExecutor(trajpack.agent.doors.openrlhf.AgentExecutor, AgentExecutorBase):
                def __init__(self):
                    super().__init__(agent, environment)
    """

    def __init__(self, agent: Any, environment: Any) -> None:
        self.agent, self.environment = agent, environment

    async def execute(
        self,
        prompt: Any,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """Run one episode and return OpenRLHF's dictionary.

        Raises:
            ValueError: If there are images, or the episode has not one sequence.
            EpisodeError: If the episode failed.
        """
        if images:
            raise ValueError("trajpack's agents take no images, got some")

        async def generate(ids: Any, sampling: Any) -> GenerationOutput:
            params = deepcopy(sampling_params)
            most = getattr(sampling, "max_new_tokens", max_length)
            params.max_tokens = min(most, max_length - len(ids))
            if params.max_tokens < 1:
                raise ValueError(f"no room for a token in max_length={max_length} after {len(ids)}")
            answer = (await llm_engine.generate(list(ids), params)).outputs[0]
            tokens, rows = list(answer.token_ids), answer.logprobs
            return completion_of(
                ids,
                tokens,
                rows and [row[token].logprob for row, token in zip(rows, tokens, strict=True)],
                stop_reason=answer.finish_reason,
                missing="set sampling_params.logprobs",
            )

        if isinstance(prompt, str):
            ids = hf_tokenizer(text=prompt, add_special_tokens=False)["input_ids"]
        else:
            ids = prompt_ids_of(self.agent, hf_tokenizer, prompt)
        options = {"row": label, "sampling": sampling_params}
        trajectories = await run_episode(
            self.agent, self.environment, Prompt(uuid4().hex, ids), generate, **options
        )
        sequences, reward = sequences_of(trajectories), reward_of(trajectories)
        if len(sequences) != 1:
            raise ValueError(f"OpenRLHF takes one sequence for an episode, got {len(sequences)}")
        prompt_ids, response_ids, mask, logprobs = sequences[0][:4]
        ranges, position = [], len(prompt_ids)
        for is_sampled, run in groupby(mask):
            begin, position = position, position + len(list(run))
            if is_sampled:
                ranges.append((begin, position))
        return {
            "prompt": prompt,
            "label": label,
            "images": None,
            "mm_train_inputs": None,
            "reward": reward,
            "scores": reward,
            "observation_tokens": prompt_ids + response_ids,
            "action_ranges": ranges,
            "rollout_log_probs": [0.0] * len(prompt_ids) + logprobs,
            "truncated": is_truncated(trajectories),
            "extra_logs": {},
        }
