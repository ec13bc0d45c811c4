"""The metrics, and the guide and the dashboard that tell of them, all of them and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric

from trajpack.agent import errors
from trajpack.agent.errors import CAUSES
from trajpack.agent.observability.metrics import LABELS, RolloutMetrics
from trajpack.agent.protocols import GenerationOutput, Prompt
from trajpack.agent.runner.runner import EpisodeResult
from trajpack.packing.buffer.buffer import pack
from trajpack.packing.plan.plan import plan_micro_batches
from trajpack.packing.types import Trajectory, Turn, VersionSpan


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """Metrics, the clock they read, and short ways to ask for a value."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.metrics = RolloutMetrics()

    def __call__(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(f"trajpack_{name}", labels)
        assert value is not None, (name, labels)
        return value

    def at(self, now: float, hook: Callable[..., None], *args: Any, **options: Any) -> None:
        self.clock.now = 100 + now
        hook(*args, **options)


def reply(num_tokens: int = 2, *, no_eos: bool = False) -> GenerationOutput:
    ids = list(range(num_tokens))
    return GenerationOutput("q@0", [1, 2, 3], ids, [-1.0] * num_tokens, no_eos, 4, 4)


def result(*turns: Turn, qid: str = "q") -> EpisodeResult:
    return EpisodeResult(Prompt(qid, [1]), (Trajectory(f"{qid}@0", turns),))


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched()
    monkeypatch.setattr("trajpack.agent.observability.metrics.perf_counter", watched.clock)
    return watched


def test_a_turn_is_counted_with_its_tokens_and_times(watched: Watched) -> None:
    m = watched.metrics
    watched.at(0, m.episode_started, "q@0", 0)
    watched.at(1, m.generation_started, "q@0", 0, 3)
    assert watched("turns_in_flight", stage="generation") == 1
    watched.at(3.5, m.generation_ended, "q@0", 0, reply(7, no_eos=True))
    watched.at(3.5, m.verification_started, "q@0", 0)
    assert watched("turns_in_flight", stage="generation") == 0
    assert watched("turns_in_flight", stage="verification") == 1
    watched.at(3.75, m.verification_ended, "q@0", 0, None)
    assert watched("episodes_in_flight") == 1
    watched.at(4, m.episode_ended, "q@0", 0, None, final=True)
    assert watched("turns_in_flight", stage="verification") == 0
    assert watched("episodes_in_flight") == 0
    assert watched("turns_total") == 1
    assert watched("prompt_tokens_total") == 3
    assert watched("generated_tokens_total") == 7
    assert watched("truncated_turns_total") == 1
    assert watched("generation_seconds_sum") == 2.5
    assert watched("generation_seconds_bucket", le="2.5") == 1
    assert watched("generation_seconds_bucket", le="1.0") == 0
    assert watched("verification_seconds_sum") == 0.25
    assert watched("verification_errors_total") == 0
    assert watched("episode_seconds_sum") == 4
    assert watched("episodes_finished_total") == 1


def test_every_failure_is_counted_once_by_its_cause(watched: Watched) -> None:
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.EpisodeError)
    ]
    assert {kind.cause for kind in kinds} == set(CAUSES)
    for kind in kinds:
        error = kind("q@0", "what a server said")
        watched.metrics.episode_started("q@0", 0)
        watched.metrics.generation_started("q@0", 0, 1)
        if isinstance(error, errors.GenerationError):
            watched.metrics.generation_ended("q@0", 0, error)
        watched.metrics.episode_ended("q@0", 0, error, final=True)
    for cause in CAUSES:
        assert watched("episodes_failed_total", cause=cause) == 1
        is_of_engine = cause in {"generation", "refused", "unavailable", "malformed", "ended"}
        assert watched("generation_errors_total", cause=cause) == is_of_engine
    assert watched("turns_total") == watched("episodes_finished_total") == 0
    assert watched("turns_in_flight", stage="generation") == 0


