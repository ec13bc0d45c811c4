"""Standard streams that cannot end a command's work."""

from __future__ import annotations

import errno
import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from trajpack.agent.errors import SetupError
from trajpack.commands.terminal import Outlet, make_console, outlets, results, say, tell


class Failing(io.StringIO):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.raised = error

    def write(self, text: str) -> int:
        raise self.raised


@pytest.mark.parametrize("error", [OSError(errno.EIO, "gone"), BrokenPipeError(), ValueError()])
def test_text_that_cannot_be_written_is_dropped(error: Exception) -> None:
    with redirect_stderr(Failing(error)), redirect_stdout(None), outlets():
        say("a word")
        tell(make_console(stderr=True), "another")
        sys.stdout.write("nowhere")
        sys.stdout.flush()
    assert sys.stdout is not None


def test_a_write_in_the_middle_of_another_does_not_close_an_outlet() -> None:
    stream = Failing(RuntimeError("reentrant call"))
    outlet = Outlet(stream)
    outlet.write("lost")
    assert outlet.error is None
    stream.write = io.StringIO().write  # type: ignore[method-assign]
    assert outlet.write("kept") == 4


def test_the_first_error_is_kept_and_later_text_is_dropped() -> None:
    stream = Failing(OSError(errno.ENOSPC, "full"))
    outlet = Outlet(stream)
    outlet.write("a")
    stream.raised = OSError(errno.EIO, "gone")
    outlet.write("b")
    assert outlet.error is not None
    assert outlet.error.errno == errno.ENOSPC


def test_results_that_were_not_written_are_an_error_unless_the_reader_went_away() -> None:
    with redirect_stdout(Failing(BrokenPipeError())), outlets(), results():
        tell(make_console(), "a line")
    full = Failing(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    message = "cannot write standard output: No space left on device"
    with (
        redirect_stdout(full),
        outlets(),
        pytest.raises(SetupError, match=message),
        results(),
    ):
        tell(make_console(), "a line")


def test_the_streams_come_back() -> None:
    before = sys.stdout, sys.stderr
    with outlets():
        assert isinstance(sys.stdout, Outlet)
    assert (sys.stdout, sys.stderr) == before
