"""Turns of LLM agents, packed into training batches on the device."""

import sys as _sys
from functools import cache as _cache
from importlib import import_module as _import_module
from types import ModuleType as _ModuleType

try:
    import trajpack.agent
    import trajpack.kernels
    import trajpack.packing
except ModuleNotFoundError as _error:
    if _error.name not in ("trajpack.agent", "trajpack.kernels", "trajpack.packing"):
        raise
    raise ImportError(
        f"{_error.name} is not there: this copy of the source has lost the symbolic links "
        "src/trajpack/kernels, src/trajpack/packing and src/trajpack/agent to the folders "
        "kernels, packing and agent; clone it with git (on Windows after `git config --global "
        "core.symlinks true`), or unpack it with tar"
    ) from None

__version__ = "0.1.0"


@_cache
def _exports(module: _ModuleType) -> dict[str, str]:
    """Return for each name that the stub of ``module`` imports the module that it comes from."""
    import ast
    from pathlib import Path

    stub = Path(next(iter(module.__path__)), "__init__.pyi").read_text(encoding="utf-8")
    names: dict[str, str] = {}
    for node in ast.parse(stub).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.names[0].name == "*":
                names |= _exports(_sys.modules[node.module])
            else:
                names |= {alias.name: node.module for alias in node.names}
    return names


def _load_lazily(module: _ModuleType) -> None:
    """Import the names of a module's stub, their only list, when they are first used.

    ``dir()`` leaves out the modules that happen to be imported.
    """

    def get(name: str) -> object:
        if name == "__all__":
            return sorted(_exports(module))
        if name.startswith("_") or name not in _exports(module):
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        origin = _exports(module)[name]
        if origin == module.__name__:
            return _import_module(f"{origin}.{name}")  # a folder of modules, such as adapters
        value = getattr(_import_module(origin), name)
        setattr(module, name, value)
        return value

    def names() -> list[str]:
        of_python = [name for name in module.__dict__ if name.startswith("__")]
        return sorted({"__all__", *of_python, *_exports(module)})

    module.__dict__.update(__getattr__=get, __dir__=names)


trajpack.kernels.__doc__ = "Operators over packed tensors and their boundaries, on any device."
trajpack.packing.__doc__ = "Turns, layouts, batches, plans, advantages and trainers' formats."
trajpack.agent.__doc__ = "Conversations, engines and environments: rollouts that make trajectories."
for _module in (trajpack.kernels, trajpack.packing, trajpack.agent, _sys.modules[__name__]):
    _load_lazily(_module)
