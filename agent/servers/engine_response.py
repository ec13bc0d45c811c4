"""Responses of inference servers, from JSON bytes to checked arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import GenericAlias
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trajpack.agent.protocols import GenerationOutput
from trajpack.packing.conversion import INT32_MAX, as_ids, as_logprobs
from trajpack.packing.optional import require
from trajpack.packing.types import IntArray, VersionSpan

PLACEHOLDER_LOGPROB = -9999.0
"""Value that vLLM writes for a log-probability that it did not compute, or that is lower."""
_MAX_ERROR_BODY = 2**20
"""Bytes of the largest body that is searched for an error message."""
WeightVersions: TypeAlias = tuple[tuple[str, int, int], ...]
"""``(version, start, end)`` for each span of the completion."""
_Matched: TypeAlias = int | str | list[int] | None


@dataclass(frozen=True)
class ResponseLimits:
    """Limits of a response that is accepted.

    Raises:
        ValueError: If one is below 1.
    """

    max_tokens: int
    """Number of completion tokens: as many as the request asked for."""
    vocab_size: int = INT32_MAX + 1
    """Upper bound (exclusive) of token ids."""
    max_bytes: int = 64 * 2**20
    """Length of the body in bytes. ``/inference/v1/generate`` takes about 140 bytes per token. A
    crafted body may take 30 times its size in memory when parsed."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "vocab_size", "max_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, eq=False)
class EngineResponse:
    """One sample of a server, as checked arrays."""

    prompt_ids: npt.NDArray[np.int32] | None
    """int32 [prompt tokens] as the server saw them; None if the response does not repeat them."""
    output_ids: npt.NDArray[np.int32]
    """int32 [completion tokens], stop token included."""
    output_logprobs: npt.NDArray[np.float32]
    """float32 [completion tokens], natural log, finite."""
    finish_reason: str
    """``"stop"``, ``"length"``, ``"abort"`` or another word of the server."""
    weight_versions: WeightVersions | None
    """``(version, start, end)`` spans as the server named them; None if it does not report any."""

    def to_output(
        self,
        qid: str,
        prompt_ids: IntArray,
        version_start: int,
        version_end: int,
        version_spans: Sequence[VersionSpan] | None = None,
    ) -> GenerationOutput:
        """Return the reply to episode ``qid``; arrays are shared, not copied.

        Args:
            qid: Name of the episode.
            prompt_ids: Token ids that were sent; used if the response has no prompt ids.
            version_start: Policy version of the first sampled token.
            version_end: Policy version of the last sampled token.
            version_spans: Versions token by token, if known.
        """
        return GenerationOutput(
            qid=qid,
            prompt_ids=prompt_ids if self.prompt_ids is None else self.prompt_ids,
            output_ids=self.output_ids,
            output_logprobs=self.output_logprobs,
            no_eos=self.finish_reason != "stop",
            version_start=version_start,
            version_end=version_end,
            version_spans=version_spans,
        )


def read_vllm_response(body: bytes, limits: ResponseLimits) -> EngineResponse:
    """Read the JSON of ``/inference/v1/generate``, ``/v1/completions`` or ``/v1/chat/completions``.

    The request must have asked for one sample (``n`` 1), for the log-probability of the sampled
    token (``"logprobs": 0``; ``true`` for chat) and, except on ``generate``, for
    ``"return_token_ids": true``. It must not stream, and not ``echo`` the prompt.

    vLLM writes a log-probability that it does not have as ``null`` or as -9999. Both are refused.

    Args:
        body: Body of the response, UTF-8.
        limits: Limits that the caller accepts. ``max_bytes`` is checked before parsing.

    Raises:
        ValueError: If the body is longer than the limit, is not JSON, is an error of the server,
            lacks a part, has a part of another type or length, an id outside
            ``[0, vocab_size)``, more than ``max_tokens`` ids, or a log-probability that is
            missing or not finite as float32. The message names the part, what was expected and
            what came.
        ModuleNotFoundError: If msgspec (``trajpack[servers]`` or ``trajpack[json]``) is missing.

    Cost: one pass over the body on the calling thread, without a copy of it; one Python number
    for each id and log-probability kept, all freed on return.

    Source: responses recorded from vLLM 0.32.

    Example:
        >>> body = b'''{"choices": [{"token_ids": [5, 7], "finish_reason": "stop",
        ...     "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -2}]}}]}'''
        >>> response = read_vllm_response(body, ResponseLimits(max_tokens=16, vocab_size=100))
        >>> response.output_ids, response.output_logprobs
        (array([5, 7], dtype=int32), array([-0.5, -2. ], dtype=float32))
    """
    response = _parse("vLLM", body, limits, _vllm_decoder())
    if len(response.choices) != 1:
        raise _refusal("vLLM", "one sample in choices", len(response.choices))
    (choice,) = response.choices
    logprobs, spans = choice.logprobs.token_logprobs, choice.weight_versions
    if choice.logprobs.content is not None:
        logprobs = [entry.logprob for entry in choice.logprobs.content]
    elif logprobs is None:
        raise _refusal("vLLM", "content or token_logprobs in logprobs", "neither")
    prompt = choice.prompt_token_ids
    sample = _Sample(
        prompt_ids=response.prompt_token_ids if prompt is None else prompt,
        output_ids=choice.token_ids,
        output_logprobs=logprobs,
        finish_reason=choice.finish_reason,
        weight_versions=None if spans is None else _spans(spans),
    )
    return _checked("vLLM", sample, limits)


