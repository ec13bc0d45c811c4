"""JSON of servers' responses as types; parts that they do not name are skipped."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta, Struct
from msgspec.json import Decoder

from trajpack.agent.protocols import SamplingParams

_Reason: TypeAlias = Literal["stop", "length", "abort"]
_Parts: TypeAlias = tuple[Any, list[int], list[float | None], str]

# gc=False: no cycle can go through them, so the collector need not walk thousands of them


class _Span(Struct, gc=False):
    version: str
    start: int
    end: int


class _Entry(Struct, gc=False):
    logprob: float | None


class _Logprobs(Struct, gc=False):
    content: list[_Entry] | None = None
    token_logprobs: list[float | None] = []


class _Choice(Struct, gc=False):
    token_ids: list[int]
    finish_reason: _Reason
    logprobs: _Logprobs
    weight_versions: list[_Span] | None = None
    sampling_mask: list[list[int]] | None = None
    routed_experts: str | None = None


class _VLLMResponse(Struct, gc=False):
    choices: Annotated[list[_Choice], Meta(min_length=1, max_length=1)]

    def parts(self, _: SamplingParams) -> _Parts:
        """Return the fields of tokens, ids, log-probabilities and the finish reason."""
        (choice,) = self.choices
        logprobs = choice.logprobs.token_logprobs
        if choice.logprobs.content is not None:
            logprobs = [entry.logprob for entry in choice.logprobs.content]
        return choice, choice.token_ids, logprobs, choice.finish_reason


class _Pair(Struct, array_like=True, gc=False):
    logprob: float | None


class _Finish(Struct, gc=False):
    type: _Reason
    matched: int | str | list[int] | None = None


class _Meta(Struct, gc=False):
    finish_reason: _Finish
    output_token_logprobs: list[_Pair]
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    sampling_mask: ClassVar[None] = None
    routed_experts: str | None = None


class _SGLangResponse(Struct, gc=False):
    output_ids: list[int]
    meta_info: _Meta

    def parts(self, sampling: SamplingParams) -> _Parts:
        """Return the fields of tokens, ids, log-probabilities and the finish reason."""
        meta, ids, finish = self.meta_info, self.output_ids, self.meta_info.finish_reason
        if isinstance(finish.matched, str) and finish.matched not in sampling.stop:
            # "NaN happened"
            raise ValueError(
                f"expected a text of the request in matched, got {finish.matched!a:.80}"
            )
        if meta.weight_versions is None and meta.weight_version is not None:
            meta.weight_versions = [_Span(meta.weight_version, 0, len(ids))]
        return meta, ids, [pair.logprob for pair in meta.output_token_logprobs], finish.type


DECODERS: dict[str, Any] = {"vLLM": Decoder(_VLLMResponse), "SGLang": Decoder(_SGLangResponse)}
