"""Files of packed batches: what is written can be read, and what is read fits together."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import socket
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.commands.command import refusal
from tests.packing.batch.batch_files import (
    FIELDS,
    VALUES,
    WAYS,
    parts_of,
    put_together,
    some_trajectories,
    use,
    with_rows,
)
from trajpack import PackedBatch, TokenField, Trajectory, Turn, pack
from trajpack.packing.batch import storage
from trajpack.packing.token_fields import DTYPES
from trajpack.testing import assert_batches_equal, random_trajectory, trajectory_lists

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
        batch.save(path)
        loaded = PackedBatch.load(path)
        assert_batches_equal(loaded, batch)
        assert loaded.token_fields == batch.token_fields
        assert loaded.unpack() == batch.unpack()
        parts = parts_of(path.read_bytes())
        loaded.save(path)
        assert parts_of(path.read_bytes()) == parts

    check()


@pytest.mark.parametrize("layout", ["merged", "turns"])
@pytest.mark.parametrize("way", WAYS)
def test_a_loaded_batch_can_be_used(way: str, layout: Layout, path: Path) -> None:
    WAYS[way](some_trajectories(), layout).save(path)
    use(PackedBatch.load(path), path)


def test_tensors_longer_than_a_piece_are_compared_whole(path: Path, monkeypatch: Any) -> None:
    generator = np.random.default_rng(0)
    drawn = [random_trajectory(generator, str(i), prompt=(1, 9), completion=(0, 9)) for i in "abc"]
    batch = pack([*some_trajectories(), *drawn])
    for piece in (1, 2, 7):
        monkeypatch.setattr(storage, "PIECE", piece)
        batch.save(path)
        assert_batches_equal(PackedBatch.load(path), batch)
        for name in ("position_ids", "turn_ids", "policy_versions", "loss_mask"):
            wrong = getattr(batch, name).clone()
            wrong[-1] = not wrong[-1] if wrong.dtype == torch.bool else 77
            with pytest.raises(ValueError, match=f"{name} must .*index {batch.num_tokens - 1}"):
                dataclasses.replace(batch, **{name: wrong}).save(path)


def narrowed(batch: PackedBatch) -> torch.Tensor:
    mask = batch.loss_mask.clone()
    mask[batch.turn_spans[0, 0]] = False
    return mask


def test_versions_that_run_backwards_between_pieces_are_found(path: Path, monkeypatch: Any) -> None:
    spans = [(1, 0, 1), (2, 1, 2), (3, 2, 3)]
    batch = pack([Trajectory("a", [Turn([5], [6, 7, 8], [0.0] * 3, version_spans=spans)])])
    batch.policy_versions[1:] = torch.tensor([1, 3, 2])
    for piece in (1, 2, 3, 4):
        monkeypatch.setattr(storage, "PIECE", piece)
        with pytest.raises(ValueError, match=r"policy_versions must not run backwards .* index 3"):
            batch.save(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda batch: {"advantages": batch.returns.double()},
            "advantages must be torch.float32, got torch.float64; convert it with .to",
        ),
        (
            lambda batch: {"advantages": batch.returns[None]},
            r"advantages must have shape \[18\], got \[1, 18\]",
        ),
        (
            lambda batch: {"advantages": batch.returns.numpy()},
            "advantages must be a tensor, got ndarray",
        ),
        (
            lambda batch: {"advantages": batch.returns.to("meta")},
            "advantages must be a dense tensor with values, got a meta one",
        ),
        (
            lambda batch: {"advantages": batch.returns.to_sparse()},
            "advantages must be a dense tensor with values, got a torch.sparse_coo one",
        ),
        (
            lambda batch: {"loss_mask": narrowed(batch)},
            "loss_mask must be 1 at index 2, as turn_spans say, got 0; call `narrow` after",
        ),
        (
            lambda batch: {"fields": {"teacher": batch.returns}},
            "field 'teacher' is not declared in token_fields; add it with PackedBatch.with_field",
        ),
        (lambda batch: {"token_fields": (VALUES,)}, "field 'values' is missing"),
        (
            lambda batch: {"token_fields": ("values",)},
            "token_fields must be several TokenField, got 'va",
        ),
        (
            lambda batch: {"turn_rewards": batch.turn_rewards + 1},
            "turn_returns must be turn_rewards discounted by turn_discounts, .*; pack traj",
        ),
        (
            lambda batch: {"returns": batch.returns + 1},
            "returns must be 0.0 at index 0, as turn_returns say",
        ),
        (lambda batch: {"input_ids": batch.input_ids - 9}, "input_ids must be in .*, got -8 at in"),
        (
            lambda batch: {"rollout_logprobs": batch.rollout_logprobs / 0},
            "rollout_logprobs must be finite, got nan at index 0",
        ),
        (lambda batch: {"metric_names": ("kl",)}, "metric_names must be empty without metrics"),
        (lambda batch: {"num_groups": 9}, "num_groups must be 3, as groups say, got 9"),
        (lambda batch: {"ids": ("a", "b", "c", 4)}, "ids must be str, got 4 at index 3"),
        (lambda batch: {"groups": np.zeros(4)}, "groups must be a list, got array"),
        (lambda batch: {"task_ids": (2**70, 1, 2, 3)}, "task_ids must fit int64, got 118"),
        (lambda batch: {"turn_discounts": (float("nan"),) * 4}, "must be finite float32, got nan"),
    ],
)
def test_what_could_not_be_loaded_is_not_saved(
    change: Callable[[PackedBatch], dict[str, Any]], message: str, path: Path
) -> None:
    path.write_bytes(b"as it was")
    batch = pack(some_trajectories())
    with pytest.raises(ValueError, match=f"^the batch cannot be saved: .*{message}"):
        dataclasses.replace(batch, **change(batch)).save(path)
    assert path.read_bytes() == b"as it was"
    assert list(path.parent.iterdir()) == [path]


def test_a_sequence_without_tokens_is_not_loaded(path: Path) -> None:
    pack(some_trajectories()).save(path)
    header, data = parts_of(path.read_bytes())
    host = json.loads(header["__metadata__"]["host"])
    host["seqlens"] = [*host["seqlens"], 0]
    header["__metadata__"]["host"] = json.dumps(host)
    path.write_bytes(put_together(header, data))
    with pytest.raises(ValueError, match="seqlens must be at least 1, got 0 at index"):
        PackedBatch.load(path)


def test_a_sequence_of_padding_alone_is_refused(path: Path) -> None:
    batch = pack([Trajectory("a", [Turn([1], [2], [0.0]), Turn([1, 2, 3], [4], [0.0])])])
    more = {
        name: torch.cat([tensor, tensor[:1]])
        for name, tensor in batch.tensors().items()
        if tensor.shape == (4,)
    }
    padded = dataclasses.replace(
        batch, **more, cu_seqlens=torch.tensor([0, 4, 5], dtype=torch.int32), seqlens=(4, 1)
    )
    with pytest.raises(ValueError, match="turn_sequence must name each of 2 sequences, it names 1"):
        padded.save(path)


def test_own_values_of_advantages_metrics_and_fields_are_not_judged(path: Path) -> None:
    batch = pack(map(with_rows, some_trajectories()), fields=FIELDS)
    free = dataclasses.replace(
        batch,
        advantages=torch.full_like(batch.returns, float("nan")),
        returns=torch.full_like(batch.returns, float("inf")),
        fields={name: rows * 0 + 3 for name, rows in batch.fields.items()},
    )
    free.save(path)
    assert_batches_equal(PackedBatch.load(path), free)


def test_advantages_may_need_a_gradient_and_be_a_view(path: Path) -> None:
    batch = pack(some_trajectories())
    wide = torch.zeros(batch.num_tokens, 2, requires_grad=True)
    dataclasses.replace(batch, advantages=wide[:, 1]).save(path)
    assert not PackedBatch.load(path).advantages.requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_field_of_every_dtype_is_saved_and_loaded(dtype: str, path: Path) -> None:
    field = TokenField("v", DTYPES[dtype], (2, 1), fill=1, generated_only=False)
    batch = pack(some_trajectories())
    rows = (torch.arange(2 * batch.num_tokens) % 2).to(field.dtype).reshape(-1, 2, 1)
    batch = batch.with_field(field, rows)
    batch = batch.with_field(dataclasses.replace(field, name="w", generated_only=True), rows)
    batch.save(path)
    loaded = PackedBatch.load(path)
    assert_batches_equal(loaded, batch)
    assert loaded.token_fields == batch.token_fields
    by_library = dict(safetensors.deserialize(path.read_bytes()))["fields.v"]
    assert bytes(by_library["data"]) == bytes(rows.view(torch.uint8).numpy())
    assert by_library["shape"] == list(rows.shape)


def test_a_field_may_have_the_dtypes_that_a_file_has() -> None:
    assert set(storage.CODES.values()) == set(DTYPES.values())
    others = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in others - set(DTYPES.values()):
        with pytest.raises(TypeError, match="field 'v': dtype must be a torch dtype"):
            TokenField("v", dtype)


def test_labels_of_any_text_are_saved_and_loaded(path: Path) -> None:
    texts = ["", "\x00\x1b[31m", "\ud800", '"}],', "数学", "a" * 100_000]
    turn = Turn([1], [2], [0.0])
    batch = pack([Trajectory(text, [turn], group=text) for text in texts])
    batch.save(path)
    assert_batches_equal(PackedBatch.load(path), batch)


@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_a_field_added_later_is_saved_and_unpacked(layout: Layout, path: Path) -> None:
    batch = pack(some_trajectories(), layout)
    numbers = torch.arange(batch.num_tokens).float()
    everywhere = TokenField("everywhere", torch.float32, generated_only=False)
    both = batch.with_field(TokenField("teacher", torch.float32, fill=-7.0), numbers)
    both = both.with_field(everywhere, numbers)
    expected = torch.where(batch.loss_mask, numbers, -7.0)
    assert torch.equal(both.fields["teacher"], expected)
    assert torch.equal(both.fields["everywhere"], numbers)
    both.save(path)
    loaded = PackedBatch.load(path)
    assert_batches_equal(loaded, both)
    turn = loaded.unpack()[0].turns[1]
    begin, end = batch.turn_spans[1].tolist()
    assert turn.fields["teacher"].tolist() == list(range(begin, end))
    assert not batch.fields


@pytest.mark.parametrize(
    ("field", "rows", "kind", "message"),
    [
        (VALUES, torch.zeros(18, 2), ValueError, "fields must have names of their own"),
        ("teacher", torch.zeros(18), TypeError, "fields must be TokenField, got str"),
        (TokenField("t", torch.float32), np.zeros(18), TypeError, "must be torch.float32, got nda"),
        (
            TokenField("t", torch.int8),
            torch.zeros(18),
            TypeError,
            "rows must be torch.int8, got to",
        ),
        (
            TokenField("t", torch.float32),
            torch.zeros(14),
            ValueError,
            r"shape \[18\] on cpu, got",
        ),
        (TokenField("t", torch.float32), torch.zeros(18, 1), ValueError, r"got \[18, 1\] on cpu"),
        (TokenField("t", torch.float32), torch.zeros(18, device="meta"), ValueError, "on meta"),
    ],
)
def test_a_field_that_does_not_fit_is_not_added(
    field: Any, rows: Any, kind: type[Exception], message: str
) -> None:
    batch = pack(map(with_rows, some_trajectories()), fields=FIELDS)
    with pytest.raises(kind, match=message):
        batch.with_field(field, rows)


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def bound_socket(path: Path) -> Path:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def link(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


SPECIAL: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a pipe": (fifo, "it is a pipe, not a file"),
    "a socket": (bound_socket, "it is a socket, not a file"),
    "a folder": (folder, "it is a folder, not a file"),
    "a device": (lambda path: Path("/dev/zero"), "it is a device, not a file"),
    "a link to a device": (link, "it is a device, not a file"),
    "a file of the system": (lambda path: Path("/proc/self/status"), "it has 0 bytes, too few"),
    "the system's log": (lambda path: Path("/proc/kmsg"), "it has 0 bytes, too few"),
    "a file of a device": (lambda path: Path("/sys/kernel/mm/transparent_hugepage/enabled"), "it"),
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_what_is_no_file_is_refused_at_once(kind: str, path: Path) -> None:
    make, message = SPECIAL[kind]
    place = make(path)
    if not os.path.lexists(place):
        pytest.skip(f"{place} is not here")
    with pytest.raises(ValueError, match=f"^{place} is not a readable packed batch: {message}"):
        PackedBatch.load(place)
    assert f"{place} is not a readable packed batch: {message}" in refusal("inspect", place)


@pytest.mark.parametrize("make", [fifo, bound_socket, folder])
def test_what_is_no_file_is_not_written_over(make: Callable[[Path], Path], path: Path) -> None:
    before = make(path).stat()
    with pytest.raises(FileExistsError, match=f"it is a .*, not a file: '{path}'"):
        pack([]).save(path)
    assert path.stat().st_ino == before.st_ino


def test_other_arguments_than_paths_are_refused() -> None:
    with pytest.raises(TypeError):
        PackedBatch.load(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is not a readable packed batch: embedded null byte"):
        PackedBatch.load("a\0b")
    assert "No such file" in refusal("inspect", "/nowhere/batch.safetensors")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_a_file_that_may_not_be_read_is_the_systems_to_refuse(path: Path) -> None:
    pack([]).save(path)
    path.chmod(0)
    with pytest.raises(PermissionError):
        PackedBatch.load(path)


def test_a_batch_does_not_change_with_its_file(path: Path) -> None:
    batch = pack(map(with_rows, some_trajectories()), fields=FIELDS)
    batch.save(path)
    loaded = PackedBatch.load(path)
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\xff" * size)
    assert_batches_equal(loaded, batch)
    os.truncate(path, 10)
    assert_batches_equal(loaded, batch)
    owned = [*loaded.tensors().values(), *loaded.fields.values()]
    assert all(not mapped(tensor) for tensor in owned)


def mapped(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is that of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(bound, 16) for bound in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return ".safetensors" in line
    return False


def test_a_file_that_is_cut_off_while_it_is_read_is_refused(path: Path, monkeypatch: Any) -> None:
    """Before each of the reads in turn."""
    genuine = storage._fill
    reads: list[str] = []
    cut_before = -1

    def fill(file: Any, begin: int, out: Any, *, name: str) -> None:
        if len(reads) == cut_before:
            os.truncate(path, begin + len(out) - 1)
        reads.append(name)
        genuine(file, begin, out, name=name)

    monkeypatch.setattr(storage, "_fill", fill)
    pack(some_trajectories()).save(path)
    content = path.read_bytes()
    PackedBatch.load(path)
    names = list(reads)
    assert {"its header", "cu_seqlens", "turn_rewards", "input_ids"} <= set(names)
    for cut_before, name in enumerate(names):  # noqa: B007 - `fill` reads it
        path.write_bytes(content)
        reads.clear()
        message = f"{path} is not a readable packed batch: {name} was cut off at byte"
        with pytest.raises(ValueError, match=message):
            PackedBatch.load(path)


def test_loading_takes_the_memory_of_the_file_once(path: Path) -> None:
    generator = np.random.default_rng(0)
    batch = pack([random_trajectory(generator, str(i), num_turns=5) for i in range(200)])
    batch.save(path)
    size = path.stat().st_size
    assert size > 2 * 38 * storage.PIECE
    tracemalloc.start()
    try:
        loaded = PackedBatch.load(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert loaded.num_tokens == batch.num_tokens
    assert peak < size + 30 * storage.PIECE


def sparse(path: Path, num_tokens: int) -> Path:
    """Write a file of one turn of so many tokens, of which the tables alone take room."""
    pack([Trajectory("a", [Turn([1, 2, 3], [4], [-0.5])])]).save(path)
    header, data = parts_of(path.read_bytes())
    host = json.loads(header["__metadata__"]["host"])
    host |= {"seqlens": [num_tokens], "num_generated": 1}
    header["__metadata__"]["host"] = json.dumps(host)
    tables = {
        "cu_seqlens": [0, num_tokens],
        "turn_spans": [num_tokens - 1, num_tokens],
    }
    end, parts = 0, {}
    for name, entry in sorted(header.items(), key=lambda item: item[1].get("data_offsets", [0])):
        if name == "__metadata__":
            continue
        begin, stop = entry["data_offsets"]
        if entry["shape"] == [4]:
            size = (stop - begin) // 4 * num_tokens
            entry["shape"] = [num_tokens]
        else:
            size = stop - begin
            parts[end] = data[begin:stop]
            if name in tables:
                parts[end] = np.array(tables[name], np.int32).tobytes()
        entry["data_offsets"] = [end, end + size]
        end += size
    content = put_together(header, b"")
    with path.open("wb") as file:
        file.write(content)
        for place, part in parts.items():
            file.seek(len(content) + place)
            file.write(part)
        file.truncate(len(content) + end)
    return path


def test_a_file_of_holes_is_refused_before_much_of_it_is_read(path: Path) -> None:
    sparse(path, 20_000_000)
    assert path.stat().st_size > 700_000_000
    assert path.stat().st_blocks * 512 < 1_000_000
    read = 0
    genuine = storage._fill

    def fill(file: Any, begin: int, out: Any, *, name: str) -> None:
        nonlocal read
        read += len(out)
        genuine(file, begin, out, name=name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "_fill", fill)
        with pytest.raises(ValueError, match="position_ids must be 1 at index 1, as seqlens say"):
            PackedBatch.load(path)
    assert read < 9 * storage.PIECE


def test_memory_that_cannot_be_had_is_named(path: Path) -> None:
    sparse(path, 100_000_000)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28, limits[1]))
    try:
        with pytest.raises(ValueError, match="position_ids needs 800,000,000 bytes of memory"):
            PackedBatch.load(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_file_larger_than_the_machines_memory_is_refused(path: Path) -> None:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    pack(some_trajectories()).save(path)
    os.truncate(path, memory + 1)
    message = f"it needs {memory + 1:,} bytes of memory, this machine has {memory:,}"
    with pytest.raises(ValueError, match=message):
        PackedBatch.load(path)
    assert message in refusal("inspect", path)


def changed(entry: str, **changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda header: {**header, entry: {**header[entry], **changes}}


def raw(text: str) -> Callable[[dict[str, Any]], bytes]:
    return lambda header: text.encode("latin-1")


def twice(header: dict[str, Any]) -> bytes:
    text = json.dumps(header)
    return text.replace('"input_ids"', '"returns"').encode()


def with_host(change: Callable[[str], str]) -> Callable[[dict[str, Any]], Any]:
    def change_header(header: dict[str, Any]) -> dict[str, Any]:
        metadata = header["__metadata__"]
        return {**header, "__metadata__": {**metadata, "host": change(metadata["host"])}}

    return change_header


HEADERS: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (raw(""), "its header is no JSON object"),
    (raw("[]"), "its header is no JSON object"),
    (raw("{" * 100_000), "Expecting property name"),
    (raw('{"a":' * 100_000), "maximum recursion depth exceeded"),
    (raw('{"a": "\xff"}'), "'utf-8' codec can't decode byte 0xff"),
    (raw('{"a": NaN}'), "its header has NaN, which is no JSON"),
    (raw("{}"), "its format is None"),
    (raw('{"__metadata__": 3}'), "its metadata must be texts by name, got 3"),
    (twice, "its header has a key twice"),
    (with_host(lambda host: host.replace('"groups"', '"ids"')), "its header has a key twice"),
    (with_host(lambda host: "[" * 100_000), "maximum recursion depth exceeded"),
    (with_host(lambda host: host.replace("0.5", "NaN")), "its header has NaN"),
    (with_host(lambda host: host.replace("0.5", "1e400")), "turn_discounts must be finite"),
    (with_host(lambda host: host.replace("0.5", "9" * 5000)), "Exceeds the limit"),
    (with_host(lambda host: host.replace('ps": 3', 'ps": ' + "9" * 4000)), "num_groups must be 3"),
    (changed("__metadata__", host=3), "its metadata must be texts by name, got"),
    (changed("__metadata__", schema_version="9"), "it has schema version 9, this release reads"),
    (changed("__metadata__", schema_version="\x1b"), r"it has schema version '\\x1b', this"),
    (changed("__metadata__", format="x" * 10**6), "its format is 'xxx"),
    (
        lambda header: {**header, "y" * 10**6: header["input_ids"]},
        "'yyy.* begins|'input_ids' begins",
    ),
    (changed("input_ids", dtype="I32"), "'input_ids' must have data_offsets of"),
    (changed("input_ids", dtype="Q7"), "'input_ids' must be of a known dtype, got 'Q7'"),
    (changed("input_ids", dtype=["I64"]), "'input_ids' must be of a known dtype, got .'I64'."),
    (changed("input_ids", shape=[3.0]), "shape of 'input_ids' must be sizes, got"),
    (changed("input_ids", shape=[True]), "shape of 'input_ids' must be sizes, got"),
    (changed("input_ids", shape=[-1]), "shape of 'input_ids' must be sizes, got"),
    (changed("input_ids", shape=[2**62, 4]), "'input_ids' must have data_offsets of 14"),
    (changed("input_ids", shape=[10**4000]), "shape of 'input_ids' must be sizes, got"),
    (changed("input_ids", shape=[1] * 10**5), "shape of 'input_ids' must be sizes, got"),
    (changed("input_ids", shape=15), "shape of 'input_ids' must be sizes, got 15"),
    (changed("input_ids", data_offsets=[0]), "'input_ids' must have data_offsets of"),
    (changed("input_ids", data_offsets=[120, 0]), "'input_ids' must have data_offsets of"),
    (changed("input_ids", data_offsets=[2**40, 2**40 + 8 * 18]), "'position_ids' begins at byte"),
    (changed("input_ids", more=1), "'input_ids' must have dtype, shape and data_offsets"),
    (lambda header: {**header, "input_ids": 3}, "'input_ids' must have dtype, shape and data_o"),
    (lambda header: {**header, "x": header["input_ids"]}, "'x' begins|'input_ids' begins"),
    (
        lambda header: {name: part for name, part in header.items() if name != "input_ids"},
        "begins at byte .*, expected|its tensors end at byte",
    ),
]


@pytest.mark.parametrize(("change", "message"), HEADERS)
def test_a_header_that_lies_is_refused(
    change: Callable[[dict[str, Any]], Any], message: str, path: Path
) -> None:
    pack(some_trajectories()).save(path)
    header, data = parts_of(path.read_bytes())
    path.write_bytes(put_together(change(header), data))
    with pytest.raises(
        ValueError, match=f"^{path} is not a readable packed batch: .*({message})"
    ) as e:
        PackedBatch.load(path)
    assert len(str(e.value)) < 2000
    assert "is not a readable packed batch" in refusal("inspect", path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it has 0 bytes, too few for a header"),
        (b"1234567", "it has 7 bytes, too few for a header"),
        (b"\xff" * 99, "its header would take 18,446,744,073,709,551,615 bytes of its 99"),
        (struct.pack("<Q", 92) + b"{" * 91, "its header would take 92 bytes of its 99"),
        (struct.pack("<Q", 0), "its header is no JSON object"),
    ],
)
def test_content_without_a_header_is_refused(content: bytes, message: str, path: Path) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        PackedBatch.load(path)


@pytest.mark.parametrize(
    "described",
    [
        {"fill": "00" * 8},
        {"fill": "zz" * 4},
        {"fill": ""},
        {"fill": 0},
        {"dtype": "float33"},
        {"dtype": "nn"},
        {"dtype": "load"},
        {"dtype": 3},
        {"dtype": None},
        {"dtype": "complex128", "fill": "00" * 16},
        {"dtype": "quint4x2", "fill": "00"},
        {"dtype": "bool", "fill": "5a"},
        {"shape": [0]},
        {"shape": ["2"]},
        {"shape": 2},
        {"shape": [2**70]},
        {"name": ""},
        {"name": 3},
        {"name": "input_ids"},
        {"name": "\ud800"},
        {"generated_only": 1},
        {"generated_only": None},
        {"more": 1},
    ],
)
def test_a_declared_field_that_cannot_be_is_refused(described: dict[str, Any], path: Path) -> None:
    batch = pack(map(with_rows, some_trajectories()), fields=FIELDS)
    batch.save(path)
    header, data = parts_of(path.read_bytes())
    host = json.loads(header["__metadata__"]["host"])
    host["token_fields"][0] |= described
    header["__metadata__"]["host"] = json.dumps(host)
    path.write_bytes(put_together(header, data))
    with pytest.raises(ValueError, match=r"^.* is not a readable packed batch: .*field"):
        PackedBatch.load(path)


def test_prompts_in_layout_turns_repeat_the_turn_they_go_on_from(path: Path) -> None:
    first, second = Turn([1, 2], [3], [-0.5]), Turn([1, 2, 3, 4], [5], [-0.5])
    batch = pack([Trajectory("a", [first, second, second])], "turns")
    assert batch.turn_begin.tolist() == [0, 6, 8]
    all_new = dataclasses.replace(batch, turn_begin=batch.cu_seqlens[:-1].clone())
    all_new.save(path)  # as `pack_resident` has it
    for begin, turn in (([0, 5, 8], 1), ([0, 6, 11], 2)):
        wrong = dataclasses.replace(batch, turn_begin=torch.tensor(begin, dtype=torch.int32))
        with pytest.raises(ValueError, match=f"turn_begin .* turn {turn} goes on from an earlier"):
            wrong.save(path)
    ids = batch.input_ids.clone()
    ids[3] = 9
    with pytest.raises(ValueError, match=r"turn_begin .* turn 1 goes on from an earlier"):
        dataclasses.replace(batch, input_ids=ids).save(path)


def test_returns_may_differ_by_rounding_and_where_discounts_overflow(path: Path) -> None:
    turns = [Turn([1], [2], [0.0], reward=0.1 * i) for i in range(9)]
    batch = pack([Trajectory("a", turns, turn_discount=0.9)])
    near = torch.nextafter(batch.turn_returns, torch.tensor(9.0))
    off = batch.turn_returns * (1 + 1e-4)
    filled = batch.turn_ids.clamp(min=0).long()
    for returns in (near, off):
        spread = torch.where(batch.loss_mask, returns[filled], 0.0)
        other = dataclasses.replace(batch, turn_returns=returns, returns=spread)
        if returns is near:
            other.save(path)
            continue
        with pytest.raises(ValueError, match="turn_returns must be turn_rewards discounted"):
            other.save(path)
    vast = pack([Trajectory("a", turns, turn_discount=1e38)])
    vast.save(path)
    assert_batches_equal(PackedBatch.load(path), vast)


@pytest.mark.parametrize("name", ["cu_seqlens", "turn_rewards"])
@pytest.mark.parametrize("value", [None, [0, 3], np.zeros(1), torch.tensor(0)], ids=str)
def test_bounds_that_are_no_vector_are_refused_by_name(
    name: str, value: Any, tmp_path: Path
) -> None:
    batch = pack([Trajectory("a", [Turn([1, 2], [3], [-0.5])])])
    with pytest.raises(ValueError, match=f"^the batch cannot be saved: {name} must "):
        dataclasses.replace(batch, **{name: value}).save(tmp_path / "batch.safetensors")


def test_rows_of_any_kind_are_added_or_refused_by_name() -> None:
    batch = pack([Trajectory("a", [Turn([1, 2], [3], [-0.5])])])
    numbers = torch.complex(torch.ones(3), torch.ones(3)).conj()
    field = TokenField("conjugate", torch.complex64)
    assert batch.with_field(field, numbers).fields["conjugate"].tolist() == [0, 0, 1 - 1j]
    field = TokenField("negative", torch.float32)
    assert batch.with_field(field, numbers.imag).fields["negative"].tolist() == [0, 0, -1]
    with pytest.raises(ValueError, match=r"field 'negative': rows must be dense, got torch.sparse"):
        batch.with_field(field, torch.ones(3).to_sparse())
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"'negative': rows cannot be read: .* memory was freed"):
        batch.with_field(field, freed)


class Failing(list[Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("gone")


class FailingMapping(dict[str, Any]):
    def __iter__(self) -> Any:
        raise RuntimeError("gone")


class Lying(tuple[Any, ...]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("input_ids", lambda batch: torch.nested.nested_tensor([batch.input_ids])),
        ("input_ids", lambda batch: FakeTensorMode().from_tensor(batch.input_ids)),
        ("ids", lambda _: Failing(["a"])),
        ("ids", lambda _: Lying(["a"])),
        ("token_fields", lambda _: TokenField("a", torch.int32)),
        ("token_fields", lambda _: 3),
        ("fields", lambda _: FailingMapping(a=1)),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_cannot_be_read_is_refused_by_name(name: str, make: Any, tmp_path: Path) -> None:
    batch = pack([Trajectory("a", [Turn([1, 2], [3], [-0.5])])])
    with pytest.raises(ValueError, match=f"^the batch cannot be saved: {name} must be "):
        dataclasses.replace(batch, **{name: make(batch)}).save(tmp_path / "batch.safetensors")
    assert not list(tmp_path.iterdir())
