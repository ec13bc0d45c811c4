# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""Triton kernels of the scan over tokens: blocks of a segment, folded from its end.

A block is one associative scan at reversed addresses, so that the scan runs forward, and one warp:
the compiled code has two barriers at most. Each entry's state then takes in the state behind the
block, and the state before the block is carried on. So the order of sums depends on the segment
alone. One program walks a whole segment in one launch. Segments longer than a row of ``ROW`` blocks
take three launches: the first finds the effect of each block on the state; the second, with a
program for each row, finds the effect of the blocks that are behind a block in its row; in the
third each program folds the rows behind its own and writes a block. The blocks of a segment's last
row take the same steps either way, hence the same bits. There are no atomic additions of floats.

Positions count the scanned tokens, segment after segment. Without chunks a position is the
token's own index; with chunks it is looked up among the chunks' first positions.

The kernels pass these tuples on, in which an input that is not given is ``None`` or ``()``:

- ``source``: rewards, values, loss mask, chunks, log-probabilities of the KL penalty;
- ``chunks``: first positions, first tokens, stride of these, spans, rewards, ``(1,)`` if a chunk
  is one action, ``(truncated,)``;
- ``inputs``: source, limits, log-probabilities of the importance ratios, discounted next values;
- ``span``: first and past-last position of a segment, first and last chunk of all segments of a
  block, last chunk of the segment;
- ``segment``: span, γ and λ, the state behind the last entry.

``FORM`` holds the numbers of the kind of scan, of the observation and of the KL penalty's
estimator.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import DEFAULT, block_shape, launch_on
from trajpack.kernels.corrections.penalties import KL_ESTIMATORS
from trajpack.kernels.scan.observations import OBSERVATIONS
from trajpack.kernels.scan.scan_inputs import KINDS, Scan
from trajpack.kernels.search_triton import find_segment, find_segments

Outputs: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]

BLOCK = block_shape("credit_scan", DEFAULT).block
"""Entries of a block. The same on every architecture, because it fixes the order of sums."""
ROW = 32
"""Blocks of a row, counted from a segment's end."""
LONGEST_WALK = ROW * BLOCK
"""Longest segment that one program walks: more than one row takes three launches."""

CARRY, CARRY_DROP, COMPACT, IGNORE, MULTIPLY, RESET = (
    tl.constexpr(number) for number in range(len(OBSERVATIONS))
)
"""Observations, by their index in `OBSERVATIONS`."""
GAE, RETURNS, NEXT_VALUES, VTRACE, ADJOINT = (tl.constexpr(number) for number in range(len(KINDS)))
"""Kinds of scan, by their index in `KINDS`."""


@triton.jit
def compose(first_decay, first_increment, second_decay, second_increment):
    decay = first_decay * second_decay
    return decay, tl.fma(second_decay, first_increment, second_increment)


@triton.jit
def compose_within(
    first_owner, first_decay, first_increment, second_owner, second_decay, second_increment
):
    """Compose two steps of the same segment; the second alone where they have other owners."""
    decay, increment = compose(first_decay, first_increment, second_decay, second_increment)
    same = first_owner == second_owner
    decay = tl.where(same, decay, second_decay)
    return second_owner, decay, tl.where(same, increment, second_increment)


@triton.jit
def add_carry(increment, decay, state):
    """Return ``increment + decay * state``; a state of 0 adds 0 where ``decay`` has overflowed."""
    return tl.fma(tl.where(state == 0, 0.0, decay), state, increment)


@triton.jit
def spread_entry(lanes, place, LANES: tl.constexpr):
    """Return the entry of ``lanes`` at ``place`` in ``LANES`` lanes: one shuffle within a warp."""
    return tl.gather(lanes, tl.full((LANES,), 0, tl.int32) + place, 0)


@triton.jit
def split_in_four(entries, BLOCK: tl.constexpr):
    """Give each lane four neighbouring entries: return the first of each lane, the second, ..."""
    evens, odds = tl.split(tl.reshape(entries, [BLOCK // 4, 2, 2]))
    first, third = tl.split(evens)
    second, fourth = tl.split(odds)
    return first, second, third, fourth


@triton.jit
def scan_block(decay, increment, first, BLOCK: tl.constexpr):
    """Compose the steps of a block, last token first, in lanes of four.

    Return the effect of all lanes before each lane; decays and increments of each lane's first
    three entries; decay and increment of the whole block, in every lane. Lanes of four take a
    quarter of the shuffles that lanes of one would. ``first`` [BLOCK / 4] is the lane in which the
    segment of each lane begins, ``None`` if the block has one segment.
    """
    lane = tl.arange(0, BLOCK // 4)
    decay0, decay1, decay2, decay3 = split_in_four(decay, BLOCK)
    increment0, increment1, increment2, increment3 = split_in_four(increment, BLOCK)
    decays, increments = compose(decay0, increment0, decay1, increment1)
    decays, increments = compose(decays, increments, decay2, increment2)
    decays, increments = compose(decays, increments, decay3, increment3)
    if first is None:
        decays, increments = tl.associative_scan((decays, increments), 0, compose)
        begins = lane == 0
    else:
        steps = first, decays, increments
        _, decays, increments = tl.associative_scan(steps, 0, compose_within)
        begins = lane == first
    block_decay = spread_entry(decays, BLOCK // 4 - 1, BLOCK // 4)
    block_increment = spread_entry(increments, BLOCK // 4 - 1, BLOCK // 4)
    before = tl.maximum(lane - 1, 0)
    decays = tl.where(begins, 1.0, tl.gather(decays, before, 0))
    increments = tl.where(begins, 0.0, tl.gather(increments, before, 0))
    return (
        (decays, increments),
        (decay0, decay1, decay2),
        (increment0, increment1, increment2),
        block_decay,
        block_increment,
    )


@triton.jit
def states_of_block(lanes, decays, increments, state, BLOCK: tl.constexpr):
    """Return the state behind each entry of a block; ``state`` is that behind it, in every lane."""
    state0 = add_carry(lanes[1], lanes[0], state)
    state1 = add_carry(increments[0], decays[0], state0)
    state2 = add_carry(increments[1], decays[1], state1)
    state3 = add_carry(increments[2], decays[2], state2)
    states = tl.join(tl.join(state0, state2), tl.join(state1, state3))
    return tl.reshape(states, [BLOCK])


@triton.jit
def clip_symmetric(number, bound):
    # keeps NaN, which minimum and maximum would drop on hardware
    return tl.where(number > bound, bound, tl.where(number < -bound, -bound, number))


@triton.jit
def clipped_ratio(weights, at, generated, cap):
    """Return min(π/μ, cap) of generated tokens, 1 of others."""
    logprobs, rollout_logprobs = weights
    ours = tl.load(logprobs + at, mask=generated, other=0.0).to(tl.float64)
    theirs = tl.load(rollout_logprobs + at, mask=generated, other=0.0).to(tl.float64)
    ratio = tl.exp(ours - theirs)
    return tl.where(generated, tl.where(ratio > cap, cap, ratio), 1.0)


@triton.jit
def kl_penalty(kl, limits, at, generated, ESTIMATOR: tl.constexpr):
    """Return the weighted KL estimate of tokens; ``ESTIMATOR`` 1 to 3 is k1 to k3."""
    logprobs, ref_logprobs = kl
    ours = tl.load(logprobs + at, mask=generated, other=0.0).to(tl.float64)
    theirs = tl.load(ref_logprobs + at, mask=generated, other=0.0).to(tl.float64)
    ratio = ours - theirs
    if ESTIMATOR == 1:
        penalty = ratio
    elif ESTIMATOR == 2:
        ratio = clip_symmetric(ratio, 1e150)  # whose square is finite
        penalty = 0.5 * ratio * ratio
    else:
        ratio = tl.where(ratio < -700.0, -700.0, ratio)  # whose exponential is finite
        small = ratio * ratio * (0.5 - ratio * (1.0 / 6.0 - ratio * (1.0 / 24.0)))
        penalty = tl.where(tl.abs(ratio) < 1e-3, small, tl.exp(-ratio) - 1.0 + ratio)
    return limits[0] * clip_symmetric(penalty, limits[1])


@triton.jit
def read_chunk(chunks, position, exists, span, clip):
    """Return token, first generated token of its chunk, and reward at each position.

    A chunk's reward is on its last generated token, with the rewards of the chunks behind it that
    generated nothing.
    """
    cu_positions, addresses, stride, spans, rewards, _by_turn, _truncated = chunks
    _begin, _end, first, last, own_last = span
    chunk = find_segments(cu_positions, first, last, position, 1)
    begins = tl.load(cu_positions + chunk, mask=exists, other=0)
    at = tl.load(addresses + chunk * stride, mask=exists, other=0) + position - begins
    begin = tl.load(spans + chunk * 2, mask=exists, other=0)
    end = tl.load(spans + chunk * 2 + 1, mask=exists, other=0)
    ends_turn = exists & (at >= begin) & (at == end - 1)
    own = tl.load(rewards + chunk, mask=ends_turn, other=0.0).to(tl.float64)
    reward = clip_symmetric(own, clip)
    chunk += 1
    open_ended = ends_turn & (chunk <= own_last)
    while tl.max(open_ended.to(tl.int32), 0) > 0:
        next_begin = tl.load(spans + chunk * 2, mask=open_ended, other=0)
        next_end = tl.load(spans + chunk * 2 + 1, mask=open_ended, other=1)
        open_ended &= next_begin == next_end
        more = tl.load(rewards + chunk, mask=open_ended, other=0.0).to(tl.float64)
        reward += clip_symmetric(more, clip)
        chunk += 1
        open_ended &= chunk <= own_last
    return at, begin, reward


@triton.jit
def read_token(inputs, span, position, exists, FORM: tl.constexpr):
    """Return token, whether it was generated, reward and value; 0 where it does not exist."""
    rewards, values, loss_mask, chunks, kl = inputs[0]
    limits = inputs[1]
    if chunks is None:
        at = position
        generated = exists
        if loss_mask is not None:
            generated = exists & (tl.load(loss_mask + at, mask=exists, other=0) != 0)
        reward = tl.load(rewards + at, mask=exists, other=0.0).to(tl.float64)
    else:
        at, begin, reward = read_chunk(chunks, position, exists, span, limits[2])
        generated = exists & (at >= begin)
    if kl is not None:
        reward -= kl_penalty(kl, limits, at, generated, FORM[2])
    if chunks is not None:  # noqa: SIM102 - the compiler takes one condition at a time
        if len(chunks[5]) > 0:
            generated = exists & (at == begin)
    value = tl.zeros_like(reward)
    if values is not None:
        value = tl.load(values + at, mask=exists, other=0.0).to(tl.float64)
    if FORM[1] == MULTIPLY:
        reward = tl.where(generated, reward, 0.0)
        value = tl.where(generated, value, 0.0)
    return at, generated, reward, value


@triton.jit
def next_value(inputs, segment, position, exists, OBSERVATION: tl.constexpr):
    """Return the discounted value behind tokens, with the rewards of skipped tokens in between.

    Chunks of V-trace hold no skipped tokens: there it is the value of the next position.
    """
    values, chunks = inputs[0][1], inputs[0][3]
    span, rates, tail = segment
    if chunks is None:
        behind = tl.load(inputs[3] + position, mask=exists, other=0.0)
    else:
        follows = exists & (position + 1 < span[1])
        chunk = find_segments(chunks[0], span[2], span[3], position + 1, 1)
        begins = tl.load(chunks[0] + chunk, mask=follows, other=0)
        at = tl.load(chunks[1] + chunk * chunks[2], mask=follows, other=0) + position + 1 - begins
        value = tl.load(values + at, mask=follows, other=0.0).to(tl.float64)
        if OBSERVATION == MULTIPLY:
            begin = tl.load(chunks[3] + chunk * 2, mask=follows, other=0)
            value = tl.where(at >= begin, value, 0.0)
        behind = tl.where(follows, rates[0] * value, tail)
    return behind


@triton.jit
def step_of(inputs, token, behind, exists, is_last, rates, FORM: tl.constexpr):
    """Return decay and increment of tokens.

    Rewards that skipped tokens pass on belong to the last generated token before them.
    """
    at, generated, reward, value = token
    SCAN: tl.constexpr = FORM[0]
    OBSERVATION: tl.constexpr = FORM[1]
    gamma, lam = rates
    limits, weights = inputs[1], inputs[2]
    decay = tl.zeros_like(reward) + gamma * lam
    if SCAN == ADJOINT:
        increment = tl.where(generated, reward, 0.0)
    elif SCAN == NEXT_VALUES:
        decay = tl.zeros_like(reward)
        increment = gamma * value
    elif SCAN == VTRACE:
        ratio = clipped_ratio(weights, at, generated, limits[3])
        if OBSERVATION == RESET:
            behind = tl.where(generated, behind, 0.0)
        increment = gamma * ratio * (reward + behind - value)
        decay *= clipped_ratio(weights, at, generated, limits[4])
    else:
        increment = gamma * (1.0 - lam) * value + decay * reward
    if OBSERVATION == RESET:
        decay = tl.where(generated, decay, 0.0)
    elif OBSERVATION <= COMPACT:
        decay = tl.where(generated, decay, 1.0)
        passed = tl.zeros_like(reward)
        if OBSERVATION == CARRY and SCAN <= NEXT_VALUES:
            passed = reward
        elif OBSERVATION == COMPACT and SCAN <= NEXT_VALUES:
            passed = tl.where(is_last, reward, 0.0)
        increment = tl.where(generated, increment, passed)
    return tl.where(exists, decay, 1.0), tl.where(exists, increment, 0.0)


@triton.jit
def read_block(inputs, segment, top, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """Return the tokens before ``top``, last one first, their next values and their steps."""
    span, rates, _tail = segment
    position = top - 1 - tl.arange(0, BLOCK)
    exists = position >= span[0]
    token = read_token(inputs, span, position, exists, FORM)
    behind = tl.zeros((BLOCK,), tl.float64)
    if FORM[0] == VTRACE:
        behind = next_value(inputs, segment, position, exists, FORM[1])
    is_last = position == span[1] - 1
    decay, increment = step_of(inputs, token, behind, exists, is_last, rates, FORM)
    return token, behind, decay, increment


@triton.jit
def write_block(
    inputs, outputs, segment, top, state, first, FORM: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the outputs of the tokens before ``top``; ``state`` [BLOCK / 4] is that behind them.

    Return the effect of the block on the state, in every lane. If several segments share the
    block, ``segment`` and ``top`` [BLOCK] are of each entry; ``first`` as in `scan_block`.
    """
    token, behind, decay, increment = read_block(inputs, segment, top, FORM, BLOCK)
    lanes, decays, increments, block_decay, block_increment = scan_block(
        decay, increment, first, BLOCK
    )
    states = states_of_block(lanes, decays, increments, state, BLOCK)
    SCAN: tl.constexpr = FORM[0]
    span, rates, _tail = segment
    position = top - 1 - tl.arange(0, BLOCK)
    exists = position >= span[0]
    at, generated, reward, value = token
    gamma, lam = rates
    limits, weights = inputs[1], inputs[2]
    main, other = outputs
    if SCAN == NEXT_VALUES:
        tl.store(main + position, states, mask=exists)
    elif SCAN == ADJOINT:
        gradient = adjoint_of(generated, reward, states, gamma * lam, position == span[0], FORM[1])
        tl.store(main + at, gradient.to(tl.float32), mask=exists)
    else:
        written = exists
        if inputs[0][3] is not None:
            written = generated
        if SCAN == VTRACE:
            surprise = reward + behind - value
            advantage = clipped_ratio(weights, at, generated, limits[5]) * (surprise + states)
            target = value + clipped_ratio(weights, at, generated, limits[3]) * surprise
            target += lam * clipped_ratio(weights, at, generated, limits[4]) * states
        else:
            advantage = reward - value + states
            target = reward + states
        tl.store(main + at, tl.where(generated, advantage, 0.0).to(tl.float32), mask=written)
        if other is not None:
            tl.store(other + at, tl.where(generated, target, 0.0).to(tl.float32), mask=written)
    return block_decay, block_increment


@triton.jit
def adjoint_of(generated, reward, states, rate, is_first, OBSERVATION: tl.constexpr):
    """Return the gradient of rewards; mirrored, a sequence's last token comes first."""
    rate += tl.zeros_like(reward)
    if OBSERVATION == CARRY:
        rate = tl.where(generated, rate, 1.0)
    elif OBSERVATION == COMPACT:
        rate = tl.where(generated, rate, tl.where(is_first, 1.0, 0.0))
    elif OBSERVATION != IGNORE and OBSERVATION != RESET:  # noqa: PLR1714
        rate = tl.where(generated, rate, 0.0)
    return tl.where(generated, reward, 0.0) + rate * states


@triton.jit
def span_of(chunks, cu_seqlens, segment):
    """Return a segment's first and past-last position, and its first and last chunk."""
    first = tl.load(cu_seqlens + segment)
    past = tl.load(cu_seqlens + segment + 1)
    begin = first
    end = past
    if chunks is not None:
        begin = tl.load(chunks[0] + first)
        end = tl.load(chunks[0] + past)
    last = tl.maximum(past - 1, 0)
    return begin, end, first, last, last


@triton.jit
def segment_of(chunks, cu_seqlens, rates, bootstrap, segment, gamma, lam):
    """Return a segment's span, its γ and λ, and the state behind its last entry."""
    span = span_of(chunks, cu_seqlens, segment)
    gammas, lams = rates
    if gammas is not None:
        gamma = tl.load(gammas + segment)
    if lams is not None:
        lam = tl.load(lams + segment)
    tail = tl.zeros((), tl.float64)
    if bootstrap is not None:
        goes_on = True
        if chunks is not None:  # noqa: SIM102 - the compiler takes one condition at a time
            if len(chunks[6]) > 0:
                goes_on = tl.load(chunks[6][0] + span[3]) != 0
        value = tl.load(bootstrap + segment, mask=goes_on, other=0.0)
        tail += gamma * value.to(tl.float64)
    return span, (gamma + tl.zeros((), tl.float64), lam + tl.zeros((), tl.float64)), tail


@triton.jit
def fill_with_zeros(outputs, turn_ids, tile, num_tokens, BLOCK: tl.constexpr):
    """Write 0 for the tokens that no turn generated, which no chunk writes.

    Addresses descend, as those of the scan: otherwise the compiler would change the scan's layout.
    """
    at = tile * BLOCK + BLOCK - 1 - tl.arange(0, BLOCK)
    rest = tl.load(turn_ids + at, mask=at < num_tokens, other=0) < 0
    main, other = outputs
    tl.store(main + at, tl.zeros((BLOCK,), tl.float32), mask=rest)
    tl.store(other + at, tl.zeros((BLOCK,), tl.float32), mask=rest)


@triton.jit
def block_of_window(chunks, cu_seqlens, num_segments, num_chunks, window, BLOCK: tl.constexpr):
    """Find the block that ends in a window and does not begin its segment.

    Window w is the positions [w * BLOCK, (w + 1) * BLOCK). The window's first position belongs to
    the segment of such a block, so there is at most one per window. Return its segment, the number
    of blocks behind it, and whether it exists.
    """
    if chunks is None:
        segment = find_segment(cu_seqlens, num_segments, window * BLOCK, 1)
    else:
        chunk = find_segment(chunks[0], num_chunks, window * BLOCK, 1)
        segment = find_segment(cu_seqlens, num_segments, chunk, 1)
    begin, end, _, _, _ = span_of(chunks, cu_seqlens, segment)
    behind = (end - 1) // BLOCK - window
    exists = (end > window * BLOCK) & (end - behind * BLOCK - begin > BLOCK)
    return segment, behind, exists


@triton.jit
def share_block(chunks, cu_seqlens, number, past, LANES: tl.constexpr):
    """Find the segments before ``past`` that fit in one block, from ``number`` on.

    Return how many, and for each lane its segment and the lane in which that begins: a segment
    begins in a lane of its own. Lanes behind the last segment belong to it.
    """
    lane = tl.arange(0, LANES)
    own = number + lane
    begin, end, _, _, _ = span_of(chunks, cu_seqlens, tl.minimum(own, past - 1))
    lanes = tl.where(own < past, (end - begin + 3) >> 2, LANES + 1)
    ends = tl.cumsum(lanes, 0)
    count = tl.sum((ends <= LANES).to(tl.int32), 0)
    slot = tl.zeros_like(lane)
    half = LANES // 2
    while half > 0:
        there = tl.gather(ends, slot + half - 1, 0)
        slot = tl.where(there <= lane, slot + half, slot)
        half //= 2
    slot = tl.minimum(slot, tl.maximum(count - 1, 0))
    return count, number + slot, tl.gather(ends - lanes, slot, 0)


@triton.jit
def write_segments(
    inputs, outputs, cu_seqlens, rates, bootstrap, number, count, owner, first, gamma, lam,
    FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write ``count`` segments that share a block; ``owner`` and ``first`` are of each lane."""
    chunks = inputs[0][3]
    state = tl.zeros((BLOCK // 4,), tl.float64)
    if FORM[0] <= NEXT_VALUES:
        _, _, tail = segment_of(chunks, cu_seqlens, rates, bootstrap, owner, gamma, lam)
        state += tail
    lane = tl.arange(0, BLOCK) // 4
    span, of_entries, tail = segment_of(
        chunks, cu_seqlens, rates, bootstrap, tl.gather(owner, lane, 0), gamma, lam
    )
    top = span[1] + 4 * tl.gather(first, lane, 0)
    begin, end, _, _, last = span
    first_chunk = tl.load(cu_seqlens + number)
    last_chunk = tl.maximum(tl.load(cu_seqlens + number + count) - 1, 0)
    segment = (begin, end, first_chunk, last_chunk, last), of_entries, tail
    write_block(inputs, outputs, segment, top, state, first, FORM, BLOCK)


@triton.jit
def walk_segment(
    inputs, outputs, cu_seqlens, rates, bootstrap, number, gamma, lam, FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one segment, block after block from its end."""
    segment = segment_of(inputs[0][3], cu_seqlens, rates, bootstrap, number, gamma, lam)
    state = tl.zeros((BLOCK // 4,), tl.float64)
    if FORM[0] <= NEXT_VALUES:
        state += segment[2]
    top = segment[0][1]
    while top > segment[0][0]:
        block_decay, block_increment = write_block(
            inputs, outputs, segment, top, state, None, FORM, BLOCK
        )
        state = add_carry(block_increment, block_decay, state)
        top -= BLOCK


@triton.jit(do_not_specialize=["num_segments", "share", "num_tokens"])
def walk_kernel(
    source, weights, before, outputs, cu_seqlens, rates, bootstrap, fill_ids, num_segments,
    share, num_tokens, gamma: tl.float64, lam: tl.float64, kl_coefficient: tl.float64,
    kl_clamp: tl.float64, reward_clip: tl.float64, rho_clip: tl.float64, c_clip: tl.float64,
    advantage_rho_clip: tl.float64, FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Walk ``share`` segments, block after block from their ends; later programs fill with 0.

    Neighbours that fit in one block share it.
    """
    limits = (kl_coefficient, kl_clamp, reward_clip, rho_clip, c_clip, advantage_rho_clip)
    inputs = (source, limits, weights, before)
    number = tl.program_id(0) * share
    if number < num_segments:
        past = tl.minimum(number + share, num_segments)
        while number < past:
            count = 1
            if rates[1] is None:  # a λ of each entry would take too many registers
                count, owner, first = share_block(source[3], cu_seqlens, number, past, BLOCK // 4)
                if count > 1:
                    write_segments(
                        inputs, outputs, cu_seqlens, rates, bootstrap, number, count, owner, first,
                        gamma, lam, FORM, BLOCK,
                    )  # fmt: skip
            if count <= 1:
                walk_segment(
                    inputs, outputs, cu_seqlens, rates, bootstrap, number, gamma, lam, FORM, BLOCK
                )
            number += tl.maximum(count, 1)
    elif fill_ids is not None:
        tile = tl.program_id(0) - tl.cdiv(num_segments, share)
        fill_with_zeros(outputs, fill_ids, tile, num_tokens, BLOCK)


@triton.jit(do_not_specialize=["num_segments", "num_chunks"])
def block_steps_kernel(
    source, weights, before, steps, cu_seqlens, rates, bootstrap, num_segments, num_chunks,
    gamma: tl.float64, lam: tl.float64, kl_coefficient: tl.float64, kl_clamp: tl.float64,
    reward_clip: tl.float64, rho_clip: tl.float64, c_clip: tl.float64,
    advantage_rho_clip: tl.float64, FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the effect on the state of the block of one window, if it has one."""
    limits = (kl_coefficient, kl_clamp, reward_clip, rho_clip, c_clip, advantage_rho_clip)
    inputs = (source, limits, weights, before)
    chunks = source[3]
    window = tl.program_id(0)
    number, behind, exists = block_of_window(
        chunks, cu_seqlens, num_segments, num_chunks, window, BLOCK
    )
    if exists:
        segment = segment_of(chunks, cu_seqlens, rates, bootstrap, number, gamma, lam)
        top = segment[0][1] - behind * BLOCK
        _, _, decay, increment = read_block(inputs, segment, top, FORM, BLOCK)
        _, _, _, block_decay, block_increment = scan_block(decay, increment, None, BLOCK)
        lane = tl.arange(0, BLOCK // 4)
        own = steps + 2 * window + tl.zeros_like(lane)
        tl.store(own, block_decay, mask=lane == 0)
        tl.store(own + 1, block_increment, mask=lane == 0)


@triton.jit
def row_of(
    chunks, cu_seqlens, num_segments, num_chunks, num_windows, ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the row of a program: its segment, its number, the window of its last block, its blocks.

    Rows are counted from the segment's end. The first programs have the whole row that holds the
    block of window ``ROW`` times their number, if it does not begin its segment; the others have
    the first row of a segment. The block that begins a segment is not counted.
    """
    program = tl.program_id(0)
    num_groups = tl.cdiv(num_windows, ROW)
    if program < num_groups:
        window = program * ROW
        segment, behind, exists = block_of_window(
            chunks, cu_seqlens, num_segments, num_chunks, window, BLOCK
        )
        begin, end, _, _, _ = span_of(chunks, cu_seqlens, segment)
        row = behind // ROW
        is_whole = exists & ((row + 1) * ROW <= (end - begin - 1) // BLOCK)
        blocks = tl.where(is_whole, ROW, 0)
    else:
        segment = program - num_groups
        begin, end, _, _, _ = span_of(chunks, cu_seqlens, segment)
        blocks = tl.maximum(end - begin - 1, 0) // BLOCK
        row = blocks // ROW
        blocks -= row * ROW
    return segment, row, (end - 1) // BLOCK - row * ROW, blocks


@triton.jit(do_not_specialize=["num_segments", "num_chunks", "num_windows"])
def fold_rows_kernel(
    chunks, steps, carries, rows, cu_seqlens, gammas, bootstrap, num_segments, num_chunks,
    num_windows, gamma: tl.float64, ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold the blocks of a row: write the effect of those behind each block, and of the whole row.

    In a segment's last row the state behind is known: there the increments are states.
    """
    segment, row, window, blocks = row_of(
        chunks, cu_seqlens, num_segments, num_chunks, num_windows, ROW, BLOCK
    )
    if blocks > 0:
        lane = tl.arange(0, ROW)
        own = steps + 2 * (window - lane)
        decays = tl.load(own, mask=lane < blocks, other=1.0)
        increments = tl.load(own + 1, mask=lane < blocks, other=0.0)
        total_decay = tl.full((ROW,), 1.0, tl.float64)
        total = tl.zeros((ROW,), tl.float64)
        if row == 0:
            _span, _rates, tail = segment_of(
                chunks, cu_seqlens, (gammas, None), bootstrap, segment, gamma, 0.0
            )
            total += tail
        behind_decay = total_decay
        behind = total
        for done in range(blocks):
            here = lane == done
            behind_decay = tl.where(here, total_decay, behind_decay)
            behind = tl.where(here, total, behind)
            decay = spread_entry(decays, done, ROW)
            total = add_carry(spread_entry(increments, done, ROW), decay, total)
            total_decay *= decay
        own = carries + 2 * (window - lane)
        tl.store(own, behind_decay, mask=lane < blocks)
        tl.store(own + 1, behind, mask=lane < blocks)
        # the segment's first block has no window of its own
        own = carries + 2 * (num_windows + segment) + tl.zeros_like(lane)
        is_first = (lane == 0) & (blocks < ROW)
        tl.store(own, total_decay, mask=is_first)
        tl.store(own + 1, total, mask=is_first)
        whole = rows + 2 * (window // ROW) + tl.zeros_like(lane)
        is_whole = (lane == 0) & (blocks == ROW)
        tl.store(whole, total_decay, mask=is_whole)
        tl.store(whole + 1, total, mask=is_whole)


@triton.jit
def carry_on(first_decay, first_increment, second_decay, second_increment):
    increment = add_carry(second_increment, second_decay, first_increment)
    return first_decay * second_decay, increment


@triton.jit
def state_of_row(rows, window, row, state, ROW: tl.constexpr):
    """Return the state behind a row, from those of the rows behind it: the last has a state."""
    lane = tl.arange(0, ROW)
    done = 0
    while done < row:
        known = done + lane < row
        own = rows + 2 * (window // ROW - done - lane)
        decay = tl.load(own, mask=known, other=1.0)
        increment = tl.load(own + 1, mask=known, other=0.0)
        decay = tl.where(done + lane == 0, 0.0, decay)
        decay, increment = tl.associative_scan((decay, increment), 0, carry_on)
        increment = spread_entry(increment, ROW - 1, state.shape[0])
        decay = spread_entry(decay, ROW - 1, state.shape[0])
        state = add_carry(increment, decay, state)
        done += ROW
    return state


@triton.jit(do_not_specialize=["num_segments", "num_chunks", "num_windows", "num_tokens"])
def block_states_kernel(
    source, weights, before, outputs, carries, rows, cu_seqlens, rates, bootstrap, fill_ids,
    num_segments, num_chunks, num_windows, num_tokens, gamma: tl.float64, lam: tl.float64,
    kl_coefficient: tl.float64, kl_clamp: tl.float64, reward_clip: tl.float64,
    rho_clip: tl.float64, c_clip: tl.float64, advantage_rho_clip: tl.float64,
    FORM: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one block: of a window, then the first of each segment; later programs fill with 0."""
    limits = (kl_coefficient, kl_clamp, reward_clip, rho_clip, c_clip, advantage_rho_clip)
    inputs = (source, limits, weights, before)
    chunks = source[3]
    program = tl.program_id(0)
    if program < num_windows + num_segments:
        if program < num_windows:
            number, behind, exists = block_of_window(
                chunks, cu_seqlens, num_segments, num_chunks, program, BLOCK
            )
        else:
            number = program - num_windows
            begin, end, _, _, _ = span_of(chunks, cu_seqlens, number)
            behind = tl.maximum(end - begin - 1, 0) // BLOCK
            exists = end > begin
        if exists:
            segment = segment_of(chunks, cu_seqlens, rates, bootstrap, number, gamma, lam)
            end = segment[0][1]
            state = tl.zeros((BLOCK // 4,), tl.float64)
            row = behind // ROW
            if FORM[0] <= NEXT_VALUES:
                state += tl.where(row == 0, segment[2], 0.0)
            state = state_of_row(rows, (end - 1) // BLOCK, row, state, ROW)
            if behind > row * ROW:
                own = carries + 2 * program
                carried = tl.load(own + 1)
                if row == 0:
                    state = tl.zeros_like(state) + carried
                else:
                    state = add_carry(carried, tl.load(own), state)
            write_block(inputs, outputs, segment, end - behind * BLOCK, state, None, FORM, BLOCK)
    elif fill_ids is not None:
        tile = program - num_windows - num_segments
        fill_with_zeros(outputs, fill_ids, tile, num_tokens, BLOCK)


def credit_scan_forward(scan: Scan) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a scan; see `trajpack.kernels.scan.credit_scan.run_scan`."""
    before = None
    if scan.kind == "vtrace" and scan.chunks is None:
        before = torch.empty(scan.num_positions, dtype=torch.float64, device=scan.device)
        launch(scan._replace(kind="next_values"), None, (before, None))
    first = torch.empty(scan.num_tokens, dtype=torch.float32, device=scan.device)
    if scan.kind in ("returns", "adjoint"):
        launch(scan, before, (first, None))
        return first, first.new_empty(0)
    second = torch.empty_like(first)
    launch(scan, before, (first, second))
    return first, second


def launch(scan: Scan, before: torch.Tensor | None, outputs: Outputs) -> None:
    """Launch one kernel or three, by the sizes that the host knows."""
    if not scan.num_tokens:
        return
    longest = scan.num_positions if scan.max_seqlen is None else scan.max_seqlen
    if min(scan.num_positions, longest) <= LONGEST_WALK:
        walk_segments(scan, before, outputs)
    else:
        scan_blocks(scan, before, outputs)


def walk_segments(scan: Scan, before: torch.Tensor | None, outputs: Outputs) -> None:
    """Launch one program per segment, or per as many short ones as fill about two blocks."""
    share = 1
    if scan.lams is None:
        entries = scan.num_positions + 3 * scan.num_segments  # a segment begins in a lane of four
        share = max(2 * BLOCK * scan.num_segments // max(entries, 1), 1)
    programs = triton.cdiv(scan.num_segments, share)
    _launch_writing(walk_kernel, programs, scan, before=before, outputs=outputs, share=share)


def scan_blocks(scan: Scan, before: torch.Tensor | None, outputs: Outputs) -> None:
    """Launch one program per block for its effect, one per row, and one per block to write."""
    carries, rows = fold_rows(scan, steps_of_blocks(scan, before))
    write_blocks(scan, before, outputs, carries=carries, rows=rows)


def steps_of_blocks(scan: Scan, before: torch.Tensor | None) -> torch.Tensor:
    """Launch one program per window; return float64 ``[windows, 2]``, set where a block ends."""
    windows = triton.cdiv(scan.num_positions, BLOCK)
    steps = torch.empty((windows, 2), dtype=torch.float64, device=scan.device)
    with torch.cuda.device_of(scan.cu_seqlens):  # Triton launches on the current device
        block_steps_kernel[(windows,)](
            before=before, steps=steps, num_chunks=scan.num_chunks, **_arguments(scan)
        )
    return steps


def fold_rows(scan: Scan, steps: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch one program per row: return what is behind each block in its row, and whole rows."""
    windows = steps.shape[0]
    groups = triton.cdiv(windows, ROW)
    carries, rows = (steps.new_empty((size, 2)) for size in (windows + scan.num_segments, groups))
    starts = scan.kind not in ("vtrace", "adjoint")  # whose state behind the last token is 0
    with torch.cuda.device_of(scan.cu_seqlens):
        fold_rows_kernel[(groups + scan.num_segments,)](
            chunks=_chunks(scan),
            steps=steps,
            carries=carries,
            rows=rows,
            cu_seqlens=scan.cu_seqlens,
            gammas=scan.gammas if starts else None,
            bootstrap=scan.bootstrap if starts else None,
            num_segments=scan.num_segments,
            num_chunks=scan.num_chunks,
            num_windows=windows,
            gamma=scan.gamma,
            ROW=ROW,
            BLOCK=BLOCK,
            **launch_on("credit_scan", scan.cu_seqlens.get_device()).options,
        )
    return carries, rows


def write_blocks(
    scan: Scan,
    before: torch.Tensor | None,
    outputs: Outputs,
    *,
    carries: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """Launch one program per window and one per segment."""
    programs = carries.shape[0]
    own = {"carries": carries, "rows": rows, "num_windows": programs - scan.num_segments}
    own |= {"num_chunks": scan.num_chunks, "ROW": ROW}
    _launch_writing(block_states_kernel, programs, scan, before=before, outputs=outputs, **own)


def _launch_writing(kernel: Any, programs: int, scan: Scan, **own: Any) -> None:
    """Launch a kernel that writes outputs: tiles of 0 are added where no chunk writes."""
    fill_ids, tiles = scan.turn_ids, triton.cdiv(scan.num_tokens, BLOCK)
    if fill_ids is None or scan.by_turn or scan.kind == "next_values":
        fill_ids, tiles = None, 0
    with torch.cuda.device_of(scan.cu_seqlens):
        kernel[(programs + tiles,)](
            fill_ids=fill_ids, num_tokens=scan.num_tokens, **own, **_arguments(scan)
        )


def _chunks(scan: Scan) -> tuple[Any, ...] | None:
    """Return the chunks as the kernels take them."""
    if scan.chunks is None:
        return None
    begins, truncated = scan.chunks.begins, scan.chunks.truncated
    # empty tuples in place of None: Triton 3.6 cannot compare a tuple that holds a None
    return (
        scan.chunks.cu_positions,
        begins,
        begins.stride(0),
        scan.chunks.spans,
        scan.chunks.rewards,
        (1,) if scan.by_turn else (),
        () if truncated is None else (truncated.view(torch.uint8),),
    )


def _arguments(scan: Scan) -> dict[str, Any]:
    """Return the arguments that the kernels over tokens share, and the options of a launch."""
    mask = None if scan.loss_mask is None else scan.loss_mask.view(torch.uint8)
    return {
        "source": (scan.rewards, scan.values, mask, _chunks(scan), scan.kl),
        "weights": scan.weights,
        "cu_seqlens": scan.cu_seqlens,
        "rates": (scan.gammas, scan.lams),
        "bootstrap": scan.bootstrap,
        "num_segments": scan.num_segments,
        "gamma": scan.gamma,
        "lam": scan.lam,
        **scan.limits._asdict(),
        "FORM": (
            KINDS.index(scan.kind),
            OBSERVATIONS.index(scan.observation),
            0 if scan.estimator is None else KL_ESTIMATORS.index(scan.estimator) + 1,
        ),
        "BLOCK": BLOCK,
        **launch_on("credit_scan", scan.cu_seqlens.get_device()).options,
    }
