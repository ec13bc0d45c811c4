"""Launches that make Triton compile the variants of group statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from trajpack.kernels.groups.group_advantages import Rule
from trajpack.kernels.groups.group_advantages_triton import group_advantages_forward

Launches = Iterator[tuple[str, Callable[[], Any]]]


def launches_of_groups(scores: torch.Tensor) -> Launches:
    """What is summed in each way that a recipe asks for, with and without marks."""
    ids = torch.zeros_like(scores, dtype=torch.int64)
    valid = ids.bool()

    def launch(
        baseline: str, scale: str, *inputs: torch.Tensor, **marks: torch.Tensor
    ) -> Callable[[], Any]:
        rule = Rule(baseline, scale, 1, 1e-6, "raw")
        return partial(group_advantages_forward, *inputs, 40, rule, **marks)

    yield "mean by std", launch("mean", "std", scores, ids.int())
    shifted = scores.double()[1:], ids[1:]
    yield "mean by std, valid", launch("mean", "std", *shifted, valid=valid[1:])
    yield "length_weighted", launch("length_weighted", "none", scores, ids, lengths=ids)
    yield "mean by nonzero, valid", launch("mean", "nonzero", scores, ids.int(), valid=valid)
    yield "second_best by std", launch("second_best", "std", scores, ids)
    others = launch("leave_one_out", "leave_one_out_std", scores, ids.int(), valid=valid)
    yield "leave_one_out by leave_one_out_std, valid", others
    yield "none by std_about_baseline", launch("none", "std_about_baseline", scores, ids)
