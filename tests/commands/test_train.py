"""``trajpack train``, with the real engine, agent and trainer."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.commands import command
from tests.commands.command import call, signal_before
from tests.support.warm_programs import WarmPrograms

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


@pytest.mark.parametrize("layout", ["turns", "tree"])
def test_a_training_in_another_layout(layout: str, tmp_path: Path) -> None:
    out = tmp_path / "train.html"
    done = call("train", *SMALL, "--layout", layout, "--out", out)
    assert done.status == 0, done.stderr
    assert "1 of 1 steps" in done.stdout
    assert out.exists()


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


def test_a_missing_package_is_named_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    line = refusal(*SMALL, "--out", tmp_path / "train.html")
    assert "plotly" in line
    assert line.endswith("install trajpack[agent]")


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
