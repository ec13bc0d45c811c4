"""Responses of servers as checked arrays."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.options import DEFAULT_OPTIONS, ServerOptions
from trajpack.packing.conversion import as_ids, as_logprobs
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
    body: bytes, sampling: SamplingParams, options: ServerOptions = DEFAULT_OPTIONS
) -> EngineResponse:
    """Read the JSON of ``/inference/v1/generate`` or ``/v1/completions``.

    The request must have asked for one sample, for the log-probability of the sampled token
    (``"logprobs": 0``) and, of ``completions``, for ``"return_token_ids": true``. It must not
    stream, and not ``echo`` the prompt.

    Args:
        body: Body of the response, UTF-8.
        sampling: What the request asked for: its number of tokens, and its texts to stop at.
        options: Vocabulary, routes and treatment of missing log-probabilities.

    Raises:
        ValueError: If the body is not JSON, has other parts or lengths, exceeds a limit, or has
            log-probabilities of other tokens, above 0 or not finite as float32. The message names
            the part, what was expected and what came.
        ModuleNotFoundError: If msgspec (``trajpack[servers]`` or ``trajpack[json]``) is missing.

    Source: responses recorded from vLLM 0.32.

    Example:
        >>> body = b'''{"choices": [{"token_ids": [5, 7], "finish_reason": "stop",
        ...     "logprobs": {"content": [{"logprob": -0.5}, {"logprob": null}]}}]}'''
        >>> response = read_vllm_response(body, SamplingParams(16))
        >>> response.output_ids, response.output_logprobs
        (array([5, 7], dtype=int32), array([-0.5,  0. ], dtype=float32))
    """
    with _named("vLLM"):
        response = _decoded("vLLM", body)
        if len(response.choices) != 1:
            raise _refusal("one sample in choices", len(response.choices))
        (choice,) = response.choices
        entries, logprobs = choice.logprobs.content, choice.logprobs.token_logprobs
        if entries is None and logprobs is None:
            raise _refusal("content or token_logprobs in logprobs", "neither")
        beside = []
        if entries is not None:
            logprobs = [entry.logprob for entry in entries]
            beside = [entry.token_id for entry in entries]
        return _checked(
            sampling,
            options,
            part=choice,
            ids=choice.token_ids,
            prompt=choice.prompt_token_ids,
            logprobs=logprobs,
            beside=beside,
            finish_reason=choice.finish_reason,
        )


def read_sglang_response(
    body: bytes, sampling: SamplingParams, options: ServerOptions = DEFAULT_OPTIONS
) -> EngineResponse:
    """Read the JSON of SGLang's ``/generate``.

    The request must have asked for one sample and for ``"return_logprob": true``; it must not
    stream. If the response names one version without spans, it is that of all tokens. A stop token
    that matched must be the last one, and a text must be one of ``sampling.stop``: SGLang reports
    NaN in this way. Arguments and errors are those of `read_vllm_response`.

    Source: the published types of SGLang 0.5.23, and its page "Return Routed Experts".

    Example:
        >>> body = b'''{"output_ids": [5, 7], "meta_info": {"finish_reason": {"type": "length"},
        ...     "weight_version": "3", "output_token_logprobs": [[-0.5, 5, null], [-2, 7, "b"]]}}'''
        >>> response = read_sglang_response(body, SamplingParams(16))
        >>> response.output_ids, response.finish_reason, response.weight_versions
        (array([5, 7], dtype=int32), 'length', (('3', 0, 2),))
    """
    with _named("SGLang"):
        response = _decoded("SGLang", body)
        meta, ids = response.meta_info, response.output_ids
        finish, pairs = meta.finish_reason, meta.output_token_logprobs
        matched = finish.matched if finish.type == "stop" else None
        if isinstance(matched, str):
            if matched not in sampling.stop:  # "NaN happened"
                raise _refusal("a text of the request in matched", f"{matched!a:.80}")
        elif matched is not None:
            stops = [matched] if isinstance(matched, int) else matched
            if not ids or ids[-1] not in stops:
                expected = f"one of the stop tokens {stops[:8]} at the end in output_ids"
                raise _refusal(expected, ids[-1] if ids else "no token")
        return _checked(
            sampling,
            options,
            part=meta,
            ids=ids,
            prompt=response.prompt_token_ids,
            logprobs=[pair.logprob for pair in pairs],
            beside=[pair.token_id for pair in pairs],
            finish_reason=finish.type,
        )


def _refusal(expected: str, got: object) -> ValueError:
    return ValueError(f"expected {expected}, got {got}")


@contextmanager
def _named(server: str) -> Iterator[None]:
    """Begin the text of errors with the kind of server."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{server} response: {error}") from None


