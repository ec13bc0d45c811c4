"""From what an agent asked to the engine's reply: routing, retries, resumption."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from functools import partial

from trajpack.agent.errors import (
    GenerationError,
    MalformedResponseError,
    RequestRefusedError,
    ServerUnavailableError,
)
from trajpack.agent.protocols import GenerationOutput
from trajpack.agent.seeding import derive_seed
from trajpack.agent.servers.completion import Ask, BackwardsError, Completion, is_number
from trajpack.agent.servers.dialect import Dialect, Draw
from trajpack.agent.servers.engine_response import EngineResponse, ResponseLimits
from trajpack.agent.servers.failures import (
    ExchangeError,
    MalformedError,
    OutageError,
    OutdatedError,
    RefusedError,
    RetryableError,
    quoted,
)
from trajpack.agent.servers.logprob_semantics import mismatch
from trajpack.agent.servers.options import ServerOptions
from trajpack.agent.servers.routing import Router, Server
from trajpack.packing.conversion import INT32_MAX
from trajpack.packing.text import one_line

_THREAD_BYTES = 128 * 1024
"""Bodies from here on are read in a thread: the event loop has others to serve meanwhile."""
_BYTES_PER_TOKEN = 1024
_BYTES_BESIDE = 64 * 1024
_CANCEL_S = 2.0
_MAX_REASON = 700
"""Characters of the reason in a reply."""


class Requester:
    """Turns what agents ask into replies, by requests to servers.

    Args:
        router: Chooses the servers.
        dialect: How they are spoken to.
        options: Limits, retries and the seed.
    """

    def __init__(self, router: Router, dialect: Dialect, options: ServerOptions) -> None:
        self.version = 0
        """What the engine declares its weights to be."""
        self.gate = asyncio.Event()
        """No request begins while it is not set."""
        self.gate.set()
        self._router = router
        self._dialect = dialect
        self._options = options
        self._cancellations: set[asyncio.Task[None]] = set()

    async def generate(self, ask: Ask) -> GenerationOutput:
        """Return the completion that was asked for.

        Raises:
            GenerationError: Of the kind that says why there is none.
        """
        limit_s = self._options.time_limits.generation_s
        completion = Completion(ask)
        try:
            async with asyncio.timeout(limit_s):
                return await self._complete(completion)
        except TimeoutError:
            error = ExchangeError(f"no completion within {limit_s:g} s", completion.server)
            raise _as_reply(ask.qid, error) from None
        except OutageError as error:
            raise ServerUnavailableError(ask.qid, one_line(error, _MAX_REASON)) from None
        except ExchangeError as error:
            raise _as_reply(ask.qid, error) from None

    async def finish(self) -> None:
        """Wait until servers have been told of what was cancelled, for a moment at most."""
        if self._cancellations:
            await asyncio.wait(self._cancellations, timeout=_CANCEL_S)
        for task in self._cancellations:
            task.cancel()
        await asyncio.gather(*self._cancellations, return_exceptions=True)

    async def _complete(self, completion: Completion) -> GenerationOutput:
        retries = self._options.retries
        num_idle = 0
        while not completion.is_complete:
            before = completion.num_tokens
            await self._extend(completion)
            num_idle = 0 if completion.num_tokens > before else num_idle + 1
            if num_idle > retries.max_idle_resumes:
                reason = f"interrupted {num_idle} times in a row without a new token"
                raise RetryableError(reason, completion.server)
            if num_idle:
                # a server that is about to change its weights takes a moment
                pause_s = retries.wait_initial_s * 2 ** min(num_idle - 1, 16)
                await asyncio.sleep(min(pause_s, retries.wait_max_s))
        return completion.to_output()

    async def _extend(self, completion: Completion) -> None:
        """Ask servers until one of them has answered."""
        import stamina

        retries = self._options.retries
        attempts = stamina.retry_context(
            on=self._pause_before_retry,
            attempts=retries.max_attempts,
            timeout=None,
            wait_initial=retries.wait_initial_s,
            wait_max=retries.wait_max_s,
            wait_jitter=retries.wait_initial_s,
        )
        avoided: Server | None = None
        async for attempt in attempts:
            with attempt:
                async with self._turn(completion.ask.qid, avoided) as server:
                    avoided = server
                    await self._ask(server, completion)

    @contextlib.asynccontextmanager
    async def _turn(self, qid: str, avoided: Server | None) -> AsyncIterator[Server]:
        """Wait until a request may be sent, and hold its place on a server while it lasts."""
        while True:
            await self.gate.wait()
            async with self._router.lease(qid, avoided) as server, server.client.slots:
                # while it waited for its place a pause may have begun, or the server have died
                if self.gate.is_set() and server.is_healthy:
                    yield server
                    return

    def _pause_before_retry(self, error: Exception) -> bool | float:
        """Return whether to try again, or after how many seconds."""
        if not isinstance(error, RetryableError):
            return False
        if error.wait_s is None:
            return True
        retries = self._options.retries
        # all that were sent away together must not come back together
        return min(error.wait_s, retries.wait_max_s) + random.uniform(0, retries.wait_initial_s)

    async def _ask(self, server: Server, completion: Completion) -> None:
        self._admit(server, completion.ask)
        completion.server = server.name
        declared, told = self.version, server.told_version
        limits = self._limits(completion)
        try:
            body = await self._exchange(server, self._draw(server, completion), limits)
            try:
                response = await self._read(body, limits)
                if told is not None:
                    self._check_told(server, told, response)
                completion.add(response, declared)
            except BackwardsError as error:
                raise OutdatedError(str(error), server.name) from None
            except ValueError as error:
                said = server.client.worded("this is no answer", str(error), body)
                raise MalformedError(said, server.name) from None
        except ExchangeError as error:
            self._note(server, completion.ask.qid, error)
            raise
        self._router.succeeded(server)

    def _note(self, server: Server, qid: str, error: ExchangeError) -> None:
        """Keep in mind that a server failed."""
        if isinstance(error, RetryableError):
            # where it fares worse than others, its cache of the prefix is worth little
            self._router.forget(qid)
        # outdated weights are news from another server; what is wrong with one request is not
        # the server's fault. All else is, be it only that its fast refusals attract everybody
        is_innocent = isinstance(error, RefusedError) and error.is_about_request
        if not is_innocent and not isinstance(error, OutdatedError):
            self._router.failed(server, error)

    def _admit(self, server: Server, ask: Ask) -> None:
        """Refuse a request whose log-probabilities would not be those of what was sampled."""
        amiss = mismatch(
            ask.params,
            server.logprobs,
            filters_are_processed=self._dialect.filters_are_processed,
        )
        if amiss is not None and not self._options.allow_other_logprobs:
            raise RequestRefusedError(ask.qid, f"{amiss} (allow_other_logprobs sends it anyway)")

    def _check_told(self, server: Server, told: int, response: EngineResponse) -> None:
        """Notice a server that has forgotten what it was told: it was started anew."""
        names = [name for name, start, end in response.weight_versions or () if start < end]
        odd = [name for name in names if not is_number(name)]
        if odd:
            server.is_behind = True
            said = server.client.worded(f"told of version {told}, it says", quoted(odd[0]), b"")
            said = f"{said}: it seems to have been started anew"
            raise RetryableError(said, server.name, is_connection=True)

    def _draw(self, server: Server, completion: Completion) -> Draw:
        return Draw(
            server.client.new_request_id(),
            completion.token_ids,
            completion.remaining,
            completion.ask.stop_token_ids,
            self._seed(completion),
        )

    async def _exchange(self, server: Server, draw: Draw, limits: ResponseLimits) -> bytes:
        try:
            return await self._send(server, draw, limits.max_bytes)
        except RefusedError as error:
            if not self._dialect.turn_to_other(server, error.status):
                raise
        return await self._send(server, draw, limits.max_bytes)

    async def _read(self, body: bytes, limits: ResponseLimits) -> EngineResponse:
        read = partial(self._dialect.read, body, limits)
        if len(body) < _THREAD_BYTES:
            return read()
        return await asyncio.get_running_loop().run_in_executor(None, read)

    async def _send(self, server: Server, draw: Draw, max_bytes: int) -> bytes:
        try:
            return await server.client.exchange(
                self._dialect.draw(server, draw),
                max_bytes=max_bytes,
                timeout_s=self._options.time_limits.request_s,
            )
        except (asyncio.CancelledError, RetryableError, MalformedError) as error:
            is_answered = isinstance(error, RetryableError) and not (
                error.is_connection or error.is_slow
            )
            if not is_answered:
                self._cancel(server, draw.request_id)
            raise

    def _seed(self, completion: Completion) -> int | None:
        if self._options.seed is None:
            return None
        ask = completion.ask
        # a resumed request must not draw the same random numbers again
        resumed = (completion.num_tokens,) if completion.num_tokens else ()
        return derive_seed(self._options.seed, ask.qid, ask.number, *resumed)

    def _limits(self, completion: Completion) -> ResponseLimits:
        max_tokens = completion.remaining.max_new_tokens
        # a server may repeat the prompt: 11 digits and a comma at most
        num_bytes = _BYTES_BESIDE + _BYTES_PER_TOKEN * max_tokens + 12 * len(completion.token_ids)
        return ResponseLimits(
            max_tokens=max_tokens,
            vocab_size=self._options.vocab_size or INT32_MAX + 1,
            max_bytes=min(num_bytes, self._options.max_response_bytes),
        )

    def _cancel(self, server: Server, request_id: str) -> None:
        """Tell a server that nobody waits for an answer any more."""
        order = self._dialect.cancel(server, request_id)
        if order is None:
            return

        async def tell() -> None:
            # it may know no such endpoint, or be gone, and the request with it
            with contextlib.suppress(ExchangeError):
                await server.client.exchange(order, max_bytes=_BYTES_BESIDE, timeout_s=_CANCEL_S)

        task = asyncio.get_running_loop().create_task(tell())
        self._cancellations.add(task)
        task.add_done_callback(self._cancellations.discard)


def _as_reply(qid: str, error: ExchangeError) -> GenerationError:
    """Return the reply to a request that failed for good."""
    kinds = {MalformedError: MalformedResponseError, RefusedError: RequestRefusedError}
    kind = kinds.get(type(error), ServerUnavailableError)
    return kind(qid, one_line(error.named, _MAX_REASON))


def unforeseen(qid: str, error: BaseException) -> GenerationError:
    """Return the reply to a request that failed in a way nobody thought of."""
    reply = GenerationError(qid, one_line(f"{type(error).__name__}: {error}", _MAX_REASON))
    reply.__cause__ = error
    return reply
