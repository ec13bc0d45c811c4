"""Writes the kernels in the layout that the package `kernels` of Hugging Face loads.

    python .ci/hub_kernels.py FOLDER

`FOLDER/build/torch-<backend>` is the same Python package for each backend. Its modules import each
other by relative names, and its ops have a torch library of their own, so that it can be loaded
beside trajpack.
"""

import ast
import hashlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BACKENDS = ("cpu", "cuda", "rocm")
CARD = """---
license: apache-2.0
tags: [kernels]
---

Operators of [trajpack]({source}) {version} over packed tensors and their boundaries.

```python
from pathlib import Path
from kernels import get_local_kernel

ops = get_local_kernel(Path("path/to/this/folder"))
```
"""


def relative(text: str, depth: int) -> str:
    """Return a module's text with relative imports; ``depth`` is its number of folders."""
    dots = "." * (depth + 1)
    return re.sub(r"^( *)from trajpack\.kernels\.", rf"\1from {dots}", text, flags=re.MULTILINE)


def modules(library: str) -> dict[str, str]:
    """Return the texts of the package's modules by their paths."""
    found = {"__init__.py": relative((ROOT / "kernels" / "__init__.pyi").read_text(), 0)}
    for path in sorted((ROOT / "kernels").rglob("*.py")):
        place = path.relative_to(ROOT / "kernels")
        text = relative(path.read_text(), len(place.parts) - 1)
        text = text.replace("torch.ops.trajpack.", f"torch.ops.{library}.")
        text = text.replace('f"trajpack::{', f'f"{library}::{{')
        text = text.replace('Library("trajpack"', f'Library("{library}"')
        found[str(place)] = text
    for place, text in found.items():
        for node in ast.walk(ast.parse(text)):
            named = [node.module] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any((name or "").startswith("trajpack") for name in named):
                raise SystemExit(f"{place}, line {node.lineno}: imports {named[0]}")
    return found


def write(folder: Path) -> None:
    """Write the layout into a folder that does not exist."""
    sources = "".join(modules("trajpack").values())
    name = f"_trajpack_kernels_{hashlib.sha256(sources.encode()).hexdigest()[:7]}"
    version = re.search(r'__version__ = "(.*)"', (ROOT / "src/trajpack/__init__.py").read_text())[1]
    source = re.search(r'^Source = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    for backend in BACKENDS:
        variant = folder / "build" / f"torch-{backend}"
        for place, text in modules(name).items():
            (variant / place).parent.mkdir(parents=True, exist_ok=True)
            (variant / place).write_text(text)
        about = {
            "name": "trajpack-kernels", "id": name, "version": int(version.split(".")[0]),
            "license": "Apache-2.0", "python-depends": [], "backend": {"type": backend},
        }  # fmt: skip
        (variant / "metadata.json").write_text(json.dumps(about, indent=2) + "\n")
    (folder / "README.md").write_text(CARD.format(version=version, source=source))
    (folder / "LICENSE").write_bytes((ROOT / "LICENSE").read_bytes())


if __name__ == "__main__":
    write(Path(sys.argv[1]))
