"""The writer of a log: full disks, locks, forks, threads and signals lose no episode."""

import errno
import os
import random
import shutil
import signal
import sqlite3
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.packing.trajectory_log.log_cases import (
    append,
    assert_holds,
    begin,
    die_in_a_transaction,
    episode,
    in_a_fork,
    read,
    turn,
    write,
)
from tests.packing.trajectory_log.sqlite_calls import SQLiteCalls, needs_sqlite_calls
from trajpack import Trajectory, TrajectoryBuffer
from trajpack.packing.trajectory_log import log as trajectory_log
from trajpack.packing.trajectory_log.log import TrajectoryLog


def full_disk(name):
    return errno.ENOSPC if "write" in name else None


@needs_sqlite_calls
def test_a_full_disk_loses_no_episode(tmp_path):
    write(tmp_path, [0, 1])
    before = (tmp_path / "log.sqlite").read_bytes()
    with begin(tmp_path) as log:
        append(log, 2)
        with SQLiteCalls(full_disk):
            for call in (log.flush, log.flush, lambda: append(log, 3), log.close):
                with pytest.raises(OSError, match="No space left on device") as caught:
                    call()
                assert caught.value.errno == errno.ENOSPC
                assert str(tmp_path) in caught.value.filename
        assert (len(log), log.num_pending, "e3" in log) == (3, 1, False)
        assert_holds(tmp_path, [0, 1])
        assert (tmp_path / "log.sqlite").read_bytes() == before
        append(log, 3)  # which writes the earlier ones first
        assert log.num_pending == 1
    assert_holds(tmp_path, range(4))


@needs_sqlite_calls
def test_an_episode_that_append_could_not_flush_is_kept(tmp_path):
    with begin(tmp_path, flush_episodes=2) as log:
        append(log, 0)
        with SQLiteCalls(full_disk):
            append(log, 1)
            for _ in range(2):
                with pytest.raises(OSError, match="No space left on device"):
                    append(log, 2)
        assert (log.num_pending, "e1" in log, "e2" in log) == (2, True, False)
        append(log, 2)
    assert_holds(tmp_path, range(3))


@pytest.mark.attack
@needs_sqlite_calls
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_write_that_fails_at_any_step_loses_and_doubles_no_episode(memory_path, tries, number):
    """Also while a failed transaction is undone, and once all is on the disk but the answer."""
    failures = 0
    for trial in range(tries(496)):
        rng, held = random.Random(trial), 0
        folder = memory_path / str(trial)
        with begin(folder) as log:
            for step in range(3):
                append(log, held)
                calls = iter(range(1000))
                first, count = rng.randrange(16), rng.choice((1, 2, 1000))
                failing = range(first, first + count)
                with SQLiteCalls(lambda _, c=calls, f=failing: number if next(c) in f else None):
                    try:
                        log.flush()
                    except OSError as error:
                        failures += 1
                        assert str(folder) in str(error)  # noqa: PT017
                        assert log.num_pending == 1
                held += 1
                if rng.random() < 0.5:  # more than the failed attempt had
                    append(log, held)
                    held += 1
                log.flush()
                assert log.num_pending == 0, step
        assert_holds(folder, range(held))
        shutil.rmtree(folder)
    assert failures > tries(496)


