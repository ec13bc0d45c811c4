"""One server over HTTP: what is sent, what is taken, and what is not."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import ssl
import time
import uuid
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from trajpack.agent.errors import SetupError
from trajpack.agent.servers.failures import (
    MalformedError,
    RefusedError,
    RetryableError,
    quoted,
)
from trajpack.agent.servers.options import ServerOptions
from trajpack.agent.servers.paced_stream import PacedBackend
from trajpack.agent.servers.url import ServerURL
from trajpack.packing.text import one_line

if TYPE_CHECKING:
    import httpcore
    import httpx

_RETRYABLE = frozenset((408, 425, 429, 500, 502, 503, 504))
_MAX_ERROR_BYTES = 4096
_KEEP_ALIVE_S = 4.0
"""Servers close idle connections, many after 5 seconds; this client does so before them."""
_DIED = ("disconnected", "peer closed")
"""In messages of a connection that ended too early, rather than with what is no HTTP."""
_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds, seconds and a number: a host that is gone without a word is noticed after a minute."""


@dataclass(frozen=True)
class Order:
    """What a server is asked to do."""

    path: str
    """Below the server's address, with a slash."""
    payload: Any = None
    """Sent as JSON; nothing is sent for None."""
    method: str = "POST"
    """Of HTTP."""
    request_id: str | None = None
    """What it is called, where the answer says that."""


