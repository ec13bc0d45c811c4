"""What a packed batch holds, in words."""

from __future__ import annotations

import pytest

from trajpack import Trajectory, Turn, pack
from trajpack.packing.batch.description import describe, sequence_spans


def conversation(name: str = "a", turn_discount: float = 1.0) -> Trajectory:
    """Prompt 1 2, completion 3, observation 4, completion 5 6, and 7 at once after it."""
    turns = [
        Turn([1, 2], [3], [-0.1], reward=-1.0),
        Turn([1, 2, 3, 4], [5, 6], [-0.2, -0.3], reward=0.5, truncated=True),
        Turn([1, 2, 3, 4, 5, 6], [7], [-0.4], reward=1.0, version_start=1, version_end=1),
    ]
    return Trajectory(name, turns, "g", turn_discount)


def test_spans_of_a_sequence_follow_the_conversation() -> None:
    batch = pack([conversation("other"), conversation()])
    spans = [(span.kind, span.start, span.end, span.turn) for span in sequence_spans(batch, 1)]
    assert spans == [
        ("prompt", 7, 9, -1),
        ("generated", 9, 10, 3),
        ("observation", 10, 11, -1),
        ("generated", 11, 13, 4),
        ("generated", 13, 14, 5),
    ]
    batch = pack([conversation()], "turns")
    kinds = [[span.kind for span in sequence_spans(batch, sequence)] for sequence in range(3)]
    assert kinds == [["prompt", "generated"]] * 3


@pytest.mark.parametrize("layout", ["merged", "turns"])
def test_spans_cover_every_token_once(layout: str) -> None:
    batch = pack([conversation(), Trajectory("b", [Turn([1], [], [])])], layout=layout)  # type: ignore[arg-type]
    covered = [
        index
        for sequence in range(len(batch))
        for span in sequence_spans(batch, sequence)
        for index in range(span.start, span.end)
    ]
    assert covered == list(range(batch.num_tokens))


def test_description_counts_what_is_there() -> None:
    rows = dict(describe(pack([conversation(), conversation("b", turn_discount=0.0)])))
    assert rows["trajectories"] == "2 in 1 group"
    assert rows["turns"] == "6, longest trajectory 3, 2 cut off by the length limit"
    assert rows["sequences"] == "2 in layout merged, longest 7 tokens"
    assert rows["tokens"] == "14, of them 8 generated (57.1%)"
    # discounted by 1: 0.5, 1.5, 1; by 0: -1, 0.5, 1
    assert rows["returns"] == "mean 0.5833, min -1, max 1.5"
    assert rows["policy versions"] == "0 to 1"
    assert dict(describe(pack([])))["trajectories"] == "0"