def _decoded(server: str, body: bytes) -> Any:
    """Return the body as the type of the server's responses."""
    require("msgspec")
    import msgspec

    from trajpack.agent.servers.response_types import DECODERS

    try:
        return DECODERS[server].decode(_NAN.sub(b"null", body) if b"NaN" in body else body)
    except msgspec.ValidationError as error:  # the body may be a message of the server
        text, start = str(error), one_line(body[:400].decode(errors="replace"))
        raise ValueError(f"{text[:1].lower()}{text[1:]}, in {start}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"expected JSON, but {error}") from None


def _checked(
    sampling: SamplingParams,
    options: ServerOptions,
    *,
    part: Any,
    ids: list[int],
    prompt: list[int] | None,
    logprobs: list[float | None],
    beside: list[int | None],
    finish_reason: str,
) -> EngineResponse:
    """Return checked arrays.

    ``beside`` has the tokens of the log-probabilities, if known; ``part`` the rest of the response.
    """
    if len(ids) > sampling.max_new_tokens:
        raise _refusal(f"at most {sampling.max_new_tokens} tokens in token_ids", len(ids))
    values, is_missing = _logprobs(ids, logprobs, beside, options)
    versions, mask = None, getattr(part, "sampling_mask", None)
    if part.weight_versions is not None:
        versions = tuple((span.version, span.start, span.end) for span in part.weight_versions)
    elif getattr(part, "weight_version", None) is not None:
        versions = ((part.weight_version, 0, len(ids)),)
    if mask is not None:
        cu, allowed = flattened(mask)
        if len(mask) != len(ids):
            expected = f"{len(ids)} rows, one for each of token_ids in sampling_mask"
            raise _refusal(expected, len(mask))
        mask = Ragged(cu, _ids("sampling_mask", allowed, options))
    encoded = part.routed_experts
    # the rest of an aborted completion brings the routes of all tokens
    has_routes = bool(ids) and (encoded is not None or finish_reason != "abort")
    return EngineResponse(
        None if prompt is None else _ids("prompt_token_ids", prompt, options),
        _ids("token_ids", ids, options),
        values,
        is_missing,
        finish_reason,
        versions,
        mask,
        _routes(encoded, options.routed_experts) if has_routes else None,
    )


def _logprobs(
    ids: list[int], logprobs: list[float | None], beside: list[int | None], options: ServerOptions
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Return log-probabilities, 0 where they are missing, and where that is."""
    if len(logprobs) != len(ids):
        expected = f"{len(ids)} log-probabilities, one for each of token_ids in logprobs"
        raise _refusal(expected, len(logprobs))
    pairs = zip(ids, beside, strict=False) if beside != ids else ()
    for index, (token, other) in enumerate(pairs):
        if other not in (token, None):
            raise _refusal(f"the token {token} at index {index} in logprobs", other)
    wide = np.array([math.nan if value is None else value for value in logprobs], np.float64)
    is_missing = np.isnan(wide) | (wide == _PLACEHOLDER_LOGPROB)
    if is_missing.any() and options.missing_logprobs == "refuse":
        index = int(is_missing.argmax())
        raise _refusal(f"a log-probability at index {index} in logprobs", logprobs[index])
    values = as_logprobs("logprobs", np.where(is_missing, 0, wide))
    if ids and values.max() > _MAX_LOGPROB:
        raise _refusal("0 or less in logprobs", f"{values.max()} at index {values.argmax()}")
    return values, is_missing


def _ids(name: str, values: list[int], options: ServerOptions) -> npt.NDArray[np.int32]:
    ids = as_ids(name, values)
    if options.vocab_size is not None and ids.size and ids.max() >= options.vocab_size:
        got = f"{ids.max()} at index {ids.argmax()}"
        raise _refusal(f"ids below {options.vocab_size} in {name}", got)
    return ids


def _routes(
    encoded: str | None, sizes: tuple[int, int] | None
) -> npt.NDArray[np.integer[Any]] | None:
    """Return the routes, if asked for: base64 of a ``.npy`` file (vLLM) or of int32 (SGLang)."""
    if sizes is None:
        return None
    if encoded is None:
        expected = "routed_experts: start the server with --enable-return-routed-experts"
        raise _refusal(expected, "none")
    try:
        raw = base64.b64decode(encoded, validate=True)
        if raw.startswith(np.lib.format.MAGIC_PREFIX):
            routes: npt.NDArray[Any] = np.load(io.BytesIO(raw), allow_pickle=False)
        else:
            routes = np.frombuffer(raw, "<i4").reshape(-1, *sizes)
    except (ValueError, EOFError) as error:
        raise ValueError(f"routed_experts: {error}") from None
    if routes.dtype.kind not in "iu" or routes.ndim != 3 or routes.shape[1:] != sizes:
        expected = f"integers [tokens, {sizes[0]}, {sizes[1]}] in routed_experts"
        raise _refusal(expected, f"{routes.dtype} {list(routes.shape)}")
    return routes
