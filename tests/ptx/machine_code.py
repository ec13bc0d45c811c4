"""What `ptxas` makes of a kernel's PTX: registers, spills, and loads in flight."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tests.kernels.compiled.compile_machine_code import TOOLS, disassemble

PARTS = {"": 1, "64": 2, "128": 4}
"""Registers that a load writes, by its width."""
LOAD = re.compile(r"LDG\.E(?:\.\w+)*?(?:\.(64|128))?(?:\.\w+)* R(\d+),(.*)")
REGISTER = re.compile(r"\bR(\d+)\b(\.64)?")


class MachineCode(NamedTuple):
    """Numbers of one kernel."""

    registers: int
    """Registers of a thread."""
    spills: int
    """Bytes of a thread that are stored and loaded for want of registers."""
    in_flight: int
    """Most loads from global memory between two instructions that need one of them."""


@lru_cache(maxsize=256)
def machine_code(ptx: str, arch: int) -> MachineCode:
    """Assemble PTX for ``sm_{arch}`` and measure it."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [TOOLS / "ptxas", "-v", f"--gpu-name={target[1]}", source, "-o", cubin]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        (code,) = disassemble([cubin.read_bytes()], arch)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    assert registers, done.stderr
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    return MachineCode(int(registers[1]), spills, loads_in_flight(code))


def loads_in_flight(code: str) -> int:
    """Return the most loads that are issued before an instruction reads a register of one.

    Instructions are taken in the order of their addresses. A wait for one load counts as the end of
    all, so the number is a lower bound.
    """
    pending: set[int] = set()
    count = most = 0
    for line in code.splitlines():
        load = LOAD.search(line)
        read = _registers(load[3] if load else _sources(line))
        if pending & read:
            pending, count = set(), 0
        if load:
            first = int(load[2])
            pending |= {*range(first, first + PARTS[load[1] or ""])}
            count += 1
            most = max(most, count)
    return most


def _sources(line: str) -> str:
    """Return an instruction without the register that it writes, if it writes one."""
    words = re.sub(r"^@\S+\s+", "", line).split(None, 1)
    if len(words) < 2 or words[0].startswith(("ST", "RED", "BRA", "EXIT")):
        return line
    return words[1].partition(",")[2]


def _registers(operands: str) -> set[int]:
    found: set[int] = set()
    for number, wide in REGISTER.findall(operands):
        found |= {int(number), int(number) + 1} if wide else {int(number)}
    return found
