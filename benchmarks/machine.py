"""What a number is worth nothing without: hardware, versions, commit, command."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "torch",
    "numpy",
    "triton",
    "transformers",
    "trl",
    "torchrl",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu",
    "pytest-benchmark",
)


def describe(command: str) -> dict[str, Any]:
    """Return hardware, versions, commit and command; no name of the machine."""
    return {
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": commit(),
        "command": command,
    }


def hardware() -> dict[str, Any]:
    """Return the processor, its cores, the memory, and the GPU if there is one."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda or torch.version.hip
    return found


@functools.cache
def commit() -> str:
    """Return the commit, marked where the product or a benchmark was changed after it.

    ``COMMIT`` in the environment names that of a copy without its history.
    """
    if given := os.environ.get("COMMIT"):
        return given
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    sources = ("kernels", "packing", "src", "benchmarks", ":!benchmarks/results")
    return head + (" and changes" if _git("status", "--porcelain", "--", *sources) else "")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
