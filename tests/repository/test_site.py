"""The site: what the build with Sphinx (`make docs`) cannot see, and what must hold without it."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import trajpack
from trajpack import agent, kernels

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES = runpy.run_path(str(DOCS / "site" / "names.py"))
PAGES = {path.stem: path.read_text() for path in (DOCS / "api").glob("*.rst")}


def directives(name: str) -> list[str]:
    """Return the arguments of a directive on the pages of the reference."""
    return [
        found
        for text in PAGES.values()
        for found in re.findall(rf"^\.\. {name}:: (\S+)$", text, re.MULTILINE)
    ]


def test_the_reference_has_every_public_name() -> None:
    layers = directives("exports")
    shown = {
        f"{NAMES['PUBLIC_MODULES'][layer]}.{name}"
        for layer in layers
        for names in NAMES["exports"](layer).values()
        for name in names
    }
    shown |= {*directives("automodule")}
    assert len(layers) == len({*layers})
    for module in (trajpack, kernels, agent):
        for name in module.__all__:
            value = getattr(module, name)
            if isinstance(value, ModuleType):
                assert value.__name__ in shown | {*layers}, name
            else:
                assert {f"{module.__name__}.{name}", f"trajpack.kernels.{name}"} & shown, name


def test_the_reference_has_every_format() -> None:
    there = {path.stem for path in (ROOT / "packing" / "adapters").glob("[!_]*.py")}
    shown = {name.rpartition(".")[2] for name in directives("automodule") if ".adapters." in name}
    public = {name for name in there if documents_something(f"trajpack.packing.adapters.{name}")}
    assert shown == public


def documents_something(module: str) -> bool:
    """Return whether a module has functions for users: the guide to formats names them."""
    return f"formats/{module.rpartition('.')[2]}.md" in (DOCS / "formats.md").read_text()


def test_other_names_of_the_reference_are_those_that_layers_do_not_export() -> None:
    for text in PAGES.values():
        for also in re.findall(r":also:((?:\s+trajpack\.[\w.]+)+)", text):
            for path in also.split():
                value, name = NAMES["value_of"](path), path.rpartition(".")[2]
                assert value is not None, path
                assert value.__module__ in (path.removesuffix(f".{name}"), "typing"), path
                assert all(name not in one.__all__ for one in (trajpack, kernels, agent))


def test_every_page_is_in_a_table_of_contents() -> None:
    pages = [*DOCS.rglob("*.md"), *DOCS.rglob("*.rst")]
    listed = {DOCS / "index.md"}
    for page in pages:
        for entries in re.findall(r"^```\{toctree\}\n(.*?)^```", page.read_text(), re.S | re.M):
            for entry in re.findall(r"^[\w./*]+$", entries, re.MULTILINE):
                listed |= {*page.parent.glob(f"{entry}.md"), *page.parent.glob(f"{entry}.rst")}
    assert {*pages} - listed == set()


def test_every_sketch_defines_the_names_that_it_uses(tmp_path: Path) -> None:
    """Check blocks that are not run, since they need what no test has; ray.md quotes an example."""
    sketches = tmp_path / "sketches"
    sketches.mkdir()
    for page in {*DOCS.rglob("*.md")} - {DOCS / "ray.md"}:
        for number, text in enumerate(
            re.findall(r"^```py\n(.*?)^```", page.read_text(), re.S | re.M)
        ):
            (sketches / f"{page.stem}_{number}.py").write_text(text)
    assert len([*sketches.iterdir()]) > 10
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", sketches]
    done = subprocess.run(ruff, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_index_links_to_every_guide() -> None:
    """A code host shows the links of the index, not its tables of contents."""
    links = {*re.findall(r"\]\(([\w./]+)\)", (DOCS / "index.md").read_text())}
    pages = {page.name for page in DOCS.glob("*.md")} - {"index.md"}
    assert pages <= links
    assert {f"api/{name}.rst" for name in PAGES} <= links


NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_its_cells_return(path: Path) -> None:
    names: dict[str, Any] = {}
    shown = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        *statements, last = ast.parse("".join(cell["source"])).body
        exec(compile(ast.Module(statements, []), str(path), "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), str(path), "eval"), names)
        else:
            exec(compile(ast.Module([last], []), str(path), "exec"), names)
            value = None
        expected = ["".join(one["data"]["text/plain"]) for one in cell["outputs"]]
        assert expected == ([] if value is None else [repr(value)])
        shown += expected
    assert len(shown) > 4


def test_a_block_is_pasted_with_what_it_needs_and_no_more() -> None:
    blocks = runpy.run_path(str(DOCS / "site" / "blocks.py"))["blocks"]
    texts = ["import math\nx = []\ny = 1\n", "x.append(y)\n", "z = 5\n", ">>> len(x) + math.pi\n"]
    setups = [block.setup for block in blocks(texts)]
    assert setups[:3] == ["", "x = []\ny = 1\n", ""]
    assert setups[3] == "import math\nx = []\ny = 1\nx.append(y)\n"
