"""The shape of the repository: real files in root folders, one import name through three links."""

import importlib.util
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.source_copy import copy_source

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
        [sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
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


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Build sdist and wheel without isolation: setuptools is part of the installation."""
    out = tmp_path_factory.mktemp("dist")
    code = (
        "import setuptools.build_meta as backend, sys; out = sys.argv[1]\n"
        "backend.build_wheel(out); backend.build_sdist(out)"
    )
    copy = copy_source(tmp_path_factory.mktemp("tree") / "trajpack")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(out)],
        cwd=copy, check=True, capture_output=True,
    )  # fmt: skip
    return out


def test_the_wheel_holds_one_package_with_real_files(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ["__init__.py", "py.typed", "cli.py", *(f"{layer}/" for layer in LAYERS)]:
        assert any(entry.startswith(f"trajpack/{name}") for entry in names), name
    tops = {entry.split("/")[0] for entry in names}
    assert tops == {"trajpack", *(top for top in tops if top.endswith(".dist-info"))}
    in_wheel = {entry for entry in names if entry.endswith(".py")}
    in_tree = {
        f"trajpack/{path.relative_to(ROOT)}"
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*.py")
    }
    assert in_tree <= in_wheel


def test_the_sdist_holds_the_layers(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    for layer in LAYERS:
        assert any(name.startswith(f"src/trajpack/{layer}/") for name in names), layer
