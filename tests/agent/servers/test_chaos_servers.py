"""Hundreds of episodes over real connections, to servers that misbehave, die and come back."""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.agent.agents.chat_cases import END
from tests.agent.chaos.chaos_cases import MARKS, CoinJudge, chaos_agent
from tests.agent.chaos.fault_plan import Fault, FaultPlan
from tests.agent.servers.loopback import (
    Answer,
    Asked,
    Loopback,
    drawing,
    encode,
    options,
    say_sglang,
    say_vllm,
    sglang_body,
    vllm_body,
)
from tests.support.slow import slow_after
from trajpack.agent.protocols import Prompt
from trajpack.agent.runner.policy import RetryPolicy, RolloutPolicy
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.agent.seeding import derive_seed
from trajpack.agent.servers.options import TimeLimits
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine

NUM_EPISODES = 300
NUM_TURNS = 2
VOCABULARY_SIZE = 0x110000
LIMITS = TimeLimits(request_s=0.5, generation_s=10, outage_s=5, start_s=5)
RATES = {
    Fault.DELAY: 0.03,
    Fault.DROP: 0.01,
    Fault.DUPLICATE: 0.03,
    Fault.TRUNCATE: 0.04,
    Fault.WRONG_LENGTH: 0.03,
    Fault.NAN: 0.03,
    Fault.UNKNOWN_ID: 0.03,
    Fault.EXCEPTION: 0.05,
    Fault.KILL: 0.05,
}
MALFORMED = {Fault.WRONG_LENGTH, Fault.NAN, Fault.UNKNOWN_ID, Fault.DUPLICATE}
ALWAYS_POSSIBLE = {"unavailable", "timeout"}
"""Servers die whoever is asking them."""


def continuation(prompt: list[int]) -> list[int]:
    """Return what a server says: tokens that tell what they continue."""
    number = derive_seed(0, *prompt)
    return [*(MARKS + (number >> shift) % 512 for shift in (0, 9, 18, 5)), ord(END)]


class Server:
    """What all servers say; it remembers how often each prompt came."""

    def __init__(self, plan: FaultPlan, is_vllm: bool) -> None:
        self.plan = plan
        self.is_vllm = is_vllm
        self.times: Counter[tuple[int, ...]] = Counter()
        self.faults: dict[int, set[Fault]] = {}
        self.say = drawing(self.draw, say_vllm if is_vllm else say_sglang)

    async def draw(self, asked: Asked) -> Answer:
        prompt = asked.payload["token_ids" if self.is_vllm else "input_ids"]
        key = tuple(prompt)
        self.times[key] += 1
        name = str(derive_seed(0, *prompt))
        fault = self.plan.engine_fault(name, self.times[key], 0)
        if fault is not None:
            self.plan.counts["engine", fault] += 1
            self.faults.setdefault(prompt[0] - MARKS, set()).add(fault)
        return await self.spoilt(fault, continuation(prompt))

    async def spoilt(self, fault: Fault | None, ids: list[int]) -> Answer:
        if fault is Fault.DELAY:
            await asyncio.sleep(0.02)
        elif fault is Fault.DROP:
            await asyncio.Event().wait()
        elif fault is Fault.EXCEPTION:
            return Answer(503, b"overloaded")
        elif fault is Fault.UNKNOWN_ID:
            ids = [*ids[:2], VOCABULARY_SIZE, *ids[3:]]
        is_short = fault is Fault.TRUNCATE
        body = self.body(ids[:2] if is_short else ids, is_short)
        numbers = self.numbers(body)
        if fault is Fault.WRONG_LENGTH:
            del numbers[1]
        elif fault is Fault.NAN and self.is_vllm:
            numbers[1]["logprob"] = math.nan
        elif fault is Fault.NAN:
            numbers[1][0] = math.nan
        content = encode(body)
        raw = f"HTTP/1.1 200 OK\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content
        if fault is Fault.KILL:
            return Answer(raw=raw[: len(raw) // 2])
        if fault is Fault.DUPLICATE:
            last = raw.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)
            return Answer(raw=last + raw)
        return Answer(body=content)

    def body(self, ids: list[int], is_short: bool) -> dict[str, Any]:
        if self.is_vllm:
            return vllm_body(ids, finish="length" if is_short else "stop")
        return sglang_body(ids, {"type": "length", "length": len(ids)} if is_short else None)

    def numbers(self, body: dict[str, Any]) -> list[Any]:
        if self.is_vllm:
            return list_of(body["choices"][0]["logprobs"]["content"])
        return list_of(body["meta_info"]["output_token_logprobs"])


class MortalServer(Loopback):
    """Takes no more connections before it dies: asyncio leaks one that is just being taken."""

    async def __aexit__(self, *exc_info: object) -> None:
        for listener in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listener)
        for _ in range(20):  # a connection takes a few turns of the event loop to be there
            await asyncio.sleep(0)
        await super().__aexit__()


