"""The fixture of families of models with flash attention."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.packing.isolation.model_kernels import flash_kernels


@pytest.fixture(scope="module")
def flash_attention() -> Iterator[None]:
    """Let models take a stand-in of flash attention where their configuration asks for it."""
    with flash_kernels():
        yield
