"""torchtitan 0.3: a rollouter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trajpack.agent.doors.episode import completion_of, is_truncated, merged_sampling, run_episode
from trajpack.agent.protocols import GenerationOutput, Prompt
from trajpack.packing.optional import require
from trajpack.packing.types import Trajectory


def rollouter_class(agent: Any, environment: Any) -> type:
    """Return a ``Rollouter`` whose rollouts are episodes of an agent.

    Write ``MyRollouter = rollouter_class(agent, environment)`` in a module of yours and configure
    ``Controller.Config(rollouter=MyRollouter.Config(...))``. The prompt is what torchtitan's
    message environment renders first; feedback and rewards are those of ``environment``. A turn
    of an episode is a ``RolloutTurn``; torchtitan splits rewritten histories into samples itself.

    Args:
        agent: Agent of the episodes.
        environment: Environment of all episodes, or a function that makes one of torchtitan's
            ``TokenEnv``.
    """
    require("torchtitan")
    from torchtitan.experiments.rl.rollout.rollouter import Rollouter
    from torchtitan.experiments.rl.rollout.types import Rollout, RolloutStatus, RolloutTurn
    from torchtitan.experiments.rl.rubrics.rubric import RubricOutput
    from torchtitan.experiments.rl.types import RolloutTurnID

    class AgentRollouter(Rollouter):  # type: ignore[misc]
        async def _run_single_rollout(
            self, *, generate_fn: Any, env: Any, sampling: Any, group_id: int, rollout_id: int
        ) -> Rollout:
            calls = 0

            async def generate(ids: Any, request: Any) -> GenerationOutput:
                nonlocal calls
                name = RolloutTurnID(group_id=group_id, rollout_id=rollout_id, turn_id=calls)
                calls += 1
                params = merged_sampling(vars(sampling), request, "max_tokens")
                completion = await generate_fn(
                    prompt_token_ids=list(ids),
                    request_id=name.to_string(),
                    routing_session_id=name.to_string(include_turn=False),
                    sampling_config=type(sampling)(**params),
                )
                return completion_of(
                    ids,
                    completion.token_ids,
                    completion.token_logprobs,
                    stop_reason=completion.finish_reason,
                    versions=(completion.min_policy_version, completion.max_policy_version),
                    missing="torchtitan's generator returns one for each token",
                )

            opening = await env.init()
            prompt = Prompt(f"{group_id}@{rollout_id}", opening.next_prompt_token_ids)
            trajectories = await run_episode(
                agent, environment, prompt, generate, row=env, sampling=sampling
            )
            name = {"group_id": group_id, "rollout_id": rollout_id}
            cut_off = is_truncated(trajectories)
            return Rollout(
                **name,
                status=RolloutStatus.TRUNCATED_LENGTH if cut_off else RolloutStatus.COMPLETED,
                turns=[
                    RolloutTurn(rollout_id=RolloutTurnID(**name, turn_id=number), **fields)
                    for number, fields in enumerate(_turns(trajectories))
                ],
            )

        async def score_group(self, rollouts: Sequence[Rollout], env_input: Any) -> list[Any]:
            """Return the sum of the environment's rewards of each rollout."""
            sums = [
                sum(turn.env_rewards.get("environment", 0.0) for turn in rollout.turns)
                for rollout in rollouts
            ]
            return [RubricOutput(reward=total) for total in sums]

    return AgentRollouter


def _turns(trajectories: list[Trajectory]) -> list[dict[str, Any]]:
    """Return the fields of torchtitan's turn for each turn in which a token was sampled.

    torchtitan refuses others; their rewards go to the last turn.
    """
    turns = [turn for one in trajectories for turn in one.turns]
    sampled = [turn for turn in turns if len(turn.completion_ids)]
    if sampled:
        silent = sum(turn.reward for turn in turns if not len(turn.completion_ids))
        sampled[-1] = replace(sampled[-1], reward=sampled[-1].reward + silent)
    return [
        {
            "prompt_token_ids": [int(id) for id in turn.prompt_ids],
            "completion_token_ids": [int(id) for id in turn.completion_ids],
            "completion_logprobs": [float(logprob) for logprob in turn.completion_logprobs],
            "min_policy_version": turn.version_start,
            "max_policy_version": turn.version_end,
            "env_rewards": {"environment": float(turn.reward)},
        }
        for turn in sampled
    ]
