"""The fixture through which tests of a format reach the trainer's own package."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from tests.packing.adapters.peers import ABSENT, Peer, find_peer, stand_ins


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Peer]]:
    """Give a trainer's package by its name in `peers.txt`, or skip the test."""
    with ExitStack() as stack:

        def find(name: str) -> Peer:
            stack.enter_context(stand_ins(*ABSENT.get(name, "").split()))
            return find_peer(name, monkeypatch)

        yield find


def _trainer(name: str) -> Any:
    """Return a fixture of a trainer's package under its own name."""

    @pytest.fixture(name=name)
    def package(peer: Callable[[str], Peer]) -> Peer:
        return peer(name)

    return package


areal, openrlhf, skyrl, verl = map(_trainer, ("areal", "openrlhf", "skyrl", "verl"))


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