def read_sglang_response(body: bytes, limits: ResponseLimits) -> EngineResponse:
    """Read the JSON of SGLang's ``/generate``.

    The request must have asked for one sample and for ``"return_logprob": true``; it must not
    stream. If the response names one version without spans, it is that of all tokens.

    Args:
        body: Body of the response, UTF-8.
        limits: Limits that the caller accepts. ``max_bytes`` is checked before parsing.

    Raises:
        ValueError: As `read_vllm_response`, and if the ids beside the log-probabilities are not
            those of ``output_ids``, the stop token that matched is not the last of them, or a stop
            string matched: no request names any, and SGLang reports NaN in this way.
        ModuleNotFoundError: As `read_vllm_response`.

    Cost: as `read_vllm_response`.

    Source: the published types of SGLang 0.5.23.

    Example:
        >>> body = b'''{"output_ids": [5, 7], "meta_info": {"finish_reason": {"type": "length"},
        ...     "weight_version": "3", "output_token_logprobs": [[-0.5, 5, null], [-2, 7, "b"]]}}'''
        >>> response = read_sglang_response(body, ResponseLimits(max_tokens=16, vocab_size=100))
        >>> response.output_ids, response.finish_reason, response.weight_versions
        (array([5, 7], dtype=int32), 'length', (('3', 0, 2),))
    """
    response = _parse("SGLang", body, limits, _sglang_decoder())
    meta, ids = response.meta_info, response.output_ids
    entries = meta.output_token_logprobs
    if len(entries) != len(ids):
        expected = f"{len(ids)} entries, one for each of output_ids, in output_token_logprobs"
        raise _refusal("SGLang", expected, len(entries))
    beside = [entry.token_id for entry in entries]
    if beside != ids:
        index = next(k for k, token_id in enumerate(ids) if beside[k] != token_id)
        expected = "the ids of output_ids in output_token_logprobs"
        raise _refusal("SGLang", expected, f"another at index {index}")
    _check_stop(meta.finish_reason, ids)
    spans = meta.weight_versions
    versions = None if spans is None else _spans(spans)
    if spans is None and meta.weight_version is not None:
        versions = ((meta.weight_version, 0, len(ids)),)
    sample = _Sample(
        prompt_ids=response.prompt_token_ids,
        output_ids=ids,
        output_logprobs=[entry.logprob for entry in entries],
        finish_reason=meta.finish_reason.type,
        weight_versions=versions,
    )
    return _checked("SGLang", sample, limits)


class _Sample(NamedTuple):
    """Parts of a response: of the right type, values unchecked."""

    prompt_ids: list[int] | None
    output_ids: list[int]
    output_logprobs: list[float]
    finish_reason: str
    weight_versions: WeightVersions | None


