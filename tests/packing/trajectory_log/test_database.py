"""Changed files of a log: an error with its name, or all undamaged episodes."""

import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import warnings
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.packing.trajectory_log.log_cases import (
    append,
    begin,
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
from trajpack.packing.trajectory_log.records import DamagedLogError

PAGE = Path(__file__).parents[3] / "docs" / "trajectory_log.md"


def long_episode(number):
    rng = np.random.default_rng(number)
    ids = rng.integers(0, 2**31 - 1, 4000).astype(np.int32)
    return [Trajectory(f"long{number}", [Turn(ids[:3000], ids[3000:], np.zeros(1000, np.float32))])]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a log of two writers and four transactions, with a failure that was tried again."""
    folder = tmp_path_factory.mktemp("small")
    write(folder, [0, 1], [2])
    with begin(folder) as log:
        log.append("lost", [], error="gone")
        log.append("late", [], error="timeout")
        log.flush()
        log.append("late", long_episode(0))
        append(log, 3)
    return folder


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Return a log whose tables have inner pages, and episodes that need several pages."""
    folder = tmp_path_factory.mktemp("deep")
    with begin(folder) as log:
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


def held_by(folder, **options):
    """Return the episodes of a log by name."""
    with TrajectoryLog.open(folder, mode="read", **options) as log:
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


def assert_named(error, folder):
    assert isinstance(error, (ValueError, OSError)), repr(error)
    assert str(folder) in str(error), repr(error)
    assert len(str(error).splitlines()) == 1


def readable_one_by_one(folder):
    """Return all that can be read of a log, and the warnings; or the error that refuses it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return held_by(folder, damaged="skip"), [str(one.message) for one in caught]
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
        assert said or set(found) == set(originals)
        assert all(str(folder) in one for one in said)
        for name, value in found.items():
            assert value == originals[name] or value[0] == "timeout", name


def assert_append_keeps(folder, originals):
    """Raise unless an append either is refused by name, or adds one and harms none."""
    before, _ = readable_one_by_one(folder)
    try:
        with begin(folder) as log:
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


def swap_with_journal(path, rng):
    journal = path.with_name("log.sqlite-journal")
    content = journal.read_bytes()
    journal.write_bytes(path.read_bytes())
    path.write_bytes(content)


def write_journal(path, rng):
    header = bytes.fromhex("d9d505f920a163d7")
    junk = rng.choice((b"x" * 600, header, header * 70, header + rng.randbytes(2000)))
    path.with_name("log.sqlite-journal").write_bytes(junk)


def write_lock(path, rng):
    path.with_name("writer.lock").write_bytes(rng.randbytes(30))


FILE_CHANGES = (
    cut, cut, lengthen, blank, swap_pages, lose, swap_with_journal, lose, write_journal,
    write_lock,
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


def changed_by(folder, *statements):
    """Change the file of a log by SQL."""
    with closing(sqlite3.connect(folder / "log.sqlite", isolation_level=None)) as db:
        for statement in statements:
            db.execute(statement)


WRONG_CONTENT = "UPDATE episodes SET content = zeroblob(length(content)) WHERE number = 1"


@pytest.mark.parametrize("mode", ["read", "append"])
def test_a_damaged_episode_is_skipped_and_can_be_appended_again(tmp_path, mode):
    write(tmp_path, [0, 1], [2, 3])
    changed_by(tmp_path, WRONG_CONTENT)
    with TrajectoryLog.open(tmp_path, mode=mode) as log:
        assert len(log) == 4
        with pytest.raises(
            DamagedLogError, match=r"log\.sqlite is damaged: episode 'e1': it is no"
        ):
            list(log.replay())
    with pytest.warns(UserWarning, match=r"skipped: .*log\.sqlite is damaged: episode 'e1'"):
        log = TrajectoryLog.open(tmp_path, mode=mode, damaged="skip")
    with log:
        assert (len(log), "e1" in log, log.num_trajectories) == (3, False, 3)
        assert log.finished == log.episodes == {"e0", "e2", "e3"}
        assert [logged.episode for logged in log.replay()] == ["e0", "e2", "e3"]
        if mode == "append":
            append(log, 1)  # once more, for it is not there
            with pytest.raises(ValueError, match="'e1' is in the log already"):
                append(log, 1)
    if mode == "append":
        with TrajectoryLog.open(tmp_path) as log:  # whose last record of it is whole
            assert [logged.episode for logged in log.replay()] == ["e0", "e2", "e3", "e1"]
            assert (len(log), log.num_trajectories) == (4, 4)


def test_a_failure_counts_if_the_later_success_is_damaged(tmp_path):
    with begin(tmp_path) as log:
        log.append("late", [], error="timeout")
        log.append("late", [episode(0)])
    changed_by(tmp_path, WRONG_CONTENT)
    with pytest.warns(UserWarning, match="'late'"):
        log = TrajectoryLog.open(tmp_path, damaged="skip")
    with log:
        assert (log.finished, log.failed) == (frozenset(), {"late"})
        assert [logged.error for logged in log.replay()] == ["timeout"]
        log.append("late", [], error="again")
    with pytest.raises(DamagedLogError):  # no failure takes the place of a success
        read(tmp_path)


@pytest.mark.parametrize(
    ("statement", "left"),
    [
        ("UPDATE episodes SET name = X'78' WHERE number = 1", "02"),
        ("UPDATE episodes SET failed = 1 WHERE number = 1", "02"),
        ("UPDATE episodes SET num_tokens = num_tokens + 1 WHERE number = 1", "02"),
        ("UPDATE episodes SET checksum = 0 WHERE number = 1", "02"),
        ("UPDATE episodes SET number = 7 WHERE number = 1", "021"),
        ("UPDATE episodes SET number = -1 WHERE number = 1", "02"),
        ("DELETE FROM episodes WHERE number = 1", "02"),
        ("DELETE FROM episodes WHERE number = 2", "01"),
        ("UPDATE log SET num_episodes = 2", "012"),
        ("UPDATE log SET num_episodes = 'x'", "012"),
        ("UPDATE log SET checksum = checksum + 1", None),
        ("UPDATE log SET described = '{}'", None),
        ("DELETE FROM log", None),
        ("DROP TABLE log", None),
        ("DROP TABLE episodes", None),
    ],
)
def test_rows_that_are_missing_or_changed_are_damage_or_skipped(tmp_path, statement, left):
    write(tmp_path, [0, 1, 2])
    changed_by(tmp_path, statement)
    for mode in ("read", "append"):
        with pytest.raises(DamagedLogError, match=r"log\.sqlite is damaged"):
            TrajectoryLog.open(tmp_path, mode=mode)
    if left is None:
        with pytest.raises(DamagedLogError, match=r"log\.sqlite is damaged"):
            read(tmp_path, damaged="skip")
        return
    with pytest.warns(UserWarning, match=r"skipped: .*\d of .* episodes are there and whole"):
        assert [logged.episode for logged in read(tmp_path, damaged="skip")] == [
            f"e{number}" for number in left
        ]


@pytest.mark.parametrize("content", [b"", b"x" * 100_000])
def test_a_file_that_is_no_log_is_refused_and_kept(tmp_path, content):
    (tmp_path / "log.sqlite").write_bytes(content)
    for mode in ("read", "append"):
        with pytest.raises(DamagedLogError, match=r"log\.sqlite is damaged"):
            TrajectoryLog.open(tmp_path, mode=mode)
    assert (tmp_path / "log.sqlite").read_bytes() == content


@pytest.mark.attack
def test_of_a_log_with_a_page_of_zeros_only_the_episodes_of_that_page_are_lost(
    deep, memory_path, tries
):
    """Copied into a new log, which any writer continues, as the guide shows."""
    originals, size = held_by(deep), (deep / "log.sqlite").stat().st_size // 16384
    unreadable = 0
    for seed in range(tries(100)):
        page = random.Random(seed).randrange(size) * 16384
        with trial(deep, memory_path, f"seed {seed}") as work, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = (work / "log.sqlite").read_bytes()
            wrong = content[:page] + bytes(16384) + content[page + 16384 :]
            (work / "log.sqlite").write_bytes(wrong)
            try:
                old = TrajectoryLog.open(work, mode="read", damaged="skip")
            except DamagedLogError:
                unreadable += 1
                continue
            with old, begin(memory_path / "new", fields=old.fields) as new:
                for logged in old.replay():
                    new.append(logged.episode, logged.trajectories, error=logged.error)
        found = held_by(memory_path / "new")
        assert found.items() <= originals.items()
        assert len(originals) - len(found) <= 110  # small ones of a page
        shutil.rmtree(memory_path / "new")
    assert unreadable <= tries(100) * 0.3  # the first pages, and those that lead to the others


def has_recover(folder):
    """Return whether there is a program ``sqlite3`` that can recover a file."""
    if shutil.which("sqlite3") is None:
        return False
    command = ["sqlite3", folder / "log.sqlite", ".recover"]
    said = subprocess.run(command, capture_output=True, check=False).stdout
    return b"CREATE TABLE" in said


@pytest.mark.parametrize("pages", [(0,), (1,), (2,), (3,), (0, 1, 2)])
def test_the_guides_commands_recover_a_log_whose_structure_is_damaged(deep, tmp_path, pages):
    """The first page, the table of the log, the root of the episodes, one below it; several."""
    if not has_recover(deep):
        pytest.skip("no sqlite3 program that has .recover: Debian's is built without")
    shutil.copytree(deep, tmp_path / "damaged")
    with (tmp_path / "damaged" / "log.sqlite").open("rb+") as file:
        for page in pages:
            file.seek(16384 * page)
            file.write(bytes(16384))
    begin(tmp_path / "empty").close()
    for commands in re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL):
        subprocess.run(["sh", "-c", commands], cwd=tmp_path, check=False, capture_output=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = held_by(tmp_path / "recovered", damaged="skip")
    originals = held_by(deep)
    assert found.items() <= originals.items()
    assert len(originals) - len(found) <= (110 if 3 in pages else 0)
