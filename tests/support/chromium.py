"""A page in headless Chromium: its elements after its scripts ran, and what its console said."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (package chromium)")
_SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
)
_AFTERWARDS = """<script>
document.documentElement.dataset.wide = document.documentElement.scrollWidth - innerWidth;
</script>"""


class Shown(NamedTuple):
    dom: str
    console: list[str]
    overflow: int
    """Pixels that the page is wider than the window."""


def show(page: Path, folder: Path, *, width: int = 1280) -> Shown:
    """Load a page, and run a script that measures it: the page's own policy lets none run."""
    measured = folder / "measured.html"
    text = page.read_text("utf-8").replace("default-src 'none';", "")
    measured.write_text(text.replace("</body>", f"{_AFTERWARDS}</body>"), "utf-8")
    command = [str(CHROMIUM), *_SWITCHES, f"--user-data-dir={folder / 'profile'}"]
    command += [f"--window-size={width},900", "--dump-dom", measured.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    overflow = done.stdout.split('data-wide="')[1].split('"')[0]
    return Shown(done.stdout, console, int(overflow))
