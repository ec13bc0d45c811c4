"""Signal handlers that raise inside a log, or use it, lose no episode and do not block."""

import dis
import itertools
import os
import random
import signal
import statistics
import sys
import threading
import time
from contextlib import suppress

import pytest

from tests.packing.trajectory_log.log_cases import BY_HAND, read, turn, wait_until
from trajpack import Trajectory
from trajpack.packing.trajectory_log import (
    log as trajectory_log,
    writer as log_writer,
)
from trajpack.packing.trajectory_log.log import TrajectoryLog
from trajpack.packing.trajectory_log.options import LogOptions

SMALL = [Trajectory("a", [turn()])]
FILES = {one.__file__ for one in (log_writer, trajectory_log)}


class Stop(BaseException):
    """Raised by the handler."""


def stop():
    raise Stop


class InterruptedAt:
    """Calls a handler where the interpreter looks for signals: after calls, in loops, at a lock.

    It counts these moments in the log's own files, and calls it in the one of the given number.
    """

    def __init__(self, moment, handler=stop):
        self.left = moment
        self._handler = handler
        self.is_over = False
        self._before = {}

    def __enter__(self):
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _enter(self, frame, event, _):
        if frame.f_code.co_filename not in FILES or self.is_over:
            return None
        frame.f_trace_opcodes = True
        self._before[id(frame)] = ""
        return self._look

    def _look(self, frame, event, _):
        if event != "opcode" or self.is_over:
            return self._look
        code = frame.f_code.co_code
        now = dis.opname[code[frame.f_lasti]]
        before, self._before[id(frame)] = self._before[id(frame)], now
        is_asked = before.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
        if is_asked or now == "BEFORE_WITH":
            self.left -= 1
            if self.left < 0:
                self.is_over = True
                self._handler()
        return self._look


@pytest.mark.filterwarnings("ignore:unclosed file")
@pytest.mark.timeout(300)
def test_an_open_that_is_interrupted_leaves_no_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(log_writer, "_NAP_S", 0.01)
    for moment in itertools.count():
        folder, log = tmp_path / str(moment), None
        with suppress(Stop), (interruption := InterruptedAt(moment)):
            log = TrajectoryLog.open(folder, options=BY_HAND)
        if log is not None:
            log.close()
        with TrajectoryLog.open(folder) as log:
            log.append("e", SMALL)
        assert len(read(folder)) == 1
        if not interruption.is_over:
            break
    assert moment > 5
    wait_until(lambda: all(one.name != "trajectory log" for one in threading.enumerate()))


def refused(work):
    """Return whether a log refuses to do something, as the name is known or the log is closed."""
    try:
        work()
    except ValueError as error:
        assert "is in the log already" in str(error) or "is closed" in str(error)  # noqa: PT017
        return True
    return False


class Used:
    """A log of which is known what it took."""

    def __init__(self, folder):
        options = LogOptions(max_pending_bytes=1000, flush_seconds=3600)
        self.log, self.folder, self.taken = TrajectoryLog.open(folder, options=options), folder, []
        self.log.append("again", [], error="once")
        self.append("first")

    def append(self, name):
        if not refused(lambda: self.log.append(name, [Trajectory(name, [turn()])])):
            assert name in self.log
            self.taken.append(name)

    def flush(self):
        refused(self.log.flush)

    def look(self):
        log = self.log
        names = log.finished | log.failed | log.episodes
        assert all(name in log for name in names)
        assert str(len(log)) in repr(log)
        assert log.num_tokens >= log.num_turns >= log.num_trajectories >= 0 <= log.num_pending
        assert {one.episode for one in log.replay()} <= log.episodes

    def use(self):
        for name in ("new", "again", "inner"):
            self.append(name)
        self.look()
        self.flush()
        assert self.log.finished >= {*self.taken}

    def close(self):
        self.log.close()

    def stop(self):
        raise Stop


@pytest.mark.timeout(300)
@pytest.mark.parametrize("handler", [Used.stop, Used.use, Used.close])
@pytest.mark.parametrize(
    "work",
    [
        Used.look,
        lambda used: used.append("new"),
        lambda used: used.append("again"),
        Used.flush,
        Used.close,
    ],
    ids=["look", "append", "append again", "flush", "close"],
)
def test_a_signal_handler_may_raise_in_a_log_and_use_it(memory_path, work, handler):
    for moment in itertools.count():
        used = Used(memory_path / str(moment))
        interruption = InterruptedAt(moment, lambda used=used: handler(used))
        with suppress(Stop), interruption:
            work(used)
        used.append("after")
        used.flush()
        unsure = {"new", "again"} if handler is Used.stop else set()  # in the log or not
        assert {*used.taken} <= used.log.finished <= {*used.taken} | unsure
        assert_whole(used.log, used.folder)
        if not interruption.is_over:
            break
    assert moment > 5


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("handler", [Used.use, Used.close])
def test_a_signal_handler_may_use_a_log_while_its_process_forks(memory_path, handler):
    parent, told = os.getpid(), []

    for moment in itertools.count():
        used = Used(memory_path / str(moment))

        def in_parent(used=used):
            if os.getpid() == parent:
                try:
                    handler(used)
                except RuntimeError as error:
                    told.append(str(error))

        with (interruption := InterruptedAt(moment, in_parent)):
            child = os.fork()
            if child == 0:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        used.close()
        wait_until(lambda used=used: not used.log.num_pending)
        assert sorted(used.taken) == sorted(used.log.finished)
        if not interruption.is_over:
            break
    assert all("cannot be written while this process forks" in one for one in told)
    assert bool(told) == (handler is Used.use)


def assert_whole(log, folder):
    """Raise unless a log can be closed, and then holds all that it names."""
    names = log.episodes
    log.close()
    with TrajectoryLog.open(folder, options=BY_HAND) as again:
        assert again.episodes == names
        again.append("at last", SMALL)
    assert {one.episode for one in read(folder)} == {*names, "at last"}


@pytest.mark.attack
@pytest.mark.timeout(600)
def test_signals_at_random_moments_lose_no_episode(tmp_path, tries):
    """Some handlers raise, some use the log."""
    rng, handled, names = random.Random(0), 0, itertools.count()

    def handler(*_):
        nonlocal handled
        handled += 1
        kind = rng.random()
        if kind < 0.5:
            raise Stop
        if kind < 0.9:
            log.append(f"inner{next(names)}", SMALL)
        elif kind < 0.93:
            log.flush()
        else:
            assert log.num_trajectories == len(log.finished) == len(log)

    def seconds(work):
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    before = signal.signal(signal.SIGALRM, handler)
    options = LogOptions(segment_episodes=50, max_pending_bytes=100_000, flush_seconds=0.01)
    log = TrajectoryLog.open(tmp_path, options=options)
    try:
        usual = statistics.median(
            seconds(lambda name=f"warm{number}": log.append(name, SMALL)) for number in range(50)
        )
        while handled < tries(10015):
            name, delay = f"e{next(names)}", rng.uniform(0.1, 1.2) * usual
            work = log.flush if rng.random() < 0.02 else lambda name=name: log.append(name, SMALL)
            try:
                signal.setitimer(signal.ITIMER_REAL, max(delay, 1e-6))
                work()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Stop:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    log.flush()
    assert log.num_trajectories == len(log.finished) == len(log)
    assert_whole(log, tmp_path)
