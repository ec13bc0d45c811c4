"""The guide and the dashboard tell of the metrics that there are, all of them and no others."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric

from trajpack.agent.observability.metrics import LABELS, RolloutMetrics

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


def test_the_page_has_a_row_for_each_panel_in_its_order() -> None:
    rows = [
        f"| {panel['title']} | "
        + "<br>".join(f"`{target['expr']}`" for target in panel["targets"])
        + f" | {panel['description']} |"
        for panel in DASHBOARD["panels"]
    ]
    assert "\n".join(rows) in PAGE


def test_the_page_has_a_row_for_each_metric_in_its_words() -> None:
    rows = []
    for family in families():
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        shown = "".join(f"`{label}`" for label in labels)
        rows.append(f"| `{name}` | {family.type} | {shown} | {family.documentation} |")
    assert "\n".join(rows) in PAGE


@pytest.mark.parametrize("label", LABELS)
def test_labels_have_the_values_that_the_page_lists(label: str) -> None:
    found = {
        sample.labels[label]
        for family in families()
        for sample in family.samples
        if label in sample.labels
    }
    assert found == set(LABELS[label])
    assert label == "stage" or all(f"`{value}`" in PAGE for value in found)
