"""Logs that are moved, replaced, linked, or have lost their lock."""

import errno
import os
import shutil
import threading

import pytest

from tests.packing.trajectory_log.log_cases import BY_HAND, assert_holds, episode, read, write
from trajpack.packing.trajectory_log.log import TrajectoryLog
from trajpack.packing.trajectory_log.options import DamagedLogError, LogInUseError

GONE = (LogInUseError, OSError)
"""What is raised where the log of a writer is no longer at its path."""


def append(log, number):
    log.append(f"e{number}", [episode(number)])


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def assert_keeps_away(log, folder):
    """Raise unless a writer refuses to write into a folder that is another one's, and says so."""
    before = files(folder)
    append(log, 90)
    for _ in range(2):
        with pytest.raises(GONE, match=str(folder)):
            log.flush()
    with pytest.raises(GONE, match=str(folder)):
        append(log, 91)
    assert (log.num_pending, "e90" in log, "e91" in log) == (1, True, False)
    with pytest.raises(GONE, match=str(folder)):
        log.close()
    assert files(folder) == before


def test_a_relative_path_means_the_folder_that_it_named_when_the_log_was_opened(
    tmp_path, monkeypatch
):
    for name in "ab":
        (tmp_path / name).mkdir()
    write(tmp_path / "b" / "log", range(30))
    before = files(tmp_path / "b" / "log")
    monkeypatch.chdir(tmp_path / "a")
    with TrajectoryLog.open("log", options=BY_HAND) as log:
        append(log, 0)
        monkeypatch.chdir(tmp_path / "b")
        log.flush()
        append(log, 1)
        reader = TrajectoryLog.open(os.path.join("..", "a", "log"), mode="read")
        monkeypatch.chdir(tmp_path)
        assert [one.episode for one in reader.replay()] == ["e0"]
    assert_holds(tmp_path / "a" / "log", range(2))
    assert files(tmp_path / "b" / "log") == before


def begin_anew(folder):
    folder.rename(folder.with_name("moved"))
    write(folder, [0], [1], [2])


def make_a_folder(folder):
    folder.rename(folder.with_name("moved"))
    folder.mkdir()


def copy(folder):
    folder.rename(folder.with_name("moved"))
    shutil.copytree(folder.with_name("moved"), folder)


def copy_an_older_one(folder):
    folder.rename(folder.with_name("moved"))
    shutil.copytree(folder.with_name("older"), folder)


def replace_the_file(folder):
    shutil.copytree(folder, folder.with_name("moved"))
    shutil.copy(folder.with_name("older") / "log.sqlite", folder.with_name("new"))
    folder.with_name("new").replace(folder / "log.sqlite")


def remove_the_file(folder):
    shutil.copytree(folder, folder.with_name("moved"))
    (folder / "log.sqlite").unlink()


@pytest.mark.parametrize(
    ("change", "left"),
    [(begin_anew, 3), (make_a_folder, None), (copy, 2), (copy_an_older_one, 1),
     (replace_the_file, 1), (remove_the_file, None)],
)  # fmt: skip
def test_a_moved_or_replaced_log_is_an_error_and_stays_unchanged(tmp_path, change, left):
    folder = tmp_path / "log"
    write(folder, [0])
    shutil.copytree(folder, tmp_path / "older")
    log = TrajectoryLog.open(folder, options=BY_HAND)
    append(log, 1)
    log.flush()
    change(folder)
    assert_keeps_away(log, folder)
    assert_holds(tmp_path / "moved", range(2))
    if left is not None:
        assert_holds(folder, range(left))
    elif change is remove_the_file:
        missing = r"log\.sqlite is missing, but log\.sqlite-journal"
        with pytest.raises(DamagedLogError, match=missing):
            TrajectoryLog.open(folder)


def test_the_writer_of_a_moved_folder_does_not_change_the_new_log(tmp_path):
    old = TrajectoryLog.open(tmp_path / "log", options=BY_HAND)
    append(old, 0)
    old.flush()
    (tmp_path / "log").rename(tmp_path / "moved")
    with TrajectoryLog.open(tmp_path / "log", options=BY_HAND) as new:
        append(new, 0)
        new.flush()
        assert_keeps_away(old, tmp_path / "log")
    assert_holds(tmp_path / "log", [0])
    assert_holds(tmp_path / "moved", [0])


