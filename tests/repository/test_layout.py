"""The shape of the repository: real files in root folders, one import name through three links."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ["kernels", "packing", "agent"]


@pytest.mark.parametrize("layer", LAYERS)
def test_each_layer_is_a_relative_link_to_its_root_folder(layer):
    link = ROOT / "src" / "trajpack" / layer
    assert link.is_symlink()
    assert os.readlink(link) == f"../../{layer}"
    assert link.resolve() == ROOT / layer
    assert any((ROOT / layer).glob("*.py"))


@pytest.mark.parametrize("layer", LAYERS)
def test_no_root_folder_is_a_package_of_its_own(layer):
    # a root kernels/ that can be imported would shadow the package that transformers imports
    assert not (ROOT / layer / "__init__.py").exists()


@pytest.mark.parametrize("layer", LAYERS)
def test_no_bare_name_is_found_in_this_repository(layer):
    # an installed package of that name is another one; -P keeps the working folder off the path
    code = f"import importlib.util; print(importlib.util.find_spec({layer!r}))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{ROOT}/{layer}" not in done.stdout
    # where the working folder is on the path, the folder is at most a namespace without code
    found = importlib.util.find_spec(layer)
    assert found is None or found.origin is None or not Path(found.origin).is_relative_to(ROOT)


def test_the_top_level_holds_what_the_design_names_and_no_more():
    folders = {*LAYERS, "benchmarks", "tests", "docs", "examples", "src"}
    files = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", ".ci/run"}
    assert all((ROOT / name).is_dir() for name in folders)
    assert all((ROOT / name).is_file() for name in files)
    files |= {"pyproject.toml", "setup.py", "constraints.txt"}
    known = folders | {name.split("/")[0] for name in files}
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = {name.split("/")[0] for name in listed.stdout.splitlines()}  # none in an archive
    assert {name for name in found if not name.startswith(".")} <= known
