"""Changed files of a log: an error with its name, or all undamaged episodes."""

import os
import random
import re
import shutil
import signal
import sqlite3
import tracemalloc
import warnings
import zlib
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.packing.trajectory_log.log_cases import (
    BY_HAND,
    assert_holds,
    die_in_a_transaction,
    episode,
    in_a_fork,
    read,
    turn,
    write,
)
from tests.packing.trajectory_log.sqlite_calls import needs_sqlite_calls
from tests.support.slow import slow
from trajpack import Trajectory, Turn
from trajpack.packing.trajectory_log.log import TrajectoryLog
from trajpack.packing.trajectory_log.options import DamagedLogError, LogOptions

SKIP = LogOptions(damaged="skip", flush_seconds=3600)


def long_episode(number):
    rng = np.random.default_rng(number)
    ids = rng.integers(0, 2**31 - 1, 4000).astype(np.int32)
    return [Trajectory(f"long{number}", [Turn(ids[:3000], ids[3000:], np.zeros(1000, np.float32))])]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a log of two writers and four transactions, with a failure that was tried again."""
    folder = tmp_path_factory.mktemp("small")
    write(folder, [0, 1], [2])
    with TrajectoryLog.open(folder, options=BY_HAND) as log:
        log.append("lost", [], error="gone")
        log.append("late", [], error="timeout")
        log.flush()
        log.append("late", long_episode(0))
        log.append("e3", [episode(3)])
    return folder


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Return a log whose tables have inner pages, and episodes that need several pages."""
    folder = tmp_path_factory.mktemp("deep")
    with TrajectoryLog.open(folder, options=BY_HAND) as log:
        for number in range(560):
            log.append(f"small{number}", [Trajectory("s", [turn()])])
        for number in range(10):
            log.append(f"long{number}", long_episode(number))
    return folder


def fingerprint(logged):
    """Return all of an episode in a form that is cheap to compare."""
    return logged.error, [
        (one.id, one.group, one.turn_discount, one.task_id, one.birth_time_ms, [
            (bytes(turn.prompt_ids), bytes(turn.completion_ids), bytes(turn.completion_logprobs),
             turn.reward, turn.truncated, turn.version_start, turn.version_end, turn.version_spans)
            for turn in one.turns
        ])
        for one in logged.trajectories
    ]  # fmt: skip


def held_by(folder, options=BY_HAND):
    """Return the episodes of a log by name."""
    with TrajectoryLog.open(folder, mode="read", options=options) as log:
        found = {logged.episode: fingerprint(logged) for logged in log.replay()}
        assert set(found) == log.episodes
        return found


def flipped(content, rng, page_bytes=16384):
    """Flip one bit: anywhere, or where SQLite keeps the structure of a page."""
    where = rng.randrange(len(content))
    if rng.random() < 0.5:
        where = where // page_bytes * page_bytes + rng.choice((0, 0, 100)) + rng.randrange(32)
    if rng.random() < 0.2:
        where = rng.randrange(100)
    wrong = bytearray(content)
    wrong[min(where, len(content) - 1)] ^= 1 << rng.randrange(8)
    return bytes(wrong)


@contextmanager
def trial(source, parent, said):
    """Give a copy of a log to be changed; a failure says how it was."""
    work = shutil.copytree(source, parent / "log")
    try:
        yield work
    except Exception as error:
        raise AssertionError(said) from error
    shutil.rmtree(work)


def assert_refused(folder, match, error=DamagedLogError, **options):
    """Raise unless a log can be opened neither to read nor to append."""
    for mode in ("read", "append"):
        with pytest.raises(error, match=match) as caught:
            TrajectoryLog.open(folder, mode=mode, **options)
        assert_named(caught.value, folder)


def assert_named(error, folder):
    assert isinstance(error, (ValueError, OSError)), repr(error)
    assert str(folder) in str(error), repr(error)
    assert len(str(error).splitlines()) == 1


