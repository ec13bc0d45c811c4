"""One completion in the making: it may take several requests, with weights that change."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from trajpack.agent.protocols import GenerationOutput, SamplingParams
from trajpack.agent.servers.engine_response import EngineResponse
from trajpack.packing.conversion import INT32_MAX
from trajpack.packing.types import VersionSpan

FINISH_REASONS = ("stop", "length", "abort")
_MAX_LOGPROB = 0.01
"""A log-probability is 0 at most; more than rounding above it is something else."""


@dataclass(frozen=True)
class Ask:
    """What an agent asked for."""

    qid: str
    """The episode."""
    number: int
    """Which of its requests this is, from 0."""
    prompt: list[int]
    """Token ids."""
    params: SamplingParams
    """How to sample."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion, beside the model's own."""


@dataclass
class Completion:
    """What has been sampled so far."""

    ask: Ask
    """What for."""
    token_ids: list[int] = field(default_factory=list)
    """The prompt, and what was sampled."""
    spans: list[VersionSpan] = field(default_factory=list)
    """Which version sampled which of the tokens."""
    finish_reason: str = "abort"
    """Why the last request ended; ``"abort"`` where more is to come."""
    server: str | None = None
    """Host and port of the server that was asked last."""
    _ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    _logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.ask.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids) - len(self.ask.prompt)

    @property
    def remaining(self) -> SamplingParams:
        """How to sample what is missing."""
        left = self.ask.params.max_new_tokens - self.num_tokens
        return dataclasses.replace(self.ask.params, max_new_tokens=left)

    @property
    def is_complete(self) -> bool:
        """Whether no request is needed any more."""
        is_full = self.num_tokens == self.ask.params.max_new_tokens
        return self.finish_reason != "abort" or is_full

    def add(self, response: EngineResponse, declared: int) -> None:
        """Append what one request has brought.

        Args:
            response: Of the server.
            declared: Version that the engine declared when the request was sent; it stands in
                for what the server does not number.

        Raises:
            ValueError: If the response contradicts the request or what came before. Nothing is
                appended.
        """
        reason, num_new = response.finish_reason, len(response.output_ids)
        if reason not in FINISH_REASONS:
            raise ValueError(
                f"expected one of {FINISH_REASONS} as finish reason, got {reason!a:.80}"
            )
        if num_new == 0 and reason != "abort":
            raise ValueError(f"no token was sampled, but the finish reason is {reason!r}")
        if num_new and response.output_logprobs.max() > _MAX_LOGPROB:
            raise ValueError(f"a log-probability is {response.output_logprobs.max()}, above 0")
        seen = response.prompt_ids
        if seen is not None and not np.array_equal(seen, self.token_ids):
            raise ValueError("the server saw another prompt than was sent")
        spans = read_spans(response.weight_versions, num_new, declared)
        last = self.spans[-1].version if self.spans else 0
        if spans and spans[0].version < last:
            raise BackwardsError(f"version {spans[0].version} after version {last}")
        for version, start, end in spans:
            self._add_span(version, self.num_tokens + start, self.num_tokens + end)
        self.token_ids.extend(response.output_ids.tolist())
        self._ids.append(response.output_ids)
        self._logprobs.append(response.output_logprobs)
        self.finish_reason = reason

    def _add_span(self, version: int, start: int, end: int) -> None:
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(VersionSpan(version, start, end))

    def to_output(self) -> GenerationOutput:
        """Return the reply."""
        return GenerationOutput(
            qid=self.ask.qid,
            prompt_ids=self.ask.prompt,
            output_ids=_joined(self._ids),
            output_logprobs=_joined(self._logprobs),
            no_eos=self.finish_reason != "stop",
            version_start=self.spans[0].version,
            version_end=self.spans[-1].version,
            version_spans=tuple(self.spans) if len(self.spans) > 1 else None,
        )


class BackwardsError(ValueError):
    """A server's weights are older than those that sampled what came before."""


def read_spans(
    named: tuple[tuple[str, int, int], ...] | None, num_tokens: int, declared: int
) -> list[VersionSpan]:
    """Return which version sampled which tokens, spans without tokens left out.

    Servers name versions by strings. Decimal numbers are versions; any other name, and no name
    at all, is the version that the engine declared.

    Raises:
        ValueError: If the spans do not cover the tokens in order, or versions run backwards.

    Example:
        >>> read_spans((("default", 0, 2), ("8", 2, 5)), 5, declared=7)
        [VersionSpan(version=7, start=0, end=2), VersionSpan(version=8, start=2, end=5)]
    """
    if named is None:
        named = (("", 0, num_tokens),)
    spans: list[VersionSpan] = []
    covered = 0
    for name, start, end in named:
        if start != covered or end < start:
            raise ValueError(f"weight_versions: [{start}, {end}) follows token {covered}")
        covered = end
        if start == end:
            continue
        version = version_number(name, declared)
        if spans and version < spans[-1].version:
            raise ValueError(f"weight_versions: {version} follows {spans[-1].version}")
        spans.append(VersionSpan(version, start, end))
    if covered != num_tokens:
        raise ValueError(f"weight_versions cover {covered} of {num_tokens} tokens")
    return spans


def version_number(name: str, declared: int) -> int:
    """Return the version that a name means.

    Raises:
        ValueError: If it is a number beyond int32.

    Example:
        >>> version_number("12", declared=7), version_number("default", declared=7)
        (12, 7)
    """
    if not is_number(name):
        return declared
    if len(name) > 10 or int(name) > INT32_MAX:
        raise ValueError(f"weight_versions: {name[:40]} is beyond int32")
    return int(name)


def is_number(name: str) -> bool:
    """Return whether a version's name is a number."""
    return name.isascii() and name.isdecimal()


def _joined(parts: list[Any]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
