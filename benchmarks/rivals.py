"""Packages that may be installed beside: imported quietly, and reported where they are missing."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.contest import Contender


def find(name: str) -> tuple[ModuleType | None, str]:
    """Import a module; return it, or None and why not."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name), ""
    except ModuleNotFoundError as error:
        return None, f"not installed ({error.name})"
    except (ImportError, OSError, RuntimeError) as error:
        return None, f"does not load here: {str(error).strip().splitlines()[0][:60]}"
    finally:
        logging.disable(before)


def find_file(package: str, file: str) -> tuple[ModuleType | None, str]:
    """Run one file of a package of `peers.txt`, without the package's dependencies.

    Such a package is in a folder of the virtual environment, which `make test` fills, or in one
    that Python looks into.
    """
    folders = (Path(sys.prefix, "peers", package), *map(Path, sys.path))
    path = next((one / file for one in folders if (one / file).exists()), Path(file))
    spec = importlib.util.spec_from_file_location(f"{package}_{path.stem}", path)
    if spec is None or spec.loader is None or not path.exists():
        return None, f"not installed ({package})"
    module = importlib.util.module_from_spec(spec)
    quietly(spec.loader.exec_module)(module)
    return module, ""


def peer_module(package: str, module: str) -> tuple[ModuleType | None, str]:
    """Return a module of a package of `peers.txt`, with stand-ins for what it does not call."""
    from tests.packing.adapters.peers import ABSENT, Peer, stand_ins

    folder = Path(sys.prefix, "peers", package)
    if not folder.is_dir():
        return None, f"not installed ({package})"
    absent, log = set(ABSENT[package].split()), f"{package}.utils.logging"
    stands = absent - {log} | {"orjson"}
    sys.path.append(str(folder))
    try:
        with stand_ins(*stands):
            peer = Peer(package, folder)
            if log in absent:
                sys.modules[log] = logging
            return peer.load(module), ""
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]


def contender(module: str, name: str, make: Any, wrote: str, **rest: Any) -> Contender:
    """Return the contender that ``make(module)`` does the work of, or one marked as missing."""
    found, why = find(module)
    if found is None:
        return Contender(name, None, wrote, missing=why)
    try:
        return Contender(name, quietly(quietly(make)(found)), wrote, **rest)
    except Exception as error:  # noqa: BLE001 - a rival that cannot even be made stops no other
        said = str(error).strip().splitlines() or [type(error).__name__]
        return Contender(name, None, wrote, missing=f"failed: {said[0][:60]}")


def quietly(work: Callable[..., Any]) -> Callable[..., Any]:
    """Return the work without its warnings, which are no business of a benchmark."""

    def quiet(*given: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return work(*given)

    return quiet