def readable_one_by_one(folder):
    """Return all that can be read of a log, and the warnings; or the error that refuses it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return held_by(folder, SKIP), [str(one.message) for one in caught]
        except (ValueError, OSError) as error:
            assert_named(error, folder)
            return None, []


def assert_read_right(folder, originals):
    """Raise unless reading gives all episodes or an error, and skipping the undamaged ones."""
    try:
        assert held_by(folder) == originals
    except (ValueError, OSError) as error:
        assert_named(error, folder)
    found, said = readable_one_by_one(folder)
    if found is not None:
        num_missing = len(set(originals) - set(found))
        assert len(said) >= num_missing, (said, num_missing)
        assert all(str(folder) in one for one in said)
        for name, value in found.items():
            assert value == originals[name] or value[0] == "timeout", name


def assert_append_keeps(folder, originals):
    """Raise unless an append either is refused by name, or adds one and harms none."""
    before, _ = readable_one_by_one(folder)
    try:
        with TrajectoryLog.open(folder, options=BY_HAND) as log:
            log.append("new", [Trajectory("new", [turn()])])
            log.flush()
    except (ValueError, OSError) as error:
        assert_named(error, folder)
        after, _ = readable_one_by_one(folder)
        assert after == before
    else:
        after, _ = readable_one_by_one(folder)
        assert after is not None
        assert after.pop("new") is not None
        assert after == before
    assert before is None or set(before) <= set(originals)


def flip(path, rng):
    path.write_bytes(flipped(path.read_bytes(), rng))


def flip_header(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(100)] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path, rng):
    os.truncate(path, rng.randrange(path.stat().st_size))


def lengthen(path, rng):
    tail = rng.choice((b"\0", b"x", b"\0" * 16384, rng.randbytes(5000), path.read_bytes()))
    path.write_bytes(path.read_bytes() + tail)


def blank(path, rng):
    wrong, begin = bytearray(path.read_bytes()), rng.randrange(path.stat().st_size)
    size = rng.choice((1, 16, 512, 16384))
    wrong[begin : begin + size] = bytes(len(wrong[begin : begin + size]))
    path.write_bytes(wrong)


def swap_pages(path, rng):
    pages = [path.read_bytes()[k : k + 16384] for k in range(0, path.stat().st_size, 16384)]
    one, other = rng.sample(range(len(pages)), 2)
    pages[one], pages[other] = pages[other], pages[one]
    path.write_bytes(b"".join(pages))


def lose(path, rng):
    path.with_name(rng.choice(("log.sqlite", "log.sqlite-journal", "writer.lock"))).unlink()


def rename(path, rng):
    path.rename(path.with_name(rng.choice(("log.sqlite-journal", "log.sqlite.tmp", "log.db"))))


def swap_with_journal(path, rng):
    journal = path.with_name("log.sqlite-journal")
    content = journal.read_bytes()
    journal.write_bytes(path.read_bytes())
    path.write_bytes(content)


def link(path, rng):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.parent / rng.choice(("elsewhere", "nowhere", ".")))


def write_journal(path, rng):
    header = bytes.fromhex("d9d505f920a163d7")
    junk = rng.choice((b"x" * 600, header, header * 70, header + rng.randbytes(2000)))
    path.with_name("log.sqlite-journal").write_bytes(junk)


def write_lock(path, rng):
    path.with_name("writer.lock").write_bytes(rng.randbytes(30))


FILE_CHANGES = (
    cut, cut, lengthen, blank, swap_pages, lose, rename, swap_with_journal, link, lose,
    write_journal, lose, write_lock,
)  # fmt: skip


@pytest.mark.attack
@pytest.mark.parametrize(
    ("shape", "check", "changes", "full"),
    [
        slow("small", assert_read_right, (flip,), 5648),
        ("deep", assert_read_right, (flip,), 100),
        slow("small", assert_append_keeps, (flip,), 1854),
        ("deep", assert_append_keeps, (flip,), 60),
        ("small", assert_read_right, (flip_header,), 800),
        ("small", assert_append_keeps, (flip_header,), 800),
        ("small", assert_read_right, FILE_CHANGES, 612),
        ("small", assert_append_keeps, FILE_CHANGES, 612),
    ],
)
def test_a_changed_file_is_an_error_with_its_name_or_is_read_right(
    request, memory_path, tries, shape, check, changes, full
):
    source = request.getfixturevalue(shape)
    originals = held_by(source)
    for seed in range(tries(full)):
        rng, change = random.Random(seed), changes[seed % len(changes)]
        with trial(source, memory_path, f"{change.__name__}, seed {seed}") as work:
            change(work / "log.sqlite", rng)
            check(work, originals)


@pytest.fixture(scope="module")
def unfinished(small, tmp_path_factory):
    """Return a log whose writer died in a transaction, when its file was half written."""
    folder = shutil.copytree(small, tmp_path_factory.mktemp("unfinished") / "log")
    assert in_a_fork(die_in_a_transaction, folder, long_episode(9)) == -signal.SIGKILL
    assert (folder / "log.sqlite-journal").stat().st_size > 1000
    assert (folder / "log.sqlite").read_bytes() != (small / "log.sqlite").read_bytes()
    return folder


@needs_sqlite_calls
@pytest.mark.parametrize("check", [assert_read_right, assert_append_keeps])
def test_an_unfinished_transaction_is_undone(small, unfinished, tmp_path, check):
    with trial(unfinished, tmp_path, "undone") as work:
        check(work, held_by(small))
        assert held_by(work).items() >= held_by(small).items()


@pytest.mark.attack
@needs_sqlite_calls
def test_a_damaged_journal_of_an_unfinished_transaction_is_named(
    small, unfinished, memory_path, tries
):
    originals = held_by(small)
    for seed in range(tries(600)):
        rng, name = random.Random(seed), ("log.sqlite", "log.sqlite-journal")[seed % 2]
        with trial(unfinished, memory_path, f"{name}, seed {seed}") as work:
            (cut if seed % 5 == 0 else flip)(work / name, rng)
            try:
                found = held_by(work)
            except (ValueError, OSError) as error:
                assert_named(error, work)
            else:
                assert found.pop("e9", None) is None or not found.keys() ^ originals.keys()
                assert found == originals


@contextmanager
def database(folder):
    """Connect to a log's file, and close it after."""
    with closing(sqlite3.connect(folder / "log.sqlite", isolation_level=None)) as db:
        yield db


