"""``trajpack rollout --log`` and ``trajpack replay``, with real crashes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import threading
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from safetensors import safe_open

from tests.commands.command import call, refusal
from tests.support.warm_programs import WarmPrograms
from trajpack import Trajectory, Turn, load
from trajpack.agent.errors import EpisodeCancelledError, EpisodeError
from trajpack.agent.rollout.files import RolloutLog
from trajpack.agent.rollout.rollout import Rollout, prepare_rollout
from trajpack.agent.rollout.settings import RolloutSettings
from trajpack.agent.runner.runner import EpisodeResult
from trajpack.packing.trajectory_log import log as trajectory_log
from trajpack.packing.trajectory_log.log import TrajectoryLog

pytestmark = pytest.mark.usefixtures("warm_judge")
torch.set_num_threads(1)
SMALL = ["--num-prompts", 2, "--turns", 2, "--max-new-tokens", 8, "--concurrency", 1]
EPISODES = [f"sum-{prompt}@{sample}" for prompt in (0, 1) for sample in (0, 1)]


@pytest.fixture(scope="module")
def prepared() -> Rollout:
    return prepare_rollout(
        RolloutSettings(num_prompts=2, num_turns=2, max_new_tokens=8, concurrency=1)
    )


Tokens = list[tuple[list[int], list[int], list[float]]]


def tokens(trajectory: Trajectory) -> Tokens:
    return [
        (list(turn.prompt_ids), list(turn.completion_ids), list(turn.completion_logprobs))
        for turn in trajectory.turns
    ]


def batch_of(file: Path) -> dict[str, Tokens]:
    return {one.id: tokens(one) for one in load(file).unpack()}


def contents(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with safe_open(file, "pt") as opened:
        names = list(opened.keys())
        return {name: opened.get_tensor(name) for name in names}, opened.metadata()


def logged(folder: Path) -> dict[str, Tokens]:
    with TrajectoryLog.open(folder, mode="read") as log:
        return {one.id: tokens(one) for episode in log.replay() for one in episode.trajectories}


def writer_of(folder: Path) -> int:
    """Return the id of the process that has the log in a folder open to append."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if descriptor.readlink() == folder / "writer.lock":
                return int(descriptor.parts[2])
    raise AssertionError("no process writes the log")


def test_a_rollout_that_was_killed_goes_on_without_doing_anything_twice(
    tmp_path: Path, warm_programs: WarmPrograms
) -> None:
    out, folder = tmp_path / "batch.safetensors", tmp_path / "log"
    options = ["--num-prompts", "60", "--turns", "2", "--max-new-tokens", "8", "--log", folder]
    program = warm_programs.command("trajpack")
    command = [*program, "rollout", "--out", out, *options, "--concurrency", "1"]
    with subprocess.Popen(
        [*command, "--metrics-port", "0"], stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr is not None
        said = ""
        while not (url := re.search(r"metrics at (http://127\.0\.0\.1:\d+/metrics)", said)):
            line = child.stderr.readline()
            assert line, said
            said += line
        while not (folder / "log.sqlite").exists() or not logged(folder):
            assert child.poll() is None, child.stderr.read()
            time.sleep(0.01)
        with urlopen(url[1]) as page:
            served = page.read().decode()
        # not the child, which stands between: it ends when the program has
        os.kill(writer_of(folder), signal.SIGKILL)
    assert float(re.search(r"^trajpack_turns_total (\S+)$", served, re.M)[1]) > 0  # type: ignore[index]
    before = logged(folder)
    assert 0 < len(before) < 120
    assert not out.exists()
    done = call("rollout", "--out", out, *options)
    assert done.status == 0, done.stderr
    assert f"{folder} has {len(before)} of 120 episodes: going on from there" in done.stderr
    assert f"120 finished, 0 of them failed, {len(before)} earlier" in done.stdout
    after = batch_of(out)
    assert len(after) == 120
    assert after == logged(folder)
    assert {name: after[name] for name in before} == before
    answers = {path.stem: path for path in (tmp_path / "batch.answers").rglob("*.jsonl")}
    for name in before:
        assert len(answers[name].read_text().splitlines()) == len(before[name]), "done twice"


def test_a_finished_rollout_is_packed_again_and_nothing_is_generated(tmp_path: Path) -> None:
    out, again, folder = (tmp_path / name for name in ("a.safetensors", "b.safetensors", "log"))
    assert call("rollout", *SMALL, "--out", out, "--log", folder).status == 0
    done = call("rollout", *SMALL, "--out", again, "--log", folder)
    assert f"{folder} has 4 of 4 episodes" in done.stderr
    assert batch_of(again) == batch_of(out)
    replayed = tmp_path / "new" / "c.safetensors"
    done = call("replay", folder, "--out", replayed)
    assert (done.status, done.stderr) == (0, "")
    (ours, meta), (theirs, their_meta) = contents(replayed), contents(out)
    assert meta == their_meta
    assert ours.keys() == theirs.keys()  # one at a time, they finished in the prompts' order
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert "4, 0 of them failed" in done.stdout
    assert "tokenizer" not in call("inspect", replayed).stderr
    assert (tmp_path / "new" / "c.tokenizer" / "tokenizer_config.json").is_file()
    turns = call("replay", folder, "--out", replayed, "--force", "--layout", "turns")
    assert "layout turns" in turns.stdout


def test_a_continued_rollout_draws_other_samples(prepared: Rollout, tmp_path: Path) -> None:
    async def first() -> EpisodeResult:
        async with prepared.episodes() as stream:
            return await anext(stream)

    result = asyncio.run(first())
    assert result.qid == EPISODES[0]
    with RolloutLog(tmp_path / "log", prepared) as log:
        log.record(result)
    out = tmp_path / "batch.safetensors"
    assert call("rollout", *SMALL, "--out", out, "--log", tmp_path / "log").status == 0
    batch = batch_of(out)
    assert batch[EPISODES[0]] == tokens(result.trajectories[0])
    assert batch[EPISODES[0]][0][0] == batch[EPISODES[1]][0][0]  # the same prompt
    assert batch[EPISODES[0]][0][1] != batch[EPISODES[1]][0][1]


def test_failed_episodes_run_again_and_cancelled_ones_are_not_logged(
    prepared: Rollout, tmp_path: Path
) -> None:
    prompt, folder = prepared.prompts[0], tmp_path / "log"
    escape = "worse\x1b[2J"
    with RolloutLog(folder, prepared) as log:
        log.record(EpisodeResult(prompt, (), EpisodeError(EPISODES[0], escape)))
        log.record(EpisodeResult(prompt, (), EpisodeCancelledError(EPISODES[1], "stop"), sample=1))
    done = call("replay", folder)
    assert done.status == 0
    assert "1, 1 of them failed" in done.stdout
    assert "worse" in done.stdout
    assert "\x1b" not in done.stdout
    assert refusal("replay", folder, "--out", tmp_path / "none.safetensors").endswith(
        "has no trajectories; no batch was written"
    )
    out = tmp_path / "batch.safetensors"
    assert call("rollout", *SMALL, "--out", out, "--log", folder).status == 0
    with TrajectoryLog.open(folder, mode="read") as read:
        assert (sorted(read.finished), read.failed) == (EPISODES, frozenset())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (["--seed", 1], "seed was 0, now it is 1"),
        (["--group-size", 3], "group_size was 2, now it is 3"),
        (["--num-prompts", 3], "num_prompts was 2, now it is 3"),
        (["--turn-discount", 0.5], "turn_discount was 1.0, now it is 0.5"),
    ],
)
def test_another_rollout_does_not_go_on_in_the_log(
    change: list[object], reason: str, prepared: Rollout, tmp_path: Path
) -> None:
    with RolloutLog(tmp_path / "log", prepared):
        pass
    out = tmp_path / "batch.safetensors"
    said = refusal("rollout", *SMALL, *change, "--out", out, "--log", tmp_path / "log")
    assert said.endswith(f"is the log of another rollout: {reason}")


