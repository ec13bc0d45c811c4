"""Items of `make hardware`: kernels, the host's part, tests and tools. Each yields rows.

Kernels are called with ``impl="triton"``: in a rehearsal the compiled ones are run by `tests.ptx`.
"""

from __future__ import annotations

import csv
import fcntl
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from benchmarks import machine
from benchmarks.kernels import gae_job
from benchmarks.timing import Work, brief, cold_ms, copy_of
from benchmarks.workloads import (
    EVEN_SEQUENCES,
    MANY_TURNS,
    MULTI_TURN,
    SEQUENCES,
    Size,
    conversations,
    filled,
    single_turns,
)
from tests.gpu.checks import compared
from tests.ptx.calls import RATES, SMALL, Drawn, every_call
from trajpack import GRPO, TokenField, TrajectoryBuffer
from trajpack.kernels import block_shapes, gae, launches
from trajpack.kernels.corrections.importance_weights import Correction, importance_weights
from trajpack.kernels.corrections.loss_weights import loss_weights
from trajpack.kernels.reduce.whiten import whiten
from trajpack.packing.buffer import buffer as buffer_module
from trajpack.testing import boundaries

Row = dict[str, Any]
A, B, C = EVEN_SEQUENCES
ONE = "one sequence of 2^20"
PUBLISHED_US = {
    (8192, 128): 6.4,
    (16_384, 128): 11.5,
    (32_768, 128): 23.0,
    (8192, 512): 23.7,
    (8192, 1024): 45.3,
    (8192, 2048): 103.7,
    (2048, 2048): 28.3,
    (8192, 4096): 304.8,
    (2048, 4096): 81.4,
}
"""GAE of so many rows of so many steps in float32, by rl-triton on an H100 80GB HBM3, in µs:
``benchmarks/gae_vs_pufferlib_5_0-2026-08-20.md`` of its repository. They are means of 20 kernel
times, without a flush of the cache. Its kernel reads rewards, values and a mask, and writes
advantages; ours reads two and writes two, which are as many bytes."""
SANITIZER, FOUND = "compute-sanitizer", 86
"""The tool, and the status of a process in which it found something."""
SPREADS = ((512, 64), (1024, 64))
"""Other block shapes of ``spread_kernel``: tokens and threads of a program."""
SUMS = ((256, 32), (1024, 64), (2048, 128))
"""Other block shapes of ``sum_slots_kernel``."""


class Setting(NamedTuple):
    """What an item runs with."""

    rehearse: bool = False
    base: Path | None = None
    """Checkout of other kernels, which are timed in turn."""
    only: str = ""
    """Expression of the names of checks."""
    share: tuple[int, int] = (0, 1)
    """(i, n): every n-th check, from the i-th on."""

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @property
    def size(self) -> Size:
        return Size("cpu", 0.0005) if self.rehearse else Size()

    def lengths(self, workload: str) -> Any:
        """Return the lengths of A, B, C or of one long sequence; few and small in a rehearsal."""
        whole = np.array([2**20]) if workload == ONE else SEQUENCES[workload](1.0)
        return np.minimum(whole[:4], 60) if self.rehearse else whole

    def kernels_run(self) -> Any:
        """Let Triton's kernels run: on the executor, where it is a rehearsal."""
        if not self.rehearse:
            return nullcontext()
        from tests.ptx.executor import on_executor

        return on_executor()


def timed(work: Work, device: str) -> Row:
    """Return what a call costs, measured while no other process measures."""
    work()  # compiles
    with Path(tempfile.gettempdir(), "trajpack-measures").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        return brief(work, device)


def in_turn(ways: Mapping[str, Work], device: str) -> Iterator[Row]:
    """Time several ways twice, one after another, and yield a row of each."""
    rows = {name: timed(work, device) for name, work in ways.items()}
    for name, work in ways.items():
        yield {"way": name} | rows[name] | {"again_ms": cold_ms(work, device)}


