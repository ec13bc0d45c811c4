"""Generation by HTTP servers: one completion with its retries and resumptions."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar

from trajpack.agent.engines.transformers_batching import Limits, read_prompt, read_sampling
from trajpack.agent.errors import (
    GenerationError,
    MalformedResponseError,
    RequestRefusedError,
    ServerUnavailableError,
)
from trajpack.agent.protocols import GenerationOutput, GenerationRequest, SamplingParams
from trajpack.agent.seeding import derive_seed
from trajpack.agent.servers.client import (
    ConnectionLostError,
    ExchangeError,
    HTTPRequest,
    MalformedError,
    RefusedError,
    RetryableError,
    Server,
)
from trajpack.agent.servers.completion import Completion, is_number
from trajpack.agent.servers.control import ServerFleet
from trajpack.agent.servers.engine_response import Dialect, read_response
from trajpack.agent.servers.options import LogprobSemantics
from trajpack.packing.conversion import INT32_MAX
from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)
MAX_EPISODES = 2**16
"""Episodes whose requests are counted: those that asked last."""
_THREAD_BYTES = 128 * 1024
"""Size from which a body is parsed in a thread, so that the event loop serves others meanwhile."""
_MAX_WAIT_S = 10.0
_MAX_REASON = 700
"""Characters of an error's text."""


