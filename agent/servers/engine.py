"""Generation by HTTP servers: one completion with its routing, retries and resumptions."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TypeVar

from trajpack.agent.engines.serving import End, ServedEngine
from trajpack.agent.engines.transformers_batching import Limits, read_prompt, read_sampling
from trajpack.agent.errors import (
    GenerationError,
    MalformedResponseError,
    RequestRefusedError,
    ServerUnavailableError,
)
from trajpack.agent.protocols import GenerationOutput, GenerationRequest
from trajpack.agent.seeding import derive_seed
from trajpack.agent.servers.api import SampleRequest, ServerAPI, logprob_mismatch
from trajpack.agent.servers.client import (
    ExchangeError,
    MalformedError,
    RefusedError,
    RetryableError,
    ServerClient,
    ServerURL,
)
from trajpack.agent.servers.control import Control
from trajpack.agent.servers.engine_response import (
    BackwardsError,
    Completion,
    ResponseLimits,
    is_number,
)
from trajpack.agent.servers.options import ServerOptions
from trajpack.agent.servers.routing import OutageError, Server
from trajpack.packing.conversion import INT32_MAX
from trajpack.packing.optional import require
from trajpack.packing.text import one_line

_THREAD_BYTES = 128 * 1024
"""Size from which a body is parsed in a thread, so that the event loop serves others meanwhile."""
_BYTES_PER_TOKEN = 1024
_BYTES_BESIDE = 64 * 1024
_MOST_EPISODES = 1 << 16
"""Episodes whose requests are numbered."""
_ABORT_S = 2.0
_MAX_REASON = 700
"""Characters of an error's text."""
_Self = TypeVar("_Self", bound="ServerEngine")


class OutdatedError(RetryableError):
    """A server's weights are older than those of the completion's first tokens."""


