"""The page in a browser: its figures, hostile text, narrow windows; nothing is fetched."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.packing.report.test_figures import conversations
from tests.support.chromium import needs_chromium, show
from trajpack import GRPO, PackedBatch, Trajectory, Turn, pack, plan_micro_batches, write_report

HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>\u202e\x1b[2J\0"
)


@pytest.fixture(scope="module")
def batch() -> PackedBatch:
    return pack(conversations(40)).with_advantages(GRPO())


@pytest.fixture(scope="module")
def page(batch: PackedBatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "page.html"
    write_report(batch, path, capacity=64)
    return path


def test_the_numbers_lie_beside_the_page(batch: PackedBatch, page: Path) -> None:
    numbers = json.loads(page.with_suffix(".json").read_text())
    assert numbers["tokens"]["packed"] == batch.num_tokens
    assert not any("sequences" in row for row in numbers["trajectories"]["rows"])
    text = page.read_text("utf-8")
    assert not re.search(r"(src|href)=|url\(|@import|https?://(?!www\.w3\.org)", text)
    assert len(text) < 1_000_000


def test_a_page_must_be_html(batch: PackedBatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path must end with \.html, got .*page\.txt"):
        write_report(batch, tmp_path / "page.txt")


@needs_chromium
@pytest.mark.parametrize("width", [1280, 420])
def test_the_pictures_show_the_batch(
    batch: PackedBatch, page: Path, tmp_path: Path, width: int
) -> None:
    shown = show(page, tmp_path, width=width, fragment="trajectory=3")
    assert not shown.console
    assert shown.overflow <= 0
    plan = plan_micro_batches(batch.seqlens, 64)
    assert f"{len(plan)} micro-batches of up to 64 tokens" in shown.dom
    bars = re.findall(r"<title>micro-batch (\d+): (.*?)</title>", shown.dom)
    assert len(bars) == len(plan)
    of_kinds: dict[str, int] = {}
    for _, words in bars:
        for name, count in re.findall(r"([a-z]+) ([\d,]+)", words):
            of_kinds[name] = of_kinds.get(name, 0) + int(count.replace(",", ""))
    assert of_kinds["generated"] == batch.num_generated
    assert of_kinds["tail"] == plan.statistics().padding_tail
    context = sum(of_kinds.get(kind, 0) for kind in ("prompt", "observation", "shared"))
    assert context == batch.num_tokens - batch.num_generated
    assert shown.dom.count("<circle") >= 2 * len(batch.ids)
    trajectory = batch.unpack()[3]
    viewer = shown.dom.split('id="viewer"')[1]
    assert f"<h2>{trajectory.id}</h2>" in viewer
    spans = re.findall(r'data-kind="(\w+)"', viewer)
    assert spans.count("generated") == sum(
        len(turn.completion_ids) > 0 for turn in trajectory.turns
    )


@needs_chromium
def test_text_stays_text(tmp_path: Path) -> None:
    turns = [Turn([1, 2], [3, 4], [-0.1, -0.2], 1.0), Turn([1, 9], [3], [-0.1])]
    batch = pack([Trajectory(HOSTILE, turns, group=HOSTILE)])
    path = tmp_path / "page.html"
    write_report(batch, path, decode=lambda ids: HOSTILE * len(ids), title=HOSTILE)
    shown = show(path, tmp_path)
    assert not shown.console
    assert "<title>taken" not in shown.dom
    assert "<img" not in shown.dom.replace("&lt;img", "")
    assert shown.dom.count("<script") == 3  # figures, drawing, and the test's own
    viewer = shown.dom.split('id="viewer"')[1].split("<script")[0]
    assert "&lt;/script&gt;&lt;script&gt;document.title" in viewer
    assert "\\u202e" in viewer
    assert "\u202e" not in viewer
    assert not {"\x1b", "\0"} & set(shown.dom)


@needs_chromium
def test_advantages_that_are_not_finite_are_said_to_be(tmp_path: Path) -> None:
    """Rows have one length: nothing was saved but what a tree would save."""
    batch = pack([Trajectory(name, [Turn([1], [2], [-0.5], 1.0)], group="g") for name in "abc"])
    advantages = torch.tensor([0.0, math.nan, 0.0, math.inf, 0.0, 0.5])
    path = tmp_path / "page.html"
    numbers = write_report(dataclasses.replace(batch, advantages=advantages), path)
    shown_as = ["not finite", "not finite", 0.5]
    assert [row["advantage"] for row in numbers["trajectories"]["rows"]] == shown_as
    assert numbers["groups"]["shown"][0]["advantages"] == shown_as
    shown = show(path, tmp_path)
    assert not shown.console
    assert "mean advantage not finite" in shown.dom
    assert re.search(r'id="lead">6 tokens\.<', shown.dom)


@pytest.mark.slow
@needs_chromium
def test_a_large_batch_says_what_is_left_out(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    batch = pack(
        [
            Trajectory(f"t{i}", [Turn([1, i % 7], draw.integers(0, 9, 20), [-0.5] * 20, i % 3)])
            for i in range(4000)
        ]
    )
    path = tmp_path / "page.html"
    numbers = write_report(batch, path, decode=lambda ids: "long text " * len(ids))
    assert path.stat().st_size < 1_000_000
    shown = show(path, tmp_path)
    assert not shown.console
    assert numbers["trajectories"]["left_out"] >= 3000
    assert f"{numbers['trajectories']['left_out']:,} more trajectories left out." in shown.dom
    assert "more groups left out" in shown.dom


@needs_chromium
def test_an_empty_batch_has_a_page(tmp_path: Path) -> None:
    write_report(pack([]), tmp_path / "page.html")
    assert not show(tmp_path / "page.html", tmp_path).console