class ServerEngine(ServerFleet):
    """Generates with inference servers; use `SGLangEngine` or `VLLMEngine`.

    Use it as an asynchronous context manager. The third item of a request is a `SamplingParams` or
    any object with ``max_new_tokens`` and, optionally, others of its attributes and ``greedy``.
    """

    _dialect: ClassVar[Dialect]
    _default_logprobs: ClassVar[LogprobSemantics]
    # whether "processed" log-probabilities are those after top-k and top-p
    _filters_are_processed: ClassVar[bool]
    _can_fall_back = False  # to another endpoint
    _has_warned = False

    @abstractmethod
    def _write(
        self, server: Server, token_ids: list[int], params: SamplingParams, seed: int | None
    ) -> HTTPRequest:
        """Return the request for a sample with the log-probability of each of its tokens."""

    @staticmethod
    def _sampling(params: SamplingParams, **others: Any) -> dict[str, Any]:
        """Return sampling parameters, neutral ones included: a server may fill in missing ones."""
        sampling = {"temperature": params.temperature, "top_p": params.top_p, "min_p": 0.0}
        sampling |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        ends = {"stop": params.stop, "stop_token_ids": params.stop_token_ids}
        others |= {name: value for name, value in ends.items() if value}
        return sampling | {name: value for name, value in others.items() if value is not None}

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Return one completion; a cancelled call ends its generation.

        An interrupted generation is resumed from its last token, until it has an end.

        Raises:
            RequestRefusedError: If the request is invalid, or refused by a server.
            ServerUnavailableError: If there is no response after all retries.
            MalformedResponseError: If the response is not a valid completion.
            EngineEndedError: If the engine was left.
            RuntimeError: If the engine has not been entered.
        """
        qid, token_ids, sampling = request
        async with self._answering(qid):
            try:
                prompt, params = self._read_request(token_ids, sampling)
            except Exception as error:
                raise RequestRefusedError(qid, one_line(f"refused: {error}")) from error
            number = self._num_requests.pop(qid, 0)
            self._num_requests[qid] = number + 1
            if len(self._num_requests) > MAX_EPISODES:
                del self._num_requests[next(iter(self._num_requests))]
            completion = Completion(qid, number, prompt, params)
            limit_s = self._options.time_limits.generation_s
            try:
                async with asyncio.timeout(limit_s):
                    while not completion.is_complete:
                        num_before = completion.num_tokens
                        await self._extend(completion)
                        if completion.num_tokens == num_before:
                            # interrupted at once: the servers may be about to change their weights
                            await asyncio.sleep(self._options.retries.wait_initial_s)
            except TimeoutError:
                reason = f"{completion.server}: no completion within {limit_s:g} s"
                raise ServerUnavailableError(qid, reason) from None
            except ExchangeError as error:
                kinds = {RefusedError: RequestRefusedError, MalformedError: MalformedResponseError}
                kind: type[GenerationError] = kinds.get(type(error), ServerUnavailableError)
                raise kind(qid, one_line(error, _MAX_REASON)) from None
            return completion.to_output(marks_missing=self._options.missing_logprobs == "mark")

    def _read_request(self, token_ids: Any, sampling: Any) -> tuple[list[int], SamplingParams]:
        """Check a request, also that log-probabilities are those of what is sampled from."""
        options = self._options
        limits = Limits(
            options.vocab_size or INT32_MAX + 1, options.max_request_tokens or INT32_MAX
        )
        params = read_sampling(sampling, limits)
        prompt = read_prompt(token_ids, params.max_new_tokens, limits)
        is_raw = (options.logprobs or self._default_logprobs) == "raw"
        has_filter = params.temperature and (params.top_p < 1 or params.top_k > 0)
        reason = None
        if is_raw and params.temperature != 1:
            reason = f"temperature {params.temperature:g}", "of temperature 1"
        elif has_filter and (is_raw or not self._filters_are_processed):
            reason = f"top_p {params.top_p:g} and top_k {params.top_k}", "without these"
        if reason is not None and not options.allow_other_logprobs:
            text = f"{reason[0]}: the server's log-probabilities are those {reason[1]}"
            raise ValueError(f"{text} (allow_other_logprobs sends it anyway)")
        return prompt, params

    async def _extend(self, completion: Completion) -> None:
        """Append the sample of one request, sent again where that may help."""
        import stamina

        retries = self._options.retries
        attempts = stamina.retry_context(
            on=RetryableError,
            attempts=retries.max_attempts,
            timeout=None,
            wait_initial=retries.wait_initial_s,
            wait_max=_MAX_WAIT_S,
            wait_jitter=retries.wait_initial_s,
        )
        avoided: Server | None = None
        async for attempt in attempts:
            with attempt:
                async with self._lease(avoided) as server:
                    avoided = server
                    completion.server = server.name
                    try:
                        await self._sample(server, completion)
                    except ExchangeError as error:
                        if not error.is_innocent:
                            self._count_failure(server, error)
                        raise
                    server.num_failures = 0

    async def _sample(self, server: Server, completion: Completion) -> None:
        """Send the request for the missing tokens, parse the response and append its sample."""
        options, params, seed = self._options, completion.remaining, self._options.seed
        if seed is not None:
            # a resumed request must not draw the same random numbers again
            resumed = (completion.num_tokens,) if completion.num_tokens else ()
            seed = derive_seed(seed, completion.qid, completion.number, *resumed)
        declared, acknowledged = self._version, server.told_version
        had_fallen_back = server.has_fallen_back
        request = self._write(server, completion.token_ids, params, seed)
        try:
            body = await self._send(server, request, options.time_limits.request_s)
        except RefusedError as error:
            if had_fallen_back or not (self._can_fall_back and error.is_absence):
                raise
            server.has_fallen_back = True
            return await self._sample(server, completion)
        try:
            known: dict[str, Any] = {"options": options, "prompt": completion.token_ids}
            read = partial(read_response, self._dialect, body, params, **known)
            response = read() if len(body) < _THREAD_BYTES else await asyncio.to_thread(read)
            names = [name for name, start, end in response.weight_versions if start < end]
            if acknowledged is not None and any(name and not is_number(name) for name in names):
                server.is_behind = True
                stale = f"{server.name}: told of version {acknowledged}, it names another"
                raise ConnectionLostError(f"{stale}: it seems to have been restarted")
            completion.append(response, declared)
        except ValueError as error:
            raise MalformedError(f"{server.name}: this is no answer: {error}") from None
        num_missing = int(response.fields["logprob_missing"].sum())
        if num_missing and not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "no log-probability of %d of %d tokens: 0 is taken (missing_logprobs)",
                num_missing,
                len(response.output_ids),
            )
