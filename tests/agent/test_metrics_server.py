from __future__ import annotations

import socket
import threading
import time
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from trajpack.agent.metrics import RolloutMetrics
from trajpack.agent.metrics_server import MetricsServer, serve_metrics


def num_threads() -> int:
    return sum(thread.name.startswith(("trajpack", "Thread-")) for thread in threading.enumerate())


def answered(server: MetricsServer, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(65536):
            answer += piece
    return answer


def test_a_scraper_reads_what_was_counted() -> None:
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


def test_nothing_else_is_there_to_be_had() -> None:
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


def test_closing_leaves_no_thread_and_frees_the_port() -> None:
    before = num_threads()
    server = serve_metrics(RolloutMetrics().registry)
    with urlopen(server.url) as page:
        page.read()
    # a client that connects and says nothing must not hold the server up
    with socket.create_connection(("127.0.0.1", server.port)) as silent:
        silent.sendall(b"GET /met")
        wait_for(lambda: num_threads() == before + 2)
        began = time.perf_counter()
        server.close()
        assert time.perf_counter() - began < 5
        assert num_threads() == before
        assert silent.recv(1) == b""
    server.close()  # again, harmless
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port))
    with serve_metrics(RolloutMetrics().registry, port=server.port) as again:
        assert again.port == server.port


def test_a_crowd_of_silent_clients_is_bounded() -> None:
    before = num_threads()
    with serve_metrics(RolloutMetrics().registry) as server:
        crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(40)]
        # those that are turned away hear so; then all the others have got their thread
        turned_away = sum(connection.recv(1) == b"" for connection in crowd[16:])
        assert turned_away == 24
        assert num_threads() == before + 1 + 16
        for connection in crowd[:16]:
            connection.close()
        wait_for(lambda: num_threads() == before + 1)
        with urlopen(server.url) as page:
            assert page.status == 200
        for connection in crowd[16:]:
            connection.close()


def wait_for(condition: object, seconds: float = 5.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)
