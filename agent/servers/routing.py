"""Choice of a server for each request, and removal of failing servers from rotation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from trajpack.agent.errors import SetupError
from trajpack.agent.servers.client import (
    ExchangeError,
    MalformedError,
    RefusedError,
    RetryableError,
    ServerClient,
    quote_body,
)
from trajpack.agent.servers.options import RetryLimits, TimeLimits
from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)
_MAX_DOUBLINGS = 4


_MOST_HOMES = 1 << 16
"""Episodes whose servers are remembered."""


class OutageError(Exception):
    """No server was healthy within the time limit."""


@dataclass(eq=False)
class Server:
    """State of one server."""

    client: ServerClient
    """HTTP client of the server."""
    label: str = "a server"
    """Place in the list of servers, for logs, which must not have its address."""
    num_in_flight: int = 0
    """Number of requests in flight."""
    num_episodes: int = 0
    """Number of open episodes whose prefix is in its cache."""
    is_healthy: bool = False
    """Whether the server is in rotation."""
    is_behind: bool = False
    """Whether its weights are not the engine's; cleared by the next weight update."""
    is_paused: bool = False
    """Whether a pause may still be in effect."""
    told_version: int | None = None
    """Version that it last acknowledged; None if it has no such endpoint."""
    num_failures: int = 0
    """Number of consecutive failures."""
    endpoint: str | None = None
    """Detected endpoint, for servers with several."""
    model: str | None = None
    """Name of its model, for servers whose requests need it."""
    last_error: str = "not asked yet"
    """Reason why it is not healthy, without its address."""
    is_fatal: bool = False
    """Whether its last error would repeat: a refusal or a malformed response."""
    was_probed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after the first handshake, successful or not."""

    @property
    def name(self) -> str:
        """Host and port."""
        return self.client.name

    def restart_error(self, told: int, version: str) -> RetryableError:
        """Mark a server that does not know the version that it acknowledged: it was restarted."""
        self.is_behind = True
        said = f"told of version {told}, it says: {quote_body(version)}"
        reason = f"{said}: it seems to have been started anew; an update helps"
        return RetryableError(reason, self.name, is_connection=True)


class Router:
    """Assigns each episode to a server, and to another one if that fails.

    A new episode goes to the healthy server with the fewest requests in flight, then the fewest
    episodes, and stays there for its prefix cache. A failing server leaves the rotation, is probed
    after a pause, and returns once it is healthy.

    Args:
        servers: Servers to choose from.
        handshake: Probes and prepares a server; raises if it is not healthy.
        retries: Pause before a probe, and number of failures before it.
        time_limits: Time limits of waiting for a healthy server.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        handshake: Callable[[Server], Awaitable[None]],
        retries: RetryLimits,
        *,
        time_limits: TimeLimits,
    ) -> None:
        self.servers = tuple(servers)
        self._handshake = handshake
        self._retries = retries
        self._time_limits = time_limits
        self._homes: dict[str, Server] = {}
        self._healthy = asyncio.Event()
        self._probes: dict[Server, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Probe every server, and wait until one is healthy.

        Raises:
            SetupError: If none is in time, or all errors are fatal.
        """
        for server in self.servers:
            self._start_probe(server, wait_s=0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._time_limits.start_s):
                for server in self.servers:
                    await server.was_probed.wait()
                if not all(server.is_fatal for server in self.servers):
                    await self._healthy.wait()
        if not self._healthy.is_set():
            is_fatal = all(server.is_fatal for server in self.servers)
            when = "" if is_fatal else f" after {self._time_limits.start_s:g} s"
            raise SetupError(f"no server is healthy{when}: {self.health_note()}")

    async def stop(self) -> None:
        """Cancel all probes."""
        tasks = list(self._probes.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def health_note(self) -> str:
        """Return the name and the last error of each server."""
        return "; ".join(f"{server.name}: {server.last_error}" for server in self.servers)

    @contextlib.asynccontextmanager
    async def lease(self, qid: str, avoided: Server | None = None) -> AsyncIterator[Server]:
        """Choose the server of a request of ``qid``, and count the request while it lasts.

        Args:
            qid: Name of the episode.
            avoided: Chosen only if no other is healthy, or the episode is assigned to it.

        Raises:
            OutageError: If no server is healthy within ``outage_s``.
        """
        server = self._homes.get(qid)
        if server is None or not server.is_healthy:
            await self._wait_for_health()
            server = min(
                (server for server in self.servers if server.is_healthy),
                key=lambda server: (server is avoided, server.num_in_flight, server.num_episodes),
            )
            self.forget(qid)
            self._homes[qid] = server
            if len(self._homes) > _MOST_HOMES:
                self.forget(next(iter(self._homes)))
            server.num_episodes += 1
            _logger.debug("episode %s goes to %s", one_line(qid), one_line(server.label))
        server.num_in_flight += 1
        try:
            yield server
        finally:
            server.num_in_flight -= 1

    def forget(self, qid: str) -> None:
        """Remove the assignment of an episode."""
        home = self._homes.pop(qid, None)
        if home is not None:
            home.num_episodes -= 1

    def report_failure(self, server: Server, error: ExchangeError) -> None:
        """Count a failure; take the server out of rotation after a lost connection or several."""
        if not server.is_healthy:
            return  # the end of a server fails all of its requests, and counts once
        server.num_failures += 1
        too_many = server.num_failures - self._retries.max_failures
        if too_many >= 0:
            wait_s = self._retries.rest_s * 2 ** min(too_many, _MAX_DOUBLINGS)
            self.mark_unhealthy(server, str(error), wait_s)
        elif isinstance(error, RetryableError) and error.is_connection:
            self.mark_unhealthy(server, str(error))  # and probe it at once

    def mark_unhealthy(self, server: Server, reason: str, wait_s: float = 0) -> None:
        """Take ``server`` out of rotation; probe it after ``wait_s``."""
        server.last_error = reason
        if server.is_healthy:
            server.is_healthy = False
            _logger.warning("%s is out of rotation: %s", one_line(server.label), one_line(reason))
        if not any(server.is_healthy for server in self.servers):
            self._healthy.clear()
        self._start_probe(server, wait_s)

    async def _wait_for_health(self) -> None:
        seconds = self._time_limits.outage_s
        try:
            async with asyncio.timeout(seconds):
                while not any(server.is_healthy for server in self.servers):
                    await self._healthy.wait()
        except TimeoutError:
            reason = f"no server was healthy for {seconds:g} s: {self.health_note()}"
            raise OutageError(reason) from None

    def _start_probe(self, server: Server, wait_s: float) -> None:
        running = self._probes.get(server)
        if running is None or running.done():
            self._probes[server] = asyncio.create_task(self._probe(server, wait_s))

    async def _probe(self, server: Server, wait_s: float) -> None:
        """Repeat the handshake, with growing pauses, until the server is healthy."""
        next_s = self._retries.rest_s
        while not server.is_healthy:
            await asyncio.sleep(wait_s)
            wait_s, next_s = next_s, min(2 * next_s, 2**_MAX_DOUBLINGS * self._retries.rest_s)
            try:
                await self._handshake(server)
                if server.is_behind:
                    raise RetryableError("a weight update failed there during the handshake")
            except Exception as error:  # noqa: BLE001 - any error concerns this server alone
                if server.last_error != str(error):
                    _logger.warning(
                        "%s is not healthy: %s", one_line(server.label), one_line(error)
                    )
                server.last_error = str(error)
                server.is_fatal = isinstance(error, (RefusedError, MalformedError))
            else:
                server.is_fatal = False
                server.is_healthy = True
                self._healthy.set()
            server.was_probed.set()
