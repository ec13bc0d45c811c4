"""Help, and what a failed start leaves."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from tests.commands.command import call, refusal
from trajpack.agent.rollout.settings import RolloutSettings
from trajpack.commands.app import OPTIONS

COMMANDS = ("convert", "inspect", "plan", "replay", "report", "rollout")


def test_help_is_short_and_no_summary_of_a_command_is_cut() -> None:
    for command in COMMANDS:
        done = call(command, "-h")
        assert (done.status, done.stdout.split()[:3]) == (0, ["Usage:", "trajpack", command])
    listed = call("--help").stdout.partition("Commands:")[2]
    for command in COMMANDS:
        assert re.search(rf"^  {command} +[A-Z].*\.$", listed, re.MULTILINE)
    assert "..." not in listed


def test_each_setting_is_an_option_by_the_name_that_errors_give_it() -> None:
    text = call("rollout", "--help").stdout
    for field in dataclasses.fields(RolloutSettings):
        option = OPTIONS.get(field.name, f"--{field.name.replace('_', '-')}")
        assert re.search(rf"^  {option}\b", text, re.MULTILINE), field.name


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
