"""Server administration: handshake, weight updates, pause and resume."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from trajpack.agent.servers.api import ServerAPI
from trajpack.agent.servers.client import (
    ExchangeError,
    HTTPRequest,
    RefusedError,
    RetryableError,
    quote_body,
)
from trajpack.agent.servers.engine_response import is_number
from trajpack.agent.servers.options import ServerOptions
from trajpack.agent.servers.routing import Router, Server
from trajpack.packing.conversion import INT32_MAX

_MAX_BYTES = 2**20
_HEALTH_S = 10.0


class WeightUpdateError(RuntimeError):
    """Servers did not take new weights, a version, a pause or a resume; the message names them."""


class Control:
    """Administers all servers of an engine.

    Args:
        servers: Servers of the engine, with clients but without a handshake.
        api: HTTP API of the servers.
        options: Time limits.
        version: Policy version of the servers' weights.
    """

    def __init__(
        self, servers: list[Server], api: ServerAPI, options: ServerOptions, *, version: int
    ) -> None:
        self.version = version
        """Policy version that the engine declares."""
        self.gate = asyncio.Event()
        """Set while requests for samples may be sent."""
        self.gate.set()
        self.router = Router(
            servers, self.handshake, options.retries, time_limits=options.time_limits
        )
        """Rotation of the servers."""
        self._api = api
        self._options = options
        self._control_s = options.time_limits.control_s
        self._updating = asyncio.Lock()

    async def handshake(self, server: Server) -> None:
        """Check the health of a server, and read its model.

        Raises:
            RetryableError: If it is not healthy, or has other weights than the engine declares.
            RefusedError: If it refuses this client.
        """
        if server.is_behind:
            raise RetryableError("its weights are not the engine's; an update helps", server.name)
        if server.is_paused and self.gate.is_set():
            try:
                await _send(server, self._api.resume(), _HEALTH_S)
            except RefusedError as error:
                if not error.is_absence:  # else it was restarted as another kind
                    raise
            server.is_paused = False
        try:
            await _send(server, HTTPRequest("/health", method="GET"), _HEALTH_S)
        except RefusedError as error:
            if not error.is_absence or error.status == 403:
                raise
        await self._check_acknowledged_version(server)
        server.model = await _served_model(server)

    async def _check_acknowledged_version(self, server: Server) -> None:
        """Detect a server that was restarted, with the weights of its start."""
        told = server.told_version
        if told is None:
            return
        try:
            body = await _send(server, self._api.get_version(), _HEALTH_S)
            name = read_json(body)["weight_version"]
        except (RefusedError, LookupError, TypeError, ValueError):
            return  # it has no such endpoint; spans of its responses may tell
        if server.told_version != told:
            return  # an update came in between
        if isinstance(name, str) and not (is_number(name) and int(name[:20]) >= told):
            raise server.restart_error(told, name)

    async def update(
        self, request: HTTPRequest, version: int, *, is_label_only: bool = False
    ) -> None:
        """Send new weights, or their version alone, to all servers, and declare that version.

        Servers without an endpoint for the version alone are left out.
        """
        async with self._updating:
            lowest = self.version if is_label_only else self.version + 1
            if not lowest <= version <= INT32_MAX:
                raise ValueError(
                    f"version must be in [{lowest}, {INT32_MAX}], got {version}: the engine's is "
                    f"{self.version}"
                )
            servers = self.router.servers
            failed = await _send_all(servers, lambda server: self._update_one(server, request))
            for server in servers:
                error = failed.get(server)
                is_absent = isinstance(error, RefusedError) and error.is_absence
                if error is None or (is_absent and is_label_only):
                    server.is_behind = False
                    server.told_version = version if error is None else None
                    failed.pop(server, None)
            if len(failed) == len(servers):
                raise WeightUpdateError(f"version {version} reached no server: {_join(failed)}")
            self.version = version
            for server, error in failed.items():
                server.is_behind = True  # its tokens would be labelled newer than they are
                self.router.mark_unhealthy(server, str(error))

    async def _update_one(self, server: Server, request: HTTPRequest) -> None:
        """Update one server, or raise the error that its response reports."""
        body = await _send(server, request, self._control_s)
        try:
            answer = read_json(body) if body else None
        except ValueError:
            return
        if isinstance(answer, dict) and answer.get("success") is False:
            message = answer.get("message")
            detail = quote_body(message if isinstance(message, str) else "success: false")
            raise ExchangeError(f"it said: {detail}", server.name)

    async def pause(self, *, interrupt: bool) -> None:
        """Pause all healthy servers, and hold back new requests."""
        self.gate.clear()
        servers = [server for server in self.router.servers if server.is_healthy]
        for server in servers:
            server.is_paused = True  # also if the response gets lost
        if failures := await self._order(servers, self._api.pause(interrupt=interrupt)):
            for server, error in failures.items():
                server.is_paused = not isinstance(error, RefusedError)
            with contextlib.suppress(WeightUpdateError):
                await self.resume()
            raise WeightUpdateError(f"no pause: {_join(failures)}")

    async def resume(self) -> None:
        """Resume all healthy servers; the others are resumed by their next handshake."""
        servers = [server for server in self.router.servers if server.is_healthy]
        try:
            failures = await self._order(servers, self._api.resume())
            for server in servers:
                server.is_paused = server.is_paused and server in failures
        finally:
            self.gate.set()
            for server in self.router.servers:
                if server.is_paused and server.is_healthy:
                    self.router.mark_unhealthy(server, "it may be paused still")
        if failures:
            raise WeightUpdateError(f"did not resume: {_join(failures)}")

    async def _order(
        self, servers: list[Server], request: HTTPRequest
    ) -> dict[Server, ExchangeError]:
        """Send a request to servers; return failures, and mark servers unhealthy that lost it."""
        failed = await _send_all(servers, lambda server: _send(server, request, self._control_s))
        for server, error in failed.items():
            if isinstance(error, RetryableError):
                self.router.mark_unhealthy(server, str(error))
        return failed


async def _send(server: Server, request: HTTPRequest, seconds: float) -> bytes:
    return await server.client.send(request, max_bytes=_MAX_BYTES, timeout_s=seconds)


async def _send_all(
    servers: Sequence[Server], send: Callable[[Server], Awaitable[object]]
) -> dict[Server, ExchangeError]:
    """Send to all servers at once, and return the failures."""
    outcomes = await asyncio.gather(*map(send, servers), return_exceptions=True)
    failed = {}
    for server, outcome in zip(servers, outcomes, strict=True):
        if isinstance(outcome, ExchangeError):
            failed[server] = outcome
        elif isinstance(outcome, BaseException):
            raise outcome
    return failed


async def _served_model(server: Server) -> str | None:
    try:
        body = await _send(server, HTTPRequest("/v1/models", method="GET"), _HEALTH_S)
        name = read_json(body)["data"][0]["id"]
    except RefusedError as error:
        if error.status == 401:  # its health is public, its samples are not
            raise
        return None
    except (LookupError, TypeError, ValueError):
        return None
    return name if isinstance(name, str) else None


def read_json(body: bytes) -> Any:
    """Parse a short body.

    Raises:
        ValueError: If it is not JSON.
    """
    import msgspec

    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise ValueError("JSON nested too deep") from None


def _join(failures: dict[Server, ExchangeError]) -> str:
    return "; ".join(error.named for error in failures.values())