def test_outside_text_never_becomes_a_label(watched: Watched) -> None:
    class Own(errors.EpisodeError):
        cause = 'q"\n1} 5'

    before = series(watched.metrics)
    for k, error in enumerate([Own("q", "x"), ValueError("y")]):
        watched.metrics.episode_started(f"q@{k}", 0)
        watched.metrics.episode_ended(f"q@{k}", 0, error, final=True)
    assert watched("episodes_failed_total", cause="other") == 2
    assert series(watched.metrics) == before


def series(metrics: RolloutMetrics) -> set[tuple[str, str]]:
    return {
        (sample.name, str(sample.labels))
        for family in metrics.registry.collect()
        for sample in family.samples
    }


def test_a_result_waits_from_the_end_of_its_episode_until_it_is_taken(watched: Watched) -> None:
    m = watched.metrics
    for qid in ("q@0", "dropped@0"):
        watched.at(0, m.episode_started, qid, 0)
        watched.at(1, m.episode_ended, qid, 0, None, final=True)
    assert watched("results_waiting") == 2
    watched.at(1.5, m.result_accepted, result(Turn([1], [2], [-0.1])), 4)
    assert watched("result_wait_seconds_sum") == 0.5
    dropped = result(Turn([1], [2], [-0.1]), qid="dropped")
    m.group_ended("dropped", [dropped], "filtered: all rewards are equal")
    m.group_ended("q", [], None)
    for reason in ("failed", "incomplete", "incomplete"):
        m.group_ended("other", [], reason)
    assert watched("results_waiting") == 0
    outcomes = {"kept": 1, "filtered": 1, "failed": 1, "incomplete": 2}
    for outcome, count in outcomes.items():
        assert watched("groups_total", outcome=outcome) == count


@pytest.mark.parametrize("final", [False, True])
def test_a_result_that_is_stale_when_it_is_taken_waits_no_longer(
    watched: Watched, final: bool
) -> None:
    m = watched.metrics
    watched.at(0, m.episode_started, "q@0", 0)
    watched.at(1, m.episode_ended, "q@0", 0, None, final=True)
    watched.at(2, m.episode_ended, "q@0", 0, errors.StaleEpisodeError("q@0", "old"), final=final)
    assert watched("results_waiting") == 0
    assert watched("episodes_failed_total", cause="stale") == final
    assert watched("episode_retries_total", cause="stale") == (not final)
    assert watched("episode_seconds_count") == 1
    assert watched("result_wait_seconds_count") == 0


def test_an_abandoned_run_is_forgotten_and_a_retry_is_no_failure(watched: Watched) -> None:
    m = watched.metrics
    for qid in ("taken@0", "lost@0", "open@0"):
        m.episode_started(qid, 0)
    m.episode_ended("lost@0", 0, None, final=True)
    m.episode_ended("taken@0", 0, errors.EpisodeTimeoutError("taken@0", "late"), final=False)
    m.generation_started("open@0", 0, 5)
    m.close()
    assert watched("results_waiting") == watched("episodes_in_flight") == 0
    assert watched("turns_in_flight", stage="generation") == 0
    m.episode_started("taken@0", 1)
    assert watched("retry_wait_seconds_count") == 0
    error = errors.ServerUnavailableError("q@0", "gone")  # a retry is no failure
    watched.at(1, m.episode_ended, "taken@0", 1, error, final=False)
    watched.at(4, m.episode_started, "taken@0", 2)
    assert watched("retry_wait_seconds_sum") == 3
    assert watched("episode_retries_total", cause="unavailable") == 1
    assert watched("episodes_failed_total", cause="unavailable") == 0