def guarded(said: Row, rows: Iterator[Row]) -> Iterator[Row]:
    """Yield rows, each with what is said of all; where they fail, one that says how."""
    try:
        for row in rows:
            yield said | row
    except Exception as error:  # noqa: BLE001 - others are of worth without it
        traceback.print_exc()
        yield said | {"error": f"{type(error).__name__}: {error}"[:1000]}
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def beside_base(run: Callable[[Setting], Iterator[Row]]) -> Callable[[Setting], Iterator[Row]]:
    """Let an item run with the kernels of ``--base`` too: their measurements take turns."""

    def both(setting: Setting) -> Iterator[Row]:
        process = None
        if setting.base:
            path = {"PYTHONPATH": str(setting.base.absolute() / "src")}
            command = command_of("--again", run.__name__, setting=setting)
            process = started(command, **path)
        with setting.kernels_run():
            yield from run(setting)
        if process is not None:
            for line in process.stdout or ():
                yield json.loads(line) | {"of": "base"} if line.startswith("{") else {"said": line}

    both.__name__ = run.__name__
    return both


def command_of(*words: str, setting: Setting) -> list[str]:
    """Return a command that runs something of this module in a process of its own."""
    tiny = ["--rehearse"] if setting.rehearse else []
    return [sys.executable, "-m", "benchmarks.hardware", *words, *tiny]


