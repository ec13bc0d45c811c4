"""Files of batches and trees: what `load` returns has the bits of what `save` was given."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from hypothesis import given, settings

import trajpack
from tests.commands.command import refusal
from tests.packing.files.batch_files import (
    FIELDS,
    VALUES,
    WAYS,
    seeded,
    some_trajectories,
    with_rows,
)
from trajpack import (
    PackedBatch,
    TokenField,
    Trajectory,
    Turn,
    load,
    load_tree,
    pack,
    pack_tree,
    save,
)
from trajpack.packing.durable_files import LEFTOVER_SECONDS
from trajpack.packing.token_fields import DTYPES
from trajpack.testing import assert_batches_equal, trajectory_lists

Layout = Any


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "batch.safetensors"


@pytest.mark.parametrize("layout", ["merged", "turns"])
@pytest.mark.parametrize("way", WAYS)
def test_every_batch_is_saved_and_loaded_bit_for_bit(way: str, layout: Layout, path: Path) -> None:
    @settings(max_examples=2 if "triton" in way else 6)
    @given(trajectory_lists())
    def check(drawn: list[Trajectory]) -> None:
        batch = WAYS[way](drawn, layout)
        save(batch, path)
        size, loaded = path.stat().st_size, load(path)
        assert_batches_equal(loaded, batch)
        assert loaded.token_fields == batch.token_fields
        assert loaded.unpack() == batch.unpack()
        save(loaded, path)
        assert path.stat().st_size == size

    check()


def some_dropped(batch: PackedBatch) -> torch.Tensor:
    mask = batch.loss_mask.clone()
    mask[batch.turn_spans[0, 0]] = False
    return mask


LATER: dict[str, Callable[[PackedBatch], dict[str, Any]]] = {
    "dropped tokens": lambda batch: {"loss_mask": some_dropped(batch)},
    "advantages": lambda batch: {"advantages": torch.full_like(batch.returns, float("nan"))},
    "a view with a gradient": lambda batch: {
        "advantages": torch.zeros(batch.num_tokens, 2, requires_grad=True)[:, 1]
    },
    "returns": lambda batch: {"returns": torch.full_like(batch.returns, float("inf"))},
    "returns of turns": lambda batch: {"turn_returns": batch.turn_returns + 1},
    "metrics": lambda batch: {
        "metrics": torch.tensor([0.5, -0.0], dtype=torch.float64),
        "metric_names": ("clip", "kl"),
    },
    "rows": lambda batch: {"fields": {name: rows * 0 + 3 for name, rows in batch.fields.items()}},
}


@pytest.mark.parametrize("layout", ["merged", "turns"])
@pytest.mark.parametrize("change", LATER)
def test_what_was_computed_later_is_kept(change: str, layout: Layout, path: Path) -> None:
    batch = pack(map(with_rows, some_trajectories()), layout, fields=FIELDS)
    batch = dataclasses.replace(batch, **LATER[change](batch))
    save(batch, path)
    assert_batches_equal(load(path), batch)


@given(drawn=trajectory_lists())
@settings(max_examples=10)
def test_a_tree_with_dropped_tokens_is_saved_and_loaded(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Trajectory]
) -> None:
    tree = pack_tree(drawn).with_advantages(trajpack.TurnReturns())
    mask = torch.arange(tree.num_entries) % 3 > 0
    tree = tree.with_loss_mask(mask)
    path = tmp_path_factory.mktemp("tree") / "tree.safetensors"
    save(tree, path)
    loaded = load_tree(path)
    assert torch.equal(loaded.entries.loss_mask, tree.entries.loss_mask)
    assert_batches_equal(loaded.merged(), tree.merged())
    assert_batches_equal(load(path), tree.merged())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_field_of_every_dtype_is_saved_and_loaded(dtype: str, path: Path) -> None:
    field = TokenField("v", DTYPES[dtype], (2, 1), fill=1, generated_only=False)
    batch = pack(some_trajectories(), "turns")
    rows = (torch.arange(2 * batch.num_tokens) % 2).to(field.dtype).reshape(-1, 2, 1)
    batch = batch.with_field(field, rows)
    batch = batch.with_field(dataclasses.replace(field, name="w", generated_only=True), rows)
    save(batch, path)
    loaded = load(path)
    assert_batches_equal(loaded, batch)
    assert loaded.token_fields == batch.token_fields


def test_a_field_of_many_dimensions_is_saved_or_refused(path: Path) -> None:
    field = TokenField("v", torch.float32, (1,) * 63)
    batch = pack(some_trajectories())
    save(batch := batch.with_field(field, torch.ones(batch.num_tokens, *field.shape)), path)
    assert_batches_equal(load(path), batch)
    with pytest.raises(ValueError, match="field 'v': shape must hold up to 63 sizes"):
        TokenField("v", torch.float32, (1,) * 64)


def test_labels_of_any_text_are_saved_and_loaded(path: Path) -> None:
    texts = ["", "\x00\x1b[31m", "\ud800", '"}],', "数学", "a" * 100_000]
    turn = Turn([1], [2], [0.0])
    batch = pack([Trajectory(text, [turn], group=text) for text in texts])
    save(batch, path)
    assert_batches_equal(load(path), batch)


def test_warnings_came_when_the_batch_was_packed(path: Path) -> None:
    with pytest.warns(UserWarning, match="positive numbers"):
        batch = pack([Trajectory("a", [Turn([1], [2], [0.5])])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(batch, path)
        assert_batches_equal(load(path), batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda batch: {"advantages": batch.returns.double()},
            r"advantages must be torch.float32 \[18\], got torch.float64 \[18\]",
        ),
        (lambda batch: {"advantages": batch.returns[None]}, r"got torch.float32 \[1, 18\]"),
        (lambda batch: {"advantages": batch.returns.numpy()}, "advantages must be a tensor, got"),
        (lambda batch: {"advantages": batch.returns.to("meta")}, "meta"),
        (lambda batch: {"advantages": batch.returns.to_sparse()}, "[sS]parse"),
        (lambda batch: {"fields": {"teacher": batch.returns}}, "fields.teacher is not declared"),
        (lambda batch: {"token_fields": (VALUES,)}, "'values'"),
        (
            lambda batch: {"turn_rewards": batch.turn_rewards / 0},
            "a reward or discount is not finite",
        ),
        (lambda batch: {"input_ids": batch.input_ids - 9}, "a token id is negative"),
        (
            lambda batch: {"rollout_logprobs": batch.rollout_logprobs / 0},
            "a log-probability is not finite",
        ),
        (
            lambda batch: {"position_ids": batch.position_ids + 1},
            "position_ids is not what packing the trajectories gives",
        ),
        (lambda batch: {"num_groups": 9}, "num_groups must be 3, got 9"),
        (lambda batch: {"ids": ("a", "b", "c", 4)}, "ids must not be int"),
        (
            lambda batch: {"turn_discounts": (float("nan"),) * 4},
            "a reward or discount is not finite",
        ),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    change: Callable[[PackedBatch], dict[str, Any]], message: str, path: Path
) -> None:
    path.write_bytes(b"as it was")
    batch = pack(some_trajectories())
    with pytest.raises(ValueError, match=f"^the batch cannot be saved: .*{message}"):
        save(dataclasses.replace(batch, **change(batch)), path)
    assert path.read_bytes() == b"as it was"
    assert list(path.parent.iterdir()) == [path]


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def link(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


def other_file(metadata: dict[str, str] | None) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        safetensors.numpy.save_file({"x": np.zeros(1)}, path, metadata)
        return path

    return write


def content(raw: bytes) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        path.write_bytes(raw)
        return path

    return write


OTHERS: list[tuple[Callable[[Path], Path], str]] = [
    (fifo, "it is not a file"),
    (folder, "it is not a file"),
    (link, "it is not a file"),
    (lambda path: Path("/dev/zero"), "it is not a file"),
    (lambda path: Path("/proc/self/status"), "it is no safetensors file"),
    (content(b""), "it is no safetensors file"),
    (content(b"\xff" * 99), "it is no safetensors file"),
    (content(b"[" * 100_000), "it is no safetensors file"),
    (content((10**5).to_bytes(8, "little") + b"[" * 10**5), "it is no safetensors file"),
    (other_file(None), r"its format is \(None, None\), expected \('trajpack.PackedBatch', '5'\)"),
    (
        other_file({"format": "trajpack.PackedBatch", "schema_version": "\x1b9"}),
        r"its format is \('trajpack.PackedBatch', '\\+x1b9'\), expected",
    ),
    (
        other_file({"format": "trajpack.PackedBatch", "schema_version": "5"}),
        "it is damaged: its CRC is not that of its content",
    ),
]


@pytest.mark.parametrize(("make", "message"), OTHERS)
def test_a_file_of_something_else_is_refused(
    make: Callable[[Path], Path], message: str, path: Path
) -> None:
    place = make(path)
    with pytest.raises(ValueError, match=f"^{place} is not a readable packed batch: {message}"):
        load(place)
    if path.is_file():
        assert f"{path} is not a readable packed batch: " in refusal("inspect", path)


@pytest.mark.parametrize("make", [fifo, folder])
def test_what_is_no_file_is_not_written_over(make: Callable[[Path], Path], path: Path) -> None:
    before = make(path).stat()
    with pytest.raises(FileExistsError, match=f"it is not a file: '{path}'"):
        save(pack([]), path)
    assert path.stat().st_ino == before.st_ino


def test_other_places_are_refused(path: Path) -> None:
    with pytest.raises(TypeError):
        load(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not a readable packed batch: embedded null byte"):
        load("a\0b")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        save(pack([]), path.parent / "nowhere" / "batch.safetensors")
    with pytest.raises(FileNotFoundError):
        load(path)


def test_saving_is_whole_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(pack([]), path)
    before = path.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(pack(some_trajectories()), path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_file_keeps_its_mode_and_links_stay_links(path: Path) -> None:
    place = path.with_name("link.safetensors")
    place.symlink_to(path)
    before = os.umask(0o077)
    try:
        save(pack([]), place)
    finally:
        os.umask(before)
    assert place.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    save(pack([]), place)
    assert path.stat().st_mode & 0o777 == 0o640


def test_what_a_killed_writer_left_is_removed_later(path: Path) -> None:
    old, new = (path.with_name(f".{path.name}.{name}.tmp") for name in ("old", "new"))
    for place in (old, new):
        place.touch()
    long_ago = time.time() - LEFTOVER_SECONDS - 1
    os.utime(old, (long_ago, long_ago))
    save(pack([]), path)
    assert {*path.parent.iterdir()} == {path, new}


def test_a_batch_does_not_change_with_its_file(path: Path) -> None:
    batch = pack(map(with_rows, some_trajectories()), fields=FIELDS).with_advantages(
        trajpack.TurnReturns()
    )
    save(batch, path)
    loaded = load(path)
    with path.open("r+b") as file:
        file.write(b"\xff" * path.stat().st_size)
    os.truncate(path, 10)
    assert_batches_equal(loaded, batch)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[bytes, PackedBatch]]:
    """Files of batches of several origins, in both layouts."""
    place = tmp_path_factory.mktemp("contents") / "batch.safetensors"
    found = []
    for way in ("pack with fields", "advantages of groups", "a field added later"):
        for layout in ("merged", "turns"):
            batch = WAYS[way](some_trajectories(), layout)
            save(batch, place)
            found.append((place.read_bytes(), batch))
    return found


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """Flip a bit, cut bytes off, put some in, take some out, or write over some."""
    changed = bytearray(content)
    kind, at = rng.integers(6), rng.integers(len(content))
    if kind == 0:
        del changed[at:]
    elif kind == 1:
        changed[at:at] = rng.bytes(rng.integers(1, 64))
    elif kind == 2:
        del changed[at : at + rng.integers(1, 64)]
    elif kind == 3:
        changed[at : at + 8] = rng.bytes(8)
    elif kind == 4:
        changed[at % 8] = rng.integers(256)  # of the header's length
    else:
        changed[at] ^= 1 << rng.integers(8)
    return bytes(changed)


def judged(path: Path) -> PackedBatch | None:
    """Load it; a refusal must name the file and say what is wrong."""
    try:
        return load(path)
    except ValueError as error:
        named, _, reason = str(error).partition(" is not a readable packed batch: ")
        return None if named == str(path) and 5 < len(reason) < 1000 else pytest.fail(str(error))


@pytest.mark.attack
def test_damaged_files_are_refused_by_name_or_hold_the_same(
    saved: list[tuple[bytes, PackedBatch]], path: Path, tries: Callable[[int], int]
) -> None:
    accepted = 0
    for seed in range(tries(10_000)):
        with seeded(seed) as rng:
            content, batch = saved[rng.integers(len(saved))]
            path.write_bytes(damaged(content, rng))
            loaded = judged(path)
            if loaded is not None:
                accepted += 1
                assert_batches_equal(loaded, batch)
    assert accepted < tries(10_000) / 50


@pytest.mark.attack
def test_a_file_that_is_rewritten_while_it_is_read_is_refused_or_whole(
    path: Path, tries: Callable[[int], int]
) -> None:
    batches = [pack(some_trajectories()), pack(some_trajectories()[::-1])]
    contents = []
    for batch in batches:
        save(batch, path)
        contents.append(path.read_bytes())
    over = threading.Event()

    def rewrite() -> None:
        while not over.is_set():
            for content in contents:
                for size in (len(content), len(content) // 2):
                    path.write_bytes(content[:size])

    writer = threading.Thread(target=rewrite)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    writer.start()
    refused = whole = 0
    given = [batch.unpack() for batch in batches]
    try:
        for _ in range(tries(2000)):
            try:
                loaded = load(path)
            except ValueError as error:
                refused += str(error).startswith(f"{path} is not a readable packed batch: ")
            else:
                whole += loaded.unpack() in given
    finally:
        over.set()
        writer.join()
        sys.setswitchinterval(interval)
    assert refused + whole == tries(2000)
