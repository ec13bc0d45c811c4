from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from trajpack.agent.observability.metrics import RolloutMetrics
from trajpack.agent.observability.server import MetricsServer, serve_metrics


def num_threads() -> int:
    return sum(thread.name.startswith(("trajpack", "Thread-")) for thread in threading.enumerate())


def answered(server: MetricsServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


def test_a_scraper_reads_the_counts() -> None:
    metrics = RolloutMetrics()
    with serve_metrics(metrics.registry) as server:
        assert server.url == f"http://127.0.0.1:{server.port}/metrics"
        for k in range(3):
            metrics.episode_started(f"q@{k}", 0)
        with urlopen(server.url) as page:
            assert page.headers["Content-Type"].startswith("text/plain; version=")
            assert "Python" not in page.headers["Server"]
            families = {f.name: f for f in text_string_to_metric_families(page.read().decode())}
        (sample,) = families["trajpack_episodes_in_flight"].samples
        assert sample.value == 3
        openmetrics = Request(server.url, headers={"Accept": "application/openmetrics-text"})
        with urlopen(openmetrics) as page:
            assert page.headers["Content-Type"].startswith("application/openmetrics-text")
            assert page.read().endswith(b"# EOF\n")


def test_other_paths_and_methods_are_refused() -> None:
    with serve_metrics(RolloutMetrics().registry) as server:
        for path in ("/", "/metrics/..", "/etc/passwd"):
            with pytest.raises(HTTPError, match="404") as caught:
                urlopen(server.url.removesuffix("/metrics") + path)
            caught.value.close()
        assert b" 501 " in answered(server, b"POST /metrics HTTP/1.0\r\n\r\n")
        assert b" 414 " in answered(server, b"GET /" + b"x" * 70_000 + b" HTTP/1.0\r\n\r\n")
        with urlopen(server.url + "?name=x") as page:
            assert page.status == 200


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "", "::", "192.0.2.1", "example.com", "127.0.0.1.evil"]
)
def test_other_machines_are_let_in_only_if_that_was_asked_for(host: str) -> None:
    with pytest.raises(ValueError, match="of this machine alone unless allow_remote"):
        serve_metrics(RolloutMetrics().registry, host=host)


def test_a_host_of_this_machine_needs_no_permission_and_another_does() -> None:
    registry = RolloutMetrics().registry
    with serve_metrics(registry, host="localhost") as server, urlopen(server.url) as page:
        assert page.status == 200
    with serve_metrics(registry, host="0.0.0.0", allow_remote=True) as server:
        assert b"trajpack_turns_total" in answered(server, b"GET /metrics HTTP/1.0\r\n\r\n")


def test_ports_that_are_none_or_are_taken_are_refused() -> None:
    registry = RolloutMetrics().registry
    with pytest.raises(ValueError, match="port must be from 0 to 65535, got 70000"):
        serve_metrics(registry, port=70_000)
    with serve_metrics(registry) as server, pytest.raises(OSError, match="in use"):
        serve_metrics(registry, port=server.port)


