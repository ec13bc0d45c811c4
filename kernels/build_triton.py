"""Every per-token field in one launch: a program owns one tile of ``BLOCK`` output tokens.

Outputs are allocated in whole tiles, so every store is full width and unmasked. A program
finds the run that holds its first token by a 64-ary search. A tile inside one run reads the
stream without a mask; a tile over several runs takes them one after another, each lane from
the run it lies in, and stores once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trajpack.kernels.build import FIELD_DTYPES
from trajpack.kernels.runs import RUN_WIDTH, Run

BLOCK = 1024
THREADS = 256
"""Of a program. With 128, Triton 3.6 needs 145 registers a thread for sm_80, with 256 it is 78."""
NUM_WARPS = THREADS // (64 if torch.version.hip else 32)
ROW = tl.constexpr(RUN_WIDTH)
SOURCE = tl.constexpr(int(Run.SOURCE))
LOGPROB = tl.constexpr(int(Run.LOGPROB))
POSITION = tl.constexpr(int(Run.POSITION))
SEQUENCE = tl.constexpr(int(Run.SEQUENCE))
TURN = tl.constexpr(int(Run.TURN))
VERSION = tl.constexpr(int(Run.VERSION))
ARITY = tl.constexpr(64)


@triton.jit
def _find_run(runs, num_runs, token):
    """Return the last run that starts at or before ``token``; the first starts at 0."""
    low = 0
    count = num_runs
    lane = tl.arange(0, ARITY)
    while count > 1:
        step = tl.cdiv(count, ARITY)
        probe = lane * step
        start = tl.load(runs + (low + probe) * ROW, mask=probe < count, other=2147483647)
        skipped = (tl.sum((start <= token).to(tl.int32), 0) - 1) * step
        low += skipped
        count = tl.minimum(step, count - skipped)
    return low


@triton.jit
def _store(fields, token, word, position, sequence, turn, logprob, version, earned):
    tl.store(fields[0] + token, word.to(tl.int64))
    tl.store(fields[1] + token, position.to(tl.int64))
    tl.store(fields[2] + token, sequence)
    tl.store(fields[3] + token, turn)
    tl.store(fields[4] + token, ((sequence >= 0) & (turn < 0)).to(tl.int8))
    tl.store(fields[5] + token, (turn >= 0).to(tl.int8))
    tl.store(fields[6] + token, logprob.to(tl.float32, bitcast=True))
    tl.store(fields[7] + token, version)
    tl.store(fields[8] + token, earned)


@triton.jit(do_not_specialize=["num_runs", "num_tokens"])
def build_kernel(words, runs, turn_returns, fields, num_runs, num_tokens, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    token = first + tl.arange(0, BLOCK)
    run = _find_run(runs, num_runs, first)
    zeros = tl.zeros((BLOCK,), tl.int32)
    end = tl.load(runs + (run + 1) * ROW)
    if end >= first + BLOCK:
        row = runs + run * ROW
        offset = token - tl.load(row)
        word = tl.load(words + tl.load(row + SOURCE) + offset)
        position = tl.load(row + POSITION) + offset
        sequence = tl.load(row + SEQUENCE) + zeros
        run_turn = tl.load(row + TURN)
        turn = run_turn + zeros
        version = tl.load(row + VERSION) + zeros
        logprob = zeros
        earned = tl.zeros((BLOCK,), tl.float32)
        if run_turn >= 0:
            logprob = tl.load(words + tl.load(row + LOGPROB) + offset)
            earned += tl.load(turn_returns + run_turn)
        _store(fields, token, word, position, sequence, turn, logprob, version, earned)
    else:
        word = zeros
        logprob = zeros
        position = zeros
        sequence = zeros - 1
        turn = zeros - 1
        version = zeros - 1
        earned = tl.zeros((BLOCK,), tl.float32)
        limit = tl.minimum(first + BLOCK, num_tokens)
        start = first
        while start < limit:
            row = runs + run * ROW
            end = tl.load(row + ROW)
            inside = (token >= start) & (token < end)  # the last run ends at num_tokens
            offset = token - tl.load(row)
            run_turn = tl.load(row + TURN)
            source = words + tl.load(row + SOURCE) + offset
            word = tl.where(inside, tl.load(source, mask=inside, other=0), word)
            position = tl.where(inside, tl.load(row + POSITION) + offset, position)
            sequence = tl.where(inside, tl.load(row + SEQUENCE), sequence)
            turn = tl.where(inside, run_turn, turn)
            version = tl.where(inside, tl.load(row + VERSION), version)
            if run_turn >= 0:
                source = words + tl.load(row + LOGPROB) + offset
                logprob = tl.where(inside, tl.load(source, mask=inside, other=0), logprob)
                earned = tl.where(inside, tl.load(turn_returns + run_turn), earned)
            start = end
            run += 1
        _store(fields, token, word, position, sequence, turn, logprob, version, earned)


def build_forward(
    words: torch.Tensor, runs: torch.Tensor, turn_returns: torch.Tensor, num_tokens: int
) -> list[torch.Tensor]:
    """Launch the kernel on contiguous inputs and cut the outputs to ``num_tokens``."""
    tiles = triton.cdiv(num_tokens, BLOCK)
    whole = [
        torch.empty(tiles * BLOCK, dtype=dtype, device=words.device)
        for dtype in FIELD_DTYPES.values()
    ]
    if tiles:
        # Triton takes a bool pointer for one bit; the masks are bytes
        fields = tuple(f.view(torch.int8) if f.dtype == torch.bool else f for f in whole)
        with torch.cuda.device_of(words):  # Triton launches on the current device
            build_kernel[(tiles,)](
                words, runs, turn_returns, fields, runs.shape[0] - 1, num_tokens,
                BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return [field[:num_tokens] for field in whole]
