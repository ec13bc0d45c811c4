"""Orders to servers as wholes: their health, their weights, their pauses."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from trajpack.agent.servers.client import Order
from trajpack.agent.servers.completion import is_number
from trajpack.agent.servers.dialect import Dialect, read_json
from trajpack.agent.servers.failures import (
    ExchangeError,
    RefusedError,
    RetryableError,
    WeightUpdateError,
    quoted,
)
from trajpack.agent.servers.logprob_semantics import detect_logprobs
from trajpack.agent.servers.options import ServerOptions
from trajpack.agent.servers.requesting import Requester
from trajpack.agent.servers.routing import Router, Server
from trajpack.packing.conversion import INT32_MAX

_ABSENT = frozenset((403, 404, 405, 501))
_MAX_BYTES = 2**20
_HEALTH_S = 10.0


class Control:
    """Gives orders to all servers of an engine at once.

    Args:
        router: Has the servers.
        dialect: How they are spoken to.
        options: Time limits, and what log-probabilities are said to be.
        requester: Is held up during a pause, and told of the version.
        version: Of the weights that the servers hold now.
    """

    def __init__(
        self,
        router: Router,
        dialect: Dialect,
        options: ServerOptions,
        requester: Requester,
        version: int,
    ) -> None:
        self._router = router
        self._dialect = dialect
        self._options = options
        self._requester = requester
        self._requester.version = version
        self._updating = asyncio.Lock()

    @property
    def version(self) -> int:
        """Version that is declared now."""
        return self._requester.version

    async def greet(self, server: Server) -> None:
        """Find out whether a server is well, and what must be known of it.

        Raises:
            RetryableError: If it is not well, or has other weights than the engine declares.
            RefusedError: If it does not let this client in.
            MalformedError: If it cannot be told what its log-probabilities are.
        """
        if server.is_behind:
            raise RetryableError("its weights are not the engine's; an update helps", server.name)
        if server.is_paused and self._requester.gate.is_set():
            await self._unpause(server)
        try:
            await self._order(server, Order("/health", method="GET"), _HEALTH_S)
        except RefusedError as error:
            if error.status not in _ABSENT - {403}:
                raise
        await self._check_version_told(server)
        server.model = await self._model(server)
        asked = self._options.logprobs or self._dialect.default_logprobs
        if asked != "detect":
            server.logprobs = asked
        else:
            server.logprobs = await detect_logprobs(
                server, self._dialect, lambda order: self._top_logprobs(server, order)
            )

    async def set_version(self, version: int) -> None:
        """Declare a version, and tell the servers that listen."""
        async with self._updating:
            self._check_version(version, self.version)
            await self._update(self._dialect.tell_version(version), version, may_be_absent=True)

    async def load_weights(self, order: Order, version: int) -> None:
        """Have all servers load new weights, and declare their version."""
        async with self._updating:
            self._check_version(version, self.version + 1)
            await self._update(order, version, may_be_absent=False)

    async def pause(self, *, interrupt: bool) -> None:
        """Stop all servers that are in use, and send no new requests."""
        self._requester.gate.clear()
        servers = [server for server in self._router.servers if server.is_healthy]
        for server in servers:
            server.is_paused = True  # also where the answer gets lost
        if failures := await self._order_all(servers, self._dialect.pause(interrupt=interrupt)):
            for server, error in failures.items():
                server.is_paused = not isinstance(error, RefusedError)
            with contextlib.suppress(WeightUpdateError):
                await self.resume()
            raise WeightUpdateError(f"no pause: {_told(failures)}")

    async def resume(self) -> None:
        """Let all go on; a server that is not healthy is told when it is."""
        servers = [server for server in self._router.servers if server.is_healthy]
        try:
            failures = await self._order_all(servers, self._dialect.resume())
            for server in servers:
                server.is_paused = server.is_paused and server in failures
        finally:
            self._requester.gate.set()
            for server in self._router.servers:
                if server.is_paused and server.is_healthy:
                    self._router.rest(server, "it may be paused still")
        if failures:
            raise WeightUpdateError(f"did not resume: {_told(failures)}")

    async def _unpause(self, server: Server) -> None:
        """Let one server go on that missed the order."""
        try:
            await self._order(server, self._dialect.resume(), _HEALTH_S)
        except RefusedError as error:
            if error.status not in _ABSENT:  # else it was started anew, as another kind of server
                raise
        server.is_paused = False

    async def _order_all(
        self, servers: Sequence[Server], order: Order
    ) -> dict[Server, ExchangeError]:
        """Give an order to servers; return what went wrong. Those that failed rest."""
        seconds = self._options.time_limits.control_s
        outcomes = await asyncio.gather(
            *(self._order(server, order, seconds) for server in servers), return_exceptions=True
        )
        failures = {}
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, ExchangeError):
                failures[server] = outcome
                if isinstance(outcome, RetryableError):
                    self._router.rest(server, str(outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
        return failures

    def _check_version(self, version: int, lowest: int) -> None:
        if not lowest <= version <= INT32_MAX:
            raise ValueError(
                f"version must be in [{lowest}, {INT32_MAX}], got {version}: the engine's is "
                f"{self.version}"
            )

    async def _update(self, order: Order, version: int, *, may_be_absent: bool) -> None:
        servers = self._router.servers
        problems = await asyncio.gather(
            *(self._update_one(server, order, version, may_be_absent) for server in servers)
        )
        failed = {server: why for server, why in zip(servers, problems, strict=True) if why}
        if len(failed) == len(servers):
            raise WeightUpdateError(f"version {version} reached no server: {_told(failed)}")
        self._requester.version = version
        for server, error in failed.items():
            # its tokens would be called newer than they are
            server.is_behind = True
            self._router.rest(server, str(error))

    async def _update_one(
        self, server: Server, order: Order, version: int, may_be_absent: bool
    ) -> ExchangeError | None:
        """Return what went wrong."""
        try:
            body = await self._order(server, order, self._options.time_limits.control_s)
        except RefusedError as error:
            if not may_be_absent or error.status not in _ABSENT:
                return error
            server.is_behind, server.told_version = False, None
            return None
        except ExchangeError as error:
            return error
        if message := _failure_said(body):
            return ExchangeError(server.client.worded("it said", message, body), server.name)
        server.is_behind, server.told_version = False, version
        return None

    async def _check_version_told(self, server: Server) -> None:
        """Notice a server that has been started anew, with the weights it was started with."""
        told = server.told_version
        if told is None:
            return
        try:
            body = await self._order(server, self._dialect.ask_version(), _HEALTH_S)
            name = read_json(body)["weight_version"]
        except (RefusedError, LookupError, TypeError, ValueError):
            return  # it does not say; its spans may
        if server.told_version != told:
            return  # of another in the meantime
        if isinstance(name, str) and not (is_number(name) and int(name[:20]) >= told):
            server.is_behind = True
            said = server.client.worded(f"told of version {told}, it says", quoted(name), body)
            raise RetryableError(f"{said}; an update helps", server.name)

    async def _model(self, server: Server) -> str | None:
        try:
            body = await self._order(server, Order("/v1/models", method="GET"), _HEALTH_S)
            name = read_json(body)["data"][0]["id"]
        except RefusedError as error:
            if error.status == 401:  # its health is for everybody, its samples are not
                raise
            return None
        except (LookupError, TypeError, ValueError):
            return None
        return name if isinstance(name, str) else None

    async def _order(self, server: Server, order: Order, seconds: float) -> bytes:
        return await server.client.exchange(order, max_bytes=_MAX_BYTES, timeout_s=seconds)

    async def _top_logprobs(self, server: Server, order: Order) -> bytes:
        seconds = self._options.time_limits.request_s
        try:
            return await self._order(server, order, seconds)
        except RefusedError as error:
            # the next order is one for the other endpoint, if there is one
            self._dialect.turn_to_other(server, error.status)
            raise


def _told(failures: dict[Server, ExchangeError]) -> str:
    return "; ".join(error.named for error in failures.values())


def _failure_said(body: bytes) -> str | None:
    """Return the message, quoted, of an answer that says ``"success": false``."""
    try:
        answer = read_json(body) if body else None
    except ValueError:
        return None
    if isinstance(answer, dict) and answer.get("success") is False:
        message = answer.get("message")
        return quoted(message if isinstance(message, str) else "success: false")
    return None