def is_ended(connection: socket.socket) -> bool:
    """Wait until the server ends a connection; it may do so before it has read all."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_closing_leaves_no_thread_and_frees_the_port() -> None:
    before = num_threads()
    server = serve_metrics(RolloutMetrics().registry)
    with urlopen(server.url) as page:
        page.read()
    # a client that connects and says nothing must not hold the server up
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        silent.sendall(b"GET /met")
        wait_for(lambda: num_threads() == before + 2)
        server.close()
        assert num_threads() == before
        assert is_ended(silent)
    server.close()  # again, harmless
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    with serve_metrics(RolloutMetrics().registry, port=server.port) as again:
        assert again.port == server.port


def test_a_crowd_of_silent_clients_is_bounded_and_makes_room() -> None:
    before = num_threads()
    with serve_metrics(RolloutMetrics().registry) as server, contextlib.ExitStack() as crowd:
        silent = [crowd.enter_context(connection_to(server)) for _ in range(40)]
        # those that came first make room for those that come later
        assert all(is_ended(connection) for connection in silent[:24])
        wait_for(lambda: num_threads() == before + 1 + 16)
        with urlopen(server.url) as page:
            assert page.status == 200
        assert is_ended(silent[24])
        for connection in silent[25:]:
            connection.close()
        wait_for(lambda: num_threads() == before + 1)


def connection_to(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def test_a_slow_request_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trajpack.agent.observability.server._REQUEST_S", 0.3)
    with serve_metrics(RolloutMetrics().registry) as server, connection_to(server) as dripping:
        dripping.sendall(b"GET /metrics HTTP/1.0\r\nX: ")
        with contextlib.suppress(ConnectionError):
            while True:  # without a deadline it is never cut off
                dripping.sendall(b"a")
                time.sleep(0.01)


def test_a_client_that_does_not_read_its_answer_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trajpack.agent.observability.server._REQUEST_S", 0.3)
    registry = CollectorRegistry()
    large = Gauge("large", "x" * (16 << 20), registry=registry)
    large.set(1)
    before = num_threads()
    with serve_metrics(registry) as server, connection_to(server) as deaf:
        deaf.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        wait_for(lambda: num_threads() == before + 2)
        wait_for(lambda: num_threads() == before + 1)
        with connection_to(server):
            pass


@pytest.mark.parametrize("start", [b"", b"GET /metrics HTTP/1.0\r\nX: ", b"GET /metrics HTTP/1.0"])
def test_clients_that_drip_keep_no_scrape_waiting(start: bytes) -> None:
    """Also where each one that is cut off comes back at once."""
    stopped = threading.Event()

    def drip() -> None:
        while not stopped.is_set():
            with contextlib.suppress(ConnectionError), connection_to(server) as connection:
                connection.sendall(start)
                while not stopped.is_set():
                    connection.sendall(b"a")
                    stopped.wait(0.02)

    with serve_metrics(RolloutMetrics().registry) as server:
        clients = [threading.Thread(target=drip, name="drip") for _ in range(16)]
        for client in clients:
            client.start()
        try:
            for _ in range(20):
                with urlopen(server.url, timeout=60) as page:
                    assert b"trajpack_turns_total" in page.read()
        finally:
            stopped.set()
            for client in clients:
                client.join()


@pytest.mark.attack
def test_floods_are_answered_and_leave_no_thread_or_file(tries: Callable[[int], int]) -> None:
    """Scrapes from many clients at once, and requests that are none, as in the table of attacks."""
    before = num_threads(), len(os.listdir("/proc/self/fd"))
    paths = [b"/", b"/metrics/", b"/metrics/..", b"/../metrics", b"/%6detrics"]
    paths += [b"/metrics%00", b"/etc/passwd", b"http://evil/metrics", b"*", b"/METRICS", b"?"]
    requests = [b"GET %s HTTP/1.0\r\n\r\n" % path for path in paths]
    requests += [
        *(b"POST /metrics HTTP/1.0\r\n\r\n", b"GET /metrics\r\n\r\n", b"\r\n\r\n", bytes(99)),
        b"GET /metrics HTTP/1.0\r\n" + b"x: y\r\n" * 200 + b"\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.0\r\n\r\n",
        b"GET /metrics HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01",
    ]
    scrape = b"GET /metrics HTTP/1.0\r\n\r\n"
    with serve_metrics(RolloutMetrics().registry) as server:

        def ask(number: int) -> None:
            request = scrape if number % 2 else requests[number // 2 % len(requests)]
            with contextlib.suppress(ConnectionError):
                answered(server, request)

        with ThreadPoolExecutor(12) as clients:  # all of them find a place
            list(clients.map(ask, range(tries(1800))))
        for request in requests:
            assert b" 200 " not in answered(server, request).split(b"\r\n")[0], request
        assert b"trajpack_turns_total" in answered(server, scrape)
    assert (num_threads(), len(os.listdir("/proc/self/fd"))) == before


def wait_for(condition: object, seconds: float = 60.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
