"""`take.c` as it is now, compiled for a session of tests."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).parents[2] / "packing" / "buffer" / "take.c"


def compiler_or_skip() -> list[str]:
    """Return the command of the C compiler; skip where it or Python's headers are missing."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if shutil.which(compiler[0]) is None or not header.is_file():
        pytest.skip(f"there is no C compiler {compiler[0]!r}, or no {header}")
    return compiler


def compiled_take(folder: Path) -> Any:
    """Return the module; ``TAKE_CFLAGS`` has further options of the compiler."""
    compiler = compiler_or_skip()
    library = folder / "take_c.abi3.so"
    options = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter"]
    options += ["-Wno-missing-field-initializers", *shlex.split(os.environ.get("TAKE_CFLAGS", ""))]
    include = f"-I{sysconfig.get_paths()['include']}"
    command = [*compiler, *options, "-shared", "-fPIC", include, str(SOURCE), "-o", str(library)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    loader = importlib.machinery.ExtensionFileLoader("take_c", str(library))
    spec = importlib.util.spec_from_file_location("take_c", library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
