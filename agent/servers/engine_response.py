"""Responses of servers as checked arrays, and completions made of several responses."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import GenericAlias
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trajpack.agent.protocols import GenerationOutput, SamplingParams
from trajpack.packing.conversion import INT32_MAX, as_ids, as_logprobs
from trajpack.packing.optional import require
from trajpack.packing.ragged import Ragged, concatenated, flattened
from trajpack.packing.rows.reading import routes_of_all
from trajpack.packing.types import VersionSpan

PLACEHOLDER_LOGPROB = -9999.0
"""Value that vLLM writes for a log-probability that it did not compute, or that is lower."""
_MAX_ERROR_BODY = 2**20
"""Bytes of the largest body that is searched for an error message."""
FINISH_REASONS = ("stop", "length", "abort")
_MAX_LOGPROB = 0.01
"""Upper bound of a log-probability: 0, and some rounding."""
WeightVersions: TypeAlias = tuple[tuple[str, int, int], ...]
"""``(version, start, end)`` for each span of the completion."""


@dataclass(frozen=True)
class ResponseLimits:
    """Limits of a response that is accepted, each above 0."""

    max_tokens: int
    """Number of completion tokens: as many as the request asked for."""
    vocab_size: int = INT32_MAX + 1
    """Upper bound (exclusive) of token ids."""
    max_bytes: int = 64 * 2**20
    """Length of the body in bytes. ``/inference/v1/generate`` takes about 140 bytes per token. A
    crafted body may take 30 times its size in memory when parsed."""
    routed_experts: tuple[int, int] | None = None
    """Layers with experts, and experts of a token, of the routes that the response must have;
    ``None`` leaves routes out."""
    stop: tuple[str, ...] = ()
    """Texts that the request named to stop at."""


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
    sampling_mask: Ragged | None = None
    """int32 token ids that each token was sampled from; None if the server does not report them."""
    routed_experts: npt.NDArray[np.integer[Any]] | None = None
    """Integers [prompt and completion tokens - 1, layers, experts of a token], as the server wrote
    them: the last token was not run. None if they were not asked for, or nothing was sampled."""


def read_vllm_response(body: bytes, limits: ResponseLimits) -> EngineResponse:
    """Read the JSON of ``/inference/v1/generate``, ``/v1/completions`` or ``/v1/chat/completions``.

    The request must have asked for one sample (``n`` 1), for the log-probability of the sampled
    token (``"logprobs": 0``; ``true`` for chat) and, except on ``generate``, for
    ``"return_token_ids": true``. It must not stream, and not ``echo`` the prompt.

    Servers started with ``--return-sampling-mask`` report the tokens that top-p and top-k left: a
    list for each token, or ``token_ids`` of all and ``offsets``. Servers started with
    ``--enable-return-routed-experts`` report the routes as a base64 ``.npy`` file.
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

    Source: responses recorded from vLLM 0.32.

    Example:
        >>> body = b'''{"choices": [{"token_ids": [5, 7], "finish_reason": "stop",
        ...     "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -2}]}}]}'''
        >>> response = read_vllm_response(body, ResponseLimits(max_tokens=16, vocab_size=100))
        >>> response.output_ids, response.output_logprobs
        (array([5, 7], dtype=int32), array([-0.5, -2. ], dtype=float32))
    """
    response = _parse("vLLM", body, limits)
    if len(response.choices) != 1:
        raise _refusal("vLLM", "one sample in choices", len(response.choices))
    (choice,) = response.choices
    logprobs, spans = choice.logprobs.token_logprobs, choice.weight_versions
    if choice.logprobs.content is not None:
        logprobs = [entry.logprob for entry in choice.logprobs.content]
    elif logprobs is None:
        raise _refusal("vLLM", "content or token_logprobs in logprobs", "neither")
    prompt = choice.prompt_token_ids
    sample = _checked(
        "vLLM",
        limits,
        prompt_ids=response.prompt_token_ids if prompt is None else prompt,
        output_ids=choice.token_ids,
        output_logprobs=logprobs,
        finish_reason=choice.finish_reason,
        weight_versions=None if spans is None else _spans(spans),
        sampling_mask=choice.sampling_mask,
    )
    return _with_routes("vLLM", limits, sample, choice.routed_experts)


def read_sglang_response(body: bytes, limits: ResponseLimits) -> EngineResponse:
    """Read the JSON of SGLang's ``/generate``.

    The request must have asked for one sample and for ``"return_logprob": true``; it must not
    stream. If the response names one version without spans, it is that of all tokens.

    Args:
        body: Body of the response, UTF-8.
        limits: Limits that the caller accepts. ``max_bytes`` is checked before parsing.

    Raises:
        ValueError: As `read_vllm_response`, and if the ids beside the log-probabilities are not
            those of ``output_ids``, the stop token that matched is not the last of them, or a text
            matched that is not one of ``limits.stop``: SGLang reports NaN in this way.
        ModuleNotFoundError: As `read_vllm_response`.

    Source: the published types of SGLang 0.5.23, and its page "Return Routed Experts": int32 in
    base64, without a shape.

    Example:
        >>> body = b'''{"output_ids": [5, 7], "meta_info": {"finish_reason": {"type": "length"},
        ...     "weight_version": "3", "output_token_logprobs": [[-0.5, 5, null], [-2, 7, "b"]]}}'''
        >>> response = read_sglang_response(body, ResponseLimits(max_tokens=16, vocab_size=100))
        >>> response.output_ids, response.finish_reason, response.weight_versions
        (array([5, 7], dtype=int32), 'length', (('3', 0, 2),))
    """
    response = _parse("SGLang", body, limits)
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
    _check_stop(meta.finish_reason, ids, limits.stop)
    spans = meta.weight_versions
    versions = None if spans is None else _spans(spans)
    if spans is None and meta.weight_version is not None:
        versions = ((meta.weight_version, 0, len(ids)),)
    sample = _checked(
        "SGLang",
        limits,
        prompt_ids=response.prompt_token_ids,
        output_ids=ids,
        output_logprobs=[entry.logprob for entry in entries],
        finish_reason=meta.finish_reason.type,
        weight_versions=versions,
    )
    return _with_routes("SGLang", limits, sample, meta.routed_experts)


def _refusal(server: str, expected: str, got: object) -> ValueError:
    return ValueError(f"{server} response: expected {expected}, got {got}")


def _parse(server: str, body: bytes, limits: ResponseLimits) -> Any:
    decode = _decoders()[server]
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


def _check_stop(finish: Any, ids: list[int], stop: tuple[str, ...]) -> None:
    """Refuse a stop at no stop token and at no text that was asked for.

    SGLang reports a text (``"NaN happened"``) if the model computed NaN, and then appends a stop
    token that was not sampled.
    """
    matched = finish.matched
    if finish.type != "stop" or matched is None or matched in stop:
        return
    if isinstance(matched, str):
        expected = "a stop token that matched in finish_reason"
        raise _refusal("SGLang", expected, f"{matched!a:.80}")
    stops = [matched] if isinstance(matched, int) else matched
    if not ids or ids[-1] not in stops:
        expected = f"the stop token {', '.join(map(str, stops[:8]))} at the end in output_ids"
        raise _refusal("SGLang", expected, ids[-1] if ids else "no token")


def _checked(
    server: str,
    limits: ResponseLimits,
    *,
    prompt_ids: list[int] | None,
    output_ids: list[int],
    output_logprobs: list[float],
    finish_reason: str,
    weight_versions: WeightVersions | None,
    sampling_mask: Any = None,
) -> EngineResponse:
    num_tokens = len(output_ids)
    if num_tokens > limits.max_tokens:
        raise _refusal(server, f"at most {limits.max_tokens} tokens in token_ids", num_tokens)
    if len(output_logprobs) != num_tokens:
        expected = f"{num_tokens} log-probabilities, one for each of token_ids in logprobs"
        raise _refusal(server, expected, len(output_logprobs))
    logprobs = as_logprobs(f"{server} response: logprobs", output_logprobs)
    missing = np.flatnonzero(logprobs <= PLACEHOLDER_LOGPROB)
    if missing.size:
        expected = f"a log-probability above {PLACEHOLDER_LOGPROB:.0f} at index {missing[0]}"
        raise _refusal(server, f"{expected} in logprobs", logprobs[missing[0]])
    given = [[]] * num_tokens if sampling_mask is None else sampling_mask
    mask = _mask_of(server, given, num_tokens)
    arrays = []
    for name, values in (
        ("prompt_token_ids", prompt_ids or []),
        ("token_ids", output_ids),
        ("sampling_mask", mask.values),
    ):
        ids = as_ids(f"{server} response: {name}", values)
        if ids.size and ids.max() >= limits.vocab_size:
            got = f"{ids.max()} at index {ids.argmax()}"
            raise _refusal(server, f"ids below {limits.vocab_size} in {name}", got)
        arrays.append(ids)
    counts, prompt, output, kept = np.diff(mask.cu), *arrays
    owners = np.repeat(np.arange(len(counts)), counts)
    without = counts > 0
    without[owners[kept == output[owners]]] = False
    if without.any():
        wrong = output[without.argmax()]
        raise _refusal(server, f"the token {wrong} in sampling_mask", "others")
    return EngineResponse(
        sampling_mask=None if sampling_mask is None else Ragged(mask.cu, kept),
        prompt_ids=None if prompt_ids is None else prompt,
        output_ids=output,
        output_logprobs=logprobs,
        finish_reason=finish_reason,
        weight_versions=weight_versions,
    )


def _with_routes(
    server: str, limits: ResponseLimits, sample: EngineResponse, encoded: str | None
) -> EngineResponse:
    """Return a sample with its routes, if asked for: base64 of a ``.npy`` file or plain int32."""
    sizes = limits.routed_experts
    if sizes is None or not sample.output_ids.size:
        return sample
    if encoded is None:
        if sample.finish_reason == "abort":
            return sample  # the rest of the completion brings the routes of all tokens
        expected = "routed_experts: start the server with --enable-return-routed-experts"
        raise _refusal(server, expected, "none")
    try:
        raw = base64.b64decode(encoded, validate=True)
        if raw.startswith(np.lib.format.MAGIC_PREFIX):
            routes: npt.NDArray[Any] = np.load(io.BytesIO(raw), allow_pickle=False)
        else:
            routes = np.frombuffer(raw, "<i4").reshape(-1, *sizes)
    except (ValueError, EOFError, SyntaxError, MemoryError, OverflowError) as error:
        reason = str(error) or type(error).__name__
        raise ValueError(f"{server} response: routed_experts: {reason}") from None
    if routes.dtype.kind not in "iu" or routes.ndim != 3 or routes.shape[1:] != sizes:
        expected = f"integers [tokens, {sizes[0]}, {sizes[1]}] in routed_experts"
        raise _refusal(server, expected, f"{routes.dtype} {list(routes.shape)}")
    if routes.size and routes.min() < 0:
        raise _refusal(server, "0 or more in routed_experts", routes.min())
    return replace(sample, routed_experts=routes)


def _mask_of(server: str, sampling_mask: Any, num_tokens: int) -> Ragged:
    """Return a list for each token, or an object with all ids and their offsets, as a `Ragged`."""
    if hasattr(sampling_mask, "offsets"):
        sampling_mask = Ragged(sampling_mask.offsets, sampling_mask.token_ids)
    try:
        mask = flattened(sampling_mask)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"{server} response: offsets of sampling_mask: {error}") from error
    if len(mask.cu) != num_tokens + 1:
        expected = f"{num_tokens} rows, one for each of token_ids in sampling_mask"
        raise _refusal(server, expected, len(mask.cu) - 1)
    return mask


@cache
def _decoders() -> dict[str, Callable[[bytes], Any]]:
    """Return the parsers of responses; parts that they do not name are skipped."""
    require("msgspec")
    import msgspec

    def struct(*fields: Any, **options: Any) -> Any:
        # gc=False: no cycle can go through these, so the collector need not walk thousands of them
        return msgspec.defstruct("Part", fields, gc=False, **options)

    def array(kind: Any) -> Any:
        return GenericAlias(list, (kind,))

    prompt = ("prompt_token_ids", list[int] | None, None)
    span = struct(("version", str), ("start", int), ("end", int))
    spans = ("weight_versions", array(span) | None, None)
    entry = struct(("logprob", float))
    logprobs = struct(
        ("content", array(entry) | None, None), ("token_logprobs", list[float] | None, None)
    )
    ragged = struct(("token_ids", list[int]), ("offsets", list[int]))
    mask = ("sampling_mask", array(list[int]) | ragged | None, None)
    routes = ("routed_experts", str | None, None)
    choice = struct(
        ("token_ids", list[int]),
        ("finish_reason", str),
        ("logprobs", logprobs),
        prompt,
        spans,
        mask,
        routes,
    )
    pair = struct(("logprob", float), ("token_id", int), array_like=True)
    finish = struct(("type", str), ("matched", int | str | list[int] | None, None))
    meta = struct(
        ("finish_reason", finish),
        ("output_token_logprobs", array(pair)),
        ("weight_version", str | None, None),
        spans,
        routes,
    )
    shapes = {
        "vLLM": struct(("choices", array(choice)), prompt),
        "SGLang": struct(("output_ids", list[int]), ("meta_info", meta), prompt),
    }
    return {server: msgspec.json.Decoder(shape).decode for server, shape in shapes.items()}


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
    _masks: list[Ragged] = field(default_factory=list)
    _routes: npt.NDArray[np.integer[Any]] | None = None

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
        self._check_fields(response)
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
        if num_new and response.sampling_mask is not None:
            self._masks.append(response.sampling_mask)
        if response.routed_experts is not None:
            self._routes = response.routed_experts
        self.finish_reason = reason

    def _check_fields(self, response: EngineResponse) -> None:
        num_new, routes = len(response.output_ids), response.routed_experts
        has_mask = response.sampling_mask is not None
        if num_new and self.num_tokens and has_mask != bool(self._masks):
            raise ValueError("only some of the tokens have a sampling mask")
        num_run = len(self.token_ids) + num_new - 1
        if routes is not None and len(routes) != num_run:
            raise ValueError(
                f"expected routed_experts of {num_run} tokens, all but the last, got {len(routes)}"
            )

    def to_output(self) -> GenerationOutput:
        """Return the reply."""
        is_one = len(self._ids) == 1  # whose arrays need no copy
        fields: dict[str, Any] = {}
        if self._masks:
            fields["sampling_mask"] = concatenated(self._masks)
        if self._routes is not None:
            name, size = f"episode {self.qid!r}", len(self.token_ids)
            fields["routed_experts"] = routes_of_all(name, self._routes, size)
        return GenerationOutput(
            qid=self.qid,
            prompt_ids=self.prompt,
            output_ids=self._ids[0] if is_one else np.concatenate(self._ids),
            output_logprobs=self._logprobs[0] if is_one else np.concatenate(self._logprobs),
            no_eos=self.finish_reason != "stop",
            version_start=self.spans[0].version,
            version_end=self.spans[-1].version,
            version_spans=tuple(self.spans) if len(self.spans) > 1 else None,
            fields=fields or None,
            stop_reason="stop" if self.finish_reason == "stop" else "length",
        )
