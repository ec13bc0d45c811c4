"""Every kernel runs as other versions of Triton compile it, and for other architectures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.conftest import INSTALLED, NEWEST, OLDEST, folder_of

ROOT = Path(__file__).parents[2]
BUILDS = [
    (OLDEST, "sm_80"),
    (NEWEST, "sm_90"),
    pytest.param(INSTALLED, "sm_80", marks=pytest.mark.variants),
]
"""The other tests run the installed version for sm_90."""


@pytest.mark.slow
@pytest.mark.parametrize(("version", "arch"), BUILDS)
def test_every_kernel_runs_as_this_version_compiles_it(version: str, arch: str) -> None:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if version != INSTALLED:
        folder = folder_of(version)
        if not folder.is_dir():
            pytest.skip(f"Triton {version} is not in {folder}: `make test` puts it there")
        paths.insert(0, str(folder))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, "-m", "tests.ptx.run_calls", arch]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["version"] == version
    assert {"scan_kernel", "build_kernel", "fold_kernel"} <= {*found["kernels"]}
