"""A batch in which no trajectory has another one to be compared with is warned of."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

from trajpack import GRPO, PackedBatch, Trajectory, Turn, pack
from trajpack.packing.credit.estimators import GiGPO, GroupEstimator


def trajectory(name: str, **options: Any) -> Trajectory:
    return Trajectory(name, [Turn([1], [2, 3], [-1.0, -1.0], float(len(name)))], **options)


def credited(batch: PackedBatch, estimator: GroupEstimator) -> PackedBatch:
    states = torch.zeros(batch.num_turns, dtype=torch.int64)
    return batch.with_advantages(
        estimator, state_ids=states if isinstance(estimator, GiGPO) else None
    )


ALL = [kind() for kind in GroupEstimator.__subclasses__()]


@pytest.mark.parametrize("estimator", ALL, ids=lambda estimator: estimator.name)
def test_groups_of_one_are_warned_of_at_the_callers_line(
    estimator: GroupEstimator,
) -> None:
    batch = pack([trajectory("a"), trajectory("bb", task_id=7)])
    with pytest.warns(UserWarning, match=f"every group has one member, so {estimator.name} ") as w:
        credited(batch, estimator)
    (warning,) = w
    lines, first = inspect.getsourcelines(credited)
    assert warning.filename == __file__
    assert first <= warning.lineno < first + len(lines)
    assert str(warning.message).endswith(
        "pass group=... to Trajectory, the same for all trajectories of a task"
    )


def test_the_warning_names_the_remedy() -> None:
    for options, remedy in (
        ([{}, {"group": "a"}], "pass group=... to Trajectory, the same for all"),
        ([{"task_id": 7}, {"task_id": 8}], "pass group=... to Trajectory, the same for all"),
        ([{"task_id": 7}, {"task_id": 7}], "several have the same task_id and no group"),
        ([{"group": "a"}, {"group": "b"}], "all of Trajectory.group differ"),
    ):
        batch = pack([trajectory(str(k), **of) for k, of in enumerate(options)])
        with pytest.warns(UserWarning, match=remedy):
            batch.with_advantages(GRPO())


def test_a_loop_over_batches_of_many_sizes_warns_once() -> None:
    """Python's own default shows a text once for each line, if it is the same text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for count in range(2, 6):
            pack([trajectory(str(k)) for k in range(count)]).with_advantages(GRPO())
    assert len(caught) == 1


@pytest.mark.parametrize(
    "groups", [[], [None], ["a"], ["a", "a"], ["a", "a", "b"], [None, "a", "a", None]]
)
def test_no_warning_where_members_are_compared_or_alone(groups: list[str | None]) -> None:
    batch = pack([trajectory(str(k), group=group) for k, group in enumerate(groups)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for estimator in ALL:
            credited(batch, estimator)
