"""Waits and stale results, as metrics and spans of a real runner show them."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.agent.runner.runner_cases import EchoEngine, TwoTurns, prompts, runner, until
from trajpack.agent.observability.metrics import RolloutMetrics
from trajpack.agent.observability.tracing import RolloutTracer
from trajpack.agent.runner.policy import BackOff, RetryPolicy, RolloutPolicy, StalenessPolicy
from trajpack.packing.types import Trajectory

A_WHILE_S = 0.05


def waits(metrics: RolloutMetrics) -> dict[str, tuple[float, float]]:
    """Return how many waits there were, and their seconds, for each reason."""

    def value(what: str, reason: str) -> float:
        name = f"trajpack_queue_wait_seconds_{what}"
        found = metrics.registry.get_sample_value(name, {"reason": reason})
        assert found is not None
        return found

    reasons = ("pause", "room", "slot", "staleness")
    return {reason: (value("count", reason), value("sum", reason)) for reason in reasons}


def test_new_weights_are_waited_for_and_so_is_a_slot() -> None:
    async def body() -> None:
        policy = RolloutPolicy(staleness=StalenessPolicy(max_staleness=0, batch_size=2))
        agent = TwoTurns(before=lambda _: asyncio.sleep(A_WHILE_S))
        async with EchoEngine() as engine:
            run = runner(engine, agent, observers=[metrics], policy=policy, concurrency=1)
            async with aclosing(run.run(prompts(4))) as results:
                for _ in range(2):
                    await anext(results)
                await asyncio.sleep(A_WHILE_S)
                assert waits(metrics)["staleness"][0] == 2  # the third goes on
                engine.version = 1
                for _ in range(2):
                    await anext(results)

    metrics = RolloutMetrics()
    asyncio.run(body())
    seen = waits(metrics)
    assert seen["staleness"][0] >= 4
    assert seen["staleness"][1] >= A_WHILE_S / 2
    assert seen["slot"][1] >= A_WHILE_S  # the second episode waits for the first
    assert seen["pause"] == (0, 0)


def test_requests_that_a_pause_holds_back_are_counted() -> None:
    async def body() -> None:
        async with EchoEngine() as engine:
            agent = TwoTurns()
            run = runner(engine, agent, observers=[metrics])
            async with run.paused():
                rolling = asyncio.ensure_future(collect(run))
                await until(lambda: agent.active == 3)
                await asyncio.sleep(A_WHILE_S)
                generated = metrics.registry.get_sample_value("trajpack_generation_seconds_count")
                assert generated == waits(metrics)["pause"][0] == 0
            await rolling

    async def collect(run: Any) -> list[Any]:
        return [result async for result in run.run(prompts(3))]

    metrics = RolloutMetrics()
    asyncio.run(body())
    count, seconds = waits(metrics)["pause"]
    assert count == 3
    assert seconds >= 3 * A_WHILE_S
    # the wait is no part of the engine's latency
    latency = metrics.registry.get_sample_value("trajpack_generation_seconds_sum")
    assert latency is not None
    assert latency < 3 * A_WHILE_S


def test_a_stale_result_is_a_rejection_in_its_trace_and_linked_to_what_follows() -> None:
    class Ages(TwoTurns):
        async def run(self, *values: Any) -> list[Trajectory]:
            found = await super().run(*values)
            engine.version += 1 if engine.version < most else 0
            return found

    async def body() -> None:
        nonlocal engine
        retries = RetryPolicy(2, wait=BackOff(0.0))
        policy = RolloutPolicy(retries, staleness=StalenessPolicy(9, 9, max_token_age=0))
        async with EchoEngine() as engine:
            run = runner(engine, Ages(), policy=policy, observers=[tracer])
            [_ async for _ in run.run(prompts(1))]

    engine: Any = None
    for most in (1, 2):  # the second attempt is good, or stale as well
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = RolloutTracer(provider)
        asyncio.run(body())
        spans = exporter.get_finished_spans()
        episodes = [span for span in spans if span.name == "trajpack.episode"]
        rejections = [span for span in spans if span.name == "trajpack.rejection"]
        assert len(episodes) == 2
        assert len(rejections) == most
        for span, of_episode in zip(rejections, episodes, strict=False):
            assert span.parent == of_episode.context
            assert span.attributes is not None
            assert span.attributes["trajpack.error.cause"] == "stale"
        finals = [
            span.attributes and span.attributes["trajpack.episode.final"] for span in rejections
        ]
        assert finals == [False, True][:most]
        (link,) = episodes[1].links
        assert link.context == episodes[0].context
        assert tracer.num_open == 0