def test_a_stopped_reader_makes_no_writer_lose_episodes(tmp_path, monkeypatch):
    """Nor is it an error of `append`: what is pending is written when the reader goes on."""
    for name in ("_APPEND_WAIT_S", "_FLUSH_WAIT_S"):
        monkeypatch.setattr(trajectory_log, name, 0.01)
    write(tmp_path, [0])
    with closing(sqlite3.connect(tmp_path / "log.sqlite", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM log").fetchall()
        log = begin(tmp_path, flush_episodes=1)
        append(log, 1, 2, 3)
        assert log.num_pending == 3
        for call in (log.flush, log.close):
            with pytest.raises(OSError, match="a reader holds it") as caught:
                call()
            assert caught.value.errno == errno.EBUSY
        reader.execute("COMMIT")
    append(log, 4)
    log.close()
    assert_holds(tmp_path, range(5))


@pytest.mark.parametrize("lock", ["BEGIN; SELECT * FROM log", "BEGIN EXCLUSIVE"])
def test_a_writer_waits_for_a_reader_and_a_reader_for_a_writer(tmp_path, lock):
    """Another program may hold a lock of SQLite for some time."""
    write(tmp_path, [0])
    other = sqlite3.connect(tmp_path / "log.sqlite", isolation_level=None, check_same_thread=False)
    for statement in lock.split("; "):
        other.execute(statement).fetchall()
    letting_go = threading.Timer(0.2, other.execute, ["COMMIT"])
    letting_go.start()
    write(tmp_path, [1])
    letting_go.join()
    other.close()
    assert_holds(tmp_path, [0, 1])


def test_a_second_writer_is_refused_and_without_a_lock_does_no_harm(tmp_path):
    first = begin(tmp_path)
    with pytest.raises(OSError, match="another writer has the log open") as caught:
        begin(tmp_path)
    assert (caught.value.errno, caught.value.filename) == (errno.EBUSY, str(tmp_path))
    (tmp_path / "writer.lock").unlink()
    second = begin(tmp_path)
    append(first, 0)
    first.flush()
    append(second, 1)
    with pytest.raises(OSError, match="another program has changed it: it has 1 rows"):
        second.flush()
    append(first, 2)
    first.close()
    assert [logged.episode for logged in read(tmp_path)] == ["e0", "e2"]


def test_a_log_that_was_moved_or_removed_is_an_error(tmp_path):
    log = begin(tmp_path / "log")
    append(log, 0)
    log.flush()
    reader = TrajectoryLog.open(tmp_path / "log", mode="read")
    (tmp_path / "log").rename(tmp_path / "moved")
    append(log, 1)
    for call in (log.flush, log.close, lambda: list(reader.replay())):
        with pytest.raises(FileNotFoundError, match=str(tmp_path / "log")):
            call()
    assert not (tmp_path / "log").exists()
    (tmp_path / "moved").rename(tmp_path / "log")
    log.close()
    assert_holds(tmp_path / "log", range(2))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_log_in_a_forked_child_refuses_by_name(tmp_path):
    def use():
        for call in (
            log.flush,
            lambda: append(log, 9),
            lambda: list(log.replay()),
            lambda: list(reader.replay()),
            lambda: reader.fill(TrajectoryBuffer("cpu")),
        ):
            words = f"log {tmp_path} belongs to the process that opened it"
            with pytest.raises(ValueError, match=words):
                call()
        assert (len(log), reader.finished) == (2, {"e0"})
        log.close()
        reader.close()

    with begin(tmp_path) as log:
        append(log, 0)
        log.flush()
        reader = TrajectoryLog.open(tmp_path, mode="read")
        append(log, 1)
        assert in_a_fork(use) == 0
        with pytest.raises(OSError, match="another writer has the log open"):
            begin(tmp_path)
        assert in_a_fork(read, tmp_path) == 0  # a child may open a log of its own
    assert_holds(tmp_path, range(2))


def test_no_descriptor_is_left_open(tmp_path):
    num_open = len(os.listdir("/proc/self/fd"))
    with begin(tmp_path) as log:
        append(log, 0)
        log.flush()
        next(log.replay())
        assert len(os.listdir("/proc/self/fd")) == num_open + 1  # of the lock
    read(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_a_new_folder_and_a_new_file_are_synchronised(tmp_path, monkeypatch):
    synchronised = []

    def fsync(descriptor, sync=os.fsync):
        synchronised.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = tmp_path / "new" / "log"
    begin(folder).close()
    names = [tmp_path, tmp_path / "new", folder / "log.sqlite.tmp", folder]
    assert synchronised == [str(name) for name in names]
    begin(folder).close()
    assert len(synchronised) == 4  # an old one needs none


@pytest.mark.attack
def test_threads_that_append_flush_and_close_at_once_lose_no_episode(memory_path, tries):
    """Some close early, some twice, and some logs are forgotten."""
    for round_number in range(tries(116)):
        rng = random.Random(round_number)
        folder, kept = memory_path / str(round_number), []
        log = TrajectoryLog.open(
            folder, flush_episodes=rng.randrange(1, 20), flush_seconds=rng.choice((0.001, 1.0))
        )

        def work(worker, log=log, kept=kept, seed=round_number):
            draw = random.Random(seed * 100 + worker)
            for number in range(24):
                name = f"{worker}-{number}"
                try:
                    log.append(name, [Trajectory(name, [turn()])])
                    kept.append(name)
                    assert name in log.finished
                    if draw.random() < 0.2:
                        log.flush()
                    if draw.random() < 0.01:
                        log.close()
                except ValueError as error:
                    assert "is closed" in str(error)  # noqa: PT017
                    return

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        if rng.random() < 0.5:
            log.close()
            log.close()
        del log, work, threads, thread  # else it is forgotten
        assert sorted(logged.episode for logged in read(folder)) == sorted(kept), round_number


@pytest.mark.attack
def test_a_handler_that_raises_loses_no_episode(memory_path, tries):
    """As Ctrl-C does: an episode that `append` took is there, another one or not."""

    def interrupt(*_):
        raise KeyboardInterrupt

    log, taken, unsure = begin(memory_path, flush_episodes=7), set(), set()
    before, rng = signal.signal(signal.SIGALRM, interrupt), random.Random(0)
    try:
        for number in range(tries(2000)):
            name = f"e{number}"
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00001, 0.002))
                log.append(name, [episode(number % 50)])
                taken.add(name)
                log.flush()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                unsure.add(name)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert taken & unsure
    log.close()
    names = [logged.episode for logged in read(memory_path)]
    assert taken <= set(names) <= taken | unsure
    assert len(set(names)) == len(names)


@needs_sqlite_calls
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_user_without_write_permission_reads_unless_the_writer_died(tmp_path):
    with tempfile.TemporaryDirectory() as name:  # other users may not enter those of pytest
        folder = Path(name)
        write(folder / "whole", [0, 1])
        write(folder / "unfinished", [0, 1])
        died = in_a_fork(die_in_a_transaction, folder / "unfinished", [episode(9)])
        assert died == -signal.SIGKILL
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        status = in_a_fork(read_as_nobody, folder)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
    assert status == 0


def read_as_nobody(folder):
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    assert_holds(folder / "whole", range(2))
    for work in (lambda: read(folder / "unfinished"), lambda: begin(folder / "whole")):
        with pytest.raises(PermissionError):
            work()
