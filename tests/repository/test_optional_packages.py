"""An installation without extras: what works, and what names the extra that it lacks."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import trajpack
from tests.repository.test_architecture import PRODUCT, ROOT, imports_at_run_time, tree_of
from trajpack.packing.optional import BROUGHT_BY, explained

KEPT = {"jinja2", "rich", "typer"}
"""Optional by their own names, but brought by torch and the command."""
HIDE = f"""
import sys
from importlib.machinery import PathFinder

class Core:
    "Finds what every installation has."
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {set(BROUGHT_BY) - KEPT!r}:
            return None
        return PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [one for one in sys.meta_path if one is not PathFinder] + [Core()]
"""


def core_only(code: str, *arguments: str, cwd: Path | None = None) -> Any:
    """Run code in a fresh interpreter that has no optional package."""
    command = [sys.executable, "-P", "-c", HIDE + code, *arguments]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True)


ENTRIES = {
    "agent:build_tiny_model()": ("tokenizers", "trajpack[agent]"),
    "agent.models.tiny_model:build_arithmetic_model()": ("tokenizers", "trajpack[agent]"),
    "agent.models.causal_model:load_model('folder')": ("transformers", "trajpack[agent]"),
    "agent.models.causal_model:load_tokenizer('folder')": ("transformers", "trajpack[agent]"),
    "agent:TransformersEngine(None)": ("transformers", "trajpack[agent]"),
    "agent:MathMultiTurnAgent(None, 'folder', None)": ("transformers", "trajpack[agent]"),
    "agent:RolloutRunner(None, None, None)": ("anyio", "trajpack[runner]"),
    "agent.environments.questions:reasoning_gym_questions(size=1, seed=0)": (
        "reasoning_gym", "trajpack[reasoning-gym]"),
    "agent:MathVerifyEnvironment([])": ("math_verify", "trajpack[agent]"),
    "agent.rollout.rollout:prepare_rollout(module.RolloutSettings())": (
        "anyio", "trajpack[runner]"),
    "agent:RolloutMetrics()": ("prometheus_client", "trajpack[metrics]"),
    "agent:RolloutTracer()": ("opentelemetry", "trajpack[metrics]"),
    "agent:VLLMEngine('http://127.0.0.1:9')": ("aiohttp", "trajpack[servers]"),
    "agent:SGLangEngine('http://127.0.0.1:9')": ("aiohttp", "trajpack[servers]"),
    "agent.ray:RolloutWorkers(None, 1)": ("anyio", "trajpack[runner]"),
    "agent.ray:local_cluster(num_cpus=1).__enter__()": ("ray", "trajpack[ray]"),
    "agent:TRLRollout(None, None, [])._generate({}, None)": ("trl", "trl"),
    "packing.adapters.verl:to_data_proto(None)": ("verl", "verl"),
    "packing.adapters.verl:to_tensordict(None)": ("tensordict", "tensordict"),
    "packing.adapters.openrlhf:to_experience(None)": ("openrlhf", "openrlhf"),
    "packing.adapters.megatron:to_packed_seq_params(None)": ("megatron", "megatron-core"),
    "packing.adapters.tinker:to_datums(None)": ("tinker", "tinker"),
    "testing:trajectories()": ("hypothesis", "hypothesis"),
    "testing:trajectory_lists()": ("hypothesis", "hypothesis"),
}  # fmt: skip
"""Calls, as ``module:expression``: the optional package that each misses, and what brings it."""

PROGRAM = """
import json
import os
from importlib import import_module
from pathlib import Path
import torch
import trajpack
import trajpack.testing

found = {}
for entry in json.loads(sys.argv[1]):
    name, _, expression = entry.partition(":")
    module = import_module(f"trajpack.{name}")
    try:
        eval(f"module.{expression}")
        found[entry] = "no error"
    except ModuleNotFoundError as error:
        found[entry] = f"{error.name}|{error}"
    except Exception as error:
        found[entry] = repr(error)

turn = trajpack.Turn([1, 2], [3], [-0.5], reward=1.0)
batch = trajpack.pack([trajpack.Trajectory(name, [turn], group="g") for name in "ab"])
batch = batch.with_advantages(trajpack.RLOO())
plan = trajpack.plan_micro_batches(batch.seqlens, capacity=8)
assert len(batch.split(plan)) == 1
trajpack.save(batch, "batch.safetensors")


def command(*arguments):
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status, Path("1").read_text(), Path("2").read_text()
    for stream in (1, 2):
        os.dup2(os.open(str(stream), os.O_CREAT | os.O_WRONLY | os.O_TRUNC), stream)
    from trajpack.cli import main
    sys.argv = ["trajpack", *arguments]
    main()


