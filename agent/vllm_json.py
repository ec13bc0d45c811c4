"""The JSON of a vLLM response: what it means, and a faster way to the same.

The standard ``json`` module says what a body means and words every refusal. Where ``msgspec`` is
installed (the extra ``trajpack[json]``) it goes first, with a fixed shape: what nobody asked for
(texts, alternatives, ranks) is skipped without becoming an object. What does not fit the shape
is left to ``json``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from types import GenericAlias
from typing import Any, NamedTuple, TypeAlias

WeightVersions: TypeAlias = tuple[tuple[str, int, int], ...]
"""``(version, start, end)`` for each span of the completion."""
JSON_NAMES = {
    bool: "a boolean",
    dict: "an object",
    float: "a fraction",
    int: "an integer",
    list: "an array",
    str: "a string",
    type(None): "null",
}


class Sample(NamedTuple):
    """The parts of a response: right in kind, their values unchecked."""

    prompt_ids: list[int] | None
    output_ids: list[int]
    output_logprobs: list[float]
    finish_reason: str
    weight_versions: WeightVersions | None


def refusal(where: str, expected: str, got: object) -> ValueError:
    """Return the error for a part of the response that is not as it should be."""
    return ValueError(f"vLLM response: expected {expected} in {where}, got {got}")


def read_sample(body: bytes) -> Sample:
    """Read the one sample of a body.

    Raises:
        ValueError: If it is no JSON, is an error of the engine, holds another number of samples
            than one, or lacks a part or has one of another type.
    """
    decode = _msgspec_decoder()
    sample = None if decode is None else decode(body)
    return read_with_json(body) if sample is None else sample


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
    try:
        # broken characters can only stand in texts, and no text is kept
        response = json.loads(body.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"vLLM response: expected JSON, but {error}") from None
    if isinstance(response, dict) and "choices" not in response and "error" in response:
        raise refusal("the body", "a sample", f"the error {str(response['error'])[:500]}")
    choices = _member("the body", response, "choices", list)
    if len(choices) != 1:
        raise refusal("choices", "one sample", len(choices))
    choice = choices[0]
    prompt = _member("choices[0]", choice, "prompt_token_ids", list, type(None))
    if prompt is None:
        prompt = _member("the body", response, "prompt_token_ids", list, type(None))
    return Sample(
        prompt_ids=None if prompt is None else _numbers("prompt_token_ids", prompt, int),
        output_ids=_numbers("token_ids", _member("choices[0]", choice, "token_ids", list), int),
        output_logprobs=_logprobs(_member("choices[0]", choice, "logprobs", dict)),
        finish_reason=_member("choices[0]", choice, "finish_reason", str),
        weight_versions=_weight_versions(
            _member("choices[0]", choice, "weight_versions", list, type(None))
        ),
    )


def _logprobs(logprobs: dict[str, Any]) -> list[float]:
    content = _member("logprobs", logprobs, "content", list, type(None))
    if content is None:
        values = _member("logprobs", logprobs, "token_logprobs", list)
        return _numbers("token_logprobs", values, int, float)
    try:
        values = [entry["logprob"] for entry in content]
    except (KeyError, IndexError, TypeError):
        values = [
            _member(f"logprobs.content[{index}]", entry, "logprob", int, float)
            for index, entry in enumerate(content)
        ]
    return _numbers("logprobs.content", values, int, float)


def _weight_versions(spans: list[Any] | None) -> WeightVersions | None:
    if spans is None:
        return None
    return tuple(
        (
            _member(f"weight_versions[{index}]", span, "version", str),
            _member(f"weight_versions[{index}]", span, "start", int),
            _member(f"weight_versions[{index}]", span, "end", int),
        )
        for index, span in enumerate(spans)
    )


def _member(where: str, parent: Any, name: str, *kinds: type) -> Any:
    """Return a part of an object; a part that is absent counts as null."""
    if type(parent) is not dict:
        raise refusal(where, "an object", _json_name(parent))
    value = parent.get(name)
    if type(value) not in kinds:
        expected = f"{name!r} to be " + " or ".join(JSON_NAMES[kind] for kind in kinds)
        raise refusal(where, expected, "nothing" if name not in parent else _json_name(value))
    return value


def _numbers(where: str, values: list[Any], *kinds: type) -> list[Any]:
    if not set(map(type, values)) <= set(kinds):
        odd = next(index for index, value in enumerate(values) if type(value) not in kinds)
        expected = "numbers" if float in kinds else "integers"
        raise refusal(where, expected, f"{_json_name(values[odd])} at index {odd}")
    return values


def _json_name(value: Any) -> str:
    return JSON_NAMES[type(value)]
