"""HTTP client of one server, and the errors of one exchange with it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
import socket
import ssl
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, unquote, urlsplit

from trajpack.agent.errors import SetupError
from trajpack.agent.servers.options import ServerOptions
from trajpack.packing.text import one_line

if TYPE_CHECKING:
    import httpcore

_RETRYABLE = frozenset((408, 425, 429, 500, 502, 503, 504))
_MAX_ERROR_BYTES = 4096
_KEEP_ALIVE_S = 4.0
"""Idle seconds after which a connection is closed; many servers do so after 5."""
_DIED = ("disconnected", "peer closed")
"""Words in the message of a connection that ended early; other protocol errors are malformed."""
_KEEP_ALIVE_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds, seconds and a count: a vanished host is detected after a minute."""
_READ_BYTES = 8192
"""Bytes parsed before other tasks run: about 10 ms of tiny pieces at most."""
_MAX_OVERHEAD_BYTES = 16_384
"""Bytes of headers, interim responses and chunk framing accepted beyond the size of the body."""
_FREE_PIECES = 1024
_BYTES_PER_PIECE = 128
_MAX_QUOTED = 300


class ExchangeError(Exception):
    """A failed exchange. Its text, which gets into logs, does not name the server."""

    def __init__(self, reason: str, server: str | None = None) -> None:
        super().__init__(reason)
        self.server = server
        """Host and port of the server, if the failure belongs to one."""

    @property
    def named(self) -> str:
        """Host and port of the server, and the reason: for the caller, not for logs."""
        return str(self) if self.server is None else f"{self.server}: {self}"


class RetryableError(ExchangeError):
    """A failed exchange that may be repeated, perhaps with another server."""

    def __init__(
        self,
        reason: str,
        server: str | None = None,
        *,
        wait_s: float | None = None,
        is_connection: bool = False,
        is_slow: bool = False,
    ) -> None:
        super().__init__(reason, server)
        self.wait_s = wait_s
        """Pause in seconds that the server asked for (``Retry-After``)."""
        self.is_connection = is_connection
        """Whether the connection failed before the whole response was received."""
        self.is_slow = is_slow
        """Whether the time limit of the request ran out."""


class MalformedError(ExchangeError):
    """An invalid response. Not retried."""


class RefusedError(ExchangeError):
    """A refusal by the server. Not retried."""

    def __init__(self, reason: str, server: str | None = None, *, status: int) -> None:
        super().__init__(reason, server)
        self.status = status
        """HTTP status."""

    @property
    def is_about_request(self) -> bool:
        """Whether another request may succeed; otherwise the server is misconfigured."""
        return self.status in (400, 413, 414, 422)

    @property
    def is_absence(self) -> bool:
        """Whether the server does not have the endpoint, or does not open it."""
        return self.status in (403, 404, 405, 501)


def quote_body(text: bytes | str) -> str:
    r"""Return text of a server as a short ASCII literal, safe in a log line.

    Example:
        >>> quote_body(b"no\nsuch \x1b[31mmodel")
        "'no\\nsuch \\x1b[31mmodel'"
    """
    if isinstance(text, bytes):
        text = text[: 4 * _MAX_QUOTED].decode("utf-8", errors="replace")
    shown = ascii(text[:_MAX_QUOTED])
    return shown if len(text) <= _MAX_QUOTED else shown + "..."


