"""verl 0.9.1: an agent loop."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from trajpack.agent.doors.episode import (
    completion_of,
    merged_sampling,
    packed_episode,
    prompt_ids_of,
    run_episode,
)
from trajpack.agent.protocols import GenerationOutput, Prompt
from trajpack.packing.adapters.verl import to_agent_loop_outputs
from trajpack.packing.optional import require


def agent_loop(name: str, agent: Any, environment: Any) -> type:
    """Return an agent loop of verl that runs episodes of an agent, registered by a name.

    Write ``Loop = agent_loop("math", agent, environment)`` in a module of yours, name it in
    ``rollout.agent.agent_loop_config_path`` as ``{name: math, _target_: your_module.Loop}``, and
    set ``rollout.agent.default_agent_loop`` or the column ``agent_name`` of the data to the name.
    Set ``rollout.calculate_log_probs``.

    An episode has an ``AgentLoopOutput`` for each sequence in which a token was sampled. Each has
    the reward of the episode, and verl counts the episode once.

    Args:
        name: Name in verl's registry.
        agent: Agent of the episodes. Its ``prompt_ids(messages)`` encodes ``raw_prompt``; without
            it the loop's tokenizer does.
        environment: Environment of all episodes, or a function that makes one of a data row.
    """
    require("verl")
    from verl.experimental.agent_loop.agent_loop import (
        AgentLoopBase,
        AgentLoopMetrics,
        AgentLoopOutput,
        register,
    )

    @register(name)
    class Loop(AgentLoopBase):  # type: ignore[misc]
        async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
            """Run one episode; the data row is in the keywords."""
            request_id, step = uuid4().hex, row.get("global_steps") or 0

            async def generate(ids: Any, sampling: Any) -> GenerationOutput:
                params = merged_sampling(sampling_params, sampling, "max_tokens")
                output = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=list(ids), sampling_params=params
                )
                reason = (
                    "stop" if output.token_ids[-1:] == [self.tokenizer.eos_token_id] else "length"
                )
                extra = output.extra_fields
                first, last = extra.get("min_global_steps"), extra.get("max_global_steps")
                return completion_of(
                    ids,
                    output.token_ids,
                    output.log_probs,
                    stop_reason="abort" if output.stop_reason == "aborted" else reason,
                    versions=(step if first is None else first, step if last is None else last),
                    missing="set rollout.calculate_log_probs=True",
                )

            ids = prompt_ids_of(agent, self.tokenizer, row["raw_prompt"])
            task = f"{row.get('uid', request_id)}"
            trajectories = await run_episode(
                agent, environment, Prompt(task, ids), generate, row=row, sampling=sampling_params
            )
            return [
                AgentLoopOutput(metrics=AgentLoopMetrics(), **fields)
                for outputs in to_agent_loop_outputs(packed_episode(trajectories))
                for fields in outputs
                if any(fields["response_mask"])
            ]

    return Loop
