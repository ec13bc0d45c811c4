from __future__ import annotations

import pytest

from tests.agent.observability.metrics_cases import Watched
from trajpack.agent.observability.pack_watch import watch_pack
from trajpack.packing.buffer.buffer import TrajectoryBuffer, pack
from trajpack.packing.buffer.static_batch import StaticBatch
from trajpack.packing.plan.plan import plan_micro_batches
from trajpack.packing.types import Trajectory, Turn


@pytest.fixture
def watched() -> Watched:
    return Watched()


def broken() -> Trajectory:
    """Three turns; the prompt of the last one does not begin with what came before."""
    turns = [Turn([1, 2], [3], [-0.1]), Turn([1, 2, 3, 4], [5], [-0.1]), Turn([9], [5], [-0.1])]
    return Trajectory("broken", turns)


def test_a_pack_is_counted_with_its_breaks_and_its_fill(watched: Watched) -> None:
    whole = Trajectory("whole", [Turn([1] * 3, [2], [-0.1]), Turn([1, 1, 1, 2, 7], [8], [-0.1])])
    with watch_pack(watched.metrics) as watching:
        watching.batch = pack([whole, broken()])
        watching.plan = plan_micro_batches(watching.batch.seqlens, capacity=10)
    assert watching.batch.seqlens == (6, 5, 2)
    assert watched("packed_continuations_total") == 3
    assert watched("prefix_breaks_total") == 1
    assert watched("packed_tokens_total") == 13
    assert watched("packed_generated_tokens_total") == 5
    assert watched("rectangle_fill_ratio_sum") == pytest.approx(13 / 18)
    assert watched("plan_fill_ratio_sum") == pytest.approx(13 / 20)
    assert watched("pack_seconds_count") == 1
    assert 0 < watched("pack_seconds_sum") == watching.seconds


def test_breaks_are_not_counted_where_sequences_are_not_chains(watched: Watched) -> None:
    buffer = TrajectoryBuffer()
    buffer.add(broken())
    static = StaticBatch(capacity=20, max_turns=8)
    for make in (lambda: buffer.pack("turns"), lambda: buffer.pack_into(static)):
        with watch_pack(watched.metrics) as watching:
            watching.batch = make()
    assert watched("packed_continuations_total") == watched("prefix_breaks_total") == 0
    assert watched("rectangle_fill_ratio_count") == 1


def test_a_pack_that_fails_is_counted_and_goes_on_to_the_caller(watched: Watched) -> None:
    with pytest.raises(ValueError, match="no turns"), watch_pack(watched.metrics):
        raise ValueError("no turns")
    with watch_pack(watched.metrics) as watching:
        watching.batch = TrajectoryBuffer().pack()  # an empty batch is fine
    assert watched("pack_errors_total") == 1
    assert watched("pack_seconds_count") == 2
    assert watched("packed_tokens_total") == 0
