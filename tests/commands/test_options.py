"""What a person meets first: help, completion, wrong options and places that are taken."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands.command import call, refusal
from trajpack.agent.rollout.settings import RolloutSettings
from trajpack.commands.app import OPTIONS

COMMANDS = ("convert", "inspect", "plan", "replay", "report", "rollout")
FRESH = [sys.executable, "-P", "-c", "from trajpack.cli import main; main()"]
WITHOUT_TORCH = """
import sys
from trajpack.cli import run
for line in sys.stdin:
    run(line.split())
loaded = {"torch", "numpy", "transformers", "rich"} & {*sys.modules}
assert not loaded, loaded
"""


def test_help_and_refusals_load_neither_torch_nor_numpy() -> None:
    lines = [
        "--help", "--version", "-h", "", "rolout", "rollout --turns two",
        "rollout --dataset nope.jsonl", "rollout --engine vllm", "inspect nope.safetensors",
        *(f"{command} --help" for command in COMMANDS),
    ]  # fmt: skip
    subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_TORCH],
        input="\n".join(lines), check=True, capture_output=True, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_short_help_is_help(command: tuple[str, ...]) -> None:
    done = call(*command, "-h")
    assert done == call(*command, "--help")
    assert done.status == 0
    assert done.stdout.startswith("Usage: trajpack")


def test_no_summary_of_a_command_is_cut_short() -> None:
    listed = call("--help").stdout.partition("Commands:")[2]
    for command in COMMANDS:
        assert re.search(rf"^  {command} +[A-Z].*\.$", listed, re.MULTILINE)
    assert "..." not in listed


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_in_plain_words(command: str) -> None:
    text = call(command, "--help").stdout
    assert not re.search(r"<=|int range|<int>|<float>|<str>", text)
    for option in re.findall(r"^  (?:-h, )?(--[\w-]+)", text, re.MULTILINE):
        assert re.search(rf"{option}\b[^\n]*\n?\s+[A-Za-z]", text), option


def test_each_setting_is_an_option_by_the_name_that_errors_give_it() -> None:
    text = call("rollout", "--help").stdout
    for field in dataclasses.fields(RolloutSettings):
        option = OPTIONS.get(field.name, f"--{field.name.replace('_', '-')}")
        assert re.search(rf"^  {option}\b", text, re.MULTILINE), field.name


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("rollout --turns two", "--turns must be a whole number from 1 to 10,000,000, got 'two'"),
        ("rollout --turns 0", "--turns must be a whole number from 1 to 10,000,000, got '0'"),
        ("rollout --layout packed", "--layout must be merged, turns or tree, got 'packed'"),
        ("rollout --engine llama", "--engine must be transformers, sglang or vllm, got 'llama'"),
        ("rollout --attempts 0", "--attempts must be a whole number from 1"),
        ("rollout --ray -1", "--ray must be a whole number from 0 to 10,000,000, got '-1'"),
        ("rollout --turn-discount big", "--turn-discount must be a finite number, got 'big'"),
        ("rollout --metrics-port 65536", "--metrics-port must be a whole number from 0 to 65,535"),
        ("rollout --seed 4294967296", "--seed must be a whole number from 0 to 4,294,967,295"),
        ("rollout --concurency 3", "No such option: --concurency (Possible options: --conc"),
        ("rollout --out", "Option '--out' requires an argument"),
        ("inspect --width 5 x", "--width must be a whole number from 20 to 10,000, got '5'"),
        ("inspect", "Missing argument 'FILE'"),
        ("replay", "Missing argument 'FOLDER'"),
        ("rolout", "No such command 'rolout'. Did you mean 'rollout'? see trajpack --help"),
    ],
)
def test_a_wrong_option_is_named_as_it_was_written(arguments: str, said: str) -> None:
    line = refusal(*arguments.split())
    assert said in line
    assert re.search(r"[;?] see trajpack( rollout| inspect| replay)? --help$", line)
    assert not re.search(r"Value error|Input should|num_|max_", line)


@pytest.mark.parametrize(
    "options",
    [
        ["--dataset", "nope.jsonl"],
        ["--dataset", "."],
        ["--engine", "vllm"],
        ["--server", "http://a:1"],
        ["--out", "there.safetensors"],
    ],
)
def test_what_can_be_seen_at_once_is_said_before_anything_is_loaded(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.safetensors").touch()
    done = call("rollout", *options)
    assert done.status == 2
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there.safetensors"]


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("trajpack ", [*COMMANDS]),
        ("trajpack ro", ["rollout"]),
        ("trajpack rollout --max", ["--max-new-tokens"]),
        ("trajpack rollout --layout t", ["turns", "tree"]),
        ("trajpack rollout --engine ", ["transformers", "sglang", "vllm"]),
    ],
)
def test_a_shell_completes(line: str, offered: list[str]) -> None:
    environment = os.environ | {
        "_TRAJPACK_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split(" ")) - 1),
    }
    done = subprocess.run(FRESH, env=environment, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.split()) == sorted(offered)


def test_completion_of_a_shell_can_be_shown() -> None:
    environment = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [*FRESH, "--show-completion", "bash"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "_TRAJPACK_COMPLETE=complete_bash" in done.stdout


def test_a_failed_start_leaves_no_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("prometheus_client.start_http_server", full)
    out = tmp_path / "new" / "deep" / "batch.safetensors"
    line = refusal("rollout", "--num-prompts", 1, "--metrics-port", 0, "--out", out)
    assert "cannot serve metrics at port 0: No space left on device" in line
    assert not list(tmp_path.iterdir())
