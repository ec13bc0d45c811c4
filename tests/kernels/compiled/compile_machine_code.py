"""What stands in the machine code of a compiled kernel: SASS for NVIDIA, assembly for AMD."""

from __future__ import annotations

import re
import struct
import subprocess
import tempfile
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BYTES = {"": 4, "U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
BYTES |= {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
WIDTH = r"\.E(?:\.EF|\.STRONG|\.GPU)*\.?(U8|S8|U16|S16|64|128)?\b"
PARTS = {"": 1, "64": 2, "128": 4}
"""Registers that a load writes, by its width."""
LOAD = re.compile(r"LDG\.E(?:\.\w+)*?(?:\.(64|128))?(?:\.\w+)* R(\d+),(.*)")
REGISTER = re.compile(r"\bR(\d+)\b(\.64)?")
BRANCH = re.compile(r"(\bBRA\S* .*?)(0x[0-9a-f]+|-\d+)")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*)$", re.MULTILINE)


def measure(kernels: Iterable[Any]) -> list[dict[str, Any]]:
    """Measure kernels that were all compiled for the same target."""
    kernels = list(kernels)
    target = kernels[0].metadata.target
    if target.backend == "cuda":
        codes = disassemble([kernel.asm["cubin"] for kernel in kernels], target.arch)
        measured = [measure_cuda(*pair) for pair in zip(kernels, codes, strict=True)]
    else:
        measured = [measure_hip(kernel.asm["amdgcn"]) for kernel in kernels]
    return [
        {
            "target": str(target.arch),
            "kernel": kernel.name,
            "rewards": kernel.src.signature.get("rewards"),
            "threads": kernel.metadata.num_warps * target.warp_size,
            "scans": scanned_layouts(kernel.asm["ttgir"]),
            **found,
        }
        for kernel, found in zip(kernels, measured, strict=True)
    ]


def scanned_layouts(code: str) -> list[str]:
    """Return the type and layout of what each scan takes: they settle the order of its sums."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", code, re.MULTILINE))
    scans = re.findall(r'"tt\.scan".*?^\s*\}\) : \((.*?)\) ->', code, re.MULTILINE | re.DOTALL)
    return [re.sub(r"#\w+", lambda alias: layouts[alias[0]], scan) for scan in scans]


def disassemble(cubins: list[bytes], arch: int) -> list[str]:
    """Return the SASS of each; a branch has the number of instructions from it to its target.

    The disassembler takes longer to start than to read a kernel.
    """
    texts = [text_of(cubin) for cubin in cubins]
    code = run_tool("nvdisasm", b"".join(texts), "-b", f"SM{arch}")
    places, lines = zip(*INSTRUCTION.findall(code), strict=True)
    found = [int(place, 16) for place in places]  # ascending
    lines = tuple(
        BRANCH.sub(partial(_as_steps, at), line) for at, line in zip(found, lines, strict=True)
    )
    ends = [bisect_left(found, end) for end in accumulate(map(len, texts), initial=0)]
    return ["\n".join(lines[begin:end]) for begin, end in pairwise(ends)]


def _as_steps(at: int, branch: re.Match[str]) -> str:
    return f"{branch[1]}{(int(branch[2], 16) - at) // 16:+d}"


def text_of(cubin: bytes) -> bytes:
    """Return the instructions of the one kernel in an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    name_at = sections[names][4]
    (text,) = (
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in sections
        if cubin.startswith(b".text.", name_at + name)
    )
    return text


def measure_cuda(kernel: Any, code: str) -> dict[str, Any]:
    usage = run_tool("cuobjdump", kernel.asm["cubin"], "--dump-resource-usage")
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    assert "EXIT" in code, "instructions were found"
    spills = len(re.findall(r"\b(?:LDL|STL)\b", code))
    return {
        "registers": registers,
        "memory_of_a_thread": {"stack": stack, "local": local, "spills": spills},
        "stores": Counter(BYTES[found] for found in re.findall(r"\bSTG" + WIDTH, code)),
        "loads": Counter(BYTES[found] for found in re.findall(r"\bLDG" + WIDTH, code)),
        "masked_stores": len(re.findall(r"@!?U?P\d\s+STG", code)),
        "atomics": len(re.findall(r"\b(?:ATOM[GS]?|RED)\b", code)),
        "shuffles": len(re.findall(r"\bSHFL\b", code)),
        "barriers": len(re.findall(r"\bBAR\b", code)),
        "in_flight": loads_in_flight(code),
    }


def loads_in_flight(code: str) -> int:
    """Return the loads from global memory that are issued before an instruction reads one.

    Of loops that load more than twice in a round it is that of the one with the fewest, without
    loops around it; a loop of one or two is a search. If there is none, it is the most in the code.
    """
    lines = code.splitlines()
    branches = [(at, BRANCH.search(line)) for at, line in enumerate(lines)]
    ends = [(at + int(branch[2]), at) for at, branch in branches if branch]
    loops = [(begin, end) for begin, end in ends if begin < end]
    bodies = [
        lines[begin : end + 1]
        for begin, end in loops
        if not any(begin <= other[0] and other[1] < end for other in loops)
    ]
    loading = [body for body in bodies if sum(map(bool, map(LOAD.search, body))) > 2]
    # twice, as a round may read what the one before has loaded
    return min((_loads_at_once(2 * body) for body in loading), default=_loads_at_once(lines))


def _loads_at_once(lines: list[str]) -> int:
    """Return the most loads before an instruction reads one, in the order of the addresses.

    A wait for one load counts as the end of all, so the number is a lower bound.
    """
    pending: set[int] = set()
    count = most = 0
    for line in lines:
        load = LOAD.search(line)
        if pending & _registers(load[3] if load else _sources(line)):
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
    read: set[int] = set()
    for number, wide in REGISTER.findall(operands):
        read |= {int(number), int(number) + 1} if wide else {int(number)}
    return read


def measure_hip(code: str) -> dict[str, Any]:
    instructions, metadata = code.split(".amdgpu_metadata")
    words = Counter(re.findall(r"\b\w*_\w+", instructions))  # names of instructions among them

    def resource(name: str) -> int:
        (found,) = re.findall(rf"^\s+(?:- )?\.{name}:\s+(\d+)", metadata, re.MULTILINE)
        return int(found)

    def count(pattern: str) -> int:
        return sum(number for word, number in words.items() if re.search(pattern, word))

    def widths(kind: str) -> Counter[int]:
        name = re.compile(rf"(?:buffer|global|flat)_{kind}_s?u?(byte|short|dword(?:x\d)?)")
        found = {word: name.match(word) for word in words}
        return sum(
            (Counter({BYTES[match[1]]: words[word]}) for word, match in found.items() if match),
            Counter(),
        )

    places = "private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count"
    return {
        "registers": resource("vgpr_count") + resource("agpr_count"),
        "memory_of_a_thread": {place: resource(place) for place in places},
        "stores": widths("store"),
        "loads": widths("load"),
        "masked_stores": None,  # lanes are masked by a register, not in the instruction
        "atomics": count("_atomic_"),
        "shuffles": count(r"^ds_(?:b?permute|swizzle)|_dpp\b|_permlane"),
        "barriers": words["s_barrier"],
    }


def run_tool(name: str, code: bytes, *arguments: str) -> str:
    """Run one of Triton's own tools on ``code``, and return what it prints."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [TOOLS / name, *arguments, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
