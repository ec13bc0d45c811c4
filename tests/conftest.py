"""Set-up of every test: kernels on the host, reproducible examples, visible garbage."""

from __future__ import annotations

import gc
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ptx.tensors import freeze_objects
from tests.support import dealing
from tests.support.slow import leave_out_repeated_values
from tests.support.warm_programs import WarmPrograms

try:
    from hypothesis import settings
except ImportError:  # the GPU tests do without
    pass
else:
    settings.register_profile(
        "trajpack", max_examples=25, deadline=None, derandomize="CI" in os.environ
    )
    settings.register_profile("thorough", max_examples=250, deadline=None)
    settings.load_profile("trajpack")  # the other: --hypothesis-profile=thorough

multiprocessing.get_start_method()  # settled, or torchrl has later workers of the process spawned
torch.set_num_threads(1)  # tensors are small and workers many: more threads would wait in circles
os.environ["OMP_NUM_THREADS"] = "1"  # for programs that tests start

MOST_COLLECTED = 200_000
"""Objects that the garbage collector looks through."""
MOST_KEPT = 1500
"""Entries of a cache of Triton: what some sessions compile in which every kernel was changed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="run attacks at full size, not at a twentieth of it"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Let Ctrl-C interrupt, also where pytest is started in the background by a script.

    What Triton compiles is kept between sessions, for all workers; ``--cache-clear`` empties it.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "cache"):  # not with -p no:cacheprovider
        kept = Path(config.cache.mkdir("triton"))
        if "PYTEST_XDIST_WORKER" not in os.environ and len(os.listdir(kept)) > MOST_KEPT:
            shutil.rmtree(kept)
        os.environ["TRITON_CACHE_DIR"] = str(kept)


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    dealing.refuse_a_second_cluster(items)
    leave_out_repeated_values(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal as ``dealing`` says, unless another way than the usual one is asked for."""
    return dealing.scheduler(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    """Spare the garbage collector what lives until the end: torch and thousands of tests."""
    freeze_objects()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def spared_collector() -> None:
    """Spare the garbage collector what earlier modules have imported, compiled and cached.

    Transformers and some tests collect garbage, which takes a second for a million objects.
    """
    if len(gc.get_objects()) > MOST_COLLECTED:
        freeze_objects()


@pytest.fixture(scope="session")
def tries(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """Give the number of tries of an attack: all of them with ``--full``, else a twentieth."""
    is_full = request.config.getoption("--full")
    return lambda full: full if is_full else max(1, full // 20)


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """Give a folder in memory where there is room, for attacks that synchronise files often."""
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK) or shutil.disk_usage(memory).free < 500 << 20:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def warm_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPrograms]:
    """Programs that start at once, for tests of what they do after they have started."""
    folder = tmp_path_factory.getbasetemp()
    programs = WarmPrograms(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)
    yield programs
    programs.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Run a Ray cluster, one for all tests that are dealt to the worker (see ``dealing``)."""
    from tests.agent.ray.ray_cases import running_cluster

    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def warm_judge(warm_programs: WarmPrograms, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have processes that check answers start at once."""
    script = warm_programs.script("judge")
    monkeypatch.setattr("trajpack.agent.environments.math_verify.SCRIPT", script)


@pytest.fixture
def executor() -> Iterator[Any]:
    """Run Triton's kernels on CPU tensors, as they are compiled for sm_90; a fault is an error."""
    from tests.ptx.executor import on_executor

    with on_executor() as running:
        yield running
