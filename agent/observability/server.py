"""`serve_metrics`: a Prometheus endpoint with a limit of connections and of the time of each.

The server of prometheus_client has neither, so that slow clients keep threads without limit.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from trajpack.packing.optional import require

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_REQUEST_S = 10.0
_MAX_CONNECTIONS = 16


def serve_metrics(
    registry: CollectorRegistry,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    allow_remote: bool = False,
) -> MetricsServer:
    """Serve the metrics of ``registry`` at ``/metrics``, in the format that a scraper asks for.

    Args:
        registry: For instance `RolloutMetrics.registry`.
        host: Address to listen at. There is no login, so it must be a loopback address
            (``127.0.0.1``, ``::1`` or ``localhost``) unless ``allow_remote``.
        port: 0 takes a free one, see `MetricsServer.port`.
        allow_remote: Whether other machines may reach ``host``.

    Raises:
        ModuleNotFoundError: If prometheus_client is not installed (extra ``metrics``).
        OSError: If the address does not exist or the port is taken.
        ValueError: If other machines could reach ``host`` without ``allow_remote``, or the port
            is out of range.

    Cost: a few milliseconds a scrape, in another thread. A request and its answer have 10 seconds
    in all. There are 16 connections at most: a new one cuts the oldest one whose request is not
    complete, so that slow clients keep no scrape waiting.

    Example:
        >>> from urllib.request import urlopen
        >>> from trajpack.agent.observability.metrics import RolloutMetrics
        >>> with serve_metrics(RolloutMetrics().registry) as server, urlopen(server.url) as page:
        ...     b"trajpack_turns_total 0.0" in page.read()
        True
    """
    require("prometheus_client")  # now, and not at the first scrape
    if not 0 <= port < 1 << 16:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    is_local = host == "localhost"
    with contextlib.suppress(ValueError):
        is_local = is_local or ipaddress.ip_address(host).is_loopback
    if not host or not (allow_remote or is_local):
        raise ValueError(
            f"host must be an address of this machine alone unless allow_remote, got {host!r}"
        )
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return MetricsServer(family, (str(address[0]), port), registry)


class MetricsServer(ThreadingHTTPServer):
    """An HTTP server in its own thread that answers ``GET /metrics``.

    Made by `serve_metrics`.
    """

    daemon_threads = False  # so that closing waits for them
    request_queue_size = 4 * _MAX_CONNECTIONS

    def __init__(
        self,
        family: socket.AddressFamily,
        address: tuple[str, int],
        registry: CollectorRegistry,
    ) -> None:
        self.address_family, self.registry = family, registry
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, float] = {}
        """Deadline of connections without a complete request, the oldest first."""
        self._answering: dict[socket.socket, float] = {}
        """Deadline of the other connections."""
        super().__init__(address, _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.05,), daemon=True, name="trajpack-metrics"
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """Port that it listens at."""
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """Address for a scraper."""
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening, cut open connections, and wait for the threads to end."""
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
        with self._lock:
            for request in self._waiting | self._answering:
                self._cut(request)
        self.server_close()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Admit a connection; cut the oldest waiting one, or refuse, if there are too many."""
        with self._lock:
            if len(self._waiting) + len(self._answering) >= _MAX_CONNECTIONS:
                if not self._waiting:
                    return False
                self._cut(next(iter(self._waiting)))
            self._waiting[request] = time.monotonic() + _REQUEST_S
            return True

    def note_request(self, request: socket.socket) -> None:
        """Protect a connection whose request is complete from being cut for a new one."""
        with self._lock:
            if request in self._waiting:
                self._answering[request] = self._waiting.pop(request)

    def service_actions(self) -> None:
        """Cut connections behind their deadline; called twenty times a second."""
        with self._lock:
            for request, deadline in (self._waiting | self._answering).items():
                if time.monotonic() > deadline:
                    self._cut(request)

    def _cut(self, request: socket.socket) -> None:
        self._forget(request)
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def _forget(self, request: socket.socket) -> None:
        self._waiting.pop(request, None)
        self._answering.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection and end it."""
        with self._lock:
            self._forget(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection, such as a scraper that disconnects."""


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "trajpack", ""
    server: MetricsServer

    def do_GET(self) -> None:
        from prometheus_client.exposition import choose_encoder

        self.server.note_request(self.connection)
        if self.path.split("?")[0] != "/metrics":
            return self.send_error(404)
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        body = encode(self.server.registry)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log: a line would repeat text from clients."""