@dataclass(frozen=True)
class ServerURL:
    """Address of a server, with its credentials kept apart.

    Example:
        >>> ServerURL.parse("https://me:secret@engine.example:8000/a/")
        ServerURL(base='https://engine.example:8000/a', name='engine.example:8000')
    """

    base: str
    """Scheme, host, port and path, without a slash at the end."""
    name: str
    """Host and port, as messages name the server."""
    host: str = field(default="", repr=False)
    """Host alone, as it may stand in the messages of the network."""
    authorization: str | None = field(default=None, repr=False)
    """``Authorization`` header for the user and password of the address, if it has any."""
    password: str | None = field(default=None, repr=False)
    """Password of the address, or its user if there is no password."""

    @classmethod
    def parse(cls, url: str) -> ServerURL:
        """Parse an address.

        Raises:
            TypeError: If it is not a string.
            ValueError: If it is not an ``http`` or ``https`` address with a host, or has a query
                or a fragment. The message does not repeat the address.
        """
        if not isinstance(url, str):
            raise TypeError(f"a server's address must be a string, got {type(url).__name__}")
        wanted = "a server's address must be http:// or https:// with a host, and no query"
        text = url.strip()
        try:
            parts = urlsplit(text)
            host, port = parts.hostname or "", parts.port
            name = host if host.isascii() else host.encode("idna").decode()
        except ValueError:
            raise ValueError(f"{wanted}; this one cannot be read") from None
        is_plain = not parts.query and not parts.fragment and text.isprintable() and " " not in text
        if "://" not in text:
            raise ValueError(
                "a server's address begins with http:// or https://; add it to this one"
            )
        if parts.scheme not in ("http", "https") or not host or not is_plain:
            raise ValueError(f"{wanted}; this one is another")
        name = f"[{name}]" if ":" in name else name
        name = name if port is None else f"{name}:{port}"
        authorization = None
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            authorization = "Basic " + base64.b64encode(pair.encode()).decode("ascii")
        path = quote(parts.path.rstrip("/"), safe="/%:@!$&'()*+,;=~")
        return cls(
            base=f"{parts.scheme}://{name}{path}",
            name=name,
            host=host,
            authorization=authorization,
            password=unquote(parts.password or parts.username or "") or None,
        )


@dataclass(frozen=True)
class HTTPRequest:
    """One request to a server."""

    path: str
    """Path below the server's address, with a slash."""
    payload: Any = None
    """Sent as JSON; None sends no body."""
    method: str = "POST"
    """HTTP method."""
    request_id: str | None = None
    """Id of the request, if the server echoes one."""


