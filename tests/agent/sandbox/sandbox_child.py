"""Runs programs in a `Sandbox` as another user, or where the kernel refuses or lies.

A script: it reads a request as JSON from standard input and writes a report. Modules are imported
before the user changes, so that only the interpreter need be readable for everybody.
"""

import contextlib
import ctypes
import json
import logging
import os
import signal
import struct
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor

NOBODY = 65534


def install_shim(rules):
    """Have system calls fail, or answer 0 and do nothing, in this process and all that it begins.

    A rule is ``[number, [[argument, test, value], ...], error]``: calls of that number fail with
    that error, or answer 0 for the error 0, where each of those arguments equals the value (test
    "==") or has any of its bits (test "&").
    """
    program = [(0x20, 0, 0, 0)]
    for number, conditions, error in rules:
        program.append((0x15, 0, 2 * len(conditions) + 2, number))
        for place, (argument, test, value) in enumerate(conditions):
            code = {"==": 0x15, "&": 0x45}[test]
            program.append((0x20, 0, 0, 16 + 8 * argument))
            program.append((code, 0, 2 * (len(conditions) - place) - 1, value))
        program.append((0x06, 0, 0, 0x00050000 | error))
        program.append((0x20, 0, 0, 0))
    program.append((0x06, 0, 0, 0x7FFF0000))
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    instructions = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(program), ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    wide = [ctypes.c_ulong(value) for value in (0, 0, 0)]
    if os.geteuid() != 0:
        assert libc.prctl(38, ctypes.c_ulong(1), *wide) == 0
    kept = ctypes.create_string_buffer(header, len(header))
    assert libc.prctl(22, ctypes.c_ulong(2), ctypes.c_ulong(ctypes.addressof(kept)), *wide) == 0


def become(user):
    """Take on the rights of a user, and none of root's."""
    if user == "nobody" and os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # As it would be had this user begun the process.
        assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0


def has_children():
    """Say whether there is a process that this one has begun and not waited for."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def num_forks(most):
    """Return how many processes this one can begin beside those that run, up to ``most``."""
    begun = []
    with contextlib.suppress(OSError):
        while len(begun) < most:
            begun.append(os.fork())
            if begun[-1] == 0:
                signal.pause()
    for child in begun:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return len(begun)


def report_on(request):
    """Make a sandbox, run the programs, and return what came of it."""
    from trajpack.agent.errors import SetupError
    from trajpack.agent.sandbox.sandbox import Sandbox, SandboxError, SandboxLimits

    def run(program):
        try:
            result = sandbox.run(program)
        except SandboxError as error:
            return ["SandboxError", str(error)]
        return [result.outcome.value, result.output.decode("latin-1")]

    limits, at_once = SandboxLimits(**request["limits"]), request["at_once"]
    try:
        sandbox = Sandbox(limits, allow_file_reads=request["allow_file_reads"])
    except SetupError as error:
        return {"error": str(error), "protections": [], "results": []}
    report = {"error": None, "protections": sandbox.protections}
    with sandbox, ThreadPoolExecutor(at_once) as threads:
        results = [threads.submit(run, program) for program in request["programs"]]
        if request["is_killed"] or request["close_early"]:
            while sum(b"ready" in one._output for one in tuple(sandbox._running)) < at_once:
                time.sleep(0.001)
        if request["is_killed"]:
            sys.stdout.write(json.dumps([one._child.pid for one in sandbox._running]) + "\n")
            sys.stdout.flush()
            signal.pause()
        if request["close_early"]:
            report["num_forks"] = num_forks(20)
            sandbox.close()
        return report | {"results": [result.result() for result in results]}


def main():
    """Do what the request says."""
    request = json.loads(sys.stdin.buffer.read())
    package = sys.modules["trajpack"] = types.ModuleType("trajpack")
    package.__path__ = [request["package"]]
    from trajpack.agent.sandbox import sandbox as sandbox_module

    os.chdir("/")
    sandbox_module._launcher()
    messages = []
    logging.getLogger("trajpack").addHandler(collecting := logging.Handler())
    collecting.emit = lambda record: messages.append(record.getMessage())
    become(request["user"])
    install_shim(request["shim"])
    before = len(os.listdir("/proc/self/fd"))
    report = report_on(request) | {"messages": messages, "has_children": has_children()}
    report["num_files"] = len(os.listdir("/proc/self/fd")) - before
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
