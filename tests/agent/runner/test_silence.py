"""Whatever keeps a run waiting, or makes it produce nothing, is an error or a line of the log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

import pytest

from tests.agent.chaos.chaos_cases import run_skipping
from tests.agent.runner.runner_cases import (
    EchoEngine,
    NoEnvironment,
    TwoTurns,
    failing,
    prompts,
    roll_groups,
    runner,
    serve,
    some,
    take,
)
from tests.agent.servers.loopback import Loopback, say_vllm
from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import Engine, Prompt
from trajpack.agent.ray.workers import RolloutWorkers
from trajpack.agent.runner.policy import GroupPolicy, RolloutPolicy, StalenessPolicy, not_all_equal
from trajpack.agent.runner.runner import EpisodeResult
from trajpack.agent.servers.sglang import SGLangEngine
from trajpack.agent.servers.vllm import VLLMEngine
from trajpack.packing.types import Trajectory, Turn

LOGGER = "trajpack.agent"
Said: TypeAlias = Callable[[], list[str]]


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """Return a function that returns the lines logged so far."""
    return lambda: [one.getMessage() for one in caplog.records if one.name.startswith(LOGGER)]


def transformers_engine() -> TransformersEngine:
    return TransformersEngine(build_tiny_model()[0], num_blocks=64, page_size=16)


# engines that do not serve


@asynccontextmanager
async def _no_worker(number: int) -> AsyncIterator[Any]:
    yield


BUNDLED: dict[str, Callable[[], Any]] = {
    "transformers": transformers_engine,
    "vllm": lambda: VLLMEngine("http://127.0.0.1:9"),
    "sglang": lambda: SGLangEngine("http://127.0.0.1:9"),
    "ray": lambda: RolloutWorkers(_no_worker, 1),
}


@pytest.mark.parametrize("kind", BUNDLED)
def test_an_engine_that_was_never_entered_is_an_error_when_the_run_begins(kind: str) -> None:
    engine = BUNDLED[kind]()
    rolling = runner(engine, TwoTurns())
    name = type(engine).__name__
    expected = f"this {name} has not been entered: use it within `async with engine:`"
    for run in (rolling.run, rolling.run_groups):
        with pytest.raises(RuntimeError, match=expected):
            asyncio.run(take(run(prompts(2)), 1))  # type: ignore[arg-type]


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
        await take(runner(await leave(), TwoTurns()).run(prompts(2)), 1)

    with pytest.raises(RuntimeError, match=r"the context of this \w+ has ended: use a new"):
        asyncio.run(body())


def test_an_engine_that_was_entered_in_another_event_loop_is_an_error() -> None:
    async def enter() -> Engine:
        return await transformers_engine().__aenter__()

    engine = asyncio.run(enter())
    with pytest.raises(RuntimeError, match="was entered in another event loop"):
        asyncio.run(take(runner(engine, TwoTurns()).run(prompts(2)), 1))
    asyncio.run(engine.__aexit__())


# engines, environments and agents that do not answer


class Slow(EchoEngine):
    """Answers after some seconds, or never."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self.wait_s = wait_s

    async def wait(self, request: Any) -> None:
        await (asyncio.sleep(self.wait_s) if self.wait_s < 1e9 else asyncio.Event().wait())


def roll_skipping(
    engine: EchoEngine, agent: Any, asked: Any = 3, **options: Any
) -> list[EpisodeResult]:
    """Return the results of a run in skipped time."""

    async def body() -> list[EpisodeResult]:
        async with engine:
            return await take(runner(engine, agent, **options).run(some(asked)))

    return run_skipping(body())


def causes(results: list[EpisodeResult]) -> set[str | None]:
    return {result.error and result.error.cause for result in results}


class SlowEnvironment(NoEnvironment):
    async def reset(self) -> None:
        await asyncio.sleep(25.0)


class Resets(TwoTurns):
    async def run(self, prompt: Prompt, env: Any, generate: Any) -> Any:
        await env.reset()
        return await super().run(prompt, env, generate)


@pytest.mark.parametrize(
    ("engine", "agent", "environment", "counts"),
    [
        (Slow(35.0), TwoTurns(), NoEnvironment(), ("Slow: 3", "NoEnvironment: 0")),
        (EchoEngine(), Resets(), SlowEnvironment(), ("EchoEngine: 0", "SlowEnvironment: 3")),
        (EchoEngine(), TwoTurns(before=lambda _: asyncio.sleep(39)), NoEnvironment(), ("0", "0")),
    ],
)
def test_what_does_not_answer_is_counted_and_ends_nothing(
    engine: Any, agent: Any, environment: Any, counts: tuple[str, str], said: Said
) -> None:
    assert causes(roll_skipping(engine, agent, environment=environment)) == {None}
    assert len(said()) == 2
    for line, seconds in zip(said(), (10, 20), strict=True):
        assert line.startswith(
            f"nothing has happened for {seconds} s: episodes under way: 3, open requests to "
        )
        assert counts[0] in line.partition(", open calls")[0]
        assert counts[1] in line.partition(", open calls")[2]


