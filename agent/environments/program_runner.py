"""`BubblewrapRunner`: runs untrusted Python programs, each in namespaces of its own."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import secrets
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from trajpack.agent.errors import SetupError

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")
_OUTPUT_BYTES = 1 << 20
_ENDS = {0: "exited", 77: "memory_limit", 128 + signal.SIGXCPU: "cpu_limit"}
_REMEDY = (
    "Install the package bubblewrap (0.8 or later) where it may make namespaces (for users: user "
    "namespaces; for root in a container: CAP_SYS_ADMIN), or pass a function of yours, run_program"
)
# A fixed hash seed gives sets of strings the same order in each run.
_OPTIONS = """--unshare-ipc --unshare-pid --unshare-net --unshare-uts --die-with-parent
--new-session --cap-drop ALL --clearenv --setenv PYTHONHASHSEED 0 --chdir /
--perms 0755 --dir /dev --dev-bind /dev/null /dev/null"""
# The launcher changes root's user id, and has no capability after that.
_OF_ROOT = "--cap-add CAP_SETUID --cap-add CAP_SETGID"
_OF_USERS = "--unshare-user --disable-userns"
# Runs in the sandbox before the program; "ready" tells its failures from those of the program.
_LAUNCHER = """
import os, resource, sys
source = open(PROGRAM, "rb").read()
for name, limits in LIMITS.items():
    resource.setrlimit(getattr(resource, name), limits)
if USER:
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
os.write(2, b"ready")
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
module = sys.modules["__main__"] = type(sys)("__main__")
try:
    exec(compile(source, "<answer>", "exec"), module.__dict__)
except MemoryError:
    os._exit(77)
"""


class BubblewrapRunner:
    """Runs each program in an interpreter of its own inside ``bwrap``.

    A program has the standard library and its input. It sees no network, no other processes and no
    files but its interpreter and libraries, all read-only. All of it ends with this process.

    Args:
        cpu_s: Processor time of each process, in whole seconds.
        wall_s: Seconds from the start of a program to its end.
        memory_bytes: Address space of each process; the interpreter needs 64 MiB.
        max_processes: Processes and threads of one program, the first one included.

    Raises:
        ValueError: If a limit is not positive, or but for ``wall_s`` no integer.
        SetupError: If ``bwrap`` is missing or forbidden here; the message says what to do.
    """

    def __init__(
        self,
        *,
        cpu_s: int = 5,
        wall_s: float = 15.0,
        memory_bytes: int = 512 << 20,
        max_processes: int = 8,
    ) -> None:
        counts = (cpu_s, memory_bytes, max_processes)
        if not (wall_s > 0 and all(isinstance(count, int) and count > 0 for count in counts)):
            raise ValueError(f"limits must be positive, and integers but for wall_s, got {counts}")
        self._wall_s = wall_s
        self._limits = {"RLIMIT_CPU": (cpu_s, cpu_s + 1), "RLIMIT_AS": (memory_bytes,) * 2}
        self._limits |= {"RLIMIT_FSIZE": (_OUTPUT_BYTES,) * 2, "RLIMIT_NOFILE": (64, 64)}
        try:
            # The kernel counts no processes of the machine's root: programs get an unused user id.
            ids = Path("/proc/self/uid_map").read_text()
            self._is_root = os.geteuid() == 0 and "4294967295" in ids
            most = max_processes + (not self._is_root)  # a user's bwrap counts too
            self._limits |= {"RLIMIT_NPROC": (most, most), "RLIMIT_MSGQUEUE": (0, 0)}
            self._sandbox = _sandbox(self._is_root)
            with ThreadPoolExecutor(1) as thread:  # an event loop may run in this one
                trial = thread.submit(asyncio.run, self("import decimal")).result()
            if trial != ("exited", ""):
                raise RuntimeError(f"a program that imports decimal ended with {trial!r}")
        except (OSError, RuntimeError) as error:
            raise SetupError(f"BubblewrapRunner: {error}. {_REMEDY}") from error

    async def __call__(self, program: str, stdin: str = "") -> tuple[str, str]:
        """Run a program as ``__main__``; return its outcome and its standard output.

        The outcome is ``"exited"`` for exit status 0, and otherwise ``"crashed"``, ``"cpu_limit"``,
        ``"wall_limit"``, ``"memory_limit"``, or ``"output_limit"`` for a full MiB of output.

        Raises:
            RuntimeError: If it was not run, for a reason outside the program.
        """
        user = 0x70000000 + secrets.randbits(27) if self._is_root else 0
        with _file(program) as code, _file(stdin) as lines, _file() as output, _file() as errors:
            values = f"LIMITS, USER, PROGRAM = {self._limits!r}, {user}, {code.fileno()}"
            command = [*self._sandbox, "-sPSB", "-c", values + _LAUNCHER]
            files: dict[str, Any] = {"stdin": lines, "stdout": output, "stderr": errors}
            files |= {"pass_fds": [code.fileno()], "start_new_session": True}
            process = await asyncio.create_subprocess_exec(*command, **files)
            try:
                async with asyncio.timeout(self._wall_s):
                    await process.wait()
                outcome = _ENDS.get(process.returncode or 0, "crashed")
            except TimeoutError:
                outcome = "wall_limit"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    if process.returncode is None:
                        os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            text, error = (os.pread(file.fileno(), _OUTPUT_BYTES, 0) for file in (output, errors))
        if error != b"ready":
            raise RuntimeError(f"a program was not run: {error.decode('utf-8', 'replace')!r}")
        outcome = "output_limit" if len(text) == _OUTPUT_BYTES else outcome
        return outcome, text.decode("utf-8", "replace")


def _sandbox(is_root: bool) -> list[str]:
    """Return the command of the sandbox and of the interpreter in it."""
    python, prefix = os.path.realpath(sys.executable), os.path.realpath(sys.base_prefix)
    paths = list(dict.fromkeys([*_LIBRARIES, python, f"{prefix}/lib", f"{prefix}/lib64"]))
    command = ["bwrap", *_OPTIONS.split(), *(_OF_ROOT if is_root else _OF_USERS).split()]
    for folder in sorted({str(folder) for path in paths for folder in Path(path).parents}):
        command += ["--perms", "0755", "--dir", folder]
    for path in paths:
        command += ["--ro-bind-try", path, path]
        # Installed packages are hidden, since data sets with answers come as packages too.
        for packages in glob.glob(f"{glob.escape(path)}/python*/*-packages"):
            command += ["--tmpfs", packages, "--remount-ro", packages]
    return [*command, "--remount-ro", "/", "--", python]


def _file(text: str = "") -> BinaryIO:
    file = os.fdopen(os.memfd_create("trajpack"), "wb+")
    file.write(text.encode("utf-8", "replace"))
    file.seek(0)
    return file