class ServerClient:
    """Sends requests to one server.

    Redirects, cookies, compression and proxies of the environment are not used. Bodies are capped
    while they are read, and a response that costs more work than its bytes are worth is refused
    (`PacedStream`). A response that echoes the id of an earlier request ends the connection, since
    every later response on it would be off by one.

    Connections wait in a stack of their own: a pool of httpx looks at all of its connections for
    each request.

    Args:
        url: Address of the server.
        options: Token, limits and the number of connections.
    """

    def __init__(self, url: ServerURL, options: ServerOptions) -> None:
        self.name = url.name
        """Host and port."""
        authorization = f"Bearer {options.token}" if options.token else url.authorization
        sent = authorization.partition(" ")[2] if authorization else ""
        self._secrets = [secret for secret in (sent, url.password) if secret]
        self._host = re.compile(rf"(?<![\w.]){re.escape(url.host)}(:\d+)?(?![\w.])")
        self._headers: dict[bytes | str, bytes | str] = {
            "Host": url.name,
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
        }
        if authorization:
            self._headers["Authorization"] = authorization
        self._ids = uuid.uuid4().hex
        self._numbers = itertools.count()
        self._base = url.base
        self._connect_s = options.time_limits.connect_s
        self._tls = _load_certificates(options) if url.base.startswith("https:") else None
        self._idle: deque[httpcore.AsyncHTTPConnection] = deque()
        self.slots = asyncio.Semaphore(options.max_connections)
        """Held by requests for samples; short administrative requests need none."""

    def new_request_id(self) -> str:
        """Return a new request id."""
        return f"{self._ids}-{next(self._numbers)}"

    async def close(self) -> None:
        """Close all connections."""
        while self._idle:
            await self._idle.pop().aclose()

    async def send(self, request: HTTPRequest, *, max_bytes: int, timeout_s: float) -> bytes:
        """Send ``request`` and return the body of the response.

        Raises:
            RetryableError: If the server was not reached, was too slow, died or is overloaded.
            RefusedError: If it answered with another error status.
            MalformedError: If the response is not valid HTTP, encoded or too long.
        """
        import httpcore

        try:
            async with asyncio.timeout(timeout_s):
                return await self._send(request, max_bytes)
        except TimeoutError:
            reason = f"no whole answer to {request.path} in {timeout_s:g} s"
            raise RetryableError(reason, self.name, is_slow=True) from None
        except (
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.TimeoutException,
        ) as error:
            raise self._connection_error(error, request) from None

    async def _send(self, request: HTTPRequest, max_bytes: int) -> bytes:
        import httpcore
        import msgspec

        content = b"" if request.payload is None else msgspec.json.encode(request.payload)
        headers = dict(self._headers)
        if request.method != "GET":
            headers["Content-Length"] = str(len(content))
        connection = await self._connection()
        try:
            response = await connection.handle_async_request(
                httpcore.Request(
                    request.method,
                    self._base + request.path,
                    headers=headers,
                    content=content,
                    extensions={"timeout": {"connect": self._connect_s}},
                )
            )
            try:
                body = await self._read(response, request, max_bytes)
                self._check_echo(body, request)
            finally:
                await response.aclose()
        except BaseException:
            await connection.aclose()
            raise
        if connection.is_idle():
            self._idle.append(connection)
        return body

    async def _connection(self) -> httpcore.AsyncHTTPConnection:
        """Return the idle connection that was used last, or a new one."""
        import httpcore

        for _ in range(2):  # closes connections faster than requests add them
            if self._idle and self._idle[0].has_expired():
                await self._idle.popleft().aclose()
        while self._idle:
            connection = self._idle.pop()
            if not connection.has_expired():
                return connection
            await connection.aclose()
        return httpcore.AsyncHTTPConnection(
            httpcore.URL(self._base).origin,
            ssl_context=self._tls,
            keepalive_expiry=_KEEP_ALIVE_S,
            socket_options=_socket_options(),
            network_backend=cast("httpcore.AsyncNetworkBackend", PacedBackend()),
        )

    async def _read(self, response: httpcore.Response, request: HTTPRequest, limit: int) -> bytes:
        status, path = response.status, request.path
        headers = [(name.lower(), value.strip().lower()) for name, value in response.headers]
        if {value for name, value in headers if name == b"content-encoding"} - {b"identity", b""}:
            raise MalformedError(f"the body of {path} is encoded, unasked", self.name)
        if status == 200:
            declared = dict(headers).get(b"content-length", b"0")
            is_long = declared.isdigit() and int(declared[:18]) > limit
            body = b"" if is_long else await _read_start(response, limit + 1)
            if is_long or len(body) > limit:
                reason = f"the body of {path} is longer than {limit} bytes"
                raise MalformedError(reason, self.name)
            return body
        if status < 400:
            raise MalformedError(f"status {status} of {path} is no answer", self.name)
        body = await _read_start(response, _MAX_ERROR_BYTES)
        reason = self.error_message(f"status {status} on {path}", quote_body(body), body)
        if status in _RETRYABLE:
            # the other form of the header, a date, is ignored
            wait = dict(headers).get(b"retry-after", b"")
            wait_s = float(wait[:6]) if wait.isdigit() else None
            raise RetryableError(reason, self.name, wait_s=wait_s)
        raise RefusedError(reason, self.name, status=status)

    def _check_echo(self, body: bytes, request: HTTPRequest) -> None:
        """Refuse a response that echoes one of this client's other ids; others may stand in it."""
        start = body.find(self._ids.encode())
        if start < 0:
            return
        wanted = (request.request_id or "").encode()
        end = start + len(wanted)
        if not wanted or body[start:end] != wanted or body[end : end + 1].isdigit():
            reason = f"an answer on {request.path} is that to another request"
            raise RetryableError(reason, self.name, is_connection=True)

    def _connection_error(self, error: Exception, request: HTTPRequest) -> Exception:
        import httpcore

        # the message may quote bytes of the server, or name the host of a certificate
        detail = one_line(self._host.sub("its host", str(error)), 200)
        where = f"{type(error).__name__} on {request.path}"
        text = self.error_message(where, detail, str(error).encode("utf-8", "replace"))
        if isinstance(error, httpcore.RemoteProtocolError) and not any(
            word in str(error) for word in _DIED
        ):
            return MalformedError(text, self.name)
        return RetryableError(text, self.name, is_connection=True)

    def error_message(self, where: str, detail: str, body: bytes) -> str:
        """Return ``"where: detail"``, with the detail hidden if it or the body has a secret.

        Some servers echo the headers of a request. The body itself is left as it is: a secret may
        be a word or a number that a valid response has, too.
        """
        if any(secret in detail or secret.encode() in body for secret in self._secrets):
            detail = "it repeats a secret, and is not shown"
        return f"{where}: {detail}"


