from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from trajpack.agent.sandbox.restrictions import system_call_filter

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the kernel would do, by running the program as it does."""
    arguments += (0,) * (6 - len(arguments))
    architecture = ARCHITECTURES[machine] if architecture is None else architecture
    call = struct.pack("<IIQ6Q", number, architecture, 0, *arguments)
    program = list(struct.iter_unpack("=HBBI", system_call_filter(machine)))
    value, at = 0, 0
    while True:
        code, if_true, if_false, operand = program[at]
        at += 1
        if code == 0x20:
            (value,) = struct.unpack_from("<I", call, operand)
        elif code == 0x06:
            return operand
        else:
            is_met = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}
            at += if_true if is_met[code] else if_false


NUMBERS = {
    "x86_64": {"socket": 41, "read": 0, "openat": 257, "clone": 56, "clone3": 435, "ioctl": 16}
    | {"prlimit64": 302, "fcntl": 72, "kill": 62, "execve": 59, "fork": 57, "open": 2}
    | {"io_uring_setup": 425, "ptrace": 101, "unlink": 87, "mount": 165, "bpf": 321},
    "aarch64": {"socket": 198, "read": 63, "openat": 56, "clone": 220, "clone3": 435, "ioctl": 29}
    | {"prlimit64": 261, "fcntl": 25, "kill": 129, "execve": 221, "ptrace": 117}
    | {"io_uring_setup": 425, "unlinkat": 35, "mount": 40, "bpf": 280},
}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_what_does_no_harm_is_allowed_and_what_is_not_known_fails(machine: str) -> None:
    numbers = NUMBERS[machine]
    assert verdict(machine, numbers["read"]) == ALLOW
    for name in numbers.keys() - {"read", "openat", "open", "clone", "clone3", "ioctl"}:
        if name not in ("prlimit64", "fcntl"):
            assert verdict(machine, numbers[name]) == EPERM, name
    assert verdict(machine, 9999) == ENOSYS


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_of_another_architecture_end_the_process(machine: str) -> None:
    assert verdict(machine, NUMBERS[machine]["read"], architecture=0x40000003) == KILL
    assert verdict(machine, 0x40000000 | NUMBERS[machine]["read"]) == KILL


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_a_file_is_opened_for_reading_alone(machine: str) -> None:
    openat = NUMBERS[machine]["openat"]
    assert verdict(machine, openat, 0, 0, 0o2000000) == ALLOW
    for flags in (0o1, 0o2, 0o100, 0o1000, 0o2000):
        assert verdict(machine, openat, 0, 0, flags) == EPERM
    if machine == "x86_64":
        assert verdict(machine, 2, 0, 0) == ALLOW
        assert verdict(machine, 2, 0, 0o101) == EPERM


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_threads_are_allowed_and_processes_are_not(machine: str) -> None:
    clone = NUMBERS[machine]["clone"]
    assert verdict(machine, clone, 0x3D0F00) == ALLOW  # what pthread_create asks for
    assert verdict(machine, clone, 0x01200011) == EPERM  # what fork asks for
    assert verdict(machine, clone, 0x3D0F00 | 0x10000000) == EPERM
    assert verdict(machine, NUMBERS[machine]["clone3"]) == ENOSYS


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_limits_are_read_and_never_set(machine: str) -> None:
    prlimit64 = NUMBERS[machine]["prlimit64"]
    assert verdict(machine, prlimit64, 0, 7, 0, 1) == ALLOW
    assert verdict(machine, prlimit64, 0, 7, 1) == EPERM
    assert verdict(machine, prlimit64, 0, 7, 1 << 32) == EPERM
    assert verdict(machine, prlimit64, 1, 7, 0) == EPERM


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_descriptors_are_not_owned_and_devices_not_driven(machine: str) -> None:
    fcntl, ioctl = NUMBERS[machine]["fcntl"], NUMBERS[machine]["ioctl"]
    assert verdict(machine, fcntl, 1, 1030) == verdict(machine, ioctl, 1, 0x5401) == ALLOW
    assert verdict(machine, fcntl, 1, 8) == EPERM  # F_SETOWN
    assert verdict(machine, ioctl, 1, 0x5412) == EPERM  # TIOCSTI


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_numbers_are_those_of_the_kernel_s_headers(machine: str) -> None:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is not here")
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text())
    numbers = {name: int(number) for name, number in found}
    harmless = {"read", "write", "futex", "mmap", "getrandom", "exit_group", "statx", "rseq"}
    dangerous = {"socket", "connect", "kill", "ptrace", "execve", "unlinkat", "mount", "bpf"}
    dangerous |= {"setrlimit", "prctl", "unshare", "process_vm_readv", "io_uring_setup", "tgkill"}
    dangerous |= {"sendto", "socketpair", "memfd_create", "openat2", "pidfd_open", "setsid"}
    assert {name for name in harmless | dangerous if name not in numbers} == set()
    assert {verdict(machine, numbers[name]) for name in harmless} == {ALLOW}
    assert {verdict(machine, numbers[name]) for name in dangerous} == {EPERM}


def test_another_machine_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a machine of x86_64, aarch64, got 'riscv64'"):
        system_call_filter("riscv64")
