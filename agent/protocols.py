"""Protocols of agents, environments and engines, and the values they exchange.

The runner stands between agent and engine: it names the episode in a request, checks the reply and
makes it a turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple, Protocol

from trajpack.packing.conversion import as_ids, as_integer, several, shown
from trajpack.packing.representation import brief_repr
from trajpack.packing.types import FloatArray, IntArray, Trajectory, Turn, VersionSpan


@dataclass(frozen=True)
class Prompt:
    """Opening of an episode.

    Attributes:
        id: Name of the prompt, such as ``apple``; a runner's agent sees that of the episode,
            ``apple@0``.
        input_ids: Token ids of the conversation so far, generation prompt included.
        task_id: Kind of task, as the data set numbers it.
        seed: Seed of the episode. A runner derives it from this one, or its own if None, and the
            episode's name; it is the same for every attempt.
        task: Name of the task, ``apple`` in every episode; by default the ``id``.
    """

    id: str
    input_ids: Sequence[int]
    task_id: int | None = None
    seed: int | None = None
    task: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", self.task or self.id)

    __repr__ = brief_repr


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one completion.

    Attributes:
        max_new_tokens: Tokens of one completion at most, stop token included.
        temperature: Divisor of the logits; 0 takes the likeliest token each time.
        top_p: Sample from the smallest set of tokens that holds this much probability.
        top_k: Sample from this many likeliest tokens; 0 takes all.
        stop: Texts that end the completion, kept to the end of the token that completes one.
        stop_token_ids: Tokens that end the completion, beside the model's own.

    Raises:
        TypeError: If a value is of the wrong kind.
        ValueError: If a value is out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "top_k"):
            as_integer(name, getattr(self, name))
        for name in ("temperature", "top_p"):
            if not isinstance(number := getattr(self, name), Real):
                raise TypeError(f"{name} must be a number, got {type(number).__name__}")
        for name, holds, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", self.temperature >= 0, "0 or more"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "0 or more"),
        ):
            if not holds:
                raise ValueError(f"{name} must be {expected}, got {getattr(self, name)}")
        stop = several("stop must be a tuple of strings", self.stop)
        if isinstance(self.stop, str) or not all(isinstance(text, str) for text in stop):
            raise TypeError(f"stop must be a tuple of strings, got {shown(self.stop)}")
        if not all(stop):
            raise ValueError("stop must hold texts, got an empty one")
        tokens = as_ids("stop_token_ids", self.stop_token_ids).tolist()
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(tokens))


@dataclass(frozen=True, eq=False)
class GenerationOutput:
    """One completion, as the engine returned it.

    Attributes:
        qid: Name of the episode.
        prompt_ids, output_ids: Token ids the engine saw and sampled, stop token included.
        output_logprobs: Log-probability of each sampled token (natural log).
        no_eos: True when generation was cut off: by neither a stop token nor a stop text.
        version_start, version_end: Policy versions of the first and the last sampled token.
        version_spans: ``(version, start, end)`` spans over the sampled tokens, if known.
        fields: Rows of extra fields, as `Turn.fields`: declare a `TokenField` of each at the
            buffer. Servers may give ``routed_experts`` and ``sampling_mask``, the tokens that each
            was sampled from.
        stop_reason: ``"stop"``, ``"length"``, ``"abort"``, ``"tool"``, or ``None`` if not known.
    """

    qid: str
    prompt_ids: IntArray
    output_ids: IntArray
    output_logprobs: FloatArray
    no_eos: bool
    version_start: int
    version_end: int
    version_spans: Sequence[VersionSpan | tuple[int, int, int]] | None = None
    fields: Mapping[str, Any] | None = None
    stop_reason: str | None = None

    __repr__ = brief_repr


class GenerationRequest(NamedTuple):
    """Request of the episode ``qid`` for a completion of the whole conversation so far.

    ``sampling`` is a `SamplingParams`, or any object with ``max_new_tokens``.
    """

    qid: str
    token_ids: Sequence[int]
    sampling: Any


class Action(NamedTuple):
    """Texts of the episode ``qid`` that an environment judges; it equals the plain tuple."""

    qid: str
    answers: Sequence[str]

    @property
    def task(self) -> str:
        """Name of the task: ``apple`` of the episode ``apple@2``."""
        name, _, sample = self.qid.rpartition("@")
        return name if name and sample.isdecimal() else self.qid


class Generate(Protocol):
    """Coroutine that asks the engine for a completion; calls may run at the same time."""

    async def __call__(self, token_ids: Sequence[int], sampling: Any = None) -> Turn:
        """Return the completion of all ``token_ids`` so far as a turn with reward 0, checked.

        ``sampling`` is any object that the engine takes; None takes the runner's.

        Raises:
            EpisodeError: If these are no token ids, or the reply is late or does not answer; a
                `GenerationError` if the engine could not generate.
        """


class Environment(Protocol):
    """Answers actions with rewards, of many episodes at once."""

    async def reset(self) -> Any:
        """Start an episode."""

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take ``action`` and return ``(observation, reward, terminated, truncated, info)``."""


class Agent(Protocol):
    """Runs episodes, any number of them at once; a coroutine function like `run` is one, too."""

    async def run(self, prompt: Prompt, env: Environment, generate: Generate) -> list[Trajectory]:
        """Run the episode ``prompt.id``, end all tasks of it, and return its trajectories.

        Raises:
            EpisodeError: With the prompt's id, if the episode cannot be finished.
        """


class Engine(Protocol):
    """Turns token ids into sampled completions, for many episodes at once.

    A run begins with ``check_serving()``, if the engine has it, which raises if it is not entered.
    """

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Return one completion; a cancelled call ends its generation.

        Raises:
            GenerationError: With the request's ``qid``, if there is no completion, of the kind that
                is known; an `EngineEndedError` once the engine has died or was left.
        """

    async def __aenter__(self) -> Engine: ...

    async def __aexit__(self, *exc_info: object) -> None: ...
