"""Every kernel of these tests runs on the executor."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _on_executor(executor: Any) -> None:
    """Run Triton's kernels on CPU tensors."""
