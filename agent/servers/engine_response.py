"""Responses of servers as checked arrays."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trajpack.agent.protocols import SamplingParams
from trajpack.agent.servers.options import DEFAULT_OPTIONS, ServerOptions
from trajpack.packing.conversion import as_ids, as_logprobs
from trajpack.packing.optional import require
from trajpack.packing.ragged import Ragged, flattened
from trajpack.packing.text import one_line

Dialect: TypeAlias = Literal["vLLM", "SGLang"]
_PLACEHOLDER_LOGPROB = -9999.0
"""Value that vLLM writes for a log-probability that it did not compute."""
_MAX_LOGPROB = 0.01
"""Upper bound of a log-probability: 0, and some rounding."""
_NAN = re.compile(rb"(?<=[\[:,\s])NaN(?=[\],}\s])")


class EngineResponse(NamedTuple):
    """One sample of a server, as checked arrays.

    Attributes:
        output_ids: int32 [completion tokens], stop token included.
        output_logprobs: float32 [completion tokens], natural log, finite; 0 where it is missing.
        finish_reason: ``"stop"``, ``"length"`` or ``"abort"``.
        weight_versions: ``(version, start, end)`` for each span, as the server named them; one of
            the version ``""`` if it does not report any.
        fields: ``logprob_missing``, bool [completion tokens]; ``sampling_mask``, the ids that each
            token was sampled from, if reported; ``routed_experts``, integers [prompt and completion
            tokens - 1, layers, experts of a token], if asked for: the last token was not run.
    """

    output_ids: npt.NDArray[np.int32]
    output_logprobs: npt.NDArray[np.float32]
    finish_reason: str
    weight_versions: list[tuple[str, int, int]]
    fields: dict[str, Any]


class ResponseLimits(NamedTuple):
    """What a request asked for.

    Attributes:
        max_tokens: Number of completion tokens at most.
        stop: Texts that end the completion.
    """

    max_tokens: int
    stop: tuple[str, ...] = ()


def read_vllm_response(
    body: bytes, limits: ResponseLimits, options: ServerOptions = DEFAULT_OPTIONS
) -> EngineResponse:
    """Read a response of vLLM: `read_response` for a request that is known by its limits."""
    return read_response("vLLM", body, _sampling_of(limits), options=options)


def read_sglang_response(
    body: bytes, limits: ResponseLimits, options: ServerOptions = DEFAULT_OPTIONS
) -> EngineResponse:
    """Read a response of SGLang: `read_response` for a request that is known by its limits."""
    return read_response("SGLang", body, _sampling_of(limits), options=options)


def _sampling_of(limits: ResponseLimits) -> SamplingParams:
    return SamplingParams(limits.max_tokens, stop=limits.stop)


def read_response(
    dialect: Dialect,
    body: bytes,
    sampling: SamplingParams,
    *,
    options: ServerOptions = DEFAULT_OPTIONS,
    prompt: list[int] | None = None,
) -> EngineResponse:
    """Read vLLM's ``/inference/v1/generate`` or ``/v1/completions``, or SGLang's ``/generate``.

    The request must have asked for one sample, for the log-probability of the sampled token
    (``"logprobs": 0``, ``"return_logprob": true``) and, of ``completions``, for
    ``"return_token_ids": true``. It must not stream, and not ``echo`` the prompt.

    Args:
        dialect: Kind of the server.
        body: Body of the response, UTF-8.
        sampling: What the request asked for: its number of tokens, and its texts to stop at.
        options: Vocabulary, routes and treatment of missing log-probabilities.
        prompt: Token ids that were sent, which a response that repeats them must have; ``None``
            does not compare.

    Raises:
        ValueError: If the body is not JSON, has other parts or lengths, exceeds a limit, has
            log-probabilities of other tokens, above 0 or not finite as float32, or stopped at a
            token that is not the last one or a text that is not in ``sampling.stop``: SGLang
            reports NaN in this way. The message names the part, what was expected and what came.
        ModuleNotFoundError: If msgspec (``trajpack[servers]`` or ``trajpack[json]``) is missing.

    Source: responses recorded from vLLM 0.32; the published types of SGLang 0.5.23, and its page
    "Return Routed Experts".

    Example:
        >>> body = b'''{"choices": [{"token_ids": [5, 7], "finish_reason": "stop",
        ...     "logprobs": {"content": [{"logprob": -0.5}, {"logprob": null}]}}]}'''
        >>> response = read_response("vLLM", body, SamplingParams(16))
        >>> response.output_ids, response.output_logprobs
        (array([5, 7], dtype=int32), array([-0.5,  0. ], dtype=float32))
    """
    require("msgspec")
    import msgspec

    from trajpack.agent.servers.response_types import DECODERS

    try:
        decoded = DECODERS[dialect].decode(_NAN.sub(b"null", body) if b"NaN" in body else body)
        part, ids, logprobs, named, finish = decoded.parts(sampling)
        if finish not in ("stop", "length", "abort"):
            raise _refusal("stop, length or abort as finish reason", f"{finish!a:.80}")
        repeated = part.prompt_token_ids or decoded.prompt_token_ids
        if prompt is not None and repeated is not None:
            _check_same("prompt_token_ids", prompt, repeated)
        return _checked(sampling, options, part, ids, logprobs, named, finish)
    except msgspec.ValidationError as error:  # the body may be a message of the server
        reason = f"{error}, in {one_line(body[:400].decode(errors='replace'))}"
    except (msgspec.DecodeError, RecursionError) as error:
        reason = f"expected JSON, but {error}"
    except ValueError as error:
        reason = str(error)
    raise ValueError(f"{dialect} response: {reason}")


def _checked(
    sampling: SamplingParams,
    options: ServerOptions,
    part: Any,
    ids: list[int],
    logprobs: list[float | None],
    named: list[int | None],
    reason: str,
) -> EngineResponse:
    mask, routes, spans = part.sampling_mask, part.routed_experts, part.weight_versions
    if len(ids) > sampling.max_new_tokens:
        raise _refusal(f"at most {sampling.max_new_tokens} tokens in token_ids", len(ids))
    for name, rows in (("logprobs", logprobs), ("sampling_mask", mask)):
        if rows is not None and len(rows) != len(ids):
            raise _refusal(f"{len(ids)} rows, one for each of token_ids in {name}", len(rows))
    if named:
        _check_same("logprobs", ids, named)
    wide = np.array([math.nan if value is None else value for value in logprobs], np.float64)
    is_missing = np.isnan(wide) | (wide == _PLACEHOLDER_LOGPROB)
    if is_missing.any() and options.missing_logprobs == "refuse":
        index = int(is_missing.argmax())
        raise _refusal(f"a log-probability at index {index} in logprobs", logprobs[index])
    values = as_logprobs("logprobs", np.where(is_missing, 0, wide))
    if ids and values.max() > _MAX_LOGPROB:
        raise _refusal("0 or less in logprobs", f"{values.max()} at index {values.argmax()}")
    fields: dict[str, Any] = {"logprob_missing": is_missing}
    if mask is not None:
        cu, allowed = flattened(mask)
        fields["sampling_mask"] = Ragged(cu, _ids("sampling_mask", allowed, options))
    # the rest of an aborted completion brings the routes of all tokens
    if options.routed_experts is not None and ids and (routes is not None or reason != "abort"):
        fields["routed_experts"] = _routes(routes, options.routed_experts)
    versions = [("", 0, len(ids))]
    if spans is not None:
        versions = [(span.version, span.start, span.end) for span in spans]
    return EngineResponse(_ids("token_ids", ids, options), values, reason, versions, fields)


def _refusal(expected: str, got: object) -> ValueError:
    return ValueError(f"expected {expected}, got {got}")


def _check_same(name: str, ids: list[int], others: Sequence[int | None]) -> None:
    """Raise unless the others are these ids; None is not known."""
    if len(others) != len(ids):
        raise _refusal(f"{len(ids)} tokens in {name}", len(others))
    for index, (token, other) in enumerate(zip(ids, others, strict=True) if ids != others else ()):
        if other not in (token, None):
            raise _refusal(f"the token {token} at index {index} in {name}", other)


def _ids(name: str, values: list[int], options: ServerOptions) -> npt.NDArray[np.int32]:
    ids = as_ids(name, values)
    if options.vocab_size is not None and ids.size and ids.max() >= options.vocab_size:
        got = f"{ids.max()} at index {ids.argmax()}"
        raise _refusal(f"ids below {options.vocab_size} in {name}", got)
    return ids


def _routes(encoded: str | None, sizes: tuple[int, int]) -> npt.NDArray[np.integer[Any]]:
    """Return routes from base64 of a ``.npy`` file (vLLM) or of int32 (SGLang)."""
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
