"""What keeps a run waiting, or makes it produce nothing, is said: by an error or in the log."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from tests.agent.chaos.chaos_cases import SkippingLoop, run_skipping
from tests.agent.runner.runner_cases import (
    EchoEngine,
    NoEnvironment,
    TwoTurns,
    collect,
    prompts,
    runner,
)
from tests.agent.servers.loopback import Loopback, say_vllm
from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.errors import EngineEndedError, EpisodeError
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import Engine, Observation, Prompt
from trajpack.agent.ray.workers import RolloutWorkers
from trajpack.agent.runner.policy import GroupPolicy, RolloutPolicy, StalenessPolicy, not_all_equal
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine
from trajpack.packing.types import Trajectory, Turn

LOGGER = "trajpack.agent"


def transformers_engine() -> TransformersEngine:
    return TransformersEngine(build_tiny_model()[0], num_blocks=64, page_size=16)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith(LOGGER)]


# engines that do not serve


@asynccontextmanager
async def _no_worker(number: int) -> AsyncIterator[Any]:
    yield


BUNDLED = {
    "transformers": transformers_engine,
    "vllm": lambda: VLLMEngine("http://127.0.0.1:9"),
    "sglang": lambda: SGLangEngine("http://127.0.0.1:9"),
    "ray": lambda: RolloutWorkers(_no_worker, 1),
}


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("kind", BUNDLED)
def test_an_engine_that_was_never_entered_is_an_error_when_the_run_begins(
    kind: str, by_group: bool
) -> None:
    engine = BUNDLED[kind]()  # type: ignore[operator]

    async def body() -> None:
        rolling = RolloutRunner(engine, TwoTurns(), NoEnvironment())
        async with asyncio.timeout(5):
            await anext(rolling.run_groups(prompts(2)) if by_group else rolling.run(prompts(2)))

    name = type(engine).__name__
    expected = f"this {name} has not been entered: use it within `async with engine:`"
    with pytest.raises(RuntimeError, match=expected):
        asyncio.run(body())


async def _left_transformers() -> Engine:
    async with transformers_engine() as engine:
        return engine


async def _left_server() -> Engine:
    async with Loopback(say_vllm) as server, VLLMEngine(server.url) as engine:
        return engine


async def _left_workers() -> Engine:
    workers = RolloutWorkers(_no_worker, 1)
    await workers.__aexit__()
    return workers


@pytest.mark.parametrize("leave", [_left_transformers, _left_server, _left_workers])
def test_an_engine_that_was_left_is_an_error_when_the_run_begins(leave: Any) -> None:
    async def body() -> None:
        engine = await leave()
        async with asyncio.timeout(5):
            await anext(runner(engine, TwoTurns()).run(prompts(2)))

    with pytest.raises(RuntimeError, match=r"the context of this \w+ has ended: use a new"):
        asyncio.run(body())


def test_an_engine_that_was_entered_in_another_event_loop_is_an_error() -> None:
    async def enter() -> Engine:
        return await transformers_engine().__aenter__()

    async def body() -> None:
        async with asyncio.timeout(5):
            await anext(runner(engine, TwoTurns()).run(prompts(2)))

    engine = asyncio.run(enter())
    with pytest.raises(RuntimeError, match="was entered in another event loop"):
        asyncio.run(body())
    asyncio.run(engine.__aexit__())


def test_a_serving_task_that_has_ended_ends_the_run(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> list[EpisodeResult]:
        async with transformers_engine() as engine, asyncio.timeout(5):
            engine._watching.cancel()  # type: ignore[union-attr]
            return [result async for result in runner(engine, TwoTurns()).run(prompts(2))]

    results = asyncio.run(body())
    assert results
    for result in results:
        assert isinstance(result.error, EngineEndedError)
        assert "the engine's task was cancelled" in str(result.error)
    assert "the engine's task was cancelled" in lines(caplog)


# engines, environments and agents that do not answer


class Slow(EchoEngine):
    """Answers after some seconds, or never."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.wait_s = wait_s

    def answer(self, item: Observation) -> None:
        if self.wait_s < 1e9:
            asyncio.get_running_loop().call_later(self.wait_s, super().answer, item)


