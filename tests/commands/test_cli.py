"""The command, with the real engine, environment and tiny model."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import trajpack
from tests.commands.command import Done, call, refusal, signal_before
from tests.support.warm_programs import WarmPrograms
from trajpack import PackedBatch, Trajectory, load, load_tree
from trajpack.agent.agents.answer_log import log_answers
from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.environments.math_verify import MathVerifyEnvironment
from trajpack.agent.errors import EngineEndedError
from trajpack.agent.protocols import Prompt
from trajpack.agent.rollout.settings import RolloutSettings
from trajpack.agent.runner import run
from trajpack.agent.runner.runner import Progress
from trajpack.cli import main
from trajpack.commands import rollout

pytestmark = pytest.mark.usefixtures("warm_judge")
torch.set_num_threads(1)
OPTIONS = {
    "max_attempts": "--attempts",
    "num_turns": "--turns",
    "num_workers": "--ray",
    "servers": "--server",
}
SMALL = ["--num-prompts", "2", "--turns", "2", "--max-new-tokens", "8", "--concurrency", "1"]


def tokens(batch: PackedBatch) -> list[tuple[str, list[int], list[int]]]:
    return [
        (trajectory.id, list(turn.prompt_ids), list(turn.completion_ids))
        for trajectory in batch.unpack()
        for turn in trajectory.turns
    ]


@pytest.fixture(scope="module")
def rolled_out(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """Return the file and what was said; the default questions need no reasoning-gym."""
    out = tmp_path_factory.mktemp("rollout") / "batch.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "reasoning_gym", None)
        done = call("rollout", *SMALL, "--out", out)
    assert done.status == 0, done.stderr
    return out, done


@pytest.fixture(scope="module")
def batch_file(rolled_out: tuple[Path, Done]) -> Path:
    return rolled_out[0]


def test_rollout_packs_every_sample_of_every_prompt_in_order(batch_file: Path) -> None:
    trajectories = load(batch_file).unpack()
    prompts = ["sum-0", "sum-1"]
    assert [one.id for one in trajectories] == [f"{p}@{k}" for p in prompts for k in range(2)]
    assert [one.group for one in trajectories] == [p for p in prompts for _ in range(2)]
    for trajectory in trajectories:
        first, second = trajectory.turns
        assert 1 <= len(first.completion_ids) <= 8
        seen = [*first.prompt_ids, *first.completion_ids]
        assert list(second.prompt_ids)[: len(seen)] == seen


def test_rollout_reports_its_results_without_control_characters(
    rolled_out: tuple[Path, Done],
) -> None:
    path, done = rolled_out
    for text in done[1:]:
        assert all(char.isprintable() or char == "\n" for char in text)
    ended = r"episodes 4 of 4, 8 turns, [\d,]+ tokens/s, \d+% right, 0:\d\d\n"
    assert re.search(ended, done.stderr)
    batch = load(path)
    num_as_turns = sum(len(prompt) + len(completion) for _, prompt, completion in tokens(batch))
    saved = f"of the tokens: {batch.num_tokens:,} in place of {num_as_turns:,}, turn by turn"
    assert saved in " ".join(done.stdout.split())
    assert "4 finished, 0 of them failed" in done.stdout
    assert "random weights" in done.stdout
    for suffix in (".safetensors", ".tokenizer", ".answers"):
        assert f"{path.with_suffix(suffix)}\n" in done.stdout


def test_the_seed_decides_every_token_of_a_rollout_one_at_a_time(
    batch_file: Path, tmp_path: Path
) -> None:
    again, other = tmp_path / "again.safetensors", tmp_path / "other.safetensors"
    for out, seed in ((again, 0), (other, 1)):
        assert call("rollout", *SMALL, "--out", out, "--seed", seed).status == 0
    first, second = load(batch_file), load(again)
    assert tokens(first) == tokens(second)
    assert torch.equal(first.rollout_logprobs, second.rollout_logprobs)
    assert tokens(first) != tokens(load(other))


def test_a_tree_is_saved_as_merged_and_reported(batch_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "tree.safetensors"
    done = call("rollout", *SMALL, "--layout", "tree", "--out", out)
    assert done.status == 0, done.stderr
    batch, merged = load(out), load(batch_file)
    assert (batch.layout, tokens(batch)) == ("merged", tokens(merged))
    assert torch.equal(batch.rollout_logprobs, merged.rollout_logprobs)
    tree = load_tree(out)
    assert tree.num_nodes < batch.num_tokens
    said = " ".join(done.stdout.split())
    assert f"{tree.num_nodes:,} nodes" in said
    assert "nodes" not in call("rollout", *SMALL, "--force", "--out", out).stdout
    assert f"{tree.num_nodes:,} nodes" in call("inspect", out, "--sequences", 0).stdout


def test_outside_text_is_escaped_and_never_markup(tmp_path: Path) -> None:
    evil, out = tmp_path / "evil.jsonl", tmp_path / "evil.safetensors"
    prompt = "[bold]x[/bold] \x1b[2J :smile: [/]"
    line = {"id": "[red]\x1b[31m\u202e", "prompt": prompt, "solutions": ["2"]}
    evil.write_text(json.dumps(line))
    done = call("rollout", *SMALL, "--dataset", evil, "--out", out)
    assert done.status == 0
    assert "has 1 question, fewer than 2" in done.stderr
    shown = call("inspect", out).stdout
    assert not {"\x1b", "\u202e"} & {*done.stdout, *done.stderr, *shown}
    assert r"sequence 0: [red]\x1b[31m\u202e@0" in shown
    assert r"[bold]x[/bold] \x1b[2J :smile: [/]" in shown


def test_a_full_disk_leaves_the_old_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "batch.safetensors"
    out.write_text("what was there")
    monkeypatch.setattr(os, "fsync", fsync)
    line = refusal("rollout", *SMALL, "--force", "--out", out)
    assert line.endswith(f"cannot write {out}: No space left on device")
    assert out.read_text() == "what was there"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["batch.answers", out.name]


def test_failures_are_reported_beside_the_rest_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, ill = MathVerifyEnvironment.step, {"sum-0@1"}

    async def step(self: MathVerifyEnvironment, action: Any) -> Any:
        if not ill or action[0] in ill:
            raise RuntimeError("the judge is ill")
        return await honest(self, action)

    monkeypatch.setattr(MathVerifyEnvironment, "step", step)
    out = tmp_path / "batch.safetensors"
    done = call("rollout", *SMALL, "--out", out)
    assert done.status == 0
    assert load(out).ids == ("sum-0@0", "sum-1@0", "sum-1@1")
    assert "4 finished, 1 of them failed" in done.stdout
    assert "the judge is ill" in " ".join(done.stdout.replace("│", " ").split())
    ill.clear()
    line = refusal("rollout", *SMALL, "--out", tmp_path / "none.safetensors")
    assert re.search(r"all 4 episodes failed, .*the judge is ill.*; no batch was written$", line)
    assert not (tmp_path / "none.safetensors").exists()


def test_a_kind_of_warning_is_one_line_and_a_silence_is_said_each_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    handler = rollout._FirstOfEachKind()
    for name in (log_answers.__module__, run.__name__):
        for number in (1, 2):
            level = logging.WARNING
            handler.emit(logging.LogRecord(name, level, "", 0, f"of {name} %d", (number,), None))
    said = [f"of {log_answers.__module__} 1", *(f"of {run.__name__} {k}" for k in (1, 2))]
    assert capsys.readouterr().err.splitlines() == [f"trajpack: {line}" for line in said]


def test_a_programming_error_is_not_dressed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(*_: object, **__: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(trajpack.TrajectoryBuffer, "pack", pack)
    with pytest.raises(ValueError, match="a bug"):
        call("rollout", *SMALL, "--out", tmp_path / "batch.safetensors")


def test_each_setting_and_sub_command_has_a_help_that_is_not_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert call().status == 2
    listed = call("--help").stdout
    assert "trajpack inspect demo/batch.safetensors" in listed
    listed = listed.partition("Commands:")[2]
    assert "..." not in listed
    for command in ("inspect", "plan", "replay", "report", "rollout"):
        assert re.search(rf"^  {command} +[A-Z].*\.$", listed, re.MULTILINE)
        done = call(command, "-h")
        assert (done.status, done.stdout.split()[:3]) == (0, ["Usage:", "trajpack", command])
    text = call("rollout", "--help").stdout
    for field in dataclasses.fields(RolloutSettings):
        option = OPTIONS.get(field.name, f"--{field.name.replace('_', '-')}")
        assert re.search(rf"^  {option}\b", text, re.MULTILINE), field.name
    monkeypatch.setattr(sys, "argv", ["trajpack", "--version"])
    with redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit) as exit:
        main()
    assert (exit.value.code, said.getvalue()) == (0, "trajpack 0.1.0\n")


LAST = Progress(
    num_finished=3, num_failed=1, num_turns=5, num_kept_turns=4, num_rewarded_turns=1,
    num_tokens=5000, elapsed_s=2.0,
)  # fmt: skip


@pytest.mark.parametrize("force_terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(
    force_terminal: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(file=io.StringIO(), force_terminal=force_terminal, width=120)
    first = Progress(num_finished=1, num_turns=2, num_tokens=50, elapsed_s=1.0)
    board = rollout.EpisodeBoard(3, console)
    with board.bar:
        for progress in (first, first, LAST):
            board.update(progress)
    assert board.progress is LAST
    assert isinstance(console.file, io.StringIO)
    drawn, lines = console.file.getvalue(), capsys.readouterr().err.splitlines()
    last = "episodes 3 of 3, 5 turns, 2,500 tokens/s, 25% right, 1 failed"
    if force_terminal:
        assert last in drawn
        assert "100%" in drawn
        assert not lines
    else:
        assert lines == [
            "trajpack: episodes 1 of 3, 2 turns, 50 tokens/s, 0% right, 0:01",
            f"trajpack: {last}, 0:02",
        ]
        assert not drawn.strip()


@pytest.mark.parametrize("num_good", [0, 3])
def test_a_dead_engine_leaves_the_finished_episodes(
    num_good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = MathMultiTurnAgent.run
    qids: list[str] = []

    async def collect(self: MathMultiTurnAgent, prompt: Prompt, *rest: Any) -> list[Trajectory]:
        qids.append(prompt.id)
        if len(qids) > num_good:
            raise EngineEndedError(prompt.id, "generation has died: OutOfMemory")
        return await honest(self, prompt, *rest)

    monkeypatch.setattr(MathMultiTurnAgent, "run", collect)
    out = tmp_path / "batch.safetensors"
    done = call("rollout", *SMALL, "--num-prompts", "20", "--out", out)
    assert done.status == 2
    assert (len(load(out).ids) if out.exists() else 0) == num_good
    (line,) = (line for line in done.stderr.splitlines() if "error" in line)
    assert line == (
        "trajpack: error: generation has died: OutOfMemory: 1 of 40 episodes failed and "
        f"{39 - num_good} were never started; "
        f"{f'the batch is in {out}' if num_good else 'no batch was written'}"
    )


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    ("place", "number", "is_written"),
    [
        ("commands.rollout.prepare_rollout", signal.SIGTERM, False),
        ("TrajectoryBuffer.pack", signal.SIGINT, False),
        ("commands.rollout.report", signal.SIGTERM, True),
    ],
)
def test_a_signal_outside_the_episodes_ends_at_once_and_names_the_written_batch(
    place: str,
    number: signal.Signals,
    is_written: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal_before(monkeypatch, place, number)
    out = tmp_path / "batch.safetensors"
    done = call("rollout", *SMALL, "--out", out)
    assert done.status == 130
    said = f"the batch is in {out}" if is_written else "no batch was written"
    assert done.stderr.endswith(f"trajpack: interrupted: {said}\n")
    assert out.exists() == is_written
    assert out.with_suffix(".tokenizer").exists() == is_written
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("streams", "status"),
    [("> result 2> /dev/full", 0), ("2>&1 | head -1", 1), ("> /dev/full", 2)],
)
def test_a_rollout_survives_its_output(
    streams: str, status: int, tmp_path: Path, warm_programs: WarmPrograms
) -> None:
    program = shlex.join(warm_programs.command("trajpack"))
    options = shlex.join(["rollout", *SMALL, "--out", "batch.safetensors"])
    script = f"set -o pipefail; {program} {options} {streams}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == status, done.stderr
    assert len(load(tmp_path / "batch.safetensors").ids) == 4
    assert "Traceback" not in done.stderr + done.stdout
    if status == 2:
        assert done.stderr.endswith("trajpack: error: No space left on device\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_interrupt_leaves_a_valid_batch_of_the_finished_episodes(
    number: signal.Signals, tmp_path: Path, warm_programs: WarmPrograms
) -> None:
    out, said = tmp_path / "batch.safetensors", ""
    options = "--num-prompts", "500", "--max-new-tokens", "16", "--out", str(out)
    command = [*warm_programs.command("trajpack"), "rollout", *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stderr is not None
        while not re.search(r"episodes [1-9]\d* of 1,000", said):
            line = child.stderr.readline()
            assert line, said
            said += line
        child.send_signal(number)
        stdout, stderr = child.communicate(timeout=60)
    assert child.returncode == 130, stderr
    assert "stopped; saving what has finished; Ctrl-C again to give it up" in stderr
    assert "Traceback" not in stderr
    trajectories = load(out).unpack()
    assert 1 <= len(trajectories) < 1000
    assert f"{len(trajectories):,} of 1,000 episodes" in stdout
    assert all(len(trajectory.turns) == 3 for trajectory in trajectories)
