"""A process with everything imported that forks into programs: each starts in milliseconds.

A fresh ``trajpack rollout`` imports torch, transformers, reasoning-gym and sympy for ten seconds
before it does in one what a test is about. Here a process imports them once, starts no thread and
does nothing else; for each program it forks, takes over the caller's streams and working folder,
and goes on as a fresh interpreter would, to its end. The process that the caller sees stands
between: it ends with the program's status, and the program ends if it is killed. What is about
the start of an interpreter needs a fresh one.

All workers of a session share the process; it ends when none of them is left.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

FORKING = Path(__file__).with_name("warm_process.py")
CLIENT = Path(__file__).with_name("warm_client.py")
PROGRAMS = ("trajpack", "judge", "script")
ADDRESS = "warm.socket"
START_TIMEOUT_S = 300


class WarmPrograms:
    """The programs: ``trajpack``; ``judge``, which checks answers; a ``script`` of Python.

    They have the environment of the session, without Triton's interpreter.

    Args:
        folder: Of the session, the same for all its workers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._alive: socket.socket | None = None

    def script(self, program: str) -> Path:
        """Return a script that is the program: any Python runs it, with the program's options."""
        self._start()
        return self._folder / f"{program}.py"

    def command(self, program: str) -> list[str]:
        """Return a command line that starts the program."""
        return [sys.executable, "-I", "-S", str(self.script(program))]

    def close(self) -> None:
        """Let the process end, if no other worker of the session uses it."""
        if self._alive is not None:
            self._alive.close()

    def _start(self) -> None:
        """Hold a connection to the process, and start it if nobody has."""
        if self._alive is not None:
            return
        path = self._folder / ADDRESS
        with FileLock(path.with_suffix(".lock")):
            with suppress(OSError):
                self._alive = _hold(path)
                return
            with suppress(FileNotFoundError):
                path.unlink()
            for program in PROGRAMS:
                self._write_script(program)
            subprocess.run(
                [sys.executable, "-P", str(FORKING), str(path), str(self._folder)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"TRITON_INTERPRET": "0"},
                start_new_session=True,
                check=True,
            )
            deadline = time.monotonic() + START_TIMEOUT_S
            while self._alive is None:
                with suppress(OSError):
                    self._alive = _hold(path)
                assert time.monotonic() < deadline, "the warm process did not start"
                time.sleep(0.05)

    def _write_script(self, program: str) -> None:
        constants = f"ADDRESS = {str(self._folder / ADDRESS)!r}\nPROGRAM = {program!r}\n"
        source = CLIENT.read_text().replace('ADDRESS = PROGRAM = ""\n', constants)
        (self._folder / f"{program}.py").write_text(source)


def _hold(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
        connection.send(b"hold")
    except OSError:
        connection.close()
        raise
    return connection
