"""JSON of servers' responses as types; parts that they do not name are skipped."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.json import Decoder

# gc=False: no cycle can go through them, so the collector need not walk thousands of them


class _Span(Struct, gc=False):
    version: str
    start: int
    end: int


class _Entry(Struct, gc=False):
    logprob: float | None
    token_id: int | None = None


class _Logprobs(Struct, gc=False):
    content: list[_Entry] | None = None
    token_logprobs: list[float | None] | None = None


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
    routed_experts: str | None = None


class _SGLangResponse(Struct, gc=False):
    output_ids: list[int]
    meta_info: _Meta
    prompt_token_ids: list[int] | None = None


DECODERS: dict[str, Any] = {"vLLM": Decoder(_VLLMResponse), "SGLang": Decoder(_SGLangResponse)}
