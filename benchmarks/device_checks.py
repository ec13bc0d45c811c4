"""Cheap evidence from a device: rates of copies, kernels beside their references, waits, graphs.

``python -m benchmarks.device_checks PART FILE`` writes each row to FILE when it is known. With
``--rehearse`` it takes CPU tensors of tiny sizes: the compiled kernels are executed by `tests.ptx`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.contest import Contender
from benchmarks.kernels.calls import RATES, SMALL, Call, Drawn, counted_calls, every_call
from benchmarks.timing import copy_of, measure, on_device_ms
from benchmarks.workloads import EVEN_SEQUENCES, SEQUENCES, Lengths, filled
from trajpack import GAE, GRPO, StaticBatch, TurnGAE
from trajpack.kernels import block_shapes, gae
from trajpack.testing import assert_same_bits, boundaries

MIXES = ((1, 1), (1, 6))
"""Bytes read and written by a copy, in proportion: 50 and 86 % are writes."""
COPIED = 2**30
TINY = {"tiny": np.array([3, 1, 40])}
CANDIDATE_S = 60
"""Seconds of a block shape at most."""
Row = dict[str, Any]
Check = Callable[[], Row]


class Setting:
    """What a part runs with."""

    def __init__(self, *, rehearse: bool) -> None:
        self.rehearse = rehearse
        self.device = "cpu" if rehearse else "cuda"
        self.small = TINY if rehearse else SMALL
        self.full = TINY if rehearse else {one[0]: SEQUENCES[one](1.0) for one in EVEN_SEQUENCES}
        self.copied = 2**12 if rehearse else COPIED

    def calls(self) -> Iterator[tuple[str, Call]]:
        """Yield calls on the first small workload; few in a rehearsal: `kernels` has them all."""
        given = Drawn(next(iter(self.small.values())), self.device)
        return islice(every_call(given), 3 if self.rehearse else None)


# --- copies


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


# --- kernels


def kernels(setting: Setting) -> Iterator[tuple[Row, Check]]:
    """Compare each kernel with its reference on the host, and with itself, run again."""
    for workload, lengths in setting.small.items():
        pairs = zip(
            every_call(Drawn(lengths)), every_call(Drawn(lengths, setting.device)), strict=True
        )
        for (name, on_host), (_, on_device) in pairs:
            yield {"workload": workload, "call": name}, partial(compared, on_host, on_device)


def compared(on_host: Call, on_device: Call) -> Row:
    expected, got, again = (
        tensors_of(work(impl))
        for work, impl in ((on_host, "torch"), (on_device, "triton"), (on_device, "triton"))
    )
    assert got.keys() == expected.keys()
    apart = 0.0
    for name, tensor in got.items():
        wanted, here = expected[name], tensor.cpu()
        torch.testing.assert_close(here, wanted, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert_same_bits(again[name], tensor, name)
        if here.is_floating_point() and here.numel():
            apart = max(apart, float((here.double() - wanted.double()).nan_to_num().abs().max()))
    return {"tensors": len(got), "most_apart": apart}


def tensors_of(result: Any, name: str = "result") -> dict[str, torch.Tensor]:
    """Return the tensors of what a call returned, by name."""
    if isinstance(result, torch.Tensor):
        return {name: result}
    if isinstance(result, (tuple, list)):
        parts = [tensors_of(one, f"{name} {index}") for index, one in enumerate(result)]
        return {key: tensor for part in parts for key, tensor in part.items()}
    found: dict[str, torch.Tensor] = result.tensors()
    return found | dict(getattr(result, "fields", {}))


# --- waits and graphs


def sync(setting: Setting) -> Iterator[tuple[Row, Check]]:
    """Make each call with every wait for the device an error, after one that compiles."""
    for name, call in setting.calls():
        yield {"call": name}, partial(without_waits, call, setting)


def without_waits(call: Call, setting: Setting) -> Row:
    call("triton")
    with _waits_are_errors() if setting.device == "cuda" else nullcontext():
        call("triton")
    return {}


@contextmanager
def _waits_are_errors() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def graphs(setting: Setting) -> Iterator[tuple[Row, Check]]:
    """Replay captured calls; and a captured static batch, with credit, for other contents."""
    for name, call in setting.calls():
        if not name.startswith(("pack", "select")):  # which copy tables from the host
            yield {"call": name}, partial(replays_call, call, setting)
    for estimator in (None, GRPO(), TurnGAE(), GAE(0.99, 0.95, whiten=True)):
        row = {"call": f"StaticBatch.run, {type(estimator).__name__}"}
        yield row, partial(replays_static, estimator, setting)


def captured(work: Callable[[], Any], setting: Setting) -> tuple[Any, Callable[[], Any]]:
    """Return what ``work`` returned in a graph, and the replay; without a device, plain calls."""
    result = work()
    if setting.device == "cpu":
        return result, work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return result, graph.replay


def replays_call(call: Call, setting: Setting) -> Row:
    expected = {name: one.clone() for name, one in tensors_of(call("triton")).items()}
    result, replay = captured(lambda: call("triton"), setting)
    replay()
    for name, tensor in tensors_of(result).items():
        assert_same_bits(tensor, expected[name], name)
    return {}


def replays_static(estimator: Any, setting: Setting) -> Row:
    """Fill and replay, without a wait in between."""
    given = Drawn(next(iter(setting.small.values())), setting.device)
    tokens, count = given.tokens, len(given.lengths)
    static = StaticBatch(tokens, count, device=setting.device)
    beside = {"values": given.values} if isinstance(estimator, (GAE, TurnGAE)) else {}

    def work() -> Any:
        batch = static.run(impl="triton")
        return batch if estimator is None else batch.with_advantages(estimator, **beside)

    contents = [given.trajectories, given.trajectories[: count // 2], given.trajectories[::-1]]
    buffers = [filled(one, setting.device) for one in contents]
    static.fill(buffers[0], "turns")
    result, replay = captured(work, setting)
    seen = []
    for buffer in buffers:
        static.fill(buffer, "turns")
        result = replay() or result
        names = ("input_ids", "advantages") if estimator else ("input_ids",)
        seen.append({name: getattr(result, name).clone() for name in names})
    for buffer, found in zip(buffers, seen, strict=True):
        plain = buffer.pack("turns")
        own = {name: rows[: plain.num_tokens] for name, rows in beside.items()}
        if estimator is not None:
            plain = plain.with_advantages(estimator, **own)
        for name, tensor in found.items():
            wanted = getattr(plain, name)
            torch.testing.assert_close(tensor[: len(wanted)], wanted, rtol=1e-5, atol=1e-5)
    return {"contents": len(seen)}


# --- block shapes of scans


def candidates() -> Iterator[tuple[str, int, int]]:
    """Yield name, block and threads of each scan's row, and of half and twice as much."""
    for kernel, rows in block_shapes.SHAPES.items():
        if "scan" not in kernel:
            continue
        shape = rows[block_shapes.DEFAULT]
        shapes = [
            (int(shape.block * block), int(shape.threads * threads))
            for block in (1, 0.5, 2, 4)
            for threads in (1, 0.5, 2, 4)
        ]
        yield from (
            (kernel, block, threads)
            for block, threads in shapes
            if threads >= 32 and 1 <= block // threads <= 16
        )


