"""The figures of a report equal the batch's own numbers."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
import pytest
import torch

from trajpack import (
    GRPO,
    PackedBatch,
    Trajectory,
    Turn,
    pack,
    pack_tree,
    plan_micro_batches,
)
from trajpack.packing.batch.description import shared_prefixes
from trajpack.packing.report.figures import KINDS, figures_of, kinds_of


def conversations(count: int, seed: int = 0, *, group_size: int = 4) -> list[Trajectory]:
    """Return groups with common prompts; a part of the turns rewrites its history."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(count):
        prompt = np.random.default_rng(number // group_size).integers(0, 50, 5).tolist()
        ids, turns = list(prompt), []
        for _ in range(draw.integers(1, 4)):
            completion = draw.integers(0, 50, draw.integers(0, 7)).tolist()
            reward = float(draw.choice([-1.0, 0.5, 1.0]))
            turns.append(Turn(list(ids), completion, [-0.5] * len(completion), reward))
            ids = [*prompt, 51] if draw.random() < 0.3 else [*ids, *completion, 52, 53]
        found.append(Trajectory(f"t{number}", turns, group=f"g{number // group_size}"))
    return found


@pytest.fixture(params=["merged", "turns"])
def batch(request: pytest.FixtureRequest) -> PackedBatch:
    return pack(conversations(24), layout=request.param).with_advantages(GRPO())


def by_hand(batch: PackedBatch, sequence: int) -> dict[str, int]:
    """Count the kinds of a sequence token by token."""
    rows = [batch.input_ids[a:b].tolist() for a, b in zip(*bounds(batch), strict=True)]
    own, others = rows[sequence], sorted(rows)
    place = others.index(own)
    before = others[place - 1] if place else []
    # equal rows: the first of them in the batch is the one that is stored
    if own in rows[:sequence]:
        before = own
    shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(own, before)))  # noqa: B905
    counts, generated = dict.fromkeys(KINDS, 0), False
    start = bounds(batch)[0][sequence]
    for depth in range(len(own)):
        if batch.loss_mask[start + depth]:
            generated = True
            counts["generated"] += 1
        elif depth < shared:
            counts["shared"] += 1
        else:
            counts["observation" if generated else "prompt"] += 1
    return counts


def bounds(batch: PackedBatch) -> tuple[list[int], list[int]]:
    cu = batch.cu_seqlens.tolist()
    return cu[:-1], cu[1:]


def test_every_token_has_one_kind(batch: PackedBatch) -> None:
    kinds = kinds_of(batch, shared_prefixes(batch))
    assert kinds.sum(0).tolist() == list(batch.seqlens)
    for sequence in range(len(batch)):
        counts = dict(zip(KINDS, kinds[:, sequence].tolist(), strict=True))
        assert counts == by_hand(batch, sequence)


def test_tokens_are_those_of_layouts_and_tree(batch: PackedBatch) -> None:
    tokens = figures_of(batch)["tokens"]
    for layout in ("turns", "merged"):
        assert tokens[layout] == pack(batch.unpack(), layout).num_tokens
    assert tokens["packed"] == batch.num_tokens
    assert tokens["tree"] == pack_tree(batch.unpack()).num_nodes
    assert tokens["padded"] == len(batch) * batch.max_seqlen
    assert sum(tokens[kind] for kind in KINDS) == batch.num_tokens


def test_micro_batches_are_those_of_the_planner(batch: PackedBatch) -> None:
    found = figures_of(batch, capacity=64, align=4)["plan"]
    plan = plan_micro_batches(batch.seqlens, 64, align=4)
    counted, bars = plan.statistics(), np.array(found["bars"])
    assert (found["capacity"], found["align"], found["at_once"]) == (64, 4, 1)
    assert (found["micro_batches"], found["fill"]) == (len(plan), round(plan.fill, 4))
    assert bars.shape == (7, len(plan))
    assert (bars.sum(0) == 64).all()
    assert bars[:4].sum() == batch.num_tokens
    causes = [counted.padding_alignment, counted.padding_tail, counted.padding_dummy]
    assert bars[4:].sum(1).tolist() == causes == [found[k] for k in ("alignment", "tail", "dummy")]


def test_many_micro_batches_are_drawn_as_few_bars() -> None:
    batch = pack([Trajectory(str(i), [Turn([1, 2], [3], [-0.1])]) for i in range(500)])
    plan = figures_of(batch, capacity=3)["plan"]
    assert (plan["micro_batches"], plan["at_once"]) == (500, 8)
    assert np.array(plan["bars"]).sum() == batch.num_tokens == 1500


def test_groups_and_trajectories_have_their_rewards_and_advantages(batch: PackedBatch) -> None:
    figures = figures_of(batch)
    rows, trajectories = figures["trajectories"]["rows"], batch.unpack()
    assert batch.advantages is not None
    for index, (row, trajectory) in enumerate(zip(rows, trajectories, strict=True)):
        assert (row["id"], row["group"]) == (trajectory.id, trajectory.group)
        assert row["rewards"] == [turn.reward for turn in trajectory.turns]
        assert row["score"] == sum(row["rewards"])
        turns = torch.arange(batch.num_turns)[batch.cu_turns[index] : batch.cu_turns[index + 1]]
        own = batch.advantages[torch.isin(batch.turn_ids, turns)]
        assert row["generated"] == len(own)
        assert row["advantage"] == pytest.approx(float(own.mean()) if len(own) else 0, rel=1e-3)
    shown = figures["groups"]["shown"]
    scores = {row["id"]: row["score"] for row in rows}
    assert [score for group in shown for score in group["scores"]] == list(scores.values())
    assert figures["groups"]["left_out"] == 0


def test_breaks_are_those_of_the_batch() -> None:
    batch = pack(conversations(24))
    found, breaks = figures_of(batch)["breaks"], batch.prefix_breaks()
    assert len(breaks) > 3
    assert found["shown"] == [one._asdict() for one in breaks]
    assert sum(found["reasons"].values()) == len(breaks)


def test_a_batch_without_sequences_and_one_without_generated_tokens() -> None:
    assert figures_of(pack([]))["plan"] is None
    silent = pack([Trajectory("a", [Turn([1, 2], [], [])])])
    rows = figures_of(silent.with_advantages(GRPO(singleton="raw")))
    assert rows["trajectories"]["rows"][0]["advantage"] == 0


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"capacity": 2.5}, TypeError, "capacity must be an integer, got 2.5"),
        ({"num_ranks": 0}, ValueError, "num_ranks must be 1 or more, got 0"),
        ({"align": True}, TypeError, "align must be an integer, got True"),
        ({"capacity": 4, "align": 4}, ValueError, r"capacity must be \d+ or more, the aligned tok"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        figures_of(pack(conversations(8)), **options)