async def roll(
    engine: EchoEngine, agent: Any, environment: Any = None, **options: Any
) -> list[EpisodeResult]:
    async with engine:
        rolling = RolloutRunner(engine, agent, environment or NoEnvironment(), **options)
        return [result async for result in rolling.run(prompts(3))]


def test_an_engine_that_does_not_reply_is_named_and_ends_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    results = run_skipping(roll(Slow(35.0), TwoTurns()))
    assert all(result.error is None for result in results)
    said = lines(caplog)
    assert [line.split(";")[0] for line in said] == [
        f"engine Slow has not replied for {seconds} s (requests open: 3)" for seconds in (10, 20)
    ]
    assert "async with engine:" in said[0]


def test_each_run_is_warned_of_silence_anew(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with Slow(15.0) as engine:
            rolling = runner(engine, TwoTurns())
            for _ in range(2):
                assert [result async for result in rolling.run(prompts(1))]

    run_skipping(body())
    assert len(lines(caplog)) == 2  # of four requests, two in each run


def test_an_engine_that_never_replies_is_told_of_more_and_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = RolloutPolicy(episode_timeout_s=3600.0)
    results = run_skipping(roll(Slow(1e9), TwoTurns(), policy=policy))
    assert {result.error.cause for result in results if result.error} == {"timeout"}
    seconds = [int(line.split(" s (")[0].split()[-1]) for line in lines(caplog)[:-1]]
    assert seconds == [10 * 2**k for k in range(9)]
    assert lines(caplog)[-1].startswith("all 3 episodes failed, by cause: timeout 3")


@pytest.mark.parametrize(("wait_s", "patience_s"), [(9.0, 10.0), (50.0, None), (50.0, 60.0)])
def test_an_engine_that_is_slow_but_not_too_slow_is_let_be(
    wait_s: float, patience_s: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    policy = RolloutPolicy(silence_warning_s=patience_s)
    assert len(run_skipping(roll(Slow(wait_s), TwoTurns(), policy=policy))) == 3
    assert lines(caplog) == []


def test_no_patience_is_refused() -> None:
    with pytest.raises(ValueError, match="silence_warning_s must be positive, got 0"):
        RolloutPolicy(silence_warning_s=0)


class SlowEnvironment(NoEnvironment):
    def __init__(self, place: str) -> None:
        self.place = place

    async def reset(self) -> None:
        await asyncio.sleep(25.0 if self.place == "reset" else 0.0)

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(25.0 if self.place == "step" else 0.0)
        return await super().step(action)


class Steps(TwoTurns):
    async def collect_trajectory(
        self, prompt: Prompt, env: Any, requests: Any, replies: Any
    ) -> Any:
        await env.reset()
        await env.step((prompt.id, ["2"]))
        return await super().collect_trajectory(prompt, env, requests, replies)


@pytest.mark.parametrize("place", ["reset", "step"])
def test_an_environment_that_does_not_answer_is_named(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    results = run_skipping(roll(EchoEngine(), Steps(), SlowEnvironment(place)))
    assert all(result.error is None for result in results)
    assert [line.split(";")[0] for line in lines(caplog)] == [
        f"environment SlowEnvironment has not answered for {seconds} s (calls of reset or step "
        "open: 3)"
        for seconds in (10, 20)
    ]


class Waits:
    """Waits for a reply to nothing, or to what somebody else should have put."""

    def __init__(self, how: str) -> None:
        self.how = how

    async def collect_trajectory(
        self, prompt: Prompt, env: Any, requests: Any, replies: Any
    ) -> list[Trajectory]:
        if self.how == "a request that was refused":
            task = asyncio.create_task(requests.put((f"{prompt.id}-1", [1], None)))
            with contextlib.suppress(EpisodeError):
                await task
        elif self.how == "one reply too many":
            await requests.put((prompt.id, [1], None))
            await replies.get()
        await replies.get()
        raise AssertionError


@pytest.mark.parametrize("how", ["nothing", "one reply too many", "a request that was refused"])
def test_an_agent_that_waits_for_a_reply_that_cannot_come_is_named(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = RolloutPolicy(episode_timeout_s=15.0)
    results = run_skipping(roll(EchoEngine(), Waits(how), policy=policy))
    assert {result.error.cause for result in results if result.error} == {"timeout"}
    first, *_ = lines(caplog)
    assert first.startswith(
        "agent Waits has done nothing for 10 s in episode q0@0, which waits for no "
    )


class TakesNoReply:
    """Leaves a reply that has come in its queue."""

    def __init__(self, how: str) -> None:
        self.how = how

    async def collect_trajectory(
        self, prompt: Prompt, env: Any, requests: Any, replies: Any
    ) -> list[Trajectory]:
        await requests.put((prompt.id, [1], None))
        if self.how == "a second request":
            await requests.put((prompt.id, [1], None))
            await replies.get()
        if self.how == "a lock":
            lock = asyncio.Lock()
            await lock.acquire()
            await lock.acquire()
        elif self.how == "sleep":
            await asyncio.sleep(1e6)
        await asyncio.Queue[None]().get()
        raise AssertionError


@pytest.mark.parametrize("how", ["an own queue", "a lock", "sleep", "a second request"])
@pytest.mark.parametrize("wait_s", [0.0, 8.0])
def test_an_agent_that_does_not_take_its_reply_is_named(
    how: str, wait_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    policy = RolloutPolicy(episode_timeout_s=39.0)
    results = run_skipping(roll(Slow(wait_s), TakesNoReply(how), policy=policy))
    assert {result.error.cause for result in results if result.error} == {"timeout"}
    first, second, failed = lines(caplog)
    start = "agent TakesNoReply has done nothing for 10 s in episode q0@0, which waits for no "
    assert first.startswith(start)
    assert "(such episodes: 3; replies that this one has not taken: 1)" in first
    assert "the agent takes it with act_queue.get()" in first
    assert first.endswith("RolloutPolicy(episode_timeout_s=...) ends such episodes")
    assert second.startswith("agent TakesNoReply has done nothing for 20 s")
    assert failed.startswith("all 3 episodes failed")


def test_an_agent_that_does_not_take_its_reply_is_named_while_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Mixed(TwoTurns):
        async def collect_trajectory(self, *values: Any) -> Any:
            if values[0].id == "q1@0":
                return await TakesNoReply("an own queue").collect_trajectory(*values)
            await asyncio.sleep(1.0)
            return await super().collect_trajectory(*values)

    async def body() -> None:
        async with EchoEngine() as engine:
            endless = (Prompt(f"q{k}", [k]) for k in itertools.count())
            rolling = runner(engine, Mixed(), concurrency=3)
            async with aclosing(rolling.run(endless)) as results:
                while not lines(caplog):
                    assert (await anext(results)).error is None

    run_skipping(body())
    assert lines(caplog)[0].startswith("agent Mixed has done nothing for 10 s in episode q1@0, ")


def test_an_agent_whose_reply_waits_while_another_is_to_come_is_let_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Gathers(Slow):
        """Holds the first request back until eight seconds after the second."""

        def answer(self, item: Observation) -> None:
            self.wait_s = 0.0 if len(item[1]) == 2 else 8.0
            super().answer(item)

    class AsksTwice:
        async def collect_trajectory(
            self, prompt: Prompt, env: Any, requests: Any, replies: Any
        ) -> list[Trajectory]:
            for ids in ([1], [1, 2]):
                await requests.put((prompt.id, ids, None))
            await asyncio.sleep(8.5)
            for _ in range(2):
                await replies.get()
            return [Trajectory(prompt.id, [Turn([1], [2], [-1.0])])]

    assert all(r.error is None for r in run_skipping(roll(Gathers(8.0), AsksTwice())))
    assert lines(caplog) == []


# prompts that do not come


async def slowly(wait_s: float, count: int) -> AsyncIterator[Prompt]:
    for prompt in prompts(count):
        yield prompt
        await asyncio.sleep(wait_s)


@pytest.mark.parametrize("by_group", [False, True])
def test_prompts_that_never_come_are_told(by_group: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def never() -> AsyncIterator[Prompt]:
        await asyncio.Event().wait()
        yield Prompt("q0", [1])

    async def body() -> None:
        async with EchoEngine() as engine:
            rolling = runner(engine, TwoTurns())
            run = rolling.run_groups(never()) if by_group else rolling.run(never())
            async with aclosing(run) as results:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(results), 25.0)

    run_skipping(body())
    assert lines(caplog) == [
        f"no prompt has come for {seconds} s, and no episode is under way: the run waits for the "
        "next item of its iterator of prompts"
        for seconds in (10, 20)
    ]


@pytest.mark.parametrize(("wait_s", "expected"), [(9.0, 0), (15.0, 1)])
def test_prompts_that_stop_coming_are_told_by_the_time_since_the_last_episode(
    wait_s: float, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with Slow(3.0) as engine:
            assert [r async for r in runner(engine, TwoTurns()).run(slowly(6.0 + wait_s, 2))]

    run_skipping(body())
    assert len(lines(caplog)) == expected


def test_prompts_that_come_slowly_while_episodes_run_are_let_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        async with Slow(9.0) as engine:
            assert len([r async for r in runner(engine, TwoTurns()).run(slowly(17.0, 3))]) == 3

    run_skipping(body())
    assert lines(caplog) == []


def test_an_event_loop_that_stood_still_is_no_silence_of_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Hops(EchoEngine):
        """Takes some turns of the event loop for a reply, as what comes over a network does."""

        def answer(self, item: Observation) -> None:
            asyncio.get_running_loop().call_later(0.1, self.hop, item, 9)

        def hop(self, item: Observation, left: int) -> None:
            if left:
                asyncio.get_running_loop().call_soon(self.hop, item, left - 1)
            else:
                super().answer(item)

    async def body() -> None:
        async with Hops() as engine:
            policy = RolloutPolicy(silence_warning_s=0.5)
            rolling = asyncio.ensure_future(
                anext(runner(engine, TwoTurns(), policy=policy).run(prompts(1)))
            )
            await asyncio.sleep(0.05)
            time.sleep(2.0)  # noqa: ASYNC251 - a training step in the way
            assert (await rolling).error is None

    asyncio.run(body())
    assert lines(caplog) == []


def test_a_pause_is_no_silence(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with Slow(1.0) as engine:
            rolling = runner(engine, TwoTurns())
            results = rolling.run(prompts(2))
            first = asyncio.ensure_future(anext(results))
            await asyncio.sleep(0.5)
            async with rolling.paused():
                await asyncio.sleep(100.0)
            assert (await first).error is None
            assert len([result async for result in results]) == 1

    run_skipping(body())
    assert lines(caplog) == []


def test_a_pause_that_waits_for_an_engine_in_vain_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        async with Slow(1e9) as engine:
            policy = RolloutPolicy(episode_timeout_s=15.0)
            rolling = runner(engine, TwoTurns(), policy=policy)
            async with aclosing(rolling.run(prompts(1))) as results:
                first = asyncio.ensure_future(anext(results))
                await asyncio.sleep(0.5)
                async with rolling.paused(drain=True):
                    pass
                await first

    run_skipping(body())
    assert lines(caplog)[0].startswith("engine Slow has not replied for 10 s")


def test_weights_that_do_not_come_are_told_once_nothing_else_is_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        policy = RolloutPolicy(staleness=StalenessPolicy(max_staleness=0, batch_size=2))
        async with EchoEngine() as engine:
            run = runner(engine, TwoTurns(), policy=policy).run(prompts(3))
            async with aclosing(run) as results:
                for _ in range(2):
                    await anext(results)
                third = asyncio.ensure_future(anext(results))
                await asyncio.sleep(59.0)
                assert lines(caplog) == []
                await asyncio.sleep(2.0)
                (line,) = lines(caplog)
                assert line.startswith("no episode may begin for 60 s")
                assert line.endswith("waits for weights newer than version 0")
                engine.version = 1
                assert (await third).error is None

    run_skipping(body())
    assert len(lines(caplog)) == 1


def test_a_run_that_was_left_wants_no_weights(caplog: pytest.LogCaptureFixture) -> None:
    async def read(engine: EchoEngine) -> None:
        policy = RolloutPolicy(staleness=StalenessPolicy(max_staleness=0, batch_size=1))
        async with aclosing(runner(engine, TwoTurns(), policy=policy).run(prompts(2))) as results:
            async for _ in results:
                pass

    async def body() -> None:
        async with EchoEngine() as engine:
            reading = asyncio.create_task(read(engine))
            await asyncio.sleep(30.0)
            reading.cancel()
            await asyncio.wait({reading})
            await asyncio.sleep(300.0)

    with asyncio.Runner(loop_factory=lambda: SkippingLoop(20.0)) as skipping:
        skipping.run(body())
    assert lines(caplog) == []


# requests of another episode


class Strays(TwoTurns):
    def __init__(self, name: Callable[[str], Any], *, at_once: bool) -> None:
        super().__init__()
        self.name = name
        self.at_once = at_once

    async def collect_trajectory(
        self, prompt: Prompt, env: Any, requests: Any, replies: Any
    ) -> Any:
        if prompt.id == "q1@0":
            request = (self.name(prompt.id), [1], None)
            requests.put_nowait(request) if self.at_once else await requests.put(request)
            await replies.get()
        return await super().collect_trajectory(prompt, env, requests, replies)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("name", ["q0@0", "q1", "q1@0-1", "q1@1", 7, None])
def test_a_request_with_another_qid_fails_its_episode_alone(name: Any, at_once: bool) -> None:
    agent = Strays(lambda _: name, at_once=at_once)
    results = {r.qid: r for r in run_skipping(roll(EchoEngine(), agent))}
    assert [results[qid].error for qid in ("q0@0", "q2@0")] == [None, None]
    error = results["q1@0"].error
    assert isinstance(error, EpisodeError)
    assert error.cause == "agent"
    assert str(error) == (
        f"episode 'q1@0': the agent put a request with the qid {name!r}: it must be its prompt's "
        "id, 'q1@0'"
    )


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("kind", [list, iter, deque])
def test_a_request_of_any_kind_with_another_qid_fails_its_episode(kind: Any, at_once: bool) -> None:
    class StraysInOtherKinds(Strays):
        async def collect_trajectory(
            self, prompt: Prompt, env: Any, requests: Any, replies: Any
        ) -> Any:
            request = kind(["q0", [1], None])
            requests.put_nowait(request) if self.at_once else await requests.put(request)
            return await replies.get()

    agent = StraysInOtherKinds(str, at_once=at_once)
    for result in run_skipping(roll(EchoEngine(), agent)):
        assert result.error is not None
        assert "the agent put a request with the qid 'q0': it must be" in str(result.error)


@pytest.mark.parametrize("kind", [list, iter, lambda request: (part for part in request)])
def test_a_request_of_any_kind_with_its_own_qid_is_answered(kind: Any) -> None:
    class Asks:
        async def collect_trajectory(
            self, prompt: Prompt, env: Any, requests: Any, replies: Any
        ) -> list[Trajectory]:
            await requests.put(kind([prompt.id, [1], None]))
            reply = await replies.get()
            return [Trajectory(prompt.id, [Turn([1], reply.output_ids, reply.output_logprobs)])]

    assert [r.error for r in run_skipping(roll(EchoEngine(), Asks()))] == [None] * 3


@pytest.mark.parametrize("stray", [(), ("q0@0",), ("q0@0", [1]), {"qid": "q0@0"}, "hello", None, 7])
def test_a_request_that_is_none_fails_its_episode(stray: Any) -> None:
    class Asks:
        async def collect_trajectory(
            self, prompt: Prompt, env: Any, requests: Any, replies: Any
        ) -> Any:
            await requests.put(stray)
            return await replies.get()

    result = run_skipping(roll(EchoEngine(), Asks()))[0]
    assert isinstance(result.error, EpisodeError)
    assert f"expected a request (qid, token_ids, sampling), got {stray!r}" in str(result.error)


# engines that are used without a runner


@pytest.mark.parametrize("kind", ["transformers", "vllm", "sglang"])
def test_a_request_to_an_engine_that_was_never_entered_is_told_at_once(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        engine = BUNDLED[kind]()  # type: ignore[operator]
        engine.open_episode("q0@0")
        await engine.obs_queue.put(("q0@0", [1], None))
        assert lines(caplog) == [
            f"a request waits in the queue of a {type(engine).__name__} that has not been "
            "entered: it is served within `async with engine:`"
        ]
        engine.obs_queue.put_nowait(("q0@0", [1], None))
        assert len(lines(caplog)) == 1

    asyncio.run(body())


def test_a_request_to_an_engine_that_was_entered_is_no_cause_of_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        async with transformers_engine() as engine:
            replies = engine.open_episode("q0@0")
            await engine.obs_queue.put(("q0@0", [1], None))
            await replies.get()
        async with Loopback(say_vllm) as server, VLLMEngine(server.url) as remote:
            replies = remote.open_episode("q0@0")
            await remote.obs_queue.put(("q0@0", [1], None))
            await replies.get()

    asyncio.run(body())
    assert lines(caplog) == []


def test_workers_refuse_a_request_of_an_agent_of_this_process() -> None:
    async def body() -> None:
        workers = RolloutWorkers(_no_worker, 1)
        workers.open_episode("q0@0")
        await workers.obs_queue.put(("q0@0", [1], None))

    with pytest.raises(RuntimeError, match=r"RolloutWorkers take no requests: use workers.runner"):
        asyncio.run(body())


# runs that give nothing


def failing(cause: str | None = None) -> TwoTurns:
    async def fail(prompt: Prompt) -> None:
        if cause is None or prompt.id.endswith("@0"):
            raise ZeroDivisionError("no such luck\nforged line")

    return TwoTurns(before=fail)


@pytest.mark.parametrize("by_group", [False, True])
def test_a_run_in_which_all_has_failed_says_so_once(
    by_group: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with EchoEngine() as engine:
            rolling = runner(engine, failing(), group_size=2)
            run = rolling.run_groups(prompts(3)) if by_group else rolling.run(prompts(3))
            async for _ in run:
                assert lines(caplog) == []

    asyncio.run(body())
    (line,) = lines(caplog)
    assert caplog.records[-1].levelno == logging.ERROR
    assert line == (
        "all 6 episodes failed, by cause: agent 6; the first: episode 'q0@0': ZeroDivisionError: "
        "no such luck\\nforged line; see result.error of each, and its __cause__"
    )


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("is_endless", [False, True])
def test_a_long_run_in_which_all_fails_says_so_early_and_once(
    by_group: bool, group_size: int, is_endless: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with EchoEngine() as engine:
            endless = (Prompt(f"q{k}", [k]) for k in itertools.count())
            rolling = runner(engine, failing(), group_size=group_size)
            asked = endless if is_endless else itertools.islice(endless, 250)
            run = rolling.run_groups(asked) if by_group else rolling.run(asked)
            async with aclosing(run) as results:
                taken = 0
                async for _ in results:
                    taken += 1
                    if is_endless and taken == 250:
                        break

    asyncio.run(body())
    (line,) = lines(caplog)
    assert line.startswith("the first 100 episodes failed, by cause: agent 100; the first: ")
    assert line.endswith("see result.error of each, and its __cause__")


class Returns:
    """Returns the trajectories of some turns, each given by its completion and its reward."""

    def __init__(self, *paths: tuple[list[int], float]) -> None:
        self.paths = paths

    async def collect_trajectory(self, prompt: Prompt, *_: Any) -> list[Trajectory]:
        return [
            Trajectory(f"{prompt.id}-{k}", [Turn([1], ids, [-1.0] * len(ids), reward)])
            for k, (ids, reward) in enumerate(self.paths)
        ]


@pytest.mark.parametrize("by_group", [False, True])
@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("count", [3, 250])
@pytest.mark.parametrize("paths", [[], [([], 1.0)], [([], 0.0), ([], 0.5)]])
def test_a_run_that_brings_no_generated_token_says_so_once(
    by_group: bool,
    group_size: int,
    count: int,
    paths: list[tuple[list[int], float]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        async with EchoEngine() as engine:
            rolling = runner(engine, Returns(*paths), group_size=group_size)
            run = rolling.run_groups(prompts(count)) if by_group else rolling.run(prompts(count))
            async for _ in run:
                pass

    with caplog.at_level(logging.INFO, LOGGER):
        asyncio.run(body())
    (line,) = lines(caplog)
    which, told = ("all", count * group_size) if count == 3 else ("the first", 100)
    assert line == (
        f"{which} {told} episodes brought no generated token to train on (failed: 0; trajectories: "
        f"{told * len(paths)}); an agent returns trajectories whose turns hold the replies' "
        "output_ids as completion_ids"
    )
    assert caplog.records[-1].levelno == logging.WARNING


def test_a_run_with_one_generated_token_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(collect(Returns(([], 0.0), ([7], 0.0)), prompts(3)))
    assert lines(caplog) == []


def test_failures_and_empty_episodes_are_counted_together(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class FailsOnce(Returns):
        async def collect_trajectory(self, prompt: Prompt, *_: Any) -> list[Trajectory]:
            if prompt.id == "q0@0":
                raise ZeroDivisionError
            return await super().collect_trajectory(prompt)

    asyncio.run(collect(FailsOnce(), prompts(3)))
    (line,) = lines(caplog)
    assert line.startswith("all 3 episodes brought no generated token to train on (failed: 1; ")


def test_a_run_in_which_some_have_failed_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    asyncio.run(collect(failing("some"), prompts(3), group_size=2))
    assert lines(caplog) == []


def test_a_run_whose_episodes_were_finished_before_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asyncio.run(collect(TwoTurns(), prompts(2), finished=["q0@0", "q1@0"]))
    assert lines(caplog) == []


def test_a_run_without_prompts_says_so(caplog: pytest.LogCaptureFixture) -> None:
    once = iter(prompts(2))
    asyncio.run(collect(TwoTurns(), once))
    assert lines(caplog) == []
    asyncio.run(collect(TwoTurns(), once))
    assert lines(caplog) == ["the run was given no prompts: is their iterator used up?"]


@pytest.mark.parametrize("drain", [False, True])
def test_a_run_that_was_stopped_says_nothing(drain: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with EchoEngine() as engine:
            rolling = runner(engine, TwoTurns(before=lambda _: asyncio.sleep(0.01)))
            results = rolling.run(prompts(3))
            first = asyncio.ensure_future(anext(results))
            await asyncio.sleep(0)
            rolling.stop(drain=drain)
            with contextlib.suppress(StopAsyncIteration):
                await first
            async for _ in results:
                pass

    asyncio.run(body())
    assert lines(caplog) == []


def test_a_run_of_which_all_groups_are_rejected_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        policy = RolloutPolicy(groups=GroupPolicy(filters=[not_all_equal]))
        async with EchoEngine() as engine:
            rolling = runner(engine, TwoTurns(), group_size=2, policy=policy)
            assert len([group async for group in rolling.run_groups(prompts(3))]) == 3

    asyncio.run(body())
    (line,) = lines(caplog)
    assert line.startswith("all 3 groups were rejected: filtered: ")


@pytest.mark.parametrize("differs", [False, True])
def test_a_run_in_which_all_earn_the_same_informs(
    differs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Earns:
        async def collect_trajectory(self, prompt: Prompt, *_: Any) -> list[Trajectory]:
            reward = float(differs and prompt.id == "q2@1")
            return [Trajectory(prompt.id, [Turn([1], [2], [-1.0], reward)])]

    with caplog.at_level(logging.INFO, LOGGER):
        asyncio.run(collect(Earns(), prompts(3), group_size=2))
    assert [line.split(":")[0] for line in lines(caplog)] == (
        [] if differs else ["all 6 trajectories earned the same reward, 0"]
    )


@pytest.mark.parametrize(("rewards", "expected"), [((0.5, -0.5), 0), ((0.5, 0.5), 1)])
def test_trajectories_of_an_episode_are_compared_one_by_one(
    rewards: tuple[float, float], expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    agent = Returns(*(([2], reward) for reward in rewards))
    with caplog.at_level(logging.INFO, LOGGER):
        asyncio.run(collect(agent, prompts(3), group_size=2))
    assert len(lines(caplog)) == expected
