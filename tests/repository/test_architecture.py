"""Imports point one way, functions stay small, and optional packages stay optional."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "kernels": {"kernels"},
    "packing": {"kernels", "packing"},
    "agent": {"packing", "agent"},
}
PRODUCT = sorted(
    path for folder in (*ALLOWED, "src/trajpack") for path in (ROOT / folder).rglob("*.py")
)
MAX_FILES = 16
"""Files of a folder, ``__init__.py`` not counted; beyond about a dozen it is two concepts."""
MAX_FUNCTION_LINES = 60
"""Lines of code that a screen shows; a kernel is one flat body and may have more."""
OPTIONAL = {
    "anyio",
    "gymnasium",
    "httpcore",
    "httpx",
    "hypothesis",
    "math_verify",
    "megatron",
    "msgspec",
    "openrlhf",
    "opentelemetry",
    "plotly",
    "prometheus_client",
    "pyarrow",
    "pydantic_settings",
    "ray",
    "reasoning_gym",
    "stamina",
    "tensordict",
    "tinker",
    "torchtitan",
    "transformers",
    "triton",
    "trl",
    "verl",
}
LATE = {"numpy", "rich", "torch", "typer"}
"""What importing the package alone does not load, though every installation has it."""


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node


def product_files():
    return [pytest.param(path, id=str(path.relative_to(ROOT))) for path in PRODUCT]


@pytest.mark.parametrize("layer", ALLOWED)
def test_imports_point_from_agent_to_packing_to_kernels(layer):
    for path in (ROOT / layer).rglob("*.py"):
        for module, _ in imported_modules(ast.parse(path.read_text())):
            parts = module.split(".")
            if parts[0] == "trajpack":
                assert len(parts) > 1, f"{path} imports the facade"
                assert parts[1] in ALLOWED[layer], f"{path} imports {module}"


def folder_of(module):
    """Return the folder of a module of the package, as a path from the root; None outside."""
    parts = module.split(".")
    for end in range(len(parts), 1, -1):
        path = ROOT.joinpath(*parts[1:end])
        if path.is_dir() or path.with_suffix(".py").is_file():
            folder = path if path.is_dir() else path.parent
            return str(folder.relative_to(ROOT))
    return None


def imports_at_run_time(tree):
    """Yield the modules that a file imports, without those under ``if TYPE_CHECKING``."""
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in typing_only:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import) and node not in typing_only:
            yield from (alias.name for alias in node.names)


def folder_edges():
    """Return for each folder of the three layers the folders that it imports."""
    edges = {}
    for path in PRODUCT:
        if path.is_relative_to(ROOT / "src") or path.name == "__init__.py":
            continue  # an __init__.py re-exports from below
        folder = str(path.parent.relative_to(ROOT))
        found = edges.setdefault(folder, set())
        for module in imports_at_run_time(ast.parse(path.read_text())):
            if module.startswith("trajpack."):
                found.add(folder_of(module))
    return {folder: found - {folder, None} for folder, found in edges.items()}


def test_folders_do_not_import_each_other_in_circles():
    edges = folder_edges()
    order = list(graphlib.TopologicalSorter(edges).static_order())  # CycleError names a circle
    assert {*edges} <= {*order}


@pytest.mark.parametrize("folder", sorted(folder_edges()))
def test_a_folder_is_small_and_says_what_it_is_for(folder):
    files = [path for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"]
    assert len(files) <= MAX_FILES, sorted(path.name for path in files)
    if folder not in ALLOWED:
        described = ast.parse((ROOT / folder / "__init__.py").read_text())
        assert ast.get_docstring(described)


@pytest.mark.parametrize("path", product_files())
def test_imports_are_absolute_and_private_names_stay_in_their_folder(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            if (node.module or "").startswith("trajpack"):
                private = [alias.name for alias in node.names if alias.name.startswith("_")]
                assert not private, f"line {node.lineno} imports {private}"


@pytest.mark.parametrize("path", product_files())
def test_functions_stay_within_their_budget(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1 - docstring_lines(node)
            is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
            assert lines <= MAX_FUNCTION_LINES or is_kernel, f"{node.name} has {lines} lines"


def docstring_lines(node):
    if ast.get_docstring(node) is None:
        return 0
    return node.body[0].end_lineno - node.body[0].lineno + 1


@pytest.mark.parametrize("path", product_files())
def test_optional_packages_are_imported_where_they_are_used(path):
    allowed = {"triton"} if path.name.endswith("_triton.py") else set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for module, _ in imported_modules(ast.Module([node], [])):
                assert module.split(".")[0] not in OPTIONAL - allowed, module


IMPORT = """
import sys, time, numpy
begin = time.process_time()
import torch
between = time.process_time()
import trajpack
share = (time.process_time() - between) / (between - begin)
print(share, *{module.split('.')[0] for module in sys.modules})
"""


def test_importing_the_package_is_quick_and_loads_no_optional_package():
    # processor time beside that of torch, in one process: a busy machine slows both down
    done = subprocess.run(
        [sys.executable, "-P", "-c", IMPORT], check=True, capture_output=True, text=True
    )
    share, *modules = done.stdout.split()
    assert "trajpack" in modules
    assert not OPTIONAL & set(modules)
    assert float(share) < 0.3
