"""One server over HTTP: what is sent, what is taken, and what is not."""

from __future__ import annotations

import asyncio
import json
import ssl
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trajpack.agent.servers.failures import (
    MalformedError,
    RefusedError,
    RetryableError,
    harmless,
    quoted,
)
from trajpack.agent.servers.options import ServerOptions
from trajpack.agent.servers.server_url import ServerURL

if TYPE_CHECKING:
    import httpx

_RETRYABLE = frozenset((408, 425, 429, 500, 502, 503, 504))
_MAX_ERROR_BYTES = 4096
_KEEP_ALIVE_S = 4.0
"""Servers close idle connections, many after 5 seconds; this client does so before them."""
_DIED = ("disconnected", "peer closed")
"""In messages of a connection that ended too early, rather than with what is no HTTP."""


@dataclass(frozen=True)
class Order:
    """What a server is asked to do."""

    path: str
    """Below the server's address, with a slash."""
    payload: Any = None
    """Sent as JSON; nothing is sent for None."""
    method: str = "POST"
    """Of HTTP."""


class ServerClient:
    """Exchanges orders for answers with one server.

    No redirect is followed, no cookie kept and no compressed body taken; proxies and passwords
    that the environment names are not used. A body is read up to a limit and not one byte
    further.

    Each request in flight has a transport, and so a connection, of its own: a shared pool of a
    thousand connections looks at all of them for each request.

    Args:
        url: Where the server is.
        options: Token, limits and the number of connections.
    """

    def __init__(self, url: ServerURL, options: ServerOptions) -> None:
        self.name = url.name
        """Host and port."""
        authorization = f"Bearer {options.token}" if options.token else url.authorization
        self._secret = authorization.partition(" ")[2].encode() if authorization else b""
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if authorization:
            self._headers["Authorization"] = authorization
        self._base = url.base
        self._timeouts = {"connect": options.time_limits.connect_s}
        if url.base.startswith("https:"):
            self._tls = ssl.create_default_context(cafile=options.ca_file)
        else:  # the certificates of the system are read only where they are needed
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self.slots = asyncio.Semaphore(options.max_connections)
        """Held by whoever asks for a sample; orders that are short and urgent need none."""

    async def close(self) -> None:
        """Close all connections."""
        while self._idle:
            await self._idle.pop().aclose()

    async def exchange(self, order: Order, *, max_bytes: int, timeout_s: float) -> bytes:
        """Send ``order`` and return the body of the answer.

        Raises:
            RetryableError: If the server was not reached, was too slow, died or is overloaded.
            RefusedError: If it answered with another error.
            MalformedError: If it answered with what is no answer.
        """
        import httpx

        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(order, max_bytes)
        except TimeoutError:
            reason = f"{self.name}: no whole answer to {order.path} in {timeout_s:g} s"
            raise RetryableError(reason, is_slow=True) from None
        except httpx.TransportError as error:
            raise self._failure(error, order) from None

    async def _exchange(self, order: Order, max_bytes: int) -> bytes:
        import httpx

        content = None
        if order.payload is not None:
            content = json.dumps(order.payload, separators=(",", ":")).encode()
        request = httpx.Request(
            order.method,
            self._base + order.path,
            headers=self._headers,
            content=content,
            extensions={"timeout": self._timeouts},
        )
        transport = self._idle.pop() if self._idle else self._transport()
        try:
            response = await transport.handle_async_request(request)
            try:
                body = await self._read(response, order, max_bytes)
            finally:
                await response.aclose()
        except BaseException:
            await transport.aclose()
            raise
        self._idle.append(transport)
        return body

    def _transport(self) -> httpx.AsyncHTTPTransport:
        import httpx

        limits = httpx.Limits(max_connections=1, keepalive_expiry=_KEEP_ALIVE_S)
        return httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False, limits=limits)

    def _failure(self, error: httpx.TransportError, order: Order) -> Exception:
        import httpx

        text = f"{self.name}: {type(error).__name__} on {order.path}: {harmless(str(error), 200)}"
        if isinstance(error, httpx.RemoteProtocolError) and not any(
            sign in str(error) for sign in _DIED
        ):
            return MalformedError(text)
        return RetryableError(text, is_connection=True)

    async def _read(self, response: httpx.Response, order: Order, max_bytes: int) -> bytes:
        status = response.status_code
        encoding = response.headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("identity", ""):
            raise MalformedError(f"{self.name}: the body of {order.path} is encoded, unasked")
        if status == 200:
            return self._without_secret(await self._body(response, order, max_bytes))
        if status < 400:
            raise MalformedError(f"{self.name}: status {status} of {order.path} is no answer")
        said = await self._beginning(response)
        reason = f"{self.name}: status {status} on {order.path}: {quoted(said)}"
        if status in _RETRYABLE:
            raise RetryableError(reason, _retry_after(response))
        raise RefusedError(reason, status)

    async def _body(self, response: httpx.Response, order: Order, max_bytes: int) -> bytes:
        too_long = MalformedError(
            f"{self.name}: the body of {order.path} is longer than {max_bytes} bytes"
        )
        declared = response.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared[:18]) > max_bytes:
            raise too_long
        parts, num_bytes = [], 0
        async for part in response.aiter_raw():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise too_long
            parts.append(part)
        return b"".join(parts)

    async def _beginning(self, response: httpx.Response) -> bytes:
        """Return how an error's body begins."""
        said = b""
        async for part in response.aiter_raw():
            said += part[:_MAX_ERROR_BYTES]
            if len(said) >= _MAX_ERROR_BYTES:
                break
        return self._without_secret(said)

    def _without_secret(self, said: bytes) -> bytes:
        """Return what a server said; some repeat what they were asked, and messages quote it."""
        return said.replace(self._secret, b"[secret]") if self._secret else said


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds of the header; its other form, a date, is not worth a clock."""
    value = response.headers.get("retry-after", "")
    return float(value[:6]) if value.isdecimal() and value.isascii() else None
