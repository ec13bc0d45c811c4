"""Formats of trainers, and what a training step reads, on real hardware: nothing waits."""

from __future__ import annotations

import pytest

from tests.gpu.conftest import no_waiting
from tests.packing.test_no_waits import HOST, OF_BATCHES, OF_TREES, TREE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", OF_BATCHES)
def test_nothing_waits_for_a_batch(name: str) -> None:
    OF_BATCHES[name](HOST.to("cuda"))  # compiles
    batch = HOST.to("cuda")
    with no_waiting():
        OF_BATCHES[name](batch)


@pytest.mark.parametrize("name", OF_TREES)
def test_nothing_waits_for_a_tree(name: str) -> None:
    OF_TREES[name](TREE.to("cuda"))  # compiles
    tree = TREE.to("cuda")
    with no_waiting():
        OF_TREES[name](tree)
