"""The command, with the real engine, environment and tiny model."""

from __future__ import annotations

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
from transformers import AutoTokenizer

import trajpack
from tests.commands.command import Done, call, refusal, signal_before
from tests.support.warm_programs import WarmPrograms
from trajpack import PackedBatch, Trajectory, Turn, load, load_tree, pack, save
from trajpack.agent.agents.answer_log import AnswerLog
from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.environments.math_verify import MathVerifyEnvironment
from trajpack.agent.environments.questions import arithmetic_questions
from trajpack.agent.errors import EngineEndedError
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import Prompt
from trajpack.agent.rollout.files import tokenizer_folder
from trajpack.agent.runner import silence
from trajpack.cli import main
from trajpack.commands import rollout

pytestmark = pytest.mark.usefixtures("warm_judge")
torch.set_num_threads(1)
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k_test.jsonl"
SMALL = ["--num-prompts", "2", "--turns", "2", "--max-new-tokens", "8", "--concurrency", "1"]


def tokens(batch: PackedBatch) -> list[tuple[str, list[int], list[int]]]:
    return [
        (trajectory.id, list(turn.prompt_ids), list(turn.completion_ids))
        for trajectory in batch.unpack()
        for turn in trajectory.turns
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rollout")


@pytest.fixture(scope="module")
def rolled_out(folder: Path) -> Done:
    return call("rollout", *SMALL, "--out", folder / "batch.safetensors")


@pytest.fixture(scope="module")
def batch_file(folder: Path, rolled_out: Done) -> Path:
    assert rolled_out.status == 0, rolled_out.stderr
    return folder / "batch.safetensors"


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


def test_rollout_leaves_the_answers_and_the_tokenizer_beside_the_batch(batch_file: Path) -> None:
    logs = sorted((batch_file.parent / "batch.answers" / "0").glob("*.jsonl"))
    assert [len(log.read_text().splitlines()) for log in logs] == [2] * 4
    assert (batch_file.parent / "batch.tokenizer" / "tokenizer.json").is_file()
    assert sorted(path.name for path in batch_file.parent.iterdir()) == [
        "batch.answers",
        "batch.safetensors",
        "batch.tokenizer",
    ]


def test_rollout_reports_its_results_without_control_characters(
    rolled_out: Done, batch_file: Path
) -> None:
    for text in rolled_out[1:]:
        assert all(char.isprintable() or char == "\n" for char in text)
    assert re.search(
        r"episodes 4 of 4, 8 turns, [\d,]+ tokens/s, \d+% right, 0:\d\d\n",
        rolled_out.stderr,
    )
    batch = load(batch_file)
    num_as_turns = sum(len(prompt) + len(completion) for _, prompt, completion in tokens(batch))
    saved = f"of the tokens: {batch.num_tokens:,} in place of {num_as_turns:,}, turn by turn"
    assert saved in " ".join(rolled_out.stdout.split())
    assert "4 finished, 0 of them failed" in rolled_out.stdout
    assert "random weights" in rolled_out.stdout
    for path in (
        batch_file,
        batch_file.with_suffix(".tokenizer"),
        batch_file.with_suffix(".answers"),
    ):
        assert f"{path}\n" in rolled_out.stdout


def test_the_seed_decides_every_token_of_a_rollout_one_at_a_time(
    batch_file: Path, tmp_path: Path
) -> None:
    again, other = tmp_path / "again.safetensors", tmp_path / "other.safetensors"
    assert call("rollout", *SMALL, "--out", again).status == 0
    assert call("rollout", *SMALL, "--out", other, "--seed", 1).status == 0
    first, second = load(batch_file), load(again)
    assert tokens(first) == tokens(second)
    assert torch.equal(first.rollout_logprobs, second.rollout_logprobs)
    assert tokens(first) != tokens(load(other))


def test_layout_and_discount_reach_the_batch(tmp_path: Path) -> None:
    out = tmp_path / "new" / "turns.safetensors"
    options = ["--layout", "turns", "--turn-discount", "0.5", "--group-size", "1"]
    assert call("rollout", *SMALL, *options, "--out", out).status == 0
    batch = load(out)
    assert (batch.layout, len(batch), len(batch.ids)) == ("turns", 4, 2)
    assert batch.turn_discounts == (0.5, 0.5)


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
    assert f"{tree.num_nodes:,} nodes in {len(tree)} tree" in said
    assert "0 of 4 continuations" in said
    assert "nodes in" not in call("rollout", *SMALL, "--force", "--out", out).stdout
    assert f"{tree.num_nodes:,} nodes in" in call("inspect", out, "--sequences", 0).stdout


def test_inspect_shows_where_prefixes_broke(batch_file: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(batch_file.with_suffix(".tokenizer"))
    thought, said, then = tokenizer.encode("hmm"), tokenizer.encode("yes"), tokenizer.encode("ok")
    assert (thought[0], said[0]) == (tokenizer.encode("h")[0], tokenizer.encode("y")[0])
    broken = [
        Turn([1, 2], [*thought, *said], [-0.5] * len(thought + said)),
        Turn([1, 2, *said, *then], [3], [-0.5]),
    ]
    others = [Turn([number], [3], [-0.5]) for number in range(10, 20)]
    path = tmp_path / "batch.safetensors"
    save(pack([Trajectory("evil\x1b[2J[red]", broken), Trajectory("b", others)]), path)
    text = " ".join(call("inspect", path, "--width", 200).stdout.split())
    assert f"evil\\x1b[2J[red]: at 2 came {said[0]}, turn 0 has {thought[0]}; " in text
    assert f"{len(thought)} stripped" in text
    assert "10 of 10 continuations: 9 left, 1 stripped" in text
    assert "2 more breaks" in text
    folder = batch_file.with_suffix(".tokenizer")
    options = ["--width", 200, "--sequences", 0, "--tokenizer", folder]
    decoded = call("inspect", path, *options).stdout
    assert f"came {said[0]} 'y', turn 0 has {thought[0]} 'h'" in decoded
    full = call("inspect", path, "--width", 200, "--sequences", 0, "--full").stdout
    assert "more breaks" not in full
    assert full.count("of b: at 0") == 9
    save(pack([Trajectory("a", broken)], "turns"), path)
    assert "continuation" not in call("inspect", path).stdout
    save(pack([]), path)
    assert "continuation" not in call("inspect", path).stdout


def test_inspect_shows_each_span_with_its_kind_and_text(batch_file: Path) -> None:
    done = call("inspect", batch_file, "--sequences", 1, "--width", 100)
    assert done.status == 0
    assert not done.stderr
    assert "\x1b" not in done.stdout
    assert "4 in 2 groups" in done.stdout
    assert "sequence 0: sum-0@0 of group sum-0" in done.stdout
    assert "3 more sequences; --sequences 4 shows all" in done.stdout
    kinds = re.findall(r"^│ +(prompt|observation|generated) ", done.stdout, re.MULTILINE)
    assert kinds == ["prompt", "generated", "observation", "generated"]
    assert f"{arithmetic_questions(2, seed=0)[0].text}<|im_end|>" in done.stdout
    assert re.search(r"turn 1 +reward -?1, return -?1, ", done.stdout)


def test_inspect_without_a_tokenizer_shows_ids_in_full_if_asked(tmp_path: Path) -> None:
    path = tmp_path / "batch.safetensors"
    save(pack([Trajectory("a", [Turn(list(range(101, 600)), [103], [-0.5])])]), path)
    done = call("inspect", path)
    assert "101 102" in done.stdout
    assert "token ids" in done.stdout
    assert "tokens ...]" in done.stdout
    assert "tokens ...]" not in call("inspect", path, "--full").stdout


def test_inspect_warns_of_the_tokenizer_of_another_model(batch_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "batch.safetensors"
    save(pack([Trajectory("a", [Turn([1, 90_000], [3], [-0.5])])]), path)
    done = call("inspect", path, "--tokenizer", batch_file.with_suffix(".tokenizer"))
    assert done.status == 0
    assert "1 token not in the vocabulary" in done.stderr


def test_outside_text_is_escaped_and_never_markup(tmp_path: Path) -> None:
    line = {
        "id": "[red]\x1b[31m\u202e",
        "prompt": "[bold]x[/bold] \x1b[2J :smile: [/]",
        "solutions": ["2"],
    }
    (tmp_path / "evil.jsonl").write_text(json.dumps(line))
    out = tmp_path / "evil.safetensors"
    done = call("rollout", *SMALL, "--dataset", tmp_path / "evil.jsonl", "--out", out)
    assert done.status == 0
    assert "has 1 question, fewer than 2" in done.stderr
    shown = call("inspect", out).stdout
    for text in (*done[1:], shown):
        assert "\x1b" not in text
        assert "\u202e" not in text
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


def test_a_kind_of_warning_is_one_line_and_a_silence_is_said_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with rollout._summarised_warnings():
        for number in range(3):
            logging.getLogger(AnswerLog.__module__).warning("cannot write %d", number)
        logging.getLogger(silence.__name__).warning("nothing has happened for %d s", 60)
        assert capsys.readouterr().err == "trajpack: nothing has happened for 60 s\n"
    assert capsys.readouterr().err == "trajpack: cannot write 0 (and 2 more like it)\n"


def test_a_programming_error_is_not_dressed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(*_: object, **__: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(trajpack.TrajectoryBuffer, "pack", pack)
    with pytest.raises(ValueError, match="a bug"):
        call("rollout", *SMALL, "--out", tmp_path / "batch.safetensors")


def test_rollout_runs_a_model_from_a_folder(batch_file: Path, tmp_path: Path) -> None:
    model, tokenizer = build_tiny_model()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    out = tmp_path / "batch.safetensors"
    done = call("rollout", *SMALL, "--model", tmp_path / "model", "--out", out)
    assert done.status == 0
    assert "random weights" not in done.stdout
    assert tokens(load(out)) == tokens(load(batch_file))


@pytest.mark.skipif(not GSM8K.is_file(), reason="needs the questions of GSM8K")
def test_rollout_asks_real_questions(tmp_path: Path) -> None:
    out = tmp_path / "batch.safetensors"
    options = ["--dataset", GSM8K, "--num-prompts", 4, "--group-size", 1, "--max-new-tokens", 8]
    done = call("rollout", *options, "--out", out)
    assert done.status == 0, done.stderr
    assert load(out).ids == tuple(f"gsm8k_test-{line}@0" for line in range(1, 5))
    assert "Janet" in call("inspect", out, "--sequences", 1).stdout


def test_help_and_version() -> None:
    assert call("--version") == (0, "trajpack 0.1.0\n", "")
    assert "trajpack inspect demo/batch.safetensors" in call("--help").stdout
    assert "dataset.to_json(FILE)" in call("rollout", "--help").stdout
    assert call().status == 2


def test_main_exits_with_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["trajpack", "--version"])
    with redirect_stdout(io.StringIO()), pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 0


def test_a_missing_package_that_is_imported_late_is_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    line = refusal("rollout", "--out", tmp_path / "batch.safetensors")
    assert "transformers" in line
    assert line.endswith("install trajpack[agent]")


def test_a_rollout_of_the_default_questions_needs_no_reasoning_gym(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert call("rollout", *SMALL, "--out", tmp_path / "batch.safetensors").status == 0


def end_engine_after(monkeypatch: pytest.MonkeyPatch, num_good: int) -> None:
    """Have the engine end after some episodes."""
    honest = MathMultiTurnAgent.collect_trajectory
    qids: list[str] = []

    async def collect(self: MathMultiTurnAgent, prompt: Prompt, *rest: Any) -> list[Trajectory]:
        qids.append(prompt.id)
        if len(qids) > num_good:
            raise EngineEndedError(prompt.id, "generation has died: OutOfMemory")
        return await honest(self, prompt, *rest)

    monkeypatch.setattr(MathMultiTurnAgent, "collect_trajectory", collect)


@pytest.mark.parametrize("num_good", [0, 3])
def test_a_dead_engine_leaves_the_finished_episodes(
    num_good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_engine_after(monkeypatch, num_good)
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


def test_values_are_shown_on_a_narrow_terminal(
    batch_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "turns: 8, longest" in call("inspect", batch_file, "--width", 30).stdout
    monkeypatch.setenv("COLUMNS", "30")
    assert "turns: 8, longest" in call("inspect", batch_file, "--sequences", 0).stdout


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
    signal_before(monkeypatch, place, number)
    out = tmp_path / "batch.safetensors"
    done = call("rollout", *SMALL, "--out", out)
    assert done.status == 130
    said = f"the batch is in {out}" if is_written else "no batch was written"
    assert done.stderr.endswith(f"trajpack: interrupted: {said}\n")
    assert out.exists() == is_written
    assert tokenizer_folder(out).exists() == is_written
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


FRESH = [sys.executable, "-P", "-c", "from trajpack.cli import main; main()"]


def shell(line: str, command: list[str], tmp_path: Path) -> Done:
    """Run a line of bash in which ``trajpack`` is the command."""
    script = f'trajpack() {{ {shlex.join(command)} "$@"; }}; set -o pipefail; {line}'
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    return Done(done.returncode, done.stdout, done.stderr)


ROLLOUT = "trajpack rollout --num-prompts 1 --turns 1 --max-new-tokens 8 --out batch.safetensors"


@pytest.mark.parametrize(
    ("streams", "status"),
    [("> result 2> /dev/full", 0), ("2>&1 | head -1", 1), ("> /dev/full", 2)],
)
def test_a_rollout_survives_its_output(
    streams: str, status: int, tmp_path: Path, warm_programs: WarmPrograms
) -> None:
    done = shell(f"{ROLLOUT} {streams}", warm_programs.command("trajpack"), tmp_path)
    assert done.status == status, done.stderr
    assert len(load(tmp_path / "batch.safetensors").ids) == 2
    assert "Traceback" not in done.stderr + done.stdout
    if status == 2:
        assert done.stderr.endswith("trajpack: error: No space left on device\n")


def interrupt(
    out: Path, command: list[str], after: str, number: signal.Signals = signal.SIGINT
) -> Done:
    """Run a long rollout in a process of its own and signal once it says ``after``."""
    options = "--num-prompts", "500", "--max-new-tokens", "16"
    with subprocess.Popen(
        [*command, "rollout", "--out", str(out), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stderr is not None
        said = ""
        while not re.search(after, said):
            line = child.stderr.readline()
            assert line, said
            said += line
        child.send_signal(number)
        stdout, stderr = child.communicate(timeout=60)
    return Done(child.returncode, stdout, said + stderr)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_interrupt_leaves_a_valid_batch_of_the_finished_episodes(
    number: signal.Signals, tmp_path: Path, warm_programs: WarmPrograms
) -> None:
    out = tmp_path / "batch.safetensors"
    command = warm_programs.command("trajpack")
    done = interrupt(out, command, after=r"episodes [1-9]\d* of 1,000", number=number)
    assert done.status == 130, done.stderr
    assert "stopped; saving what has finished; Ctrl-C again to give it up" in done.stderr
    assert "Traceback" not in done.stderr
    trajectories = load(out).unpack()
    assert 1 <= len(trajectories) < 1000
    assert f"{len(trajectories):,} of 1,000 episodes" in done.stdout
    assert all(len(trajectory.turns) == 3 for trajectory in trajectories)


def test_an_interrupt_before_anything_had_finished_writes_nothing(tmp_path: Path) -> None:
    # A test run in the background of a shell would hand down that the signal is ignored.
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command = [*FRESH[:-1], start + FRESH[-1]]
    done = interrupt(tmp_path / "batch.safetensors", command, after="loading model")
    assert done.status == 130
    assert done.stderr.endswith("trajpack: interrupted: no batch was written\n")
    assert not list(tmp_path.rglob("*.safetensors"))
