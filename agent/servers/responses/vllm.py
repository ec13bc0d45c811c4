"""The JSON of a vLLM response: what it means, and a faster way to the same.

The standard ``json`` module says what a body means and words every refusal. Where ``msgspec`` is
installed (the extra ``trajpack[json]``) it goes first, with a fixed shape: what nobody asked for
(texts, alternatives, ranks) is skipped without becoming an object. What does not fit the shape
is left to ``json``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import GenericAlias
from typing import Any

from trajpack.agent.servers.responses.json_parts import (
    JsonParts,
    Sample,
    WeightVersions,
    read_either_way,
)

PARTS = JsonParts("vLLM")
refusal = PARTS.refusal


def read_sample(body: bytes) -> Sample:
    """Read the one sample of a body.

    Raises:
        ValueError: If it is no JSON, is an error of the engine, holds another number of samples
            than one, or lacks a part or has one of another type.
    """
    return read_either_way(body, PARTS, _msgspec_decoder(), lambda: read_with_json(body))


@cache
def _msgspec_decoder() -> Callable[[bytes], Sample | None] | None:
    """Return what reads a body of the known shape, and any other as None."""
    try:
        import msgspec
    except ImportError:
        return None

    def shape(name: str, *fields: Any) -> Any:
        # no cycle can go through these, so the collector need not walk thousands of entries
        return msgspec.defstruct(name, fields, gc=False)

    def array(kind: Any) -> Any:
        return GenericAlias(list, (kind,))

    entry = shape("Entry", ("logprob", float))
    logprobs = shape(
        "Logprobs",
        ("content", array(entry) | None, None),
        ("token_logprobs", list[float] | None, None),
    )
    span = shape("Span", ("version", str), ("start", int), ("end", int))
    choice = shape(
        "Choice",
        ("token_ids", list[int]),
        ("finish_reason", str),
        ("logprobs", logprobs),
        ("prompt_token_ids", list[int] | None, None),
        ("weight_versions", array(span) | None, None),
    )
    response = shape(
        "Response", ("choices", array(choice)), ("prompt_token_ids", list[int] | None, None)
    )
    parse = msgspec.json.Decoder(response).decode

    def read(body: bytes) -> Sample | None:
        try:
            return _from_msgspec(parse(body))
        except (msgspec.DecodeError, RecursionError):
            return None

    return read


def _from_msgspec(response: Any) -> Sample | None:
    if len(response.choices) != 1:
        return None
    choice = response.choices[0]
    content, logprobs = choice.logprobs.content, choice.logprobs.token_logprobs
    if content is not None:
        logprobs = [entry.logprob for entry in content]
    elif logprobs is None:
        return None
    prompt, spans = choice.prompt_token_ids, choice.weight_versions
    return Sample(
        prompt_ids=response.prompt_token_ids if prompt is None else prompt,
        output_ids=choice.token_ids,
        output_logprobs=logprobs,
        finish_reason=choice.finish_reason,
        weight_versions=None
        if spans is None
        else tuple((span.version, span.start, span.end) for span in spans),
    )


def read_with_json(body: bytes) -> Sample:
    """Read a body with the standard library alone: the meaning of `read_sample`."""
    response = PARTS.parse(body)
    choices = PARTS.member("the body", response, "choices", list)
    if len(choices) != 1:
        raise refusal("choices", "one sample", len(choices))
    choice = choices[0]
    prompt = PARTS.member("choices[0]", choice, "prompt_token_ids", list, type(None))
    if prompt is None:
        prompt = PARTS.member("the body", response, "prompt_token_ids", list, type(None))
    ids = PARTS.member("choices[0]", choice, "token_ids", list)
    return Sample(
        prompt_ids=None if prompt is None else PARTS.numbers("prompt_token_ids", prompt, int),
        output_ids=PARTS.numbers("token_ids", ids, int),
        output_logprobs=_logprobs(PARTS.member("choices[0]", choice, "logprobs", dict)),
        finish_reason=PARTS.member("choices[0]", choice, "finish_reason", str),
        weight_versions=_weight_versions(choice),
    )


def _logprobs(logprobs: dict[str, Any]) -> list[float]:
    content = PARTS.member("logprobs", logprobs, "content", list, type(None))
    if content is None:
        values = PARTS.member("logprobs", logprobs, "token_logprobs", list)
        return PARTS.numbers("token_logprobs", values, int, float)
    try:
        values = [entry["logprob"] for entry in content]
    except (KeyError, IndexError, TypeError):
        values = [
            PARTS.member(f"logprobs.content[{index}]", entry, "logprob", int, float)
            for index, entry in enumerate(content)
        ]
    return PARTS.numbers("logprobs.content", values, int, float)


def _weight_versions(choice: dict[str, Any]) -> WeightVersions | None:
    spans = PARTS.member("choices[0]", choice, "weight_versions", list, type(None))
    return None if spans is None else PARTS.spans(spans)