def test_a_log_that_cannot_be_used_is_refused_in_one_line(
    prepared: Rollout, tmp_path: Path
) -> None:
    folder = tmp_path / "log"
    rollout = ["rollout", *SMALL, "--out", tmp_path / "batch.safetensors", "--log", folder]
    with RolloutLog(folder, prepared):
        assert "another writer has the log open" in refusal(*rollout)
    for content in ("[", "[]"):
        (folder / "rollout.json").write_text(content)
        assert "rollout.json is not what a rollout wrote" in refusal(*rollout)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    assert "thesis.txt" in refusal(*rollout[:-1], tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.txt"]
    assert "holds no trajectory log" in refusal("replay", tmp_path / "nowhere")
    (folder / "log.sqlite").write_bytes((folder / "log.sqlite").read_bytes()[:20_000])
    assert "log.sqlite is damaged" in refusal("replay", folder)
    assert "log.sqlite is damaged" in refusal(*rollout)


def test_a_rollout_waits_for_a_reader_that_was_stopped(
    prepared: Rollout, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(trajectory_log, "_FLUSH_WAIT_S", 0.05)
    failed = EpisodeResult(prepared.prompts[0], (), EpisodeError(EPISODES[0], "lost"))
    with RolloutLog(tmp_path, prepared) as log:
        reader = sqlite3.connect(tmp_path / "log.sqlite", check_same_thread=False)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM log").fetchall()
        log.record(failed)
        going_on = threading.Timer(0.3, reader.execute, ["COMMIT"])
        going_on.start()
    going_on.join()
    reader.close()
    assert "waiting for a reader of" in caplog.text
    with TrajectoryLog.open(tmp_path, mode="read") as read:
        assert read.failed == {EPISODES[0]}


def test_a_log_of_a_program_is_replayed_without_a_tokenizer(tmp_path: Path) -> None:
    folder, out = tmp_path / "log", tmp_path / "batch.safetensors"
    trajectory = Trajectory("q", [Turn([1], [2], [-1.0]), Turn([1, 2, 3], [4], [-0.5])])
    with TrajectoryLog.open(folder) as log:
        log.append("q", [trajectory])
    assert call("replay", folder, "--out", out).status == 0
    assert batch_of(out) == {"q": tokens(trajectory)}
    done = call("replay", folder, "--out", out, "--force", "--layout", "tree")
    assert "4 nodes, for 4 tokens merged or 6 as turns" in " ".join(done.stdout.split())
    assert batch_of(out) == {"q": tokens(trajectory)}
    (tmp_path / "batch.tokenizer").mkdir()
    (tmp_path / "batch.tokenizer" / "tokenizer_config.json").write_text("{}")
    said = refusal("replay", folder, "--out", out, "--force")
    assert said.endswith("is that of another batch")