def test_staleness_is_of_the_oldest_token_of_each_turn(watched: Watched) -> None:
    spans = [VersionSpan(6, 0, 1), VersionSpan(9, 1, 2)]
    turns = [
        Turn([1], [2], [-0.1], reward=1.0, version_start=10, version_end=10),  # 0 old
        Turn([1], [2, 3], [-0.1] * 2, version_start=7, version_end=10),  # 3 old
        Turn([1], [2, 3], [-0.1] * 2, version_spans=spans),  # 4 old
        Turn([1], [], [], version_start=1, version_end=1),  # has no token
    ]
    watched.metrics.result_accepted(result(*turns), 10)
    assert watched("staleness_versions_sum") == 7
    assert watched("staleness_versions_count") == 3
    assert watched("staleness_versions_bucket", le="0.0") == 1
    assert watched("policy_version") == 10
    assert watched("accepted_turns_total") == 4
    assert watched("rewarded_turns_total") == 1


def broken() -> Trajectory:
    """Three turns; the prompt of the last one does not begin with what came before."""
    turns = [Turn([1, 2], [3], [-0.1]), Turn([1, 2, 3, 4], [5], [-0.1]), Turn([9], [5], [-0.1])]
    return Trajectory("broken", turns)


def test_a_pack_is_counted_with_its_breaks_and_its_fill(watched: Watched) -> None:
    whole = Trajectory("whole", [Turn([1] * 3, [2], [-0.1]), Turn([1, 1, 1, 2, 7], [8], [-0.1])])
    batch = pack([whole, broken()])
    watched.metrics.pack_ended(batch, 0.25, plan_micro_batches(batch.seqlens, capacity=10))
    assert batch.seqlens == (6, 5, 2)
    assert watched("packed_continuations_total") == 3
    assert watched("prefix_breaks_total") == 1
    assert watched("packed_tokens_total") == 13
    assert watched("packed_generated_tokens_total") == 5
    assert watched("rectangle_fill_ratio_sum") == pytest.approx(13 / 18)
    assert watched("plan_fill_ratio_sum") == pytest.approx(13 / 20)
    assert watched("pack_seconds_count") == 1
    assert watched("pack_seconds_sum") == 0.25


def test_breaks_are_not_counted_where_sequences_are_not_chains(watched: Watched) -> None:
    watched.metrics.pack_ended(pack([broken()], "turns"), 0.25)
    watched.metrics.pack_ended(pack([]), 0.25)  # an empty batch is fine
    assert watched("packed_continuations_total") == watched("prefix_breaks_total") == 0
    assert watched("rectangle_fill_ratio_count") == 1
    assert watched("pack_seconds_count") == 2


DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "observability.md").read_text()
DASHBOARD: dict[str, Any] = json.loads((DOCS / "dashboards" / "rollout.json").read_text())
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def families() -> list[Metric]:
    return list(RolloutMetrics().registry.collect())


def sample_names(family: Metric) -> set[str]:
    return {sample.name for sample in family.samples}


def test_every_metric_of_the_dashboard_exists_and_every_one_is_shown() -> None:
    asked = {name for query in QUERIES for name in re.findall(r"trajpack_\w+", query)}
    for family in families():
        assert asked & sample_names(family), f"no panel shows {family.name}"
    assert asked <= set().union(*map(sample_names, families()))


def test_counters_and_histograms_are_asked_for_rates_and_gauges_for_values() -> None:
    kinds = {name: family.type for family in families() for name in sample_names(family)}
    for query in QUERIES:
        for rate, name in re.findall(r"(rate\()?(trajpack_\w+)", query):
            assert bool(rate) == (kinds[name] in {"counter", "histogram"}), query
        assert query.count("(") == query.count(")"), query
        for label in re.findall(r"sum by \((\w+)\)", query):
            assert label in {*LABELS, "le"}


def test_the_page_has_a_row_for_each_metric_in_its_words() -> None:
    rows = []
    for family in families():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        shown = "".join(f"`{label}`" for label in labels)
        rows.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    assert "\n".join(rows) in PAGE


def test_labels_have_the_values_that_the_page_lists() -> None:
    values = {
        item for family in families() for one in family.samples for item in one.labels.items()
    }
    for label, known in LABELS.items():
        assert {value for name, value in values if name == label} == set(known)
        assert label == "stage" or all(f"`{value}`" in PAGE for value in known)
