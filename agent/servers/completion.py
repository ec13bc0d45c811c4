"""One completion that may take several requests, while weights change."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from trajpack.agent.protocols import GenerationOutput, SamplingParams
from trajpack.agent.servers.engine_response import EngineResponse
from trajpack.agent.servers.options import LogprobSemantics
from trajpack.packing.conversion import INT32_MAX
from trajpack.packing.types import VersionSpan

FINISH_REASONS = ("stop", "length", "abort")
_MAX_LOGPROB = 0.01
"""Upper bound of a log-probability: 0, and some rounding."""


@dataclass
class Completion:
    """State of one completion: its request, and what was sampled so far."""

    qid: str
    """Name of the episode."""
    number: int
    """Index of the request within its episode."""
    prompt: list[int]
    """Token ids of the prompt."""
    params: SamplingParams
    """Sampling parameters of the whole completion."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the completion, beside the model's own."""
    token_ids: list[int] = field(default_factory=list)
    """Token ids of the prompt and of the sampled tokens."""
    spans: list[VersionSpan] = field(default_factory=list)
    """Policy versions of the sampled tokens."""
    finish_reason: str = "abort"
    """Finish reason of the last request; ``"abort"`` asks for another request."""
    server: str | None = None
    """Host and port of the server that was asked last."""
    _ids: list[npt.NDArray[np.int32]] = field(default_factory=list)
    _logprobs: list[npt.NDArray[np.float32]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Number of tokens sampled so far."""
        return len(self.token_ids) - len(self.prompt)

    @property
    def remaining(self) -> SamplingParams:
        """Sampling parameters of the missing tokens."""
        left = self.params.max_new_tokens - self.num_tokens
        return dataclasses.replace(self.params, max_new_tokens=left)

    @property
    def is_complete(self) -> bool:
        """Whether no further request is needed."""
        return self.finish_reason != "abort" or self.num_tokens == self.params.max_new_tokens

    def append(self, response: EngineResponse, declared: int) -> None:
        """Append the sample of one request.

        Args:
            response: Response of the server.
            declared: Version that the engine had declared when the request was sent; used for
                tokens whose version has no number.

        Raises:
            BackwardsError: If the weights are older than those of the first tokens.
            ValueError: If the response contradicts the request or earlier responses. Nothing is
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
            first, stop = self.num_tokens + start, self.num_tokens + end
            if self.spans and self.spans[-1].version == version:
                first = self.spans.pop().start
            self.spans.append(VersionSpan(version, first, stop))
        self.token_ids.extend(response.output_ids.tolist())
        self._ids.append(response.output_ids)
        self._logprobs.append(response.output_logprobs)
        self.finish_reason = reason

    def to_output(self) -> GenerationOutput:
        """Return the reply."""
        is_one = len(self._ids) == 1  # whose arrays need no copy
        return GenerationOutput(
            qid=self.qid,
            prompt_ids=self.prompt,
            output_ids=self._ids[0] if is_one else np.concatenate(self._ids),
            output_logprobs=self._logprobs[0] if is_one else np.concatenate(self._logprobs),
            no_eos=self.finish_reason != "stop",
            version_start=self.spans[0].version,
            version_end=self.spans[-1].version,
            version_spans=tuple(self.spans) if len(self.spans) > 1 else None,
        )


class BackwardsError(ValueError):
    """A server's weights are older than those of the completion's first tokens."""


def read_spans(
    named: tuple[tuple[str, int, int], ...] | None, num_tokens: int, declared: int
) -> list[VersionSpan]:
    """Return the policy versions of sampled tokens, without empty spans.

    Servers name versions by strings. A decimal number is a policy version; any other name, and no
    name at all, is the version that the engine had declared.

    Raises:
        ValueError: If the spans do not cover the tokens in order, a version is beyond int32, or
            versions run backwards.

    Example:
        >>> read_spans((("default", 0, 2), ("8", 2, 5)), 5, declared=7)
        [VersionSpan(version=7, start=0, end=2), VersionSpan(version=8, start=2, end=5)]
    """
    spans: list[VersionSpan] = []
    covered = 0
    for name, start, end in (("", 0, num_tokens),) if named is None else named:
        if start != covered or end < start:
            raise ValueError(f"weight_versions: [{start}, {end}) follows token {covered}")
        covered = end
        if start == end:
            continue
        version = declared
        if is_number(name):
            if len(name) > 10 or int(name) > INT32_MAX:
                raise ValueError(f"weight_versions: {name[:40]} is beyond int32")
            version = int(name)
        if spans and version < spans[-1].version:
            raise ValueError(f"weight_versions: {version} follows {spans[-1].version}")
        spans.append(VersionSpan(version, start, end))
    if covered != num_tokens:
        raise ValueError(f"weight_versions cover {covered} of {num_tokens} tokens")
    return spans


def is_number(name: str) -> bool:
    """Return whether the name of a version is a decimal number."""
    return name.isascii() and name.isdecimal()


def logprob_mismatch(
    params: SamplingParams, logprobs: LogprobSemantics, *, filters_are_processed: bool
) -> str | None:
    """Return why log-probabilities would not be those of the distribution sampled from, or None.

    Args:
        params: Sampling parameters of the request.
        logprobs: Semantics of the server's log-probabilities.
        filters_are_processed: Whether processed ones include top-k and top-p.

    Example:
        >>> logprob_mismatch(SamplingParams(), "raw", filters_are_processed=True)
        >>> logprob_mismatch(SamplingParams(temperature=0.5), "raw", filters_are_processed=True)
        "temperature 0.5: the server's log-probabilities are those of temperature 1"
    """
    if logprobs == "raw" and params.temperature != 1:
        given = f"temperature {params.temperature:g}"
        return f"{given}: the server's log-probabilities are those of temperature 1"
    has_filter = params.temperature and (params.top_p < 1 or params.top_k > 0)
    if has_filter and not (logprobs == "processed" and filters_are_processed):
        given = f"top_p {params.top_p:g} and top_k {params.top_k}"
        return f"{given}: the server's log-probabilities are those without these filters"
    return None
