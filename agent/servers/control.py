"""Servers of one engine: choice for each request, health, weight updates and pauses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from trajpack.agent.engines.serving import End, ServedEngine
from trajpack.agent.errors import SetupError
from trajpack.agent.servers.client import (
    Address,
    Client,
    ConnectionLostError,
    ExchangeError,
    HTTPRequest,
    RetryableError,
)
from trajpack.agent.servers.options import DEFAULT_OPTIONS, ServerOptions
from trajpack.packing.conversion import INT32_MAX
from trajpack.packing.optional import require
from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)
_MAX_BYTES = 2**20
_HEALTH_S = 10.0
MAX_EPISODES = 2**16
"""Episodes that are remembered: those that asked last."""


class WeightUpdateError(RuntimeError):
    """Servers did not take new weights, a version, a pause or a resume; the message names them."""


class OutageError(ExchangeError):
    """No server was healthy within the time limit."""


@dataclass(frozen=True)
class Orders:
    """Administrative requests of one kind of server."""

    set_version: Callable[[int], HTTPRequest]
    get_version: HTTPRequest
    """Its answer has the name of the weights as ``weight_version``."""
    pause: Callable[[bool], HTTPRequest]
    """The argument says whether requests in flight end."""
    resume: HTTPRequest


@dataclass(eq=False)
class Server:
    """State of one server."""

    address: Address
    slots: asyncio.Semaphore
    """Held by requests for samples; administrative requests need none."""
    num_in_flight: int = 0
    num_failures: int = 0  # consecutive ones
    last_request: int = 0  # its number among the requests of all servers
    is_healthy: bool = False
    is_behind: bool = False
    """Whether its weights are not the engine's; cleared by the next weight update."""
    told_version: int | None = None
    """Version that it last acknowledged; None if it has no such endpoint."""
    has_fallen_back: bool = False  # it lacks the first of two endpoints for samples
    model: str | None = None
    error: str = "no answer yet"  # why it is not healthy

    @property
    def name(self) -> str:
        """Host and port."""
        return self.address.name

    def check_version(self, told: int | None, name: object) -> None:
        """Raise if a server that acknowledged a version names an older one: it was restarted."""
        if told is None or told != self.told_version or not isinstance(name, str):
            return
        if not (is_number(name) and int(name[:20]) >= told):
            self.is_behind = True
            said = f"{self.name}: told of version {told}, it says {one_line(name)!r}"
            raise ConnectionLostError(f"{said}: it seems to have been restarted; an update helps")


@dataclass
class Episode:
    """What is remembered of an episode."""

    server: Server | None = None
    """Server that has its prefix in its cache."""
    num_requests: int = 0


