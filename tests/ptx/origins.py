"""Which parameters an address is computed from: a tensor's pointer may not reach another tensor.

The order of instructions is not looked at: a register has the origins of everything that is ever
written to it. Values that were loaded have none; an address without an origin may be anywhere.
"""

from __future__ import annotations

from tests.ptx.parse import Instruction, Kernel, address_of, inside

Origins = frozenset[str]
NONE: Origins = frozenset()
ANYWHERE = "anywhere"
"""The origin of 64 bits that other threads handed over: maybe a pointer."""
HANDED = ("ld.shared", "ld.local")


def origins_of(kernel: Kernel) -> dict[str, Origins]:
    """Return the names of the parameters that each register of 64 bits may be computed from."""
    found: dict[str, Origins] = {}
    moves = [_flow(one) for block in kernel.blocks for one in block]
    is_changing = True
    while is_changing:
        is_changing = False
        for targets, sources, own in moves:
            origins = own.union(*(found.get(name, NONE) for name in sources))
            for name in targets:
                if not origins <= found.get(name, NONE):
                    found[name] = found.get(name, NONE) | origins
                    is_changing = True
    return found


def _flow(one: Instruction) -> tuple[list[str], list[str], Origins]:
    """Return which registers are set, from which others, and from which parameter."""
    name = one.words[0]
    if name in ("st", "bar", "bra", "ret", "setp", "red") or len(one.operands) < 2:
        return [], [], NONE
    targets = inside(one.operands[0].partition("|")[0])
    if name not in ("ld", "atom", "cp"):
        return targets, [part for text in one.operands[1:] for part in inside(text)], NONE
    if one.opcode.startswith("ld.param"):
        return targets, [], frozenset([address_of(one.operands[1])[0]])
    is_handed = one.opcode.startswith(HANDED) and one.words[-1][1:] == "64"
    return targets, [], frozenset([ANYWHERE]) if is_handed else NONE
