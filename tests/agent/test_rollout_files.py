"""The files of a rollout: both or neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trajpack import PackedBatch, Trajectory, Turn, pack
from trajpack.agent.rollout_files import check_writable, save_rollout, tokenizer_folder

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
    for name in ("first", "second"):
        save_rollout(BATCH, NamedTokenizer(name), out)
        assert [path.name for path in tokenizer_folder(out).iterdir()] == [name]
    assert PackedBatch.load(out).ids == ("a",)
    assert len(list(tmp_path.iterdir())) == 2


def test_what_was_there_stays_if_the_tokenizer_cannot_be_written(tmp_path: Path) -> None:
    out = tmp_path / "batch.safetensors"
    with pytest.raises(OSError, match="No space left"):
        save_rollout(BATCH, FullDisk(), out)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_made_and_left_empty_by_the_check(tmp_path: Path) -> None:
    check_writable(tmp_path / "a" / "b")
    assert not list((tmp_path / "a" / "b").iterdir())


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        check_writable(tmp_path / "file")