class ServerFleet(ServedEngine):
    """Servers that one engine uses: chooses them for requests, and administers them.

    A request goes to the server of its episode, which has the prefix in its cache, else to the
    healthy one with the fewest requests in flight. A failing server leaves the rotation, is probed,
    and returns once it is healthy.

    Args:
        urls: Addresses of the servers. A user and a password in one are sent as such, and shown
            nowhere.
        options: Limits, retries, the token.
        version: Policy version of the servers' weights.

    Raises:
        ValueError: If there is no address, or one is not the address of a server.
    """

    _orders: ClassVar[Orders]

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
        addresses = [Address.parse(url) for url in given]
        if len({address.url for address in addresses}) < len(given):
            raise ValueError("urls: one server is named twice")
        if not 0 <= version <= INT32_MAX:
            raise ValueError(f"version must be in [0, {INT32_MAX}], got {version}")
        slots = options.max_connections
        self._servers = [Server(address, asyncio.Semaphore(slots)) for address in addresses]
        self._client: Client | None = None
        self._options = options
        self._version = version
        self._episodes: dict[str, Episode] = {}
        self._numbers = itertools.count()
        self._has_paused = False
        self._gate = asyncio.Event()  # set while requests for samples may be sent
        self._gate.set()
        self._healthy = asyncio.Event()  # set while a server is healthy
        self._updating = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._deadlines: set[asyncio.Timeout] = set()  # of requests in flight
        self._is_idle = asyncio.Event()

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
        self._check_running("a weight update")
        async with self._updating:
            lowest = self._version if is_label_only else self._version + 1
            if not lowest <= version <= INT32_MAX:
                raise ValueError(f"version must be in [{lowest}, {INT32_MAX}], got {version}")
            failed = await self._order(self._servers, request)
            for server in self._servers:
                error = failed.get(server)
                if error is None or (is_label_only and error.is_absence):
                    server.is_behind = False
                    server.told_version = version if error is None else None
                    failed.pop(server, None)
            if len(failed) == len(self._servers):
                raise WeightUpdateError(f"version {version} reached no server: {_join(failed)}")
            self._version = version
            for server, error in failed.items():
                server.is_behind = True  # its tokens would be labelled newer than they are
                self._rest(server, error)

    async def pause(self, *, interrupt: bool = False) -> None:
        """Pause generation on the servers, and send no new requests.

        Args:
            interrupt: End requests in flight. After `resume` they continue from their last token,
                with the weights of that time. Otherwise they stand still and keep their cache.

        Raises:
            WeightUpdateError: If a server in use did not pause; all are resumed.
            RuntimeError: If the engine is not running.
        """
        self._check_running("pause")
        self._gate.clear()
        self._has_paused = True
        servers = [server for server in self._servers if server.is_healthy]
        if failed := await self._order(servers, self._orders.pause(interrupt)):
            with contextlib.suppress(WeightUpdateError):
                await self.resume()
            raise WeightUpdateError(f"no pause: {_join(failed)}")

    async def resume(self) -> None:
        """Resume generation and requests; a server that is not healthy resumes when it returns.

        Raises:
            WeightUpdateError: If a server in use did not resume.
            RuntimeError: If the engine is not running.
        """
        self._check_running("resume")
        servers = [server for server in self._servers if server.is_healthy]
        try:
            failed = await self._order(servers, self._orders.resume)
        finally:
            self._gate.set()
        for server, error in failed.items():
            if not error.is_absence:  # else it cannot have paused
                self._rest(server, error)
        if failed:
            raise WeightUpdateError(f"did not resume: {_join(failed)}")

    def _check_running(self, name: str) -> None:
        if self._loop is None or self._end is not None:
            raise RuntimeError(f"{name}: the engine is not running")

    async def __aenter__(self) -> Self:
        if self._client is not None:
            raise RuntimeError(f"a {type(self).__name__} can be entered once")
        self._client = Client(self._options)
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        self._begin_serving()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._end_serving(End("the engine was shut down", has_left=True))
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(0)
        if self._watching is not None:
            self._watching.cancel()
        try:
            while self._deadlines:
                self._is_idle.clear()
                await self._is_idle.wait()
        finally:
            if self._client is not None:
                await self._client.close()

    async def _start(self) -> None:
        """Greet every server, and wait until one is healthy."""
        limit_s = self._options.time_limits.start_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await asyncio.gather(*map(self._greet, self._servers))
        self._watching = asyncio.create_task(self._watch())
        try:
            await self._healthy_servers(limit_s)
        except OutageError as error:
            raise SetupError(str(error)) from None

    @contextlib.asynccontextmanager
    async def _lease(self, episode: Episode, avoided: Server | None) -> AsyncIterator[Server]:
        """Wait for a healthy server with a free slot, outside of pauses, and hold the slot."""
        while True:
            await self._gate.wait()
            server = episode.server
            if server is None or not server.is_healthy:
                healthy = await self._healthy_servers(self._options.time_limits.outage_s)
                order = {
                    one: (one is avoided, one.num_in_flight, one.last_request) for one in healthy
                }
                server = episode.server = min(healthy, key=order.__getitem__)
            server.num_in_flight += 1
            server.last_request = next(self._numbers)
            try:
                async with server.slots:
                    # a pause may have begun, or the server have failed, during the wait
                    if self._gate.is_set() and server.is_healthy:
                        yield server
                        return
            finally:
                server.num_in_flight -= 1

    def _report_failure(self, server: Server, error: ExchangeError) -> None:
        """Count a failure; take the server out of rotation after a lost connection or several."""
        if server.is_healthy:  # the end of a server fails all of its requests, and counts once
            server.num_failures += 1
            too_many = server.num_failures >= self._options.retries.max_failures
            if too_many or isinstance(error, ConnectionLostError):
                self._rest(server, error)

    def _rest(self, server: Server, error: ExchangeError) -> None:
        """Take a server out of rotation."""
        server.error = str(error)
        if server.is_healthy:
            server.is_healthy = False
            _logger.warning("out of rotation: %s", one_line(error))
        if not any(server.is_healthy for server in self._servers):
            self._healthy.clear()

    async def _order(
        self, servers: Sequence[Server], request: HTTPRequest
    ) -> dict[Server, ExchangeError]:
        """Send a request to servers at once, and return the failures."""
        control_s = self._options.time_limits.control_s
        sent = (self._send(server, request, control_s) for server in servers)
        outcomes = await asyncio.gather(*sent, return_exceptions=True)
        failed: dict[Server, ExchangeError] = {}
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ExchangeError):
                failed[server] = outcome
            elif isinstance(outcome, BaseException):
                raise outcome
            elif _part(outcome, "success") is False:
                said = one_line(outcome.decode(errors="replace"))
                failed[server] = ExchangeError(f"{server.name}: it said {said}")
        return failed

    async def _send(
        self, server: Server, request: HTTPRequest, timeout_s: float, max_bytes: int = _MAX_BYTES
    ) -> bytes:
        assert self._client is not None
        return await self._client.send(
            server.address, request, max_bytes=max_bytes, timeout_s=timeout_s
        )

    async def _healthy_servers(self, limit_s: float) -> list[Server]:
        """Wait until servers are healthy, and return them."""
        try:
            async with asyncio.timeout(limit_s):
                while not (healthy := [server for server in self._servers if server.is_healthy]):
                    await self._healthy.wait()
                return healthy
        except TimeoutError:
            errors = "; ".join(server.error for server in self._servers)
            raise OutageError(f"no server is healthy after {limit_s:g} s: {errors}") from None

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
                server.check_version(told, _part(answer, "weight_version"))
            models = await self._ask(server, HTTPRequest("/v1/models", method="GET"))
            model = _part(models, "data", 0, "id")
            server.model = model if isinstance(model, str) else None
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


def is_number(name: str) -> bool:
    """Return whether the name of a version is a decimal number: a policy version."""
    return name.isascii() and name.isdecimal()


def _part(body: bytes, *path: str | int) -> Any:
    """Return a part of a JSON body; None if it does not have that."""
    try:
        part = json.loads(body)
        for step in path:
            part = part[step]
    except (LookupError, TypeError, ValueError, RecursionError):
        return None
    return part


def _join(failures: dict[Server, ExchangeError]) -> str:
    return "; ".join(map(str, failures.values()))
