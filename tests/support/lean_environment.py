"""An environment with the requirements of chosen extras and no other package, without a network."""

import tomllib
import venv
from importlib import metadata
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def required(*extras: str) -> set[str]:
    """Return the packages that trajpack and some of its extras require, in the end."""
    waiting = [(Requirement(f"trajpack[{','.join(extras)}]"), "")]
    found: set[str] = set()
    seen = set()
    while waiting:
        need, of_extra = waiting.pop()
        key = (canonicalize_name(need.name), frozenset(need.extras))
        if key in seen or not (need.marker is None or need.marker.evaluate({"extra": of_extra})):
            continue
        seen.add(key)
        if key[0] == "trajpack":  # as the sources say, not an installation
            texts = [PROJECT["dependencies"]]
            texts += [PROJECT["optional-dependencies"][extra] for extra in need.extras]
            waiting += [(Requirement(text), "") for text in chain(*texts)]
            continue
        found.add(key[0])
        for extra in ("", *need.extras):
            waiting += [(Requirement(text), extra) for text in metadata.requires(need.name) or ()]
    return found


def lean_environment(folder: Path, *extras: str) -> Path:
    """Make a virtual environment whose packages are links to installed ones; return its Python.

    It has what `required` returns, and not trajpack itself.
    """
    venv.EnvBuilder(symlinks=True, with_pip=False).create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in sorted(required(*extras)):
        one = metadata.distribution(name)
        for top in {file.parts[0] for file in one.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(one.locate_file(top))))
    return folder / "bin" / "python"