def damage_content(folder, number):
    """Change a token in the content of a row, and nothing else."""
    with database(folder) as db:
        query = "SELECT session FROM episodes WHERE number = ?"
        table = f"contents_{db.execute(query, (number,)).fetchone()[0]}"
        query = f"SELECT content FROM {table} WHERE number = ?"
        (content,) = db.execute(query, (number,)).fetchone()
        wrong = content[:-8] + bytes([content[-8] ^ 1]) + content[-7:]
        db.execute(f"UPDATE {table} SET content = ? WHERE number = ?", (wrong, number))


@pytest.mark.parametrize("mode", ["read", "append"])
def test_a_damaged_episode_is_skipped_and_can_be_appended_again(tmp_path, mode):
    write(tmp_path, [0, 1], [2, 3])
    damage_content(tmp_path, 1)
    with TrajectoryLog.open(tmp_path, mode=mode) as log:
        assert len(log) == 4
        with pytest.raises(DamagedLogError, match=r"log\.sqlite is damaged: episode 'e1': its che"):
            list(log.replay())
    with pytest.warns(
        UserWarning, match=r"1 episode skipped: .*log\.sqlite is damaged: episode 'e1'"
    ):
        log = TrajectoryLog.open(tmp_path, mode=mode, options=SKIP)
    with log:
        assert (len(log), "e1" in log, log.num_trajectories) == (3, False, 3)
        assert log.finished == log.episodes == {"e0", "e2", "e3"}
        assert [one.episode for one in log.replay()] == ["e0", "e2", "e3"]
        if mode == "append":
            log.append("e1", [episode(1)])  # once more, for it is not there
            with pytest.raises(ValueError, match="'e1' is in the log already"):
                log.append("e1", [episode(1)])
    if mode == "append":
        with TrajectoryLog.open(tmp_path) as log:  # whose last record of it is whole
            assert [one.episode for one in log.replay()] == ["e0", "e2", "e3", "e1"]
            assert (len(log), log.num_trajectories) == (4, 4)


