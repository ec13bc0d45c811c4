"""Signals whose exception is lost: in a finalizer, or in a package that catches all."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.commands.command import call
from trajpack.commands.interruption import Interruption

pytestmark = pytest.mark.usefixtures("default_signals")
SIZES = ["--num-prompts", "2", "--turns", "1", "--max-new-tokens", "4"]


def lose_signal_in(monkeypatch: pytest.MonkeyPatch, command: str, name: str) -> None:
    """Interrupt this process when the command calls a function, and catch the exception."""
    module = import_module(f"trajpack.commands.{command}")
    original = getattr(module, name)

    def interrupted(*arguments: Any, **options: Any) -> Any:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, interrupted)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_work_does_not_begin(number: int) -> None:
    begun = []

    async def work() -> None:
        begun.append("episodes")

    with Interruption() as interruption:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(interruption.run(work(), on_stop=lambda: None, saving="saving"))
    assert begun == []
    assert interruption.status == 128 + number


@pytest.mark.parametrize("is_logged", [False, True])
def test_a_rollout_ends_also_if_its_log_is_complete(
    is_logged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, out = tmp_path / "log", tmp_path / "again.safetensors"
    command = ["rollout", *SIZES, "--log", log]
    if is_logged:
        assert call(*command, "--out", tmp_path / "batch.safetensors").status == 0
    lose_signal_in(monkeypatch, "rollout", "prepare_rollout")
    done = call(*command, "--out", out)
    assert done.status == 130
    assert done.stderr.endswith(f"interrupted: no batch was written; {log} has what has finished\n")
    assert not out.exists()
