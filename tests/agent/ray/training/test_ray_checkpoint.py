"""Checkpoints are whole or not there; settled prompts are remembered in little."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trajpack.agent.protocols import Prompt
from trajpack.agent.ray.training.checkpoint import Checkpoints, SettledPrompts, TrainingState

KILLING = """
import os, random, signal, sys
import numpy as np
from pathlib import Path
from trajpack.agent.ray.training.checkpoint import Checkpoints, TrainingState
checkpoints, draw, last = Checkpoints(Path(sys.argv[1])), random.Random(0), 0
for _ in range(15):
    reader, writer = os.pipe()
    child = os.fork()
    while child == 0:
        last += 1
        checkpoints.save(TrainingState(last, last), np.full(50_000, last % 251, np.uint8))
        os.write(writer, b".")
    os.close(writer)
    told = sum(len(os.read(reader, 1)) for _ in range(draw.randrange(1, 12)))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    state, saved = checkpoints.load()
    assert state.num_steps >= last + told, (state, last, told)
    assert set(saved.tolist()) == {state.num_steps % 251}
    last = state.num_steps
print(last)
"""


def trainer(step: int) -> np.ndarray:
    return np.full(1000, step, np.uint8)


def test_the_last_checkpoint_is_read_back_and_the_only_one(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "new" / "folder")
    assert checkpoints.load() is None
    for step in (1, 2):
        checkpoints.save(TrainingState(step, 2 * step, 5, ("q9", "q7"), "abc"), trainer(step))
        (checkpoints.folder / f"trainer-{step}.pt.tmp").touch()  # of a writer long dead
    state, saved = Checkpoints(checkpoints.folder).load()
    assert state == TrainingState(2, 4, 5, ("q7", "q9"), "abc")
    assert saved.tolist() == trainer(2).tolist()
    assert files(checkpoints.folder) == ["checkpoint.json", "trainer-2.pt", "trainer-2.pt.tmp"]


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "training.lock")


TAKEN = "another training has its checkpoints here"


def test_a_folder_is_one_trainings_at_a_time(tmp_path: Path):
    with Checkpoints(tmp_path).held():
        with pytest.raises(RuntimeError, match=TAKEN), Checkpoints(tmp_path).held():
            pytest.fail("it has two")
        with pytest.raises(RuntimeError, match=TAKEN):
            Checkpoints(tmp_path).save(TrainingState(1), trainer(1))
    assert files(tmp_path) == []
    with Checkpoints(tmp_path).held():
        pass


def test_a_relative_folder_is_the_one_it_named_at_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in "ab":
        (tmp_path / name).mkdir()
    Checkpoints(tmp_path / "b" / "checkpoints").save(TrainingState(900), trainer(1))
    monkeypatch.chdir(tmp_path / "a")
    mine = Checkpoints(Path("checkpoints"))
    with mine.held():
        monkeypatch.chdir(tmp_path / "b")
        mine.save(TrainingState(3), trainer(2))
    assert files(tmp_path / "b" / "checkpoints") == ["checkpoint.json", "trainer-900.pt"]
    assert files(tmp_path / "a" / "checkpoints") == ["checkpoint.json", "trainer-3.pt"]
    state, _ = mine.load()
    assert state.num_steps == 3


@pytest.mark.parametrize("is_held", [True, False])
def test_the_checkpoints_of_another_training_at_the_old_place_are_left_alone(
    tmp_path: Path, is_held: bool
):
    mine, place = Checkpoints(tmp_path / "here"), tmp_path / "here"
    with mine.held():
        mine.save(TrainingState(1), trainer(1))
        place.rename(tmp_path / "moved")
        other = Checkpoints(place)
        with other.held():
            other.save(TrainingState(900), trainer(9))
            if is_held:
                with pytest.raises(RuntimeError, match=TAKEN):
                    mine.save(TrainingState(2), trainer(2))
        if not is_held:
            (place / "training.lock").unlink()
            with pytest.raises(RuntimeError, match=TAKEN):
                mine.save(TrainingState(2), trainer(2))
    assert files(place) == ["checkpoint.json", "trainer-900.pt"]


def test_a_lock_that_was_removed_is_made_again_unless_another_has_it(tmp_path: Path):
    mine = Checkpoints(tmp_path)
    with mine.held():
        (tmp_path / "training.lock").unlink()
        mine.save(TrainingState(1), trainer(1))
        with pytest.raises(RuntimeError, match=TAKEN), Checkpoints(tmp_path).held():
            pytest.fail("it has two")
        (tmp_path / "training.lock").unlink()
        with Checkpoints(tmp_path).held(), pytest.raises(RuntimeError, match=TAKEN):
            mine.save(TrainingState(2), trainer(2))
    assert files(tmp_path) == ["checkpoint.json", "trainer-1.pt"]


def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", KILLING, str(tmp_path)], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) >= 15


@pytest.mark.parametrize(
    ("contents", "reason"),
    [
        (b"", "is not the checkpoint of a training"),
        (b"[]", "is not the checkpoint of a training"),
        (b'{"format": 2}', "expected format 1, got 2; a later version"),
        (b'{"format": 1, "num_steps": 1}', "is not the checkpoint of a training"),
        (b"\xff", "is not the checkpoint of a training"),
    ],
)
def test_what_is_no_checkpoint_is_refused_by_name(tmp_path: Path, contents: bytes, reason: str):
    (tmp_path / "checkpoint.json").write_bytes(contents)
    with pytest.raises(ValueError, match=rf"checkpoint\.json.* ?{reason}"):
        Checkpoints(tmp_path).load()


def test_a_damaged_or_missing_state_of_the_trainer_is_found(tmp_path: Path):
    Checkpoints(tmp_path).save(TrainingState(1), trainer(1))
    file = tmp_path / "trainer-1.pt"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    with pytest.raises(ValueError, match=r"trainer-1\.pt is missing or not what was written"):
        Checkpoints(tmp_path).load()
    file.unlink()
    with pytest.raises(ValueError, match=r"trainer-1\.pt is missing"):
        Checkpoints(tmp_path).load()


def test_a_path_in_the_file_is_not_followed(tmp_path: Path):
    Checkpoints(tmp_path / "own").save(TrainingState(1), trainer(1))
    path = tmp_path / "own" / "checkpoint.json"
    told = json.loads(path.read_text())
    told["trainer"]["file"] = "../elsewhere.pt"
    path.write_text(json.dumps(told))
    _, saved = Checkpoints(tmp_path / "own").load()
    assert saved.tolist() == trainer(1).tolist()


def test_settled_prompts_shrink_to_a_number_in_any_order():
    names = [f"q{k}" for k in range(50)]
    settled, draw = SettledPrompts(), random.Random(1)
    for name in names[:10]:
        settled.add(name)  # before they are taken, as from a log
    waiting: list[str] = []
    for number, name in enumerate(names):
        assert settled.take(name) == (number < 10)
        if number >= 10:
            waiting.append(name)
        while len(waiting) > 5:
            settled.add(waiting.pop(draw.randrange(len(waiting))))
        later = SettledPrompts(settled.num_settled, settled.ahead, settled.order)
        untold = left_of(later, names)
        assert untold == [
            other for other in names if other in waiting or names.index(other) > max(number, 9)
        ]
    for name in waiting:
        settled.add(name)
    assert (settled.num_settled, settled.ahead) == (50, set())


def left_of(settled: SettledPrompts, names: list[str]) -> list[str]:
    async def take() -> list[str]:
        return [prompt.id async for prompt in settled.left_of(Prompt(name, [1]) for name in names)]

    return asyncio.run(take())


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("bacd", "the first 3 prompts are not those that the checkpoint has settled"),
        ("ab", "expected at least 3 prompts, .* got 2"),
    ],
)
def test_a_training_goes_on_with_its_own_prompts_only(names: str, reason: str):
    settled = SettledPrompts()
    assert left_of(settled, [*"abcd"]) == [*"abcd"]
    for name in "bac":
        settled.add(name)
    assert left_of(SettledPrompts(3, (), settled.order), [*"abcd"]) == ["d"]
    with pytest.raises(ValueError, match=reason):
        left_of(SettledPrompts(3, (), settled.order), [*names])
