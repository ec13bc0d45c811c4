"""Signals while a command has no results to keep yet."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import pytest

from trajpack.commands.interruption import Interruption


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_whose_exception_is_lost_ends_the_work_before_it_begins(number: int) -> None:
    begun = []

    async def work() -> None:
        begun.append("episodes")

    with Interruption() as interruption:
        with suppress(KeyboardInterrupt):  # as a package that is imported may do
            os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(interruption.run(work(), on_stop=lambda: None, saving="saving"))
    assert begun == []
    assert interruption.status == 128 + number