def list_of(numbers: Any) -> list[Any]:
    assert isinstance(numbers, list)
    return numbers


def check(result: EpisodeResult, faults: set[Fault]) -> None:
    if result.error is not None:
        allowed = ALWAYS_POSSIBLE | ({"malformed"} if faults & MALFORMED else set())
        assert result.error.cause in allowed, (result.error, faults)
        assert result.trajectories == ()
        return
    (trajectory,) = result.trajectories
    assert len(trajectory.turns) == NUM_TURNS
    conversation = list(result.prompt.input_ids)
    for turn in trajectory.turns:
        prompt, said = list(turn.prompt_ids), list(turn.completion_ids)
        assert prompt[: len(conversation)] == conversation
        full = continuation(prompt)
        assert said == full[: len(said)]
        assert turn.truncated == (said != full)
        assert len(turn.completion_logprobs) == len(said)
        conversation = [*prompt, *said]


async def roll_out(engine_type: Any, server: Server) -> tuple[Counter[str], int]:
    results: Counter[str] = Counter()
    num_failed = 0
    policy = RolloutPolicy(
        retries=RetryPolicy(3, wait_initial_s=0.01, wait_max_s=0.02), episode_timeout_s=20.0
    )
    prompts = (Prompt(f"q{k}", [MARKS + k, ord("?")]) for k in range(NUM_EPISODES))
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(MortalServer(server.say)) for _ in range(3)]
        chosen = options(vocab_size=VOCABULARY_SIZE, time_limits=LIMITS, missing_logprobs="refuse")
        engine = engine_type([one.url for one in servers], options=chosen)
        await stack.enter_async_context(engine)
        agent = chaos_agent(NUM_TURNS)
        runner = RolloutRunner(engine, agent, CoinJudge(), concurrency=16, policy=policy)
        async for result in runner.run(prompts):
            results[result.qid] += 1
            num_failed += result.error is not None
            check(result, server.faults.get(int(result.prompt.id[1:]), set()))
            number, is_back = divmod(results.total(), 20)
            if not is_back:  # one server dies, and the one that died before it is back
                await servers[number % 3].__aexit__()
                if number > 1:
                    await servers[(number - 1) % 3].__aenter__()
        assert all(one.draws for one in servers)
    assert len(asyncio.all_tasks()) == 1
    return results, num_failed


@pytest.mark.parametrize("engine_type", slow_after(1, [VLLMEngine, SGLangEngine]))
def test_no_episode_is_lost_or_doubled_by_servers_that_die(engine_type: Any, capsys: Any) -> None:
    server = Server(FaultPlan(2, RATES), engine_type is VLLMEngine)
    before = set(os.listdir("/proc/self/fd"))
    results, num_failed = asyncio.run(roll_out(engine_type, server))
    assert results == Counter(f"q{k}@0" for k in range(NUM_EPISODES))
    assert set(os.listdir("/proc/self/fd")) <= before
    assert num_failed < NUM_EPISODES / 10
    assert {fault for _, fault in server.plan.counts} == set(RATES)
    told = ", ".join(f"{fault} {count}" for (_, fault), count in server.plan.counts.items())
    with capsys.disabled():
        name, num_requests = engine_type.__name__, server.times.total()
        sys.stdout.write(
            f"\n{name}: {NUM_EPISODES} episodes, {num_requests} requests, {told}, "
            f"{num_failed} failed, 0 lost, 0 doubled\n"
        )
