"""The guide to the cluster quotes its example, word for word."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_lines_of_the_guide_are_those_of_the_example():
    quoted = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "ray.md").read_text(), re.DOTALL)
    example = (ROOT / "examples" / "ray_rollouts.py").read_text()
    assert len(quoted) == 3
    for block in quoted:
        assert block in example
