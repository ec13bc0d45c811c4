"""The system call filter, run as the kernel runs it, and the files that may be read."""

from __future__ import annotations

import os
import re
import struct
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from trajpack.agent.errors import SetupError
from trajpack.agent.sandbox.restrictions import readable, system_call_filter
from trajpack.agent.sandbox.sandbox import Sandbox

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Interpret the filter's program for a call, as the kernel does."""
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


CALLS = {
    # name: numbers on x86-64 and AArch64, and verdicts by arguments
    "read": (0, 63, {(): ALLOW}),
    "open for reading": (2, None, {(0, 0): ALLOW, (0, 0o101): EPERM}),
    "openat for reading": (
        257,
        56,
        {(0, 0, 0o2000000): ALLOW}
        | {(0, 0, flags): EPERM for flags in (0o1, 0o2, 0o100, 0o1000, 0o2000)},
    ),
    "clone of threads, not of processes or namespaces": (
        56,
        220,
        {(0x3D0F00,): ALLOW, (0x01200011,): EPERM, (0x3D0F00 | 0x10000000,): EPERM},
    ),
    "clone3": (435, 435, {(): ENOSYS}),
    "prlimit64 for reading": (
        302,
        261,
        {(0, 7, 0, 1): ALLOW} | dict.fromkeys([(0, 7, 1), (0, 7, 1 << 32), (1, 7, 0)], EPERM),
    ),
    "fcntl without F_SETOWN": (72, 25, {(1, 1030): ALLOW, (1, 8): EPERM}),
    "ioctl without TIOCSTI": (16, 29, {(1, 0x5401): ALLOW, (1, 0x5412): EPERM}),
    "io_uring_setup": (425, 425, {(): EPERM}),
    "socket": (41, 198, {(): EPERM}),
    "kill": (62, 129, {(): EPERM}),
    "execve": (59, 221, {(): EPERM}),
    "fork": (57, None, {(): EPERM}),
    "ptrace": (101, 117, {(): EPERM}),
    "unlink": (87, 35, {(): EPERM}),
    "mount": (165, 40, {(): EPERM}),
    "bpf": (321, 280, {(): EPERM}),
    "an unknown call": (9999, 9999, {(): ENOSYS}),
}


NUMBERED = [
    (call, machine, number)
    for call, (*numbers, _) in CALLS.items()
    for machine, number in zip(ARCHITECTURES, numbers, strict=True)
    if number is not None
]


@pytest.mark.parametrize(("call", "machine", "number"), NUMBERED)
def test_calls_are_allowed_by_number_and_arguments(call: str, machine: str, number: int) -> None:
    expected = CALLS[call][-1]
    assert {given: verdict(machine, number, *given) for given in expected} == expected


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_of_another_architecture_end_the_process(machine: str) -> None:
    read = {"x86_64": 0, "aarch64": 63}[machine]
    assert verdict(machine, read, architecture=0x40000003) == KILL
    assert verdict(machine, 0x40000000 | read) == KILL


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_numbers_are_those_of_the_kernel_headers(machine: str) -> None:
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


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as sandbox:
        yield sandbox


def read(sandbox: Sandbox, *paths: str | Path) -> list[str]:
    """Return for each file "read", or the name of the error."""
    code = "for path in PATHS:\n    try:\n        open(path, 'rb').read()\n        print('read')\n"
    code += "    except OSError as error:\n        print(type(error).__name__)"
    return sandbox.run(f"PATHS = {[str(path) for path in paths]}\n{code}").output.decode().split()


def test_installed_packages_cannot_be_read(sandbox: Sandbox) -> None:
    """Data sets are installed as packages, with the answers in them."""
    base = {"base": sys.base_prefix, "installed_base": sys.base_prefix}
    packages = Path(sysconfig.get_path("purelib", vars=base))
    found = [Path(pytest.__file__), *list(packages.glob("*/__init__.py"))[:2]]
    assert set(read(sandbox, *found)) == {"PermissionError"}
    library = [os.__file__, Path(os.__file__).parent / "json" / "decoder.py"]
    assert read(sandbox, *library) == ["read", "read"]


def test_only_files_of_the_system_and_the_standard_library_are_readable(tmp_path: Path) -> None:
    bases = {os.path.realpath(sys.base_prefix), os.path.realpath(sys.base_exec_prefix)}
    allowed = ("/lib", "/usr/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache")
    for path in readable(str(tmp_path)):
        if path != str(tmp_path):
            roots = (*allowed, *(os.path.join(base, "lib") for base in bases))
            assert os.path.realpath(path).startswith(roots), path
            assert "-packages" not in path


def test_the_ruleset_is_closed_with_its_sandbox() -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    sandbox = Sandbox()
    sandbox.close()
    del sandbox
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_files_are_readable_without_landlock_only_if_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trajpack.agent.sandbox.sandbox.landlock_ruleset", lambda folder: None)
    with pytest.raises(SetupError, match=r"no Landlock.*allow_file_reads=True"):
        Sandbox()
    (tmp_path / "file").touch()
    with Sandbox(allow_file_reads=True) as sandbox:
        assert "landlock" not in sandbox.protections
        assert read(sandbox, tmp_path / "file") == ["read"]

    def fail(folder: str) -> int:
        raise OSError(22, "landlock failed")

    monkeypatch.setattr("trajpack.agent.sandbox.sandbox.landlock_ruleset", fail)
    with pytest.raises(SetupError, match=r"files cannot be hidden here: .*landlock failed"):
        Sandbox()
