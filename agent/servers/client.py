"""HTTP client of one server, and the errors of one exchange with it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
import socket
import ssl
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit

from trajpack.agent.errors import SetupError
from trajpack.agent.servers.options import ServerOptions
from trajpack.packing.text import one_line

if TYPE_CHECKING:
    import aiohttp

_RETRYABLE = frozenset((408, 425, 429, 500, 502, 503, 504))
_MAX_ERROR_BYTES = 4096
_KEEP_ALIVE_S = 4.0
"""Idle seconds after which a connection is closed; many servers do so after 5."""
_KEEP_ALIVE_PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds, seconds and a count: a vanished host is detected after a minute."""
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


class ServerClient:
    """Sends requests to one server, within an event loop.

    Redirects, cookies, compression and proxies of the environment are not used. Bodies are capped
    while they are read.

    Args:
        url: Address of the server.
        options: Token, limits and the number of connections.

    Raises:
        SetupError: If there are no certificates in the file that the options name.
    """

    def __init__(self, url: ServerURL, options: ServerOptions) -> None:
        import aiohttp

        self.name = url.name
        """Host and port."""
        self._base = url.base
        self._host = re.compile(rf"(?<![\w.]){re.escape(url.host)}(:\d+)?(?![\w.])")
        self._ids = uuid.uuid4().hex
        self._numbers = itertools.count()
        headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        authorization = f"Bearer {options.token}" if options.token else url.authorization
        if authorization:
            headers["Authorization"] = authorization
        is_encrypted = url.base.startswith("https:")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0,
                keepalive_timeout=_KEEP_ALIVE_S,
                ssl=_load_certificates(options) if is_encrypted else True,
                socket_factory=_probed_socket,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=options.time_limits.connect_s, ceil_threshold=1e9
            ),
        )
        self.slots = asyncio.Semaphore(options.max_connections)
        """Held by requests for samples; short administrative requests need none."""

    def new_request_id(self) -> str:
        """Return a new request id."""
        return f"{self._ids}-{next(self._numbers)}"

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def send(self, request: HTTPRequest, *, max_bytes: int, timeout_s: float) -> bytes:
        """Send ``request`` and return the body of the response.

        Raises:
            RetryableError: If the server was not reached, was too slow, died or is overloaded.
            RefusedError: If it answered with another error status.
            MalformedError: If the response is not valid HTTP or too long.
        """
        import aiohttp
        import msgspec

        content = None if request.payload is None else msgspec.json.encode(request.payload)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    request.method, self._base + request.path, data=content, allow_redirects=False
                ) as response,
            ):
                return await self._read(response, request.path, max_bytes)
        except aiohttp.ClientResponseError as error:
            detail = one_line(error.message, 200)
            raise MalformedError(f"no HTTP on {request.path}: {detail}", self.name) from None
        except (aiohttp.ClientError, OSError) as error:
            if type(error) is TimeoutError:  # of this request, not of a connection
                reason = f"no whole answer to {request.path} in {timeout_s:g} s"
                raise RetryableError(reason, self.name, is_slow=True) from None
            # the message may name the host
            detail = one_line(self._host.sub("its host", str(error)), 200)
            reason = f"{type(error).__name__} on {request.path}: {detail}"
            raise RetryableError(reason, self.name, is_connection=True) from None

    async def _read(self, response: aiohttp.ClientResponse, path: str, limit: int) -> bytes:
        status = response.status
        if status == 200:
            is_long = (response.content_length or 0) > limit
            body = b"" if is_long else await _read_start(response, limit + 1)
            if is_long or len(body) > limit:
                reason = f"the body of {path} is longer than {limit} bytes"
                raise MalformedError(reason, self.name)
            return body
        if status < 400:
            raise MalformedError(f"status {status} of {path} is no answer", self.name)
        body = await _read_start(response, _MAX_ERROR_BYTES)
        reason = f"status {status} on {path}: {quote_body(body)}"
        if status in _RETRYABLE:
            # the other form of the header, a date, is ignored
            wait = response.headers.get("Retry-After", "").strip()
            wait_s = float(wait[:6]) if wait.isdecimal() else None
            raise RetryableError(reason, self.name, wait_s=wait_s)
        raise RefusedError(reason, self.name, status=status)


async def _read_start(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the first ``max_bytes`` of the body, or all of it."""
    body = bytearray()
    while len(body) < max_bytes and (part := await response.content.read(max_bytes - len(body))):
        body += part
    if len(body) == max_bytes:
        response.close()  # what is left is not read
    return bytes(body)


def _load_certificates(options: ServerOptions) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=options.ca_file)
    except OSError as error:  # its message does not name the file
        raise SetupError(f"no certificates in ca_file {options.ca_file!r}: {error}") from None


def _probed_socket(address: Any) -> socket.socket:
    """Return a socket that notices a host that is gone; ``address`` as of `socket.getaddrinfo`."""
    made = socket.socket(*address[:3])
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE_PROBES.items():
        if hasattr(socket, name):  # not on every platform
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
