"""The page: its figures, hostile text, what is left out; nothing is loaded and nothing runs."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.packing.report.test_figures import conversations
from tests.support.chromium import needs_chromium, show
from trajpack import GRPO, PackedBatch, Trajectory, Turn, pack, pack_tree, write_report

HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>\u202e\x1b[2J\0"
)


@pytest.fixture(scope="module")
def batch() -> PackedBatch:
    return pack(conversations(40)).with_advantages(GRPO())


def page_of(batch: Any, folder: Path, **options: Any) -> str:
    write_report(batch, folder / "page.html", **options)
    return (folder / "page.html").read_text("utf-8")


def test_the_page_shows_the_numbers_that_lie_beside_it(batch: PackedBatch, tmp_path: Path) -> None:
    page = page_of(batch, tmp_path, capacity=64)
    numbers = json.loads((tmp_path / "page.json").read_text())
    assert not re.search(r"<script|(src|href|onclick)=|url\(|@import|https?://", page)
    assert "default-src 'none'" in page
    assert len(page) < 1_000_000
    bars = re.findall(r'title="micro-batch (\d+): (.*?)"', page)
    assert len(bars) == numbers["plan"]["micro_batches"]
    of_kinds: dict[str, int] = {}
    for _, words in bars:
        for name, count in re.findall(r"([a-z]+) ([\d,]+)", words):
            of_kinds[name] = of_kinds.get(name, 0) + int(count.replace(",", ""))
    assert of_kinds["generated"] == batch.num_generated == numbers["tokens"]["generated"]
    assert of_kinds["tail"] == numbers["plan"]["tail"]
    context = sum(of_kinds.get(kind, 0) for kind in ("prompt", "observation", "shared"))
    assert context == batch.num_tokens - batch.num_generated
    assert page.count("<b style=") == 2 * len(batch.ids)
    assert page.count("<details") == len(batch.ids)
    assert page.count(" in place of ") == 0
    assert page.count("; it left the history") == numbers["breaks"]["reasons"]["left"]
    trajectory = batch.unpack()[3]
    shown = page.split("<details")[4]
    assert f"<summary>{trajectory.id} " in shown
    generated = [turn for turn in trajectory.turns if len(turn.completion_ids)]
    assert shown.count('class="span generated"') == len(generated)
    pieces = re.findall(r'<i class="(?:low|high)" style="[^"]*" title="([^"]*)">(\d+) </i>', shown)
    assert [int(piece) for _, piece in pieces] == [
        n for turn in generated for n in turn.completion_ids
    ]
    assert batch.advantages is not None
    start = next(iter(batch.turn_spans[batch.cu_turns[3]]))
    expected = f"log-probability -0.5, advantage {float(batch.advantages[start]):.4g}"
    assert pieces[0][0] == expected


def test_a_tree_is_shown_as_its_rows(tmp_path: Path) -> None:
    trajectories = conversations(12)
    of_tree = page_of(pack_tree(trajectories), tmp_path)
    assert of_tree == page_of(pack(trajectories), tmp_path)


def test_a_page_must_be_html(batch: PackedBatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"path must end with \.html, got .*page\.txt"):
        write_report(batch, tmp_path / "page.txt")


def test_text_stays_text(tmp_path: Path) -> None:
    turns = [Turn([1, 2], [3, 4], [-0.1, -0.2], 1.0), Turn([1, 9], [3], [-0.1])]
    batch = pack([Trajectory(HOSTILE, turns, group=HOSTILE)])
    page = page_of(batch, tmp_path, decode=lambda ids: HOSTILE * len(ids), title=HOSTILE)
    assert not re.search(r"<(script|img)|<title>taken", page)
    assert not {"\x1b", "\0", "\u202e"} & set(page)
    text = unescape(page.split("<details")[1])
    shown = HOSTILE.replace("\u202e", "\\u202e").replace("\x1b", "\\x1b").replace("\0", "\\x00")
    assert text.count(shown) > 4


def test_a_character_of_several_tokens_is_one_piece(tmp_path: Path) -> None:
    text = "a漢é".encode()
    batch = pack([Trajectory("a", [Turn([1], list(text), [-0.5] * len(text))])])
    page = page_of(batch, tmp_path, decode=lambda ids: bytes(ids).decode(errors="replace"))
    assert re.findall(r'class="(?:low|high)"[^>]*>(.)</i>', page) == ["a", "漢", "é"]


def test_advantages_that_are_not_finite_are_said_to_be(tmp_path: Path) -> None:
    batch = pack([Trajectory(name, [Turn([1], [2], [-0.5], 1.0)], group="g") for name in "abc"])
    advantages = torch.tensor([0.0, math.nan, 0.0, math.inf, 0.0, 0.5])
    page = page_of(dataclasses.replace(batch, advantages=advantages), tmp_path)
    numbers = json.loads((tmp_path / "page.json").read_text())
    shown_as = ["not finite", "not finite", 0.5]
    assert [row["advantage"] for row in numbers["trajectories"]["rows"]] == shown_as
    assert numbers["groups"]["shown"][0]["advantages"] == shown_as
    assert page.count("mean advantage not finite") == 2
    assert re.findall(r"--share:(\w+)%", page) == ["0", "0", "55"]


def test_a_large_batch_says_what_is_left_out(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    turns = [Turn([1, i % 7], draw.integers(0, 9, 20), [-0.5] * 20, i % 3) for i in range(1500)]
    long = Turn([5] * 3000, [6] * 1200, [-0.5] * 1200)
    batch = pack([Trajectory(f"t{i}", [turn]) for i, turn in enumerate([long, *turns])])
    page = page_of(batch, tmp_path, decode=lambda ids: "long text " * len(ids))
    assert len(page) < 1_200_000
    assert "501 more left out." in page
    assert "1,461 more groups left out." in page
    assert "2,000 tokens left out" in page
    assert "200 tokens left out" in page
    assert 0 < page.count("The text was left out.") < 1000


def test_an_empty_batch_has_a_page(tmp_path: Path) -> None:
    assert "0 in layout merged" in page_of(pack([]), tmp_path)


@needs_chromium
@pytest.mark.parametrize("width", [1280, 420])
def test_a_browser_has_nothing_to_say(batch: PackedBatch, tmp_path: Path, width: int) -> None:
    page_of(batch, tmp_path)
    shown = show(tmp_path / "page.html", tmp_path, width=width)
    assert not shown.console
    assert shown.overflow <= 0
