"""Refuses to build from a copy of the source that has lost its symbolic links."""

from pathlib import Path

from setuptools import setup

LAYERS = ("kernels", "packing", "agent")

lost = [f"src/trajpack/{name}" for name in LAYERS if not Path("src/trajpack", name).is_dir()]
if lost:
    raise SystemExit(
        f"trajpack cannot be built: {', '.join(lost)} should be symbolic links to the folders "
        f"{', '.join(LAYERS)}, and this copy of the source has lost them; clone it with git (on "
        "Windows after `git config --global core.symlinks true`), or unpack it with tar"
    )

setup()
