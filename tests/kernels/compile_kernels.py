"""Compile and launch the kernels without a GPU; print what was measured as JSON.

A program of its own, since Triton decides between its interpreter and its compiler when a
kernel is decorated. The launchers of trajpack run unchanged on CPU tensors: a driver that only
records stands in for the GPU's, so Triton specialises and compiles exactly what it would there.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

from trajpack import Trajectory, TrajectoryBuffer, Turn
from trajpack.kernels import (
    build_triton,
    discounted_returns_triton,
    gather_words_triton,
    pad_triton,
)
from trajpack.kernels.build_triton import build_forward, build_kernel
from trajpack.kernels.discounted_returns_triton import (
    discounted_returns_forward,
    discounted_returns_kernel,
    segment_returns,
    superblock_returns,
    superblock_returns_kernel,
    superblock_sums,
    superblock_sums_kernel,
)
from trajpack.kernels.gather_words_triton import gather_words_forward, gather_words_kernel
from trajpack.kernels.pad_triton import pad_forward, pad_kernel, unpad_forward, unpad_kernel

TARGETS = (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64))
KERNELS = (
    build_kernel,
    discounted_returns_kernel,
    superblock_sums_kernel,
    superblock_returns_kernel,
    gather_words_kernel,
    pad_kernel,
    unpad_kernel,
)
TUNED = (build_triton, gather_words_triton, pad_triton)
"""Modules whose warps follow from their threads."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
PLAIN = {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": False}
BYTES = {"": 4, "U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
BYTES |= {"byte": 1, "short": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}


@triton.jit(do_not_specialize=["num_tokens"])
def masked_kernel(source, out, num_tokens, BLOCK: tl.constexpr):
    """Planted: stores behind a mask of unknown alignment."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    tl.store(out + token, tl.load(source + token, mask=mask, other=0), mask=mask)


@triton.jit(do_not_specialize=["begin"])
def hinted_kernel(source, out, begin, BLOCK: tl.constexpr):
    """Planted: promises an alignment that only some runs have."""
    token = tl.arange(0, BLOCK)
    tl.store(out + token, tl.load(tl.multiple_of(source + begin + token, 16)))


class Recorder:
    """A driver that serves CPU tensors, for ``target``, and launches nothing."""

    def __init__(self, target: GPUTarget, device: int) -> None:
        self.target, self.device, self.launches = target, device, []
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device  # Triton keeps compiled kernels apart by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 64 * 1024}

    def load_binary(self, *_: Any) -> tuple[None, int, int, int, int]:
        return None, 0, 0, 0, 1024

    def unload_module(self, _: None) -> None:
        pass

    def launcher_cls(self, source: ASTSource, _: Any) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            named = dict(zip(source.fn.arg_names, arguments[9:], strict=True))
            grid = list(arguments[:3])
            self.launches.append({"kernel": source.fn.__name__, "grid": grid, "arguments": named})

        return launch

    def variants(self) -> list[Any]:
        caches = [kernel.device_caches[self.device][0] for kernel in (*KERNELS, *PLANTED)]
        return [compiled for cache in caches for compiled in cache.values()]


PLANTED = (masked_kernel, hinted_kernel)


@contextmanager
def recording(target: GPUTarget, device: int) -> Iterator[Recorder]:
    recorder = Recorder(target, device)
    driver.set_active(recorder)
    for module in TUNED:
        module.NUM_WARPS = module.THREADS // target.warp_size  # as where torch has it
    limit = {} if target.backend == "hip" else {"maxnreg": 128}
    discounted_returns_triton.OPTIONS = {"num_warps": 4, "enable_fp_fusion": False, **limit}
    yield recorder


def launches_of_every_variant(device: str = "cpu") -> Iterator[tuple[str, Callable[[], Any]]]:
    words, cu_seqlens = (torch.zeros(n, dtype=torch.int32, device=device) for n in (99, 9))
    runs = words[:24].view(3, 8)
    discounts = torch.ones(8, dtype=torch.float64, device=device)
    returns = torch.zeros(9, device=device)
    yield "aligned", lambda: build_forward(words, runs, returns, 1500)
    yield "unaligned", lambda: build_forward(words[1:], runs, returns[1:], 1500)
    for dtype in (torch.float32, torch.float64):
        rewards = returns.to(dtype)
        shifted = rewards[1:], cu_seqlens[1:], discounts[1:]
        for label, inputs in (
            ("aligned", (rewards, cu_seqlens, discounts)),
            ("unaligned", shifted),
        ):
            sums = torch.zeros(2, dtype=torch.float64, device=device)[label == "unaligned" :]
            yield label, partial(segment_returns, *inputs)
            yield label, partial(superblock_sums, *inputs)
            yield label, partial(superblock_returns, *inputs, sums)
    table = torch.zeros((5, 4), dtype=torch.int64, device=device)
    yield "aligned", lambda: gather_words_forward(table, 1500)
    yield "unaligned", lambda: gather_words_forward(table.view(-1)[1:-3].view(4, 4), 1500)
    yield from launches_of_every_row(cu_seqlens)
    yield "planted", lambda: masked_kernel[(1,)](words, words, 99, **PLAIN)
    yield "planted", lambda: hinted_kernel[(1,)](words, words, 99, **PLAIN)


def launches_of_every_row(cu_seqlens: torch.Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Pad and unpad rows of one unit and of several, for every width of a unit."""
    memory = torch.zeros(9000, dtype=torch.int8, device=cu_seqlens.device)
    for unit in (1, 2, 4, 8, 16):
        unaligned = f"3 x {unit} unaligned", 3 * unit, unit % 16, cu_seqlens[1:]
        aligned = [(f"{units} x {unit}", units * unit, 0, cu_seqlens) for units in (1, 3)]
        for label, row, start, ends in (*aligned, unaligned):
            batch = len(ends) - 1
            packed = memory[start : start + 99 * row].view(99, row)
            padded = memory[start : start + batch * 12 * row].view(batch, 12, row)
            yield label, partial(pad_forward, packed, ends, 12, 1, "left")
            yield label, partial(unpad_forward, padded, ends, 99, "left")


def measure_variants() -> Iterator[dict[str, Any]]:
    for device, target in enumerate(TARGETS):
        with recording(target, device) as recorder:
            for inputs, launch in launches_of_every_variant():
                before = recorder.variants()
                launch()
                new = [variant for variant in recorder.variants() if variant not in before]
                assert len(new) == 1
                yield {"inputs": inputs} | measure(new[0], target)
                if target.backend == "hip" and inputs != "planted":
                    yield {"inputs": f"{inputs}, past 2 GiB"} | measure(far(new[0]), target)


def far(kernel: Any) -> Any:
    """Compile as for tensors whose offsets need more than 32 bits."""
    attributes = {
        place: [pair for pair in pairs if pair[0] != "tt.pointer_range"]
        for place, pairs in kernel.src.attrs.items()
    }
    source = ASTSource(kernel.src.fn, kernel.src.signature, kernel.src.constants, attributes)
    options = {name: getattr(kernel.metadata, name) for name in ("num_warps", "enable_fp_fusion")}
    return triton.compile(source, target=kernel.metadata.target, options=options)


def measure(kernel: Any, target: GPUTarget) -> dict[str, Any]:
    fields = kernel.src.signature
    resources = measure_cuda(kernel) if target.backend == "cuda" else measure_hip(kernel)
    return {
        "target": str(target.arch),
        "kernel": kernel.name,
        "rewards": fields.get("rewards"),
        "threads": kernel.metadata.num_warps * target.warp_size,
        "scans": scanned_layouts(kernel.asm["ttgir"]),
        **resources,
    }


def scanned_layouts(code: str) -> list[str]:
    """Return the type and layout of what each scan takes: they settle the order of its sums."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", code, re.MULTILINE))
    scans = re.findall(r'"tt\.scan".*?^\s*\}\) : \((.*?)\) ->', code, re.MULTILINE | re.DOTALL)
    return [re.sub(r"#\w+", lambda alias: layouts[alias[0]], scan) for scan in scans]


def measure_cuda(kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = run_tool("cuobjdump", "--dump-resource-usage", file.name)
        code = run_tool("nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    spills = len(re.findall(r"\b(?:LDL|STL)\b", code))
    width = r"\.E(?:\.EF|\.STRONG|\.GPU)*\.?(U8|S8|U16|S16|64|128)?\b"
    return {
        "registers": registers,
        "memory_of_a_thread": {"stack": stack, "local": local, "spills": spills},
        "stores": Counter(BYTES[found] for found in re.findall(r"\bSTG" + width, code)),
        "loads": Counter(BYTES[found] for found in re.findall(r"\bLDG" + width, code)),
        "masked_stores": len(re.findall(r"@!?U?P\d\s+STG", code)),
        "atomics": len(re.findall(r"\b(?:ATOM[GS]?|RED)\b", code)),
    }


def measure_hip(kernel: Any) -> dict[str, Any]:
    code = kernel.asm["amdgcn"]

    def resource(name: str) -> int:
        (found,) = re.findall(rf"^\s+(?:- )?\.{name}:\s+(\d+)", code, re.MULTILINE)
        return int(found)

    places = "private_segment_fixed_size", "vgpr_spill_count", "sgpr_spill_count"
    stores, loads = (
        re.findall(rf"\b(?:buffer|global|flat)_{kind}_s?u?(byte|short|dword(?:x\d)?)", code)
        for kind in ("store", "load")
    )
    return {
        "registers": resource("vgpr_count") + resource("agpr_count"),
        "memory_of_a_thread": {place: resource(place) for place in places},
        "stores": Counter(BYTES[found] for found in stores),
        "loads": Counter(BYTES[found] for found in loads),
        "masked_stores": None,  # lanes are masked by a register, not in the instruction
        "atomics": len(re.findall(r"_atomic_", code)),
    }


def run_tool(name: str, *arguments: str) -> str:
    done = subprocess.run([TOOLS / name, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def ragged_trajectory(name: str, num_turns: int) -> Trajectory:
    """Turns of 2 to 40 new tokens, each prompt the conversation so far."""
    turns, seen = [], [1]
    for index in range(num_turns):
        new = (len(name) + index) * 7 % 20 + 1
        turns.append(Turn([*seen, 2], [3] * new, [-0.5] * new))
        seen = [*seen, 2, *[3] * new][-40:]  # forgets, so that chains break too
    return Trajectory(name, turns)


def measure_launches() -> Iterator[dict[str, Any]]:
    with recording(GPUTarget("cuda", 90, 32), len(TARGETS)) as recorder:
        cases = [(0, 0), (1, 5), (10, 5), (16, 1), (1000, 5)]
        cases += [(1, num_turns) for num_turns in (1, 15, 16, 17, 400)]
        for num_trajectories, num_turns in cases:
            buffer = TrajectoryBuffer(device="cpu")
            for index in range(num_trajectories):
                buffer.add(ragged_trajectory("t" * (index + 1), num_turns))
            for layout in ("merged", "turns"):
                recorder.launches.clear()
                batch = buffer.pack(layout=layout, impl="triton")
                yield {
                    "layout": layout,
                    "num_trajectories": num_trajectories,
                    "num_tokens": batch.num_tokens,
                    "launches": [[done["kernel"], done["grid"]] for done in recorder.launches],
                    "field_sizes": [
                        field.untyped_storage().nbytes() // field.itemsize
                        for done in recorder.launches
                        for field in done["arguments"].get("fields", ())
                    ],
                    "variants": len(recorder.variants()),
                }


def measure_returns() -> Iterator[dict[str, Any]]:
    """Return what is launched for entries in segments under a bound, and with which options."""
    with recording(GPUTarget("cuda", 90, 32), len(TARGETS) + 2) as recorder:
        cu_seqlens, discounts = torch.zeros(4, dtype=torch.int32), torch.ones(3).double()
        for entries, bound in ((8192, None), (8193, None), (8193, 4096), (8193, 4097), (0, None)):
            recorder.launches.clear()
            discounted_returns_forward(torch.zeros(entries), cu_seqlens, discounts, bound)
            launches = [(done["kernel"], done["grid"][0]) for done in recorder.launches]
            yield {"entries": entries, "max_seqlen": bound, "launches": launches}


def measure_launches_on_meta() -> dict[str, Any]:
    """Launch on tensors without values; a launcher that reads one raises."""
    with recording(GPUTarget("cuda", 90, 32), len(TARGETS) + 1) as recorder:
        launchers = [
            launch for inputs, launch in launches_of_every_variant("meta") if inputs != "planted"
        ]
        for launch in launchers:
            launch()
        kernels = Counter(done["kernel"] for done in recorder.launches)
        return {"launchers": len(launchers), "launches": kernels}


def refusal() -> str:
    """Ask for Triton where no driver serves CPU tensors."""
    buffer = TrajectoryBuffer(device="cpu")
    try:
        buffer.pack(impl="triton")
    except RuntimeError as error:
        return str(error)
    return ""


def main() -> None:
    measured = {
        "refusal": refusal(),
        "variants": list(measure_variants()),
        "launches": list(measure_launches()),
        "returns": list(measure_returns()),
        "launches_on_meta": measure_launches_on_meta(),
    }
    print(json.dumps(measured, indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
