"""What `make dist` builds, installed in environments that have only what it asks for."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.support.compiled_take import compiler_or_skip
from tests.support.lean_environment import lean_environment, required
from tests.support.source_copy import copy_source

ROOT = Path(__file__).parents[2]
LAYERS = ["kernels", "packing", "agent"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEVELOPMENT = {"hypothesis", "mypy", "pre-commit", "pytest", "ruff"}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build an sdist, and a wheel from it, without isolation: setuptools is installed."""
    out = tmp_path_factory.mktemp("dist")
    copy = copy_source(tmp_path_factory.mktemp("tree") / "trajpack")

    def build(folder: Path, kind: str) -> None:
        code = f"import setuptools.build_meta as backend; backend.build_{kind}({str(out)!r})"
        command = [sys.executable, "-W", "ignore", "-c", code]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)

    build(copy, "sdist")
    (sdist,) = out.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(out / "unpacked", filter="data")
    (unpacked,) = (out / "unpacked").iterdir()
    build(unpacked, "wheel")
    return out


def installed(built: Path, folder: Path, *extras: str) -> Path:
    """Install the wheel in an environment of its own; return the environment's programs."""
    python = lean_environment(folder, *extras)
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", wheel], check=True)
    return python.parent


@pytest.fixture(scope="module")
def core(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(built, tmp_path_factory.mktemp("core") / "venv")


def run(*command: object, cwd: Path | None = None) -> str:
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env={}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_one_package_with_real_files(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ["__init__.py", "py.typed", "cli.py", *(f"{layer}/" for layer in LAYERS)]:
        assert any(entry.startswith(f"trajpack/{name}") for entry in names), name
    tops = {entry.split("/")[0] for entry in names}
    assert tops == {"trajpack", *(top for top in tops if top.endswith(".dist-info"))}
    in_wheel = {entry for entry in names if entry.endswith(".py")}
    in_tree = {
        f"trajpack/{path.relative_to(ROOT)}"
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*.py")
    }
    assert in_tree <= in_wheel


def test_the_wheel_has_take_in_c_for_every_python_where_a_compiler_is(
    built: Path, core: Path
) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert "-cp311-abi3-linux" in wheel.name
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("packing/buffer/take.c") for name in archive.getnames())
    compiler_or_skip()
    assert "trajpack/packing/buffer/take_c.abi3.so" in zipfile.ZipFile(wheel).namelist()
    code = "from trajpack.packing.buffer.take import is_compiled; print(is_compiled())"
    assert run(core / "python", "-P", "-c", code) == "True\n"


def test_without_a_compiler_the_reference_is_installed(built: Path, tmp_path: Path) -> None:
    (unpacked,) = (built / "unpacked").iterdir()
    source = shutil.copytree(unpacked, tmp_path / "source")
    shutil.rmtree(source / "build", ignore_errors=True)  # what the other test has compiled
    code = f"import setuptools.build_meta as backend; backend.build_wheel({str(tmp_path)!r})"
    environment = {"CC": "/there/is/none", "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "trajpack/packing/buffer/take.py" in names
    assert not [name for name in names if name.endswith(".so")]


def test_the_description_can_be_shown(built: Path) -> None:
    if importlib.util.find_spec("twine") is None:
        pytest.skip("twine is not installed; make dist installs it")
    files = [*built.glob("*.whl"), *built.glob("*.tar.gz")]
    run(sys.executable, "-m", "twine", "check", "--strict", *files)


def test_the_links_of_the_description_are_absolute_and_lead_to_files(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [one for one in archive.namelist() if one.endswith("/METADATA")]
        shown = archive.read(name).decode().partition("\n\n")[2]
    readme = (ROOT / "README.md").read_text()
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", shown)
    assert len(links) == len(re.findall(r"\]\(", readme)) > 20
    for link in links:
        place = re.fullmatch(rf"{PROJECT['urls']['Source']}/(raw|blob)/main/(.+)", link)
        assert place is not None, link
        assert (ROOT / place[2]).is_file(), link
        assert (place[1] == "raw") is link.endswith(".svg")
    code = r"^```.*?^```"
    assert re.findall(code, shown, re.S | re.M) == re.findall(code, readme, re.S | re.M)


def test_the_command_runs_with_its_extra_and_names_it(
    core: Path, built: Path, tmp_path: Path
) -> None:
    command = installed(built, tmp_path / "venv", "cli") / "trajpack"
    assert "Usage: trajpack" in run(command, "--help")
    assert run(command, "--version").startswith("trajpack ")
    lacking = subprocess.run([core / "trajpack"], check=False, capture_output=True, text=True)
    wanted = "trajpack: error: No module named 'typer': install trajpack[cli]\n"
    assert (lacking.returncode, lacking.stdout, lacking.stderr) == (2, "", wanted)


def test_the_first_example_runs_with_the_core_alone(core: Path, tmp_path: Path) -> None:
    example = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)[0]
    (tmp_path / "example.txt").write_text(example)
    code = (
        "import doctest, importlib.util, trajpack; from pathlib import Path\n"
        "done = doctest.testfile('example.txt', module_relative=False); assert done.attempted > 5\n"
        "assert 'site-packages' in trajpack.__file__ and not done.failed\n"
        "for name in ('anyio', 'rich', 'transformers', 'typer'):\n"
        "    assert importlib.util.find_spec(name) is None\n"
    )
    run(core / "python", "-P", "-W", "error", "-c", code, cwd=tmp_path)


def test_agents_run_with_the_extra_runner(built: Path, tmp_path: Path) -> None:
    assert not required("runner") & {"transformers", "math-verify", "typer", "rich"}
    jobs = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/jobs.md").read_text(), re.S | re.M)
    rollouts = [
        code for code in jobs if "FunctionEngine(" in code and "build_tiny_model" not in code
    ]
    assert rollouts
    hidden = "import sys; sys.modules |= dict.fromkeys(['jinja2', 'transformers'])\n"
    python = installed(built, tmp_path / "venv", "runner") / "python"
    for number, rollout in enumerate(rollouts):
        (folder := tmp_path / str(number)).mkdir()
        run(python, "-P", "-W", "error", "-c", f"{hidden}{rollout}", cwd=folder)


@pytest.mark.slow
def test_the_demonstration_needs_its_extra_and_no_more(built: Path, tmp_path: Path) -> None:
    needed = required("demo")
    assert not needed & (DEVELOPMENT | {"ray", "trl", "matplotlib", "reasoning-gym"})
    assert needed - required("cli") < required("agent")
    assert not required("agent") & {"matplotlib", "reasoning-gym"}
    programs = installed(built, tmp_path / "venv", "demo")
    command = programs / "trajpack"
    run(programs / "python", ROOT / "examples" / "train_sums.py", "--steps", "1", "--warm-up", "9",
        "--out", "train.html", "--batch", "b.safetensors", cwd=tmp_path)  # fmt: skip
    assert "reward" in run(command, "inspect", "b.safetensors", "--sequences", "1", cwd=tmp_path)
    run(command, "report", "b.safetensors", cwd=tmp_path)
    assert (tmp_path / "b.html").stat().st_size > 10_000


def test_the_publishing_workflow_holds_no_secret_and_tests_before_it_builds() -> None:
    path = ROOT / ".github" / "workflows" / "publish.yml"
    text = path.read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert "secrets." not in text
    assert "password" not in text
    assert yaml.safe_load(text)["permissions"] == {}
    assert jobs["build"]["permissions"] == {"contents": "read"}
    assert jobs["publish"]["permissions"] == {"id-token": "write", "attestations": "write"}
    assert jobs["publish"]["needs"] == "build"
    makes = [step["run"] for step in jobs["build"]["steps"] if "make " in step.get("run", "")]
    assert makes == ["make check test test-slow", "make dist"]


def test_a_release_with_placeholders_or_another_version_is_refused(tmp_path: Path) -> None:
    """Run the workflow's own checks as its shell does."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())["jobs"]
    (check,) = [step for step in jobs["build"]["steps"] if step.get("name") == "check the release"]

    def passes(tag: str) -> bool:
        command = ["bash", "-e", "-c", check["run"]]
        environment = {"GITHUB_REF_NAME": tag, "PATH": "/usr/bin:/bin"}
        return subprocess.run(command, cwd=copy, env=environment, check=False).returncode == 0

    copy = copy_source(tmp_path / "trajpack")
    import trajpack

    tag = f"v{trajpack.__version__}"
    project = copy / "pyproject.toml"
    text = re.sub(r"(https://[\w.]+)/[\w-]+/trajpack", r"\1/OWNER/trajpack", project.read_text())
    project.write_text(text)
    assert not passes(tag)
    project.write_text(project.read_text().replace("/OWNER/", "/someone/"))
    assert passes(tag)
    assert not passes("v0.0.9")
