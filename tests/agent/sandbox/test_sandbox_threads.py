"""Threads of untrusted programs, for each kind of user that may run a sandbox."""

from __future__ import annotations

import pytest

from tests.agent.sandbox.sandbox_cases import (
    EAGAIN,
    EINVAL,
    EPERM,
    NEW_NETWORK,
    UNSHARE,
    USERS,
    can_count_threads,
    has_namespaces,
    require_x86_64,
    run_as,
)

THREADS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
pause = ctypes.cast(libc.pause, ctypes.c_void_p).value
most = 6000
# A new thread returns from the system call to what lies on its stack, and stays there.
stacks = (ctypes.c_uint64 * (8 * most))(*([pause] * (8 * most)))
flags = ctypes.c_ulong(0x50f00)
started = 0
while started < most:
    stack = ctypes.c_void_p(ctypes.addressof(stacks) + 64 * started)
    if libc.syscall(ctypes.c_long(56), flags, stack, None, None, None) < 0:
        break
    started += 1
print(started, ctypes.get_errno(), flush=True)
os._exit(0)
"""
"""Starts threads by the bare system call, with stacks of 64 bytes, for as long as it can."""


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("num_threads", [1, 2, 8])
def test_threads_stop_at_their_limit(user: str, num_threads: int) -> None:
    require_x86_64()
    report = run_as(user, [THREADS], num_threads=num_threads, memory_bytes=64 << 20)
    assert report.error is None
    if can_count_threads(user):
        assert "thread_limit" in report.protections
        assert report.results == [("exited", f"{num_threads - 1} {EAGAIN}\n")]
    else:
        assert "no_threads" in report.protections
        assert report.results == [("exited", f"0 {EPERM}\n")]


@pytest.mark.parametrize("user", USERS)
def test_the_protections_are_those_in_force(user: str) -> None:
    can_count = can_count_threads(user)
    report = run_as(user, ["import os\nprint(os.getuid() == 0)"])
    assert report.protections == (
        *(["namespaces"] if has_namespaces(user) else []),
        "thread_limit" if can_count else "no_threads",
        "landlock",
        "seccomp",
    )
    assert report.results == [("exited", "False\n")]
    assert [message[:46] for message in report.messages] == (
        [] if can_count else ["Sandbox: programs can start no threads here, s"]
    )


@pytest.mark.parametrize("user", USERS)
def test_programs_do_not_take_each_other_s_threads_nor_the_user_s_processes(user: str) -> None:
    code = """
import _thread, time
never = _thread.allocate_lock()
never.acquire()
_thread.stack_size(1 << 16)
started = 0
try:
    while True:
        _thread.start_new_thread(never.acquire, ())
        started += 1
except RuntimeError:
    pass
print("ready", started, flush=True)
time.sleep(60)
"""
    report = run_as(user, [code] * 3, at_once=3, close_early=True, num_threads=5)
    assert report.num_forks == 20
    assert report.results == [("SandboxError", "the sandbox is closed")] * 3
    assert not report.has_children
    started = 4 if can_count_threads(user) else 0
    (once, again) = run_as(user, [code.replace("60", "0.2")] * 2, at_once=2, num_threads=5).results
    assert once == again == ("exited", f"ready {started}\n")


@pytest.mark.parametrize("user", ["root", "nobody"])
def test_a_namespace_of_users_alone_counts_threads(user: str) -> None:
    """As under a rule of AppArmor that takes all capabilities in it away."""
    if not has_namespaces(user):
        pytest.skip(f"{user} may not have namespaces here")
    no_network = (UNSHARE, [(0, "&", NEW_NETWORK)], EPERM)
    report = run_as(user, [THREADS], shim=[no_network], num_threads=8)
    assert report.protections == ("thread_limit", "landlock", "seccomp")
    assert report.results == [("exited", f"7 {EAGAIN}\n")]


@pytest.mark.parametrize("error", [EPERM, EAGAIN, EINVAL, 0])
def test_root_that_may_not_change_its_id_has_programs_without_threads(error: int) -> None:
    """As in a container whose root has no capabilities; 0 is a lie."""
    fixed_id = (117, [], error)
    report = run_as("root without user namespaces", [THREADS], shim=[fixed_id], num_threads=8)
    assert report.protections == ("no_threads", "landlock", "seccomp")
    assert report.results == [("exited", f"0 {EPERM}\n")]


def test_no_other_call_starts_a_thread() -> None:
    """Neither vfork nor clone3, by their numbers in the usual table and in that of x32."""
    require_x86_64()
    code = """
import ctypes, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
arguments = ctypes.create_string_buffer(struct.pack("11Q", 0x50f00, *[0] * 10))
for number, first in ((57, 0), (58, 0), (56, 17), (56, 0x4111), (435, arguments)):
    call = libc.syscall(ctypes.c_long(number + %d), first, ctypes.c_ulong(88), None, None, None)
    print(call, ctypes.get_errno(), flush=True)
"""
    report = run_as("nobody", [code % 0, *[code % 0x40000000]], num_threads=8)
    assert report.results == [
        ("exited", f"-1 {EPERM}\n" * 4 + "-1 38\n"),
        ("crashed", ""),
    ]
