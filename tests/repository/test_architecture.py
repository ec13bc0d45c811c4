"""Imports point one way, functions stay small, and optional packages stay optional."""

import ast
import graphlib
import subprocess
import sys
from functools import cache
from pathlib import Path

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
    "aiohttp",
    "httpx",
    "hypothesis",
    "math_verify",
    "megatron",
    "msgspec",
    "openrlhf",
    "opentelemetry",
    "prometheus_client",
    "pyarrow",
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


@cache
def tree_of(path):
    return ast.parse(path.read_text())


def imported_modules(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def test_imports_point_from_agent_to_packing_to_kernels():
    for layer, allowed in ALLOWED.items():
        for path in (ROOT / layer).rglob("*.py"):
            for module in imported_modules(tree_of(path)):
                parts = module.split(".")
                if parts[0] == "trajpack":
                    assert len(parts) > 1, f"{path} imports the facade"
                    assert parts[1] in allowed, f"{path} imports {module}"


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


@cache
def folder_edges():
    """Return for each folder of the three layers the folders that it imports."""
    edges = {}
    for path in PRODUCT:
        if path.is_relative_to(ROOT / "src") or path.name == "__init__.py":
            continue  # an __init__.py re-exports from below
        folder = str(path.parent.relative_to(ROOT))
        found = edges.setdefault(folder, set())
        for module in imports_at_run_time(tree_of(path)):
            if module.startswith("trajpack."):
                found.add(folder_of(module))
    return {folder: found - {folder, None} for folder, found in edges.items()}


def test_folders_do_not_import_each_other_in_circles():
    order = graphlib.TopologicalSorter(folder_edges()).static_order()  # CycleError names a circle
    assert {*folder_edges()} <= {*order}


def test_a_folder_is_small_and_says_what_it_is_for():
    for folder in folder_edges():
        files = [path for path in (ROOT / folder).glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= MAX_FILES, sorted(path.name for path in files)
        if folder not in ALLOWED:
            assert ast.get_docstring(tree_of(ROOT / folder / "__init__.py")), folder


def test_imports_are_absolute_and_private_names_stay_in_their_folder():
    for path in PRODUCT:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom):
                where = f"{path}:{node.lineno}"
                assert node.level == 0, f"{where} has a relative import"
                if (node.module or "").startswith("trajpack"):
                    private = [alias.name for alias in node.names if alias.name.startswith("_")]
                    assert not private, f"{where} imports {private}"


def test_functions_stay_within_their_budget():
    for path in PRODUCT:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if ast.get_docstring(node) is not None:
                    lines -= node.body[0].end_lineno - node.body[0].lineno + 1
                is_kernel = any("jit" in ast.unparse(one) for one in node.decorator_list)
                named = f"{path}: {node.name} has {lines} lines"
                assert lines <= MAX_FUNCTION_LINES or is_kernel, named


def test_optional_packages_are_imported_where_they_are_used():
    for path in PRODUCT:
        allowed = {"triton"} if path.name.endswith("_triton.py") else set()
        if path.name == "response_types.py":  # imported where a response is read
            allowed = {"msgspec"}
        for node in tree_of(path).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                for module in imported_modules(node):
                    assert module.split(".")[0] not in OPTIONAL - allowed, f"{path}: {module}"


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
