"""JSON of servers' responses as types; parts that they do not name are skipped."""

from __future__ import annotations

from typing import Any, ClassVar, TypeAlias

from msgspec import Struct
from msgspec.json import Decoder

from trajpack.agent.protocols import SamplingParams

_Parts: TypeAlias = tuple[Any, list[int], list[float | None], list[int | None], str]

# gc=False: no cycle can go through them, so the collector need not walk thousands of them


class _Span(Struct, gc=False):
    version: str
    start: int
    end: int


class _Entry(Struct, gc=False):
    logprob: float | None
    token_id: int | None = None
    token: str = ""


class _Logprobs(Struct, gc=False):
    content: list[_Entry] | None = None
    token_logprobs: list[float | None] | None = None
    tokens: list[str] | None = None


class _Choice(Struct, gc=False):
    token_ids: list[int]
    finish_reason: str
    logprobs: _Logprobs
    prompt_token_ids: list[int] | None = None
    weight_versions: list[_Span] | None = None
    sampling_mask: list[list[int]] | None = None
    routed_experts: str | None = None


class _VLLMResponse(Struct, gc=False):
    choices: list[_Choice]
    prompt_token_ids: list[int] | None = None

    def parts(self, _: SamplingParams) -> _Parts:
        """Return the fields of tokens, ids, log-probabilities, their ids and the finish reason."""
        if len(self.choices) != 1:
            raise ValueError(f"expected one sample in choices, got {len(self.choices)}")
        (choice,) = self.choices
        content, logprobs = choice.logprobs.content, choice.logprobs.token_logprobs
        if content is not None:
            logprobs = [entry.logprob for entry in content]
            named = [
                _token(entry.token) if entry.token_id is None else entry.token_id
                for entry in content
            ]
        elif logprobs is not None:
            named = [_token(text) for text in choice.logprobs.tokens or ()]
        else:
            raise ValueError("expected content or token_logprobs in logprobs, got neither")
        return choice, choice.token_ids, logprobs, named, choice.finish_reason


def _token(text: str) -> int | None:
    """Return the id that vLLM gives in place of a token's text; None if it is a text."""
    digits = text.removeprefix("token_id:")
    return int(digits) if digits != text and digits.isdecimal() else None


class _Pair(Struct, array_like=True, gc=False):
    logprob: float | None
    token_id: int


class _Finish(Struct, gc=False):
    type: str
    matched: int | str | list[int] | None = None


class _Meta(Struct, gc=False):
    finish_reason: _Finish
    output_token_logprobs: list[_Pair]
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    sampling_mask: ClassVar[None] = None
    prompt_token_ids: ClassVar[None] = None  # it is beside meta_info
    routed_experts: str | None = None


class _SGLangResponse(Struct, gc=False):
    output_ids: list[int]
    meta_info: _Meta
    prompt_token_ids: list[int] | None = None

    def parts(self, sampling: SamplingParams) -> _Parts:
        """Return the fields of tokens, ids, log-probabilities, their ids and the finish reason."""
        meta, ids, finish = self.meta_info, self.output_ids, self.meta_info.finish_reason
        matched = finish.matched
        if isinstance(matched, str) and matched not in sampling.stop:  # "NaN happened"
            raise ValueError(f"expected a text of the request in matched, got {matched!a:.80}")
        stops = [matched] if isinstance(matched, int) else matched
        if isinstance(stops, list) and not set(stops).intersection(ids[-1:]):
            expected = f"one of the stop tokens {stops[:8]} at the end in output_ids"
            raise ValueError(f"expected {expected}, got {ids[-1] if ids else 'no token'}")
        if meta.weight_versions is None and meta.weight_version is not None:
            meta.weight_versions = [_Span(meta.weight_version, 0, len(ids))]
        pairs = meta.output_token_logprobs
        named: list[int | None] = [pair.token_id for pair in pairs]
        return meta, ids, [pair.logprob for pair in pairs], named, finish.type


DECODERS: dict[str, Any] = {"vLLM": Decoder(_VLLMResponse), "SGLang": Decoder(_SGLangResponse)}
