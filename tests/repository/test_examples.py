"""Every example runs: in docstrings, in the README, in docs/ and in examples/."""

import doctest
import importlib
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.slow import slow
from trajpack.agent.errors import SetupError

ROOT = Path(__file__).parents[2]
BLOCKS = runpy.run_path(str(ROOT / "docs" / "site" / "blocks.py"))
MODULES = sorted(
    ".".join(("trajpack", *path.relative_to(ROOT).with_suffix("").parts))
    for layer in ("kernels", "packing", "agent")
    for path in (ROOT / layer).rglob("*.py")
    if ">>>" in path.read_text()
)
MODULES.append("trajpack.testing")
PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if "```python" in page.read_text()
]
RUN_ELSEWHERE = {
    "ray_training.py": "tests/agent/ray/test_training_example.py",
    "train_sums.py": "tests/agent/test_train_sums.py",
}
SCRIPTS = [path for path in sorted(ROOT.glob("examples/*.py")) if path.name not in RUN_ELSEWHERE]
SLOW = {"sft.py"}
WARM = {"calculator.py", "rewritten_history.py", "trl_grpo.py"}
"""Scripts that import much: a process that has done so already runs them."""


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted
    assert not result.failed


def test_scripts_that_run_elsewhere_do():
    for script, test in RUN_ELSEWHERE.items():
        assert script in (ROOT / test).read_text()


@pytest.mark.filterwarnings("error")
@pytest.mark.usefixtures("warm_judge")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_python_block_of_a_page_runs_alone(page, tmp_path, monkeypatch):
    """Run each block after its set-up, which the site's button copies with it."""
    monkeypatch.chdir(tmp_path)
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    blocks = BLOCKS["blocks"](BLOCKS["texts_of"](page.read_text()))
    assert blocks
    missing = ""
    for block in blocks:
        names = {"__name__": "page"}
        exec(compile(block.setup, str(page), "exec"), names)
        if ">>>" in block.text:
            example = parser.get_doctest(block.text, names, page.name, str(page), 0)
            example.globs = names
            runner.run(example, clear_globs=False)
            continue
        try:
            exec(compile(block.text, str(page), "exec"), names)
        except SetupError as error:
            missing = str(error)
            assert "bubblewrap" in missing
    assert not runner.failures
    if missing:
        pytest.skip(missing)


@pytest.mark.parametrize(
    "script",
    [slow(path) if path.name in SLOW else path for path in SCRIPTS],
    ids=lambda script: script.name,
)
def test_example_scripts_run(script, tmp_path, warm_programs):
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    fresh = [sys.executable, "-W", "error"]
    command = warm_programs.command("script") if script.name in WARM else fresh
    subprocess.run([*command, str(script)], cwd=tmp_path, env=environment, check=True)
