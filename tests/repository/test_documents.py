"""Documents: links and paths exist, the picture is current, the front pages stay short."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def test_every_relative_link_leads_to_a_file():
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert "://" in target or (page.parent / target).exists(), f"{page}: {target}"


def test_every_path_in_the_contribution_guide_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:kernels|packing|agent|tests|docs|benchmarks)/[\w./]*)`", text)
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(("page", "most"), [("README.md", 150), ("CONTRIBUTING.md", 70)])
def test_a_front_page_is_short(page, most):
    assert len((ROOT / page).read_text().splitlines()) <= most


@pytest.mark.parametrize("name", ["three_turns", "step"])
def test_pictures_show_what_pack_returns_and_what_was_measured(name):
    script = ROOT / "docs" / "pictures" / f"{name}.py"
    drawn = runpy.run_path(str(script))["picture"]()
    assert drawn == script.with_suffix(".svg").read_text()


MOST_LINES = {
    "Train on chats with tool calls": 36,
    "Bring rollouts of another trainer": 34,
    "Write an environment and an agent": 49,
    "Write an estimator": 16,
    "Drop old tokens": 58,
    "Carry routed experts and a teacher": 31,
    "Write an engine": 47,
    "Replace padded tensors": 43,
    "See what was packed": 21,
}
"""Lines of code that each job took a newcomer."""


def test_each_job_is_one_short_block():
    parts = re.split(r"^## ", (ROOT / "docs" / "jobs.md").read_text(), flags=re.MULTILINE)[1:]
    assert [part.splitlines()[0] for part in parts] == [*MOST_LINES]
    for part, most in zip(parts, MOST_LINES.values(), strict=True):
        (block,) = re.findall(r"```python\n(.*?)```", part, re.DOTALL)
        assert sum(bool(line.strip()) for line in block.splitlines()) <= most, part[:40]
