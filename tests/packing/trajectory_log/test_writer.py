"""The writer of a log: closing, forks, full disks and locks lose no episode."""

import errno
import fcntl
import gc
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.packing.trajectory_log.log_cases import (
    BY_HAND,
    assert_holds,
    die_in_a_transaction,
    episode,
    in_a_fork,
    read,
    turn,
    wait_until,
    write,
)
from tests.packing.trajectory_log.sqlite_calls import SQLiteCalls, needs_sqlite_calls
from trajpack import Trajectory
from trajpack.packing.trajectory_log import writer as log_writer
from trajpack.packing.trajectory_log.database import LogFile
from trajpack.packing.trajectory_log.log import TrajectoryLog
from trajpack.packing.trajectory_log.options import LogInUseError, LogOptions
from trajpack.packing.trajectory_log.writer import EpisodeIndex


@pytest.fixture
def slow_disk(monkeypatch):
    """Keep every transaction waiting until it may go on."""

    def append(*values, add=LogFile.append):
        disk.reached.set()
        assert disk.goes_on.wait(20)
        return add(*values)

    disk = SimpleNamespace(reached=threading.Event(), goes_on=threading.Event())
    monkeypatch.setattr(LogFile, "append", append)
    yield disk
    disk.goes_on.set()


def small(name):
    return [Trajectory(name, [turn()])]


def test_a_log_collected_by_its_own_thread_is_written(tmp_path, monkeypatch):
    class Holder:
        pass

    def append(*values, add=LogFile.append):
        gc.collect()  # as it may happen at any allocation of any thread
        return add(*values)

    def forget():
        holder = Holder()
        holder.itself = holder  # so that only a collection finds that nobody needs it
        holder.log = TrajectoryLog.open(tmp_path, options=LogOptions(segment_episodes=2))
        holder.log.append("e0", [episode(0)])
        gc.disable()
        holder.log.append("e1", [episode(1)])

    monkeypatch.setattr(LogFile, "append", append)
    try:
        forget()
        wait_until(lambda: all(one.name != "trajectory log" for one in threading.enumerate()))
    finally:
        gc.enable()
    assert_holds(tmp_path, [0, 1])
    TrajectoryLog.open(tmp_path).close()


@pytest.mark.parametrize("where", ["a fork", "its own thread"])
def test_a_log_collected_where_none_may_wait_is_written_later(tmp_path, monkeypatch, where):
    log = TrajectoryLog.open(tmp_path, options=BY_HAND)
    log.append("e0", [episode(0)])
    writer = log._writer
    if where == "a fork":
        forking = {threading.get_ident(): [writer]}
        monkeypatch.setattr("trajpack.packing.trajectory_log.writer._forking", forking)
    else:
        monkeypatch.setattr(writer, "_thread", threading.current_thread())
    del log  # which does not wait
    wait_until(lambda: writer._has_ended)
    assert_holds(tmp_path, [0])
    TrajectoryLog.open(tmp_path).close()


def test_a_failure_after_a_transaction_writes_no_episode_twice(tmp_path, monkeypatch):
    failing = [2, 0, 4]

    def add(index, name, entry, really=EpisodeIndex._add):
        if entry.number in failing[:1]:
            del failing[0]
            raise MemoryError
        return really(index, name, entry)

    monkeypatch.setattr(EpisodeIndex, "_add", add)
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as log:
        for number in range(3):
            log.append(f"e{number}", [episode(number)])
        for _ in range(2):
            with pytest.raises(RuntimeError, match="cannot be written"):
                log.flush()
        log.flush()
        assert log.num_trajectories == 3
        for number in range(3, 6):
            log.append(f"e{number}", [episode(number)])
        with pytest.raises(RuntimeError, match="cannot be written"):
            log.flush()
        log.flush()
        assert (len(log), log.num_trajectories, failing) == (6, 6, [])
    assert_holds(tmp_path, range(6))