def started(command: Sequence[str], **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=machine.ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


@contextmanager
def shaped(kernel: str, shape: tuple[int, int] | None) -> Iterator[None]:
    """Give a kernel another block shape for a while; its result has memory for whole blocks."""
    from trajpack.kernels.credit import turns_triton  # Triton

    own = block_shapes.SHAPES[kernel]
    if shape is not None:
        block_shapes.SHAPES[kernel] = own._replace(block=shape[0], threads=shape[1])
    launches.launch_on.cache_clear()
    whole = mock.patch.object(turns_triton, "in_tiles", lambda count: -(-count // 4096) * 4096)
    try:
        with whole if hasattr(turns_triton, "in_tiles") else nullcontext():
            yield
    finally:
        block_shapes.SHAPES[kernel] = own
        launches.launch_on.cache_clear()


# --- the first call


def rates(setting: Setting) -> Iterator[Row]:
    """Clocks; rates of copies of 50 and 86 % writes; kernels that do nothing, by programs."""
    fields = "clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,power.draw,temperature.gpu"
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        yield dict(zip(fields.split(","), said.strip().split(", "), strict=False))
    whole = 2**12 if setting.rehearse else 2**30
    for reads, writes in ((1, 1), (1, 6)):
        moved = reads * (whole // (reads + writes)), writes * (whole // (reads + writes))
        copy, check = copy_of(*moved, setting.device)
        check(copy())
        ms = cold_ms(copy, setting.device)
        yield {"writes": writes / (reads + writes), "ms": ms, "gb_per_s": sum(moved) / ms / 1e6}
    from benchmarks.kernels.repeated_copy import empty_kernel  # Triton

    given = torch.zeros(1, dtype=torch.int32, device=setting.device)
    with setting.kernels_run():
        for threads in (32, 128, 256):
            for programs in (4,) if setting.rehearse else (2**12, 2**14, 2**15, 2**16, 2**17):
                launch = partial(empty_kernel[(programs,)], given, num_warps=threads // 32)
                yield {"programs": programs, "threads": threads} | timed(launch, setting.device)


@beside_base
def grpo(setting: Setting) -> Iterator[Row]:
    """Yield GRPO's advantages of a batch of A and of C, with other block shapes of the spread."""
    for workload, size in ((A, 8), (C, 2)):
        trajectories = [
            replace(one, group=str(i // size))
            for i, one in enumerate(single_turns(setting.lengths(workload)))
        ]
        batch = filled(trajectories, setting.device).pack("turns", impl="torch")
        expected = None
        for shape in (None, *SPREADS[: 2 if setting.rehearse else None]):
            with shaped("spread_kernel", shape):

                def work(batch: Any = batch) -> torch.Tensor:
                    return batch.with_advantages(GRPO(), impl="triton").advantages

                found = work()
                expected = found if expected is None else expected
                same = torch.equal(found, expected)
                yield {"workload": workload, "shape": shape, "same bits": same} | timed(
                    work, setting.device
                )


@beside_base
def scans(setting: Setting) -> Iterator[Row]:
    """Yield GAE, plain and of generated tokens alone, beside a copy of as many bytes."""
    for workload in (A, B, C, ONE):
        lengths = setting.lengths(workload)
        tokens, longest = int(lengths.sum()), int(lengths.max())
        copy, _ = copy_of(8 * tokens, 8 * tokens, setting.device)
        yield {"workload": workload, "way": "copy"} | timed(copy, setting.device)
        for masked in (False, True):
            rewards, values, bounds, mask = gae_job.inputs(lengths, setting.device, masked=masked)
            options: Row = {"loss_mask": mask, "max_seqlen": longest, "impl": "triton"}
            work = partial(gae, rewards, values, bounds, **RATES, **options)
            yield {"workload": workload, "masked": masked} | timed(work, setting.device)


def checks(setting: Setting) -> Iterator[Row]:
    """Compare kernels with their references on the host, and with themselves, run again."""
    small = {"tiny": np.array([3, 1, 40])} if setting.rehearse else SMALL
    number = -1
    for workload, lengths in small.items():
        both = Drawn(lengths), Drawn(lengths, setting.device)
        for (name, on_host), (_, on_device) in zip(*map(every_call, both), strict=True):
            if not re.search(setting.only, name):
                continue
            number += 1
            if number % setting.share[1] != setting.share[0]:
                continue
            if setting.rehearse and number > setting.share[1]:
                return
            try:
                with setting.kernels_run():
                    found = {"outcome": "passed"} | compared(on_host, on_device)
            except Exception as error:  # noqa: BLE001 - the others are of worth without it
                found = {"outcome": f"failed: {error}"[:1000]}
            yield {"workload": workload, "check": name} | found


def sanitized(tool: str, only: str, setting: Setting) -> Iterator[Row]:
    """Run checks under a tool of compute-sanitizer, in several processes.

    A race that it reports in kernels of other libraries, such as cuBLAS, counts apart.
    """
    shares = 1 if setting.rehearse else 6
    before = [] if setting.rehearse else [SANITIZER, "--tool", tool, "--error-exitcode", f"{FOUND}"]
    uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    words = ("--within", "checks", "--only", only)
    processes = [
        started(
            [*before, *command_of(*words, "--share", str(i), str(shares), setting=setting)],
            **uncached,
        )
        for i in range(shares)
    ]
    for process in processes:
        passed, told = 0, []
        for line in process.stdout or ():
            print(line, end="", flush=True)
            row = json.loads(line) if line.startswith("{") else {}
            passed += row.get("outcome") == "passed"
            if row.get("outcome", "passed") != "passed":
                yield row
            if line.startswith("=========") and ("_kernel+0x" in line or "reported" in line):
                told.append(line.strip())
        yield {"tool": tool, "passed": passed, "status": process.wait(), "told": told[:10]}


def racecheck(setting: Setting) -> Iterator[Row]:
    """Search the scans for races."""
    return sanitized("racecheck", "gae|returns|vtrace|segment_sum", setting)


# --- the second call


def tests(setting: Setting) -> Iterator[Row]:
    """Run the tests that need a device."""
    chosen = ["-m", "gpu", "tests/gpu", "-n", "8"]
    if setting.rehearse:
        chosen = ["--collect-only", "tests/gpu/test_pad.py"]
    command = [sys.executable, "-m", "pytest", "-W", "default", "-p", "no:cacheprovider"]
    process = started([*command, "-v", "--tb=short", *chosen], OMP_NUM_THREADS="1")
    last, passed = "", 0
    for line in process.stdout or ():
        print(line, end="", flush=True)
        last = line.strip() or last
        passed += "PASSED" in line
        if re.search(r"\[gw\d+\].*\b(FAILED|ERROR)\b", line):
            yield {"failed": line.strip()}
    yield {"status": process.wait(), "last_line": last, "passed": passed}


def host(setting: Setting) -> Iterator[Row]:
    """Time extend, add and pack on the host, and the parts of pack, in milliseconds."""
    for workload in (A, C, MULTI_TURN, MANY_TURNS):
        trajectories = conversations(workload, setting.size.scale)
        buffer = TrajectoryBuffer(device=setting.device)
        found: dict[str, list[Any]] = {"extend": [], "pack": [], "again": []}
        for _ in range(6):
            buffer.clear()
            found["extend"].append(ms_of(partial(buffer.extend, trajectories), setting))
            for name in ("pack", "again"):
                found[name].append(parts_of_pack(buffer, setting))
        few = trajectories[:1000]
        for _ in range(3):
            buffer.clear()
            begin = time.perf_counter()
            for one in few:
                buffer.add(one)
            found.setdefault("add_us", []).append(1e6 * (time.perf_counter() - begin) / len(few))
        yield {"workload": workload, "turns": sum(len(one.turns) for one in trajectories)} | found


def ms_of(work: Work, setting: Setting) -> float:
    begin = time.perf_counter()
    work()
    if setting.device == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def parts_of_pack(buffer: TrajectoryBuffer, setting: Setting) -> Row:
    """Return the host's milliseconds of the parts of a pack, of all, and with the wait."""
    places: dict[str, tuple[Any, str]] = {
        "tables": (buffer, "_tables_of"),
        "send": (getattr(buffer, "_staging", None), "send"),
        "returns": (buffer_module, "returns_of_turns"),
        "returns, build": (buffer_module, "write_batch"),
    }
    found: Row = {}

    def stamped(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            result = real(*given, **named)
            found[name] = 1e3 * (time.perf_counter() - begin)
            return result

        return call

    patches = [
        mock.patch.object(owner, attribute, stamped(name, getattr(owner, attribute)))
        for name, (owner, attribute) in places.items()
        if hasattr(owner, attribute)
    ]
    for patch in patches:
        patch.start()
    try:
        begin = time.perf_counter()
        wall = ms_of(lambda: buffer.pack("turns") and found.update(all=ms_since(begin)), setting)
    finally:
        for patch in patches:
            patch.stop()
    return found | {"wall": wall}


def ms_since(begin: float) -> float:
    return 1e3 * (time.perf_counter() - begin)


@beside_base
def weights(setting: Setting) -> Iterator[Row]:
    """Importance weights with and without metrics, whitening, weights of a loss."""
    device = setting.device
    for workload in (A, B, C):
        lengths = setting.lengths(workload)
        generator, tokens = torch.Generator().manual_seed(16), int(lengths.sum())
        old = -torch.rand(tokens, generator=generator)
        new = old + 0.2 * torch.randn(tokens, generator=generator)
        mask = (torch.rand(tokens, generator=generator) < 0.9).to(device)
        new, old = new.to(device), old.to(device)
        ids = torch.repeat_interleave(boundaries(lengths).diff(), output_size=tokens).int()
        ids, tis = ids.to(device), Correction.tis(2.0)
        of: Row = {"sequence_ids": ids, "num_sequences": len(lengths), "impl": "triton"}
        mean = partial(loss_weights, "sequence_mean_token_mean", mask, **of)
        weigh = partial(importance_weights, new, old, mask, tis, impl="triton")
        ways: dict[str, Work] = {"importance": weigh, "whiten": partial(whiten, new, mask)}
        if setting.rehearse:
            ways["whiten"] = partial(whiten, new, mask, impl="triton")
        if "metrics" in inspect.signature(importance_weights).parameters:
            ways["importance, no metrics"] = partial(weigh, metrics=False)
        for name, work in ways.items():
            yield {"workload": workload, "way": name} | timed(work, device)
        for shape in (None, *SUMS[: 1 if setting.rehearse else None]):
            with shaped("sum_slots_kernel", shape):
                row = {"workload": workload, "way": "loss weights", "shape": shape}
                yield row | timed(mean, device)


def fields(setting: Setting) -> Iterator[Row]:
    """Extra fields of 48 layers and 8 experts: extend, the copy to the device, and the gather."""
    experts = TokenField("experts", torch.uint8, (48, 8), fill=255, generated_only=False)
    for workload in (A, MULTI_TURN):
        trajectories = []
        for one in conversations(workload, setting.size.scale / (1 if setting.rehearse else 8)):
            turns = []
            for turn in one.turns:
                ids = np.concatenate((turn.prompt_ids, turn.completion_ids)).astype(np.uint8)
                own = np.broadcast_to(ids[:, None, None], (len(ids), 48, 8)).copy()
                turns.append(replace(turn, fields={"experts": own}))
            trajectories.append(replace(one, turns=turns))
        buffer = TrajectoryBuffer(device=setting.device, fields=[experts])
        extend = ms_of(partial(buffer.extend, trajectories), setting)
        row = timed(partial(buffer.pack, "turns"), setting.device)
        batch = buffer.pack("turns")
        moved = batch.fields["experts"].nbytes
        named = row.get("kernels_us", {})
        us = sum(took for name, took in named.items() if "gather" in name)
        row |= {"gather_gb_per_s": 2 * moved / us / 1e3} if us else {}
        copied = sum(took for name, took in named.items() if "memcpy" in name.lower())
        row |= {"sent_gb_per_s": buffer.num_bytes / copied / 1e3} if copied else {}
        yield {"workload": workload, "extend_ms": extend, "field_bytes": moved} | row
        del batch, buffer, trajectories


def counted(setting: Setting) -> Iterator[Row]:
    """Launch four kernels on A, each twice: below a tool that counts."""
    lengths = setting.lengths(A)
    tokens, device = int(lengths.sum()), setting.device
    rewards, values, bounds, _ = gae_job.inputs(lengths, device)
    mask = rewards > -1
    ids = torch.repeat_interleave(bounds.diff(), output_size=tokens).int()
    given = [replace(one, group=str(i // 8)) for i, one in enumerate(single_turns(lengths))]
    batch = filled(given, device).pack("turns", impl="torch")
    of: Row = {"sequence_ids": ids, "num_sequences": len(lengths), "impl": "triton"}
    rule = Correction.tis(2.0)
    with setting.kernels_run():
        for _ in range(2):
            importance_weights(-rewards.abs(), -values.abs(), mask, rule, impl="triton")
            batch.with_advantages(GRPO(), impl="triton")
            loss_weights("sequence_mean_token_mean", mask, **of)
            gae(rewards, values, bounds, **RATES, max_seqlen=int(lengths.max()), impl="triton")
    yield {"launched": True}


def counters(setting: Setting) -> Iterator[Row]:
    """Rates and stalls of four kernels, by Nsight Compute."""
    command = command_of("--within", "counted", setting=setting)
    sections = ("SpeedOfLight", "SchedulerStats", "WarpStateStats", "Occupancy", "LaunchStats")
    sections += ("MemoryWorkloadAnalysis", "InstructionStats")
    tool = ["ncu", "--clock-control", "none", "--csv", "--page", "details"]
    tool += [word for one in sections for word in ("--section", one)]
    names = "regex:weigh_kernel|spread_kernel|sum_slots_kernel|^scan_kernel"
    tool += ["--kernel-name", names, "--launch-count", "10"]
    process = started([*([] if setting.rehearse else tool), *command])
    lines = list(process.stdout or ())
    print("".join(lines), flush=True)
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    yield {"status": process.wait(), "last_line": lines[-1].strip() if lines else ""}
    found: dict[str, Row] = {}
    for row in csv.DictReader(lines[begin:] if begin is not None else ()):
        if row.get("Metric Name"):
            kernel = found.setdefault(f"{row['ID']} {row['Kernel Name']}"[:60], {})
            kernel[row["Metric Name"]] = f"{row['Metric Value']} {row['Metric Unit']}".strip()
    for name, metrics in found.items():
        yield {"kernel": name, "metrics": metrics}


def dense(setting: Setting) -> Iterator[Row]:
    """GAE of rows of equal length, in the shapes that rl-triton has published times of."""
    device = setting.device
    with setting.kernels_run():
        for (rows, steps), published in (
            {(3, 40): 0}.items() if setting.rehearse else PUBLISHED_US.items()
        ):
            generator = torch.Generator(device).manual_seed(12)
            rewards, values = torch.randn(2, rows * steps, generator=generator, device=device)
            bounds = torch.arange(0, rows * steps + 1, steps, dtype=torch.int32, device=device)
            options: Row = RATES | {"max_seqlen": steps, "impl": "triton"}
            work = partial(gae, rewards, values, bounds, **options)
            alone = gae(rewards[-steps:], values[-steps:], bounds[:2], **options)
            for packed, by_itself in zip(work(), alone, strict=True):
                assert torch.equal(packed[-steps:], by_itself)
            copy, _ = copy_of(8 * rows * steps, 8 * rows * steps, device)
            row = {"rows": rows, "steps": steps, "published_us": published}
            yield row | {"copy_us": 1e3 * cold_ms(copy, device)} | timed(work, device)


def memcheck(setting: Setting) -> Iterator[Row]:
    """Search all kernels for accesses beside their memory."""
    return sanitized("memcheck", "", setting)
