"""Shows metrics to whoever may ask: on this machine, unless more is asked for."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from trajpack.packing.optional import require

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_SILENCE_S = 10.0
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

    Cost: a few milliseconds a scrape, in another thread; at most 16 are answered at once, and
        one that is silent for 10 seconds is cut off.

    Example:
        >>> from urllib.request import urlopen
        >>> from trajpack.agent.metrics import RolloutMetrics
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


class _Listener(ThreadingHTTPServer):
    """Answers each connection in a thread; closing it cuts the connections and joins them."""

    daemon_threads = False  # so that closing waits for them
    block_on_close = True
    request_queue_size = 4 * _MAX_CONNECTIONS

    def __init__(self, *args: Any) -> None:
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._is_closed = False
        super().__init__(*args)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            if self._is_closed or len(self._connections) >= _MAX_CONNECTIONS:
                return False
            self._connections.add(request)
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a scraper that goes away is its own business."""

    def server_close(self) -> None:
        with self._lock:
            self._is_closed = True
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        super().server_close()


class _Answer(BaseHTTPRequestHandler):
    server_version, sys_version = "trajpack", ""
    timeout = _SILENCE_S
    registry: CollectorRegistry

    def do_GET(self) -> None:
        from prometheus_client.exposition import choose_encoder

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
