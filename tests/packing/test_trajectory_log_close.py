"""However a log is closed, however slow or full the disk is: nothing is lost, and one writes."""

import errno
import fcntl
import gc
import os
import resource
import signal
import threading
from contextlib import contextmanager

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.packing.log_cases import BY_HAND, assert_holds, episode, read, turn, wait_until, write
from trajpack import Trajectory
from trajpack.packing import log_folder
from trajpack.packing.log_options import LogInUseError, LogOptions
from trajpack.packing.trajectory_log import TrajectoryLog


class SlowDisk:
    """Keeps every synchronisation waiting until it is told to go on."""

    def __init__(self):
        self.reached, self.goes_on = threading.Event(), threading.Event()
        self._fsync = os.fsync

    def fsync(self, descriptor):
        self.reached.set()
        assert self.goes_on.wait(20)
        self._fsync(descriptor)


@pytest.fixture
def slow_disk(monkeypatch):
    disk = SlowDisk()
    yield disk
    disk.goes_on.set()


def small(name):
    return [Trajectory(name, [turn()])]


def test_a_forgotten_log_that_its_own_thread_collects_is_written_first(tmp_path, monkeypatch):
    class Holder:
        pass

    def encoded(*values, encode=log_folder.encoded_segment):
        gc.collect()  # as it may happen at any allocation of any thread
        return encode(*values)

    def forget():
        holder = Holder()
        holder.itself = holder  # so that only a collection finds that nobody needs it
        holder.log = TrajectoryLog.open(tmp_path, options=LogOptions(segment_episodes=2))
        holder.log.append("e0", [episode(0)])
        gc.disable()
        holder.log.append("e1", [episode(1)])

    monkeypatch.setattr(log_folder, "encoded_segment", encoded)
    try:
        forget()
        wait_until(lambda: all(one.name != "trajectory log" for one in threading.enumerate()))
    finally:
        gc.enable()
    assert_holds(tmp_path, [0, 1])
    TrajectoryLog.open(tmp_path).close()


def test_an_interrupted_close_keeps_others_out_until_all_is_written(
    tmp_path, monkeypatch, slow_disk
):
    log = TrajectoryLog.open(tmp_path, options=BY_HAND)
    log.append("e0", [episode(0)])
    monkeypatch.setattr(os, "fsync", slow_disk.fsync)
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


def test_an_interrupted_flush_goes_on_and_writes_nothing_twice(tmp_path, monkeypatch):
    main, add, interrupted = threading.main_thread().ident, log_folder.LogFolder.add, []

    def added(*values):
        entry = add(*values)
        if not interrupted:
            interrupted.append(True)
            signal.pthread_kill(main, signal.SIGINT)
        return entry

    monkeypatch.setattr(log_folder.LogFolder, "add", added)
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as log:
        log.append("e0", [episode(0)])
        with pytest.raises(KeyboardInterrupt):
            log.flush()
        log.append("e1", [episode(1)])
        log.flush()
    assert len(list(tmp_path.glob("*.parquet"))) == 2
    assert_holds(tmp_path, [0, 1])
    with TrajectoryLog.open(tmp_path, mode="read") as log:
        assert log.num_trajectories == 2


def test_a_flush_of_nothing_brings_no_segment_forward(tmp_path):
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as log:
        log.flush()
        for number in range(3):
            log.append(f"e{number}", [episode(number)])
            log.flush()
            log.flush()
        log.append("e3", [episode(3)])
        log.append("e4", [episode(4)])
    assert len(list(tmp_path.glob("*.parquet"))) == 4
    assert_holds(tmp_path, range(5))


def test_what_is_appended_while_a_log_is_closed_is_kept_or_refused(
    tmp_path, monkeypatch, slow_disk
):
    log = TrajectoryLog.open(tmp_path, options=LogOptions(max_pending_bytes=1))
    log.append("e0", [episode(0)])
    monkeypatch.setattr(os, "fsync", slow_disk.fsync)
    kept, refused = ["e0"], []

    def append(name):
        try:
            log.append(name, small(name))
            kept.append(name)
        except ValueError as error:
            refused.append(str(error))

    def is_closed():
        try:
            log.append(0, [])
        except (TypeError, ValueError) as error:
            return "is closed" in str(error)

    appending = [threading.Thread(target=append, args=(f"n{k}",), daemon=True) for k in range(5)]
    closing = threading.Thread(target=log.close, daemon=True)
    for one in appending:
        one.start()
    wait_until(slow_disk.reached.is_set)
    closing.start()
    wait_until(is_closed)
    slow_disk.goes_on.set()
    for one in (*appending, closing):
        one.join(20)
        assert not one.is_alive()
    assert len(kept) + len(refused) == 6
    assert refused
    assert set(refused) == {f"log {tmp_path} is closed"}
    assert [one.episode for one in read(tmp_path)] == kept


def test_a_new_folder_and_a_flush_are_brought_to_the_disk(tmp_path, monkeypatch):
    synchronised = []

    def fsync(descriptor, sync=os.fsync):
        synchronised.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = tmp_path / "new" / "log"
    with TrajectoryLog.open(folder, options=BY_HAND) as log:
        assert synchronised[:2] == [str(tmp_path), str(tmp_path / "new")]
        assert synchronised[2:] == [f"{folder}/manifest.jsonl.tmp", str(folder)]
        log.append("e0", [episode(0)])
        log.flush()
        written = [
            f"{folder}/segment-00000000.parquet.tmp",
            str(folder),
            f"{folder}/manifest.jsonl",
        ]
        assert synchronised[4:] == written
    TrajectoryLog.open(folder).close()
    assert len(synchronised) == 7  # what is there needs none


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


def test_too_little_memory_is_no_damage(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise pa.ArrowMemoryError("malloc of size 1 failed")

    write(tmp_path, [0])
    monkeypatch.setattr(parquet, "ParquetFile", fails)
    with pytest.raises(MemoryError, match="malloc"):
        read(tmp_path, damaged="skip")


@contextmanager
def files_of_at_most(num_bytes):
    """Let every write beyond so many bytes of a file fail, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["e2", "e" * 50_000])  # the second fits a segment, but no line
def test_a_full_disk_loses_nothing(tmp_path, name):
    write(tmp_path, [0, 1])
    before = (tmp_path / "manifest.jsonl").read_bytes()
    with TrajectoryLog.open(tmp_path, options=BY_HAND) as log:
        log.append(name, [episode(2)])
        with files_of_at_most(20_000 if len(name) > 2 else 5000):
            for _ in range(2):
                with pytest.raises(OSError, match="File too large") as caught:
                    log.flush()
                assert caught.value.errno == errno.EFBIG
            with pytest.raises(OSError, match=f"File too large: '{tmp_path}'"):
                log.append("e3", [episode(3)])
        assert (tmp_path / "manifest.jsonl").read_bytes() == before
        assert (len(log), log.num_pending, "e3" in log) == (3, 1, False)
        assert_holds(tmp_path, [0, 1])
        log.flush()
        log.append("e3", [episode(3)])
    assert [one.episode for one in read(tmp_path)] == ["e0", "e1", name, "e3"]


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
