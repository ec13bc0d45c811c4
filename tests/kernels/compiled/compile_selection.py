"""Launches that make Triton compile the kernel of selected tokens, as micro-batches ask for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from trajpack.kernels.fields.gather_fields import UNITS
from trajpack.kernels.rearrange.segments import Rows
from trajpack.kernels.rearrange.select_tokens_triton import select_forward

TOKENS = 1500
OWN = (8, 4, 1, 1, 4, 4, 4, 4)
"""Units of a micro-batch's tensors: ids, turns, two masks, log-probabilities, versions, returns
and advantages."""


def launches_of_selections(words: torch.Tensor) -> Iterator[tuple[str, Callable[[], Any]]]:
    """All tensors of a micro-batch, with and without extra fields; and outputs that are merged."""
    table = words[:32].view(4, 8)
    own = [Rows(1, unit, 0) for unit in OWN]
    experts = [Rows(3, unit, -1) for unit in UNITS]
    for label, rows, shift, positions in (
        ("own", own, 0, "continue"),
        ("own, positions of 0", own, 0, "zero"),
        ("own, unaligned", own, 1, "continue"),
        ("own and 3 x 1 and 3 x 2 and 3 x 4 and 3 x 8", own + experts, 0, "continue"),
    ):
        sources = [_zeros(row, words.device)[shift:] for row in rows]
        yield label, partial(select_forward, sources, table, TOKENS, rows, positions)
    for row in (Rows(1, 4, 0), Rows(3, 2, 0)):
        launch = partial(select_forward, [_zeros(row, words.device)], table, TOKENS, [row], "")
        yield f"{row.width} x {row.unit}", launch


def _zeros(row: Rows, device: torch.device) -> torch.Tensor:
    return torch.zeros(99 * row.width, dtype=UNITS[row.unit], device=device)
