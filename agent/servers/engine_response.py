"""Responses of servers as checked arrays."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trajpack.agent.servers.options import MissingLogprobs
from trajpack.packing.conversion import INT32_MAX, as_ids, as_logprobs
from trajpack.packing.optional import require
from trajpack.packing.ragged import Ragged, flattened
from trajpack.packing.text import one_line

_PLACEHOLDER_LOGPROB = -9999.0
"""Value that vLLM writes for a log-probability that it did not compute."""
_MAX_LOGPROB = 0.01
"""Upper bound of a log-probability: 0, and some rounding."""
_NAN = re.compile(rb"(?<=[\[:,\s])NaN(?=[\],}\s])")
WeightVersions: TypeAlias = tuple[tuple[str, int, int], ...]
"""``(version, start, end)`` for each span of the completion."""


@dataclass(frozen=True)
class ResponseLimits:
    """What a response may hold.

    Attributes:
        max_tokens: Number of completion tokens: as many as the request asked for.
        vocab_size: Upper bound (exclusive) of token ids.
        max_bytes: Length of the body in bytes.
        routed_experts: Layers with experts, and experts of a token, of the routes that the response
            must have; ``None`` leaves routes out.
        stop: Texts that the request named to stop at.
    """

    max_tokens: int
    vocab_size: int = INT32_MAX + 1
    max_bytes: int = 64 * 2**20
    routed_experts: tuple[int, int] | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class EngineResponse:
    """One sample of a server, as checked arrays.

    Attributes:
        prompt_ids: int32 [prompt tokens] as the server saw them; None if it does not repeat them.
        output_ids: int32 [completion tokens], stop token included.
        output_logprobs: float32 [completion tokens], natural log, finite; 0 where it is missing.
        logprob_missing: bool [completion tokens]: the server gave no log-probability.
        finish_reason: ``"stop"``, ``"length"``, ``"abort"`` or another word of the server.
        weight_versions: Spans as the server named them; None if it does not report any.
        sampling_mask: int32 ids that each token was sampled from; None if they are not reported.
        routed_experts: Integers [prompt and completion tokens - 1, layers, experts of a token]: the
            last token was not run. None if they were not asked for, or nothing was sampled.
    """

    prompt_ids: npt.NDArray[np.int32] | None
    output_ids: npt.NDArray[np.int32]
    output_logprobs: npt.NDArray[np.float32]
    logprob_missing: npt.NDArray[np.bool_]
    finish_reason: str
    weight_versions: WeightVersions | None
    sampling_mask: Ragged | None
    routed_experts: npt.NDArray[np.integer[Any]] | None


def read_vllm_response(
    body: bytes, limits: ResponseLimits, *, missing_logprobs: MissingLogprobs = "zero"
) -> EngineResponse:
    """Read the JSON of ``/inference/v1/generate``, ``/v1/completions`` or ``/v1/chat/completions``.

    The request must have asked for one sample (``n`` 1), for the log-probability of the sampled
    token (``"logprobs": 0``; ``true`` for chat) and, except on ``generate``, for
    ``"return_token_ids": true``. It must not stream, and not ``echo`` the prompt.

    Args:
        body: Body of the response, UTF-8.
        limits: Limits that the caller accepts.
        missing_logprobs: As in `ServerOptions`: a log-probability that is null, NaN or -9999 is
            missing, and becomes 0 unless this is ``"refuse"``.

    Raises:
        ValueError: If the body is not JSON, has other parts or lengths, exceeds a limit, or has
            log-probabilities of other tokens, above 0 or not finite as float32. The message names
            the part, what was expected and what came.
        ModuleNotFoundError: If msgspec (``trajpack[servers]`` or ``trajpack[json]``) is missing.

    Source: responses recorded from vLLM 0.32.

    Example:
        >>> body = b'''{"choices": [{"token_ids": [5, 7], "finish_reason": "stop",
        ...     "logprobs": {"content": [{"logprob": -0.5}, {"logprob": null}]}}]}'''
        >>> response = read_vllm_response(body, ResponseLimits(max_tokens=16, vocab_size=100))
        >>> response.output_ids, response.output_logprobs
        (array([5, 7], dtype=int32), array([-0.5,  0. ], dtype=float32))
    """
    reader = _Reader("vLLM", limits, missing_logprobs)
    response = reader.parsed(body)
    if len(response.choices) != 1:
        raise reader.refusal("one sample in choices", len(response.choices))
    (choice,) = response.choices
    given = choice.logprobs
    if given.content is not None:
        logprobs = [entry.logprob for entry in given.content]
        ids = ((entry.token_id, entry.token) for entry in given.content)
        beside = [_token(text) if token is None else token for token, text in ids]
    elif given.token_logprobs is not None:
        logprobs = given.token_logprobs
        beside = [_token(token) for token in given.tokens or ()]
    else:
        raise reader.refusal("content or token_logprobs in logprobs", "neither")
    prompt = choice.prompt_token_ids
    prompt = response.prompt_token_ids if prompt is None else prompt
    arrays = reader.arrays(choice.token_ids, logprobs, beside)
    return reader.response(choice, arrays, choice.finish_reason, prompt)


def read_sglang_response(
    body: bytes, limits: ResponseLimits, *, missing_logprobs: MissingLogprobs = "zero"
) -> EngineResponse:
    """Read the JSON of SGLang's ``/generate``.

    The request must have asked for one sample and for ``"return_logprob": true``; it must not
    stream. If the response names one version without spans, it is that of all tokens.

    Arguments and errors are those of `read_vllm_response`. A stop token that matched must be the
    last one, and a text must be one of ``limits.stop``: SGLang reports NaN in this way.

    Source: the published types of SGLang 0.5.23, and its page "Return Routed Experts".

    Example:
        >>> body = b'''{"output_ids": [5, 7], "meta_info": {"finish_reason": {"type": "length"},
        ...     "weight_version": "3", "output_token_logprobs": [[-0.5, 5, null], [-2, 7, "b"]]}}'''
        >>> response = read_sglang_response(body, ResponseLimits(max_tokens=16, vocab_size=100))
        >>> response.output_ids, response.finish_reason, response.weight_versions
        (array([5, 7], dtype=int32), 'length', (('3', 0, 2),))
    """
    reader = _Reader("SGLang", limits, missing_logprobs)
    response = reader.parsed(body)
    meta, ids = response.meta_info, response.output_ids
    finish = meta.finish_reason
    matched = finish.matched if finish.type == "stop" else None
    if isinstance(matched, str):
        if matched not in limits.stop:  # "NaN happened" has a stop token that was not sampled
            raise reader.refusal("a text of the request in matched", f"{matched!a:.80}")
    elif matched is not None:
        stops = [matched] if isinstance(matched, int) else matched
        if not ids or ids[-1] not in stops:
            expected = f"one of the stop tokens {stops[:8]} at the end in output_ids"
            raise reader.refusal(expected, ids[-1] if ids else "no token")
    pairs = meta.output_token_logprobs
    arrays = reader.arrays(ids, [pair.logprob for pair in pairs], [pair.token_id for pair in pairs])
    return reader.response(meta, arrays, finish.type, response.prompt_token_ids)


def _token(text: str) -> int | None:
    """Return the token that vLLM names in place of its text; None if it is a text."""
    digits = text.removeprefix("token_id:")
    return int(digits) if digits != text and digits.isdecimal() else None


_Arrays: TypeAlias = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.bool_]]
"""Ids, log-probabilities, and whether these are missing."""


@dataclass(frozen=True)
class _Reader:
    """Checks of the parts of one response."""

    server: str
    limits: ResponseLimits
    missing_logprobs: MissingLogprobs

    def refusal(self, expected: str, got: object) -> ValueError:
        return ValueError(f"{self.server} response: expected {expected}, got {got}")

    def parsed(self, body: bytes) -> Any:
        """Return the body as the type of the server's responses."""
        require("msgspec")
        import msgspec

        from trajpack.agent.servers.response_types import DECODERS

        if len(body) > self.limits.max_bytes:
            raise self.refusal(f"at most {self.limits.max_bytes} bytes in body", len(body))
        try:
            body = _NAN.sub(b"null", body) if b"NaN" in body else body
            return DECODERS[self.server].decode(body)
        except msgspec.ValidationError as error:  # the body may be a message of the server
            text, start = str(error), one_line(body[:400].decode(errors="replace"))
            text = f"{text[:1].lower()}{text[1:]}, in {start}"
            raise ValueError(f"{self.server} response: {text}") from None
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"{self.server} response: expected JSON, but {error}") from None

    def arrays(
        self, token_ids: list[int], logprobs: Sequence[float | None], beside: list[int | None]
    ) -> _Arrays:
        """Return checked arrays; ``beside`` has the tokens of the log-probabilities, if known."""
        num_tokens = len(token_ids)
        if num_tokens > self.limits.max_tokens:
            raise self.refusal(f"at most {self.limits.max_tokens} tokens in token_ids", num_tokens)
        if len(logprobs) != num_tokens:
            expected = f"{num_tokens} log-probabilities, one for each of token_ids in logprobs"
            raise self.refusal(expected, len(logprobs))
        pairs = zip(token_ids, beside, strict=False) if beside != token_ids else ()
        for index, (token, other) in enumerate(pairs):
            if other not in (token, None):
                raise self.refusal(f"the token {token} at index {index} in logprobs", other)
        wide = np.array([math.nan if value is None else value for value in logprobs], np.float64)
        is_missing = np.isnan(wide) | (wide == _PLACEHOLDER_LOGPROB)
        if is_missing.any() and self.missing_logprobs == "refuse":
            index = int(is_missing.argmax())
            raise self.refusal(f"a log-probability at index {index} in logprobs", logprobs[index])
        values = as_logprobs(f"{self.server} response: logprobs", np.where(is_missing, 0, wide))
        if num_tokens and values.max() > _MAX_LOGPROB:
            got = f"{values.max()} at index {values.argmax()}"
            raise self.refusal("0 or less in logprobs", got)
        return self._ids("token_ids", token_ids), values, is_missing

    def response(
        self, part: Any, arrays: _Arrays, finish_reason: str, prompt: list[int] | None
    ) -> EngineResponse:
        """Return the sample; ``part`` has its versions, its mask and its routes."""
        spans, versions = part.weight_versions, None
        if spans is not None:
            versions = tuple((span.version, span.start, span.end) for span in spans)
        elif getattr(part, "weight_version", None) is not None:
            versions = ((part.weight_version, 0, len(arrays[0])),)
        encoded = part.routed_experts
        # the rest of an aborted completion brings the routes of all tokens
        has_routes = len(arrays[0]) and (encoded is not None or finish_reason != "abort")
        return EngineResponse(
            None if prompt is None else self._ids("prompt_token_ids", prompt),
            *arrays,
            finish_reason=finish_reason,
            weight_versions=versions,
            sampling_mask=self._mask(part.sampling_mask, arrays[0]),
            routed_experts=self._routes(encoded) if has_routes else None,
        )

    def _ids(self, name: str, values: Any) -> npt.NDArray[np.int32]:
        ids = as_ids(f"{self.server} response: {name}", values)
        if ids.size and ids.max() >= self.limits.vocab_size:
            got = f"{ids.max()} at index {ids.argmax()}"
            raise self.refusal(f"ids below {self.limits.vocab_size} in {name}", got)
        return ids

    def _mask(self, given: Any, ids: npt.NDArray[np.int32]) -> Ragged | None:
        """Return a list for each token, or an object with all ids and their offsets, as arrays."""
        if given is None:
            return None
        try:
            is_flat = hasattr(given, "offsets")
            mask = flattened(Ragged(given.offsets, given.token_ids) if is_flat else given)
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{self.server} response: sampling_mask: {error}") from error
        counts, values = np.diff(mask.cu), self._ids("sampling_mask", mask.values)
        if len(counts) != len(ids):
            expected = f"{len(ids)} rows, one for each of token_ids in sampling_mask"
            raise self.refusal(expected, len(counts))
        return Ragged(mask.cu, values)

    def _routes(self, encoded: str | None) -> npt.NDArray[np.integer[Any]] | None:
        """Return the routes, if asked for: base64 of a ``.npy`` file or of plain int32."""
        if (sizes := self.limits.routed_experts) is None:
            return None
        if encoded is None:
            expected = "routed_experts: start the server with --enable-return-routed-experts"
            raise self.refusal(expected, "none")
        try:
            raw = base64.b64decode(encoded, validate=True)
            if raw.startswith(np.lib.format.MAGIC_PREFIX):
                routes: npt.NDArray[Any] = np.load(io.BytesIO(raw), allow_pickle=False)
            else:
                routes = np.frombuffer(raw, "<i4").reshape(-1, *sizes)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{self.server} response: routed_experts: {error}") from None
        if routes.dtype.kind not in "iu" or routes.ndim != 3 or routes.shape[1:] != sizes:
            expected = f"integers [tokens, {sizes[0]}, {sizes[1]}] in routed_experts"
            raise self.refusal(expected, f"{routes.dtype} {list(routes.shape)}")
        return routes
