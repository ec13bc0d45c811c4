"""The reference of the site: every public name, by the folder that defines it."""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any, ClassVar

import sphinx.application
from docutils import nodes
from docutils.statemachine import StringList
from names import PUBLIC_MODULES, exports, value_of
from sphinx.environment import BuildEnvironment
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import nested_parse_with_titles


class Exports(SphinxDirective):
    """Documents the public names of a layer: ``.. exports:: trajpack.packing``.

    ``also`` names classes that are not exported and that documented classes or docstrings name.
    """

    required_arguments = 1
    option_spec: ClassVar[dict[str, Any]] = {"also": str.split}

    def run(self) -> list[nodes.Node]:
        """Return a section for each folder: its docstring and its names."""
        (layer,) = self.arguments
        public = PUBLIC_MODULES[layer]
        homes = {
            home: [f"{public}.{name}" for name in names] for home, names in exports(layer).items()
        }
        for path in self.options.get("also", []):
            homes.setdefault(path.rpartition(".")[0].rpartition(".")[0], []).append(path)
        lines = [f".. py:module:: {public}", ""]
        for home, paths in sorted(homes.items()):
            title = home.rpartition(".")[2].replace("_", " ").capitalize()
            about = re.sub("`+", "``", inspect.getdoc(import_module(home)) or "")
            lines += [title, "-" * len(title), "", *about.splitlines(), ""]
            for path in paths:
                value = value_of(path)
                kind = "class" if inspect.isclass(value) else "function"
                kind = kind if callable(value) else "data"
                lines += [f".. auto{kind}:: {path}", ""]
        section = nodes.section()
        section.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, source=layer), section)
        return section.children


def documented(env: BuildEnvironment, target: str) -> str | None:
    """Return the name under which the reference has what a docstring calls ``target``."""
    known = env.domains.python_domain.objects
    for module in ("", "trajpack.", "trajpack.kernels.", "trajpack.agent."):
        if f"{module}{target}" in known:
            return f"{module}{target}"
    ends = [name for name in known if name.endswith(f".{target}")]
    if len(ends) == 1 or (ends and target[0].isupper()):
        return min(ends, key=len)
    if not target.startswith("trajpack."):
        return None
    owner, value, attributes = target, value_of(target), ""
    while value is not None and owner:
        for name in known:
            if name.rpartition(".")[2] == owner.rpartition(".")[2] and value_of(name) is value:
                return f"{name}{attributes}" if f"{name}{attributes}" in known else name
        owner, _, last = owner.rpartition(".")
        value, attributes = value_of(owner), f".{last}{attributes}"
    return None


def resolve(app: Any, env: BuildEnvironment, node: Any, content: nodes.Element) -> Any:
    """Resolve references by short names and by the modules that define what they name."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    full = documented(env, target)
    owner = value_of(f"{node.get('py:module')}.{node.get('py:class')}")
    for base in owner.__mro__ if inspect.isclass(owner) else ():
        full = full or documented(env, f"{base.__module__}.{base.__qualname__}.{target}")
        if full is None and target in {*dir(base), *getattr(base, "__annotations__", {})}:
            return content  # an attribute that has no entry of its own
    if full is None:
        return None
    domain = env.domains.python_domain
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", full, node, content)


def sections(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Give ``Reference: ...`` a line of its own, as napoleon wants it."""
    text = "\n".join(lines)
    text = re.sub(
        r"^(Reference): (.+(?:\n +.+)*)",
        lambda found: f"{found[1]}:\n    " + re.sub(r"\n +", "\n    ", found[2]),
        text,
        flags=re.MULTILINE,
    )
    lines[:] = text.splitlines()


def skip(app: Any, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Leave out constants, and leave fields to the section Attributes of their class."""
    is_constant = what == "module" and not callable(obj)
    is_default = what == "class" and "." not in getattr(obj, "__qualname__", ".")
    is_default = is_default and obj.__name__ != name  # else a function that is a method, too
    return True if is_constant or is_default or type(obj).__name__ == "_tuplegetter" else None


def setup(app: sphinx.application.Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("exports", Exports)
    app.connect("autodoc-skip-member", skip)
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-docstring", sections, priority=100)
    return {"parallel_read_safe": True}
