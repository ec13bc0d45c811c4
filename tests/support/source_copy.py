"""A copy of this checkout, as another person has it who cloned or unpacked it."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def copy_source(target: Path, *, links: str = "kept") -> Path:
    """Copy the files that git knows or would add; links are ``kept``, ``texts`` or ``lost``.

    As ``texts`` they are what tools write that know no links: files that hold where they lead.
    """
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    ).stdout.split("\0")  # fmt: skip
    if names == [""]:
        pytest.skip("not a git checkout: there is no list of the files to copy")
    for name in filter(None, names):
        source, copy = ROOT / name, target / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not source.is_symlink():
            if source.exists():
                copy.write_bytes(source.read_bytes())
                copy.chmod(source.stat().st_mode)
        elif links == "kept":
            copy.symlink_to(os.readlink(source))
        elif links == "texts":
            copy.write_text(os.readlink(source))
    return target
