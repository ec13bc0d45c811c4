"""Cheap evidence from a device: copies, kernels beside their references, waits, graphs, shapes.

``python -m benchmarks.device_checks PART FILE`` writes each row to FILE when it is known. With
``--rehearse`` it takes CPU tensors of tiny sizes: the compiled kernels are executed by `tests.ptx`.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.contest import Contender
from benchmarks.timing import cold_ms, copy_of, measure, on_device_ms
from benchmarks.workloads import EVEN_SEQUENCES, SEQUENCES
from tests.gpu.checks import compared, replays_call, without_waits
from tests.ptx.calls import RATES, SMALL, Call, Drawn, counted_calls, every_call
from trajpack.kernels import block_shapes, gae
from trajpack.kernels.block_shapes import BlockShape

MIXES = ((1, 1), (1, 6))
"""Bytes read and written by a copy, in proportion: 50 and 86 % are writes."""
COPIED = 2**30
TINY = {"tiny": np.array([3, 1, 40])}
CANDIDATE_S = 240
"""Seconds of a block shape at most, its wait for the others included."""
SCANNED = "credit_scan"
GAE_KNOWN = "gae, longest known"
VARIED = {
    SCANNED: (GAE_KNOWN, "gae", "gae, masked, longest known", "discounted_returns"),
    "spread_kernel": ("GRPO",),
    "whiten": ("whiten",),
    "weigh_kernel": ("importance_weights",),
    "loss_weights": ("loss_weights",),
}
"""Kernels whose block shapes `shapes` varies, and the calls that it times."""
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
SANITIZER = "compute-sanitizer"
FOUND = 86
"""Status of a process in which the sanitizer found something."""
Row = dict[str, Any]
Check = Callable[[], Row]


class Setting:
    """What a part runs with."""

    def __init__(self, *, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.device = "cpu" if rehearse else "cuda"
        self.small = TINY if rehearse else SMALL
        self.full = TINY if rehearse else {one[0]: SEQUENCES[one](1.0) for one in EVEN_SEQUENCES}
        self.shaped = TINY if rehearse else self.full | {"one sequence": np.array([2**20])}
        self.copied = 2**12 if rehearse else COPIED

    def calls(self) -> Iterator[tuple[str, Call]]:
        """Yield calls on the first small workload; few in a rehearsal: `kernels` has them all."""
        return islice(every_call(self.drawn()), 3 if self.rehearse else None)

    def drawn(self) -> Drawn:
        """Return the inputs of the first small workload."""
        return Drawn(next(iter(self.small.values())), self.device)


def copies(setting: Setting) -> Iterator[tuple[Row, Check]]:
    """Measure the rate of a copy, by its share of writes."""
    for read, written in MIXES:
        whole = setting.copied // (read + written)
        moved = read * whole, written * whole
        yield {"writes": written / (read + written)}, partial(rate_of, moved, setting.device)


def rate_of(moved: tuple[int, int], device: str) -> Row:
    copy, check = copy_of(*moved, device)
    check(copy())
    found = measure(Contender("copy", copy, "all", check), device)
    return {"bytes": sum(moved), "gb_per_s": sum(moved) / on_device_ms(found) / 1e6} | found


def kernels(setting: Setting) -> Iterator[tuple[Row, Check]]:
    """Compare each kernel with its reference on the host, and with itself, run again."""
    for workload, lengths in setting.small.items():
        pairs = zip(
            every_call(Drawn(lengths)), every_call(Drawn(lengths, setting.device)), strict=True
        )
        for (name, on_host), (_, on_device) in pairs:
            yield {"workload": workload, "call": name}, partial(compared, on_host, on_device)


def sync(setting: Setting) -> Iterator[tuple[Row, Check]]:
    """Make each call with every wait for the device an error, after one that compiles."""
    for name, call in setting.calls():
        yield {"call": name}, partial(without_waits, call, setting.device)


def graphs(setting: Setting) -> Iterator[tuple[Row, Check]]:
    """Replay captured calls."""
    for name, call in setting.calls():
        if not name.startswith("pack") and name != "select":  # which copy tables from the host
            yield {"call": name}, partial(replays_call, call, setting.device)


def dense(setting: Setting) -> Iterator[tuple[Row, Check]]:
    """Time GAE of rows of equal length, in the shapes that rl-triton has published times of."""
    every = PUBLISHED_US.items()
    for (rows, steps), published in islice(every, 1 if setting.rehearse else None):
        row = {"rows": rows, "steps": steps, "published_us": published}
        size = (3, 40) if setting.rehearse else (rows, steps)
        yield row, partial(time_rows, *size, setting.device)


def time_rows(rows: int, steps: int, device: str) -> Row:
    """Return the microseconds of GAE and of a copy of as many bytes; check the last row's bits."""
    generator = torch.Generator(device).manual_seed(12)
    rewards, values = torch.randn(2, rows * steps, generator=generator, device=device)
    bounds = torch.arange(0, rows * steps + 1, steps, dtype=torch.int32, device=device)

    def advantages(last: int = rows) -> tuple[torch.Tensor, torch.Tensor]:
        kept = rewards[-last * steps :], values[-last * steps :], bounds[: last + 1]
        return gae(*kept, **RATES, max_seqlen=steps, impl="triton")

    for packed, by_itself in zip(advantages(), advantages(1), strict=True):
        assert torch.equal(packed[-steps:], by_itself)
    copy, check = copy_of(8 * rows * steps, 8 * rows * steps, device)
    check(copy())
    found = {"gae_us": 1e3 * cold_ms(advantages, device), "copy_us": 1e3 * cold_ms(copy, device)}
    return found | {"of_copy": found["copy_us"] / found["gae_us"]}


