"""An engine's answer over HTTP, from the bytes of its body to checked arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trajpack.agent.protocols import GenerationOutput
from trajpack.agent.servers.responses import sglang as sglang_json, vllm as vllm_json
from trajpack.agent.servers.responses.json_parts import JsonParts, Sample
from trajpack.agent.servers.responses.sglang import read_sglang_sample
from trajpack.agent.servers.responses.vllm import read_sample
from trajpack.packing.conversion import INT32_MAX, as_ids, as_logprobs
from trajpack.packing.types import IntArray, VersionSpan

PLACEHOLDER_LOGPROB = -9999.0
"""What vLLM writes for a log-probability that it has not computed, or that is smaller still."""


@dataclass(frozen=True)
class ResponseLimits:
    """The most that a caller takes from an engine.

    Raises:
        ValueError: If one is below 1.
    """

    max_tokens: int
    """Completion tokens: what was asked for."""
    vocab_size: int = INT32_MAX + 1
    """Token ids are below it."""
    max_bytes: int = 64 * 2**20
    """Length of the body. ``/inference/v1/generate`` takes about 140 bytes a token. What is parsed
    may take 30 times as much memory, where a body is made to that end."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "vocab_size", "max_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, eq=False)
class EngineResponse:
    """One sample of an engine, as checked arrays."""

    prompt_ids: npt.NDArray[np.int32] | None
    """int32 [prompt tokens] that the engine saw, where the response repeats them."""
    output_ids: npt.NDArray[np.int32]
    """int32 [completion tokens], stop token included."""
    output_logprobs: npt.NDArray[np.float32]
    """float32 [completion tokens], natural log, each finite."""
    finish_reason: str
    """``"stop"``, ``"length"``, ``"abort"`` or whatever else the engine says."""
    weight_versions: tuple[tuple[str, int, int], ...] | None
    """``(version, start, end)`` as the engine named and counted them, where it reports them."""

    def to_output(
        self,
        qid: str,
        prompt_ids: IntArray,
        version_start: int,
        version_end: int,
        version_spans: Sequence[VersionSpan] | None = None,
    ) -> GenerationOutput:
        """Return the reply to episode ``qid``; its arrays are these, not copies.

        Args:
            qid: The episode.
            prompt_ids: What was sent. Prompt ids of the response itself come first.
            version_start: Policy version of the first sampled token.
            version_end: Policy version of the last sampled token.
            version_spans: Versions token by token, where they are known.
        """
        seen = prompt_ids if self.prompt_ids is None else self.prompt_ids
        return GenerationOutput(
            qid=qid,
            prompt_ids=seen,
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
    token (``"logprobs": 0``; ``true`` for chat) and, beyond ``generate``, for
    ``"return_token_ids": true``. It must not stream, and not ``echo`` the prompt.

    vLLM has two ways to say that it has no log-probability for a token: ``null``, and -9999.
    Both are refused, since training on either would be training on a number nobody computed.

    Args:
        body: The body as it came, UTF-8.
        limits: What the caller accepts. ``max_bytes`` is checked before anything is parsed.

    Raises:
        ValueError: If the body is longer than the limit, is no JSON, is an error of the engine,
            lacks a part, has a part of another type or length, an id outside
            ``[0, vocab_size)``, more than ``max_tokens`` ids, or a log-probability that is
            missing or not finite as float32. The message says where, what was expected and what
            came.

    Cost: one pass over the body on the calling thread, no copy of it with ``msgspec``; one
    Python number for each id and log-probability kept, all of them gone when it returns.
    A refused body is read twice.

    Source: responses recorded from vLLM 0.32.

    Example:
        >>> body = b'''{"choices": [{"token_ids": [5, 7], "finish_reason": "stop",
        ...     "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -2}]}}]}'''
        >>> response = read_vllm_response(body, ResponseLimits(max_tokens=16, vocab_size=100))
        >>> response.output_ids, response.output_logprobs
        (array([5, 7], dtype=int32), array([-0.5, -2. ], dtype=float32))
    """
    _check_length(body, limits, vllm_json.PARTS)
    return _checked(read_sample(body), limits, vllm_json.PARTS)


def read_sglang_response(body: bytes, limits: ResponseLimits) -> EngineResponse:
    """Read the JSON of SGLang's ``/generate``.

    The request must have asked for one sample and for ``"return_logprob": true``; it must not
    stream. The version of a server that names but one is that of all tokens.

    Args:
        body: The body as it came, UTF-8.
        limits: What the caller accepts. ``max_bytes`` is checked before anything is parsed.

    Raises:
        ValueError: As `read_vllm_response`, and if the ids beside the log-probabilities are not
            those of ``output_ids``, the stop token that matched is not the last of them, or what
            matched is a text: nobody asked for one, and SGLang says so that it got NaN.

    Cost: as `read_vllm_response`.

    Source: the published types of SGLang 0.5.23.

    Example:
        >>> body = b'''{"output_ids": [5, 7], "meta_info": {"finish_reason": {"type": "length"},
        ...     "weight_version": "3", "output_token_logprobs": [[-0.5, 5, null], [-2, 7, "b"]]}}'''
        >>> response = read_sglang_response(body, ResponseLimits(max_tokens=16, vocab_size=100))
        >>> response.output_ids, response.finish_reason, response.weight_versions
        (array([5, 7], dtype=int32), 'length', (('3', 0, 2),))
    """
    _check_length(body, limits, sglang_json.PARTS)
    return _checked(read_sglang_sample(body), limits, sglang_json.PARTS)


def _check_length(body: bytes, limits: ResponseLimits, parts: JsonParts) -> None:
    if len(body) > limits.max_bytes:
        raise parts.refusal("body", f"at most {limits.max_bytes} bytes", len(body))


def _checked(sample: Sample, limits: ResponseLimits, parts: JsonParts) -> EngineResponse:
    refusal = parts.refusal
    num_tokens = len(sample.output_ids)
    if num_tokens > limits.max_tokens:
        raise refusal("token_ids", f"at most {limits.max_tokens} tokens", num_tokens)
    if len(sample.output_logprobs) != num_tokens:
        expected = f"{num_tokens} log-probabilities, one for each of token_ids"
        raise refusal("logprobs", expected, len(sample.output_logprobs))
    logprobs = as_logprobs(f"{parts.server} response: logprobs", sample.output_logprobs)
    missing = np.flatnonzero(logprobs <= PLACEHOLDER_LOGPROB)
    if missing.size:
        expected = f"a log-probability above {PLACEHOLDER_LOGPROB:.0f} at index {missing[0]}"
        raise refusal("logprobs", expected, logprobs[missing[0]])
    prompt = sample.prompt_ids
    return EngineResponse(
        prompt_ids=None if prompt is None else _ids("prompt_token_ids", prompt, limits, parts),
        output_ids=_ids("token_ids", sample.output_ids, limits, parts),
        output_logprobs=logprobs,
        finish_reason=sample.finish_reason,
        weight_versions=sample.weight_versions,
    )


def _ids(
    name: str, values: list[int], limits: ResponseLimits, parts: JsonParts
) -> npt.NDArray[np.int32]:
    ids = as_ids(f"{parts.server} response: {name}", values)
    if ids.size and ids.max() >= limits.vocab_size:
        where = ids.argmax()
        raise parts.refusal(
            name, f"ids below {limits.vocab_size}", f"{ids[where]} at index {where}"
        )
    return ids
