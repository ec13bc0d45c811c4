"""One episode on the engine of a trainer, and its sequences."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

from trajpack.agent.engines.function_engine import Completion, FunctionEngine
from trajpack.agent.protocols import GenerationOutput, Prompt
from trajpack.agent.runner.runner import RolloutRunner
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.buffer import pack
from trajpack.packing.rows.layout import pieces_of
from trajpack.packing.types import Trajectory


async def run_episode(
    agent: Any,
    environment: Any,
    prompt: Prompt,
    generate: Callable[[Sequence[int], Any], Awaitable[Completion]],
    *,
    row: Any = None,
    sampling: Any = None,
) -> list[Trajectory]:
    """Run one episode of an agent and return its trajectories, checked.

    Args:
        agent: An `trajpack.agent.Agent`; one serves any number of episodes at once.
        environment: An environment, or a function that makes one of the trainer's ``row``.
        prompt: Opening of the episode.
        generate: Coroutine function of the conversation's token ids and the sampling parameters,
            which asks the trainer's engine; it returns what that of a `FunctionEngine` does.
        row: The trainer's data of the episode.
        sampling: Sampling parameters of requests that name none.

    Raises:
        EpisodeError: If the episode failed.
    """
    if not hasattr(environment, "step") and callable(environment):
        environment = environment(row)
    async with FunctionEngine(generate) as engine:
        runner = RolloutRunner(engine, agent, environment, sampling=sampling)
        async with aclosing(runner.run([prompt])) as results:
            async for result in results:
                if result.error is not None:
                    raise result.error
                return list(result.trajectories)
    raise AssertionError("a runner yields a result for each prompt")


def prompt_ids_of(agent: Any, tokenizer: Any, messages: Any) -> list[int]:
    """Encode messages as the agent does, or else by the tokenizer's chat template; ids stay."""
    if not len(messages) or isinstance(messages[0], int):
        return list(messages)
    messages = [dict(message) for message in messages]
    if hasattr(agent, "prompt_ids"):
        return list(agent.prompt_ids(messages))
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return list(ids)


def merged_sampling(params: Mapping[str, Any], sampling: Any, length: str) -> dict[str, Any]:
    """Return the trainer's sampling parameters, with length and ends of the agent's request.

    Temperature and nucleus stay the trainer's: its loss is that of its own policy.

    Args:
        params: Parameters of the trainer.
        sampling: Parameters of the request: an object with ``max_new_tokens``, or ``params``.
        length: The trainer's name of the most tokens of a completion.
    """
    merged = dict(params)
    if (most := getattr(sampling, "max_new_tokens", None)) is not None:
        merged[length] = min(most, merged.get(length) or most)
    for name in ("stop", "stop_token_ids"):
        if ends := getattr(sampling, name, None):
            own = list(merged.get(name) or ())
            merged[name] = own + [end for end in ends if end not in own]
    return merged


def completion_of(
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    logprobs: Sequence[float] | None,
    *,
    stop_reason: str | None,
    versions: tuple[int, int] = (0, 0),
    missing: str,
) -> GenerationOutput:
    """Return a trainer's completion; without log-probabilities a `ValueError` ends by ``missing``.

    ``stop_reason`` is one of ``"stop"``, ``"length"``, ``"abort"``, ``"tool"``, or not known.
    """
    if logprobs is None or len(logprobs) != len(output_ids):
        count = "none" if logprobs is None else len(logprobs)
        raise ValueError(f"{len(output_ids)} tokens have {count} log-probabilities: {missing}")
    cut_off = stop_reason in ("length", "abort")
    return GenerationOutput(
        "", prompt_ids, output_ids, logprobs, cut_off, *versions, stop_reason=stop_reason
    )


class TrainedSequence(NamedTuple):
    """One sequence of an episode, split before its first sampled token.

    Attributes:
        prompt_ids: Token ids before the first that was sampled.
        response_ids: Token ids from there to the last that was sampled.
        response_mask: 1 where a token was sampled, for each of ``response_ids``.
        logprobs: Log-probabilities, 0 where it was not sampled.
        versions: Least and greatest policy version of its sampled tokens.
        num_turns: Turns in it.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    logprobs: list[float]
    versions: tuple[int, int]
    num_turns: int


def sequences_of(trajectories: Sequence[Trajectory]) -> list[TrainedSequence]:
    """Return the sequences of an episode in which a token was sampled; extra fields are dropped.

    Each is a conversation whose turns continue each other. Ids, masks and log-probabilities are
    those of `trajpack.pack`.

    Example:
        >>> from trajpack import Turn
        >>> first, second = Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 4], [5], [-0.25])
        >>> [sequence] = sequences_of([Trajectory("a", [first, second])])
        >>> sequence.prompt_ids, sequence.response_ids, sequence.response_mask
        ([1, 2], [3, 4, 5], [1, 0, 1])
    """
    if not trajectories:
        return []
    batch = packed(trajectories)
    columns = {
        "ids": batch.input_ids,
        "mask": batch.loss_mask.int(),
        "logprobs": batch.rollout_logprobs,
        "versions": batch.policy_versions,
        "turns": batch.turn_ids,
    }
    sequences = []
    for piece in pieces_of(batch, columns):
        ids, mask, logprobs, versions, turns = (values.tolist() for values in piece.values())
        if 1 not in mask:
            continue
        begin, end = mask.index(1), len(mask) - mask[::-1].index(1)
        response = slice(begin, end)
        known = [version for version in versions if version >= 0]
        sequences.append(
            TrainedSequence(
                ids[:begin],
                ids[response],
                mask[response],
                logprobs[response],
                (min(known), max(known)),
                len({turn for turn in turns if turn >= 0}),
            )
        )
    return sequences


def packed(trajectories: Sequence[Trajectory]) -> PackedBatch:
    """Pack trajectories on the host without their extra fields."""
    plain = [
        replace(one, turns=[replace(turn, fields=None) for turn in one.turns])
        for one in trajectories
    ]
    return pack(plain, device="cpu")


def packed_episode(trajectories: Sequence[Trajectory]) -> PackedBatch:
    """Pack the turns of an episode as one trajectory; without trajectories an empty batch."""
    return packed([joined(trajectories)] if trajectories else [])


def joined(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Return the turns of an episode as one trajectory, for trainers that count trajectories."""
    if not trajectories:
        raise ValueError("the agent returned no trajectory of an episode, expected one or more")
    turns = [turn for one in trajectories for turn in one.turns]
    return replace(trajectories[0], turns=turns, truncated=is_truncated(trajectories))


def reward_of(trajectories: Sequence[Trajectory]) -> float:
    """Return the undiscounted sum of the rewards of an episode's turns."""
    return float(sum(turn.reward for one in trajectories for turn in one.turns))


def is_truncated(trajectories: Sequence[Trajectory]) -> bool:
    """Return whether a limit ended the episode, not the environment."""
    return any(one.is_truncated for one in trajectories)
