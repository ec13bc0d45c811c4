"""Packages of trainers that tests go through: each in a folder of its own, without what it needs.

`peers.txt` names them; `make test` puts each into ``peers/<name>`` of the virtual environment. They
are not installed beside the library since what they need as a whole (engines, kernels, services)
is far more than the few modules that say what a format is. Nor does the Python matter that a
package asks for as a whole: SkyRL 0.4 asks for 3.12, and the modules imported here run in 3.11.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

VERSIONS = dict(
    line.split("==") for line in Path(__file__).with_name("peers.txt").read_text().split()
)
"""Version of each package, by its name."""


class Peer:
    """A trainer's package that can be imported from while the test runs."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder

    def load(self, module: str) -> ModuleType:
        """Import a module of it; warnings are the package's own affair.

        A package whose ``__init__`` needs more than there is here: see `without_init`.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)

    def without_init(self, package: str) -> None:
        """Make modules of a package importable without running the package's own first module."""
        if package not in sys.modules:
            bare = ModuleType(package)
            bare.__path__ = [str(self.folder.joinpath(*package.split(".")))]
            sys.modules[package] = bare


def find_peer(name: str, patch: pytest.MonkeyPatch) -> Peer:
    """Put a package at the end of the path, or skip the test where it is not there."""
    folder = Path(sys.prefix, "peers", name)
    version = VERSIONS[name]
    stem = name.replace("-", "_")
    if not folder.joinpath(f"{stem}-{version}.dist-info").is_dir():
        pytest.skip(f"{name} {version} is not in {folder}: `make test` puts it there")
    # at the end: some of these packages bring a top-level `tests`, which ours must not yield to
    patch.setattr(sys, "path", [*sys.path, str(folder)])
    return Peer(name, folder)
