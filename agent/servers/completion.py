"""A completion made of the samples of one or more requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from trajpack.agent.protocols import GenerationOutput, SamplingParams
from trajpack.agent.servers.client import RetryableError
from trajpack.agent.servers.engine_response import EngineResponse
from trajpack.packing.conversion import as_version_runs, merge_spans
from trajpack.packing.ragged import concatenated
from trajpack.packing.rows.reading import routes_of_all


@dataclass
class Completion:
    """State of one completion: its request, and what was sampled so far."""

    qid: str
    number: int  # of the request within its episode
    prompt: list[int]
    params: SamplingParams
    token_ids: list[int] = field(init=False)  # prompt and sampled tokens
    finish_reason: str = "abort"  # of the last request; "abort" asks for another one
    server: str = "no server"  # name of the one that was asked last
    _spans: list[tuple[int, int, int]] = field(default_factory=list)
    _responses: list[EngineResponse] = field(default_factory=list)

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
        return replace(self.params, max_new_tokens=left)

    @property
    def is_complete(self) -> bool:
        """Whether no further request is needed."""
        return self.finish_reason != "abort" or self.num_tokens == self.params.max_new_tokens

    def append(self, response: EngineResponse, declared: int) -> None:
        """Append the sample of one request, or raise a ValueError and append nothing.

        ``declared`` is the engine's version when the request was sent: that of tokens whose version
        has no number.
        """
        num_new = len(response.output_ids)
        if not num_new:
            if response.finish_reason != "abort":
                reason = response.finish_reason
                raise ValueError(f"no token was sampled, but the finish reason is {reason!r}")
            return
        routes, num_run = response.fields.get("routed_experts"), len(self.token_ids) + num_new - 1
        if routes is not None and len(routes) != num_run:
            expected = f"routed_experts of {num_run} tokens, all but the last"
            raise ValueError(f"expected {expected}, got {len(routes)}")
        begun = self._responses[0] if self._responses else response
        # the last part has the routes of all tokens
        if names := (begun.fields.keys() ^ response.fields.keys()) - {"routed_experts"}:
            expected = f"{', '.join(names)} of all tokens of a completion or of none"
            raise ValueError(f"expected {expected}, got that of some")
        spans = [
            (int(name[:18]) if is_number(name) else declared, start, end)
            for name, start, end in response.weight_versions
        ]
        runs, first, _ = as_version_runs("weight_versions: ", spans, 0, 0, num_new)
        if self._spans and first < (last := self._spans[-1][0]):
            raise RetryableError(f"{self.server}: version {first} after version {last}")
        done = self.num_tokens
        self._spans += [(version, done + start, done + end) for version, start, end in runs]
        self.token_ids.extend(response.output_ids.tolist())
        self._responses.append(response)
        self.finish_reason = response.finish_reason

    def to_output(self, *, marks_missing: bool) -> GenerationOutput:
        """Return the reply; with ``marks_missing``, it says which log-probabilities are missing."""
        samples, name, size = self._responses, f"episode {self.qid!r}", len(self.token_ids)
        joins: dict[str, Callable[[list[Any]], Any]] = {
            "logprob_missing": np.concatenate,
            "sampling_mask": concatenated,
            "routed_experts": lambda parts: routes_of_all(name, parts[-1], size),  # of all tokens
        }
        fields: dict[str, Any] = {}
        for field_name, join in joins.items():
            if parts := [part.fields[field_name] for part in samples if field_name in part.fields]:
                fields[field_name] = join(parts)
        if not marks_missing:
            del fields["logprob_missing"]
        spans, start, end = merge_spans(self._spans, 0, 0)
        has_stopped = self.finish_reason == "stop"
        return GenerationOutput(
            qid=self.qid,
            prompt_ids=self.prompt,
            output_ids=np.concatenate([part.output_ids for part in samples]),
            output_logprobs=np.concatenate([part.output_logprobs for part in samples]),
            no_eos=not has_stopped,
            version_start=start,
            version_end=end,
            version_spans=spans,
            fields=fields or None,
            stop_reason="stop" if has_stopped else "length",
        )


def is_number(name: str) -> bool:
    """Return whether the name of a version is a decimal number: a policy version."""
    return name.isascii() and name.isdecimal()
