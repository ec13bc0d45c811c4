"""The public surface is a promise: what it holds, that it is sorted, and that it is documented."""

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import trajpack
from trajpack import agent
from trajpack.agent.environments.code import CodeProblem
from trajpack.agent.runner.results import GroupResult
from trajpack.packing.ragged import Ragged
from trajpack.packing.trajectory_log.log import LoggedEpisode

ROOT = Path(__file__).parents[2]
LAYERS = ["agent", "kernels", "packing"]
EXPORTS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (trajpack, trajpack.kernels, trajpack.agent)  # trajpack has those of packing
    for name in module.__all__
}


def test_every_exported_name_is_documented_and_swallows_no_keywords():
    for name in trajpack.__all__:
        exported = getattr(trajpack, name)
        assert inspect.getdoc(exported), name
        if isinstance(exported, ModuleType):
            continue
        is_class = inspect.isclass(exported)
        for member, value in vars(exported).items() if is_class else ():
            if not member.startswith("_") and (
                inspect.isfunction(value) or isinstance(value, property)
            ):
                assert inspect.getdoc(value), f"{name}.{member}"
        if not (is_class and issubclass(exported, Exception)):  # these take what Python's own do
            parameters = inspect.signature(exported).parameters.values()
            assert all(one.kind is not one.VAR_KEYWORD for one in parameters), name


@pytest.mark.parametrize("layer", LAYERS)
def test_every_name_of_a_layer_can_be_imported_and_is_documented(layer):
    module = importlib.import_module(f"trajpack.{layer}")
    for name in module.__all__:
        exported = getattr(module, name)
        assert exported.__name__.split(".")[-1] == name
        assert inspect.getdoc(exported), name


@pytest.mark.parametrize("layer", LAYERS)
def test_no_module_hides_an_exported_name(layer):
    """The import of a submodule sets its name on the package."""
    names = {path.stem for path in (ROOT / layer).iterdir()}
    module = importlib.import_module(f"trajpack.{layer}")
    for name in names & set(module.__all__):
        assert getattr(module, name) is importlib.import_module(f"trajpack.{layer}.{name}")


