"""Packages of trainers that tests import from, each installed in a folder without dependencies.

`peers.txt` names them; `make test` puts each into ``peers/<name>`` of the virtual environment.
Their dependencies (engines, kernels, services) are far more than the few modules that define a
format: first modules are skipped, and stand-ins replace what is imported but not called.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

VERSIONS = dict(
    line.split("==") for line in Path(__file__).with_name("peers.txt").read_text().split()
)
"""Version of each package, by its name."""

SKYRL = "skyrl.backends.skyrl_train"
TITAN = "torchtitan.experiments.rl"
WITHOUT_INIT = {
    "areal": "areal areal.utils areal.infra areal.experimental.openai areal.trainer "
    "areal.trainer.ppo",
    "megatron-core": "megatron.core",
    "openrlhf": "openrlhf openrlhf.trainer openrlhf.trainer.ppo_utils openrlhf.utils "
    "openrlhf.models",
    "skyrl": "skyrl skyrl.train skyrl.train.utils skyrl.train.generators skyrl.backends "
    f"{SKYRL} {SKYRL}.utils {SKYRL}.distributed {SKYRL}.distributed.megatron",
    "tinker": "tinker",
    "torchtitan": f"torchtitan.config {TITAN} {TITAN}.observability.metrics",
}
"""Packages whose first module is not run, by peer."""
ABSENT = {
    "areal": "aiofiles aiohttp colorlog einops httpx lark numba openai requests tenacity torchdata "
    "uvloop areal.api.cli_args areal.api.alloc_mode areal.infra.rpc areal.infra.platforms "
    "areal.utils.logging",
    "openrlhf": "vllm ray tqdm deepspeed flash_attn peft torchdata openrlhf.trainer.ray "
    "openrlhf.utils.logging_utils",
    "skyrl": "jaxtyping ray omegaconf loguru torchdata skyrl_gym skyrl.train.config "
    f"skyrl.train.dataset.dataset {SKYRL}.inference_servers {SKYRL}.workers",
    "torchtitan": "renderers",
    "verl": "ray omegaconf hydra codetiming cachetools torchdata uvicorn fastapi",
}
"""Packages that are not installed, and modules of the peer that need these."""
LENT = {
    "torchtitan": {
        "torchtitan.config": [
            ("torchtitan.config.configurable", "Configurable"),
            ("torchtitan.config.configs", "CompileConfig"),
        ],
        f"{TITAN}.observability.metrics": [
            (f"{TITAN}.observability.metrics.types", name) for name in ("Metric", "NoReduce", "Sum")
        ],
    }
}
"""Names that a skipped first module would import from another."""


class Peer:
    """A trainer's package that can be imported from while the test runs."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        for package in WITHOUT_INIT.get(name, "").split():
            self.without_init(package)
        for package, names in LENT.get(name, {}).items():
            for module, lent in names:
                setattr(sys.modules[package], lent, getattr(self.load(module), lent))

    def load(self, module: str) -> ModuleType:
        """Import a module of it without its warnings."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)

    def without_init(self, package: str) -> None:
        """Make modules of a package importable without running the package's first module."""
        if package not in sys.modules:
            bare = ModuleType(package)
            bare.__path__ = [str(self.folder.joinpath(*package.split(".")))]
            sys.modules[package] = bare


def find_peer(name: str, patch: pytest.MonkeyPatch) -> Peer:
    """Put a package at the end of the path, or skip the test if it is not installed."""
    folder = Path(sys.prefix, "peers", name)
    version = VERSIONS[name]
    if not folder.joinpath(f"{name.replace('-', '_')}-{version}.dist-info").is_dir():
        pytest.skip(f"{name} {version} is not in {folder}: `make test` puts it there")
    # at the end: some of these packages bring a top-level `tests`, which ours must not yield to
    patch.setattr(sys, "path", [*sys.path, str(folder)])
    return Peer(name, folder)


class AnyName(type):
    """A class with every attribute, which can be inherited from, subscripted or a decorator."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __call__(cls, *args, **kwargs):
        return args[0] if args else super().__call__()

    def __getitem__(cls, item):
        return cls

    def __or__(cls, other):
        return cls

    __ror__ = __or__


def stand_in(name):
    """Return a class; as a decorator with arguments it returns the decorated object."""
    return AnyName(name, (), {"__call__": lambda self, decorated=None, *rest, **more: decorated})


class StandIn(ModuleType):
    """A module with a class for each name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, stand_in(name))
        return getattr(self, name)


class Finder:
    """Finds every module of the packages it stands in for."""

    def __init__(self, packages):
        self.packages = packages

    def stands_in_for(self, name):
        return any(name == package or name.startswith(f"{package}.") for package in self.packages)

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if self.stands_in_for(name) else None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        pass


@contextmanager
def stand_ins(*packages: str) -> Iterator[None]:
    """Let imports succeed of packages that are not installed, and of modules of those that are."""
    finder = Finder([name for name in packages if "." in name or find_spec(name) is None])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.stands_in_for(name)]:
            if isinstance(sys.modules[name], StandIn):
                del sys.modules[name]
