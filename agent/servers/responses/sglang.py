"""The JSON of SGLang's ``/generate``: what it means, and a faster way to the same.

As with vLLM's, the standard ``json`` module says what a body means and words every refusal, and
``msgspec`` goes first where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import GenericAlias
from typing import Any, TypeAlias

from trajpack.agent.servers.responses.json_parts import (
    JsonParts,
    Sample,
    WeightVersions,
    read_either_way,
)

PARTS = JsonParts("SGLang")
_Matched: TypeAlias = int | str | list[int] | None


def read_sglang_sample(body: bytes) -> Sample:
    """Read the one sample of a body.

    The ids are those of ``output_ids``; those beside the log-probabilities must be the same.

    Raises:
        ValueError: If it is no JSON, is an error of the server, lacks a part or has one of another
            type, or if its ids disagree, or it ended at anything but a token.
    """
    decode = _msgspec_decoder()
    return read_either_way(body, PARTS, decode, lambda: read_sglang_with_json(body))


@cache
def _msgspec_decoder() -> Callable[[bytes], Sample | None] | None:
    """Return what reads a body of the known shape, and any other as None."""
    try:
        import msgspec
    except ImportError:
        return None

    def shape(name: str, *fields: Any, **options: Any) -> Any:
        # no cycle can go through these, so the collector need not walk thousands of entries
        return msgspec.defstruct(name, fields, gc=False, **options)

    def array(kind: Any) -> Any:
        return GenericAlias(list, (kind,))

    entry = shape("Entry", ("logprob", float), ("token_id", int), array_like=True)
    span = shape("Span", ("version", str), ("start", int), ("end", int))
    finish = shape("Finish", ("type", str), ("matched", _Matched, None))
    meta = shape(
        "MetaInfo",
        ("finish_reason", finish),
        ("output_token_logprobs", array(entry)),
        ("weight_version", str | None, None),
        ("weight_versions", array(span) | None, None),
    )
    response = shape(
        "Response",
        ("output_ids", list[int]),
        ("meta_info", meta),
        ("prompt_token_ids", list[int] | None, None),
    )
    parse = msgspec.json.Decoder(response).decode

    def read(body: bytes) -> Sample | None:
        try:
            return _from_msgspec(parse(body))
        except (msgspec.DecodeError, RecursionError):
            return None

    return read


def _from_msgspec(response: Any) -> Sample:
    meta = response.meta_info
    spans = meta.weight_versions
    sample = Sample(
        prompt_ids=response.prompt_token_ids,
        output_ids=response.output_ids,
        output_logprobs=[entry.logprob for entry in meta.output_token_logprobs],
        finish_reason=meta.finish_reason.type,
        weight_versions=_spans(
            None if spans is None else tuple((s.version, s.start, s.end) for s in spans),
            meta.weight_version,
            len(response.output_ids),
        ),
    )
    ids = [entry.token_id for entry in meta.output_token_logprobs]
    return _agreeing(sample, ids, meta.finish_reason.matched)


def read_sglang_with_json(body: bytes) -> Sample:
    """Read a body with the standard library alone: the meaning of `read_sglang_sample`."""
    response = PARTS.parse(body)
    meta = PARTS.member("the body", response, "meta_info", dict)
    output_ids = PARTS.numbers(
        "output_ids", PARTS.member("the body", response, "output_ids", list), int
    )
    prompt = PARTS.member("the body", response, "prompt_token_ids", list, type(None))
    finish = PARTS.member("meta_info", meta, "finish_reason", dict)
    entries = PARTS.member("meta_info", meta, "output_token_logprobs", list)
    for index, entry in enumerate(entries):
        if type(entry) is not list or len(entry) < 2:
            where = f"output_token_logprobs[{index}]"
            raise PARTS.refusal(where, "a log-probability and a token id", "something else")
    ids = PARTS.numbers("ids of output_token_logprobs", [entry[1] for entry in entries], int)
    logprobs = [entry[0] for entry in entries]
    spans = PARTS.member("meta_info", meta, "weight_versions", list, type(None))
    name = PARTS.member("meta_info", meta, "weight_version", str, type(None))
    sample = Sample(
        prompt_ids=None if prompt is None else PARTS.numbers("prompt_token_ids", prompt, int),
        output_ids=output_ids,
        output_logprobs=PARTS.numbers("output_token_logprobs", logprobs, int, float),
        finish_reason=PARTS.member("finish_reason", finish, "type", str),
        weight_versions=_spans(
            None if spans is None else PARTS.spans(spans), name, len(output_ids)
        ),
    )
    matched = PARTS.member("finish_reason", finish, "matched", int, str, list, type(None))
    if isinstance(matched, list):
        PARTS.numbers("matched", matched, int)
    return _agreeing(sample, ids, matched)


def _spans(
    spans: WeightVersions | None, name: str | None, num_tokens: int
) -> WeightVersions | None:
    """Return the spans; servers from before there were any name one version for the whole."""
    if spans is None and name is not None:
        return ((name, 0, num_tokens),)
    return spans


def _agreeing(sample: Sample, ids: list[int], matched: _Matched) -> Sample:
    """Refuse a sample that says two things at once, or ended in a way nobody asked for.

    No request names stop strings. Where one matched all the same, it is how the server says that
    the model computed nonsense (``"NaN happened"``): it then puts a stop token where none was
    sampled.
    """
    if len(ids) != len(sample.output_ids):
        expected = f"{len(sample.output_ids)} entries, one for each of output_ids"
        raise PARTS.refusal("output_token_logprobs", expected, len(ids))
    if ids != sample.output_ids:
        odd = next(
            k
            for k, pair in enumerate(zip(ids, sample.output_ids, strict=True))
            if pair[0] != pair[1]
        )
        raise PARTS.refusal(
            "output_token_logprobs", "the ids of output_ids", f"another at index {odd}"
        )
    if sample.finish_reason != "stop" or matched is None:
        return sample
    if isinstance(matched, str):
        raise PARTS.refusal("finish_reason", "a stop token that matched", f"{matched!a:.80}")
    stops = [matched] if isinstance(matched, int) else matched
    if not ids or ids[-1] not in stops:
        wanted = f"the stop token {', '.join(map(str, stops[:8]))} at the end"
        raise PARTS.refusal("output_ids", wanted, ids[-1] if ids else "no token")
    return sample
