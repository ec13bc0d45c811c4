"""Triton's kernels on CPU tensors: what is compiled for an NVIDIA GPU is run, and watched.

Launchers run unchanged: Triton specialises and compiles what it would for the GPU, and the PTX of
each kernel is executed in place of the machine code.

    with on_executor(90) as executor:
        returns = discounted_returns(rewards, cu_seqlens, 0.99, impl="triton")
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.ptx.machine import Machine, Options
from tests.ptx.memory import GlobalMemory, PtxError
from tests.ptx.parse import parse
from tests.ptx.program import Program
from tests.ptx.tensors import allocations, extent_of
from tests.ptx.traffic import SECTOR, Traffic
from tests.support.fresh_memory import filled_fresh_memory
from trajpack.kernels import launches

MOST_SHARED = {80: 163 * 1024, 90: 227 * 1024}
"""Bytes of shared memory of a program."""


class Report:
    """Sums over the launches of one kernel."""

    def __init__(self) -> None:
        self.launches = self.programs = self.warp_instructions = self.thread_instructions = 0
        self.traffic: dict[tuple[str, str], Traffic] = defaultdict(Traffic)
        """By memory and kind of access."""
        self.lines: dict[tuple[Any, ...], Traffic] = defaultdict(Traffic)
        """By memory, kind of access, line of the source and instruction."""
        self.touched: Counter[str] = Counter()
        """Bytes of global memory in distinct sectors, by kind of access."""
        self.texts: set[str] = set()
        """PTX of the variants that were launched."""

    def add(self, machine: Machine) -> None:
        grid = machine.grid
        self.launches += 1
        self.programs += grid[0] * grid[1] * grid[2]
        lengths = np.array([len(block) for block in machine.program.code])
        warps, threads = (lengths @ machine.runs).tolist()
        self.warp_instructions += warps
        self.thread_instructions += threads
        for (space, way, loc, text), traffic in machine.traffic.items():
            self.traffic[space, way].add(traffic)
            self.lines[space, way, loc, text].add(traffic)
        for allocation in machine.memory.allocations:
            for way, sectors in allocation.sectors.items():
                self.touched[way] += int(sectors.sum()) * SECTOR


class Executor:
    """Serves CPU tensors as the driver of a GPU; keeps reports and findings of launches."""

    def __init__(self, arch: int, options: Options, *, is_strict: bool) -> None:
        self.target, self.device, self.options = GPUTarget("cuda", arch, 32), arch, options
        self.is_strict, self.utils = is_strict, self
        self.reports: dict[str, Report] = defaultdict(Report)
        self.findings: Counter[str] = Counter()
        """Faults by kind, place and instruction, with the number of accesses."""
        self.launched: list[str] = []
        """Names of the kernels that were launched."""
        self.programs: list[int] = []
        """Number of programs of each launch that did nothing."""
        self.is_running = True
        """Whether launches are compiled and do anything."""
        self.rewrite: Callable[[str], str] = str
        """Changes the text of a kernel before it is run, to plant a fault."""

    # what Triton asks of a driver

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device  # Triton keeps compiled kernels apart by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": MOST_SHARED[self.target.arch]}

    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        return None, _loading[-1], 0, 0, 1024

    def unload_module(self, _: None) -> None:
        pass

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        # a kernel that was loaded once is launched by the executor that is active then
        return lambda *arguments: driver.active.launch(source, arguments)

    # what a launch does

    def note_launch(self, kernel: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Bind the arguments of a launch and do no more, so that nothing is compiled."""
        *_, bind = kernel.device_caches[self.device]
        bind(*given, **{name: one for name, one in named.items() if name not in ("grid", "warmup")})
        self.launched.append(kernel.fn.__name__)
        self.programs.append(named["grid"][0])

    def launch(self, source: Any, arguments: tuple[Any, ...]) -> None:
        *grid, _, compiled = arguments[:5]
        self.launched.append(source.fn.__name__)
        if not self.is_running:  # launches are noted, and nothing runs
            return
        program = program_of(self.rewrite(compiled.asm["ptx"]))
        given = list(_flat(source, arguments[9:]))
        values = [one.data_ptr() if hasattr(one, "data_ptr") else one for one in given]
        values += [0] * (len(program.kernel.params) - len(values))  # scratch and profile
        threads = compiled.metadata.num_warps * 32
        names = (name for name, _ in program.kernel.params)
        tensors = {n: one for n, one in zip(names, given, strict=False) if hasattr(one, "data_ptr")}
        follow = "tt.int_to_ptr" in compiled.asm["ttir"]
        known = allocations(list(tensors.values()), follow=follow)
        extents = {name: extent_of(tensor) for name, tensor in tensors.items()}
        machine = Machine(
            program, (grid[0], grid[1], grid[2]), threads, values,
            shared=compiled.metadata.shared, memory=GlobalMemory(known, threads, extents),
            options=self.options,
        )  # fmt: skip
        machine.run()
        report = self.reports[program.kernel.name]
        report.add(machine)
        report.texts.add(compiled.asm["ptx"])
        self.findings += machine.findings
        if self.is_strict and machine.findings:
            raise PtxError("; ".join(f"{text} ({n})" for text, n in machine.findings.items()))


