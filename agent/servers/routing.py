"""Which server an episode goes to, and what becomes of servers that fail."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from trajpack.agent.errors import SetupError
from trajpack.agent.servers.client import ServerClient
from trajpack.agent.servers.failures import (
    ExchangeError,
    MalformedError,
    OutageError,
    RefusedError,
    RetryableError,
)
from trajpack.agent.servers.options import LogprobSemantics, RetryLimits, TimeLimits
from trajpack.packing.text import one_line

_logger = logging.getLogger(__name__)
_MAX_DOUBLINGS = 4


@dataclass(eq=False)
class Server:
    """One server, and what is known of it."""

    client: ServerClient
    """How it is reached."""
    label: str = "a server"
    """What logs call it, for they must not say its address: its place in the list of them."""
    num_in_flight: int = 0
    """Requests that have been given to it and have not ended."""
    num_episodes: int = 0
    """Open episodes whose prefix it holds."""
    is_healthy: bool = False
    """Whether requests may go to it."""
    is_behind: bool = False
    """Whether its weights are not the engine's; it waits for the next update."""
    is_paused: bool = False
    """Whether it may have been told to pause, and not yet to go on."""
    told_version: int | None = None
    """The version that it was last told, where it listens to that."""
    num_failures: int = 0
    """Failures in a row."""
    logprobs: LogprobSemantics = "raw"
    """What its log-probabilities are."""
    endpoint: str | None = None
    """Which of several endpoints it answers on, once that is known."""
    model: str | None = None
    """The name of the model that it serves, where requests must say it."""
    last_error: str = "not asked yet"
    """Why it is not healthy, for a person to read; without its address."""
    is_hopeless: bool = False
    """Whether waiting for it would not help: it refused, or answered with what is no answer."""
    was_tried: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once its health has been asked for."""

    @property
    def name(self) -> str:
        """Host and port."""
        return self.client.name

    @property
    def ailment(self) -> str:
        """Its name, and why it is not healthy."""
        return f"{self.name}: {self.last_error}"


class Router:
    """Sends each episode to one server, and to another where that one fails.

    A new episode goes to the healthy server with the fewest requests in flight, then the fewest
    episodes, and stays there: its prefix is in that server's cache. A server that fails rests,
    is asked for its health after a while, and returns when it is well.

    Args:
        servers: To choose from.
        greet: Asks a server for its health and prepares it; raises where it is not well.
        retries: How long a server rests, and after how many failures.
        time_limits: How long a healthy one is waited for.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        greet: Callable[[Server], Awaitable[None]],
        retries: RetryLimits,
        time_limits: TimeLimits,
    ) -> None:
        self.servers = tuple(servers)
        self._greet = greet
        self._retries = retries
        self._time_limits = time_limits
        self._homes: dict[str, Server] = {}
        self._healthy = asyncio.Event()
        self._revivals: dict[Server, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Wait until every server was asked for its health, and one at least is well.

        Raises:
            SetupError: If none is in time, or none ever will be.
        """
        for server in self.servers:
            self._revive(server, wait_s=0)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._time_limits.start_s):
                for server in self.servers:
                    await server.was_tried.wait()
                if not all(server.is_hopeless for server in self.servers):
                    await self._healthy.wait()
        if not self._healthy.is_set():
            why = "; ".join(server.ailment for server in self.servers)
            is_over = all(server.is_hopeless for server in self.servers)
            when = "" if is_over else f" after {self._time_limits.start_s:g} s"
            raise SetupError(f"no server is healthy{when}: {why}")

    async def stop(self) -> None:
        """Ask for nobody's health any more."""
        tasks = list(self._revivals.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def lease(self, qid: str, avoided: Server | None = None) -> AsyncIterator[Server]:
        """Choose the server for a request of ``qid``, and count the request while it lasts.

        Args:
            qid: The episode.
            avoided: Chosen only where there is no other, or `qid` is there already.

        Raises:
            OutageError: If none is healthy for as long as may be waited.
        """
        server = self._homes.get(qid)
        if server is None or not server.is_healthy:
            await self._wait_for_health()
            server = min(
                (server for server in self.servers if server.is_healthy),
                key=lambda server: (
                    server is avoided,
                    server.num_in_flight,
                    server.num_episodes,
                ),
            )
            self.forget(qid)
            self._homes[qid] = server
            server.num_episodes += 1
            _logger.debug("episode %s goes to %s", one_line(qid), one_line(server.label))
        server.num_in_flight += 1
        try:
            yield server
        finally:
            server.num_in_flight -= 1

    def forget(self, qid: str) -> None:
        """Let an episode's next request, if there is one, go anywhere."""
        home = self._homes.pop(qid, None)
        if home is not None:
            home.num_episodes -= 1

    def succeeded(self, server: Server) -> None:
        """Note that ``server`` answered."""
        server.num_failures = 0

    def failed(self, server: Server, error: ExchangeError) -> None:
        """Note that ``server`` failed; let it rest if its connection did, or it does so often."""
        if not server.is_healthy:
            return  # one death fails all that is in flight, and counts once
        server.num_failures += 1
        too_many = server.num_failures - self._retries.max_failures
        if too_many >= 0:
            wait_s = self._retries.rest_s * 2 ** min(too_many, _MAX_DOUBLINGS)
            self.rest(server, str(error), wait_s)
        elif isinstance(error, RetryableError) and error.is_connection:
            # one lost connection may mean nothing: it is asked at once
            self.rest(server, str(error))

    def rest(self, server: Server, reason: str, wait_s: float = 0) -> None:
        """Send nothing to ``server`` until it is well again; ask it after ``wait_s``."""
        server.last_error = reason
        if server.is_healthy:
            server.is_healthy = False
            _logger.warning("%s rests: %s", one_line(server.label), one_line(reason))
        if not any(server.is_healthy for server in self.servers):
            self._healthy.clear()
        self._revive(server, wait_s)

    async def _wait_for_health(self) -> None:
        try:
            async with asyncio.timeout(self._time_limits.outage_s):
                while not any(server.is_healthy for server in self.servers):
                    await self._healthy.wait()
        except TimeoutError:
            why = "; ".join(server.ailment for server in self.servers)
            seconds = self._time_limits.outage_s
            raise OutageError(f"no server was healthy for {seconds:g} s: {why}") from None

    def _revive(self, server: Server, wait_s: float) -> None:
        running = self._revivals.get(server)
        if running is None or running.done():
            self._revivals[server] = asyncio.create_task(self._bring_back(server, wait_s))

    async def _bring_back(self, server: Server, wait_s: float) -> None:
        rest_s = self._retries.rest_s
        while not server.is_healthy:
            await asyncio.sleep(wait_s)
            wait_s, rest_s = rest_s, min(2 * rest_s, 2**_MAX_DOUBLINGS * self._retries.rest_s)
            try:
                await self._greet(server)
                if server.is_behind:
                    raise RetryableError("an update has passed it by while it was asked")
            except Exception as error:  # noqa: BLE001 - whatever ails a server, others go on
                if server.last_error != str(error):
                    _logger.warning("%s is not well: %s", one_line(server.label), one_line(error))
                server.last_error = str(error)
                server.is_hopeless = isinstance(error, (RefusedError, MalformedError))
            else:
                server.is_hopeless = False
                server.is_healthy = True
                self._healthy.set()
            server.was_tried.set()