def test_a_run_is_warned_of_more_and_more_rarely(said: Said) -> None:
    policy = RolloutPolicy(episode_timeout_s=3600.0)
    assert causes(roll_skipping(Slow(1e9), TwoTurns(), policy=policy)) == {"timeout"}
    seconds = [int(line.split(" s:")[0].split()[-1]) for line in said()[:-1]]
    assert seconds == [10 * 2**k for k in range(9)]
    assert said()[-1].startswith("3 episodes gave nothing to train on, groups: failed 3; ")


@pytest.mark.parametrize(("wait_s", "patience_s"), [(9.0, 10.0), (50.0, None), (50.0, 60.0)])
def test_no_warning_comes_before_the_patience_ends(
    wait_s: float, patience_s: float | None, said: Said
) -> None:
    policy = RolloutPolicy(silence_warning_s=patience_s)
    assert causes(roll_skipping(Slow(wait_s), TwoTurns(), policy=policy)) == {None}
    assert said() == []


@pytest.mark.parametrize("by_group", [False, True])
def test_prompts_that_never_come_are_logged(by_group: bool, said: Said) -> None:
    async def never() -> AsyncIterator[Prompt]:
        await asyncio.Event().wait()
        yield Prompt("q0", [1])

    async def body() -> None:
        async with EchoEngine() as engine:
            rolling = runner(engine, TwoTurns())
            run: Any = rolling.run_groups(never()) if by_group else rolling.run(never())
            async with aclosing(run) as results:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(results), 25.0)

    run_skipping(body())
    assert said() == [
        f"nothing has happened for {seconds} s: waiting for the next item of the iterator of "
        "prompts"
        for seconds in (10, 20)
    ]


def test_an_event_loop_that_stood_still_is_no_silence_of_others(said: Said) -> None:
    async def body(engine: EchoEngine) -> None:
        policy = RolloutPolicy(silence_warning_s=0.5)
        agent = TwoTurns(before=lambda _: asyncio.sleep(0.2))
        rolling = asyncio.ensure_future(take(runner(engine, agent, policy=policy).run(prompts(1))))
        await asyncio.sleep(0.05)
        time.sleep(1.6)  # noqa: ASYNC251 - a training step in the way
        assert (await rolling)[0].error is None

    serve(body)
    assert said() == []


def test_a_pause_is_no_silence_and_results_that_are_not_taken_are_none(said: Said) -> None:
    async def body() -> None:
        async with Slow(1.0) as engine:
            rolling = runner(engine, TwoTurns(), concurrency=1)
            async with aclosing(rolling.run(prompts(9))) as results:
                first = asyncio.ensure_future(anext(results))
                await asyncio.sleep(0.5)
                async with rolling.paused():
                    await asyncio.sleep(100.0)
                assert (await first).error is None
                await asyncio.sleep(100.0)

    run_skipping(body())
    assert said() == []


def test_weights_that_do_not_come_are_logged(said: Said) -> None:
    async def body() -> None:
        policy = RolloutPolicy(staleness=StalenessPolicy(max_staleness=0, batch_size=2))
        async with EchoEngine() as engine:
            run = runner(engine, TwoTurns(), policy=policy).run(prompts(3))
            async with aclosing(run) as results:
                await take(results, 2)
                third = asyncio.ensure_future(anext(results))
                await asyncio.sleep(15.0)
                engine.version = 1
                assert (await third).error is None

    run_skipping(body())
    (line,) = said()
    assert "waiting for weights newer than those of the last results" in line


# runs that give nothing


async def in_vain(prompt: Prompt, env: Any, generate: Any) -> list[Trajectory]:
    return [Trajectory(prompt.id, [Turn([1], [], [])])]


@pytest.mark.parametrize("count", [3, 250])
@pytest.mark.parametrize(
    ("agent", "policy", "reason"),
    [
        (failing(error=ZeroDivisionError("no such luck\nforged line")), {}, "failed"),
        (in_vain, {}, "no generated token"),
        (TwoTurns(), {"groups": GroupPolicy(filters=[not_all_equal])}, "filtered: all_equal"),
    ],
)
def test_a_run_that_gives_nothing_says_so_once_and_early(
    agent: Any, policy: dict[str, Any], reason: str, count: int, said: Said
) -> None:
    roll_groups(agent, count, group_size=2, policy=RolloutPolicy(**policy))
    (line,) = said()
    num_episodes = min(2 * count, 100)
    assert line.startswith(
        f"{num_episodes} episodes gave nothing to train on, groups: {reason} {num_episodes // 2}; "
    )
    assert ("ZeroDivisionError: no such luck\\nforged line" in line) is (reason == "failed")
    assert ("first error: None" in line) is (reason != "failed")


@pytest.mark.parametrize("drain", [False, True])
def test_a_run_that_was_stopped_says_nothing(drain: bool, said: Said) -> None:
    async def body(engine: EchoEngine) -> None:
        rolling = runner(engine, TwoTurns(before=lambda _: asyncio.sleep(0.01)))
        results = asyncio.ensure_future(take(rolling.run(prompts(3))))
        await asyncio.sleep(0)
        rolling.stop(drain=drain)
        await results

    serve(body)
    assert said() == []