@lru_cache(maxsize=32)
def program_of(text: str) -> Program:
    """Return a kernel's functions; only of the last ones, which are millions of objects."""
    return Program(parse(text))


_loading: list[Any] = []
"""The compiled kernel that Triton loads now."""


def _flat(source: Any, arguments: tuple[Any, ...]) -> Iterator[Any]:
    """Yield what the kernel itself takes: no constants, and the parts of tuples."""
    for name, value in zip(source.fn.arg_names, arguments, strict=True):
        yield from _leaves(source.signature[name], value)


def _leaves(kind: Any, value: Any) -> Iterator[Any]:
    if isinstance(kind, tuple):
        for part, one in zip(kind, value, strict=True):
            yield from _leaves(part, one)
    elif kind != "constexpr":
        yield value


@contextmanager
def on_executor(
    arch: int = 90, *, strict: bool = True, fresh: str = "trajpack.", **options: Any
) -> Iterator[Executor]:
    """Launch Triton's kernels on CPU tensors, compiled for ``sm_{arch}``.

    Memory that trajpack allocates uninitialised is filled with a pattern, so that a read of what
    was not written is found, and an output that was not written shows.

    Args:
        arch: 80 or 90.
        strict: Raise a ``PtxError`` for a launch with a fault, after it has run.
        fresh: How the names of the modules begin whose uninitialised memory is filled.
        options: See ``Options``.
    """
    executor = Executor(arch, Options(**options), is_strict=strict)
    before, init = driver._active, triton.compiler.CompiledKernel._init_handles
    real, run = launches.architecture_of, JITFunction.run

    def run_or_note(kernel: Any, *given: Any, **named: Any) -> Any:
        running = executor.is_running
        return (
            run(kernel, *given, **named) if running else executor.note_launch(kernel, given, named)
        )

    def init_handles(self: Any) -> None:
        _loading.append(self)
        try:
            init(self)
        finally:
            _loading.pop()

    JITFunction.run = run_or_note
    make_cubin, CUDABackend.make_cubin = CUDABackend.make_cubin, lambda *_: b""  # nobody runs it
    triton.compiler.CompiledKernel._init_handles = init_handles
    launches.architecture_of = lambda _: f"sm_{arch}"
    launches.launch_on.cache_clear()
    driver.set_active(executor)
    try:
        with filled_fresh_memory(fresh):
            yield executor
    finally:
        JITFunction.run = run
        triton.compiler.CompiledKernel._init_handles = init
        CUDABackend.make_cubin = make_cubin
        launches.architecture_of = real
        launches.launch_on.cache_clear()
        driver._active = before