def candidates() -> list[tuple[str, BlockShape]]:
    """Return the kernels whose block shape is varied, each with its own shape and those around it.

    Of the kernel of `gae`, whose block has 32 lanes at most, also limits of its registers.
    """
    found = []
    for kernel in VARIED:
        own = block_shapes.SHAPES[kernel]
        most = own.block if kernel == SCANNED else 2 * own.block
        sizes = product(*([n, n // 2, 2 * n] for n in own[:2]))
        found += [
            (kernel, own._replace(block=block, threads=threads))
            for block, threads in sizes
            if threads >= 32 and threads <= block <= min(most, 32 * threads)
        ]
    own = block_shapes.SHAPES[SCANNED]
    return [*found, *((SCANNED, own._replace(most_registers=most)) for most in (None, 96))]


def shapes(setting: Setting) -> Iterator[tuple[Row, Check]]:
    """Time each candidate in a process of its own: some blocks are constants of a module."""
    for kernel, shape in candidates()[: 1 if setting.rehearse else None]:
        yield {"kernel": kernel} | shape._asdict(), partial(in_a_process, kernel, shape, setting)


def in_a_process(kernel: str, shape: BlockShape, setting: Setting) -> Row:
    numbers = (str(number or 0) for number in shape)
    command = [sys.executable, "-m", "benchmarks.device_checks", "shape", kernel, *numbers]
    command += ["--rehearse"] if setting.rehearse else []
    done = subprocess.run(
        command, cwd=machine.ROOT, capture_output=True, text=True, check=False, timeout=CANDIDATE_S
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-1000:])
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def time_shape(kernel: str, shape: BlockShape, setting: Setting) -> Row:
    """Check a shape at a small size and return the milliseconds of its calls, by workload."""
    assert not any(module.endswith("_triton") for module in sys.modules), "has read its shape"
    block_shapes.SHAPES[kernel] = shape
    found: Row = {}
    with _kernels_run(setting):
        small = next(iter(setting.small.values()))
        of_host, of_device = (calls_of(kernel, Drawn(small, at)) for at in ("cpu", setting.device))
        for name, call in of_device.items():
            compared(of_host[name], call)
        for workload, lengths in setting.shaped.items():
            calls = calls_of(kernel, Drawn(lengths, setting.device))
            with alone():
                found[workload] = {
                    name: cold_ms(partial(call, "triton"), setting.device)
                    for name, call in calls.items()
                }
    return found


def calls_of(kernel: str, given: Drawn) -> dict[str, Call]:
    """Return the calls by which a kernel is timed."""
    every = dict(counted_calls(given))
    three, longest = (given.rewards, given.values, given.cu_seqlens), given.longest
    every[GAE_KNOWN] = lambda impl: gae(*three, **RATES, max_seqlen=longest, impl=impl)
    return {name: every[name] for name in VARIED[kernel]}


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other process measures: they compile beside each other."""
    with Path(tempfile.gettempdir(), "trajpack-measures").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


PARTS = {
    "copies": copies,
    "kernels": kernels,
    "sync": sync,
    "graphs": graphs,
    "dense": dense,
    "shapes": shapes,
}


def _kernels_run(setting: Setting) -> AbstractContextManager[Any]:
    """Let Triton's kernels run: on the executor, where it is a rehearsal."""
    from tests.ptx.executor import on_executor

    return on_executor() if setting.rehearse else nullcontext()


def in_shares(asked: argparse.Namespace) -> int:
    """Run a part in processes, each with a share of the checks; put their rows into one file.

    A race that a sanitizer reports in kernels of other libraries, such as cuBLAS, is printed and is
    no failure.
    """
    file = Path(asked.rest[0])
    before = []
    if asked.sanitizer:
        before = [SANITIZER, "--tool", asked.sanitizer, "--error-exitcode", str(FOUND)]
    shares = [file.with_suffix(f".{share}.json") for share in range(asked.shares)]
    for one in shares:
        one.unlink(missing_ok=True)
    commands = []
    for share, own in enumerate(shares):
        command = [sys.executable, "-m", "benchmarks.device_checks", asked.part, str(own)]
        command += ["--share", str(share), str(asked.shares)]
        command += ["--rehearse"] if asked.rehearse else []
        commands.append([*before, *command])
    with ThreadPoolExecutor(len(commands)) as pool:
        status = max(pool.map(run_share, commands))
    written = [json.loads(one.read_text()) for one in shares if one.exists()]
    rows = [row for one in written for row in one["rows"]]
    if written:
        said = {"command": command_of(asked.part, file), "rows": rows}
        file.write_text(json.dumps(written[0] | said, indent=1) + "\n")
        for one in shares:
            one.unlink(missing_ok=True)
    status = status or int(any(row["outcome"] != "passed" for row in rows))
    print(f"{asked.part}: {len(rows)} checks in {len(shares)} processes, status {status}")
    return status


def run_share(command: Sequence[str]) -> int:
    """Run a process, print what it says, and return its status: 0 if all is in order."""
    in_ours = in_others = False
    with subprocess.Popen(
        command, cwd=machine.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            is_told = line.startswith("=========")
            in_ours |= is_told and "_kernel+0x" in line
            in_others |= is_told and "Race reported" in line
    status = abs(process.returncode)
    return 0 if status == FOUND and in_others and not in_ours else status


def command_of(part: str, file: Path) -> str:
    return f"python -m benchmarks.device_checks {part} {file}"


def run_part(part: str, file: Path, setting: Setting, share: tuple[int, int] = (0, 1)) -> int:
    """Write a row for each check of a part when it has ended; return 0 if none failed.

    Of ``share`` (i, n) every n-th check is run, from the i-th on.
    """
    said = machine.describe(command_of(part, file))
    rows: list[Row] = []
    file.parent.mkdir(parents=True, exist_ok=True)
    with _kernels_run(setting):
        for name, check in islice(PARTS[part](setting), share[0], None, share[1]):
            try:
                found = {"outcome": "passed"} | check()
            except Exception as error:  # noqa: BLE001 - the others are of worth without it
                found = {"outcome": f"failed: {error}".strip()[:1000]}
            rows.append(name | found)
            file.write_text(json.dumps(said | {"rows": rows}, indent=1) + "\n")
            print(json.dumps(rows[-1]), flush=True)
            if setting.device == "cuda":
                torch.cuda.synchronize()  # raises, and ends the part, where the device is lost
    failed = [row for row in rows if row["outcome"] != "passed"]
    print(f"{part}: {len(rows)} checks, {len(failed)} failed")
    return int(bool(failed))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "shape"])
    parser.add_argument(
        "rest", nargs="+", help="the file; for a shape its kernel, block, threads, registers"
    )
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--shares", type=int, default=1, help="processes among which to deal")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), help="one of how many")
    parser.add_argument("--sanitizer", help="the tool of compute-sanitizer to run under")
    asked = parser.parse_args(arguments)
    if asked.shares > 1 or asked.sanitizer:
        return in_shares(asked)
    setting = Setting(rehearse=asked.rehearse)
    if asked.part != "shape":
        return run_part(asked.part, Path(asked.rest[0]), setting, asked.share)
    kernel, (block, threads, most) = asked.rest[0], map(int, asked.rest[1:])
    print(json.dumps(time_shape(kernel, BlockShape(block, threads, most or None), setting)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
