"""``trajpack train``, with the real engine, agent and trainer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch

import trajpack
from tests.commands import command
from tests.commands.command import call, signal_before
from tests.support.chromium import needs_chromium, show
from tests.support.warm_programs import WarmPrograms
from trajpack import PackedBatch, Trajectory, Turn
from trajpack.agent.training.grpo import StepRecord
from trajpack.agent.training.policy_trainer import StepOutcome
from trajpack.commands.train import write_page

SMALL = ["--steps", "1", "--num-prompts", "2", "--group-size", "2", "--warm-up-steps", "2"]


refusal = partial(command.refusal, "train")


def test_a_training_ends_with_a_report_and_a_page(tmp_path: Path) -> None:
    out, num_threads = tmp_path / "new" / "train.html", torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)  # not the number that training sets
    try:
        done = call("train", *SMALL, "--out", out)
        assert torch.get_num_threads() == num_threads + 1
    finally:
        torch.set_num_threads(num_threads)
    assert done.status == 0, done.stderr
    assert "1 of 1 steps" in done.stdout
    assert "right answers" in done.stdout
    assert f"curves     {out}\n" in done.stdout
    assert "trajpack: warm-up 2 of 2, loss" in done.stderr
    assert "trajpack: step 1 of 1, " in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    page = out.read_text()
    assert page.startswith("<!doctype html>")
    assert "1 steps" not in page  # no row is left out: the table is the report's
    assert "generated tokens/s" in page
    assert len(page) < 1_000_000
    assert f"trajpack {trajpack.__version__}" in page


@needs_chromium
@pytest.mark.parametrize("width", [1280, 420])
def test_the_page_draws_curves_and_conversations(tmp_path: Path, width: int) -> None:
    def record(step: int, success: float) -> StepRecord:
        outcome = StepOutcome(0.5, 1.0, 0.25, 2, 0.5, 0.125, 1, 10, 1e-7)
        turns = [Turn([1, 2], [3], [-0.1], -1.0), Turn([1, 2, 3, 4], [5], [-0.2], 1.0)]
        examples = (Trajectory("a", turns),)
        return StepRecord(step, success, success, 0.5, 100, 40, 2.0, outcome, examples)

    records = [record(step, step / 10) for step in range(1, 11)]
    page = tmp_path / "train.html"
    text = write_page(records, "<b>sums", decode=lambda ids: f"<{ids}>", run=[("seed", "<7>")])
    page.write_text(text, encoding="utf-8")
    shown = show(page, tmp_path, width=width)
    assert not shown.console
    assert shown.overflow <= 0
    dom = shown.dom.split("<script")[0]
    assert "10% of the answers were right in the first step, 80% in the last 5" in dom
    assert dom.count("<svg") == 6
    for step in range(1, 11):
        assert f"<title>step {step}: of all answers {10 * step} %</title>" in dom
        assert f"<title>step {step}: tokens 20</title>" in dom
    assert dom.count(", wrong<") == dom.count(", right<") == 2
    assert "&lt;[1, 2]&gt;" in dom
    assert "&lt;[4]&gt;" in dom


@pytest.mark.parametrize("layout", ["turns", "tree"])
def test_a_training_in_another_layout(layout: str, tmp_path: Path) -> None:
    out, file = tmp_path / "train.html", tmp_path / "new" / "batch.safetensors"
    done = call("train", *SMALL, "--layout", layout, "--out", out, "--batch", file)
    assert done.status == 0, done.stderr
    assert "1 of 1 steps" in done.stdout
    assert out.exists()
    batch = PackedBatch.load(file)
    assert batch.advantages is not None
    assert len(batch.ids) == 4
    assert "<|assistant|>" in call("inspect", file).stdout  # the tokenizer is beside it


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "0"], "--steps must be a whole number from 1 to 10,000, got '0'"),
        (["--group-size", "1"], "--group-size must be a whole number from 2 to 1,000, got '1'"),
        (["--turns", "99"], "--turns must be a whole number from 1 to 16, got '99'"),
        (["--learning-rate", "nan"], "--learning-rate must be a number above 0, got 'nan'"),
        (["--layout", "rows"], "--layout must be merged, turns or tree, got 'rows'"),
        (["--seed", "-1"], "--seed must be a whole number from 0 to 4,294,967,295, got '-1'"),
        (["--out", "train.png"], "--out must be an .html file, got train.png"),
        (["--batch", "batch.txt"], "--batch must be a .safetensors file, got batch.txt"),
        (["--stepps", "2"], "No such option: --stepps"),
    ],
)
def test_wrong_options_are_refused_at_once(arguments: list[str], said: str) -> None:
    assert said in refusal(*arguments)


def test_a_page_is_replaced_only_if_asked_to(tmp_path: Path) -> None:
    out = tmp_path / "train.html"
    out.write_text("last week's curves")
    assert f"{out} exists; --force replaces it" in refusal(*SMALL, "--out", out)
    assert out.read_text() == "last week's curves"
    assert call("train", *SMALL, "--force", "--out", out).status == 0
    assert out.read_text().startswith("<!doctype html>")


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_trained(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    line = refusal(*SMALL, "--out", tmp_path / "file" / "train.html")
    assert f"cannot write {tmp_path / 'file'}: " in line


def test_a_page_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_text", full)
    done = call("train", *SMALL, "--out", tmp_path / "train.html")
    assert done.status == 2
    expected = f"error: cannot write {tmp_path / 'train.html'}: No space left on device\n"
    assert done.stderr.endswith(expected)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_after_the_last_step_waits_for_the_page(
    number: signal.Signals, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_before(monkeypatch, "commands.train.write_page", number)
    done = call("train", *SMALL, "--out", tmp_path / "train.html")
    assert done.status == status
    assert "writing what there is; Ctrl-C again to give it up" in done.stderr
    assert (tmp_path / "train.html").exists()


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize(
    ("name", "numbers"),
    [("Training", [signal.SIGINT]), ("write_page", [signal.SIGINT, signal.SIGINT])],
)
def test_a_signal_too_early_or_a_second_one_writes_nothing(
    name: str, numbers: list[signal.Signals], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signal_before(monkeypatch, f"commands.train.{name}", *numbers)
    done = call("train", *SMALL, "--out", tmp_path / "train.html")
    assert done.status == 130
    assert done.stderr.endswith("trajpack: interrupted: no page was written\n")
    assert not list(tmp_path.iterdir())


def test_one_interrupt_leaves_the_curves_of_the_steps_so_far(
    tmp_path: Path, warm_programs: WarmPrograms
) -> None:
    out = tmp_path / "train.html"
    options = ["--steps", "5000", *SMALL[2:], "--out", str(out)]
    with subprocess.Popen(
        [*warm_programs.command("trajpack"), "train", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stderr is not None
        said = ""
        while not re.search(r"step [1-9]\d* of 5,000", said):
            line = child.stderr.readline()
            assert line, said
            said += line
        child.send_signal(signal.SIGINT)
        stdout, stderr = child.communicate(timeout=60)
    assert child.returncode == 130, stderr
    assert "stopping" in stderr
    assert "Traceback" not in stderr
    assert re.search(r"[1-9]\d* of 5,000 steps", stdout)
    assert out.exists()
