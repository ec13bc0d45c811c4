"""Installation in a fresh copy of the source: what is refused, what stays, what is removed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.support.source_copy import copy_source

LAYERS = ("kernels", "packing", "agent")
PYTHON = sys.executable
NEEDED = "trajpack needs Python 3.11 or later"


@cache
def found_pythons() -> dict[str, str]:
    """Return the interpreters of this machine that run, by version."""
    places = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    places += Path.home().glob(".pyenv/versions/*/bin")
    found = {}
    for place in places:
        for python in place.glob("python[23]*"):
            if re.fullmatch(r"python[23](\.\d+)?", python.name):
                done = run([python, "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])"])
                if done.returncode == 0:
                    found.setdefault(done.stdout.strip(), str(python))
    return found


def run(command: list[object], folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command as in a shell of its own, not in one that make has started."""
    hidden = ("MAKE", "MFLAGS", "VENV", "PYTHON", "WORKERS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


def is_good(version: str) -> bool:
    return tuple(map(int, version.split("."))) >= (3, 11)


@pytest.fixture(scope="module")
def wrong_pythons() -> dict[str, str]:
    wrong = {version: python for version, python in found_pythons().items() if not is_good(version)}
    return wrong or pytest.skip("no Python of another version on this machine")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy in which no test leaves anything."""
    return copy_source(tmp_path_factory.mktemp("fresh") / "trajpack")


def copy_needed(folder: Path) -> Path:
    """Copy the files that making an environment reads."""
    for name in (".ci", *LAYERS):
        (folder / name).mkdir()
    (folder / "src" / "trajpack").mkdir(parents=True)
    for layer in LAYERS:
        (folder / "src" / "trajpack" / layer).symlink_to(f"../../{layer}")
    root = Path(__file__).parents[2]
    for name in (".ci/install", ".ci/make-venv", "pyproject.toml", "Makefile", "constraints.txt"):
        (folder / name).write_bytes((root / name).read_bytes())
    return folder


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return copy_needed(tmp_path)


def make_venv(folder: Path, python: object) -> subprocess.CompletedProcess[str]:
    return run(["sh", ".ci/make-venv", python, ".venv"], folder)


def runs(folder: Path) -> bool:
    return run([folder / ".venv/bin/python", "-c", "import pip"]).returncode == 0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose environment make takes for installed."""
    folder = copy_needed(tmp_path_factory.mktemp("made"))
    done = make_venv(folder, PYTHON)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert runs(folder)
    (folder / ".venv/.installed").touch()
    return folder


@pytest.fixture(scope="module")
def quick_python(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that makes a virtual environment by copying one."""
    copies = f'[ "$2" = venv ] && exec cp -a {made}/.venv "$3"'
    return script(tmp_path_factory.mktemp("quick") / "python3", f'{copies}\nexec {PYTHON} "$@"')


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def refusal(folder: Path, python: object) -> str:
    """Return the one line that `make install` says beside make's own."""
    before = sorted(folder.rglob("*"))
    done = run(["make", "install", f"PYTHON={python}"], folder)
    assert done.returncode == 2
    assert done.stdout == ""
    said, by_make = done.stderr.splitlines()
    assert re.match(r"make: \*\*\* \[.*\] Error 1$", by_make)
    assert sorted(folder.rglob("*")) == before
    return said


def test_a_python_that_cannot_be_used_is_refused_in_one_sentence(
    wrong_pythons: dict[str, str], fresh: Path, tmp_path: Path
) -> None:
    shim = script(tmp_path / "python3.12", "echo 'a shim: command not found' >&2; exit 127")
    version, wrong = max(wrong_pythons.items())
    reasons = {"no-such-python": "does not run here", shim: "does not run here"}
    for python, reason in {**reasons, wrong: f"is {version}"}.items():
        said = refusal(fresh, python)
        assert said.startswith(f"{NEEDED}; {python} {reason}: make install PYTHON=python3.")


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_python_without_what_makes_environments_is_refused(
    module: str, copy: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("lacking")
    (folder / f"{module}.py").write_text("raise ImportError('not packaged')\n")
    python = script(folder / "python3", f'PYTHONPATH={folder} exec {PYTHON} "$@"')
    major, minor = sys.version_info[:2]
    assert refusal(copy, python) == (
        f"{python} has no venv or no ensurepip module: install them (Debian, Ubuntu: apt install "
        f"python{major}.{minor}-venv), or take another Python by make install PYTHON=..."
    )


@pytest.mark.parametrize("half", ["without pip", "without its Python"])
def test_a_half_made_environment_is_made_anew(half: str, copy: Path, quick_python: Path) -> None:
    run([PYTHON, "-m", "venv", "--without-pip", ".venv"], copy)
    if half == "without its Python":
        (copy / ".venv/bin/python").unlink()
        (copy / ".venv/bin/python").symlink_to("/nowhere/python3.11")
    assert make_venv(copy, quick_python).returncode == 0
    assert runs(copy)


def test_what_is_no_environment_is_left_alone(copy: Path) -> None:
    (copy / ".venv").mkdir()
    (copy / ".venv" / "thesis.tex").write_text("years of work")
    said = refusal(copy, PYTHON)
    assert said.startswith(".venv is no virtual environment: move it away, or choose another place")
    assert (copy / ".venv" / "thesis.tex").read_text() == "years of work"


# an environment that is there


@pytest.fixture
def installed(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "installed", symlinks=True)


def test_an_environment_that_works_is_not_installed_again(installed: Path) -> None:
    before = (installed / ".venv/.installed").stat().st_mtime_ns
    for given in ([], [f"PYTHON={PYTHON}"]):
        done = run(["make", "install", *given], installed)
        assert (done.returncode, done.stderr) == (0, "")
        assert "pip" not in done.stdout
    assert (installed / ".venv/.installed").stat().st_mtime_ns == before


@pytest.mark.parametrize("become", ["another", "nothing"])
def test_an_environment_whose_python_has_changed_is_installed_again(
    become: str, installed: Path
) -> None:
    python = installed / ".venv/bin/python"
    python.unlink()
    if become == "another":
        script(python, "echo 3.4.5")
    else:
        python.symlink_to("/nowhere/python3.11")
    done = run(["make", "--dry-run", "install"], installed)
    assert "-m pip install" in done.stdout
    assert not (installed / ".venv/.installed").exists()


# the demonstration


def test_the_demonstration_installs_no_development_tools(installed: Path) -> None:
    for target in ("demo", "train"):
        assert "pip install" not in run(["make", "--dry-run", target], installed).stdout
    (installed / ".venv/.installed").unlink()
    for target in ("demo", "train"):
        done = run(["make", "--dry-run", target], installed)
        assert "sh .ci/install '.venv/bin/python' demo" in done.stdout
        assert "[dev]" not in done.stdout
    (installed / ".venv/.demo-installed").touch()
    assert ".ci/install" not in run(["make", "--dry-run", "demo"], installed).stdout


@pytest.mark.parametrize(
    ("found", "gpu", "index", "said", "torch"),
    [
        ("torch", False, "", "torch for CPUs and {others}", "torch"),
        ("torch", False, "cpu", "torch for CPUs and {others}", "--index-url cpu torch"),
        ("nvidia-cublas", False, "", "pip finds only torch with CUDA", "torch"),
        ("nvidia-cublas", True, "", "a GPU is here: torch with CUDA and {others}", "torch"),
    ],
)
@pytest.mark.parametrize(
    "chosen", [("demo", "transformers", "0.25", "3"), ("dev", "150 other packages", "0.8", "3.5")]
)
def test_an_installation_says_what_it_fetches(
    found: str, gpu: bool, index: str, said: str, torch: str, chosen: tuple[str, ...],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The Python is a stand-in that notes what pip is asked for, and finds what it is told."""
    extra, others, *sizes = chosen
    reports = f"""case "$*" in *--report*) echo '{{"metadata": {{"name": "{found}"}}}}' ;; esac"""
    python = script(tmp_path / "python", f'echo "$*" >> {tmp_path}/asked\n{reports}')
    script(tmp_path / "nvidia-smi", f"exit {0 if gpu else 9}")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    done = run(["sh", ".ci/install", python, extra, index], Path(__file__).parents[2])
    assert done.returncode == 0
    assert done.stdout.startswith(f"trajpack: {said.format(others=others)}")
    assert f"about {sizes[found != 'torch']} GB" in done.stdout
    *_, first, last = (tmp_path / "asked").read_text().splitlines()
    pip = "-m pip --disable-pip-version-check install --constraint constraints.txt"
    assert (first, last) == (f"{pip} {torch}", f"{pip} --editable .[{extra}]")


# copies without links


@pytest.fixture(scope="module", params=["texts", "lost"])
def without_links(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies by tools that do not know symbolic links."""
    return copy_source(tmp_path_factory.mktemp("links") / "trajpack", links=request.param)


LOST = (
    "trajpack cannot be built: src/trajpack/kernels, src/trajpack/packing, src/trajpack/agent "
    "should be symbolic links to the folders kernels, packing, agent, and this copy of the source "
    "has lost them; clone it with git"
)


def test_a_copy_without_links_is_neither_built_nor_imported_nor_installed(
    without_links: Path,
) -> None:
    code = "import setuptools.build_meta as backend; backend.build_sdist('dist')"
    done = run([PYTHON, "-c", code], without_links)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].startswith(LOST)
    code = "import sys; sys.path.insert(0, 'src'); import trajpack"
    last = run([PYTHON, "-P", "-c", code], without_links).stderr.splitlines()[-1]
    lacking = r"ImportError: trajpack\.\w+ is not there: this copy of the source has lost"
    assert re.match(lacking, last)
    assert "src/trajpack/kernels, src/trajpack/packing and src/trajpack/agent" in last
    assert "clone it with git" in last
    said = refusal(without_links, PYTHON)
    assert re.match(r"src/trajpack/\w+ is no link to the folder \w+: this copy of the source", said)


# clean


def test_clean_removes_what_make_has_made_and_nothing_else(tmp_path: Path) -> None:
    copy = copy_source(tmp_path / "trajpack")
    shared = tmp_path / "elsewhere"
    (shared / "__pycache__").mkdir(parents=True)
    (copy / "notes.txt").write_text("mine")
    (copy / "trajpack-rollout").mkdir()
    (copy / "trajpack-rollout" / "batch.safetensors").write_text("mine, too")
    (copy / "mine").mkdir()
    (copy / "mine" / "__pycache__").mkdir()
    (copy / "linked").symlink_to(shared)
    kept = sorted(copy.rglob("*"))
    for name in (
        ".venv/bin/python", ".venv/.installed", ".venv/triton/3.7.0/x", "build/soak/x.html",
        "dist/x", "demo/batch.safetensors", "demo/answers/0", "src/trajpack.egg-info/PKG-INFO",
        ".mypy_cache/x", ".ruff_cache/x", ".pytest_cache/x", ".hypothesis/x", ".benchmarks/x",
        "kernels/__pycache__/x.pyc", "agent/servers/__pycache__/x.pyc", "tests/__pycache__/x.pyc",
        "src/trajpack/__pycache__/x.pyc", "examples/__pycache__/x.pyc",
    ):  # fmt: skip
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text("made")
    done = run(["make", "clean"], copy)
    assert done.returncode == 0, done.stderr
    assert sorted(copy.rglob("*")) == kept
    assert (shared / "__pycache__").is_dir()
    assert run(["make", "clean"], copy).returncode == 0


def test_help_lists_every_target_with_what_it_does(fresh: Path) -> None:
    shown = run(["make"], fresh).stdout
    for target in ("install", "clean", "check", "test", "demo", "train", "docs", "dist"):
        assert re.search(rf"^{target} +[A-Z]", shown, re.MULTILINE), target
