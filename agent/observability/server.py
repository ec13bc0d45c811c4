"""Shows metrics to whoever may ask: on this machine, unless more is asked for."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from trajpack.packing.optional import require

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_REQUEST_S = 10.0
_MAX_CONNECTIONS = 16


class MetricsServer:
    """A web server in a thread of its own that answers ``GET /metrics``; see `serve_metrics`.

    Closed by `close`, or as a context manager; then no thread of it is left.
    """

    def __init__(self, listener: _Listener) -> None:
        self._listener = listener
        self._thread = threading.Thread(
            target=listener.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True,
            name="trajpack-metrics",
        )  # fmt: skip
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.server_address[1])

    @property
    def url(self) -> str:
        """What a scraper asks for."""
        host = str(self._listener.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop listening, cut what is being answered, and wait for the threads to end."""
        if self._thread.is_alive():
            self._listener.shutdown()
            self._thread.join()
        self._listener.server_close()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def serve_metrics(
    registry: CollectorRegistry,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    allow_remote: bool = False,
) -> MetricsServer:
    """Show the metrics of ``registry`` at ``/metrics``, in the format that a scraper asks for.

    Args:
        registry: For instance `RolloutMetrics.registry`.
        host: Address to listen at. Nobody has to log in, so it must be one of this machine's
            own (``127.0.0.1``, ``::1`` or ``localhost``) unless ``allow_remote``.
        port: 0 takes a free one, see `MetricsServer.port`.
        allow_remote: Whether ``host`` may be one that other machines reach.

    Raises:
        ModuleNotFoundError: If prometheus_client is not installed (extra ``metrics``).
        OSError: If the address is not there or the port is taken.
        ValueError: If other machines could reach ``host`` and that was not asked for, or
            there is no such port.

    Cost: a few milliseconds a scrape, in another thread. A request and its answer have 10 seconds
        in all. There are 16 connections at most: the oldest one whose request is not complete is
        cut off for a new one, so that clients which say little keep no scrape waiting.

    Example:
        >>> from urllib.request import urlopen
        >>> from trajpack.agent.observability.metrics import RolloutMetrics
        >>> with serve_metrics(RolloutMetrics().registry) as server, urlopen(server.url) as page:
        ...     b"trajpack_turns_total 0.0" in page.read()
        True
    """
    require("prometheus_client")  # rather now than when a scraper asks

    if not 0 <= port < 1 << 16:
        raise ValueError(f"port must be from 0 to 65535, got {port}")
    if not host or not (allow_remote or _is_loopback(host)):
        raise ValueError(
            f"host must be an address of this machine alone unless allow_remote, got {host!r}"
        )
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]

    answer = type("Answer", (_Answer,), {"registry": registry})
    listener = type("Listener", (_Listener,), {"address_family": family})
    return MetricsServer(listener((str(address[0]), port), answer))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass
class _Connection:
    """What is known of a connection that has a thread."""

    deadline: float
    has_asked: bool = False
    """Whether its request is complete."""
    is_cut: bool = False
    """Whether it was ended, and its thread is about to end."""


class _Listener(ThreadingHTTPServer):
    """Answers each connection in a thread; closing it cuts the connections and joins them."""

    daemon_threads = False  # so that closing waits for them
    block_on_close = True
    request_queue_size = 4 * _MAX_CONNECTIONS

    def __init__(self, *args: Any) -> None:
        self._connections: dict[socket.socket, _Connection] = {}  # in the order they came
        self._lock = threading.Lock()
        self._is_closed = False
        super().__init__(*args)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            if self._is_closed or len(self._connections) >= 2 * _MAX_CONNECTIONS:
                return False
            alive = {key: one for key, one in self._connections.items() if not one.is_cut}
            if len(alive) >= _MAX_CONNECTIONS:
                oldest = next((key for key, one in alive.items() if not one.has_asked), None)
                if oldest is None:
                    return False
                self._cut(oldest)
            self._connections[request] = _Connection(time.monotonic() + _REQUEST_S)
            return True

    def note_request(self, request: socket.socket) -> None:
        """Let a connection whose request is complete be answered."""
        with self._lock:
            self._connections[request].has_asked = True

    def service_actions(self) -> None:
        """Cut connections that have had their time; called twenty times a second."""
        with self._lock:
            for request, connection in self._connections.items():
                if not connection.is_cut and time.monotonic() > connection.deadline:
                    self._cut(request)

    def _cut(self, request: socket.socket) -> None:
        self._connections[request].is_cut = True
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a scraper that goes away is its own business."""

    def server_close(self) -> None:
        with self._lock:
            self._is_closed = True
            for request in self._connections:
                self._cut(request)
        super().server_close()


class _Answer(BaseHTTPRequestHandler):
    server_version, sys_version = "trajpack", ""
    registry: CollectorRegistry
    server: _Listener

    def do_GET(self) -> None:
        from prometheus_client.exposition import choose_encoder

        self.server.note_request(self.connection)
        if self.path.split("?")[0] != "/metrics":
            return self.send_error(404)
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        body = encode(self.registry)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: what a client sends is not to be repeated."""
