"""Rows further than an int32 counts bytes: the last programs of a large grid are run alone.

Memory that no program touches is never mapped.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from tests.ptx.executor import on_executor
from trajpack.kernels.fields.gather_fields_triton import gather_fields_kernel
from trajpack.kernels.launches import Launch, launch_on
from trajpack.kernels.rearrange.pad_triton import pad_kernel, unpad_kernel
from trajpack.kernels.rearrange.select_tokens_triton import select_tokens_kernel
from trajpack.kernels.runs import RUN_WIDTH, Run

WIDTH = 1536
"""Bytes of a row, as of 8 routed experts in 192 layers."""
TOKENS = 2**31 // WIDTH + 7
PROGRAMS = 3
FIRST_NUMBER = re.compile(r"(mov\.u32\s+(%r\d+), %ctaid\.x;)")
"""Reads the number of a program."""


def gather(launch: Launch, words: torch.Tensor, out: torch.Tensor) -> None:
    runs = torch.zeros(2, RUN_WIDTH, dtype=torch.int32)
    runs[1, Run.START], runs[1, Run.SOURCE] = TOKENS, -1
    launch(
        gather_fields_kernel, PROGRAMS, words, runs, torch.zeros(2, 1, dtype=torch.int64), (out,),
        1, TOKENS, WIDTHS=(WIDTH,), UNITS=(1,), FILLS=(0,), GENERATED_ONLY=(0,),
        BLOCK=launch.block,
    )  # fmt: skip


def select(launch: Launch, words: torch.Tensor, out: torch.Tensor) -> None:
    table = torch.tensor([[0, TOKENS], [0, 0], [TOKENS, 0]], dtype=torch.int32)
    launch(
        select_tokens_kernel, PROGRAMS, (words.view(torch.int8),), (out.view(torch.int8),), (),
        table, table.stride(0), 1, TOKENS, TOKENS, WIDTHS=(WIDTH,), FILLS=(0,), ZERO=False,
        DISTINCT=(WIDTH,), BLOCK=launch.block,
    )  # fmt: skip


BOUNDS = torch.tensor([0, TOKENS], dtype=torch.int32)
"""One sequence, of rows of units of a byte, without padding."""


def pad(launch: Launch, words: torch.Tensor, out: torch.Tensor) -> None:
    launch(
        pad_kernel, PROGRAMS, words.view(torch.int8), BOUNDS, out.view(torch.int8), TOKENS, 1,
        TOKENS, 0, WIDTH, WIDTH, 0, 0, PER_UNIT=1, BLOCK=launch.block,
    )  # fmt: skip


def unpad(launch: Launch, words: torch.Tensor, out: torch.Tensor) -> None:
    launch(
        unpad_kernel, PROGRAMS, words.view(torch.int8), BOUNDS, out.view(torch.int8), TOKENS, 1,
        TOKENS, 0, WIDTH, TOKENS * WIDTH, WIDTH, PER_UNIT=1, BLOCK=launch.block,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "move"),
    [
        ("gather_fields_kernel", gather),
        ("select_tokens_kernel", select),
        ("pad_kernel, elements of 1", pad),
        ("unpad_kernel, elements of 1", unpad),
    ],
)
def test_rows_behind_two_billion_bytes_are_moved_right(
    kernel: str, move: Callable[..., None]
) -> None:
    with on_executor(checks=False) as executor:
        launch = launch_on(kernel, -1)
        size = TOKENS * WIDTH
        tiles = -(-size // launch.block)
        begin = (tiles - PROGRAMS) * launch.block
        assert begin >= 2**31
        out = torch.empty(tiles * launch.block, dtype=torch.uint8)
        words = torch.empty(-(-size // 4), dtype=torch.int32)
        moved = words.view(torch.uint8)[begin:size]
        moved[:] = torch.arange(len(moved)) % 251
        added = rf"\1\n\tadd.s32 \2, \2, {tiles - PROGRAMS};"
        executor.rewrite = lambda text: FIRST_NUMBER.sub(added, text)
        move(launch, words, out)
    assert torch.equal(out[begin:size], moved)
