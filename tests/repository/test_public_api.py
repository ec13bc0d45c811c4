"""The public surface is a promise: what it holds, that it is sorted, and that it is documented."""

import ast
import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

import trajpack

ROOT = Path(__file__).parents[2]
LAYERS = ["agent", "kernels", "packing"]


def test_the_facade_exports_what_users_were_promised():
    assert trajpack.__all__ == sorted(trajpack.__all__)
    assert set(trajpack.__all__) >= {
        "PackedBatch",
        "Trajectory",
        "TrajectoryBuffer",
        "Turn",
        "VersionSpan",
        "pack",
        "unpack",
    }


def test_every_exported_name_is_documented_and_swallows_no_keywords():
    for name in trajpack.__all__:
        exported = getattr(trajpack, name)
        assert inspect.getdoc(exported), name
        is_class = inspect.isclass(exported)
        for member, value in vars(exported).items() if is_class else ():
            if not member.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, property)
            ):
                assert inspect.getdoc(value), f"{name}.{member}"
        if not (is_class and issubclass(exported, Exception)):  # these take what Python's own do
            parameters = inspect.signature(exported).parameters.values()
            assert all(one.kind is not one.VAR_KEYWORD for one in parameters), name


@pytest.mark.parametrize("layer", LAYERS)
def test_every_name_of_a_layer_can_be_imported_and_is_documented(layer):
    module = importlib.import_module(f"trajpack.{layer}")
    for name in module.__all__:
        exported = getattr(module, name)
        assert exported.__name__ == name
        assert inspect.getdoc(exported), name


@pytest.mark.parametrize("layer", LAYERS)
def test_no_module_hides_an_exported_name(layer):
    """The import of a submodule sets its name on the package."""
    modules = {path.stem for path in (ROOT / layer).iterdir()}
    assert not modules & set(importlib.import_module(f"trajpack.{layer}").__all__)


@pytest.mark.parametrize("layer", ["src/trajpack", *LAYERS])
def test_a_stub_exports_each_name_that_it_imports(layer):
    # PEP 484: an import in a stub is exported if it repeats the name after `as`, or is a star
    for node in ast.parse((ROOT / layer / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.name in ("*", alias.asname), alias.name


@pytest.mark.parametrize("module", [trajpack, trajpack.agent, trajpack.kernels, trajpack.packing])
def test_completion_is_shown_every_name(module):
    assert {*module.__all__} <= {*dir(module)}
    assert len(dir(module)) == len({*dir(module)})


def test_the_version_is_that_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "trajpack.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", trajpack.__version__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'trajpack' has no attribute 'unpacked'"):
        trajpack.unpacked  # noqa: B018
    assert not hasattr(trajpack, "_private")


def test_an_unknown_name_of_a_layer_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'trajpack.agent' has no attribute 'Agents'"):
        trajpack.agent.Agents  # noqa: B018
