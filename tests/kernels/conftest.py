"""Fixtures of the kernel tests: which implementation, and what the compiler makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Skip a test that runs a kernel on CPU tensors where the interpreter is off."""
    if not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("the interpreter is off where a GPU is present")


@pytest.fixture(scope="session", params=["torch", "triton"])
def impl(request: pytest.FixtureRequest) -> str:
    """Name of an implementation that takes CPU tensors; Triton's runs in its interpreter."""
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    return str(request.param)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``compile_kernels.py`` measures, run once for all workers of the session."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    result = folder / "compiled_kernels.json"
    with FileLock(folder / "compiled_kernels.lock"):
        if not result.exists():
            result.write_text(_compile(folder / "triton_cache"))
    return dict(json.loads(result.read_text()))


def _compile(cache: Path) -> str:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", str(script)],
        env={**environment, "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