def test_damage_of_an_open_log_is_skipped_by_replay(tmp_path):
    write(tmp_path, [0, 1, 2])
    with TrajectoryLog.open(tmp_path, options=SKIP) as log:
        damage_content(tmp_path, 1)
        with pytest.warns(UserWarning, match="1 episode skipped"):
            assert [one.episode for one in log.replay()] == ["e0", "e2"]
        assert (len(log), "e1" in log, log.num_trajectories) == (2, False, 2)
        log.append("e1", [episode(1)])
    with pytest.warns(UserWarning, match="1 episode skipped"):
        assert [one.episode for one in read(tmp_path, damaged="skip")] == ["e0", "e2", "e1"]


def test_a_failure_counts_if_the_later_success_is_damaged(tmp_path):
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as log:
        log.append("late", [], error="timeout")
        log.flush()
        log.append("late", [episode(0)])
    damage_content(tmp_path, 1)
    with pytest.warns(UserWarning, match="'late'"):
        log = TrajectoryLog.open(tmp_path, options=SKIP)
    with log:
        assert (log.finished, log.failed) == (frozenset(), {"late"})
        assert [one.error for one in log.replay()] == ["timeout"]
        log.append("late", [], error="again")
    with pytest.raises(DamagedLogError):  # no failure takes the place of a success
        read(tmp_path)


@pytest.mark.parametrize("options", [BY_HAND, SKIP])
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE episodes SET name = X'78' WHERE number = 1",
        "UPDATE episodes SET failed = 1 WHERE number = 1",
        "UPDATE episodes SET num_tokens = num_tokens + 1 WHERE number = 1",
        "UPDATE episodes SET session = '1; --' WHERE number = 1",
        "UPDATE episodes SET num_bytes = 0.5 WHERE number = 1",
        "UPDATE episodes SET name = X'FF' WHERE number = 1",
        "DELETE FROM episodes WHERE number = 1",
        "DELETE FROM episodes WHERE number = 2",
        "INSERT INTO episodes SELECT 3, name, 0, 1, 1, 1, 1, 1, 1 FROM episodes WHERE number = 1",
        "INSERT INTO episodes SELECT -1, name, 0, 1, 1, 1, 1, 1, 1 FROM episodes WHERE number = 1",
        "UPDATE log SET num_episodes = 2",
        "UPDATE log SET num_episodes = 'x'",
        "UPDATE log SET checksum = checksum + 1",
        "UPDATE log SET described = X'7b7d'",
        "DELETE FROM log",
        "INSERT INTO log SELECT * FROM log",
        "CREATE TRIGGER t AFTER INSERT ON episodes BEGIN DELETE FROM episodes; END",
        "CREATE INDEX i ON episodes (name)",
        "CREATE TABLE more (a)",
        "ALTER TABLE episodes ADD COLUMN more",
        "DROP TABLE contents_1",
        "PRAGMA user_version = 1",
        "PRAGMA application_id = 1",
    ],
)
def test_inconsistent_tables_are_damage(tmp_path, statement, options):
    write(tmp_path, [0, 1, 2])
    with database(tmp_path) as db:
        db.execute(statement)
    assert_refused(tmp_path, r"log\.sqlite", options=options)


def test_a_missing_or_swapped_content_is_damage(tmp_path):
    for statement in (
        "DELETE FROM contents_1 WHERE number = 1",
        "UPDATE contents_1 SET content = 'text' WHERE number = 1",
        "UPDATE contents_1 SET content = (SELECT content FROM contents_1 WHERE number = 0)",
    ):
        folder = tmp_path / str(zlib.crc32(statement.encode()))
        write(folder, [0, 1])
        with database(folder) as db:
            db.execute(statement)
        with pytest.raises(DamagedLogError, match=r"log\.sqlite is damaged: episode 'e1'"):
            read(folder)
        with pytest.warns(UserWarning, match="1 episode skipped: .*'e1'"):
            assert [one.episode for one in read(folder, damaged="skip")] == ["e0"]


