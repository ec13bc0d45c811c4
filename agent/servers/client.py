"""HTTP client of servers, and the errors of one exchange with them."""

from __future__ import annotations

import asyncio
import base64
import math
import ssl
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from trajpack.agent.errors import SetupError
from trajpack.agent.servers.options import ServerOptions
from trajpack.packing.text import one_line

_RETRYABLE = frozenset((408, 425, 429, 500, 502, 503, 504))
_MAX_ERROR_BYTES = 4096
_CONNECT_S = 5.0
_KEEP_ALIVE_S = 4.0
"""Idle seconds after which a connection is closed; many servers do so after 5."""


class ExchangeError(Exception):
    """A failed exchange; its text begins with the server's host and port."""

    def __init__(self, reason: str, *, status: int = 0) -> None:
        super().__init__(reason)
        self.is_innocent = status in (400, 413, 414, 422)  # the request is to blame
        self.is_absence = status in (403, 404, 405, 501)  # of the endpoint


class RetryableError(ExchangeError):
    """A failed exchange that may be repeated, perhaps with another server."""


class ConnectionLostError(RetryableError):
    """The connection failed before the whole response was received."""


class MalformedError(ExchangeError):
    """An invalid response. Not retried."""


class RefusedError(ExchangeError):
    """A refusal by the server. Not retried."""


class HTTPRequest(NamedTuple):
    """One request to a server: its path below the server's address, and what is sent as JSON."""

    path: str
    payload: Any = None
    method: str = "POST"


@dataclass(eq=False)
class Server:
    """Address and state of one server."""

    url: str
    """Scheme, host, port and path, without a slash at the end."""
    name: str
    """Host and port, as messages name the server."""
    authorization: str | None = field(repr=False)
    """Header for the user and password of the address, if it has any."""
    slots: asyncio.Semaphore
    """Held by requests for samples; administrative requests need none."""
    num_in_flight: int = 0
    num_failures: int = 0  # consecutive ones
    is_healthy: bool = False
    is_behind: bool = False
    """Whether its weights are not the engine's; cleared by the next weight update."""
    told_version: int | None = None
    """Version that it last acknowledged; None if it has no such endpoint."""
    has_fallen_back: bool = False  # it lacks the first of two endpoints for samples
    model: str | None = None
    error: str = "no answer yet"  # why it is not healthy

    @classmethod
    def parse(cls, url: str, max_connections: int) -> Server:
        """Parse an address; no error repeats it, since it may hold a password."""
        try:
            parts = urlsplit(url.strip().rstrip("/"))
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:  # of the port
            is_address = False
        if not is_address or parts.query or parts.fragment:
            raise ValueError(
                "urls: expected http:// or https://, a host and no query; an address is another"
            )
        authorization, name = None, parts.netloc.rpartition("@")[2]
        if parts.username is not None:
            pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            authorization = "Basic " + base64.b64encode(pair.encode()).decode()
        slots = asyncio.Semaphore(max_connections)
        return cls(parts._replace(netloc=name).geturl(), name, authorization, slots)


class Client:
    """Sends requests to servers, without redirects, cookies, compression and proxies."""

    def __init__(self, options: ServerOptions) -> None:
        import aiohttp

        self._max_bytes = options.max_response_bytes
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if options.token:
            self._headers["Authorization"] = f"Bearer {options.token}"
        verification: ssl.SSLContext | bool = True
        if options.ca_file:
            try:
                verification = ssl.create_default_context(cafile=options.ca_file)
            except OSError as error:  # its message does not name the file
                reason = f"no certificates in ca_file {options.ca_file!r}: {error}"
                raise SetupError(reason) from None
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=verification)
        timeout = aiohttp.ClientTimeout(sock_connect=_CONNECT_S, ceil_threshold=math.inf)
        self._session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout
        )
        self.close = self._session.close

    async def send(self, server: Server, request: HTTPRequest, timeout_s: float) -> bytes:
        """Send ``request`` and return the body of the response."""
        import aiohttp
        import msgspec

        content = None if request.payload is None else msgspec.json.encode(request.payload)
        where, headers = f"{server.name}: {request.path}", self._headers
        if server.authorization:
            headers = {"Authorization": server.authorization, **headers}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    request.method,
                    server.url + request.path,
                    data=content,
                    headers=headers,
                    allow_redirects=False,
                ) as response,
            ):
                status = response.status
                limit = self._max_bytes if status == 200 else _MAX_ERROR_BYTES
                body = bytearray()
                while part := await response.content.read(limit + 1 - len(body)):
                    body += part
                if len(body) > limit:
                    response.close()  # what is left is not read
        except aiohttp.ClientResponseError as error:
            raise MalformedError(f"{where}: no HTTP: {one_line(error.message)}") from None
        except (aiohttp.ClientError, OSError) as error:
            if type(error) is TimeoutError:  # of this request, not of a connection
                raise RetryableError(f"{where}: no whole answer in {timeout_s:g} s") from None
            reason = f"{where}: {type(error).__name__}: {one_line(error)}"
            raise ConnectionLostError(reason) from None
        if status == 200:
            if len(body) > limit:
                raise MalformedError(f"{where}: the body is longer than {limit} bytes")
            return bytes(body)
        reason = f"{where}: status {status}: {one_line(body.decode(errors='replace'))}"
        if status < 400:
            raise MalformedError(reason)
        kind = RetryableError if status in _RETRYABLE else RefusedError
        raise kind(reason, status=status)