async def _read_start(response: httpcore.Response, max_bytes: int) -> bytes:
    """Return the first ``max_bytes`` of the body, or all of it."""
    stream = response.extensions["network_stream"]
    parts, num_bytes = [], 0
    async for part in response.aiter_stream():
        stream.count_body(len(part))
        parts.append(part[: max_bytes - num_bytes])
        num_bytes += len(parts[-1])
        if num_bytes == max_bytes:
            break
    return b"".join(parts)


def _load_certificates(options: ServerOptions) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=options.ca_file)
    except OSError as error:  # its message does not name the file
        raise SetupError(f"no certificates in ca_file {options.ca_file!r}: {error}") from None


def _socket_options() -> list[tuple[int, int, int]]:
    probes = [
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in _KEEP_ALIVE_PROBES.items()
        if hasattr(socket, name)  # not on every platform
    ]
    return [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1), *probes]


class PacedBackend:
    """``httpcore.AsyncNetworkBackend`` that opens TCP connections as `PacedStream`."""

    async def connect_tcp(self, *args: Any, **options: Any) -> PacedStream:
        """Open a connection."""
        import httpcore

        return PacedStream(await httpcore.AnyIOBackend().connect_tcp(*args, **options))


class PacedStream:
    """``httpcore.AsyncNetworkStream`` that bounds the work that a response causes by its bytes.

    The HTTP parser makes thousands of events of tiny chunks or interim responses (1xx) before
    another task runs, so a read returns 8 KiB at most. A response is refused if its bytes beside
    the body exceed those of the body by 16 KiB, or if it comes in more than 1,024 pieces (reads and
    parts of the body) plus one for each 128 bytes of the body.

    Raises:
        httpcore.RemoteProtocolError: In `read` and `count_body`, if the response is refused.
    """

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream
        self._num_bytes = self._num_body = self._num_pieces = 0
        self.aclose = stream.aclose
        self.get_extra_info = stream.get_extra_info

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        """Return the next bytes, 8 KiB at most."""
        import httpcore

        overhead = self._num_bytes - self._num_body  # earlier reads have been parsed by now
        if overhead > _MAX_OVERHEAD_BYTES + self._num_body:
            raise httpcore.RemoteProtocolError(
                f"{overhead} bytes of headers, interim answers and frames of chunks came with "
                f"{self._num_body} bytes of a body"
            )
        read = await self._stream.read(min(max_bytes, _READ_BYTES), timeout)
        self._num_bytes += len(read)
        self._count_piece()
        return read

    def count_body(self, num_bytes: int) -> None:
        """Count a part of the body."""
        self._num_body += num_bytes
        self._count_piece()

    def _count_piece(self) -> None:
        import httpcore

        self._num_pieces += 1
        if self._num_pieces > _FREE_PIECES + self._num_body // _BYTES_PER_PIECE:
            reason = f"{self._num_body} bytes came in {self._num_pieces} tiny pieces"
            raise httpcore.RemoteProtocolError(reason)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Send a part of a request, and restart the counts for its response."""
        self._num_bytes = self._num_body = self._num_pieces = 0
        await self._stream.write(buffer, timeout)

    async def start_tls(self, *args: Any, **options: Any) -> PacedStream:
        """Return the encrypted stream."""
        return PacedStream(await self._stream.start_tls(*args, **options))
