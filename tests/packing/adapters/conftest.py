"""The fixture through which tests of a format reach the trainer's own package."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from tests.packing.adapters.model_kernels import flash_kernels
from tests.packing.adapters.peers import Peer, find_peer


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Peer]:
    """Give a trainer's package by its name in `peers.txt`, or skip the test."""
    return lambda name: find_peer(name, monkeypatch)


@pytest.fixture(scope="session")
def trl() -> SimpleNamespace:
    """TRL, whose own use of deprecated arguments is not what is tested."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOConfig, GRPOTrainer
        from trl.experimental.async_grpo import async_grpo_trainer, packing
        from trl.trainer import utils

        return SimpleNamespace(
            GRPOConfig=GRPOConfig,
            GRPOTrainer=GRPOTrainer,
            AsyncGRPOTrainer=async_grpo_trainer.AsyncGRPOTrainer,
            DataCollatorForRollout=async_grpo_trainer.DataCollatorForRollout,
            TreeRow=packing.TreeRow,
            utils=utils,
        )


@pytest.fixture(scope="module")
def flash_attention() -> Iterator[None]:
    """Let models take a stand-in of flash attention where their configuration asks for it."""
    with flash_kernels():
        yield