class ServerEngine(ServedEngine):
    """Generates with inference servers; use `SGLangEngine` or `VLLMEngine`.

    Use it as an asynchronous context manager. The third item of a request is a `SamplingParams` or
    any object with ``max_new_tokens`` and, optionally, others of its attributes and ``greedy``.

    Args:
        urls: Addresses of the servers. A user and a password in one are sent as such, and shown
            nowhere.
        api: HTTP API of the servers.
        options: Limits, retries, the token.
        version: Policy version of the servers' weights.

    Raises:
        ValueError: If there is no address, or one is not the address of a server.
    """

    def __init__(
        self, urls: str | Sequence[str], api: ServerAPI, options: ServerOptions, *, version: int
    ) -> None:
        super().__init__()
        given = [urls] if isinstance(urls, str) else list(urls)
        if not given:
            raise ValueError("urls: expected the address of one server at least, got none")
        require("aiohttp", "msgspec", "stamina")
        self._urls = [ServerURL.parse(url) for url in given]
        if len({url.base for url in self._urls}) < len(self._urls):
            raise ValueError("urls: one server is named twice")
        if not 0 <= version <= INT32_MAX:
            raise ValueError(f"version must be in [0, {INT32_MAX}], got {version}")
        self._api = api
        self._options = options
        self._version = version
        self._control: Control | None = None
        self._num_requests: Counter[str] = Counter()
        self._in_flight: set[asyncio.Timeout] = set()
        self._none_in_flight = asyncio.Event()
        self._aborts: set[asyncio.Task[None]] = set()

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
        control = self._running("set_version")
        await control.update(self._api.set_version(version), version, is_label_only=True)

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

    async def __aenter__(self: _Self) -> _Self:
        if self._control is not None or self._end is not None:
            raise RuntimeError(f"a {type(self).__name__} can be entered once")
        servers = [
            Server(ServerClient(url, self._options), label=f"server {place} of {len(self._urls)}")
            for place, url in enumerate(self._urls, 1)
        ]
        self._control = Control(servers, self._api, self._options, version=self._version)
        try:
            await self._control.router.start()
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
        now = asyncio.get_running_loop().time()
        self._none_in_flight.clear()
        for deadline in self._in_flight:
            if not deadline.expired():
                deadline.reschedule(now)
        try:
            if self._in_flight:
                await self._none_in_flight.wait()
            await self._control.router.stop()
            if self._aborts:
                await asyncio.wait(self._aborts, timeout=_ABORT_S)
            for task in self._aborts:
                task.cancel()
            await asyncio.gather(*self._aborts, return_exceptions=True)
        finally:
            for server in self._control.router.servers:
                await server.client.close()

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Return one completion; a cancelled call aborts its generation.

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
        completion = self._read_request(GenerationRequest(*request))
        limit_s = self._options.time_limits.generation_s
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                self._in_flight.add(deadline)
                num_idle = 0
                while not completion.is_complete:
                    before = completion.num_tokens
                    await self._extend(completion)
                    num_idle = 0 if completion.num_tokens > before else num_idle + 1
                    await self._pause_if_idle(num_idle, completion.server)
                return completion.to_output()
        except TimeoutError:
            if self._end is not None:
                raise self._end.as_error(qid) from None
            error = ExchangeError(f"no completion within {limit_s:g} s", completion.server)
            raise _as_reply(qid, error) from None
        except OutageError as error:
            raise ServerUnavailableError(qid, one_line(error, _MAX_REASON)) from None
        except ExchangeError as error:
            raise _as_reply(qid, error) from None
        finally:
            self._in_flight.discard(deadline)
            if not self._in_flight:
                self._none_in_flight.set()

    def _read_request(self, request: GenerationRequest) -> Completion:
        qid, token_ids, sampling = request
        try:
            limits = Limits(
                vocabulary_size=self._options.vocab_size or INT32_MAX + 1,
                capacity=INT32_MAX,
                max_positions=self._options.max_request_tokens,
            )
            params = read_sampling(sampling, limits)
            prompt = read_prompt(token_ids, params.max_new_tokens, limits)
        except Exception as error:
            raise RequestRefusedError(qid, one_line(f"refused: {error}")) from error
        number = self._num_requests[qid]
        self._num_requests[qid] += 1
        if len(self._num_requests) > _MOST_EPISODES:
            del self._num_requests[next(iter(self._num_requests))]
        return Completion(qid, number, prompt, params)

    async def _pause_if_idle(self, num_idle: int, server: str | None) -> None:
        """Wait after a resumption without a token: a server may be about to change its weights."""
        retries = self._options.retries
        if num_idle > retries.max_idle_resumes:
            raise RetryableError(
                f"interrupted {num_idle} times in a row without a new token", server
            )
        if num_idle:
            pause_s = retries.wait_initial_s * 2 ** min(num_idle - 1, 16)
            await asyncio.sleep(min(pause_s, retries.wait_max_s))

    async def _extend(self, completion: Completion) -> None:
        """Append the sample of one request, sent again where that may help."""
        import stamina

        retries = self._options.retries
        attempts = stamina.retry_context(
            on=self._retry_delay,
            attempts=retries.max_attempts,
            timeout=None,
            wait_initial=retries.wait_initial_s,
            wait_max=retries.wait_max_s,
            wait_jitter=retries.wait_initial_s,
        )
        avoided: Server | None = None
        async for attempt in attempts:
            with attempt:
                async with self._slot(completion.qid, avoided) as server:
                    avoided = server
                    await self._sample(server, completion)

    def _retry_delay(self, error: Exception) -> bool | float:
        """Return whether to send a request again, or after how many seconds."""
        if not isinstance(error, RetryableError) or error.wait_s is None:
            return isinstance(error, RetryableError)
        retries = self._options.retries
        # random, so that requests that were refused together do not return together
        return min(error.wait_s, retries.wait_max_s) + random.uniform(0, retries.wait_initial_s)

    @contextlib.asynccontextmanager
    async def _slot(self, qid: str, avoided: Server | None) -> AsyncIterator[Server]:
        """Wait for a healthy server with a free slot, outside of pauses, and hold the slot."""
        control = self._running("generate")
        while True:
            await control.gate.wait()
            async with control.router.lease(qid, avoided) as server, server.client.slots:
                # a pause may have begun, or the server have failed, during the wait
                if control.gate.is_set() and server.is_healthy:
                    yield server
                    return

    async def _sample(self, server: Server, completion: Completion) -> None:
        """Send one request and append its sample; report a failure to the router."""
        control = self._running("generate")
        mismatch = logprob_mismatch(
            completion.params,
            self._options.logprobs or self._api.default_logprobs,
            filters_are_processed=self._api.filters_are_processed,
        )
        if mismatch is not None and not self._options.allow_other_logprobs:
            reason = f"{mismatch} (allow_other_logprobs sends it anyway)"
            raise RequestRefusedError(completion.qid, reason)
        completion.server = server.name
        try:
            await self._exchange(server, completion, control.version)
        except ExchangeError as error:
            if isinstance(error, RetryableError):
                control.router.forget(completion.qid)  # another server may succeed
            # a wrong request and outdated weights are not the server's failure; every other error
            # is, or the server that fails fastest would get all requests
            is_innocent = isinstance(error, OutdatedError) or (
                isinstance(error, RefusedError) and error.is_about_request
            )
            if not is_innocent:
                control.router.report_failure(server, error)
            raise
        server.num_failures = 0

    async def _exchange(self, server: Server, completion: Completion, declared: int) -> None:
        """Send the request for the missing tokens, parse the response and append its sample."""
        max_tokens = completion.remaining.max_new_tokens
        # a server may repeat the prompt: 11 digits and a comma per token at most
        per_token = _BYTES_PER_TOKEN + 12 * completion.params.top_k  # a sampling mask
        num_bytes = _BYTES_BESIDE + per_token * max_tokens + 12 * len(completion.token_ids)
        routes = self._options.routed_experts
        if routes is not None:  # base64 of int32
            num_bytes += 6 * math.prod(routes) * (len(completion.token_ids) + max_tokens)
        limits = ResponseLimits(
            max_tokens=max_tokens,
            vocab_size=self._options.vocab_size or INT32_MAX + 1,
            max_bytes=min(num_bytes, self._options.max_response_bytes),
            routed_experts=routes,
            stop=completion.params.stop,
        )
        told = server.told_version
        body = await self._send(server, completion, limits.max_bytes)
        read = partial(self._api.read_sample, body, limits)
        try:
            if len(body) < _THREAD_BYTES:
                response = read()
            else:
                response = await asyncio.get_running_loop().run_in_executor(None, read)
            for name, start, end in response.weight_versions or ():
                if told is not None and start < end and not is_number(name):
                    raise server.restart_error(told, name)
            completion.append(response, declared)
        except BackwardsError as error:
            raise OutdatedError(str(error), server.name) from None
        except ValueError as error:
            raise MalformedError(f"this is no answer: {error}", server.name) from None

    async def _send(self, server: Server, completion: Completion, max_bytes: int) -> bytes:
        """Send the request for the missing tokens; a failed one is aborted at the server."""
        seed = None
        if self._options.seed is not None:
            # a resumed request must not draw the same random numbers again
            resumed = (completion.num_tokens,) if completion.num_tokens else ()
            seed = derive_seed(self._options.seed, completion.qid, completion.number, *resumed)
        sample = SampleRequest(
            request_id=server.client.new_request_id(),
            token_ids=completion.token_ids,
            params=completion.remaining,
            seed=seed,
            wants_routes=self._options.routed_experts is not None,
        )
        timeout_s = self._options.time_limits.request_s
        while True:
            request = self._api.write_sample(server, sample)
            try:
                return await server.client.send(request, max_bytes=max_bytes, timeout_s=timeout_s)
            except RefusedError as error:
                if not self._api.use_fallback(server, error):
                    raise
            except (asyncio.CancelledError, RetryableError, MalformedError) as error:
                is_answered = isinstance(error, RetryableError) and not (
                    error.is_connection or error.is_slow
                )
                if not is_answered:
                    self._abort(server, sample.request_id)
                raise

    def _abort(self, server: Server, request_id: str) -> None:
        """Start a task that aborts a request at its server."""
        request = self._api.abort(server, request_id)
        if request is None:
            return

        async def send() -> None:
            # the server may lack the endpoint, or be gone with the request
            with contextlib.suppress(ExchangeError):
                await server.client.send(request, max_bytes=_BYTES_BESIDE, timeout_s=_ABORT_S)

        task = asyncio.get_running_loop().create_task(send())
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


def _as_reply(qid: str, error: ExchangeError) -> GenerationError:
    """Return the error of a request that failed after all retries."""
    kinds = {MalformedError: MalformedResponseError, RefusedError: RequestRefusedError}
    kind = kinds.get(type(error), ServerUnavailableError)
    return kind(qid, one_line(error.named, _MAX_REASON))
