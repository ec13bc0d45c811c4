"""AReaL 1.0.4: a rollout workflow."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any
from uuid import uuid4

import torch

from trajpack.agent.doors.episode import (
    completion_of,
    merged_sampling,
    packed,
    prompt_ids_of,
    run_episode,
)
from trajpack.agent.protocols import GenerationOutput, Prompt
from trajpack.packing.adapters.areal import to_padded_dict
from trajpack.packing.optional import require


def rollout_workflow(
    agent: Any, environment: Any, gconfig: Any, tokenizer: Any, *, messages: str = "messages"
) -> Any:
    """Return a ``RolloutWorkflow`` that runs an episode of an agent for each data row.

    Pass it to ``rollout.submit``, ``rollout_batch`` or ``prepare_batch``. An episode is a padded
    dictionary with a row for each of its sequences, see ``docs/formats/areal.md``; the reward of
    a row is the return of its sequence.

    Args:
        agent: Agent of the episodes. Its ``prompt_ids(messages)`` encodes the prompt; without it
            ``tokenizer`` does.
        environment: Environment of all episodes, or a function that makes one of a data row.
        gconfig: AReaL's ``GenerationHyperparameters``; the agent's request may ask for less
            tokens and for further stops.
        tokenizer: The tokenizer, which AReaL's request carries.
        messages: Key of the messages in a data row, or of their token ids.
    """
    require("areal")
    from areal.api.io_struct import ModelRequest
    from areal.api.workflow_api import RolloutWorkflow

    class Workflow(RolloutWorkflow):  # type: ignore[misc]
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, torch.Tensor]:
            """Run one episode."""
            name = uuid4().hex

            async def generate(ids: Any, sampling: Any) -> GenerationOutput:
                params = merged_sampling(vars(gconfig), sampling, "max_new_tokens")
                own = gconfig.new(**params | {"n_samples": 1})
                request = ModelRequest(
                    rid=name, input_ids=list(ids), gconfig=own, tokenizer=tokenizer
                )
                response = await engine.agenerate(request)
                versions = response.output_versions
                output = completion_of(
                    ids,
                    response.output_tokens,
                    response.output_logprobs,
                    stop_reason={"tool_calls": "tool"}.get(
                        response.stop_reason, response.stop_reason
                    ),
                    versions=(versions[0], versions[-1]) if versions else (0, 0),
                    missing="AReaL's engine returns one for each token",
                )
                return replace(output, version_spans=_spans(versions))

            ids = prompt_ids_of(agent, tokenizer, data[messages])
            trajectories = await run_episode(
                agent, environment, Prompt(name, ids), generate, row=data, sampling=gconfig
            )
            return to_padded_dict(packed(trajectories))

    return Workflow()


def _spans(versions: list[int]) -> list[tuple[int, int, int]] | None:
    """Return the runs of equal versions; ``None`` for tokens of one version."""
    spans, start = [], 0
    for version, run in groupby(versions):
        end = start + sum(1 for _ in run)
        spans.append((version, start, end))
        start = end
    return spans if len(spans) > 1 else None
