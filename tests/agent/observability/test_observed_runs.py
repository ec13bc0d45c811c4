"""Metrics and spans of whole runs, through a runner and over the loopback interface."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.request import urlopen

from opentelemetry import context as current_context
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import start_http_server
from prometheus_client.parser import text_string_to_metric_families

from tests.agent.runner.runner_cases import EchoEngine
from trajpack.agent.errors import ServerUnavailableError
from trajpack.agent.observability.metrics import RolloutMetrics
from trajpack.agent.observability.tracing import RolloutTracer
from trajpack.agent.protocols import (
    Environment,
    Generate,
    GenerationOutput,
    GenerationRequest,
    Prompt,
)
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.packing.types import Trajectory

PROMPTS = [Prompt(f"q{k}", [1, 2, 3]) for k in range(150)]


class ShuffledEngine(EchoEngine):
    """Answers after a few rounds of the event loop, so that episodes overtake each other."""

    def __init__(self) -> None:
        super().__init__(version=3)

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        qid, ids, _ = request
        for _ in range(number_of(qid) * 7 % 5):
            await asyncio.sleep(0)
        if number_of(qid) % 10 == 1:
            raise ServerUnavailableError(qid, "no server")
        if number_of(qid) % 10 == 2:
            await asyncio.Event().wait()
        return GenerationOutput(qid, ids, [7, 8], [-1.0, -2.0], False, 1, 2)


def number_of(qid: str) -> int:
    return int(qid.removeprefix("q").partition("@")[0])


class Judge:
    async def reset(self) -> None:
        return None

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        await asyncio.sleep(0)
        if number_of(action[0]) % 10 == 3:
            raise ZeroDivisionError("secret")
        return None, [1.0], True, False, {}


class ThreeTurns:
    async def run(self, prompt: Prompt, env: Environment, generate: Generate) -> list[Trajectory]:
        turns, ids = [], list(prompt.input_ids)
        for _ in range(3):
            async with asyncio.timeout(0.3 if number_of(prompt.id) % 10 == 2 else None):
                turn = await generate(ids)
            await env.step((prompt.id, ["an answer"]))
            turns.append(replace(turn, reward=1.0))
            ids = [*ids, *turn.completion_ids]
        return [Trajectory(prompt.id, turns)]


@dataclass
class Watch:
    """Everything that watches a run."""

    metrics: RolloutMetrics = field(default_factory=RolloutMetrics)
    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)

    def __post_init__(self) -> None:
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = RolloutTracer(provider)

    def __call__(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"trajpack_{name}", labels)

    def runner(self, engine: ShuffledEngine, **options: Any) -> RolloutRunner:
        observers = [self.metrics, self.tracer]
        return RolloutRunner(engine, ThreeTurns(), Judge(), observers=observers, **options)

    def check_nothing_is_left(self) -> None:
        assert self.tracer.num_open == 0
        assert self("episodes_in_flight") == 0
        for stage in ("generation", "verification"):
            assert self("turns_in_flight", stage=stage) == 0


def scraped(port: int) -> dict[str, float]:
    with urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        text = page.read().decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }


async def run_all(watch: Watch, port: int) -> tuple[list[EpisodeResult], float]:
    results, most_in_flight = [], 0.0
    async with ShuffledEngine() as engine:
        async for result in watch.runner(engine, group_size=2, concurrency=64).run(PROMPTS):
            results.append(result)
            if len(results) == 50:
                page = await asyncio.to_thread(scraped, port)
                most_in_flight = page["trajpack_episodes_in_flight"]
    return results, most_in_flight


def test_a_run_with_failures_is_counted_to_the_last_episode() -> None:
    watch = Watch()
    server, thread = start_http_server(0, "127.0.0.1", watch.metrics.registry)
    results, in_flight = asyncio.run(run_all(watch, server.server_port))
    page = scraped(server.server_port)
    server.shutdown()
    server.server_close()
    thread.join()
    assert 0 < in_flight <= 64
    watch.check_nothing_is_left()
    tenth = 2 * len(PROMPTS) // 10
    assert len(results) == 10 * tenth
    assert page["trajpack_episodes_finished_total"] == 7 * tenth
    assert watch("episodes_failed_total", cause="unavailable") == tenth
    assert watch("generation_errors_total", cause="unavailable") == tenth
    assert page["trajpack_verification_errors_total"] == tenth
    failed = [
        watch("episodes_failed_total", cause=c) or 0 for c in ("environment", "agent", "timeout")
    ]
    assert sum(failed) == 2 * tenth
    assert page["trajpack_turns_total"] == (3 * 7 + 1) * tenth
    assert page["trajpack_generated_tokens_total"] == 2 * (3 * 7 + 1) * tenth
    assert page["trajpack_prompt_tokens_total"] == ((3 + 5 + 7) * 7 + 3) * tenth
    assert page["trajpack_generation_seconds_count"] == (3 * 7 + 2) * tenth
    assert page["trajpack_accepted_turns_total"] == 3 * 7 * tenth
    assert page["trajpack_staleness_versions_sum"] == 2 * 3 * 7 * tenth
    assert page["trajpack_result_wait_seconds_count"] == 7 * tenth
    assert page["trajpack_results_waiting"] == 0
    check_spans(watch.exporter.get_finished_spans(), tenth)


def check_spans(spans: tuple[ReadableSpan, ...], tenth: int) -> None:
    by_id = {span.context.span_id: span for span in spans if span.context}
    parents = Counter(
        (span.name, by_id[span.parent.span_id].name if span.parent else None) for span in spans
    )
    num_turns = (3 * 7 + 3) * tenth
    assert parents == {
        ("trajpack.episode", None): 10 * tenth,
        ("trajpack.generation", "trajpack.episode"): num_turns,
        ("trajpack.verification", "trajpack.episode"): num_turns - 2 * tenth,
    }
    for span in spans:  # interleaved episodes keep their own parents
        parent = by_id[span.parent.span_id] if span.parent else None
        if parent is not None and span.context is not None and parent.context is not None:
            assert parent.context.trace_id == span.context.trace_id
    assert current_context.get_current() == {}
    failed = Counter(span.name for span in spans if not span.status.is_unset)
    assert failed["trajpack.episode"] == 3 * tenth
    assert failed["trajpack.verification"] == tenth
    assert failed["trajpack.generation"] == 2 * tenth
    assert "secret" not in "".join(span.to_json() for span in spans if not span.status.is_unset)


def test_a_run_that_is_left_early_leaves_nothing_open() -> None:
    watch = Watch()

    async def body() -> None:
        async with ShuffledEngine() as engine:
            async with aclosing(watch.runner(engine, concurrency=50).run(PROMPTS)) as results:
                for _ in range(60):
                    await anext(results)
            watch.check_nothing_is_left()

    asyncio.run(body())
    spans = watch.exporter.get_finished_spans()
    ids = [span.context.span_id for span in spans if span.context]
    assert len(set(ids)) == len(ids)
    assert {span.parent.span_id for span in spans if span.parent} <= set(ids)