def shapes(setting: Setting) -> Iterator[tuple[Row, Check]]:
    """Time `gae` with each candidate, in a process of its own: the block is a module's constant."""
    chosen = list(candidates())
    for kernel, block, threads in chosen[:1] if setting.rehearse else chosen:
        row = {"kernel": kernel, "block": block, "threads": threads}
        yield row, partial(in_a_process, [kernel, str(block), str(threads)], setting)


def in_a_process(shape: Sequence[str], setting: Setting) -> Row:
    command = [sys.executable, "-m", "benchmarks.device_checks", "shape", *shape]
    command += ["--rehearse"] if setting.rehearse else []
    done = subprocess.run(
        command, cwd=machine.ROOT, capture_output=True, text=True, check=False, timeout=CANDIDATE_S
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def time_shape(kernel: str, block: int, threads: int, setting: Setting) -> Row:
    """Check a shape at small sizes and return its times, of both regimes, by workload."""
    assert not any(name.endswith("scan_triton") for name in sys.modules), "has read its shape"
    shape = block_shapes.SHAPES[kernel][block_shapes.DEFAULT]
    shape = shape._replace(block=block, threads=threads, most_registers=None)
    block_shapes.SHAPES[kernel] = {block_shapes.DEFAULT: shape}
    with _kernels_run(setting):
        for lengths in setting.small.values():
            here, there = (Drawn(lengths, device) for device in ("cpu", setting.device))
            for (name, on_host), (_, on_device) in zip(
                counted_calls(here), counted_calls(there), strict=True
            ):
                if name.startswith("gae"):
                    compared(on_host, on_device)
        return {name: regimes(lengths, setting) for name, lengths in setting.full.items()}


def regimes(lengths: Lengths, setting: Setting) -> Row:
    """Return the milliseconds of `gae` with and without the longest sequence, and of a copy."""
    tokens, device = int(lengths.sum()), setting.device
    rewards, values = torch.randn(2, tokens, device=device)
    bounds = boundaries(lengths).to(device)
    found = {}
    for name, longest in (("longest known", int(lengths.max())), ("longest unknown", None)):
        work = partial(
            gae, rewards, values, bounds, **RATES, max_seqlen=longest, impl="triton"
        )  # fmt: skip
        found[name] = on_device_ms(measure(Contender("gae", work, "both"), device))
    copy, check = copy_of(8 * tokens, 8 * tokens, device)
    return found | {"copy": on_device_ms(measure(Contender("copy", copy, "all", check), device))}


# --- what runs them

PARTS = {"copies": copies, "kernels": kernels, "sync": sync, "graphs": graphs, "shapes": shapes}


@contextmanager
def _kernels_run(setting: Setting) -> Iterator[None]:
    """Let Triton's kernels run: on the executor, where it is a rehearsal."""
    if not setting.rehearse:
        yield
        return
    from tests.ptx.executor import on_executor

    with on_executor():
        yield


def run_part(part: str, file: Path, setting: Setting) -> int:
    """Write a row for each check of a part when it has ended; return 0 if none failed."""
    said = machine.describe(f"python -m benchmarks.device_checks {part} {file}")
    rows: list[Row] = []
    file.parent.mkdir(parents=True, exist_ok=True)
    with _kernels_run(setting):
        for name, check in PARTS[part](setting):
            try:
                found = {"outcome": "passed"} | check()
            except Exception as error:  # noqa: BLE001 - the others are of worth without it
                found = {"outcome": f"failed: {error}".strip()[:1000]}
            rows.append(name | found)
            file.write_text(json.dumps(said | {"rows": rows}, indent=1) + "\n")
            print(json.dumps(rows[-1]), flush=True)
            if setting.device == "cuda":
                torch.cuda.synchronize()  # raises, and ends the part, where the device is lost
    failed = sum(row["outcome"] != "passed" for row in rows)
    print(f"{part}: {len(rows)} checks, {failed} failed")
    return int(failed > 0)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "shape"])
    parser.add_argument("rest", nargs="+", help="the file; for a shape its kernel, block, threads")
    parser.add_argument("--rehearse", action="store_true")
    asked = parser.parse_args(arguments)
    setting = Setting(rehearse=asked.rehearse)
    if asked.part != "shape":
        return run_part(asked.part, Path(asked.rest[0]), setting)
    kernel, block, threads = asked.rest
    print(json.dumps(time_shape(kernel, int(block), int(threads), setting)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
