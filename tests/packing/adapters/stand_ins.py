"""Stand-ins for packages that a trainer's modules import and that are not here.

Clusters, engines and services are imported at the top of modules of which a test wants one class
or function that needs none of them. A stand-in lets the import pass; nothing of it is ever called
in earnest.
"""

import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


class AnyName(type):
    """A class of which every name exists, to be inherited from, subscripted and decorated with."""

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
    """Return a class for a name; as a decorator with arguments it gives back what it decorates."""
    return AnyName(name, (), {"__call__": lambda self, decorated=None, *rest, **more: decorated})


class StandIn(ModuleType):
    """A module that hands out a class for each name."""

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
def stand_ins(*packages):
    """Let imports pass of packages that are not installed, and of modules of those that are."""
    finder = Finder([name for name in packages if "." in name or find_spec(name) is None])
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if finder.stands_in_for(name)]:
            if isinstance(sys.modules[name], StandIn):
                del sys.modules[name]
