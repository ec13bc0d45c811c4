"""The command, called in this process."""

from __future__ import annotations

import io
import operator
import os
import signal
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

import pytest

import trajpack
from trajpack.cli import run


class Done(NamedTuple):
    status: int
    stdout: str
    stderr: str


def call(*arguments: Any) -> Done:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = run([str(argument) for argument in arguments])
    return Done(status, out.getvalue(), err.getvalue())


def refusal(*arguments: Any) -> str:
    """Return the one line that says what is wrong, after checking that it is all there is."""
    done = call(*arguments)
    assert done.status == 2
    assert not done.stdout
    *before, line = done.stderr.splitlines()
    assert line.startswith("trajpack: error: ")
    assert not any("error" in other for other in before)
    return line


def signal_before(monkeypatch: pytest.MonkeyPatch, place: str, *numbers: signal.Signals) -> None:
    """Send this process signals when the command first calls ``place``, a path in trajpack."""
    original, pending = operator.attrgetter(place)(trajpack), [*numbers]

    def signalled(*arguments: Any, **options: Any) -> Any:
        while pending:
            os.kill(os.getpid(), pending.pop(0))
        return original(*arguments, **options)

    monkeypatch.setattr(f"trajpack.{place}", signalled)
