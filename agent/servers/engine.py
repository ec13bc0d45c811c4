"""Generation by HTTP servers: one completion with its retries and resumptions."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Self

from trajpack.agent.engines.serving import End, ServedEngine
from trajpack.agent.engines.transformers_batching import Limits, read_prompt, read_sampling
from trajpack.agent.errors import (
    MalformedResponseError,
    RequestRefusedError,
    ServerUnavailableError,
)
from trajpack.agent.protocols import GenerationOutput, GenerationRequest, SamplingParams
from trajpack.agent.seeding import derive_seed
from trajpack.agent.servers.client import (
    Address,
    ExchangeError,
    HTTPRequest,
    MalformedError,
    OutdatedError,
    RefusedError,
    RetryableError,
)
from trajpack.agent.servers.completion import Completion
from trajpack.agent.servers.control import Control, Episode, Orders, Server, is_number
from trajpack.agent.servers.engine_response import EngineResponse, ResponseLimits
from trajpack.agent.servers.options import DEFAULT_OPTIONS, LogprobSemantics, ServerOptions
from trajpack.packing.conversion import INT32_MAX
from trajpack.packing.optional import require
from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)
_THREAD_BYTES = 128 * 1024
"""Size from which a body is parsed in a thread, so that the event loop serves others meanwhile."""
_MAX_REASON = 700
"""Characters of an error's text."""