class ServerClient:
    """Exchanges orders for answers with one server.

    No redirect is followed, no cookie kept and no compressed body taken; proxies and passwords
    that the environment names are not used. A body is read up to a limit and not one byte
    further, and an answer that makes more work than its bytes are worth is refused
    (`PacedStream`). An answer that names an earlier request ends the connection: whatever comes
    on it would be taken for the answer to what is asked next.

    Each request in flight has a pool, and so a connection, of its own: a shared pool of a
    thousand connections looks at all of them for each request.

    Args:
        url: Where the server is.
        options: Token, limits and the number of connections.
    """

    def __init__(self, url: ServerURL, options: ServerOptions) -> None:
        self.name = url.name
        """Host and port."""
        authorization = f"Bearer {options.token}" if options.token else url.authorization
        sent = authorization.partition(" ")[2] if authorization else ""
        self._secrets = [secret for secret in (sent, url.password) if secret]
        self._host = re.compile(rf"(?<![\w.]){re.escape(url.host)}(:\d+)?(?![\w.])")
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if authorization:
            self._headers["Authorization"] = authorization
        self._ids = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._base = url.base
        self._timeouts = {"connect": options.time_limits.connect_s}
        # the certificates of the system are read only where they are needed
        is_secure = url.base.startswith("https:")
        self._tls = _certified(options) if is_secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._idle: deque[tuple[float, httpcore.AsyncConnectionPool]] = deque()
        self.slots = asyncio.Semaphore(options.max_connections)
        """Held by whoever asks for a sample; orders that are short and urgent need none."""

    def new_request_id(self) -> str:
        """Return a name for a request."""
        return f"{self._ids}-{next(self._numbers)}"

    async def close(self) -> None:
        """Close all connections."""
        while self._idle:
            await self._idle.pop()[1].aclose()

    async def exchange(self, order: Order, *, max_bytes: int, timeout_s: float) -> bytes:
        """Send ``order`` and return the body of the answer.

        Raises:
            RetryableError: If the server was not reached, was too slow, died or is overloaded.
            RefusedError: If it answered with another error.
            MalformedError: If it answered with what is no answer.
        """
        import httpcore

        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(order, max_bytes)
        except TimeoutError:
            reason = f"no whole answer to {order.path} in {timeout_s:g} s"
            raise RetryableError(reason, self.name, is_slow=True) from None
        except (
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.TimeoutException,
        ) as error:
            raise self._failure(error, order) from None

    async def _exchange(self, order: Order, max_bytes: int) -> bytes:
        import httpcore
        import httpx

        content = b""
        if order.payload is not None:
            content = json.dumps(order.payload, separators=(",", ":")).encode()
        told = httpx.Request(
            order.method, self._base + order.path, headers=self._headers, content=content
        )
        url = told.url
        request = httpcore.Request(
            order.method,
            httpcore.URL(
                scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
            ),
            headers=told.headers.raw,
            content=content,
            extensions={"timeout": self._timeouts},
        )
        await self._close_old()
        pool = self._idle.pop()[1] if self._idle else self._pool()
        try:
            response = await pool.handle_async_request(request)
            try:
                body = await self._read(response, order, max_bytes)
                self._check_request(body, order)
            finally:
                await response.aclose()
        except BaseException:
            await pool.aclose()
            raise
        self._idle.append((time.monotonic(), pool))
        return body

    async def _close_old(self) -> None:
        """Close what a rush of requests has left open: the server will have done so, too."""
        for _ in range(2):  # more than the one that a request may add
            if self._idle and time.monotonic() - self._idle[0][0] > _KEEP_ALIVE_S:
                await self._idle.popleft()[1].aclose()

    def _check_request(self, body: bytes, order: Order) -> None:
        """Refuse the answer to another request; servers and proxies may name none, or their own."""
        start = body.find(self._ids.encode())
        if start < 0:
            return
        wanted = (order.request_id or "").encode()
        end = start + len(wanted)
        if not wanted or body[start:end] != wanted or body[end : end + 1].isdigit():
            reason = f"an answer on {order.path} is that to another request"
            raise RetryableError(reason, self.name, is_connection=True)

    def _pool(self) -> httpcore.AsyncConnectionPool:
        import httpcore

        return httpcore.AsyncConnectionPool(
            ssl_context=self._tls,
            max_connections=1,
            keepalive_expiry=_KEEP_ALIVE_S,
            socket_options=_socket_options(),
            network_backend=cast("httpcore.AsyncNetworkBackend", PacedBackend()),
        )

    def _failure(self, error: Exception, order: Order) -> Exception:
        import httpcore

        # what is no HTTP is quoted, and certificates name the host
        said = one_line(self._host.sub("its host", str(error)), 200)
        where = f"{type(error).__name__} on {order.path}"
        text = self.worded(where, said, str(error).encode("utf-8", "replace"))
        if isinstance(error, httpcore.RemoteProtocolError) and not any(
            sign in str(error) for sign in _DIED
        ):
            return MalformedError(text, self.name)
        return RetryableError(text, self.name, is_connection=True)

    async def _read(self, response: httpcore.Response, order: Order, max_bytes: int) -> bytes:
        import httpx

        status, headers = response.status, httpx.Headers(response.headers)
        encoding = headers.get("content-encoding", "identity")
        if encoding.strip().lower() not in ("identity", ""):
            raise MalformedError(f"the body of {order.path} is encoded, unasked", self.name)
        if status == 200:
            declared = headers.get("content-length", "0")
            is_long = declared.isdecimal() and int(declared[:18]) > max_bytes
            body = b"" if is_long else await self._beginning(response, max_bytes + 1)
            if is_long or len(body) > max_bytes:
                reason = f"the body of {order.path} is longer than {max_bytes} bytes"
                raise MalformedError(reason, self.name)
            return body
        if status < 400:
            raise MalformedError(f"status {status} of {order.path} is no answer", self.name)
        said = await self._beginning(response, _MAX_ERROR_BYTES)
        reason = self.worded(f"status {status} on {order.path}", quoted(said), said)
        if status in _RETRYABLE:
            raise RetryableError(reason, self.name, wait_s=_retry_after(headers))
        raise RefusedError(reason, self.name, status=status)

    async def _beginning(self, response: httpcore.Response, max_bytes: int) -> bytes:
        """Return the body, or as many bytes of it as are wanted."""
        stream = response.extensions["network_stream"]
        parts, num_bytes = [], 0
        async for part in response.aiter_stream():
            stream.count_part(len(part))
            parts.append(part[: max_bytes - num_bytes])
            num_bytes += len(parts[-1])
            if num_bytes == max_bytes:
                break
        return b"".join(parts)

    def worded(self, where: str, said: str, body: bytes) -> str:
        """Return what is wrong, in words that quote a body, unless they may repeat a secret.

        Some servers repeat what they were asked, headers included. The body itself is left as it
        is: a secret may be a word or a number that a good answer has, too.
        """
        if any(secret in said or secret.encode() in body for secret in self._secrets):
            said = "it repeats a secret, and is not shown"
        return f"{where}: {said}"


def _certified(options: ServerOptions) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=options.ca_file)
    except OSError as error:  # its message does not say which file
        raise SetupError(f"no certificates in ca_file {options.ca_file!r}: {error}") from None


def _socket_options() -> list[tuple[int, int, int]]:
    probes = [
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in _PROBES.items()
        if hasattr(socket, name)  # they are not everywhere
    ]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *probes]


def _retry_after(headers: httpx.Headers) -> float | None:
    """Return the seconds of the header; its other form, a date, is not worth a clock."""
    value = headers.get("retry-after", "")
    return float(value[:6]) if value.isdecimal() and value.isascii() else None
