"""Parquet export, and conversion of logs that an earlier release wrote as segments."""

import json
import random
import shutil
import sys
import zlib

import numpy as np
import pytest
import torch

from tests.packing.trajectory_log.log_cases import BY_HAND, read, turn, write
from tests.packing.trajectory_log.old_log_cases import (
    ERRORS,
    FIELDS,
    NAMES,
    OLD_LOG,
    SEGMENTS,
    trajectories,
)
from trajpack import TokenField, Trajectory, Turn, pack
from trajpack.packing.trajectory_log import parquet as log_parquet
from trajpack.packing.trajectory_log.log import TrajectoryLog
from trajpack.packing.trajectory_log.options import DamagedLogError, LogInUseError, LogOptions
from trajpack.packing.types import VersionSpan
from trajpack.testing import assert_batches_equal

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
SKIP = LogOptions(damaged="skip", flush_seconds=3600)


@pytest.fixture
def old(tmp_path):
    return shutil.copytree(OLD_LOG, tmp_path / "log")


def segment(folder, number):
    return folder / f"segment-{number:08d}.parquet"


def manifest(folder):
    return (folder / "manifest.jsonl").read_bytes().splitlines(keepends=True)


def convert(folder, options=BY_HAND):
    TrajectoryLog.open(folder, options=options).close()


def assert_converted(folder, names=NAMES):
    replayed = read(folder)
    assert [one.episode for one in replayed] == names
    for one in replayed:
        if one.error is not None:
            assert one.error == ERRORS[one.episode, 2]
            continue
        originals = [] if one.episode == "new" else trajectories(one.episode)
        assert list(one.trajectories) == originals
        for layout in ("merged", "turns"):
            expected = pack(originals, layout, "cpu", fields=FIELDS)
            assert_batches_equal(pack(one.trajectories, layout, "cpu", fields=FIELDS), expected)


