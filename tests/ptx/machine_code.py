"""What `ptxas` makes of a kernel's PTX: registers, spills, and loads in flight."""

from __future__ import annotations

import re
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from triton.backends.nvidia.compiler import get_ptxas

from tests.kernels.compiled.compile_machine_code import disassemble, loads_in_flight


class MachineCode(NamedTuple):
    """Numbers of one kernel."""

    registers: int
    """Registers of a thread."""
    spills: int
    """Bytes of a thread that are stored and loaded for want of registers."""
    in_flight: int
    """Loads from global memory at a time, see `loads_in_flight`."""


@lru_cache(maxsize=256)
def machine_code(ptx: str, arch: int) -> MachineCode:
    """Assemble PTX for ``sm_{arch}`` and measure it."""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={target[1]}", source, "-o", cubin]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        (code,) = disassemble([cubin.read_bytes()], arch)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    assert registers, done.stderr
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    return MachineCode(int(registers[1]), spills, loads_in_flight(code))
