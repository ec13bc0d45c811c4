"""The text of a PTX kernel, as Triton's compiler writes it, in blocks of instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SYNCHRONISING = ("shfl.", "redux.", "bar.", "barrier.", "vote.", "match.", "elect.")
SYNCHRONISING += ("ldmatrix.", "stmatrix.")
"""Instructions that wait for other threads; each begins a block."""
LEAVING = ("bra", "brx", "ret", "exit", "trap")
NOWHERE = ("$L__tmp", "$L__func")
"""Labels of debug information; nobody jumps there."""
LABEL = re.compile(r"([\w$]+):\s*(.*)", re.DOTALL)
INSTRUCTION = re.compile(r"(?:@(!?%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}\[\]|]+(?:\|[^,\s]+)?")


@dataclass(slots=True)
class Instruction:
    opcode: str
    operands: list[str]
    guard: str | None
    """A register, or ``!`` and a register."""
    loc: tuple[int, int]
    """File and line of the source."""

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{guard}{self.opcode} {', '.join(self.operands)}"

    @property
    def words(self) -> list[str]:
        return self.opcode.split(".")


@dataclass
class Kernel:
    name: str
    params: list[tuple[str, str]]
    """Name and type of each parameter."""
    registers: dict[str, str] = field(default_factory=dict)
    blocks: list[list[Instruction]] = field(default_factory=lambda: [[]])
    """Instructions that are entered at the first one."""
    labels: dict[str, int] = field(default_factory=dict)
    """The block that a label names."""
    tables: dict[str, list[str]] = field(default_factory=dict)
    """Labels of a ``brx.idx``."""
    shared: list[str] = field(default_factory=list)
    local: dict[str, int] = field(default_factory=dict)
    """Arrays in local memory and their bytes."""


def parse(text: str) -> Kernel:
    """Read the one kernel of a module."""
    text = re.sub(r"//[^\n]*", "", text)
    head = re.search(r"\.entry\s+(\w+)\s*\((.*?)\)(.*?)\{", text, re.DOTALL)
    if head is None:
        raise ValueError("the text has no kernel")
    declared = (words for one in head[2].split(",") if (words := one.split()))
    kernel = Kernel(head[1], [(words[-1], words[1].removeprefix(".")) for words in declared])
    kernel.shared = re.findall(r"\.shared\s[^;]*?\.b8\s+(\w+)\[\d*\]", text)
    loc = (0, 0)
    for statement in _statements(_body(text, head.end())):
        rest = _after_labels(kernel, statement)
        if not rest:
            continue
        if found := re.match(r"\.loc\s+(\d+)\s+(\d+)", rest):
            loc = int(found[1]), int(found[2])
        elif rest.startswith("."):
            _declare(kernel, rest)
        else:
            _append(kernel, rest, loc)
    if not kernel.blocks[-1]:
        kernel.blocks[-1].append(Instruction("ret", [], None, loc))
    return kernel


def inside(operand: str) -> list[str]:
    """Return the parts of an operand in braces, or of one without."""
    return [part.strip() for part in operand.strip("{}[] ").split(",")]


def address_of(operand: str) -> tuple[str, int]:
    """Return the base and the offset of ``[base+offset]``."""
    base, _, offset = operand.strip("[] ").partition("+")
    return base.strip(), int(offset.strip() or "0", 0)


def _after_labels(kernel: Kernel, statement: str) -> str:
    while found := LABEL.match(statement):
        label, statement = found[1], found[2].strip()
        if statement.startswith(".branchtargets"):
            kernel.tables[label] = re.findall(r"[\w$]+", statement.removeprefix(".branchtargets"))
            return ""
        if not label.startswith(NOWHERE):
            if kernel.blocks[-1]:
                kernel.blocks.append([])
            kernel.labels[label] = len(kernel.blocks) - 1
    return statement


def _declare(kernel: Kernel, statement: str) -> None:
    if found := re.match(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.DOTALL):
        kernel.registers |= dict.fromkeys(_names(found[2]), found[1])
    elif found := re.match(r"\.local\s[^;]*?\.b8\s+(\w+)\[(\d+)\]", statement):
        kernel.local[found[1]] = int(found[2])
    elif not statement.startswith(".pragma"):
        raise NotImplementedError(statement)


def _names(declared: str) -> Iterator[str]:
    for name in map(str.strip, declared.split(",")):
        if found := re.fullmatch(r"(%?[\w$]+)<(\d+)>", name):
            yield from (f"{found[1]}{number}" for number in range(int(found[2])))
        else:
            yield name


def _append(kernel: Kernel, statement: str, loc: tuple[int, int]) -> None:
    found = INSTRUCTION.match(statement)
    if found is None:
        raise NotImplementedError(statement)
    one = Instruction(found[2], OPERAND.findall(found[3]), found[1], loc)
    if one.opcode.startswith(SYNCHRONISING) and kernel.blocks[-1]:
        kernel.blocks.append([])
    kernel.blocks[-1].append(one)
    if one.words[0] in LEAVING:
        kernel.blocks.append([])


def _body(text: str, begin: int) -> str:
    depth = 1
    for match in re.finditer(r"[{}]", text[begin:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[begin : begin + match.start()]
    raise ValueError("a brace is not closed")


def _statements(body: str) -> Iterator[str]:
    lines = []
    for line in map(str.strip, body.split("\n")):
        is_whole = line.startswith(".loc") or re.fullmatch(r"[\w$]+:", line)
        # the label of a table goes with the table
        lines.append(line + ";" if is_whole and not line.startswith("JTI") else line)
    for statement in "\n".join(lines).split(";"):
        stripped = statement.strip()
        while stripped[:1] in ("{", "}"):
            stripped = stripped[1:].strip()
        if stripped:
            yield stripped
