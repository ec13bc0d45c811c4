"""Torn manifests, damaged segments, and logs of other releases."""

import json
import random
import re
import shutil
import sys
import zlib

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.packing.log_cases import assert_holds, episode, read, write
from trajpack.packing.log_options import DamagedLogError, LogOptions
from trajpack.packing.trajectory_log import TrajectoryLog


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Return a log of three segments."""
    folder = tmp_path_factory.mktemp("three")
    write(folder, [0, 1], [2], [3, 4])
    return folder


@pytest.fixture
def copy(three, tmp_path):
    return shutil.copytree(three, tmp_path / "log")


def segment(folder, number):
    return folder / f"segment-{number:08d}.parquet"


def line_ends(content):
    return [index + 1 for index, byte in enumerate(content) if byte == ord("\n")]


def test_a_manifest_torn_anywhere_is_read_as_far_as_it_is_whole(copy):
    manifest = copy / "manifest.jsonl"
    content = manifest.read_bytes()
    header, first, second, last = line_ends(content)
    assert last == len(content)
    for size in range(header, last + 1):
        manifest.write_bytes(content[:size])
        with TrajectoryLog.open(copy, mode="read") as log:
            assert len(log) == 2 * (size >= first) + (size >= second) + 2 * (size >= last)
        assert manifest.stat().st_size == size  # whoever reads changes nothing
    for size in range(header):
        manifest.write_bytes(content[:size])
        with pytest.raises(DamagedLogError, match=r"manifest\.jsonl: line 1 is damaged"):
            TrajectoryLog.open(copy)
    assert segment(copy, 0).exists()


def test_a_writer_mends_a_torn_manifest_and_loses_nothing(copy):
    manifest = copy / "manifest.jsonl"
    content = manifest.read_bytes()
    header, *ends = line_ends(content)
    sizes = random.Random(0).sample(range(header, len(content)), 12)
    for size in (header, *ends, ends[-1] - 1, *sizes):
        manifest.write_bytes(content[:size])
        with TrajectoryLog.open(copy) as log:
            assert len(log) == 5
        assert manifest.read_bytes() == content
    for tail in (b"\0" * 4096, b'{"crc32":' * 99):  # longer than the line that takes its place
        manifest.write_bytes(content[: ends[1]] + tail)
        TrajectoryLog.open(copy).close()
        assert manifest.read_bytes() == content
    manifest.write_bytes(content[:-1])
    write(copy, [5])
    assert_holds(copy, range(6))


def test_a_last_line_that_is_wrong_is_written_anew_and_any_other_is_damage(copy):
    manifest = copy / "manifest.jsonl"
    content = manifest.read_bytes()
    ends = line_ends(content)
    for number, end in enumerate(ends):
        wrong = bytearray(content)
        wrong[end - 3] ^= 1
        manifest.write_bytes(wrong)
        if end == ends[-1]:
            TrajectoryLog.open(copy).close()
            assert manifest.read_bytes() == content
        else:
            with pytest.raises(DamagedLogError, match=f"line {number + 1} is damaged"):
                TrajectoryLog.open(copy, mode="read")
    manifest.write_bytes(content[: ends[0]] + content[ends[1] :])
    with pytest.raises(DamagedLogError, match="line 2 should be of segment 0, it is of segment 1"):
        TrajectoryLog.open(copy)


@pytest.mark.parametrize("options", [LogOptions(), LogOptions(damaged="skip")])
def test_a_segment_beyond_a_missing_one_is_no_accident_of_a_crash(copy, options):
    manifest = copy / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes()[: line_ends(manifest.read_bytes())[1]])
    segment(copy, 1).unlink()
    with pytest.raises(DamagedLogError, match=r"000001\.parquet is missing, but .*000002\.parquet"):
        TrajectoryLog.open(copy, options=options)
    assert segment(copy, 2).exists()


def test_a_segment_of_another_length_is_named_or_skipped(copy):
    whole = segment(copy, 1).read_bytes()
    said = r"segment-00000001\.parquet is (missing|damaged: \d+ bytes instead of \d+)"
    for content in (None, b"", whole[:-1], whole + b"x"):
        segment(copy, 1).unlink(missing_ok=True)
        if content is not None:
            segment(copy, 1).write_bytes(content)
        for mode in ("read", "append"):
            with pytest.raises(DamagedLogError, match=said):
                TrajectoryLog.open(copy, mode=mode)
            with pytest.warns(UserWarning, match=f"1 episodes skipped: .*{said}"):
                log = TrajectoryLog.open(copy, mode=mode, options=LogOptions(damaged="skip"))
            with log:
                assert log.finished == {"e0", "e1", "e3", "e4"}
                assert [one.episode for one in log.replay()] == ["e0", "e1", "e3", "e4"]
    with pytest.warns(UserWarning, match="skipped"):
        log = TrajectoryLog.open(copy, options=LogOptions(damaged="skip"))
    with log:
        log.append("e2", [episode(2)])  # once more, for it is not there
    segment(copy, 1).write_bytes(whole)  # found again, after all
    assert [one.episode for one in read(copy)] == ["e0", "e1", "e3", "e4", "e2"]


def test_a_bit_that_changed_is_found_wherever_it_is(copy):
    path, rng = segment(copy, 0), random.Random(0)
    whole = path.read_bytes()
    for index in rng.sample(range(len(whole)), 40):
        wrong = bytearray(whole)
        wrong[index] ^= 1 << rng.randrange(8)
        path.write_bytes(wrong)
        with pytest.raises(DamagedLogError, match=r"segment-00000000\.parquet is damaged"):
            read(copy)
    with pytest.warns(UserWarning, match="2 episodes skipped"):
        assert [one.episode for one in read(copy, damaged="skip")] == ["e2", "e3", "e4"]


def test_a_segment_is_read_when_its_turn_comes(copy):
    with TrajectoryLog.open(copy, mode="read") as log:
        replayed = log.replay()
        segment(copy, 2).unlink()  # no trace of it is in memory
        assert [next(replayed).episode for _ in range(3)] == ["e0", "e1", "e2"]
        with pytest.raises(FileNotFoundError, match=r"segment-00000002\.parquet"):
            next(replayed)


def test_a_segment_that_no_line_names_is_taken_in_only_if_it_is_right(copy):
    manifest, path = copy / "manifest.jsonl", segment(copy, 2)
    content, whole = manifest.read_bytes(), path.read_bytes()
    for wrong in (b"", whole[:-9], whole[:1000] + b"\0" * 9 + whole[1009:]):
        manifest.write_bytes(content[:-1])
        path.write_bytes(wrong)
        with pytest.raises(DamagedLogError, match=r"000002\.parquet is not a readable segment"):
            TrajectoryLog.open(copy)
    path.write_bytes(whole)
    TrajectoryLog.open(copy).close()
    assert_holds(copy, range(5))


def test_a_segment_that_no_line_names_can_be_skipped(copy):
    manifest, path = copy / "manifest.jsonl", segment(copy, 2)
    manifest.write_bytes(manifest.read_bytes()[:-1])
    wrong = path.read_bytes()[:-9]
    path.write_bytes(wrong)
    with pytest.warns(UserWarning, match=r"all episodes skipped: .*000002\.parquet is not a read"):
        log = TrajectoryLog.open(copy, options=LogOptions(damaged="skip"))
    with log:
        assert log.finished == {"e0", "e1", "e2"}
        for number in (3, 4):  # done again
            log.append(f"e{number}", [episode(number)])
    assert_holds(copy, range(5))
    assert path.read_bytes() == wrong  # it may be mended by hand


def test_a_manifest_begun_anew_is_rebuilt_from_the_segments(copy):
    manifest = copy / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    manifest.write_bytes(lines[0] + b"nonsense\n" + lines[2])
    with pytest.raises(DamagedLogError, match="line 2 is damaged"):
        TrajectoryLog.open(copy)
    manifest.write_bytes(lines[0])
    TrajectoryLog.open(copy).close()
    assert manifest.read_bytes() == b"".join(lines)


def test_a_line_that_is_no_json_is_damage_though_its_checksum_is_right(copy):
    manifest = copy / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    for rest in (b"nonsense", b'"a":' + b"[" * 100_000):
        lines[1] = b'{"crc32":"%08x",%s\n' % (zlib.crc32(rest), rest)
        manifest.write_bytes(b"".join(lines))
        with pytest.raises(DamagedLogError, match="line 2 is damaged"):
            TrajectoryLog.open(copy)


def rewrite(folder, change):
    """Let ``change`` have each line of the manifest, and give it a checksum again."""
    lines = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    with (folder / "manifest.jsonl").open("w") as file:
        for line in lines:
            del line["crc32"]
            rest = json.dumps(change(line))[1:]
            file.write(f'{{"crc32":"{zlib.crc32(rest.encode()):08x}",{rest}\n')


@pytest.mark.parametrize("mode", ["append", "read"])
def test_what_a_later_release_changed_is_refused_by_name(copy, mode):
    for version in (2, 0, -1, "1", None):
        said = {"schema_version": version}
        rewrite(copy, lambda line, said=said: line | (said if "format" in line else {}))
        with pytest.raises(ValueError, match=f"schema version {version!r}, this release reads ver"):
            TrajectoryLog.open(copy, mode=mode)
    rewrite(copy, lambda line: line | ({"format": "other"} if "format" in line else {}))
    with pytest.raises(ValueError, match="is no trajectory log: its format is 'other'"):
        TrajectoryLog.open(copy, mode=mode)


def test_what_a_later_release_added_is_left_alone(copy):
    for number in range(3):
        path = segment(copy, number)
        table = parquet.read_table(path)
        parquet.write_table(table.append_column("new", pa.nulls(len(table))), path)

    def change(line):
        if "segment" in line:
            content = segment(copy, line["segment"]).read_bytes()
            checksum = f"{zlib.crc32(content):08x}"
            line |= {"num_bytes": len(content), "segment_crc32": checksum}
        return line | {"added": [1]}

    rewrite(copy, change)
    assert_holds(copy, range(5))
    write(copy, [5])
    assert_holds(copy, range(6))


def test_only_a_folder_of_its_own_becomes_a_log(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path} holds no trajectory log")):
        TrajectoryLog.open(tmp_path, mode="read")
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"neither empty nor a trajectory log.* 'thesis\.txt'"):
        TrajectoryLog.open(tmp_path)
    with pytest.raises(ValueError, match="mode must be 'append' or 'read', got 'w'"):
        TrajectoryLog.open(tmp_path, mode="w")
    for name, value in {"flush_seconds": 0, "compression_level": 99, "damaged": "no"}.items():
        with pytest.raises(ValueError, match=f"{name} must be .*, got "):
            LogOptions(**{name: value})


def test_whoever_lacks_pyarrow_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"needs pyarrow: pip install 'trajpack\[log\]'"):
        TrajectoryLog.open(tmp_path)