def test_the_folder_of_a_log_that_was_moved_away_is_not_made_again(tmp_path):
    log = TrajectoryLog.open(tmp_path / "log", options=BY_HAND)
    (tmp_path / "log").rename(tmp_path / "moved")
    append(log, 2)
    with pytest.raises(OSError, match=str(tmp_path / "log")) as caught:
        log.close()
    assert caught.value.errno == errno.ENOENT
    assert not (tmp_path / "log").exists()


def test_a_reader_of_a_replaced_log_raises(tmp_path):
    write(tmp_path / "log", range(2))
    reader = TrajectoryLog.open(tmp_path / "log", mode="read")
    (tmp_path / "log").rename(tmp_path / "log.1")
    with pytest.raises(FileNotFoundError, match=r"log\.sqlite"):
        list(reader.replay())
    write(tmp_path / "log", range(5))
    with pytest.raises(OSError, match="another log lies at its path"):
        list(reader.replay())


def test_a_lock_that_was_removed_is_made_again(tmp_path):
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as log:
        append(log, 0)
        (tmp_path / "writer.lock").unlink()
        log.flush()
        with pytest.raises(LogInUseError, match=f"process {os.getpid()} "):
            TrajectoryLog.open(tmp_path)
    assert_holds(tmp_path, [0])


def test_of_two_writers_after_a_lock_was_removed_one_is_refused(tmp_path):
    first = TrajectoryLog.open(tmp_path, options=BY_HAND)
    append(first, 0)
    first.flush()
    (tmp_path / "writer.lock").unlink()
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as second:
        append(second, 1)
        second.flush()
        append(first, 2)
        with pytest.raises(LogInUseError, match="may have another writer"):
            first.flush()
        append(second, 3)
        second.flush()
    with pytest.raises(LogInUseError, match=r"may have another writer|has appended"):
        first.close()
    with TrajectoryLog.open(tmp_path) as third:
        append(third, 4)
    assert [one.episode for one in read(tmp_path)] == ["e0", "e1", "e3", "e4"]


def test_two_writers_without_locks_do_no_harm(tmp_path, monkeypatch):
    """As on a file system without locks: SQLite's own, and the rows' numbers, are left."""
    first = TrajectoryLog.open(tmp_path, options=BY_HAND)
    monkeypatch.setattr(first._writer._lock, "check", lambda: None)
    (tmp_path / "writer.lock").unlink()
    second = TrajectoryLog.open(tmp_path, options=BY_HAND)
    monkeypatch.setattr(second._writer._lock, "check", lambda: None)
    logs, refused, taken = [first, second], [], []

    def work(which):
        for number in range(which, 40, 2):
            try:
                append(logs[which], number)
                logs[which].flush()
                taken.append(f"e{number}")
            except LogInUseError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert refused
    assert all("another writer has appended" in one for one in refused)
    assert sorted(one.episode for one in read(tmp_path)) == sorted(taken)
    for log in logs:
        try:
            log.close()
        except LogInUseError:
            continue


def test_a_path_may_hold_characters_that_are_special_in_urls(tmp_path):
    folder = tmp_path / "a?b#c%41 ü;mode=ro&\udcff'"
    write(folder, [0], [1])
    assert_holds(folder, range(2))


def test_a_link_to_a_log_is_the_log(tmp_path):
    write(tmp_path / "log", [0])
    (tmp_path / "link").symlink_to(tmp_path / "log")
    write(tmp_path / "link", [1])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "log.sqlite").symlink_to(tmp_path / "log" / "log.sqlite")
    assert_holds(tmp_path / "other", range(2))
    write(tmp_path / "other", [2])
    assert_holds(tmp_path / "log", range(3))


@pytest.mark.parametrize("kind", ["folder", "link to nothing", "device"])
def test_a_path_that_is_no_regular_file_is_refused(tmp_path, kind):
    path = tmp_path / "log.sqlite"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "nothing")
    for mode in ("read", "append"):
        with pytest.raises((DamagedLogError, OSError), match=r"log\.sqlite"):
            TrajectoryLog.open(tmp_path, mode=mode)