shown = [command("inspect", "batch.safetensors")]
Path("batch.tokenizer").mkdir()
Path("batch.tokenizer", "tokenizer_config.json").write_text("{}")
shown.append(command("inspect", "batch.safetensors"))
shown.append(command("rollout", "--out", "b.safetensors"))
print(json.dumps([found, *shown]))
"""
LACKING = "No module named 'transformers': install trajpack[agent]"


@pytest.mark.slow
def test_without_extras_packing_works_and_the_rest_names_what_to_install(tmp_path: Path) -> None:
    done = core_only(PROGRAM, json.dumps([*ENTRIES]), cwd=tmp_path)
    found, plain, without_text, rollout = json.loads(done.stdout)
    assert found == {
        entry: f"{module}|No module named {module!r}: install {brought_by}"
        for entry, (module, brought_by) in ENTRIES.items()
    }
    assert (plain[0], plain[2]) == (0, "")
    assert "turns" in plain[1]
    assert "turns" in without_text[1]
    assert without_text[2] == f"trajpack: token ids in place of text: {LACKING}\n"
    assert rollout[0] == 2
    assert rollout[2].splitlines()[-1] == f"trajpack: error: {LACKING}"


BEHIND = {
    "agent/blocking_work.py": "agent/runner/runner.py",
    "agent/runner/gate.py": "agent/runner/runner.py",
    "agent/runner/run.py": "agent/runner/runner.py",
    "agent/environments/answer_worker.py": "agent/environments/math_verify.py",
    "agent/servers/client.py": "agent/servers/control.py",
    "agent/servers/engine.py": "agent/servers/control.py",
    "agent/servers/response_types.py": "agent/servers/engine_response.py",
    "agent/engines/transformers_batching.py": "agent/engines/transformers_engine.py",
}
"""Files that are reached through another alone, which asks for the package."""
ELSEWHERE = {
    ("kernels/dispatch.py", "triton"): "an explicit impl, which says so itself",
}


def optional_imports(path: Path) -> set[str]:
    """Return the packages that a file imports when it runs and that may be missing."""
    core = {"__future__", "numpy", "safetensors", "torch", "trajpack"}
    found = {module.partition(".")[0] for module in imports_at_run_time(tree_of(path))}
    return found - core - sys.stdlib_module_names


def required_in(path: Path) -> set[str]:
    return {
        argument.value
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "require"
        for argument in ast.walk(node)
        if isinstance(argument, ast.Constant)
    }


def test_every_optional_import_is_behind_what_names_it() -> None:
    for path in PRODUCT:
        name = str(path.relative_to(ROOT))
        door = ROOT / BEHIND.get(name, name)
        for module in optional_imports(path):
            if path.name.endswith("_triton.py") and module == "triton":
                continue
            assert module in BROUGHT_BY, (name, module)
            if (name, module) not in ELSEWHERE and "src/trajpack/commands" not in name:
                assert module in required_in(path) | required_in(door), (name, module)


def test_what_is_to_be_installed_brings_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    brought = {
        extra: {re.split(r"[\[>=;<]", one)[0].lower().replace("-", "_") for one in packages}
        for extra, packages in project["optional-dependencies"].items()
    }
    others = {
        "huggingface_hub": "transformers",
        "opentelemetry": "opentelemetry_sdk",
        "tokenizers": "transformers",
    }
    for module, package in BROUGHT_BY.items():
        if package.startswith("trajpack["):
            extra = package.removeprefix("trajpack[").removesuffix("]")
            assert others.get(module, module) in brought[extra], module


def test_the_core_has_three_requirements() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core = {re.split(r"[>=;<]", one)[0] for one in project["dependencies"]}
    assert core == {"numpy", "safetensors", "torch"}


def test_the_embedded_engine_names_the_transformers_that_it_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("transformers.__version__", "5.9.0")
    with pytest.raises(
        ImportError, match=r"TransformersEngine needs transformers 5\.15 .* 5\.9\.0"
    ):
        trajpack.agent.TransformersEngine(None)


def test_an_error_is_explained_once_and_a_strange_one_not() -> None:
    once = explained(ModuleNotFoundError("No module named 'ray'", name="ray"))
    assert explained(once) is once
    strange = ModuleNotFoundError("No module named 'numbers2'", name="numbers2")
    assert explained(strange) is strange
    assert explained(ModuleNotFoundError("no")).args == ("no",)


QUICK = [["--help"], ["--version"], ["rollout", "--help"], ["replay", "--help"],
         ["inspect", "--help"]]  # fmt: skip
REFUSED = [[], ["teach"], ["rollout", "--nope"], ["inspect"], ["rollout", "--turns", "two"]]


def test_help_and_refusals_import_no_torch_and_need_no_extra() -> None:
    code = f"""
from trajpack.cli import run
assert not {{*map(run, {QUICK!r})}} - {{0}}
assert {{*map(run, {REFUSED!r})}} == {{2}}
print(*sorted(sys.modules), file=sys.stderr)
"""
    done = core_only(code)
    loaded = set(done.stderr.splitlines()[-1].split())
    assert {"typer", "trajpack.commands.app"} <= loaded
    assert not {name for name in loaded if name.partition(".")[0] in {"torch", *BROUGHT_BY} - KEPT}
    assert f"trajpack {trajpack.__version__}\n" in done.stdout
