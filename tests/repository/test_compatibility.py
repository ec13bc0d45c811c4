"""Which systems can be installed beside trajpack, by the versions that both allow.

``peers_requirements.toml`` has what they require. ``python tests/repository/test_compatibility.py``
prints the table of ``docs/compatibility.md``, which a test holds equal.
"""

import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
RECORD = tomllib.loads(Path(__file__).with_name("peers_requirements.toml").read_text())
VERSIONS = {name: versions.split() for name, versions in RECORD["versions"].items()}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = ("", "runner", "agent")


def required_by(extra: str) -> list[str]:
    """Return what trajpack requires with an extra, beside the system's Python."""
    texts = PROJECT["dependencies"] if not extra else PROJECT["optional-dependencies"][extra]
    extras = [name for text in texts for name in Requirement(text).extras if "trajpack" in text]
    own = [text for text in texts if not text.startswith("trajpack")]
    return own + [text for name in extras for text in required_by(name)]


def conflicts(theirs: list[str], ours: list[str]) -> list[str]:
    """Return the packages of which no released version meets what both require."""
    both = [Requirement(text) for text in (*theirs, *ours)]
    specifiers: dict[str, list[Requirement]] = {}
    for requirement in both:
        specifiers.setdefault(requirement.name, []).append(requirement)
    return [
        name
        for name, needs in specifiers.items()
        if not any(all(v in need.specifier for need in needs) for v in VERSIONS[name])
    ]


def the_table() -> str:
    """Return the table of the page."""
    lines = ["| system | core | `[runner]` | `[agent]` |", "|---|---|---|---|"]
    for system, record in RECORD["systems"].items():
        ours = [f"python{PROJECT['requires-python']}", *required_by("")]
        cells = []
        for extra in EXTRAS:
            ours += required_by(extra)
            cells.append(", ".join(f"no: {n}" for n in conflicts(record["requires"], ours)))
        lines.append(f"| {system} | {' | '.join(cell or 'yes' for cell in cells)} |")
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table() -> None:
    assert the_table() in (ROOT / "docs/compatibility.md").read_text()


def test_the_oldest_leg_is_of_the_floors() -> None:
    extras = ("", "agent", "cli", "json", "metrics", "servers", "triton")
    floors = [Requirement(text) for extra in extras for text in required_by(extra)]
    lines = (ROOT / "tests/legs/oldest.txt").read_text().splitlines()[1:]
    pins = {pin.name: pin.specifier for pin in map(Requirement, lines)}
    assert pins.keys() == {floor.name for floor in floors}
    for floor in floors:
        (pin,), (least,) = pins[floor.name], floor.specifier
        assert Version(pin.version) == Version(least.version), floor


def test_a_conflict_is_found() -> None:
    assert conflicts(["torch<2.7", "numpy"], ["torch>=2.9", "numpy>=2"]) == ["torch"]
    assert conflicts(["python>=3.14"], [f"python{PROJECT['requires-python']}"]) == []
    assert len({re.split(r"[ ,]", system)[0] for system in RECORD["systems"]}) >= 18


if __name__ == "__main__":
    sys.stdout.write(the_table())
