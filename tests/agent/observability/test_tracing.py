from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from trajpack.agent.errors import EpisodeError, EpisodeTimeoutError
from trajpack.agent.observability.tracing import RolloutTracer
from trajpack.agent.protocols import GenerationOutput

SECRET = "what the model said\n\x1b[2J"


class Traced:
    """A tracer, and the spans that have ended."""

    def __init__(self) -> None:
        self.provider = TracerProvider()
        self._spans = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._spans))
        self.tracer = RolloutTracer(self.provider)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._spans.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == f"trajpack.{name}"]


@pytest.fixture
def traced() -> Traced:
    return Traced()


def reply(num_tokens: int = 2) -> GenerationOutput:
    return GenerationOutput("q", [1], list(range(num_tokens)), [-1.0] * num_tokens, True, 3, 4)


def lead_turn(tracer: RolloutTracer, qid: str, turn: int) -> None:
    tracer.generation_started(qid, turn, 5)
    tracer.generation_ended(qid, turn, reply())
    tracer.verification_started(qid, turn)
    tracer.verification_ended(qid, turn, None)


def test_an_episode_is_a_tree_of_spans_with_fixed_names(
    traced: Traced, caplog: pytest.LogCaptureFixture
) -> None:
    traced.tracer.episode_started("q@0", 0)
    for turn in range(2):
        lead_turn(traced.tracer, "q@0", turn)
    assert [span.name.split(".")[1] for span in traced.spans] == ["generation", "verification"] * 2
    traced.tracer.episode_ended("q@0", 0, None, final=True)
    (episode,) = traced.named("episode")
    assert episode.parent is None
    assert episode.attributes == {
        "trajpack.episode.id": "q@0",
        "trajpack.episode.attempt": 0,
        "trajpack.episode.final": True,
    }
    for turn in range(2):
        assert traced.named("verification")[turn].attributes == {"trajpack.turn.index": turn}
        assert traced.named("generation")[turn].attributes == {
            "trajpack.turn.index": turn,
            "trajpack.generation.num_prompt_tokens": 5,
            "trajpack.generation.num_tokens": 2,
            "trajpack.generation.version_start": 3,
            "trajpack.generation.version_end": 4,
            "trajpack.generation.truncated": True,
        }
    assert all(span.status.is_unset for span in traced.spans)
    assert not caplog.records  # as there would be of a span that ends twice
    assert episode.context is not None
    for span in traced.spans[:-1]:
        assert span.parent == episode.context
        times = (episode.start_time, span.start_time, span.end_time, episode.end_time)
        assert list(times) == sorted(time or 0 for time in times)


@pytest.mark.parametrize("stage", ["generation", "verification"])
def test_open_spans_end_with_the_episode_and_its_error(traced: Traced, stage: str) -> None:
    traced.tracer.episode_started("q@0", 0)
    lead_turn(traced.tracer, "q@0", 0)
    traced.tracer.generation_started("q@0", 1, 9)
    if stage == "verification":
        traced.tracer.generation_ended("q@0", 1, reply())
        traced.tracer.verification_started("q@0", 1)
    traced.tracer.episode_ended("q@0", 0, EpisodeTimeoutError("q@0", SECRET), final=True)
    assert traced.tracer.num_open == 0
    failed = [span for span in traced.spans if not span.status.is_unset]
    assert [span.name for span in failed] == [f"trajpack.{stage}", "trajpack.episode"]
    for span in failed:
        assert not span.status.is_ok
        assert span.status.description == "timeout"
        assert (span.attributes or {})["trajpack.error.cause"] == "timeout"
        assert (span.attributes or {})["trajpack.error.type"] == "EpisodeTimeoutError"


def test_each_attempt_is_a_trace(traced: Traced) -> None:
    error = EpisodeError("q@0", SECRET)
    for attempt in range(3):
        traced.tracer.episode_started("q@0", attempt)
        last = attempt == 2
        traced.tracer.episode_ended("q@0", attempt, None if last else error, final=last)
    traced.tracer.episode_ended("q@0", 2, error, final=True)  # its result was stale
    spans = traced.named("episode")
    assert len({span.context.trace_id for span in spans if span.context}) == 3
    finals = [(span.attributes or {})["trajpack.episode.final"] for span in spans]
    assert finals == [False, False, True]


def test_outside_text_is_not_recorded(traced: Traced) -> None:
    name = "q\n@0" + "x" * 1000
    traced.tracer.episode_started(name, 0)
    lead_turn(traced.tracer, name, 0)
    traced.tracer.episode_ended(name, 0, EpisodeError("q@0", SECRET), final=True)
    assert "what the model said" not in "".join(span.to_json() for span in traced.spans)
    shown = str((traced.named("episode")[0].attributes or {})["trajpack.episode.id"])
    assert shown.startswith("q\\n@0xxx")
    assert len(shown) < 300


def test_a_run_that_was_given_up_can_be_closed(traced: Traced) -> None:
    for k in range(3):
        traced.tracer.episode_started(f"q@{k}", 0)
        traced.tracer.generation_started(f"q@{k}", 0, 1)
    traced.tracer.episode_started("q@0", 1)  # a name that begins anew ends what was open of it
    assert traced.tracer.num_open == 3
    traced.tracer.close()
    assert traced.tracer.num_open == 0
    assert len(traced.named("episode")) == 4
    assert len(traced.named("generation")) == 3


def test_tracing_works_without_an_sdk_and_without_sampling() -> None:
    for tracer in (RolloutTracer(), RolloutTracer(TracerProvider(sampler=ALWAYS_OFF))):
        tracer.episode_started("q@0", 0)
        lead_turn(tracer, "q@0", 0)
        tracer.episode_ended("q@0", 0, EpisodeError("q@0", "x"), final=True)
        assert tracer.num_open == 0
