"""What tests against a real server share: the mark that sets them apart, a model, the servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.engines import vllm_server
from tests.engines.vllm_server import RunningServer, TinyModel

_figures = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_figures] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.engines)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for line in config.stash[_figures]:
        terminalreporter.write_line(line)


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Take a line to be shown at the end of the run."""
    return request.config.stash[_figures].append


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return vllm_server.write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def serve(
    tiny: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., RunningServer]]:
    """Give a server that was started with these arguments; there is one at a time."""
    running: dict[tuple[str, ...], RunningServer] = {}
    with ExitStack() as present:

        def give(*arguments: str) -> RunningServer:
            if arguments not in running:
                present.close()
                running.clear()
                log = tmp_path_factory.mktemp("vllm") / "server.log"
                server = vllm_server.vllm_server(tiny, log, *arguments)
                running[arguments] = present.enter_context(server)
            return running[arguments]

        yield give


@pytest.fixture
def server(serve: Callable[..., RunningServer]) -> RunningServer:
    """Give a server with all that `VLLMEngine` makes use of."""
    return serve("--enable-scale-out")
