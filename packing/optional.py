"""Optional packages: whether they are there, and what to install where they are not."""

from __future__ import annotations

import sys
from importlib.util import find_spec

BROUGHT_BY = {
    "areal": "areal",
    "aiohttp": "trajpack[servers]",
    "anyio": "trajpack[runner]",
    "huggingface_hub": "trajpack[agent]",
    "hypothesis": "hypothesis",
    "jinja2": "trajpack[agent]",
    "math_verify": "trajpack[agent]",
    "megatron": "megatron-core",
    "msgspec": "trajpack[servers]",
    "openrlhf": "openrlhf",
    "opentelemetry": "trajpack[metrics]",
    "prometheus_client": "trajpack[metrics]",
    "ray": "trajpack[ray]",
    "reasoning_gym": "trajpack[reasoning-gym]",
    "rich": "trajpack[cli]",
    "skyrl": "skyrl",
    "stamina": "trajpack[servers]",
    "tensordict": "tensordict",
    "tinker": "tinker",
    "tokenizers": "trajpack[agent]",
    "torchtitan": "torchtitan",
    "transformers": "trajpack[agent]",
    "triton": "trajpack[triton]",
    "trl": "trl",
    "typer": "trajpack[cli]",
    "verl": "verl",
}
"""For each module that not every installation has, what to install."""


def is_installed(module: str) -> bool:
    """Return whether a module can be imported, without importing it.

    Example:
        >>> is_installed("torch"), is_installed("no_such_module")
        (True, False)
    """
    if module in sys.modules:
        return sys.modules[module] is not None
    return find_spec(module) is not None


def require(*modules: str) -> None:
    """Raise unless these optional modules can be imported; none of them is.

    Raises:
        ModuleNotFoundError: With the name of the first that is missing and what to install.

    Example:
        >>> require("torch")
    """
    for module in modules:
        if not is_installed(module):
            raise explained(ModuleNotFoundError(f"No module named {module!r}", name=module))


def explained(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error of an import, with what to install if that is known and not yet in it.

    Example:
        >>> explained(ModuleNotFoundError("No module named 'ray.data'", name="ray.data"))
        ModuleNotFoundError("No module named 'ray.data': install trajpack[ray]")
    """
    package = BROUGHT_BY.get((error.name or "").partition(".")[0])
    if package is None or f"install {package}" in str(error):
        return error
    return ModuleNotFoundError(f"{error}: install {package}", name=error.name)