@pytest.mark.parametrize("layer", ["src/trajpack", *LAYERS])
def test_a_stub_exports_each_name_that_it_imports(layer):
    # PEP 484: an import in a stub is exported if it repeats the name after `as`, or is a star
    for node in ast.parse((ROOT / layer / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                assert alias.name in ("*", alias.asname), alias.name


@pytest.mark.parametrize("module", [trajpack, trajpack.agent, trajpack.kernels, trajpack.packing])
def test_completion_is_shown_the_public_names_and_no_others(module):
    of_python = {name for name in dir(module) if re.fullmatch(r"__\w+__", name)}
    assert {*dir(module)} == {*module.__all__} | of_python
    assert len(dir(module)) == len({*dir(module)})
    assert module.__doc__ != ModuleType.__doc__


def test_folders_of_modules_are_reached_without_an_import():
    code = """
import trajpack
assert "torch" not in __import__("sys").modules
trajpack.packing.adapters.verl.to_data_proto, trajpack.testing.assert_same_bits
assert trajpack.adapters is trajpack.packing.adapters
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def described(text: str) -> set[str]:
    """Return the names that the sections Args and Attributes of a docstring describe."""
    names: set[str] = set()
    inside = False
    for line in text.splitlines():
        if line and not line.startswith(" "):
            inside = line in ("Args:", "Attributes:")
        elif inside and (entry := re.match(r"    (\*{0,2}\w+(?:, \w+)*):", line)):
            names |= {*entry[1].replace("*", "").split(", ")}
    return names


def told(owner: object) -> set[str]:
    """Return the names that a docstring describes, itself or where it refers the reader to."""
    names: set[str] = set()
    waiting, seen = [owner], {owner}
    while waiting:
        owner = waiting.pop()
        text = inspect.getdoc(owner) or ""
        names |= described(text)
        if not inspect.isclass(owner):
            names |= {*re.findall(r"``(\w+)\b", text)}  # in a sentence
        found = {*referred(owner, text)} - seen
        seen |= found
        waiting += found
    return names


def referred(owner: object, text: str) -> Iterator[object]:
    """Yield the functions and classes that a docstring names, and the bases among them."""
    for reference in {*re.findall(r"(?<!`)`([\w.]+)`(?!`)", text)}:
        for scope in (trajpack, trajpack.kernels, agent, sys.modules[owner.__module__]):
            other = scope
            for part in reference.removeprefix("trajpack.").split("."):
                other = getattr(other, part, None)
            if inspect.isfunction(other) or inspect.isclass(other):
                yield other
    if inspect.isclass(owner):
        yield from (base for base in owner.__mro__[1:] if f"`{base.__name__}`" in text)


def wanted(owner: object) -> set[str]:
    """Return the names of fields or parameters that ``help`` has to describe."""
    if inspect.isclass(owner):
        if dataclasses.is_dataclass(owner):
            return {one.name for one in dataclasses.fields(owner) if one.name[0] != "_"}
        if issubclass(owner, tuple):
            return {*owner._fields}
        made_elsewhere = "\nMade by `" in (inspect.getdoc(owner) or "")
        if made_elsewhere or getattr(owner, "_is_protocol", False):
            return set()
        if issubclass(owner, BaseException):
            return {"qid", "reason"} if owner is agent.EpisodeError else set()
    return {name for name in inspect.signature(owner).parameters if name[0] != "_"}


@pytest.mark.parametrize("name", sorted(name for name in EXPORTS if callable(EXPORTS[name])))
def test_help_describes_every_field_and_parameter(name):
    assert wanted(EXPORTS[name]) - told(EXPORTS[name]) == set()


def test_no_exported_class_has_strings_that_python_drops():
    for name, exported in EXPORTS.items():
        if not inspect.isclass(exported):
            continue
        for kind in exported.__mro__:
            if not kind.__module__.startswith("trajpack."):
                continue
            (body,) = ast.parse(inspect.getsource(kind)).body
            strings = [node for node in body.body[1:] if isinstance(node, ast.Expr)]
            assert [ast.unparse(node) for node in strings] == [], f"{name}: {kind.__name__}"


IDS = [*range(5000)]
LONG = "x" * 10_000
TURN = trajpack.Turn(IDS, torch.tensor(IDS), [-0.5] * 5000, fields={"x": torch.zeros(5000, 4)})
TRAJECTORY = trajpack.Trajectory("a", [TURN] * 50)
PROMPT = agent.Prompt("q", IDS)
RESULT = agent.EpisodeResult(PROMPT, (TRAJECTORY,) * 50)
LARGE = [
    TURN,
    TRAJECTORY,
    PROMPT,
    RESULT,
    agent.GenerationOutput(
        "q", IDS, IDS, [-0.5] * 5000, no_eos=False, version_start=0, version_end=0
    ),
    GroupResult(PROMPT, (RESULT,) * 50),
    agent.Question("q", ({"role": "user", "content": LONG},) * 50, (LONG,) * 50),
    CodeProblem("p", ((LONG, LONG),) * 50, LONG),
    agent.Tool("t", LONG, {"properties": {LONG: {"type": "string"}}}, len),
    Ragged(torch.tensor(IDS), torch.tensor(IDS)),
    LoggedEpisode("e", (TRAJECTORY,) * 50, LONG),
    trajpack.plan_micro_batches(IDS, capacity=5000),
    trajpack.plan_ranks(IDS, capacity=5000, num_ranks=2),
    agent.RolloutPolicy(),
]


@pytest.mark.parametrize("value", LARGE, ids=lambda value: type(value).__name__)
def test_a_repr_is_short(value):
    assert len(repr(value)) < 500
    assert repr(value).startswith(type(value).__name__)


def test_a_repr_of_few_values_can_be_evaluated():
    turn = trajpack.Turn([1, 2], [3], [-0.5], reward=1.0, fields={"x": [1]})
    trajectory = trajpack.Trajectory("a", [turn], group="g")
    assert eval(repr(turn), {"Turn": trajpack.Turn}) == turn
    assert repr(trajectory) == (
        "Trajectory(id='a', turns=(Turn(prompt_ids=[1, 2], ...)), group='g')"
    )


def test_a_repr_reads_nothing_from_a_device():
    turn = trajpack.Turn(torch.zeros(9, device="meta"), [3], [-0.5])
    assert "prompt_ids=<tensor [9] on meta>" in repr(turn)


def test_classes_of_large_values_have_a_repr_of_their_own():
    short = {type(value) for value in LARGE}
    for name, exported in EXPORTS.items():
        if not inspect.isclass(exported) or not dataclasses.is_dataclass(exported):
            continue
        if hasattr(exported.__repr__, "__wrapped__"):  # the one that dataclass makes
            kinds = " ".join(str(one.type) for one in dataclasses.fields(exported))
            assert exported in short or not re.search(r"Array|Ints|Sequence\[int|Tensor", kinds), (
                name
            )


@pytest.mark.parametrize("module", [trajpack, trajpack.agent])
def test_an_unknown_name_is_an_attribute_error(module):
    words = f"module '{module.__name__}' has no attribute 'unpacked'"
    with pytest.raises(AttributeError, match=words):
        module.unpacked  # noqa: B018
    assert not hasattr(module, "_private")
