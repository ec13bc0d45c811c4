"""Servers of one engine: choice for each request, health, weight updates and pauses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from trajpack.agent.engines.serving import ServedEngine
from trajpack.agent.errors import SetupError
from trajpack.agent.servers.client import (
    Client,
    ConnectionLostError,
    ExchangeError,
    HTTPRequest,
    RetryableError,
    Server,
)
from trajpack.agent.servers.options import DEFAULT_OPTIONS, ServerOptions
from trajpack.packing.conversion import INT32_MAX
from trajpack.packing.optional import require
from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)
_MAX_FAILURES = 3
"""Consecutive failures, other than of a connection, that take a server out of rotation."""
_HEALTH_S = 10.0


class WeightUpdateError(RuntimeError):
    """Servers did not take new weights, a version, a pause or a resume; the message names them."""


@dataclass(frozen=True)
class Orders:
    """Administrative requests of one kind of server."""

    set_version: Callable[[int], HTTPRequest]
    get_version: HTTPRequest  # its answer has the name of the weights as ``weight_version``
    pause: Callable[[bool], HTTPRequest]  # whether requests in flight end
    resume: HTTPRequest


class ServerFleet(ServedEngine):
    """Servers that one engine uses: chooses them for requests, and administers them."""

    _orders: ClassVar[Orders]

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        options: ServerOptions = DEFAULT_OPTIONS,
        version: int = 0,
    ) -> None:
        super().__init__()
        require("aiohttp", "msgspec", "stamina")
        addresses = [urls] if isinstance(urls, str) else list(urls)
        self._servers = [Server.parse(url, options.max_connections) for url in addresses]
        if not addresses:
            raise ValueError("urls: expected the address of one server at least, got none")
        if len({server.url for server in self._servers}) < len(addresses):
            raise ValueError("urls: one server is named twice")
        if not 0 <= version <= INT32_MAX:
            raise ValueError(f"version must be in [0, {INT32_MAX}], got {version}")
        self._client: Client | None = None
        self._options = options
        self._version = version
        self._num_requests: dict[str, int] = {}  # of each episode
        self._has_paused = False
        self._gate = asyncio.Event()  # set while requests for samples may be sent
        self._gate.set()
        self._healthy = asyncio.Event()  # set when a server has become healthy
        self._updating = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        """Version of the weights that sample now."""
        return self._version

    async def set_version(self, version: int) -> None:
        """Declare that the servers have new weights, and tell those with an endpoint for it.

        Call it after other means than this engine brought the weights there. A server that fails
        gets no requests until the next update reaches it.

        Raises:
            ValueError: If the version is below the present one.
            WeightUpdateError: If every server failed; the version stays as it was.
            RuntimeError: If the engine is not running.
        """
        await self._update(self._orders.set_version(version), version, is_label_only=True)

    async def _update(
        self, request: HTTPRequest, version: int, *, is_label_only: bool = False
    ) -> None:
        """Send new weights, or their version alone, to all servers, and declare that version."""
        self.check_serving()
        async with self._updating:
            lowest = self._version if is_label_only else self._version + 1
            if not lowest <= version <= INT32_MAX:
                raise ValueError(f"version must be in [{lowest}, {INT32_MAX}], got {version}")
            errors = await self._order(self._servers, request)
            failed = {
                server: error
                for server, error in errors.items()
                if not (is_label_only and error.is_absence)
            }
            if len(failed) == len(self._servers):
                raise _update_error(f"version {version} reached no server", failed)
            self._version = version
            for server in self._servers:
                server.is_behind = server in failed  # labels of its tokens would be too new
                server.told_version = None if server in errors else version
                if server in failed:
                    self._rest(server, failed[server])

    async def pause(self, *, interrupt: bool = False) -> None:
        """Pause generation on the servers, and send no new requests.

        Args:
            interrupt: End requests in flight. After `resume` they continue from their last token,
                with the weights of that time. Otherwise they stand still and keep their cache.

        Raises:
            WeightUpdateError: If a server in use did not pause; all are resumed.
            RuntimeError: If the engine is not running.
        """
        self.check_serving()
        self._gate.clear()
        self._has_paused = True
        if failed := await self._order(self._in_rotation(), self._orders.pause(interrupt)):
            with contextlib.suppress(WeightUpdateError):
                await self.resume()
            raise _update_error("no pause", failed)

    async def resume(self) -> None:
        """Resume generation and requests; a server that is not healthy resumes when it returns.

        Raises:
            WeightUpdateError: If a server in use did not resume.
            RuntimeError: If the engine is not running.
        """
        self.check_serving()
        try:
            failed = await self._order(self._in_rotation(), self._orders.resume)
        finally:
            self._gate.set()
        for server, error in failed.items():
            if not error.is_absence:  # else it cannot have paused
                self._rest(server, error)
        if failed:
            raise _update_error("did not resume", failed)

    async def __aenter__(self) -> Self:
        if self._client is not None:
            raise RuntimeError(f"a {type(self).__name__} can be entered once")
        self._client = Client(self._options)
        try:
            await asyncio.gather(*map(self._greet, self._servers))
            self._watching = asyncio.create_task(self._watch())
            await self._wait_for_health(self._options.time_limits.start_s)
        except BaseException as error:
            await self.__aexit__()
            if isinstance(error, ExchangeError):
                raise SetupError(str(error)) from None
            raise
        self._begin_serving()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._watching is not None:
            self._watching.cancel()
        try:
            await self._shut_down()
        finally:
            if self._client is not None:
                await self._client.close()

    @contextlib.asynccontextmanager
    async def _lease(self, avoided: Server | None) -> AsyncIterator[Server]:
        """Wait for a healthy server with a free slot, outside of pauses, and hold the slot.

        It is the one with the least load, another than ``avoided`` if there is any.
        """
        while True:
            await self._gate.wait()
            healthy = await self._wait_for_health(self._options.time_limits.outage_s)
            server = min(healthy, key=lambda server: (server is avoided, server.num_in_flight))
            server.num_in_flight += 1
            try:
                async with server.slots:
                    # a pause may have begun, or the server have failed, during the wait
                    if self._gate.is_set() and server.is_healthy:
                        yield server
                        return
            finally:
                server.num_in_flight -= 1

    def _count_failure(self, server: Server, error: ExchangeError) -> None:
        """Take the server out of rotation after a lost connection or several failures."""
        if server.is_healthy:  # the end of a server fails all of its requests, and counts once
            server.num_failures += 1
            if server.num_failures >= _MAX_FAILURES or isinstance(error, ConnectionLostError):
                self._rest(server, error)

    def _rest(self, server: Server, error: ExchangeError) -> None:
        """Take a server out of rotation."""
        server.error = str(error)
        if server.is_healthy:
            server.is_healthy = False
            _logger.warning("out of rotation: %s", one_line(error))

    async def _order(
        self, servers: Sequence[Server], request: HTTPRequest
    ) -> dict[Server, ExchangeError]:
        """Send a request to servers at once, and return the failures."""
        failed: dict[Server, ExchangeError] = {}

        async def order(server: Server) -> None:
            try:
                answer = await self._send(server, request, self._options.time_limits.request_s)
                if _part(answer, "success") is False:
                    text = one_line(answer.decode(errors="replace"))
                    raise ExchangeError(f"{server.name}: it said {text}")
            except ExchangeError as error:
                failed[server] = error

        await asyncio.gather(*map(order, servers))
        return failed

    async def _send(self, server: Server, request: HTTPRequest, timeout_s: float) -> bytes:
        assert self._client is not None
        return await self._client.send(server, request, timeout_s)

    def _in_rotation(self) -> list[Server]:
        return [server for server in self._servers if server.is_healthy]

    async def _wait_for_health(self, limit_s: float) -> list[Server]:
        """Wait until servers are healthy, and return them."""
        try:
            async with asyncio.timeout(limit_s):
                while not (healthy := self._in_rotation()):
                    self._healthy.clear()
                    await self._healthy.wait()
                return healthy
        except TimeoutError:
            errors = "; ".join(server.error for server in self._servers)
            raise ExchangeError(f"no server is healthy after {limit_s:g} s: {errors}") from None

    async def _watch(self) -> None:
        """Greet the servers that are out of rotation, again and again."""
        while True:
            await asyncio.sleep(self._options.retries.rest_s)
            resting = (server for server in self._servers if not server.is_healthy)
            await asyncio.gather(*map(self._greet, resting))

    async def _greet(self, server: Server) -> None:
        """Put a server into rotation that is well, has the engine's weights and has resumed."""
        try:
            await self._ask(server, HTTPRequest("/health", method="GET"))
            if (told := server.told_version) is not None:
                answer = await self._ask(server, self._orders.get_version)
                name = _part(answer, "weight_version")
                if told == server.told_version and name not in (None, str(told)):
                    server.is_behind = True  # it was started anew
            models = await self._ask(server, HTTPRequest("/v1/models", method="GET"))
            server.model = _part(models, "data", 0, "id")
            if self._has_paused and self._gate.is_set():
                await self._ask(server, self._orders.resume)
            if server.is_behind:
                reason = "its weights are not the engine's; an update helps"
                raise RetryableError(f"{server.name}: {reason}")
        except ExchangeError as error:
            if server.error != str(error):
                _logger.warning("not healthy: %s", one_line(error))
            server.error = str(error)
        else:
            server.is_healthy = True
            self._healthy.set()

    async def _ask(self, server: Server, request: HTTPRequest) -> bytes:
        """Return the body of the answer, empty if the server does not have the endpoint."""
        try:
            return await self._send(server, request, _HEALTH_S)
        except ExchangeError as error:
            if error.is_absence:
                return b""
            raise


def _part(body: bytes, *path: str | int) -> Any:
    """Return a part of a JSON body; None if it does not have that."""
    try:
        part = json.loads(body)
        for step in path:
            part = part[step]
    except (LookupError, TypeError, ValueError):
        return None
    return part


def _update_error(reason: str, failures: dict[Server, ExchangeError]) -> WeightUpdateError:
    return WeightUpdateError(f"{reason}: {'; '.join(map(str, failures.values()))}")
