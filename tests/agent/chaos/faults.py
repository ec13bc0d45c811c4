"""An engine and an environment that go wrong on purpose, as a plan says."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import Any

from tests.agent.chaos.chaos_cases import MarkingEngine
from tests.agent.chaos.fault_plan import Fault, FaultPlan
from trajpack.agent.errors import GenerationError, ServerUnavailableError
from trajpack.agent.protocols import Environment, GenerationOutput, GenerationRequest


class FaultyEngine(MarkingEngine):
    """Answers most requests as they should be."""

    async def answer(self, request: GenerationRequest, attempt: int, turn: int) -> GenerationOutput:
        fault = self.plan.engine_fault(request.qid, attempt, turn)
        self.plan.inject("engine", request.qid, fault)
        if (earlier := self.plan.twice.pop(request.qid, None)) is not None and turn:
            return earlier
        reply = await super().answer(request, attempt, turn)
        match fault:
            case Fault.DROP:
                await asyncio.Event().wait()
            case Fault.DELAY:
                await asyncio.sleep(self.plan.delay_s)
            case Fault.LATE:
                await asyncio.sleep(self.plan.late_s)
            case Fault.DUPLICATE:
                self.plan.twice[request.qid] = reply
        return _spoilt(reply, fault, self.plan, (request.qid, attempt, turn))


def _spoilt(
    reply: GenerationOutput, fault: Fault | None, plan: FaultPlan, names: tuple[str, int, int]
) -> GenerationOutput:
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
            raise GenerationError(reply.qid, "out of memory")
        case Fault.KILL:
            raise ServerUnavailableError(reply.qid, "the connection was reset")
    return replace(reply, output_ids=ids, output_logprobs=logprobs)


class FaultyEnvironment:
    """Hands steps to an environment, and its judgements back: most of them as they are."""

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
