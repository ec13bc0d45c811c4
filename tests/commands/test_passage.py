"""What a small rollout passes through: few enough functions that a reader can follow it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest

from tests.commands.command import call

SMALL = ["--num-prompts", 1, "--group-size", 2, "--turns", 2, "--max-new-tokens", 4]
ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("warm_judge")
def test_a_rollout_passes_at_most_60_files_and_300_functions(tmp_path: Path) -> None:
    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            codes.add(frame.f_code)

    codes = set()
    assert call("rollout", *SMALL, "--out", tmp_path / "warm.safetensors").status == 0
    sys.setprofile(profile)
    try:
        assert call("rollout", *SMALL, "--out", tmp_path / "batch.safetensors").status == 0
    finally:
        sys.setprofile(None)
    passed = {
        (file, code.co_qualname)
        for code in codes
        if not code.co_name.startswith("<")  # neither modules nor comprehensions
        and (file := Path(code.co_filename).resolve()).is_relative_to(ROOT)
        and file.relative_to(ROOT).parts[0] in ("agent", "kernels", "packing", "src")
    }
    assert "Conversation.ask" in {name for _, name in passed}
    assert len({file for file, _ in passed}) <= 60
    assert len(passed) <= 300, sorted(passed)
