"""A rollout for minutes in which everything goes wrong now and then: does anything pile up?

``python -m benchmarks.soak [--minutes 10] [--timeout 2] [--out build/soak]``. The real runner,
agent, metrics, log and buffer, with the tests' fault injector around an engine that answers at
once. Memory and throughput go into ``soak.csv`` second by second, then ``soak.json`` and
``soak.svg`` are written. Its exit status is 1 if memory grows, or if an episode is lost, doubled
or wrongly named.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import Any

import psutil

from benchmarks import machine
from benchmarks.soak_report import COLUMNS, Moment, Outcome, curves, summary, table
from tests.agent.chaos.chaos_cases import Account, CoinJudge, chaos_agent, chaos_prompts
from tests.agent.chaos.fault_plan import CAUSES, FaultPlan, rates
from tests.agent.chaos.faults import FaultyEngine, FaultyEnvironment
from trajpack.agent.observability.metrics import RolloutMetrics
from trajpack.agent.protocols import GenerationOutput, Prompt
from trajpack.agent.runner.observers import RolloutObserver
from trajpack.agent.runner.policy import RetryPolicy, RolloutPolicy
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.trajectory_log.log import TrajectoryLog

MAX_EPISODES = 20_000_000
EPISODES_OF_A_LOG = 2000
TRAJECTORIES_OF_A_BATCH = 256


class Ledger(RolloutObserver):
    """Counts, and remembers of every episode no more than a byte."""

    def __init__(self, plan: FaultPlan) -> None:
        self.plan = plan
        self.account = Account(plan)
        self.seen = bytearray(MAX_EPISODES)
        self.outcome = Outcome()
        self.failed: Counter[str] = Counter()
        self.num_turns = self.num_again = self.num_taken = 0

    def episode_started(self, qid: str, attempt: int) -> None:
        self.plan.begin(qid, attempt)

    def generation_ended(self, qid: str, turn: int, reply: object) -> None:
        self.num_turns += isinstance(reply, GenerationOutput)

    def episode_ended(
        self, qid: str, attempt: int, error: Exception | None, *, final: bool
    ) -> None:
        self.num_again += not final

    def take(self, result: EpisodeResult) -> None:
        number = int(result.prompt.id[1:])
        self.seen[number] = min(self.seen[number] + 1, 255)
        self.num_taken += 1
        faults = self.plan.end(result.qid)
        if result.error is not None:
            cause = result.error.cause
            self.failed[cause] += 1
            allowed = {CAUSES[place][fault] for place, fault in faults} | {"timeout"}
            if cause not in allowed:
                self.complain(f"{result.error} although {faults} was injected")
            return
        try:
            self.account.check_turns(result, list(result.trajectories[0].turns))
        except AssertionError as error:
            self.complain(f"the trajectory of {result.qid} is not its own: {error}")

    def complain(self, text: str) -> None:
        if len(self.outcome.wrong) < 20:
            self.outcome.wrong.append(text)

    def close(self, num_started: int) -> None:
        counts = Counter(self.seen[:num_started])
        self.outcome.num_started = num_started
        self.outcome.num_lost = counts.pop(0, 0)
        self.outcome.num_doubled = sum((times - 1) * count for times, count in counts.items())
        self.outcome.failed = dict(self.failed)
        self.outcome.faults = {
            f"{place} {fault}": count for (place, fault), count in self.plan.counts.items()
        }


class Soak:
    """One run."""

    def __init__(self, folder: Path, seconds: float, timeout_s: float, seed: int) -> None:
        self.folder = folder
        self.seconds = seconds
        self.timeout_s = timeout_s
        self._process, self._began = psutil.Process(), time.monotonic()
        plan = FaultPlan(seed, rates("engine", 0.01), rates("environment", 0.01))
        plan.delay_s, plan.late_s = 0.02, 2 * timeout_s
        self.ledger = Ledger(plan)
        self.engine = FaultyEngine(plan)
        self.judge = FaultyEnvironment(CoinJudge(), plan)
        self.metrics = RolloutMetrics()
        self.num_started = 0
        self._number = 0
        self._num_in_log = 0
        self._log = self._next_log()
        self._buffer = TrajectoryBuffer()

    async def run(self) -> Outcome:
        outcome = self.ledger.outcome
        sampling = asyncio.create_task(self._sample())
        async with self.engine:
            runner = self._runner()
            async for result in runner.run(self._prompts()):
                await self._take(result)
            if self.engine.open:
                self.ledger.complain(f"{len(self.engine.open)} episodes are open in the engine")
        await self._end_log()
        await self._end_sampling(sampling)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            self.ledger.complain(f"tasks are left: {left}")
        self.ledger.close(self.num_started)
        return outcome

    def _runner(self) -> RolloutRunner:
        retries = RetryPolicy(max_attempts=4, wait_initial_s=0.02, wait_max_s=0.1)
        return RolloutRunner(
            self.engine,
            chaos_agent(),
            self.judge,
            concurrency=256,
            policy=RolloutPolicy(retries, 3 * self.timeout_s, self.timeout_s),
            observers=[self.ledger, self.metrics],
        )

    def _prompts(self) -> Iterator[Prompt]:
        until = time.monotonic() + self.seconds
        for prompt in chaos_prompts(MAX_EPISODES):
            if time.monotonic() >= until:
                return
            self.num_started += 1
            yield prompt

    async def _take(self, result: EpisodeResult) -> None:
        self.ledger.take(result)
        error = None if result.error is None else str(result.error)
        self._log.append(result.qid, result.trajectories, error=error)
        self._buffer.extend(result.trajectories)
        self._num_in_log += 1
        if len(self._buffer) >= TRAJECTORIES_OF_A_BATCH:
            await asyncio.to_thread(self._pack)
        if self._num_in_log >= EPISODES_OF_A_LOG:
            await self._end_log()
            self._log = self._next_log()

    def _pack(self) -> None:
        began = time.perf_counter()
        batch = self._buffer.pack()
        self.metrics.pack_ended(batch, time.perf_counter() - began)
        self.ledger.outcome.num_packed_tokens += self._buffer.num_tokens
        self._buffer.clear()

    def _next_log(self) -> TrajectoryLog:
        self._number += 1
        self._num_in_log = 0
        return TrajectoryLog.open(self._log_folder(), flush_episodes=500, flush_seconds=1.0)

    def _log_folder(self) -> Path:
        return self.folder / f"log-{self._number}"

    async def _end_log(self) -> None:
        """Close the log, see that it holds what was given to it, once, and delete it."""
        num_read = await asyncio.to_thread(self._read_log)
        if num_read != self._num_in_log:
            self.ledger.complain(f"a log of {self._num_in_log} episodes has {num_read}")
        self.ledger.outcome.num_logged += num_read
        await asyncio.to_thread(shutil.rmtree, self._log_folder())

    def _read_log(self) -> int:
        self._log.close()
        with TrajectoryLog.open(self._log_folder(), mode="read") as log:
            return len({episode.episode for episode in log.replay()})

    async def _sample(self) -> None:
        with (self.folder / "soak.csv").open("w", newline="", buffering=1) as file:
            writer = csv.writer(file)
            writer.writerow(COLUMNS)
            while True:
                moment = self._moment()
                self.ledger.outcome.moments.append(moment)
                writer.writerow(astuple(moment))
                await asyncio.sleep(1.0)

    async def _end_sampling(self, sampling: asyncio.Task[None]) -> None:
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling
        self.ledger.outcome.moments.append(self._moment())

    def _moment(self) -> Moment:
        process = self._process
        return Moment(
            seconds=round(time.monotonic() - self._began, 3),
            rss_bytes=process.memory_info().rss,
            num_turns=self.ledger.num_turns,
            num_episodes=self.ledger.num_taken,
            num_failed=self.ledger.failed.total(),
            num_again=self.ledger.num_again,
            num_faults=self.ledger.plan.counts.total(),
            num_tasks=len(asyncio.all_tasks()),
            num_files=process.num_fds(),
            num_threads=threading.active_count(),
        )


def write(outcome: Outcome, folder: Path, command: str) -> None:
    """Write the curves and all numbers."""
    told: dict[str, Any] = machine.describe(command) | {
        name: value for name, value in vars(outcome).items() if name != "moments"
    }
    (folder / "soak.json").write_text(json.dumps(told, indent=1) + "\n")
    (folder / "soak.svg").write_text(curves(outcome, f"{command}, commit {told['commit']}"))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=machine.ROOT / "build" / "soak")
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds for a reply")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    for stale in asked.out.glob("log-*"):
        shutil.rmtree(stale)
    outcome = asyncio.run(Soak(asked.out, asked.minutes * 60, asked.timeout, asked.seed).run())
    write(outcome, asked.out, f"python -m benchmarks.soak --minutes {asked.minutes:g}")
    print(f"{table(outcome)}\n\n{summary(outcome)}\n\nwritten to {asked.out}")
    problems = outcome.problems()
    for problem in problems:
        print(f"soak: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