def test_a_log_of_a_later_release_is_refused_by_name(tmp_path):
    write(tmp_path, [0])
    with database(tmp_path) as db:
        (described,) = db.execute("SELECT described FROM log").fetchone()
        later = described.replace(b'"schema_version": 2', b'"schema_version": 3')
        db.execute("UPDATE log SET described = ?", (later,))
        db.execute("PRAGMA user_version = 3")
    assert_refused(tmp_path, "has schema version 3, this release reads version 2", ValueError)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i FROM n) SELECT i AS {} FROM n"


@pytest.mark.timeout(60)
def test_an_endless_view_in_place_of_a_table_is_refused(tmp_path):
    for table, column in (("log", "described"), ("episodes", "number"), ("contents_1", "content")):
        for version in (2, 3):
            folder = tmp_path / f"{table}-{version}"
            write(folder, [0])
            with database(folder) as db:
                db.execute(f"DROP TABLE {table}")
                db.execute(f"CREATE VIEW {table} AS {ENDLESS.format(column)}")
                db.execute(f"PRAGMA user_version = {version}")
            assert_refused(folder, r"log\.sqlite is damaged")


@pytest.mark.timeout(60)
def test_a_tree_that_repeats_a_page_is_refused(deep, tmp_path):
    """Or else some pages hold a billion rows."""
    folder = shutil.copytree(deep, tmp_path / "log")
    content = bytearray((folder / "log.sqlite").read_bytes())
    root = 2 * 16384  # of the table episodes
    assert content[root] == 5  # an inner page
    first = int.from_bytes(content[root + 12 : root + 14])
    child = content[root + first : root + first + 4]
    content[root + 3 : root + 5] = (2000).to_bytes(2)
    content[root + 5 : root + 7] = (16384 - 5 * 2000).to_bytes(2)
    for cell in range(2000):
        place = 16384 - 5 * (cell + 1)
        content[root + 12 + 2 * cell : root + 14 + 2 * cell] = place.to_bytes(2)
        content[root + place : root + place + 5] = child + b"\x01"
    (folder / "log.sqlite").write_bytes(content)
    assert_refused(folder, r"log\.sqlite is damaged")


def test_a_content_longer_than_its_entry_is_not_read(tmp_path):
    write(tmp_path, [0, 1])
    with database(tmp_path) as db:
        db.execute("UPDATE contents_1 SET content = zeroblob(100000000) WHERE number = 1")
    with TrajectoryLog.open(tmp_path, mode="read") as log:
        tracemalloc.start()
        try:
            with pytest.raises(DamagedLogError, match="episode 'e1'"):
                list(log.replay())
            assert tracemalloc.get_traced_memory()[1] < 10_000_000
        finally:
            tracemalloc.stop()


def test_a_file_of_another_program_is_refused(tmp_path):
    with database(tmp_path) as db:
        db.execute("CREATE TABLE log (described)")
    assert_refused(tmp_path, "or no log: its application_id is 0x0")


@pytest.mark.parametrize("is_link", [False, True])
def test_a_journal_that_would_delete_a_file_is_refused(tmp_path, is_link):
    """A journal may name a second one, which SQLite deletes when it is done with both."""
    write(tmp_path / "log", [0])
    file = tmp_path / "log" / "log.sqlite"
    if is_link:  # whose journal lies beside the file that it names
        file.rename(file := tmp_path / "log" / "other")
        (tmp_path / "log" / "log.sqlite").symlink_to("other")
    magic, name = bytes.fromhex("d9d505f920a163d7"), os.fsencode(tmp_path / "thesis")
    (tmp_path / "thesis").write_bytes(b"")
    checksum = sum(name)
    journal = magic + bytes(504) + (2**30 // 16384 + 1).to_bytes(4) + name
    journal += len(name).to_bytes(4) + checksum.to_bytes(4) + magic
    file.with_name(f"{file.name}-journal").write_bytes(journal)
    assert_refused(tmp_path / "log", "it names a super-journal")
    assert (tmp_path / "thesis").exists()


@pytest.mark.timeout(60)
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path):
    for name in ("log.sqlite", "log.sqlite-journal", "manifest.jsonl", "segment-00000002.parquet"):
        folder = tmp_path / name
        if name.startswith("log"):
            write(folder, [0])
        else:
            pytest.importorskip("pyarrow")
            shutil.copytree(Path(__file__).parent / "old_log", folder)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(DamagedLogError, match=f"{name} is no regular file"):
            TrajectoryLog.open(folder)
        if name == "log.sqlite":
            with pytest.raises(DamagedLogError, match=f"{name} is no regular file"):
                TrajectoryLog.salvage(folder, tmp_path / "new", fields=[])


