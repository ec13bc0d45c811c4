"""Attacks on files of packed batches: each is refused by name, or is a batch that can be used."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from tests.packing.batch.batch_files import (
    WAYS,
    parts_of,
    put_together,
    seeded,
    some_trajectories,
    use,
)
from tests.ptx.executor import on_executor
from trajpack import PackedBatch, pack
from trajpack.testing import assert_batches_equal

CODES = {"I64": np.int64, "I32": np.int32, "F32": np.float32, "F64": np.float64, "BOOL": np.uint8}
ODD = [-(2**31), -2, -1, 0, 1, 2, 3, 7, 90, 255, 2**15, 2**31 - 1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "batch.safetensors"


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Files of a batch of every origin, in both layouts."""
    place = tmp_path_factory.mktemp("contents") / "batch.safetensors"
    found = []
    with on_executor():
        for way, layout in [(way, layout) for way in WAYS for layout in ("merged", "turns")]:
            WAYS[way](some_trajectories(), layout).save(place)
            found.append(place.read_bytes())
    return found


def judged(path: Path, content: bytes) -> PackedBatch | None:
    """Load it; a refusal must name the file and say what is wrong."""
    path.write_bytes(content)
    try:
        loaded = PackedBatch.load(path)
        safetensors.deserialize(content)  # no file is read that the library would refuse
        return loaded
    except ValueError as error:
        if len(str(error).removeprefix(f"{path} is not a readable packed batch: ")) < 5:
            raise
        return None if str(error).startswith(str(path)) else pytest.fail(str(error))


def changed_tensor(content: bytes, rng: np.random.Generator) -> bytes:
    """Set some entries of a tensor to odd values, or to those of its other entries."""
    header, data = parts_of(content)
    name = rng.choice([name for name in header if name != "__metadata__"])
    begin, end = header[name]["data_offsets"]
    values = np.frombuffer(data[begin:end], CODES.get(header[name]["dtype"], np.uint8)).copy()
    for _ in range(rng.integers(1, 3) if values.size else 0):
        at = rng.integers(values.size)
        if rng.random() < 0.3:
            values[at] = values[rng.integers(values.size)]
        elif values.dtype.kind == "f":
            values[at] = rng.choice([0.0, -0.0, np.nan, np.inf, -1.5, 1e30, 1e-40])
        else:
            values[at] = np.array(rng.choice(ODD)).astype(values.dtype)
    return put_together(header, data[:begin] + values.tobytes() + data[end:])


OTHERS = [None, True, 0, -1, 2**31, 2**63, 10**30, 0.5, 1e308, "", "x", [], {}, [[1]], "\ud800"]


def changed_value(value: Any, rng: np.random.Generator) -> Any:
    """Change something in a value of JSON: leave it out, repeat it, or put another in its place."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.1:
        if type(value) is int and rng.random() < 0.5:
            return value + int(rng.choice([-8, -1, 1, 8]))
        return OTHERS[rng.integers(len(OTHERS))]
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = keys[rng.integers(len(keys))]
    changed = value.copy()
    kind = rng.random()
    if kind < 0.1:
        del changed[key]
    elif kind < 0.2:
        if isinstance(changed, dict):
            changed[f"{key}x"] = value[key]
        else:
            changed.append(value[key])
    else:
        changed[key] = changed_value(value[key], rng)
    return changed


def changed_header(content: bytes, rng: np.random.Generator) -> bytes:
    """Change an entry of the header or of the metadata in it."""
    header, data = parts_of(content)
    if rng.random() < 0.7:
        host = json.loads(header["__metadata__"]["host"])
        header["__metadata__"]["host"] = json.dumps(changed_value(host, rng))
    else:
        header = changed_value(header, rng)
    return put_together(header, data)


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """Cut bytes off, put some in, take some out, or write over some."""
    changed = bytearray(content)
    kind, at = rng.integers(5), rng.integers(len(content))
    if kind == 0:
        del changed[at:]
    elif kind == 1:
        changed[at:at] = rng.bytes(rng.integers(1, 64))
    elif kind == 2:
        del changed[at : at + rng.integers(1, 64)]
    elif kind == 3:
        changed[at : at + 8] = rng.bytes(8)
    else:
        changed[at % 8] = rng.integers(256)  # of the header's length
    return bytes(changed)


@pytest.mark.slow
@pytest.mark.attack
def test_files_changed_in_single_values_are_refused_or_can_be_used(
    contents: list[bytes], path: Path, tries: Callable[[int], int]
) -> None:
    accepted = 0
    for seed in range(tries(11_000)):
        with seeded(seed) as rng:
            content = contents[rng.integers(len(contents))]
            change = changed_tensor if rng.random() < 0.7 else changed_header
            loaded = judged(path, change(content, rng))
            if loaded is not None:
                accepted += 1
                use(loaded, path)
    assert accepted


@pytest.mark.attack
def test_files_of_damaged_bytes_are_refused_or_can_be_used(
    contents: list[bytes], path: Path, tries: Callable[[int], int]
) -> None:
    for seed in range(tries(6_000)):
        with seeded(seed) as rng:
            content = contents[rng.integers(len(contents))]
            loaded = judged(path, damaged(content, rng))
            if loaded is not None:
                use(loaded, path)


@pytest.mark.slow
@pytest.mark.attack
def test_single_flipped_bits_are_refused_or_leave_a_batch_that_fits_together(
    contents: list[bytes], path: Path, tries: Callable[[int], int]
) -> None:
    """In each tensor, in the header and in its length."""
    places = []
    for number, content in enumerate(contents):
        header, data = parts_of(content)
        begin = len(content) - len(data)
        parts = {"length": (0, 8), "header": (8, begin)}
        for name, entry in header.items():
            if name != "__metadata__" and entry["data_offsets"][0] < entry["data_offsets"][1]:
                parts[name] = tuple(begin + offset for offset in entry["data_offsets"])
        places += [(number, name, part) for name, part in parts.items()]
    silent = set()
    for seed in range(tries(10_000)):
        with seeded(seed) as rng:
            number, name, (first, end) = places[seed % len(places)]
            content = bytearray(contents[number])
            content[rng.integers(first, end)] ^= 1 << rng.integers(8)
            loaded = judged(path, bytes(content))
            if loaded is not None:
                silent.add(name)
                loaded.save(path)
                assert_batches_equal(PackedBatch.load(path), loaded)
    derived = {"position_ids", "sequence_ids", "turn_ids", "prompt_mask", "loss_mask", "cu_seqlens"}
    derived |= {"cu_turns", "cu_generated", "group_ids", "turn_sequence", "turn_spans", "length"}
    assert not silent & derived
    assert silent & {"input_ids", "rollout_logprobs", "turn_truncated"}


@pytest.mark.attack
def test_a_file_that_is_rewritten_while_it_is_read_is_refused_or_whole(
    path: Path, tries: Callable[[int], int]
) -> None:
    batches = [pack(some_trajectories()), pack(some_trajectories()[::-1])]
    contents = []
    for batch in batches:
        batch.save(path)
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
                loaded = PackedBatch.load(path)
            except ValueError as error:
                refused += str(error).startswith(f"{path} is not a readable packed batch: ")
            else:
                whole += loaded.unpack() in given
    finally:
        over.set()
        writer.join()
        sys.setswitchinterval(interval)
    assert refused + whole == tries(2000)
