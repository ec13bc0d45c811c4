"""Group statistics cost the device work that grows with the members alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_twice_the_members_are_twice_the_instructions() -> None:
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.groups.work_of_groups"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    few, more, most = json.loads(done.stdout)
    assert few > 0
    assert 1.9 < more / few < 2.1
    assert 1.9 < most / more < 2.1
