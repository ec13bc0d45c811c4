"""The layout of the kernels for Hugging Face's package `kernels`, loaded beside trajpack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packing.adapters.peers import find_peer

ROOT = Path(__file__).parents[2]
WRITER = ROOT / ".ci" / "hub_kernels.py"
BY_PATH = """
import importlib.util, json, sys
from pathlib import Path

def get_local_kernel(folder):
    variant = folder / "build" / "torch-cuda"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""
BY_KERNELS = """
import sys
from pathlib import Path
from kernels import get_local_kernel
"""
COMPARED = """
import torch
import trajpack.kernels

ops = get_local_kernel(Path(sys.argv[1]))
assert {*trajpack.kernels.__all__} <= {*dir(ops)}
assert ops.__file__.startswith(sys.argv[1])
rewards, ends = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 3], dtype=torch.int32)
for name, arguments in {
    "discounted_returns": (rewards, ends, 0.5),
    "segment_sum": (rewards, ends),
    "pad": (rewards, ends, 2),
}.items():
    theirs, own = getattr(ops, name), getattr(trajpack.kernels, name)
    assert theirs is not own and theirs.__module__.startswith(ops.__name__)
    for impl in ("torch", "triton"):
        assert torch.equal(theirs(*arguments, impl=impl), own(*arguments, impl=impl)), name
assert ops.pad.__module__.startswith("_trajpack_kernels_")
assert not any(name.startswith("trajpack.agent.") for name in sys.modules)
print("same")
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub")
    subprocess.run([sys.executable, str(WRITER), str(folder)], check=True)
    return folder


def loaded(program: str, layout: Path, *paths: Path) -> str:
    path = os.pathsep.join(map(str, [ROOT / "src", *paths]))
    done = subprocess.run(
        [sys.executable, "-P", "-c", program + COMPARED, str(layout)],
        env=os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"},
        cwd=layout, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_each_backend_has_all_modules_and_its_metadata(layout: Path) -> None:
    modules = {str(path.relative_to(ROOT / "kernels")) for path in ROOT.glob("kernels/**/*.py")}
    variants = sorted((layout / "build").iterdir())
    assert [path.name for path in variants] == ["torch-cpu", "torch-cuda", "torch-rocm"]
    for variant in variants:
        written = {str(path.relative_to(variant)) for path in variant.rglob("*.py")}
        assert written == modules | {"__init__.py"}
        about = json.loads((variant / "metadata.json").read_text())
        assert f"torch-{about['backend']['type']}" == variant.name


@pytest.mark.slow
def test_the_layout_is_a_package_of_its_own(layout: Path) -> None:
    assert loaded(BY_PATH, layout) == "same"


@pytest.mark.slow
def test_the_package_of_hugging_face_loads_the_layout(
    layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = find_peer("kernels", monkeypatch)
    assert loaded(BY_KERNELS, layout, peer.folder) == "same"
