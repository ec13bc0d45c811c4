"""An agent that rewrites its history, the engine it asks, and what must come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trajpack import Trajectory, Turn
from trajpack.agent.doors.episode import sequences_of

PROMPT = [11, 12, 13]
EOS = 2
REWARDS = (0.25, 0.25, 0.5)


def sampled(ids: Sequence[int]) -> tuple[list[int], list[float]]:
    """What the engine of every door samples after these tokens."""
    tokens = [20 + len(ids), 30 + sum(ids) % 7, EOS]
    return tokens, [-0.5, -0.25, -0.125]


async def forgetful(prompt: Any, env: Any, generate: Any) -> list[Trajectory]:
    """Answer, answer again after feedback, then go on from a summary alone."""
    first = await generate(prompt.input_ids)
    second = await generate([*prompt.input_ids, *first.completion_ids, 41])
    third = await generate([51, *second.completion_ids])
    turns = [
        replace(turn, reward=reward)
        for turn, reward in zip((first, second, third), REWARDS, strict=True)
    ]
    return [Trajectory(prompt.id, turns)]


async def plain(prompt: Any, env: Any, generate: Any) -> list[Trajectory]:
    """Answer twice."""
    first = await generate(prompt.input_ids)
    second = await generate([*prompt.input_ids, *first.completion_ids, 41])
    return [Trajectory(prompt.id, [first, replace(second, reward=1.0)])]


def expected_turns(version: int = 0) -> list[Turn]:
    """Turns of `forgetful`."""
    prompts = [PROMPT]
    prompts.append([*PROMPT, *sampled(PROMPT)[0], 41])
    prompts.append([51, *sampled(prompts[1])[0]])
    return [
        Turn(ids, *sampled(ids), reward=reward, version_start=version, version_end=version)
        for ids, reward in zip(prompts, REWARDS, strict=True)
    ]


EXPECTED = sequences_of([Trajectory("a", expected_turns())])
"""Two sequences: the first two turns, and the third."""
