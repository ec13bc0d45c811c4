"""One launch of a kernel on the host: each instruction for all threads of many programs at once.

The block of code that comes first in the text runs for all threads that are there, so that threads
that took different ways meet again.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.ptx.arithmetic import DTYPES
from tests.ptx.memory import SENTINEL, Clock, GlobalMemory, History, PtxError
from tests.ptx.parse import Instruction
from tests.ptx.program import DONE, Program
from tests.ptx.publications import Publications, View
from tests.ptx.traffic import Traffic

BATCH = 1 << 13
"""Threads that run together."""
MOST_BLOCKS = 10_000_000
TURN = 256
"""Now and then the block of code that comes last runs, so that threads may wait for others."""


class Selection:
    """Threads of the batch that run an instruction together."""

    __slots__ = ("at", "count", "numbers", "total")

    def __init__(self, numbers: Any, total: int) -> None:
        self.numbers, self.count, self.total = numbers, len(numbers), total
        first, last = int(numbers[0]), int(numbers[-1])
        is_range = last - first + 1 == self.count
        self.at = slice(first, last + 1) if is_range else numbers

    def part(self, numbers: Any) -> Selection:
        return Selection(numbers, self.total)

    @property
    def warps(self) -> int:
        return 1 + int(np.count_nonzero(np.diff(self.numbers >> 5)))


@dataclass
class Options:
    checks: bool = True
    """Look for races, and for memory that is read before it is written."""
    counts: bool = False
    """Count requests, sectors and instructions."""
    order: int | None = None
    """Run programs in the order of their numbers, or in an order drawn with this seed."""


class Machine:
    def __init__(
        self, program: Program, grid: tuple[int, int, int], threads: int, arguments: list[Any],
        *, shared: int, memory: GlobalMemory, options: Options,
    ) -> None:  # fmt: skip
        params = program.kernel.params
        self.program, self.grid, self.threads, self.memory = program, grid, threads, memory
        self.parameters = {
            name: word_of(value, DTYPES[kind])
            for (name, kind), value in zip(params, arguments, strict=True)
        }
        self.checks, self.counts, self.options = options.checks, options.counts, options
        self.shared_size, self.shared_stride = shared, -(-max(shared, 16) // 16) * 16
        self.findings: Counter[str] = Counter()
        self.traffic: dict[tuple[Any, ...], Traffic] = defaultdict(Traffic)
        self.runs = np.zeros((len(program.code), 2), np.int64)  # warps and threads, by block
        self.now = 0

    def run(self) -> None:
        total = self.grid[0] * self.grid[1] * self.grid[2]
        order = np.arange(total)
        if self.options.order is not None:
            np.random.default_rng(self.options.order).shuffle(order)
        size = max(1, BATCH // self.threads)
        with np.errstate(all="ignore"):
            for first in range(0, total, size):
                self._begin(order[first : first + size])
                self._run_batch()

    def _begin(self, programs: Any) -> None:
        count = len(programs) * self.threads
        self.programs, self.count = np.repeat(programs, self.threads), count
        self.tid = np.tile(np.arange(self.threads), len(programs))
        number = (self.programs * self.threads + self.tid + 1).astype(np.int32)
        self.clock = Clock(self.now, self.threads, number)
        garbage = {
            dtype: np.full(count, False if dtype == np.bool_ else SENTINEL.astype(dtype), dtype)
            for dtype in set(self.program.dtypes)
        }
        self.registers = [garbage[dtype] for dtype in self.program.dtypes]
        shared = np.full(self.shared_stride * len(programs), 0xCD, np.uint8)
        local = np.full(self.program.local_size * count, 0xCD, np.uint8)
        self._own = {
            name: {size: raw.view(f"<u{size}") for size in (1, 2, 4, 8)}
            for name, raw in (("shared", shared), ("local", local))
        }
        self.shared_history = History(len(shared), None)
        self.pc = np.zeros(count, np.int64)
        self.everyone = Selection(np.arange(count), count)
        self.ordering = Ordering(self.clock, self.memory.publications)

    def _run_batch(self) -> None:
        uniform: int | None = 0  # the block where all threads are
        for step in range(MOST_BLOCKS):
            if uniform is not None:
                number, selection = uniform, self.everyone
            else:
                found = self._choose(step)
                if found is None:
                    break
                number, selection = found
            if self.counts:
                self.runs[number] += selection.warps, selection.count
            target: Any = number + 1
            for run in self.program.code[number]:
                jump = run(self, selection)
                target = target if jump is None else jump
            is_one = isinstance(target, int)
            uniform = target if is_one and selection is self.everyone else None
            if uniform == DONE:
                break
            self.pc[selection.at] = target
        else:
            raise PtxError(f"{self.program.kernel.name}: it does not end")
        self.now = self.clock.now

    def _choose(self, step: int) -> tuple[int, Selection] | None:
        """Return the first block in the text with threads that may run it; at times the last."""
        number = int(self.pc.min())
        if number == DONE:
            return None
        if step % TURN == TURN - 1:
            waiting = iter(np.unique(self.pc[self.pc != DONE])[::-1].tolist())
            number = next(waiting)
        else:
            waiting = None
        while number != DONE:
            numbers = np.flatnonzero(self._ready(number))
            if len(numbers):
                whole = len(numbers) == self.count
                return number, self.everyone if whole else Selection(numbers, self.count)
            if waiting is not None:
                number = next(waiting, DONE)
            else:
                later = self.pc[self.pc > number]
                number = int(later.min()) if len(later) else DONE
        where = self.program.kernel.blocks[int(self.pc.min())][0]
        raise PtxError(f"{self.program.kernel.name}: threads wait for others for ever: {where}")

    def _ready(self, number: int) -> Any:
        there = self.pc == number
        words = self.program.kernel.blocks[number][0].words
        if "sync" not in words[1:]:
            return there
        if words[0] in ("bar", "barrier") and words[1] != "warp":
            arrived = (there | (self.pc == DONE)).reshape(-1, self.threads).all(1)
            return there & np.repeat(arrived, self.threads)
        return there & np.repeat(there.reshape(-1, 32).all(1), 32)

    # what instructions ask for

    def special(self, name: str) -> Any:
        base, _, axis = name.partition(".")
        place = "xyz".index(axis) if axis else 0
        x, y, _ = self.grid
        first = np.uint32(1) if place else np.uint32(self.threads)
        values: dict[str, Any] = {
            "%tid": self.tid if place == 0 else 0, "%ntid": first,
            "%ctaid": (self.programs % x, self.programs // x % y, self.programs // (x * y))[place],
            "%nctaid": self.grid[place], "%laneid": self.tid % 32, "%warpid": self.tid // 32,
        }  # fmt: skip
        if base not in values:
            raise NotImplementedError(name)
        return np.broadcast_to(np.asarray(values[base], np.uint32), (self.count,))

    def put(self, number: int, s: Selection, value: Any) -> None:
        """Set a register. Its array is never changed in place: others may share it."""
        if s is self.everyone:
            whole = np.ndim(value) == 1
            self.registers[number] = value if whole else np.full(self.count, value)
        else:
            changed = self.registers[number].copy()
            changed[s.at] = value
            self.registers[number] = changed

    def views(self, space: str) -> dict[int, Any]:
        return self.memory.views if space == "global" else self._own[space]

    def extent(self, space: str) -> tuple[int, int]:
        """Return the bytes that each owner has, and how far apart theirs begin."""
        if space == "local":
            return self.program.local_size, self.program.local_size
        return self.shared_size, self.shared_stride

    def note(self, what: str, one: Instruction, found: Any) -> None:
        number = int(np.sum(found))
        if number:
            where = f"{self.program.kernel.name}, line {one.loc[1]}"
            self.findings[f"{what}: {where}: {one}"] += number

    def tally(self, one: Instruction, space: str, way: str, found: Traffic) -> None:
        self.traffic[space, way, one.loc, str(one)].add(found)


class Ordering:
    """Order that atomics and fences of a batch make between programs."""

    def __init__(self, clock: Clock, publications: Publications) -> None:
        self.clock, self.publications = clock, publications
        self.fenced: dict[int, tuple[int, int]] = {}
        self.pending: dict[int, list[View]] = defaultdict(list)

    def fence(self, threads: Any) -> None:
        """Let relaxed atomics before acquire, and those that follow release."""
        for thread in threads.tolist():
            self.fenced[thread] = self.clock.now, self._synced(thread)
            for view in self.pending.pop(thread, ()):
                self.publications.acquire(view, self._number(thread), self.clock.now)

    def atomics(
        self, threads: Any, addresses: Any, *, acquires: bool, releases: bool, reads: bool = True,
        writes: bool = True,
    ) -> None:  # fmt: skip
        now, publications = self.clock.now, self.publications
        for thread, address in zip(threads.tolist(), addresses.tolist(), strict=True):
            number = self._number(thread)
            if reads and acquires:
                publications.acquire(publications.seen_at(address), number, now)
            elif reads:
                self.pending[thread] = [*self.pending[thread][-8:], publications.seen_at(address)]
            if writes and releases:
                publications.release(address, number, now, self._synced(thread))
            elif writes and thread in self.fenced:
                publications.release(address, number, *self.fenced[thread])

    def _number(self, thread: int) -> int:
        return int(self.clock.number[thread])

    def _synced(self, thread: int) -> int:
        return int(self.clock.program_sync[thread // self.clock.size])


def word_of(value: Any, dtype: np.dtype) -> Any:
    """Return a parameter as an unsigned word of its size."""
    size = dtype.itemsize
    if dtype.kind == "f":
        raw = np.array(value, dtype).tobytes()
    else:
        raw = (int(value) % (1 << 8 * size)).to_bytes(size, "little")
    return np.frombuffer(raw, f"<u{size}")[0]