def _refusal(server: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{server} response: expected {expected}, got {got}")


def _parse(server: str, body: bytes, limits: ResponseLimits, decode: Callable[..., Any]) -> Any:
    import msgspec

    if len(body) > limits.max_bytes:
        raise _refusal(server, f"at most {limits.max_bytes} bytes in body", len(body))
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        # the body may be an error message; a large one is not: it would hold up other episodes
        if len(body) <= _MAX_ERROR_BODY and (message := _error_message(body)):
            raise _refusal(server, "a sample in the body", f"the error {message}") from None
        text = str(error)
        raise ValueError(f"{server} response: {text[:1].lower()}{text[1:]}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{server} response: expected JSON, but {error}") from None


def _error_message(body: bytes) -> str | None:
    """Return the error that a body reports in place of a sample."""
    import msgspec

    try:
        response = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(response, dict) or {"choices", "meta_info"} & set(response):
        return None
    message = response.get("error") or response.get("message")
    return f"{message!r:.500}" if message else None


def _spans(spans: Sequence[Any]) -> WeightVersions:
    return tuple((span.version, span.start, span.end) for span in spans)


def _check_stop(finish: Any, ids: list[int]) -> None:
    """Refuse a stop that did not end at a stop token.

    Requests name no stop strings. SGLang reports one (``"NaN happened"``) if the model computed
    NaN, and then appends a stop token that was not sampled.
    """
    matched = finish.matched
    if finish.type != "stop" or matched is None:
        return
    if isinstance(matched, str):
        expected = "a stop token that matched in finish_reason"
        raise _refusal("SGLang", expected, f"{matched!a:.80}")
    stops = [matched] if isinstance(matched, int) else matched
    if not ids or ids[-1] not in stops:
        expected = f"the stop token {', '.join(map(str, stops[:8]))} at the end in output_ids"
        raise _refusal("SGLang", expected, ids[-1] if ids else "no token")


def _checked(server: str, sample: _Sample, limits: ResponseLimits) -> EngineResponse:
    num_tokens = len(sample.output_ids)
    if num_tokens > limits.max_tokens:
        raise _refusal(server, f"at most {limits.max_tokens} tokens in token_ids", num_tokens)
    if len(sample.output_logprobs) != num_tokens:
        expected = f"{num_tokens} log-probabilities, one for each of token_ids in logprobs"
        raise _refusal(server, expected, len(sample.output_logprobs))
    logprobs = as_logprobs(f"{server} response: logprobs", sample.output_logprobs)
    missing = np.flatnonzero(logprobs <= PLACEHOLDER_LOGPROB)
    if missing.size:
        expected = f"a log-probability above {PLACEHOLDER_LOGPROB:.0f} at index {missing[0]}"
        raise _refusal(server, f"{expected} in logprobs", logprobs[missing[0]])
    arrays = []
    for name, values in (
        ("prompt_token_ids", sample.prompt_ids or []),
        ("token_ids", sample.output_ids),
    ):
        ids = as_ids(f"{server} response: {name}", values)
        if ids.size and ids.max() >= limits.vocab_size:
            got = f"{ids.max()} at index {ids.argmax()}"
            raise _refusal(server, f"ids below {limits.vocab_size} in {name}", got)
        arrays.append(ids)
    return EngineResponse(
        prompt_ids=None if sample.prompt_ids is None else arrays[0],
        output_ids=arrays[1],
        output_logprobs=logprobs,
        finish_reason=sample.finish_reason,
        weight_versions=sample.weight_versions,
    )


def _struct(name: str, *fields: Any, **options: Any) -> Any:
    import msgspec

    # gc=False: no cycle can go through these, so the collector need not walk thousands of them
    return msgspec.defstruct(name, fields, gc=False, **options)


def _array(kind: Any) -> Any:
    return GenericAlias(list, (kind,))


@cache
def _vllm_decoder() -> Callable[[bytes], Any]:
    """Return the parser of vLLM's responses; parts that it does not name are skipped."""
    require("msgspec")
    import msgspec

    entry = _struct("Entry", ("logprob", float))
    logprobs = _struct(
        "Logprobs",
        ("content", _array(entry) | None, None),
        ("token_logprobs", list[float] | None, None),
    )
    span = _struct("Span", ("version", str), ("start", int), ("end", int))
    choice = _struct(
        "Choice",
        ("token_ids", list[int]),
        ("finish_reason", str),
        ("logprobs", logprobs),
        ("prompt_token_ids", list[int] | None, None),
        ("weight_versions", _array(span) | None, None),
    )
    response = _struct(
        "Response", ("choices", _array(choice)), ("prompt_token_ids", list[int] | None, None)
    )
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(response).decode
    return decode


@cache
def _sglang_decoder() -> Callable[[bytes], Any]:
    """Return the parser of SGLang's responses; parts that it does not name are skipped."""
    require("msgspec")
    import msgspec

    entry = _struct("Entry", ("logprob", float), ("token_id", int), array_like=True)
    span = _struct("Span", ("version", str), ("start", int), ("end", int))
    finish = _struct("Finish", ("type", str), ("matched", _Matched, None))
    meta = _struct(
        "MetaInfo",
        ("finish_reason", finish),
        ("output_token_logprobs", _array(entry)),
        ("weight_version", str | None, None),
        ("weight_versions", _array(span) | None, None),
    )
    response = _struct(
        "Response",
        ("output_ids", list[int]),
        ("meta_info", meta),
        ("prompt_token_ids", list[int] | None, None),
    )
    decode: Callable[[bytes], Any] = msgspec.json.Decoder(response).decode
    return decode
