"""The size of the repository only goes down.

``budget.txt`` has a row for each folder, its lines; for the documents, their words; and for the
public names, their number. A change that makes one smaller lowers its row:
``python tests/repository/test_budget.py`` writes the rows.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("budget.txt")
LAYERS = ("kernels", "packing", "agent")
PARENTS = (*LAYERS, "tests")
OTHERS = ("src/trajpack", "benchmarks", "examples", ".ci")
CODE = {".py", ".pyi", ".c", ".h", ".js", ".css", ".sh", ""}
UNCOUNTED = {"CHANGELOG.md", "docs/benchmarks/results.md", "docs/benchmarks/traffic.md"}
"""What grows by its nature, and pages that a program writes."""
WRITTEN = re.compile(r"<!-- speed: begin.*?speed: end -->", re.DOTALL)
"""The part of a page that a program writes."""
SLACK = 60
"""What a row may stand above the size, so that a small change leaves it alone."""
AIMS = {"product": 37_900, "tests": 51_450, "names": 96}
"""What all rows of a part may have together."""


def lines_of(folder: str) -> int:
    """Count the lines of code below a folder; of one whose folders have rows, those beside them."""
    files = (ROOT / folder).glob("*") if folder in PARENTS else (ROOT / folder).rglob("*")
    return sum(
        len(path.read_bytes().splitlines())
        for path in files
        if path.is_file() and path.suffix in CODE and not path.match("*.*-info/*")
    )


def folders() -> list[str]:
    """Return the folders that have a row: those of the layers and of the tests, and the others."""
    below = [
        f"{parent}/{path.name}"
        for parent in PARENTS
        for path in sorted((ROOT / parent).iterdir())
        if path.is_dir() and path.name != "__pycache__" and any(path.rglob("*.py"))
    ]
    return [*PARENTS, *below, *OTHERS]


def words_of_documents() -> int:
    """Count the words of all pages."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    kept = [path for path in pages if str(path.relative_to(ROOT)) not in UNCOUNTED]
    written = (WRITTEN.sub("", path.read_text()) for path in kept)
    return sum(len(re.findall(r"\S+", page)) for page in written)


def public_names() -> int:
    """Count the names that the layers export."""
    stubs = (ROOT.joinpath(layer, "__init__.pyi").read_text() for layer in LAYERS)
    return sum(len(re.findall(r"\bas \w+", stub)) for stub in stubs)


def measured() -> dict[str, int]:
    """Return the size of each row."""
    others = {"docs": words_of_documents(), "names": public_names()}
    return {folder: lines_of(folder) for folder in folders()} | others


def rows() -> dict[str, int]:
    """Return the table."""
    pairs = [line.split() for line in TABLE.read_text().splitlines()]
    return {name: int(size) for name, size in pairs}


SIZES = measured()


def test_each_folder_has_a_row() -> None:
    assert set(rows()) == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
def test_no_part_is_larger_than_its_row_and_rows_follow(name: str) -> None:
    row, size = rows()[name], SIZES[name]
    assert size <= row, f"{name} has {size}, its row allows {row}"
    assert row - size <= SLACK, f"lower the row of {name} from {row} to {size}: {__doc__}"


@pytest.mark.parametrize("part", AIMS)
def test_parts_are_within_their_aims(part: str) -> None:
    assert sum(size for name, size in SIZES.items() if part_of(name) == part) <= AIMS[part]


def part_of(name: str) -> str:
    """Return the part that a row belongs to: product, tests, or the row itself."""
    top = name.partition("/")[0]
    return "product" if top in (*LAYERS, "src") else top


def lowered() -> dict[str, int]:
    """Return the table as it may be now: code may move within a part, which must not grow."""
    table = rows()
    grown = {
        part
        for part in map(part_of, SIZES)
        if sum(size for name, size in SIZES.items() if part_of(name) == part)
        > sum(row for name, row in table.items() if part_of(name) == part)
    }
    return {
        name: min(size, table.get(name, size)) if part_of(name) in grown else size
        for name, size in SIZES.items()
    }


if __name__ == "__main__":
    TABLE.write_text("".join(f"{name} {size}\n" for name, size in lowered().items()))
