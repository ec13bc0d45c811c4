"""Every kernel of these tests runs on the executor; `take.c` is compiled for those that ask."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.compiled_take import compiled_take
from trajpack.packing.buffer import take


@pytest.fixture(autouse=True)
def _on_executor(executor: Any) -> None:
    """Run Triton's kernels on CPU tensors."""


@pytest.fixture(scope="session")
def in_c(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return `take` of take.c as it is now; skip where there is no compiler."""
    return take.bound(compiled_take(tmp_path_factory.mktemp("take")))


@pytest.fixture(params=["python", "c"])
def either_take(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let buffers take calls by the reference, and then in C."""
    chosen = request.getfixturevalue("in_c") if request.param == "c" else None
    monkeypatch.setattr(take, "_in_c", chosen)
    return str(request.param)