def test_a_log_in_another_journal_mode_is_read_and_brought_back(tmp_path):
    write(tmp_path, [0])
    for mode in ("WAL", "DELETE", "PERSIST"):
        with database(tmp_path) as db:
            db.execute(f"PRAGMA journal_mode = {mode}")
            if mode == "DELETE":
                db.execute("VACUUM")
        assert next(one.episode for one in read(tmp_path)) == "e0"
        with TrajectoryLog.open(tmp_path) as log:
            log.append(mode, [])
    assert [one.episode for one in read(tmp_path)] == ["e0", "WAL", "DELETE", "PERSIST"]


def test_a_folder_with_other_files_does_not_become_a_log(tmp_path):
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path} holds no trajectory log")):
        TrajectoryLog.open(tmp_path, mode="read")
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"neither empty nor a trajectory log.* 'thesis\.txt'"):
        TrajectoryLog.open(tmp_path)
    with pytest.raises(ValueError, match="mode must be 'append' or 'read', got 'w'"):
        TrajectoryLog.open(tmp_path, mode="w")
    for name, value in {"flush_seconds": 0, "segment_bytes": 0, "damaged": "no"}.items():
        with pytest.raises(ValueError, match=f"{name} must be .*, got "):
            LogOptions(**{name: value})


def test_an_interrupted_creation_is_repeated(tmp_path):
    for left in ("log.sqlite.tmp", "writer.lock"):
        (tmp_path / left).write_bytes(b"left")
    write(tmp_path, [0])
    assert_holds(tmp_path, [0])
    assert not (tmp_path / "log.sqlite.tmp").exists()


@pytest.mark.attack
@pytest.mark.parametrize("change", ["flip", "blank"])
def test_salvage_loses_only_the_damaged_pages(deep, memory_path, tries, change):
    content, originals = (deep / "log.sqlite").read_bytes(), held_by(deep)
    for seed in range(tries(50)):
        rng, new = random.Random(seed), memory_path / "new"
        with trial(deep, memory_path, f"seed {seed}") as work, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if change == "flip":
                (work / "log.sqlite").write_bytes(flipped(content, rng))
            else:
                page = rng.randrange(len(content) // 16384) * 16384
                wrong = content[:page] + bytes(16384) + content[page + 16384 :]
                (work / "log.sqlite").write_bytes(wrong)
            TrajectoryLog.salvage(work, new, fields=())
            found = held_by(new)
            assert found.items() <= originals.items()
            lost = len(originals) - len(found)
            assert lost <= 110  # small ones of a page
            shutil.rmtree(new)


def test_salvage_writes_a_new_folder(small, tmp_path):
    TrajectoryLog.salvage(small, tmp_path / "new")
    assert held_by(tmp_path / "new") == held_by(small)
    with pytest.raises(ValueError, match="neither empty nor a trajectory log"):
        TrajectoryLog.salvage(small, small.parent)
    wrong = bytearray((small / "log.sqlite").read_bytes())
    wrong[:32768] = bytes(32768)
    broken = shutil.copytree(small, tmp_path / "broken")
    (broken / "log.sqlite").write_bytes(wrong)
    with pytest.raises(DamagedLogError, match="does not say"):
        TrajectoryLog.salvage(broken, tmp_path / "newer")
    TrajectoryLog.salvage(broken, tmp_path / "newer", fields=[])
    assert held_by(tmp_path / "newer") == held_by(small)
