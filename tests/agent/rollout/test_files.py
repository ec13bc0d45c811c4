"""The files of a rollout: both or neither."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trajpack import Trajectory, Turn, load, pack
from trajpack.agent.errors import SetupError
from trajpack.agent.rollout.files import save_rollout
from trajpack.agent.rollout.settings import check_places

BATCH = pack([Trajectory("a", [Turn([1], [2], [-1.0])])])


class NamedTokenizer:
    def __init__(self, name: str) -> None:
        self.name = name

    def save_pretrained(self, folder: Any) -> None:
        Path(folder).mkdir()
        Path(folder, self.name).touch()


class FullDisk:
    def save_pretrained(self, folder: Any) -> None:
        raise OSError("No space left on device")


def test_the_tokenizer_of_an_earlier_batch_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "batch.safetensors"
    leftover = tmp_path / ".batch.tokenizer.killed.tmp"
    (leftover / "written").mkdir(parents=True)
    os.utime(leftover, (0, 0))
    for name in ("first", "second"):
        save_rollout(BATCH, NamedTokenizer(name), out)
        assert [path.name for path in out.with_suffix(".tokenizer").iterdir()] == [name]
    assert load(out).ids == ("a",)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("place", ["tokenizer", "batch", "batch, by Ctrl-C"])
def test_earlier_files_stay_if_new_ones_cannot_be_written(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "batch.safetensors"
    error = KeyboardInterrupt() if "Ctrl-C" in place else OSError("No space left on device")

    def fail(*_: object) -> None:
        raise error

    with pytest.raises(OSError, match="No space left"):
        save_rollout(BATCH, FullDisk(), out)
    assert not list(tmp_path.iterdir())
    save_rollout(BATCH, NamedTokenizer("first"), out)
    before = out.stat()
    if place.startswith("batch"):
        monkeypatch.setattr("trajpack.agent.rollout.files.save", fail)
    with pytest.raises(type(error)):
        save_rollout(BATCH, FullDisk() if place == "tokenizer" else NamedTokenizer("second"), out)
    assert [path.name for path in out.with_suffix(".tokenizer").iterdir()] == ["first"]
    assert out.stat().st_ino == before.st_ino
    assert len(list(tmp_path.iterdir())) == 2


def test_only_the_folder_of_a_tokenizer_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.tokenizer").touch()
    (tmp_path / "b.tokenizer").symlink_to(tmp_path)
    (tmp_path / "c.tokenizer").mkdir()
    (tmp_path / "c.tokenizer" / "tokenizer.json").touch()
    for name in "abc":
        with pytest.raises(SetupError, match="is not the tokenizer of a batch and will not be"):
            check_places(tmp_path / f"{name}.safetensors", None, replace=True)
    (tmp_path / "c.tokenizer" / "tokenizer_config.json").touch()
    check_places(tmp_path / "c.safetensors", tmp_path / "answers", replace=True)
