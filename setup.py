"""Describes the package by the README, compiles `take.c`, refuses a source without its links."""

import re
import sysconfig
import tomllib
from pathlib import Path

from setuptools import Extension, setup

LAYERS = ("kernels", "packing", "agent")

lost = [f"src/trajpack/{name}" for name in LAYERS if not Path("src/trajpack", name).is_dir()]
if lost:
    raise SystemExit(
        f"trajpack cannot be built: {', '.join(lost)} should be symbolic links to the folders "
        f"{', '.join(LAYERS)}, and this copy of the source has lost them; clone it with git (on "
        "Windows after `git config --global core.symlinks true`), or unpack it with tar"
    )

# a package index resolves no relative links
source = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"]["Source"]
readme = Path("README.md").read_text(encoding="utf-8")
for link, view in ((r"(!\[[^]]*\]\()", "raw"), (r"((?<!!)\[[^]]*\]\()", "blob")):
    readme = re.sub(rf"{link}(?!https?:|#)", rf"\1{source}/{view}/main/", readme)

# one wheel for 3.11 and later; without a compiler the package is complete too
take = Extension(
    "trajpack.packing.buffer.take_c",
    ["src/trajpack/packing/buffer/take.c"],
    extra_compile_args=["-O3"],
    py_limited_api=True,
    optional=True,
)
is_stable = not sysconfig.get_config_var("Py_GIL_DISABLED")  # such a Python has no stable ABI
setup(
    long_description=readme,
    long_description_content_type="text/markdown",
    ext_modules=[take] if is_stable else [],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if is_stable else {},
)
