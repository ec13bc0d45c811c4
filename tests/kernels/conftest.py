"""Fixtures of the kernel tests: which implementation, and what the compiler makes of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

INSTALLED = version_of("triton")
COMPILED = Path(__file__).with_name("compiled")
OTHERS = Path(__file__).with_name("triton_versions.txt").read_text().split()
VERSIONS = list(dict.fromkeys([INSTALLED, *OTHERS]))
"""Versions of Triton that the kernels are compiled with: the one that runs, and others."""
TARGETS = ("gfx942", "90", "80")
"""What the one that runs compiles every variant for; what takes longest is begun first."""
TARGETS_OF_OTHERS = ("90",)
"""What the others compile for, variants that are demanding."""
OF_EVERY_VARIANT = ("test_every_variant_is_compiled", "test_any_groups_are_one_launch")
"""Tests of what the others leave out."""
MOST_KEPT = 1500
"""Entries of Triton's cache: what some sessions compile in which every kernel was changed."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what other versions of Triton do not compile: it would take minutes."""
    kept, left_out = [], []
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(
            item, "callspec"
        ) else {}  # fmt: skip
        target = parameters.get("target") or (parameters.get("variants") or ("", ""))[1]
        other = parameters.get("compiled", INSTALLED) != INSTALLED
        leaves = bool(target) and target not in TARGETS_OF_OTHERS
        leaves = other and (leaves or getattr(item, "originalname", "") in OF_EVERY_VARIANT)
        (left_out if leaves else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(scope="session")
def interpreter() -> None:
    """Skip a test that runs a kernel on CPU tensors where the interpreter is off."""
    if not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("the interpreter is off where a GPU is present")


@pytest.fixture(scope="session", params=["torch", "triton"])
def impl(request: pytest.FixtureRequest) -> str:
    """Name of an implementation that takes CPU tensors; Triton's runs in its interpreter."""
    if request.param == "triton":
        request.getfixturevalue("interpreter")
    return str(request.param)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:  # else there is nothing to forget, and seconds to import
        torch.compiler.reset()


class CompiledKernels:
    """What ``compile_kernels.py`` measured with one version of Triton."""

    def __init__(self, version: str, measured: dict[str, Any]) -> None:
        self.version, self.measured = version, measured
        for variant in measured["variants"]:
            for accesses in ("stores", "loads"):
                by_width = variant[accesses].items()
                variant[accesses] = Counter({int(width): count for width, count in by_width})

    def __getitem__(self, name: str) -> Any:
        return self.measured[name]

    def variants(self, kernel: str, target: str) -> list[dict[str, Any]]:
        """Return what was measured of a kernel's variants for a target; there are some."""
        variants = self.measured["variants"]
        found = [v for v in variants if (v["kernel"], v["target"]) == (kernel, target)]
        assert found, (kernel, target)
        return found


@pytest.fixture(scope="session", params=VERSIONS)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> CompiledKernels:
    """What the compiler makes of the kernels, for each version of Triton that is installed.

    The first test of a session to ask has them compiled for all workers, and for every version
    that any test of the session asks for: two targets at a time. What Triton compiles it keeps
    from one session to the next, by its source, as it does for any program; ``--cache-clear``
    forgets it.
    """
    version = str(request.param)
    if not _has_triton(version):
        pytest.skip(f"Triton {version} is not in {_folder(version)}: `make test` puts it there")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    results = {v: folder / f"compiled_kernels_{v}.json" for v in _wanted(request.session)}
    with FileLock(folder / "compiled_kernels.lock"):
        if not results[version].exists():
            caches = {v: _cache_of(request.config, folder, v) for v in results}
            for compiled_by, measured in _compile_all(caches).items():
                results[compiled_by].write_text(json.dumps(measured))
    return CompiledKernels(version, json.loads(results[version].read_text()))


def _folder(version: str) -> Path:
    return Path(sys.prefix, "triton", version)


def _has_triton(version: str) -> bool:
    return version == INSTALLED or _folder(version).is_dir()


def _cache_of(config: pytest.Config, folder: Path, version: str) -> Path:
    """Return where this Triton keeps what it compiled; it begins anew when it has grown."""
    if not hasattr(config, "cache"):  # -p no:cacheprovider
        return folder / f"triton_cache_{version}"
    kept = Path(config.cache.mkdir(f"triton-{version}"))
    if sum(1 for _ in kept.iterdir()) > MOST_KEPT:
        shutil.rmtree(kept)
    return kept


def _wanted(session: pytest.Session) -> list[str]:
    """Return the versions that are there and that the session's tests are parametrised with."""
    calls = (getattr(item, "callspec", None) for item in session.items)
    wanted = {call.params.get("compiled") for call in calls if call is not None}
    return [version for version in VERSIONS if version in wanted and _has_triton(version)]


def _compile_all(caches: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Return what was measured with each version, which keeps its kernels in the folder named."""
    parts = [
        (version, target)
        for version in caches
        for target in (TARGETS if version == INSTALLED else TARGETS_OF_OTHERS)
    ]
    measured: dict[str, dict[str, Any]] = {version: {"variants": []} for version in caches}
    with ThreadPoolExecutor(max_workers=2) as pool:
        done = pool.map(lambda part: _compile(*part, caches[part[0]]), parts)
        for (version, _), found in zip(parts, done, strict=True):
            variants = measured[version]["variants"] + found["variants"]
            measured[version] |= found | {"variants": variants}
    return measured


@pytest.fixture(scope="session")
def compile_scans(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str, str], list[dict[str, Any]]]:
    """Return what measures scans with a version of Triton for a target; skips without it."""

    def compiled_scans(version: str, target: str, variants: str) -> list[dict[str, Any]]:
        if not _has_triton(version):
            pytest.skip(f"Triton {version} is not in {_folder(version)}: `make test` puts it there")
        # of its own: the other may be emptied by the worker that compiles into it
        cache = _cache_of(request.config, tmp_path_factory.getbasetemp(), f"{version}-scans")
        found: list[dict[str, Any]] = _compile(version, target, cache, variants)["variants"]
        return [variant for variant in found if variant["inputs"] != "planted"]

    return compiled_scans


def _compile(version: str, target: str, cache: Path, variants: str | None = None) -> dict[str, Any]:
    """Run the program with this Triton, found before the one that is installed."""
    paths = [str(COMPILED)]
    if version != INSTALLED:
        paths.insert(0, str(_folder(version)))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    if inherited := environment.get("PYTHONPATH"):
        paths.append(inherited)
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    program = str(COMPILED / "compile_kernels.py")
    variants = variants or ("every" if version == INSTALLED else "demanding")
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", program, variants, target],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, f"Triton {version}, {target}: {done.stderr}"
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured
