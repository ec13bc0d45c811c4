"""Group statistics cost the device work that grows with the members alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ptx.executor import on_executor
from trajpack.kernels import group_advantages
from trajpack.kernels.groups.group_advantages import members_of


def instructions(members: int) -> int:
    """Return the instructions of a warp for groups of 16 whose members are scattered."""
    ids = torch.arange(members) % (members // 16)
    scores = torch.linspace(0, 1, members).square()
    options = {"num_groups": members // 16}
    expected = group_advantages(scores, ids, **options, impl="torch")
    with on_executor(counts=True) as executor:
        found = group_advantages(scores, ids, **options, impl="triton")
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
    return executor.reports["group_advantages_kernel"].warp_instructions


def test_twice_the_members_are_twice_the_instructions() -> None:
    few, more, most = (
        instructions(members) for members in (4096, 8192, 16384)
    )  # may be one group: two launches
    assert 1.9 < more / few < 2.1
    assert 1.9 < most / more < 2.1


class Sorted(TorchDispatchMode):
    """Names of the operations that ran, and the dtypes that were sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, op: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        self.names.append(str(op).split(".")[1])
        if self.names[-1] == "sort":
            self.dtypes.append(given[0].dtype)
        return op(*given, **(named or {}))


NARROWED = {127: torch.int8, 128: torch.int16, 32_767: torch.int16, 32_768: torch.int32}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_groups", NARROWED)
def test_ids_are_sorted_in_the_fewest_bytes(num_groups: int, dtype: torch.dtype) -> None:
    """Two operations narrow them, a sort, and two find the groups; then comes our own."""
    ids = torch.empty(8192, dtype=dtype, device="meta")
    with Sorted() as recorded:
        group_advantages(ids.float(), ids, num_groups=num_groups, impl="triton")
    narrows = ["clamp", "_to_copy"] if NARROWED[num_groups] != dtype else []
    expected = ["_to_copy", *narrows, "sort", "arange", "searchsorted", "group_advantages"]
    assert recorded.names == expected  # the first makes the scores
    assert recorded.dtypes == [NARROWED[num_groups]]


@pytest.mark.parametrize("num_groups", [0, 1, 126, *NARROWED, 70_000])
def test_groups_stand_in_the_order_of_their_members(num_groups: int) -> None:
    """Members with ids out of range, which narrow dtypes do not hold, are outside of all groups."""
    draw = torch.Generator().manual_seed(num_groups)
    ids = torch.randint(-3, num_groups + 3, (4000,), generator=draw)
    beyond = [2**8, 2**16, 2**32, 2**32 + 1, 2**63 - 1, -(2**63), -(2**32), -(2**8), num_groups, -1]
    ids[:10] = torch.tensor(beyond)
    for given in (ids, ids.int()):
        members = members_of(given, num_groups, "triton")
        order, bounds = members.order.tolist(), members.segments.tolist()
        assert sorted(order) == list(range(4000))
        assert (members.segments.dtype, len(bounds)) == (torch.int32, num_groups + 1)
        expected: dict[int, list[int]] = {}
        for member, group in enumerate(given.tolist()):
            expected.setdefault(group, []).append(member)
        for group, (begin, end) in enumerate(pairwise(bounds)):
            assert order[begin:end] == expected.get(group, [])