class ServerEngine(ServedEngine):
    """Generates with inference servers; use `SGLangEngine` or `VLLMEngine`.

    Use it as an asynchronous context manager. The third item of a request is a `SamplingParams` or
    any object with ``max_new_tokens`` and, optionally, others of its attributes and ``greedy``.

    Args:
        urls: Addresses of the servers. A user and a password in one are sent as such, and shown
            nowhere.
        options: Limits, retries, the token.
        version: Policy version of the servers' weights.

    Raises:
        ValueError: If there is no address, or one is not the address of a server.
    """

    _orders: ClassVar[Orders]
    _read: ClassVar[Callable[..., EngineResponse]]
    _default_logprobs: ClassVar[LogprobSemantics]
    _filters_are_processed: ClassVar[bool]
    """Whether "processed" log-probabilities are those after top-k and top-p."""

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        options: ServerOptions = DEFAULT_OPTIONS,
        version: int = 0,
    ) -> None:
        super().__init__()
        given = [urls] if isinstance(urls, str) else list(urls)
        if not given:
            raise ValueError("urls: expected the address of one server at least, got none")
        require("aiohttp", "msgspec", "stamina")
        self._addresses = [Address.parse(url) for url in given]
        if len({address.url for address in self._addresses}) < len(given):
            raise ValueError("urls: one server is named twice")
        if not 0 <= version <= INT32_MAX:
            raise ValueError(f"version must be in [0, {INT32_MAX}], got {version}")
        self._options = options
        self._version = version
        self._control: Control | None = None
        self._has_warned = False
        self._deadlines: set[asyncio.Timeout] = set()
        self._is_idle = asyncio.Event()

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

    def _falls_back(self, server: Server, error: RefusedError) -> bool:
        """Switch a server that refused to another endpoint, if there is one."""
        return False

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self._control.version if self._control else self._version

    async def set_version(self, version: int) -> None:
        """Declare that the servers have new weights, and tell those with an endpoint for it.

        Call it after other means than this engine brought the weights there. A server that fails
        gets no requests until the next update reaches it.

        Raises:
            ValueError: If the version is below the present one.
            WeightUpdateError: If every server failed; the version stays as it was.
            RuntimeError: If the engine is not running.
        """
        request = self._orders.set_version(version)
        await self._running("set_version").update(request, version, is_label_only=True)

    async def pause(self, *, interrupt: bool = False) -> None:
        """Pause generation on the servers, and send no new requests.

        Args:
            interrupt: End requests in flight. After `resume` they continue from their last token,
                with the weights of that time. Otherwise they stand still and keep their cache.

        Raises:
            WeightUpdateError: If a server in use did not pause; all are resumed.
            RuntimeError: If the engine is not running.
        """
        await self._running("pause").pause(interrupt=interrupt)

    async def resume(self) -> None:
        """Resume generation and requests.

        Raises:
            WeightUpdateError: If a server in use did not resume; it gets no requests until it is
                healthy.
            RuntimeError: If the engine is not running.
        """
        await self._running("resume").resume()

    def _running(self, name: str) -> Control:
        if self._control is None or self._loop is None or self._end is not None:
            raise RuntimeError(f"{name}: the engine is not running")
        return self._control

    async def __aenter__(self) -> Self:
        if self._control is not None or self._end is not None:
            raise RuntimeError(f"a {type(self).__name__} can be entered once")
        self._control = Control(self._addresses, self._orders, self._options, self._version)
        try:
            await self._control.start()
        except BaseException:
            await self._close(End("the engine could not be started"))
            raise
        self._begin_serving()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._close(End("the engine was shut down", has_left=True))

    async def _close(self, end: End) -> None:
        assert self._control is not None
        self._end_serving(end)
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(0)
        try:
            while self._deadlines:
                self._is_idle.clear()
                await self._is_idle.wait()
        finally:
            await self._control.close()

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
        qid = request[0]
        self._check_request(qid)
        episode = self._running("generate").episode(qid)
        completion = self._read_request(GenerationRequest(*request), episode)
        limit_s = self._options.time_limits.generation_s
        deadline = asyncio.timeout(limit_s)
        self._deadlines.add(deadline)
        try:
            async with deadline:
                await self._fill(completion, episode)
        except TimeoutError:
            if self._end is not None:
                raise self._end.as_error(qid) from None
            reason = f"{completion.server}: no completion within {limit_s:g} s"
            raise ServerUnavailableError(qid, reason) from None
        except RefusedError as error:
            raise RequestRefusedError(qid, one_line(error, _MAX_REASON)) from None
        except MalformedError as error:
            raise MalformedResponseError(qid, one_line(error, _MAX_REASON)) from None
        except ExchangeError as error:
            raise ServerUnavailableError(qid, one_line(error, _MAX_REASON)) from None
        finally:
            self._deadlines.discard(deadline)
            if not self._deadlines:
                self._is_idle.set()
        return completion.to_output(marks_missing=self._options.missing_logprobs == "mark")

    def _read_request(self, request: GenerationRequest, episode: Episode) -> Completion:
        options = self._options
        limits = Limits(
            vocabulary_size=options.vocab_size or INT32_MAX + 1,
            capacity=INT32_MAX,
            max_positions=options.max_request_tokens,
        )
        try:
            params = read_sampling(request.sampling, limits)
            prompt = read_prompt(request.token_ids, params.max_new_tokens, limits)
            if not options.allow_other_logprobs:
                self._check_logprobs(params)
        except Exception as error:
            raise RequestRefusedError(request.qid, one_line(f"refused: {error}")) from error
        number = episode.num_requests
        episode.num_requests += 1
        return Completion(request.qid, number, prompt, params)

    def _check_logprobs(self, params: SamplingParams) -> None:
        """Raise if log-probabilities would not be those of the distribution sampled from."""
        is_raw = (self._options.logprobs or self._default_logprobs) == "raw"
        has_filter = params.temperature and (params.top_p < 1 or params.top_k > 0)
        if is_raw and params.temperature != 1:
            given, theirs = f"temperature {params.temperature:g}", "of temperature 1"
        elif has_filter and (is_raw or not self._filters_are_processed):
            given, theirs = f"top_p {params.top_p:g} and top_k {params.top_k}", "without these"
        else:
            return
        reason = f"{given}: the server's log-probabilities are those {theirs}"
        raise ValueError(f"{reason} (allow_other_logprobs sends it anyway)")

    async def _fill(self, completion: Completion, episode: Episode) -> None:
        """Ask for samples until the completion has an end."""
        retries = self._options.retries
        wait_s = 0.0
        while not completion.is_complete:
            await asyncio.sleep(wait_s)
            num_before = completion.num_tokens
            await self._extend(completion, episode)
            if completion.num_tokens > num_before:
                wait_s = 0.0
            else:  # interrupted at once: the servers may be about to change their weights
                wait_s = min(2 * wait_s or retries.wait_initial_s, retries.wait_max_s)

    async def _extend(self, completion: Completion, episode: Episode) -> None:
        """Append the sample of one request, sent again where that may help."""
        import stamina

        retries = self._options.retries
        attempts = stamina.retry_context(
            on=RetryableError,
            attempts=retries.max_attempts,
            timeout=None,
            wait_initial=retries.wait_initial_s,
            wait_max=retries.wait_max_s,
            wait_jitter=retries.wait_initial_s,
        )
        control = self._running("generate")
        avoided: Server | None = None
        async for attempt in attempts:
            with attempt:
                async with control.lease(episode, avoided) as server:
                    avoided = server
                    completion.server = server.name
                    try:
                        await self._sample(control, server, completion)
                    except ExchangeError as error:
                        if isinstance(error, RetryableError):
                            episode.server = None  # another server may succeed
                        # a wrong request and outdated weights are not the server's failure; every
                        # other error is, or the server that fails fastest would get all requests
                        is_innocent = isinstance(error, OutdatedError) or (
                            isinstance(error, RefusedError) and error.is_about_request
                        )
                        if not is_innocent:
                            control.report_failure(server, error)
                        raise
                    server.num_failures = 0

    async def _sample(self, control: Control, server: Server, completion: Completion) -> None:
        """Send the request for the missing tokens, parse the response and append its sample."""
        options, params = self._options, completion.remaining
        limits = ResponseLimits(
            max_tokens=params.max_new_tokens,
            vocab_size=options.vocab_size or INT32_MAX + 1,
            max_bytes=options.max_response_bytes,
            routed_experts=options.routed_experts,
            stop=params.stop,
        )
        seed = None
        if options.seed is not None:
            # a resumed request must not draw the same random numbers again
            resumed = (completion.num_tokens,) if completion.num_tokens else ()
            seed = derive_seed(options.seed, completion.qid, completion.number, *resumed)
        declared, acknowledged = control.version, server.told_version
        body = None
        while body is None:
            try:
                body = await control.client.send(
                    server.address,
                    self._write(server, completion.token_ids, params, seed),
                    max_bytes=limits.max_bytes,
                    timeout_s=options.time_limits.request_s,
                )
            except RefusedError as error:
                if not self._falls_back(server, error):
                    raise
        read = partial(self._read, body, limits, missing_logprobs=options.missing_logprobs)
        try:
            if len(body) < _THREAD_BYTES:
                response = read()
            else:
                response = await asyncio.get_running_loop().run_in_executor(None, read)
            for name, start, end in response.weight_versions or ():
                if start < end and not is_number(name):
                    server.check_version(acknowledged, name)
            completion.append(response, declared)
        except ValueError as error:
            raise MalformedError(f"{server.name}: this is no answer: {error}") from None
        num_missing = int(response.logprob_missing.sum())
        if num_missing and not self._has_warned:
            self._has_warned = True
            told = "no log-probability of %d of %d tokens: 0 is taken (missing_logprobs)"
            _logger.warning(told, num_missing, len(response.output_ids))
