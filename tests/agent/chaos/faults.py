"""An engine and an environment that go wrong on purpose, as a plan says."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field, replace
from typing import Any

from tests.agent.chaos.fault_plan import Fault, FaultPlan
from trajpack.agent.errors import GenerationError, ServerUnavailableError
from trajpack.agent.protocols import Engine, Environment, GenerationOutput, Observation, Reply


@dataclass(eq=False)
class _Open:
    attempt: int
    inner: asyncio.Queue[Reply]
    replies: asyncio.Queue[Reply] = field(default_factory=asyncio.Queue)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    num_asked: int = 0


class FaultyEngine:
    """Hands requests to an engine, and its replies back: most of them as they are."""

    def __init__(self, engine: Engine, plan: FaultPlan) -> None:
        self.engine = engine
        self.plan = plan
        self.obs_queue: asyncio.Queue[Observation] = asyncio.Queue()
        self.open: dict[str, _Open] = {}
        self._late: set[asyncio.Task[None]] = set()

    @property
    def version(self) -> int:
        return self.engine.version

    def open_episode(self, qid: str) -> asyncio.Queue[Reply]:
        inner = self.engine.open_episode(qid)
        self.open[qid] = _Open(self.plan.begin(qid), inner)
        return self.open[qid].replies

    def close_episode(self, qid: str) -> None:
        self.engine.close_episode(qid)
        episode = self.open.pop(qid, None)
        for task in episode.tasks if episode else ():
            task.cancel()

    async def __aenter__(self) -> FaultyEngine:
        await self.engine.__aenter__()
        self._serving = asyncio.create_task(self._serve())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        open_tasks = [task for episode in self.open.values() for task in episode.tasks]
        tasks = {self._serving, *self._late, *open_tasks}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self.engine.__aexit__(*exc_info)

    async def _serve(self) -> None:
        while True:
            observation = await self.obs_queue.get()
            qid = observation[0]
            if (episode := self.open.get(qid)) is None:
                continue
            turn = episode.num_asked
            episode.num_asked += 1
            fault = self.plan.engine_fault(qid, episode.attempt, turn)
            self.plan.inject("engine", qid, fault)
            task = asyncio.create_task(self._answer(episode, observation, turn, fault))
            kept = self._late if fault is Fault.LATE else episode.tasks
            kept.add(task)
            task.add_done_callback(kept.discard)

    async def _answer(
        self, episode: _Open, observation: Observation, turn: int, fault: Fault | None
    ) -> None:
        await self.engine.obs_queue.put(observation)
        reply = await episode.inner.get()
        if fault is Fault.DROP:
            return
        if fault in (Fault.DELAY, Fault.LATE):
            await asyncio.sleep(self.plan.delay_s if fault is Fault.DELAY else self.plan.late_s)
        if isinstance(reply, GenerationOutput):
            names = (reply.qid, episode.attempt, turn)
            reply = _spoilt(reply, fault, self.plan, names)
        episode.replies.put_nowait(reply)
        if fault is Fault.DUPLICATE:
            episode.replies.put_nowait(reply)


def _spoilt(
    reply: GenerationOutput, fault: Fault | None, plan: FaultPlan, names: tuple[str, int, int]
) -> Reply:
    ids, logprobs = list(reply.output_ids), list(reply.output_logprobs)
    number = plan.draw("spoilt", *names)
    where = number // 2 % max(len(ids), 1)
    is_odd = number % 2 == 1
    match fault:
        case Fault.TRUNCATE:
            kept = plan.num_kept(*names, len(ids))
            ids, logprobs = ids[:kept], logprobs[:kept]
            return replace(reply, output_ids=ids, output_logprobs=logprobs, no_eos=is_odd)
        case Fault.WRONG_LENGTH:
            logprobs = [*logprobs, -1.0] if is_odd else logprobs[1:]
        case Fault.NAN:
            logprobs[where : where + 1] = [math.nan if is_odd else -math.inf]
        case Fault.UNKNOWN_ID:
            ids[where : where + 1] = [2**31 if is_odd else -1]
        case Fault.STRAY:
            return replace(reply, qid=f"{reply.qid}0")
        case Fault.EXCEPTION:
            return GenerationError(reply.qid, "out of memory")
        case Fault.KILL:
            return ServerUnavailableError(reply.qid, "the connection was reset")
    return replace(reply, output_ids=ids, output_logprobs=logprobs)


class FaultyEnvironment:
    """Hands steps to an environment, and its judgements back: most of them as they are.

    Give it the plan of a `FaultyEngine`, which counts the attempts.
    """

    def __init__(self, environment: Environment, plan: FaultPlan) -> None:
        self.environment = environment
        self.plan = plan

    async def reset(self) -> Any:
        return await self.environment.reset()

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        qid = action[0]
        fault = self.plan.environment_fault(qid, *self.plan.next_step(qid))
        self.plan.inject("environment", qid, fault)
        match fault:
            case Fault.DELAY:
                await asyncio.sleep(self.plan.delay_s)
            case Fault.DROP:
                await asyncio.Event().wait()
            case Fault.EXCEPTION:
                raise RuntimeError(f"no verdict on {action[1]!r}")
            case Fault.KILL:
                raise BrokenPipeError("the judge has died")
            case Fault.CANCEL:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)
        state, rewards, terminated, truncated, more = await self.environment.step(action)
        if fault is Fault.WRONG_LENGTH:
            rewards = [*rewards, 1.0]
        elif fault is Fault.NAN:
            rewards = [math.nan]
        return state, rewards, terminated, truncated, more
