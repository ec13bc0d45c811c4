"""Fixtures of the kernel tests: implementations, and measurements of compiled code."""

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

from tests.conftest import MOST_KEPT

INSTALLED = version_of("triton")
COMPILED = Path(__file__).with_name("compiled")
OTHERS = Path(__file__).with_name("triton_versions.txt").read_text().split()
VERSIONS = list(dict.fromkeys([INSTALLED, *OTHERS]))
"""Versions of Triton that the kernels are compiled with: the installed one first."""
OLDEST, NEWEST = OTHERS
TARGETS = ("90", "80", "100", "gfx942")
BUILDS = {
    (INSTALLED, "90", "every"): pytest.mark.slow,
    (INSTALLED, "80", "every"): pytest.mark.variants,
    (INSTALLED, "gfx942", "every"): pytest.mark.variants,
    (INSTALLED, "100", "every"): pytest.mark.variants,
    (INSTALLED, "gfx942", "demanding"): pytest.mark.slow,
    (INSTALLED, "100", "demanding"): pytest.mark.slow,
    (OLDEST, "90", "demanding"): pytest.mark.slow,
    (NEWEST, "90", "demanding"): pytest.mark.variants,
    (INSTALLED, "90", "demanding"): (),
}
"""Builds of the kernels: version of Triton, target, and whether ``every`` variant is compiled or
the ``demanding`` ones. `make test` has the last, `make test-slow` those that are marked slow, and
`make variants` all. Builds that take longest begin first."""


def _builds_for(targets: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(build, marks=marks) for build, marks in BUILDS.items() if build[1] in targets
    ]


def builds(*targets: str) -> pytest.MarkDecorator:
    """Run a test once for each build for one of these targets."""
    chosen = _builds_for(targets)
    return pytest.mark.parametrize("compiled", chosen, indirect=True, ids="-".join)


@pytest.fixture(autouse=True)
def _on_executor(executor: Any) -> None:
    """Run every kernel of these tests on the executor."""


@pytest.fixture(scope="session", params=["torch", "triton"])
def impl(request: pytest.FixtureRequest) -> str:
    """Name of an implementation that takes CPU tensors; Triton's runs on the executor."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    if "torch._dynamo" in sys.modules:  # else there is nothing to forget, and seconds to import
        torch.compiler.reset()


class CompiledKernels:
    """Measurements by ``compile_kernels.py`` for one build."""

    def __init__(self, build: tuple[str, str, str], measured: dict[str, Any]) -> None:
        self.version, self.target, variants = build
        self.measured, self.is_complete = measured, variants == "every"
        self.is_nvidia = self.target != "gfx942"
        self.all = [found for found in measured["variants"] if found["target"] == self.target]
        for variant in self.all:
            for accesses in ("stores", "loads"):
                by_width = variant[accesses].items()
                variant[accesses] = Counter({int(width): count for width, count in by_width})

    def __getitem__(self, name: str) -> Any:
        return self.measured[name]

    def variants(self, kernel: str) -> list[dict[str, Any]]:
        """Return the measurements of a kernel's variants; there are some."""
        found = [variant for variant in self.all if variant["kernel"] == kernel]
        assert found, (kernel, self.target)
        return found


@pytest.fixture(scope="session", params=_builds_for(TARGETS), ids="-".join)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> CompiledKernels:
    """Measurements of the compiled kernels, for each build whose Triton is installed.

    The first test of a session to ask compiles for all workers, all builds that any test of the
    session asks for, two at a time. Triton's cache is kept between sessions; ``--cache-clear``
    empties it.
    """
    _skip_without(request.param[0])
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    results = folder / "compiled_kernels.json"
    with FileLock(results.with_suffix(".lock")):
        if not results.exists():
            calls = (getattr(item, "callspec", None) for item in request.session.items)
            wanted = {call.params.get("compiled") for call in calls if call is not None}
            chosen = [build for build in BUILDS if build in wanted and _has_triton(build[0])]
            caches = {build[0]: _cache_of(request.config, folder, build[0]) for build in chosen}
            results.write_text(json.dumps(_compile_all(chosen, caches)))
    measured = json.loads(results.read_text())["-".join(request.param)]
    return CompiledKernels(request.param, measured)


def _compile_all(
    chosen: list[tuple[str, str, str]], caches: dict[str, Path]
) -> dict[str, dict[str, Any]]:
    """Compile builds with the same version and variants in one process each."""
    targets: dict[tuple[str, str], list[str]] = {}
    for version, target, variants in chosen:
        targets.setdefault((version, variants), []).append(target)

    def measure(part: tuple[str, str]) -> dict[str, Any]:
        return _compile(part[0], part[1], targets[part], caches[part[0]])

    with ThreadPoolExecutor(max_workers=2) as pool:
        measured = dict(zip(targets, pool.map(measure, targets), strict=True))
    return {"-".join(build): measured[build[0], build[2]] for build in chosen}


@pytest.fixture(scope="session")
def compile_scans(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], list[dict[str, Any]]]:
    """Return a function that measures every scan with a version of Triton for a target."""

    def compiled_scans(version: str, target: str) -> list[dict[str, Any]]:
        _skip_without(version)
        cache = _cache_of(request.config, tmp_path_factory.getbasetemp(), f"{version}-scans")
        found: list[dict[str, Any]] = _compile(version, "scans", [target], cache)["variants"]
        return found

    return compiled_scans


def folder_of(version: str) -> Path:
    """Return where `make test` puts another version of Triton."""
    return Path(sys.prefix, "triton", version)


def _has_triton(version: str) -> bool:
    return version == INSTALLED or folder_of(version).is_dir()


def _skip_without(version: str) -> None:
    if not _has_triton(version):
        pytest.skip(f"Triton {version} is not in {folder_of(version)}: `make test` puts it there")


def _cache_of(config: pytest.Config, folder: Path, version: str) -> Path:
    """Return the cache folder of this Triton, emptied if it has grown too large."""
    if not hasattr(config, "cache"):  # -p no:cacheprovider
        return folder / f"triton_cache_{version}"
    kept = Path(config.cache.mkdir(f"triton-{version}"))
    if sum(1 for _ in kept.iterdir()) > MOST_KEPT:
        shutil.rmtree(kept)
    return kept


def _compile(version: str, variants: str, targets: list[str], cache: Path) -> dict[str, Any]:
    """Run the program with this Triton, found before the one that is installed."""
    paths = [str(COMPILED)]
    if version != INSTALLED:
        paths.insert(0, str(folder_of(version)))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    if inherited := environment.get("PYTHONPATH"):
        paths.append(inherited)
    environment |= {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(paths)}
    program = str(COMPILED / "compile_kernels.py")
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", program, variants, *targets],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, f"Triton {version}, {targets}: {done.stderr}"
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured
