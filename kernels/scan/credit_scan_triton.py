# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Scans over tokens: blocks of a segment, counted from its end, folded one after another.

A block is one scan at reversed addresses, so that the scan runs forward; its entries' states
then take in the state behind the block, and the last of them is carried on. So the order of the
sums is the segment's own. A program may walk a whole segment, with all it needs in one launch;
or do one block, with what the blocks behind it do to the state from a launch before, folded
in the same order: the same steps, hence the same bits. No float is added atomically.
"""

from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import DEFAULT, block_shape, launch_on
from trajpack.kernels.corrections.kl_penalty import KL_ESTIMATORS
from trajpack.kernels.scan.credit_scan import KINDS, Scan
from trajpack.kernels.scan.credit_scan_segments_triton import (
    block_of_window,
    bounds_of,
    fill_with_zeros,
    rates_of,
    state_behind,
)
from trajpack.kernels.scan.credit_scan_steps_triton import (
    GAE,
    read_block,
    scan_block,
    states_of_block,
    write_block,
)
from trajpack.kernels.scan.discounted_returns_steps_triton import add_carry
from trajpack.kernels.scan.observations import OBSERVATIONS

Outputs: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]

BLOCK = block_shape("credit_scan", DEFAULT).block
"""The same on every architecture: it settles the order of the sums."""
LONGEST_WALK = 4096
"""Segments no longer than this are walked by one program: blocks would cost a second launch."""
FEWEST_ENTRIES = 8192
"""With so few entries in all, a second launch costs more than the steps that it saves."""


@triton.jit(do_not_specialize=["num_segments", "num_tokens"])
def walk_kernel(
    source, weights, before, outputs, cu_seqlens, rates, bootstrap, fill_ids,
    num_segments, num_tokens, gamma: tl.float64, lam: tl.float64,
    kl_coefficient: tl.float64, kl_clamp: tl.float64, reward_clip: tl.float64,
    rho_clip: tl.float64, c_clip: tl.float64, advantage_rho_clip: tl.float64,
    SCAN: tl.constexpr, OBSERVATION: tl.constexpr, ESTIMATOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk one segment, block after block from its end."""
    limits = (kl_coefficient, kl_clamp, reward_clip, rho_clip, c_clip, advantage_rho_clip)
    segment = tl.program_id(0)
    if segment < num_segments:
        gamma, lam = rates_of(rates, segment, gamma, lam)
        begin, end, first, last = bounds_of(source, cu_seqlens, segment)
        tail = state_behind(source, bootstrap, segment, last, gamma, GAE)
        state = state_behind(source, bootstrap, segment, last, gamma, SCAN)
        top = end
        while top > begin:
            token, behind_each, gain, gift = read_block(
                source, limits, weights, before, top, begin, end, first, last, gamma, lam, tail,
                SCAN, OBSERVATION, ESTIMATOR, BLOCK,
            )  # fmt: skip
            lanes, gains, gifts, all_gain, all_gift = scan_block(gain, gift, BLOCK)
            states = states_of_block(lanes, gains, gifts, state, BLOCK)
            write_block(
                source, limits, weights, outputs, token, behind_each, states, top, begin, gamma,
                lam, SCAN, OBSERVATION, BLOCK,
            )  # fmt: skip
            state = add_carry(all_gift, all_gain, state)
            top -= BLOCK
    elif fill_ids is not None:
        fill_with_zeros(outputs, fill_ids, segment - num_segments, num_tokens, BLOCK)


@triton.jit(do_not_specialize=["num_segments", "num_pieces"])
def block_steps_kernel(
    source, weights, before, steps, cu_seqlens, rates, bootstrap, num_segments, num_pieces,
    gamma: tl.float64, lam: tl.float64,
    kl_coefficient: tl.float64, kl_clamp: tl.float64, reward_clip: tl.float64,
    rho_clip: tl.float64, c_clip: tl.float64, advantage_rho_clip: tl.float64,
    SCAN: tl.constexpr, OBSERVATION: tl.constexpr, ESTIMATOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Work out what a block with another before it does to the state, for the block's window."""
    limits = (kl_coefficient, kl_clamp, reward_clip, rho_clip, c_clip, advantage_rho_clip)
    window = tl.program_id(0)
    segment, behind, exists = block_of_window(
        source, cu_seqlens, num_segments, num_pieces, window, BLOCK
    )
    if exists:
        gamma, lam = rates_of(rates, segment, gamma, lam)
        begin, end, first, last = bounds_of(source, cu_seqlens, segment)
        tail = state_behind(source, bootstrap, segment, last, gamma, GAE)
        top = end - behind * BLOCK
        _, _, gain, gift = read_block(
            source, limits, weights, before, top, begin, end, first, last, gamma, lam, tail,
            SCAN, OBSERVATION, ESTIMATOR, BLOCK,
        )  # fmt: skip
        _, _, _, all_gain, all_gift = scan_block(gain, gift, BLOCK)
        tl.store(steps + 2 * window, all_gain)
        tl.store(steps + 2 * window + 1, all_gift)


@triton.jit(do_not_specialize=["num_segments", "num_pieces", "num_windows", "num_tokens"])
def block_states_kernel(
    source, weights, before, outputs, steps, cu_seqlens, rates, bootstrap, fill_ids,
    num_segments, num_pieces, num_windows, num_tokens, gamma: tl.float64, lam: tl.float64,
    kl_coefficient: tl.float64, kl_clamp: tl.float64, reward_clip: tl.float64,
    rho_clip: tl.float64, c_clip: tl.float64, advantage_rho_clip: tl.float64,
    SCAN: tl.constexpr, OBSERVATION: tl.constexpr, ESTIMATOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put out one block: of a window, or, in later programs, the one that begins a segment."""
    limits = (kl_coefficient, kl_clamp, reward_clip, rho_clip, c_clip, advantage_rho_clip)
    program = tl.program_id(0)
    if program < num_windows + num_segments:
        if program < num_windows:
            segment, behind, exists = block_of_window(
                source, cu_seqlens, num_segments, num_pieces, program, BLOCK
            )
        else:
            segment = program - num_windows
            begin, end, _, _ = bounds_of(source, cu_seqlens, segment)
            behind = tl.maximum(end - begin - 1, 0) // BLOCK
            exists = end > begin
        if exists:
            gamma, lam = rates_of(rates, segment, gamma, lam)
            begin, end, first, last = bounds_of(source, cu_seqlens, segment)
            tail = state_behind(source, bootstrap, segment, last, gamma, GAE)
            state = state_behind(source, bootstrap, segment, last, gamma, SCAN)
            window = (end - 1) // BLOCK
            for done in tl.range(0, behind, loop_unroll_factor=8):
                gain = tl.load(steps + 2 * (window - done))
                gift = tl.load(steps + 2 * (window - done) + 1)
                state = add_carry(gift, gain, state)
            top = end - behind * BLOCK
            token, behind_each, gain, gift = read_block(
                source, limits, weights, before, top, begin, end, first, last, gamma, lam, tail,
                SCAN, OBSERVATION, ESTIMATOR, BLOCK,
            )  # fmt: skip
            lanes, gains, gifts, _, _ = scan_block(gain, gift, BLOCK)
            states = states_of_block(lanes, gains, gifts, state, BLOCK)
            write_block(
                source, limits, weights, outputs, token, behind_each, states, top, begin, gamma,
                lam, SCAN, OBSERVATION, BLOCK,
            )  # fmt: skip
    elif fill_ids is not None:
        tile = program - num_windows - num_segments
        fill_with_zeros(outputs, fill_ids, tile, num_tokens, BLOCK)


def credit_scan_forward(scan: Scan) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch what the sizes known to the host ask for; see `trajpack.kernels.scan.credit_scan`."""
    before = None
    if scan.kind == "vtrace" and scan.pieces is None:
        before = torch.empty(scan.num_positions, dtype=torch.float64, device=scan.device)
        launch(scan._replace(kind="next_values"), None, (before, None))
    advantages = torch.empty(scan.num_tokens, dtype=torch.float32, device=scan.device)
    outputs = advantages, torch.empty_like(advantages)
    launch(scan, before, outputs)
    return outputs


def launch(scan: Scan, before: torch.Tensor | None, outputs: Outputs) -> None:
    """Put a scan out, by one launch or two."""
    if not scan.num_tokens:
        return
    longest = scan.num_positions if scan.max_seqlen is None else scan.max_seqlen
    if scan.num_positions <= FEWEST_ENTRIES or longest <= LONGEST_WALK:
        walk_segments(scan, before, outputs)
    else:
        write_blocks(scan, before, outputs, steps_of_blocks(scan, before))


def _arguments(scan: Scan) -> tuple[Any, ...]:
    """Return source and weights as the kernels take them."""
    pieces = None
    if scan.pieces is not None:
        begins = scan.pieces.begins
        # tuples of nothing for what there is not: Triton 3.6 compares no tuple that holds a None
        by_turn = (1,) if scan.by_turn else ()
        cut_off = scan.pieces.truncated
        pieces = (
            scan.pieces.cu_positions, begins, begins.stride(0), scan.pieces.spans,
            scan.pieces.rewards, by_turn, () if cut_off is None else (cut_off.view(torch.uint8),),
        )  # fmt: skip
    masks = None if scan.loss_mask is None else scan.loss_mask.view(torch.uint8)
    return (scan.rewards, scan.values, masks, pieces, scan.kl), scan.weights


def _options(scan: Scan) -> dict[str, Any]:
    return {
        "gamma": scan.gamma,
        "lam": scan.lam,
        **scan.limits._asdict(),
        "SCAN": KINDS.index(scan.kind),
        "OBSERVATION": OBSERVATIONS.index(scan.observation),
        "ESTIMATOR": 0 if scan.estimator is None else KL_ESTIMATORS.index(scan.estimator) + 1,
        "BLOCK": BLOCK,
        **launch_on("credit_scan", scan.cu_seqlens.get_device()).options,
    }


def _fill(scan: Scan) -> tuple[torch.Tensor | None, int]:
    """Return whose the tokens are that pieces write, and the tiles that write the others."""
    if scan.turn_ids is None or scan.by_turn or scan.kind == "next_values":
        return None, 0
    return scan.turn_ids, triton.cdiv(scan.num_tokens, BLOCK)


def walk_segments(scan: Scan, before: torch.Tensor | None, outputs: Outputs) -> None:
    """Launch a program for each segment."""
    source, weights = _arguments(scan)
    fill_ids, tiles = _fill(scan)
    with torch.cuda.device_of(scan.cu_seqlens):  # Triton launches on the current device
        walk_kernel[(scan.num_segments + tiles,)](
            source, weights, before, outputs, scan.cu_seqlens, (scan.gammas, scan.lams),
            scan.bootstrap, fill_ids, scan.num_segments, scan.num_tokens, **_options(scan),
        )  # fmt: skip


def steps_of_blocks(scan: Scan, before: torch.Tensor | None) -> torch.Tensor:
    """Launch a program for each window; return float64 ``[windows, 2]``, where there is a block."""
    source, weights = _arguments(scan)
    windows = triton.cdiv(scan.num_positions, BLOCK)
    steps = torch.empty((windows, 2), dtype=torch.float64, device=scan.device)
    with torch.cuda.device_of(scan.cu_seqlens):
        block_steps_kernel[(windows,)](
            source, weights, before, steps, scan.cu_seqlens, (scan.gammas, scan.lams),
            scan.bootstrap, scan.num_segments, scan.num_pieces, **_options(scan),
        )  # fmt: skip
    return steps


def write_blocks(
    scan: Scan, before: torch.Tensor | None, outputs: Outputs, steps: torch.Tensor
) -> None:
    """Launch a program for each window and one for each segment, with the steps of the windows."""
    source, weights = _arguments(scan)
    fill_ids, tiles = _fill(scan)
    windows = steps.shape[0]
    with torch.cuda.device_of(scan.cu_seqlens):
        block_states_kernel[(windows + scan.num_segments + tiles,)](
            source, weights, before, outputs, steps, scan.cu_seqlens, (scan.gammas, scan.lams),
            scan.bootstrap, fill_ids, scan.num_segments, scan.num_pieces, windows,
            scan.num_tokens, **_options(scan),
        )  # fmt: skip