def test_an_interrupted_close_keeps_the_lock_until_all_is_written(tmp_path, slow_disk):
    log = TrajectoryLog.open(tmp_path, options=BY_HAND)
    log.append("e0", [episode(0)])
    main = threading.main_thread().ident

    def interrupt():
        assert slow_disk.reached.wait(20)
        signal.pthread_kill(main, signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        log.close()
    interrupting.join()
    with pytest.raises(LogInUseError):
        TrajectoryLog.open(tmp_path)
    slow_disk.goes_on.set()

    def opens():
        try:
            TrajectoryLog.open(tmp_path).close()
        except LogInUseError:
            return False
        return True

    wait_until(opens)
    assert_holds(tmp_path, [0])


def test_a_flush_without_pending_episodes_does_not_write(tmp_path):
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as log:
        log.append("e0", [episode(0)])
        log.flush()
        before = (tmp_path / "log.sqlite").read_bytes()
        log.flush()
    assert (tmp_path / "log.sqlite").read_bytes() == before


@pytest.mark.attack
def test_threads_that_append_flush_and_close_at_once_lose_no_episode(memory_path, tries):
    """Some close early, some twice, and some logs are forgotten."""
    for round_number in range(tries(116)):
        rng = random.Random(round_number)
        folder, kept = memory_path / str(round_number), []
        options = LogOptions(
            segment_episodes=rng.randrange(1, 20),
            max_pending_bytes=rng.choice((1, 3000, 10**6)),
            flush_seconds=rng.choice((0.001, 1.0)),
        )
        log = TrajectoryLog.open(folder, options=options)

        def work(worker, log=log, kept=kept, seed=round_number):
            draw = random.Random(seed * 100 + worker)
            for number in range(24):
                name = f"{worker}-{number}"
                try:
                    log.append(name, small(name))
                    kept.append(name)
                    if draw.random() < 0.2:
                        log.flush()
                    if draw.random() < 0.01:
                        log.close()
                except ValueError as error:
                    assert "is closed" in str(error)  # noqa: PT017
                    return

        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
        for one in threads:
            one.start()
        for one in threads:
            one.join(60)
            assert not one.is_alive()
        if rng.random() < 0.5:
            log.close()
            log.close()
        del log, work, threads, one  # else it is forgotten
        gc.collect()
        assert sorted(logged.episode for logged in read(folder)) == sorted(kept), round_number


def test_a_new_folder_and_a_new_file_are_synchronised(tmp_path, monkeypatch):
    synchronised = []

    def fsync(descriptor, sync=os.fsync):
        synchronised.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = tmp_path / "new" / "log"
    with TrajectoryLog.open(folder, options=BY_HAND):
        assert synchronised[:2] == [str(tmp_path), str(tmp_path / "new")]
        assert synchronised[2:] == [f"{folder}/log.sqlite.tmp", str(folder)]
    TrajectoryLog.open(folder).close()
    assert len(synchronised) == 4  # an old one needs none


FLUSH = """
import os, sys
from tests.packing.trajectory_log.log_cases import BY_HAND, turn
from trajpack import Trajectory
from trajpack.packing import TrajectoryLog
with TrajectoryLog.open(sys.argv[1], options=BY_HAND) as log:
    for name in "ab":
        log.append(name, [Trajectory(name, [turn()])])
        os.mkdir(sys.argv[1] + "/before-" + name)
        log.flush()
        os.mkdir(sys.argv[1] + "/after-" + name)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_a_flush_synchronises_the_journal_before_the_file_and_the_file_before_it_ends(tmp_path):
    """SQLite does that itself; this shows that it was asked to."""
    root = Path(__file__).parents[3]
    trace, folder = tmp_path / "trace", tmp_path / "log"
    calls = "trace=fsync,fdatasync,pwrite64,ftruncate,mkdir"
    command = ["strace", "-f", "-y", "-e", calls, "-o", trace, sys.executable, "-P", "-c", FLUSH]
    environment = os.environ | {"PYTHONPATH": f"{root}:{root / 'src'}"}
    done = subprocess.run(
        [*command, folder], env=environment, capture_output=True, text=True, check=False
    )
    if "PTRACE" in done.stderr:
        pytest.skip("strace may not trace here")
    assert done.returncode == 0, done.stderr
    said = trace.read_text()
    said = said[said.index("before-b") : said.index("after-b")]
    steps = []
    for line in said.splitlines()[1:-1]:
        call = line.split()[1].partition("(")[0]
        place = line.partition("<")[2].partition(">")[0].removeprefix(str(folder)) or "/"
        if not steps or steps[-1] != (call, place):
            steps.append((call, place))
    journal, file = "/log.sqlite-journal", "/log.sqlite"
    assert steps == [
        ("pwrite64", journal), ("fdatasync", journal), ("fdatasync", "/"),
        ("pwrite64", journal), ("fdatasync", journal),
        ("pwrite64", file), ("fdatasync", file),
        ("ftruncate", journal), ("fdatasync", journal),
    ]  # fmt: skip


def test_files_of_others_may_lie_in_a_folder_that_is_a_log(tmp_path):
    write(tmp_path, [0])
    for name in ("rollout.json", "notes.tmp", "segment-1.parquet", ".hidden"):
        (tmp_path / name).write_text("mine")
    write(tmp_path, [1])
    assert_holds(tmp_path, [0, 1])
    assert (tmp_path / "notes.tmp").read_text() == "mine"


def test_a_file_system_without_locks_is_an_error_and_leaves_nothing_open(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    num_open = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="No locks available"):
        TrajectoryLog.open(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_no_descriptor_is_left_open(tmp_path):
    num_open = len(os.listdir("/proc/self/fd"))
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as log:
        log.append("e0", [episode(0)])
        log.flush()
        next(log.replay())
        assert len(os.listdir("/proc/self/fd")) == num_open + 1  # of the lock
    read(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_too_little_memory_is_no_damage(tmp_path, monkeypatch):
    def connect(*_, **__):
        raise MemoryError("out of memory")

    write(tmp_path, [0])
    monkeypatch.setattr(sqlite3, "connect", connect)
    with pytest.raises(MemoryError, match="out of memory"):
        read(tmp_path, damaged="skip")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_in_a_transaction_harms_neither_log_nor_child(tmp_path):
    """The child reads the log and ends as any program does; the parent goes on."""
    with TrajectoryLog.open(tmp_path, options=LogOptions(segment_episodes=3)) as log:
        number = 0
        for _ in range(5):
            for _ in range(7):  # so that the thread is at work
                log.append(f"e{number}", [episode(number)])
                number += 1
            assert in_a_fork(read_in_child, log, tmp_path) == 0
    assert_holds(tmp_path, range(number))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_threads_may_fork_at_once(tmp_path, slow_disk):
    with TrajectoryLog.open(tmp_path, options=LogOptions(segment_episodes=1)) as log:
        log.append("e0", [episode(0)])
        wait_until(slow_disk.reached.is_set)
        threads = [threading.Thread(target=in_a_fork, args=(int,), daemon=True) for _ in range(3)]
        for one in threads:
            one.start()
        wait_until(lambda: len(log_writer._forking) == len(threads))
        slow_disk.goes_on.set()
        for one in threads:
            one.join(20)
            assert not one.is_alive()
        log.append("e1", [episode(1)])
        wait_until(lambda: not log.num_pending)
    assert_holds(tmp_path, [0, 1])


def read_in_child(log, folder):
    """Read the log, fail to append to it, and close it."""
    names = [one.episode for one in read(folder)]
    assert names == [f"e{number}" for number in range(len(names))]
    assert log.finished >= set(names)
    with pytest.raises(ValueError, match="belongs to the process that opened it"):
        log.append("from the child", [])
    log.close()


@contextmanager
def files_of_at_most(num_bytes):
    """Let every write beyond so many bytes of a file fail, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@needs_sqlite_calls
def test_a_full_disk_loses_no_episode(tmp_path):
    write(tmp_path, [0, 1])
    before = (tmp_path / "log.sqlite").read_bytes()
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as log:
        log.append("e2", [episode(2)])
        with SQLiteCalls(lambda name: errno.ENOSPC if "write" in name else None):
            for _ in range(2):
                with pytest.raises(OSError, match="No space left on device") as caught:
                    log.flush()
                assert caught.value.errno == errno.ENOSPC
                assert caught.value.filename == str(tmp_path)
            with pytest.raises(OSError, match=f"No space left on device.*'{tmp_path}'"):
                log.append("e3", [episode(3)])
        assert (len(log), log.num_pending, "e3" in log) == (3, 1, False)
        assert_holds(tmp_path, [0, 1])
        assert (tmp_path / "log.sqlite").read_bytes() == before
        log.flush()
        log.append("e3", [episode(3)])
    assert_holds(tmp_path, range(4))


@pytest.mark.attack
@needs_sqlite_calls
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_write_that_fails_at_any_step_loses_and_doubles_no_episode(memory_path, tries, number):
    """Also while a failed transaction is undone, and once all is on the disk but the answer."""
    failures = 0
    for trial in range(tries(496)):
        rng, held = random.Random(trial), 0
        folder = memory_path / str(trial)
        with TrajectoryLog.open(folder, options=BY_HAND) as log:
            for step in range(3):
                log.append(f"e{held}", [episode(held)])
                calls = iter(range(1000))
                first, count = rng.randrange(24), rng.choice((1, 2, 1000))
                failing = range(first, first + count)
                with SQLiteCalls(lambda _, c=calls, f=failing: number if next(c) in f else None):
                    try:
                        log.flush()
                    except OSError as error:
                        failures += 1
                        assert str(folder) in str(error)  # noqa: PT017
                        assert log.num_pending == 1
                log.flush()
                held += 1
                assert log.num_pending == 0, step
        assert_holds(folder, range(held))
        shutil.rmtree(folder)
    assert failures > tries(496)


def test_the_thread_tries_again_when_there_is_room(tmp_path):
    options = LogOptions(segment_episodes=1, flush_seconds=0.02)

    def refuses(log):
        try:
            log.append("e1", [], error="to be done again")
        except OSError:
            return True
        return False

    with TrajectoryLog.open(tmp_path, options=options) as log:
        with files_of_at_most(1000):
            log.append("e0", [episode(0)])
            wait_until(lambda: refuses(log))
        wait_until(lambda: not log.num_pending)
        log.append("e1", [episode(1)])
    assert_holds(tmp_path, [0, 1])


def test_a_close_that_cannot_write_raises_and_releases_the_lock(tmp_path):
    log = TrajectoryLog.open(tmp_path, options=BY_HAND)
    log.append("e0", [episode(0)])
    with files_of_at_most(1000), pytest.raises(OSError, match=str(tmp_path)):
        log.close()
    log.close()
    assert log.finished == frozenset()
    with TrajectoryLog.open(tmp_path) as log:
        log.append("e0", [episode(0)])
    assert_holds(tmp_path, [0])


def test_a_writer_waits_for_a_reader_and_a_reader_for_a_writer(tmp_path):
    """Another program may hold a lock of SQLite for some time."""
    write(tmp_path, [0])
    other = sqlite3.connect(tmp_path / "log.sqlite", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN")
    other.execute("SELECT * FROM log").fetchall()
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as log:
        log.append("e1", [episode(1)])
        letting_go = threading.Timer(0.2, other.execute, ["COMMIT"])
        letting_go.start()
        log.flush()
        letting_go.join()
        other.execute("BEGIN EXCLUSIVE")
        letting_go = threading.Timer(0.2, other.execute, ["COMMIT"])
        letting_go.start()
        assert_holds(tmp_path, [0, 1])
        letting_go.join()
    other.close()


def test_a_lock_that_is_never_released_is_an_error_and_no_damage(tmp_path, monkeypatch):
    monkeypatch.setattr("trajpack.packing.trajectory_log.database._BUSY_S", 0.01)
    write(tmp_path, [0])
    other = sqlite3.connect(tmp_path / "log.sqlite", isolation_level=None)
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as log:
        log.append("e1", [episode(1)])
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(OSError, match="database is locked"):
            log.flush()
        with pytest.raises(OSError, match="database is locked"):
            TrajectoryLog.open(tmp_path, mode="read", options=LogOptions(damaged="skip"))
        other.execute("COMMIT")
    other.close()
    assert_holds(tmp_path, [0, 1])


@needs_sqlite_calls
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_user_without_write_permission_reads_unless_the_writer_died(tmp_path):
    with tempfile.TemporaryDirectory() as name:  # other users may not enter those of pytest
        folder = Path(name)
        write(folder / "whole", [0, 1])
        write(folder / "unfinished", [0, 1])
        assert (
            in_a_fork(die_in_a_transaction, folder / "unfinished", [episode(9)]) == -signal.SIGKILL
        )
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        in_a_fork(read_as_nobody, folder, tmp_path / "said")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755)
    whole, unfinished, append = (tmp_path / "said").read_text().splitlines()
    assert whole == "2"
    assert "its writer died in a transaction: open it once as a user who may write it" in unfinished
    assert "Permission denied" in append


def read_as_nobody(folder, said):
    with said.open("w") as file:
        if os.geteuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        for work in (
            lambda: assert_holds(folder / "whole"),
            lambda: assert_holds(folder / "unfinished"),
            lambda: TrajectoryLog.open(folder / "whole"),
        ):
            try:
                print(work(), file=file)
            except OSError as error:
                print(error, file=file)
