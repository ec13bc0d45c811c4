"""Documents: links and paths exist, the picture is current, the front pages stay short."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def test_every_relative_link_leads_to_a_file():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page}: {target}"


def test_every_path_in_the_contribution_guide_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:kernels|packing|agent|tests|docs|benchmarks)/[\w./]*)`", text)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(("page", "most"), [("README.md", 150), ("CONTRIBUTING.md", 70)])
def test_a_front_page_is_short(page, most):
    assert len((ROOT / page).read_text().splitlines()) <= most


def test_the_picture_shows_what_pack_returns():
    script = ROOT / "docs" / "pictures" / "three_turns.py"
    drawn = runpy.run_path(str(script))["picture"]()
    assert drawn == script.with_suffix(".svg").read_text()
