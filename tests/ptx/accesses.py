"""Instructions that access memory: loads, stores, atomics, fences, copies to shared memory.

Whatever is asynchronous is done at once, and its waits do nothing: a wait that is missing is not
found.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.arithmetic import DTYPES
from tests.ptx.memory import SENTINEL, Accessors, History, PtxError
from tests.ptx.origins import NONE, Origins
from tests.ptx.parse import Instruction, address_of, inside
from tests.ptx.traffic import SECTOR, count_passes, count_sectors, distinct

if TYPE_CHECKING:
    from tests.ptx.program import Program

Step = Callable[[Any, Any], Any]
NAMES = {"ld", "st", "atom", "red", "cp", "fence", "membar", "createpolicy"}
NAMES |= {"ldmatrix", "stmatrix"}
MATRIX = ["sync", "aligned", "m8n8", "shared", "b16"]
SPACES = ("param", "global", "shared", "local")
ATOMICS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b, "exch": lambda a, b: b, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "min": np.minimum, "max": np.maximum,
    "inc": lambda a, b: np.where(a >= b, a.dtype.type(0), a + a.dtype.type(1)),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - a.dtype.type(1)),
    "cas": lambda a, b, c: np.where(a == b, c, a),
}  # fmt: skip


@dataclass
class Access:
    """One instruction's way into memory."""

    one: Instruction
    space: str
    width: int
    """Bytes of a word."""
    vector: int
    """Words of a thread."""
    is_strong: bool = False
    """It does not race with others of its kind."""
    origins: Origins = NONE
    """Parameters whose memory it may reach."""

    @property
    def size(self) -> int:
        return self.width * self.vector

    def load(self, m: Any, threads: Any, address: Any) -> list[Any]:
        """Return the words that threads read; garbage where there is no memory."""
        inside_of, place = self._find(m, threads, address, "load")
        words = self._read(m, place)
        for chosen, offset, history in self._histories(m, threads, place, inside_of):
            by, at = self._accessors(m, threads[chosen], offset, history)
            m.note("race", self.one, history.on_read(at, by, is_atomic=self.is_strong))
            if self.space == "shared":
                m.note("uninitialised (shared)", self.one, history.writer[at] == 0)
        if m.checks and self.space == "global":
            m.note("uninitialised", self.one, m.memory.unwritten(place, words, self.width))
        if inside_of is True:
            return words
        return [_filled(word, inside_of) for word in words]

    def store(self, m: Any, threads: Any, address: Any, words: list[Any]) -> None:
        inside_of, place = self._find(m, threads, address, "store")
        if inside_of is not True:
            threads, words = threads[inside_of], [word[inside_of] for word in words]
        checked, held = [], self._read(m, place) if m.checks else []
        for chosen, offset, history in self._histories(m, threads, place, True):
            by, at = self._accessors(m, threads[chosen], offset, history)
            checked.append((chosen, history, *history.on_write(at, by, is_atomic=self.is_strong)))
        view = m.views(self.space)[self.width]
        for number, word in enumerate(words):
            view[place // self.width + number] = word
        for chosen, history, raced, crowded in checked:
            if raced.any() or crowded.any():  # harmless where the value is the same
                before, new, after = (
                    _granules(some, chosen, history) for some in (held, words, self._read(m, place))
                )
                m.note("race", self.one, (raced & (before != new)) | (crowded & (after != new)))

    def update(self, m: Any, threads: Any, address: Any, kind: str, function: Any) -> Any:
        """Replace words by a function of them and of their place in the list; return the old."""
        inside_of, place = self._find(m, threads, address, "atomic")
        if inside_of is not True:
            raise PtxError(f"an atomic is out of bounds: {self.one}")
        for chosen, offset, history in self._histories(m, threads, place, True):
            by, at = self._accessors(m, threads[chosen], offset, history)
            m.note("race", self.one, history.on_write(at, by, is_atomic=True)[0])
        words = m.views(self.space)[self.width].view(DTYPES[kind])
        index = place // self.width
        old = words[index]
        if len(distinct(np.sort(index))) == len(index):
            words[index] = function(old, slice(None))
            return old
        for entry in range(len(index)):
            old[entry] = words[index[entry]]
            words[index[entry]] = function(old[entry : entry + 1], slice(entry, entry + 1))[0]
        return old

    def _find(self, m: Any, threads: Any, address: Any, way: str) -> tuple[Any, Any]:
        """Return which accesses are in bounds, or True for all, and the places of these."""
        m.note("misaligned", self.one, (address & address.dtype.type(self.size - 1)) != 0)
        if m.counts and self.space == "shared":
            m.tally(self.one, self.space, way, count_passes(address, threads, self.size))
        m.clock.now += 1
        if self.space != "global":
            return True, self._own_place(m, threads, address.astype(np.int64))
        which = m.memory.find(address, self.size, self.origins)
        if m.counts:
            self._count(m, threads, which, address, way)
        base = np.uint64(m.memory.base)
        if isinstance(which, int):
            return True, (address - base).astype(np.int64)
        in_bounds = which >= 0
        m.note("out of bounds", self.one, ~in_bounds)
        return in_bounds, (address[in_bounds] - base).astype(np.int64)

    def _own_place(self, m: Any, threads: Any, address: Any) -> Any:
        """Return places in memory of which each program, or each thread, has a part."""
        has, stride = m.extent(self.space)
        outside = (address < 0) | (address + self.size > has)
        if outside.any():
            raise PtxError(f"out of bounds ({self.space}): {self.one}, line {self.one.loc[1]}")
        owner = threads if self.space == "local" else threads // m.threads
        return address + owner * stride

    def _count(self, m: Any, threads: Any, which: Any, address: Any, way: str) -> None:
        """Count a request as a device would, where every allocation begins with a sector."""
        offset = (address - m.memory.begins[which]).astype(np.int64)
        apart = np.int64(which) << 48
        m.tally(self.one, self.space, way, count_sectors(offset + apart, threads >> 5, self.size))
        for number in np.unique(which[which >= 0]) if np.ndim(which) else [which]:
            if number >= 0:
                own = offset if np.ndim(which) == 0 else offset[which == number]
                m.memory.allocations[number].touch(way, own // SECTOR)

    def _histories(self, m: Any, threads: Any, place: Any, inside_of: Any) -> Any:
        """Yield which accesses fall in an allocation, where in it, and its history."""
        if not m.checks or self.space == "local" or not len(place):
            return
        if self.space == "shared":
            yield slice(None), place, m.shared_history
            return
        if inside_of is not True:  # out of bounds has been reported; the rest is not looked at
            return
        address = place.astype(np.uint64) + np.uint64(m.memory.base)
        which = m.memory.find(address, self.size)
        for number in [which] if isinstance(which, int) else np.unique(which).tolist():
            chosen = slice(None) if isinstance(which, int) else which == number
            begin = m.memory.allocations[number].begin - m.memory.base
            yield chosen, place[chosen] - begin, m.memory.history(number)

    def _accessors(self, m: Any, threads: Any, offset: Any, history: History) -> Any:
        places = history.places(offset, self.size)
        return Accessors(np.repeat(threads, len(places) // len(threads)), m.clock), places

    def _read(self, m: Any, place: Any) -> list[Any]:
        view = m.views(self.space)[self.width]
        return [view[place // self.width + number] for number in range(self.vector)]


def _filled(words: Any, inside_of: Any) -> Any:
    garbage = np.frombuffer(np.full(2, SENTINEL).tobytes(), words.dtype)[0]
    every = np.full(len(inside_of), garbage)
    every[inside_of] = words
    return every


def _granules(words: list[Any], chosen: Any, history: History) -> Any:
    rows = np.ascontiguousarray(np.stack([word[chosen] for word in words], 1)).view(np.uint8)
    granules = rows.reshape(-1, history.granule)
    return granules.view(f"u{history.granule}" if history.granule < 16 else "V16").ravel()


def compile_access(p: Program, one: Instruction, guard: Step | None) -> Step:
    """Return what runs a load, a store, an atomic, a fence or a copy."""
    name, words = one.words[0], one.words
    if name == "createpolicy":
        put = p.target(one.operands[0], "b64")
        return lambda m, s: put(m, s, np.uint64(0))
    if name in ("fence", "membar"):
        orders = not {"cta", "cluster"} & {*words} and not words[1].startswith(("proxy", "mbar"))
        return (lambda m, s: m.ordering.fence(s.numbers)) if orders else (lambda m, s: None)
    if name in ("cp", "ldmatrix", "stmatrix"):
        return _copy(p, one, guard) if name == "cp" else _matrix(p, one)
    space = next((s for w in words[1:] if (s := w.split("::")[0]) in SPACES), "generic")
    if space == "generic" or {"mmio", "cluster"} & {*words} or words[-1] not in DTYPES:
        raise NotImplementedError(str(one))
    if space == "param":
        return _parameter(p, one)
    return {"ld": _load, "st": _store, "atom": _atomic, "red": _atomic}[name](p, one, guard, space)


def _parameter(p: Program, one: Instruction) -> Step:
    base, offset = address_of(one.operands[1])
    if offset or one.words[0] != "ld":
        raise NotImplementedError(str(one))
    put = p.target(one.operands[0], one.words[-1])
    return lambda m, s: put(m, s, m.parameters[base])


def _address(p: Program, operand: str, space: str) -> Step:
    base, offset = address_of(operand)
    if base not in p.numbers:
        fixed = np.uint32(p.symbols[base] + offset)
        return lambda m, s: np.broadcast_to(fixed, (s.count,))
    wide = p.dtypes[p.numbers[base]].itemsize == 8
    where = p.source(base, "u64" if wide else "u32")
    step = np.uint64(offset % (1 << 64)) if wide else np.uint32(offset % (1 << 32))
    return lambda m, s: np.broadcast_to(where(m, s) + step, (s.count,))


def _origins(p: Program, operand: str) -> Origins:
    return p.origins.get(address_of(operand)[0], NONE)


def _taking_part(m: Any, s: Any, address: Step, guard: Step | None) -> tuple[Any, Any, Any]:
    """Return the threads that access memory, their addresses, and their places in ``s``."""
    places = address(m, s)
    if guard is None:
        return s.numbers, places, slice(None)
    chosen = np.flatnonzero(np.broadcast_to(guard(m, s), (s.count,)))
    return s.numbers[chosen], places[chosen], chosen


def _words(m: Any, s: Any, gets: list[Step], chosen: Any, dtype: Any) -> list[Any]:
    found = (np.broadcast_to(get(m, s), (s.count,))[chosen] for get in gets)
    return [np.ascontiguousarray(word).view(dtype) for word in found]


def _strength(words: list[str]) -> tuple[bool, bool, bool]:
    """Return whether an access is strong, acquires and releases, for other programs."""
    strong = {"acquire", "release", "acq_rel", "relaxed", "volatile"} & {*words}
    reaches = "cta" not in words
    acquires = bool({"acquire", "acq_rel"} & strong)
    return bool(strong), acquires and reaches, bool({"release", "acq_rel"} & strong) and reaches


def _load(p: Program, one: Instruction, guard: Step | None, space: str) -> Step:
    names, kind = inside(one.operands[0]), one.words[-1]
    strong, acquires, _ = _strength(one.words)
    origins = _origins(p, one.operands[1])
    access = Access(one, space, DTYPES[kind].itemsize, len(names), strong, origins)
    address = _address(p, one.operands[1], space)
    puts, numbers = [p.target(name, kind) for name in names], [p.numbers.get(n) for n in names]

    def run(m: Any, s: Any) -> None:
        threads, places, _ = _taking_part(m, s, address, guard)
        if not len(threads):
            return
        words = access.load(m, threads, places)
        if strong and space == "global":
            m.ordering.atomics(threads, places, acquires=acquires, releases=False, writes=False)
        if len(threads) < s.count:
            s = s.part(threads)
        for put, number, word in zip(puts, numbers, words, strict=True):
            if number is not None:
                put(m, s, word)

    return run


def _store(p: Program, one: Instruction, guard: Step | None, space: str) -> Step:
    names, kind = inside(one.operands[1]), one.words[-1]
    strong, _, releases = _strength(one.words)
    origins = _origins(p, one.operands[0])
    access = Access(one, space, DTYPES[kind].itemsize, len(names), strong, origins)
    address, word = _address(p, one.operands[0], space), np.dtype(f"u{access.width}")
    gets = [p.source(name, f"b{access.width * 8}") for name in names]

    def run(m: Any, s: Any) -> None:
        threads, places, chosen = _taking_part(m, s, address, guard)
        if len(threads):
            access.store(m, threads, places, _words(m, s, gets, chosen, word))
            if strong and space == "global":
                m.ordering.atomics(threads, places, acquires=False, releases=releases, reads=False)

    return run


def _atomic(p: Program, one: Instruction, guard: Step | None, space: str) -> Step:
    words, kind = one.words, one.words[-1]
    names = [word for word in words if word in ATOMICS]
    if not names or kind[0] == "f" or kind.startswith("bf") or "v2" in words or "v4" in words:
        raise NotImplementedError(str(one))  # sums of floats in any order are not the library's
    function = ATOMICS[names[0]]
    target, *operands = one.operands if words[0] == "atom" else ["_", *one.operands]
    origins = _origins(p, operands[0])
    access = Access(one, space, DTYPES[kind].itemsize, 1, True, origins)
    address = _address(p, operands[0], space)
    gets, put = [p.source(name, kind) for name in operands[1:]], p.target(target, kind)
    _, acquires, releases = _strength(words)
    if "cta" in words:
        access.is_strong = False

    def run(m: Any, s: Any) -> None:
        threads, places, chosen = _taking_part(m, s, address, guard)
        if not len(threads):
            return
        given = _words(m, s, gets, chosen, DTYPES[kind])
        apply = lambda old, part: function(old, *(word[part] for word in given))  # noqa: E731
        old = access.update(m, threads, places, kind, apply)
        if space == "global" and "cta" not in words:
            m.ordering.atomics(threads, places, acquires=acquires, releases=releases)
        put(m, s if len(threads) == s.count else s.part(threads), old)

    return run


def _copy(p: Program, one: Instruction, guard: Step | None) -> Step:
    """``cp.async``: copy from global to shared memory; zero beyond the bytes that are given."""
    if one.words[1] != "async" or "bulk" in one.words:
        raise NotImplementedError(str(one))
    if one.words[2].endswith(("_group", "_all")):
        return lambda m, s: None
    size = int(one.operands[2], 0)
    to, source = _address(p, one.operands[0], "shared"), _address(p, one.operands[1], "global")
    given = p.source(one.operands[3] if len(one.operands) > 3 else str(size), "u32")
    load = Access(one, "global", 4, size // 4, origins=_origins(p, one.operands[1]))
    store = Access(one, "shared", 4, size // 4)

    def run(m: Any, s: Any) -> None:
        threads, places, chosen = _taking_part(m, s, to, guard)
        if not len(threads):
            return
        copied = np.broadcast_to(given(m, s), (s.count,))[chosen]
        if not np.isin(copied, (0, size)).all():
            raise NotImplementedError(f"{one} of a part")
        real = copied != 0
        words = [np.zeros(len(threads), np.uint32) for _ in range(size // 4)]
        if real.any():
            for word, part in zip(
                words, load.load(m, threads[real], source(m, s)[chosen][real]), strict=True
            ):
                word[real] = part
        store.store(m, threads, places, words)

    return run


def _matrix(p: Program, one: Instruction) -> Step:
    """``ldmatrix``, ``stmatrix``: 8 by 8 matrices of 16 bits, whose rows have an address each."""
    if [w for w in one.words[1:] if w not in ("x1", "x2", "x4")] != MATRIX:
        raise NotImplementedError(str(one))
    is_load = one.words[0] == "ldmatrix"
    words, place = one.operands if is_load else one.operands[::-1]
    where, lane = _address(p, place, "shared"), np.arange(32)
    access, make = Access(one, "shared", 4, 1), p.target if is_load else p.source
    registers = [make(name, "b32") for name in inside(words)]

    def run(m: Any, s: Any) -> None:
        rows = where(m, s).reshape(-1, 32)
        for number, register in enumerate(registers):
            places = rows[:, number * 8 + lane // 4] + (lane % 4 * 4).astype(np.uint32)
            if is_load:
                register(m, s, access.load(m, s.numbers, places.ravel())[0])
            else:
                words = _words(m, s, [register], slice(None), np.uint32)
                access.store(m, s.numbers, places.ravel(), words)

    return run