def assert_refused(folder, match):
    """Raise unless a log is refused by name, twice, and nothing of it is changed."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for _ in range(2):
        with pytest.raises(DamagedLogError, match=match) as caught:
            convert(folder)
        assert str(folder) in str(caught.value)
    (folder / "writer.lock").unlink(missing_ok=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_log_is_converted_by_its_next_writer_and_its_files_stay(old):
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    with pytest.raises(ValueError, match=r"in the form of an earlier release; TrajectoryLog\.open"):
        TrajectoryLog.open(old, mode="read")
    with TrajectoryLog.open(old, fields=FIELDS) as log:
        assert (log.failed, log.finished) == ({"lost"}, {*NAMES} - {"lost"})
        assert (log.num_trajectories, log.num_turns) == (7, 11)
    assert_converted(old)
    for name, content in before.items():
        assert (old / name).read_bytes() == content
        (old / name).unlink()
    with TrajectoryLog.open(old, fields=FIELDS) as log:
        log.append("new", [])
    assert_converted(old, [*NAMES, "new"])


def test_the_fields_are_those_of_the_old_log(old):
    with pytest.raises(ValueError, match=r"begun with fields \['values', 'experts'\], got \['v'\]"):
        TrajectoryLog.open(old, fields=[TokenField("v", FIELDS[0].dtype)])


def test_a_log_that_is_written_by_an_earlier_release_is_not_converted(old):
    import fcntl

    with (old / "writer.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("123")
        file.flush()
        with pytest.raises(LogInUseError, match="process 123 "):
            TrajectoryLog.open(old)
    assert not (old / "log.sqlite").exists()


@pytest.mark.parametrize("line", range(1, 1 + len(SEGMENTS)))
@pytest.mark.parametrize("change", ["flip", "cut", "lose", "lose all"])
def test_a_segment_without_its_line_of_the_manifest_is_read(old, line, change):
    lines = manifest(old)
    if change == "flip":
        lines[line] = lines[line][:-20] + bytes([lines[line][-20] ^ 1]) + lines[line][-19:]
    elif change == "lose":
        del lines[line]
    elif change == "lose all":
        del lines[1:]
    else:
        lines = [*lines[:line], lines[line][:-7]]
    (old / "manifest.jsonl").write_bytes(b"".join(lines))
    convert(old)
    assert_converted(old)


def test_a_manifest_without_its_first_line_is_damage(old):
    lines = manifest(old)
    for content in (b"", lines[0][:-1], b"".join(lines[1:]), b"{}\n" + b"".join(lines[1:])):
        (old / "manifest.jsonl").write_bytes(content)
        assert_refused(old, r"manifest\.jsonl is damaged")


@pytest.mark.parametrize("number", range(len(SEGMENTS)))
@pytest.mark.parametrize("change", ["missing", "flipped", "cut", "longer", "of another"])
def test_a_changed_segment_is_damage_or_skipped(old, number, change):
    path = segment(old, number)
    content = path.read_bytes()
    if change == "missing":
        path.unlink()
    else:
        path.write_bytes({
            "flipped": content[:300] + bytes([content[300] ^ 4]) + content[301:],
            "cut": content[:-1],
            "longer": content + b"x",
            "of another": segment(old, (number + 1) % 4).read_bytes(),
        }[change])  # fmt: skip
    assert_refused(old, rf"segment-0000000{number}\.parquet")
    with pytest.warns(UserWarning, match=rf"segment are skipped: .*0000000{number}\.parquet"):
        convert(old, SKIP)
    lost = {"a", "\ud800@0"} if number == 0 else set(SEGMENTS[number])
    assert {one.episode for one in read(old)} == {*NAMES} - lost | (
        {"late"} if number == 1 else set()
    )


def test_a_gap_in_the_numbers_of_segments_is_damage(old):
    lines = manifest(old)
    (old / "manifest.jsonl").write_bytes(b"".join(lines[:2]))
    segment(old, 1).unlink()
    assert_refused(old, r"00000001\.parquet is missing")
    lines[4] = b"x" + lines[4]
    (old / "manifest.jsonl").write_bytes(b"".join(lines))
    shutil.copy(segment(OLD_LOG, 1), segment(old, 1))
    segment(old, 3).unlink()  # the last one, whose line is damaged
    assert_refused(old, r"00000003\.parquet is missing")


def said_of(folder, number, **changes):
    """Change what a line of the manifest says, with a checksum that is right."""
    lines = manifest(folder)
    said = json.loads(lines[number])
    del said["crc32"]
    rest = json.dumps(said | changes, separators=(",", ":"))[1:].replace('"huge"', "1e400")
    lines[number] = b'{"crc32":"%08x",%s\n' % (zlib.crc32(rest.encode()), rest.encode())
    (folder / "manifest.jsonl").write_bytes(b"".join(lines))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_bytes": "huge"}, {"num_tokens": "huge"}, {"segment": "huge"}, {"num_turns": None},
        {"num_bytes": []}, {"episodes": [["a"], {}]}, {"episodes": [1, 2, 3]}, {"episodes": None},
        {"episodes": {"a": 1}}, {"segment_crc32": "x"}, {"segment_crc32": 7}, {"segment": "x"},
        {"segment": 7}, {"num_bytes": 1}, {"episodes": ["a", "late", "b"]}, {"num_tokens": 3},
        {"num_bytes": "9" * 5000}, {"segment": -1}, {"segment": 1}, {"segment": 10**15},
    ],
    ids=str,
)  # fmt: skip
def test_an_impossible_line_with_a_right_checksum_is_damage(old, changes):
    said_of(old, 1, **changes)
    assert_refused(old, "manifest|segment-0")


@pytest.mark.timeout(60)
def test_a_huge_number_of_a_segment_costs_no_time(old):
    said_of(old, 4, segment=10**15)
    shutil.copy(segment(old, 3), segment(old, 10**14))
    with pytest.warns(UserWarning, match=r"00000004\.parquet is missing"):
        convert(old, SKIP)
    assert {one.episode for one in read(old)} == {*NAMES}


def test_an_impossible_header_with_a_right_checksum_is_damage(old):
    fields = json.loads(manifest(old)[0])["fields"]
    for changes in (
        {"format": "other"}, {"schema_version": 2}, {"schema_version": "1"}, {"fields": None},
        {"fields": [1]}, {"fields": [{}]}, {"fields": [fields[0] | {"dtype": "nn"}]},
        {"fields": [fields[0] | {"dtype": 3}]}, {"fields": [fields[0] | {"fill": "zz"}]},
        {"fields": [fields[0] | {"shape": 3}]}, {"fields": fields[:1] * 2},
        {"fields": [fields[0] | {"more": 1}]},
    ):  # fmt: skip
        said_of(old, 0, **changes)
        assert_refused(old, r"manifest\.jsonl is damaged")
        shutil.copy(OLD_LOG / "manifest.jsonl", old)


def test_a_line_that_is_no_json_is_damage_though_its_checksum_is_right(old):
    lines = manifest(old)
    for rest in (b"nonsense", b'"a":' + b"[" * 100_000):
        lines[1] = b'{"crc32":"%08x",%s\n' % (zlib.crc32(rest), rest)
        (old / "manifest.jsonl").write_bytes(b"".join(lines))
        assert_refused(old, r"manifest\.jsonl is damaged: a line is no JSON")


@pytest.mark.attack
def test_flipped_bits_of_an_old_log_are_named_or_do_not_matter(memory_path, tries):
    folder, names = memory_path / "log", sorted(path.name for path in OLD_LOG.iterdir())
    for seed in range(tries(1000)):
        rng = random.Random(seed)
        shutil.copytree(OLD_LOG, folder)
        path = folder / rng.choice(("manifest.jsonl", *names))
        wrong = bytearray(path.read_bytes())
        wrong[rng.randrange(len(wrong))] ^= 1 << rng.randrange(8)
        path.write_bytes(wrong)
        try:
            convert(folder)
        except DamagedLogError as error:
            assert str(folder) in str(error), seed  # noqa: PT017
            assert not (folder / "log.sqlite").exists(), seed
        else:
            replayed = read(folder)
            assert [one.episode for one in replayed] == NAMES, seed
            for one in replayed:
                expected = [] if one.episode == "lost" else trajectories(one.episode)
                assert list(one.trajectories) == expected, seed
        shutil.rmtree(folder)


@pytest.fixture
def plain(tmp_path):
    """Return a log of the old form without fields, whose only segment is easy to change."""
    folder = tmp_path / "plain"
    folder.mkdir()
    rest = '"format":"trajpack.TrajectoryLog","schema_version":1,"fields":[]}'
    line = f'{{"crc32":"{zlib.crc32(rest.encode()):08x}",{rest}\n'
    (folder / "manifest.jsonl").write_text(line)
    with TrajectoryLog.open(tmp_path / "new") as log:
        path = [turn((1, 2, 3), (4, 5)), turn((1, 2, 3, 4, 5, 6), (7,))]
        log.append("e", [Trajectory("e", path), Trajectory("e2", [turn((9,), (8,))])])
        log.flush()
        log.export_parquet(segment(folder, 0))
    put(folder, parquet.read_table(segment(folder, 0)))
    return folder


def put(folder, table, **options):
    header = {"format": "trajpack.TrajectoryLog", "schema_version": 1, "fields": []}
    schema = table.schema.with_metadata({b"trajpack": json.dumps(header)})
    parquet.write_table(table.cast(schema), segment(folder, 0), write_page_checksum=True, **options)


def with_column(folder, name, values, kind=None, nullable=False):
    table = parquet.read_table(segment(folder, 0))
    index = table.schema.get_field_index(name)
    kind = kind or table.schema.field(name).type
    field = pa.field(name, kind, nullable=nullable)
    put(folder, table.set_column(index, field, pa.array(values, kind)))


WRONG_VALUES = [
    ("turn_chain", [-1, 0, 1]), ("turn_size", [-1, 1, 1]), ("num_turns", [1]), ("chain_size", []),
    ("token_ids", []), ("rollout_logprobs", []), ("span_version", [1]), ("turn_reward", []),
    ("turn_reward", [float("nan")] * 3), ("turn_discount", [1.0]), ("trajectory_id", []),
    ("trajectory_id", [b"\xff\xfe", b"b"]), ("trajectory_id", [None, b"b"]),
    ("group", [b"\xff", None]), ("task_id", [1]), ("turn_truncated", [True]),
]  # fmt: skip
"""Lists that differ in length, texts that are none, and some numbers that a record has wrong."""


@pytest.mark.parametrize(("name", "values"), WRONG_VALUES, ids=str)
def test_columns_that_disagree_are_damage(plain, name, values):
    with_column(plain, name, [values])
    assert_refused(plain, r"00000000\.parquet is not a readable segment")


def test_columns_of_other_types_are_damage(plain):
    def lists(kind):
        return pa.large_list(pa.field("element", kind, nullable=False))

    for name, kind, values in (
        ("token_ids", lists(pa.int64()), [[2**40] * 9]),
        ("token_ids", lists(pa.float64()), [[1.5] * 9]),
        ("token_ids", lists(pa.string()), [["a"] * 9]),
        ("token_ids", pa.large_list(pa.int32()), [[None] * 9]),
        ("token_ids", pa.list_(pa.int32()), [[1] * 9]),
        ("token_ids", pa.int32(), [1]),
        ("episode", pa.int64(), [5]),
        ("turn_reward", lists(pa.float32()), [[0.0] * 3]),
        ("error", lists(pa.int8()), [None]),
    ):
        before = segment(plain, 0).read_bytes()
        with_column(plain, name, values, kind, nullable=name == "error")
        assert_refused(plain, r"its columns are not those of its log")
        segment(plain, 0).write_bytes(before)
    table = parquet.read_table(segment(plain, 0))
    put(plain, table.drop_columns(["turn_size"]))
    assert_refused(plain, r"00000000\.parquet is not a readable segment")
    parquet.write_table(table.replace_schema_metadata({}), segment(plain, 0))
    assert_refused(plain, r"00000000\.parquet is not a readable segment")


def test_a_small_segment_that_expands_to_much_memory_is_refused(plain, monkeypatch):
    taken = []
    read_table = parquet.ParquetFile.read
    monkeypatch.setattr(
        parquet.ParquetFile, "read", lambda *a, **k: taken.append(1) or read_table(*a, **k)
    )
    monkeypatch.setattr(log_parquet, "_MAX_COLUMN_BYTES", 1 << 22)
    zeros = np.zeros((1 << 20) + 8, np.int32)
    table = parquet.read_table(segment(plain, 0))
    index = table.schema.get_field_index("token_ids")
    offsets = pa.array(np.array([0, len(zeros)]))
    column = pa.LargeListArray.from_arrays(
        offsets, pa.array(zeros), type=table.schema.field("token_ids").type
    )
    put(plain, table.set_column(index, table.schema.field(index), column), compression="zstd")
    assert segment(plain, 0).stat().st_size < 20_000
    taken.clear()
    assert_refused(plain, "has 1048584 values, at most 1048576 are expected")
    assert not taken


def test_a_segment_with_more_values_than_its_line_says_is_refused(old):
    for changes in ({"num_tokens": 3}, {"num_tokens": 0, "num_turns": 0, "num_trajectories": 0}):
        said_of(old, 1, **changes)
        assert_refused(old, r"values, at most \d+ are expected")


def test_too_little_memory_is_no_damage(old, monkeypatch):
    def fails(*_, **__):
        raise pa.ArrowMemoryError("malloc of size 1 failed")

    monkeypatch.setattr(parquet, "ParquetFile", fails)
    with pytest.raises(MemoryError, match="malloc"):
        convert(old, SKIP)
    assert not (old / "log.sqlite").exists()


def test_an_interrupted_conversion_is_repeated(old, monkeypatch):
    def fail(*_):
        raise OSError("power")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="power"):
        convert(old)
    monkeypatch.undo()
    assert not list(old.glob("log.sqlite*"))
    (old / "log.sqlite.tmp").write_bytes(b"left by one that was killed")
    convert(old)
    assert_converted(old)


def test_export_as_parquet(tmp_path):
    field = TokenField("v", torch.float32)
    spans = [VersionSpan(1, 0, 1), VersionSpan(2, 1, 2)]
    one = Turn([1, 2], [3, 4], [-0.5, -1.0], 0.25, True, 1, 2, spans, {"v": [0.5, 1.5]})
    other = Turn([1, 2, 3, 4, 5], [6], [-2.0], version_start=2, version_end=2, fields={"v": [2.5]})
    with TrajectoryLog.open(tmp_path / "episodes", fields=[field], options=BY_HAND) as log:
        log.append("a", [Trajectory("\ud800", [one, other], None, 0.5, None, 7)])
        log.append("b", [], error="gone")
        log.append("waiting", [])
        with pytest.raises(ValueError, match=r"compression_level must be in \[1, 22\], got 99"):
            log.export_parquet(tmp_path / "no", compression_level=99)
        log.flush()
        log.append("later", [])
        log.export_parquet(tmp_path / "log.parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["episodes", "log.parquet"]
    table = parquet.read_table(tmp_path / "log.parquet")
    assert json.loads(table.schema.metadata[b"trajpack"]) == {"fields": [field.as_json()]}
    rows = table.to_pylist()
    assert [row["episode"] for row in rows] == [b"a", b"b", b"waiting"]
    assert rows[0] == {
        "episode": b"a", "error": None, "trajectory_id": [b"\xed\xa0\x80"], "group": [None],
        "task_id": [None], "birth_time_ms": [7], "turn_discount": [0.5], "num_turns": [2],
        "chain_size": [6], "token_ids": [1, 2, 3, 4, 5, 6], "turn_chain": [0, 0],
        "turn_begin": [2, 5], "turn_size": [2, 1], "turn_reward": [0.25, 0.0],
        "turn_truncated": [True, False], "turn_version_start": [1, 2],
        "turn_version_end": [2, 2], "turn_num_spans": [2, 0], "span_version": [1, 2],
        "span_start": [0, 1], "span_end": [1, 2], "rollout_logprobs": [-0.5, -1.0, -2.0],
        "field_0": np.array([0.5, 1.5, 2.5], np.float32).tobytes(),
    }  # fmt: skip
    assert (rows[1]["error"], rows[1]["token_ids"]) == (b"gone", [])


def test_conversion_and_export_without_pyarrow_name_the_extra(old, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"'pyarrow': install trajpack\[log\]"):
        TrajectoryLog.open(old)
    assert not (old / "log.sqlite").exists()
    write(tmp_path / "new", [0])
    with TrajectoryLog.open(tmp_path / "new", mode="read") as log:
        assert len(list(log.replay())) == 1
        with pytest.raises(ImportError, match=r"'pyarrow': install trajpack\[log\]"):
            log.export_parquet(tmp_path / "log.parquet")
