# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
"""Triton kernels of the scan over tokens: blocks of a segment, folded from its end.

A block is ``BLOCK`` entries of one warp, ``EACH`` neighbours to a lane, at reversed addresses, so
that the scan runs forward. A lane composes its entries, the lanes are composed in rounds of
doubling reach, and the state behind the block enters every lane. Meanwhile the next block loads,
where there are no chunks.
Short segments lie side by side in a block, each in as many lanes as hold its entries. A round joins
two lanes only within a segment, so a segment's bits are those of a block of its own.

States, decays and increments are float64; results are rounded once, to float32.

One launch scans segments of up to ``LONGEST_WALK`` entries, block after block. Where longer ones
may be, a launch before it finds the effect on the state of each of their rows of ``ROW`` entries;
then a program for each row folds the effects of the rows behind it, in an order that depends on the
segment alone. There are no atomic operations.

Positions count the scanned tokens, segment after segment. Without chunks a position is the
token's own index; with chunks it is looked up among the chunks' first positions.

The kernels pass these tuples on, in which an input that is not given is ``None`` or ``()``:

- ``source``: rewards, values, loss mask, chunks, log-probabilities of the KL penalty, and those of
  the importance ratios;
- ``chunks``: first positions, first tokens, stride of these, spans, rewards, ``((),)`` if a chunk
  is one action;
- ``owners``: first and last chunk of a program's block, the last chunk of each lane's segment,
  whether each of these segments has one chunk, and the entries behind the block;
- ``segments``: boundaries, γ and λ of each segment, bootstrap, γ and λ of all;
- ``inputs``: source, segments, limits, and a 1 that the compiler does not know, for `widen`.

V-trace has two states: the discounted value that follows, and the trace. ``FORM`` holds the numbers
of the kind of scan, of the observation and of the KL penalty's estimator.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from trajpack.kernels.block_shapes import block_shape
from trajpack.kernels.corrections.penalties import KL_ESTIMATORS
from trajpack.kernels.launches import Launch, cdiv, launch_on
from trajpack.kernels.scan.observations import OBSERVATIONS
from trajpack.kernels.scan.scan_inputs import KINDS, Limits, Scan
from trajpack.kernels.search_triton import find_segment, find_segments

BLOCK = block_shape("credit_scan").block
"""Entries of a block. The same on every architecture, because it fixes the order of sums."""
ROW = 4 * BLOCK
"""Entries of a row: a long segment is cut into rows, counted from its end, of a program each."""
LONGEST_WALK = 16 * BLOCK
"""Longest segment that one program scans."""
EACH = tl.constexpr(8)
"""Entries of a lane."""
LANE_SHIFT = tl.constexpr(3)
"""Logarithm of EACH."""
LANES = tl.constexpr(32)
"""Most segments of a program; lanes that fold the effects of rows."""
FILLED = tl.constexpr(4)
"""Blocks of a program that fills with 0."""
AT_ONCE = tl.constexpr(4)
"""Rows of a lane whose effects are loaded together."""

CARRY, CARRY_DROP, COMPACT, IGNORE, MULTIPLY, RESET = (
    tl.constexpr(number) for number in range(len(OBSERVATIONS))
)
"""Observations, by their index in `OBSERVATIONS`."""
SHARED = ("cu_seqlens", "bootstrap", "num_segments", "num_chunks", "gamma", "lam")
"""Arguments of the kernels that a `Scan` has by the same name."""
GAE, RETURNS, VTRACE, ADJOINT = (tl.constexpr(number) for number in range(len(KINDS)))
"""Kinds of scan, by their index in `KINDS`."""


@triton.jit
def split_entries(entries, COUNT: tl.constexpr):
    """Return the first of every ``COUNT`` neighbours, the second, ..."""
    if COUNT == 1:
        return (entries,)
    else:
        evens, odds = tl.split(tl.reshape(entries, [entries.shape[0] // 2, 2]))
        evens = split_entries(evens, COUNT // 2)
        odds = split_entries(odds, COUNT // 2)
        parts = ()
        for at in tl.static_range(COUNT // 2):
            parts = parts + (evens[at], odds[at])
        return parts


@triton.jit
def join_entries(parts, COUNT: tl.constexpr):
    """Join ``[lanes]`` tensors to ``[2, 2, .., lanes]``, the lowest bit of their number first.

    With lanes last, the compiler keeps all parts in the registers of their threads.
    """
    if COUNT == 1:
        return parts[0]
    else:
        evens = ()
        odds = ()
        for at in tl.static_range(COUNT // 2):
            evens = evens + (parts[2 * at],)
            odds = odds + (parts[2 * at + 1],)
        pairs = tl.join(join_entries(evens, COUNT // 2), join_entries(odds, COUNT // 2))
        if COUNT == 2:
            return tl.permute(pairs, 1, 0)
        elif COUNT == 4:
            return tl.permute(pairs, 2, 0, 1)
        else:
            return tl.permute(pairs, 3, 0, 1, 2)


@triton.jit
def add_carry(increment, decay, state):
    """Return ``increment + decay * state``; a state of 0 adds 0 where ``decay`` has overflowed."""
    return tl.fma(tl.where(state == 0, 0.0, decay), state, increment)


@triton.jit
def last_of(lanes):
    """Return the last lane's entry in every lane: one shuffle within a warp."""
    return tl.gather(lanes, tl.full(lanes.shape, lanes.shape[0] - 1, tl.int32), 0)


@triton.jit
def scan_block(weight, increment, rate, place, state, FORM: tl.constexpr):
    """Compose the steps of a block, last token first.

    ``weight`` [entries] is the factor of the decay beside ``rate``, below 0 where the state passes;
    ``None`` stands for 1. ``place`` is the number of lanes of the same segment before each lane,
    ``state`` the state behind the block; both, and ``rate``, have an entry for each lane.
    Return the state behind each entry, and decay and increment of the whole block in every lane.
    """
    tl.static_assert(place.shape[0] <= 32, "five rounds compose 32 lanes")
    lane = tl.arange(0, place.shape[0])
    increments = split_entries(increment, EACH)
    decays = ()
    decay = tl.full(place.shape, 1.0, tl.float64)
    if weight is None:
        for _ in tl.static_range(EACH):
            decays = decays + (rate,)
            decay *= rate
    else:
        weights = split_entries(weight, EACH)
        for at in tl.static_range(EACH):
            own = rate
            if FORM[0] == VTRACE:
                own = rate * weights[at]
            elif FORM[1] == RESET:
                own = tl.where(weights[at] == 0, 0.0, rate)
            own = tl.where(weights[at] < 0, 1.0, own)
            decays = decays + (own,)
            decay *= own
    total = increments[0]
    for at in tl.static_range(1, EACH):
        total = tl.fma(decays[at], total, increments[at])
    for doubling in tl.static_range(5):
        if 1 << doubling < place.shape[0]:
            before = tl.maximum(lane - (1 << doubling), 0)
            joins = place >= 1 << doubling
            carry = tl.gather(total, before, 0)
            carried = tl.fma(decay, carry, total)
            total = tl.where(joins & (carry != 0), carried, total)
            decay = tl.where(joins, decay * tl.gather(decay, before, 0), decay)
    before = tl.maximum(lane - 1, 0)
    behind = tl.where(place == 0, 0.0, tl.gather(total, before, 0))
    current = tl.where(place == 0, 1.0, tl.gather(decay, before, 0))
    current = add_carry(behind, current, state)
    states = (current,)
    for at in tl.static_range(EACH - 1):
        current = tl.fma(decays[at], current, increments[at])
        states = states + (current,)
    entries = tl.permute(join_entries(states, EACH), 3, 2, 1, 0)
    entries = tl.reshape(entries, increment.shape)  # undoes `split_entries`
    return entries, last_of(decay), last_of(total)


@triton.jit
def clip_symmetric(number, bound):
    # keeps NaN, which minimum and maximum would drop on hardware
    return tl.where(number > bound, bound, tl.where(number < -bound, -bound, number))


@triton.jit
def clip_ratio(ratio, generated, cap):
    """Return min(ratio, cap) of generated tokens, 1 of others."""
    return tl.where(generated, tl.where(ratio > cap, cap, ratio), 1.0)


@triton.jit
def difference(pair, at, known):
    """Return what the first tensor has at tokens less what the second has, in float64."""
    first, second = pair
    ours = tl.load(first + at, mask=known, other=0.0).to(tl.float64)
    return ours - tl.load(second + at, mask=known, other=0.0).to(tl.float64)


@triton.jit
def kl_penalty(kl, limits, at, generated, ESTIMATOR: tl.constexpr):
    """Return the weighted KL estimate of tokens; ``ESTIMATOR`` 1 to 3 is k1 to k3."""
    ratio = difference(kl, at, generated)
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
def read_chunks(chunks, position, exists, owners, clip):
    """Return token, first generated token of its chunk, and reward at each position.

    A chunk's reward is on its last generated token, with the rewards of the chunks behind it that
    generated nothing.
    """
    cu_positions, addresses, stride, spans, rewards, _by_turn = chunks
    first, last, own_last, has_one_each, start = owners
    BLOCK: tl.constexpr = position.shape[0]
    if has_one_each:  # the chunk of a lane's entries is known: its numbers are read once a lane
        moved = tl.load(addresses + own_last * stride) - tl.load(cu_positions + own_last)
        at = position + at_entries(moved, start, BLOCK)
        begin = at_entries(tl.load(spans + own_last * 2), start, BLOCK)
        end = at_entries(tl.load(spans + own_last * 2 + 1), start, BLOCK)
        reward = tl.zeros(position.shape, tl.float64)
        ends_turn = exists & (at >= begin) & (at == end - 1)
        if tl.max(ends_turn.to(tl.int32), 0) > 0:
            own = clip_symmetric(tl.load(rewards + own_last), clip)
            reward = tl.where(ends_turn, at_entries(own, start, BLOCK), 0.0)
    else:
        last_own = at_entries(own_last, start, BLOCK)
        chunk = find_segments(cu_positions, first, last, position, 1)
        begins = tl.load(cu_positions + chunk, mask=exists, other=0)
        at = tl.load(addresses + chunk * stride, mask=exists, other=0) + position - begins
        begin = tl.load(spans + chunk * 2, mask=exists, other=0)
        end = tl.load(spans + chunk * 2 + 1, mask=exists, other=0)
        ends_turn = exists & (at >= begin) & (at == end - 1)
        reward = clip_symmetric(tl.load(rewards + chunk, mask=ends_turn, other=0.0), clip)
        chunk += 1
        open_ended = ends_turn & (chunk <= last_own)
        while tl.max(open_ended.to(tl.int32), 0) > 0:
            next_begin = tl.load(spans + chunk * 2, mask=open_ended, other=0)
            next_end = tl.load(spans + chunk * 2 + 1, mask=open_ended, other=1)
            open_ended &= next_begin == next_end
            more = tl.load(rewards + chunk, mask=open_ended, other=0.0)
            reward += clip_symmetric(more, clip)
            chunk += 1
            open_ended &= chunk <= last_own
    return at, begin, reward


@triton.jit
def load_entries(inputs, entries):
    """Return what memory has of tokens that are positions: reward; value; loss mask."""
    rewards, values, loss_mask, _chunks, _kl, _ratios = inputs[0]
    loaded = ()
    if rewards is not None:
        loaded = loaded + (tl.load(rewards + entries[0], mask=entries[1], other=0.0),)
        if values is not None:
            loaded = loaded + (tl.load(values + entries[0], mask=entries[1], other=0.0),)
        if loss_mask is not None:
            loaded = loaded + (tl.load(loss_mask + entries[0], mask=entries[1], other=0),)
    return loaded


@triton.jit
def read_entries(inputs, entries, loaded, FORM: tl.constexpr):
    """Return token, and whether it was generated; reward and value of what exists, else 0.

    ``loaded`` is what `load_entries` returns. Reward and value have the dtypes of memory.
    """
    _rewards, values, loss_mask, chunks, kl, _ratios = inputs[0]
    limits = inputs[2]
    position, exists, _is_last, owners, _gamma, _lam = entries
    if chunks is None:
        at = position
        generated = exists
        if loss_mask is not None:
            generated = exists & (loaded[len(loaded) - 1] != 0)
        reward = loaded[0]
        value = reward
        if values is not None:
            value = loaded[1]
    else:
        at, begin, reward = read_chunks(chunks, position, exists, owners, limits[2])
        generated = exists & (at >= begin)
        if kl is not None:
            reward -= kl_penalty(kl, limits, at, generated, FORM[2])
        if len(chunks[5]) > 0:
            generated = exists & (at == begin)
        value = reward
        if values is not None:
            value = tl.load(values + at, mask=exists, other=0.0)
    return at, generated, reward, value


@triton.jit
def widen(rows, generated, values, one, FORM: tl.constexpr):
    """Return rewards and values in float64, as the observation has them.

    ``one`` is 1. With one that the compiler does not know, results are made of numbers that are
    widened again: in float64 they would take twice the registers throughout the scan.
    """
    reward = (rows[0] * one).to(tl.float64)
    value = tl.zeros_like(reward)
    if values is not None:
        value = (rows[1] * one).to(tl.float64)
    if FORM[1] == MULTIPLY:
        reward = tl.where(generated, reward, 0.0)
        value = tl.where(generated, value, 0.0)
    return reward, value


@triton.jit
def passed_on(reward, is_last, OBSERVATION: tl.constexpr):
    """Return the rewards that skipped tokens pass to the last generated token before them."""
    if OBSERVATION == CARRY:
        return reward
    elif OBSERVATION == COMPACT:
        return tl.where(is_last, reward, 0.0)
    else:
        return tl.zeros_like(reward)


@triton.jit
def observe(generated, increment, passed, weight, OBSERVATION: tl.constexpr):
    """Return increment and weight of the decay, as the convention has them where not generated."""
    if OBSERVATION <= COMPACT:
        increment = tl.where(generated, increment, passed)
        weight = tl.where(generated, weight, -1)
    elif OBSERVATION == RESET:
        weight = tl.where(generated, weight, 0)
    return increment, weight


@triton.jit
def steps_of_vtrace(inputs, outputs, entries, lanes, state, steps, FORM: tl.constexpr):
    """Return increment and weight of the trace; what results are made of; effect on ``state``.

    ``state`` is the value that follows the block, ``steps`` what `read_entries` returns, widened.
    The effect is decay and increment, and the factor in the trace, which is 0 if there are
    ``outputs``.
    """
    at, generated, reward, value = steps
    gamma, lam = entries[4], entries[5]
    limits = inputs[2]
    place, rate = lanes
    nothing = tl.zeros_like(reward)
    ratio = tl.exp(difference(inputs[0][5], at, generated))
    rho = clip_ratio(ratio, generated, limits[3])
    c = clip_ratio(ratio, generated, limits[4])
    passed = passed_on(reward, entries[2], FORM[1])
    increment, passes = observe(generated, gamma * value, passed, nothing, FORM[1])
    following, decay, total = scan_block(passes, increment, rate, place, state, FORM)
    factor = tl.zeros_like(decay)
    if len(outputs) == 0:
        start = tl.zeros_like(decay)
        share, _, _ = scan_block(passes, nothing, rate, place, start + 1.0, FORM)
        share *= gamma * rho
        if FORM[1] == RESET:
            share = tl.where(generated, share, 0.0)
        share, weight = observe(generated, share, nothing, c, FORM[1])
        _, _, factor = scan_block(weight, share, rate, place, start, FORM)
    if FORM[1] == RESET:
        following = tl.where(generated, following, 0.0)
    surprise = reward + following - value
    increment, weight = observe(generated, gamma * rho * surprise, nothing, c, FORM[1])
    traced = clip_ratio(ratio, generated, limits[5]), surprise, value + rho * surprise, lam * c
    return increment, weight, traced, (decay, total, factor)


@triton.jit
def scan_entries(inputs, outputs, entries, loaded, lanes, states, FORM: tl.constexpr):
    """Scan the entries of a block, and write their results if there are ``outputs``.

    ``loaded`` is what `load_entries` returns, ``lanes`` are place and decay rate of each lane,
    ``states`` the two states behind the block.
    Return the effect of the block: decay and increment of the first state; decay and increment of
    the second, and its factor in the first.
    """
    at, generated, reward, value = read_entries(inputs, entries, loaded, FORM)
    rows = reward, value
    reward, value = widen(rows, generated, inputs[0][1], 1.0, FORM)
    steps = at, generated, reward, value
    _position, exists, is_last, _owners, gamma, lam = entries
    place, rate = lanes
    nothing = tl.zeros_like(reward)
    one = tl.full(reward.shape, 1, tl.int32)
    traced = ()
    of_second = ()
    if FORM[0] == VTRACE:
        increment, weight, traced, of_second = steps_of_vtrace(
            inputs, outputs, entries, lanes, states[1], steps, FORM
        )
    elif FORM[0] == ADJOINT:
        own = tl.where(generated, reward, 0.0)
        increment, weight = observe(generated, own, nothing, one, FORM[1])
    else:
        own = gamma * (1.0 - lam) * value
        own = tl.fma(nothing + gamma * lam, reward, own)
        passed = passed_on(reward, is_last, FORM[1])
        increment, weight = observe(generated, own, passed, one, FORM[1])
    states, decay, total = scan_block(weight, increment, rate, place, states[0], FORM)
    if len(outputs) > 0:
        if FORM[0] == ADJOINT:  # mirrored: a sequence's last token comes first
            factor = gamma * lam + tl.zeros_like(reward)
            if FORM[1] == CARRY:
                factor = tl.where(generated, factor, 1.0)
            elif FORM[1] == COMPACT:
                factor = tl.where(generated, factor, tl.where(is_last, 1.0, 0.0))
            elif FORM[1] != IGNORE and FORM[1] != RESET:
                factor = tl.where(generated, factor, 0.0)
            first = tl.where(generated, reward, 0.0) + factor * states
        else:
            if FORM[0] == VTRACE:
                capped, surprise, target, trace = traced  # type: ignore[misc]
                first = capped * (surprise + states)
                second = target + trace * states
            else:
                reward, value = widen(rows, generated, inputs[0][1], inputs[3], FORM)
                second = reward + states
                first = second - value
            first = tl.where(generated, first, 0.0)
        written = generated if inputs[0][3] is not None else exists
        tl.store(outputs[0] + at, first.to(tl.float32), mask=written)
        if len(outputs) > 1:
            second = tl.where(generated, second, 0.0)
            tl.store(outputs[1] + at, second.to(tl.float32), mask=written)
    return (decay, total) + of_second


@triton.jit
def carry_on(effect, states):
    """Return the states before a stretch of entries, from its effect and the states behind it."""
    increment = effect[1]
    second = states[1]
    if len(effect) > 2:
        increment = add_carry(increment, effect[4], second)
        second = add_carry(effect[3], effect[2], second)
    return add_carry(increment, effect[0], states[0]), second


@triton.jit
def span_of(chunks, cu_seqlens, segment):
    """Return a segment's first and past-last position, and its first and past-last chunk."""
    first = tl.load(cu_seqlens + segment)
    past = tl.load(cu_seqlens + segment + 1)
    begin = first
    end = past
    if chunks is not None:
        begin = tl.load(chunks[0] + first)
        end = tl.load(chunks[0] + past)
    return begin, end, first, past


@triton.jit
def hold_segments(inputs, number, past, BLOCK: tl.constexpr):
    """Return what `lay_out` takes of the ``LANES`` segments from ``number`` on: ``[LANES]`` each.

    These are first and past-last position, number of chunks, last chunk, and how many lanes a
    segment takes alone and with those before it. Segments from ``past`` on have no entries.
    """
    segment = number + tl.arange(0, LANES)
    is_given = segment < past
    given = tl.minimum(segment, past - 1)
    begin, end, first_chunk, past_chunk = span_of(inputs[0][3], inputs[1][0], given)
    end = tl.where(is_given, end, begin)
    taken = tl.minimum(tl.cdiv(end - begin, EACH), BLOCK // EACH + 1)
    last_chunk = tl.maximum(past_chunk - 1, 0)
    return begin, end, past_chunk - first_chunk, last_chunk, taken, tl.cumsum(taken, 0)


@triton.jit
def rates_of(inputs, segment):
    """Return γ, λ and the state behind each segment."""
    _cu_seqlens, gammas, lams, bootstrap, gamma, lam = inputs[1]
    if gammas is not None:
        gamma = tl.load(gammas + segment)
    if lams is not None:
        lam = tl.load(lams + segment)
    tail = tl.zeros(segment.shape, tl.float64)
    if bootstrap is not None:
        tail = gamma * tl.load(bootstrap + segment).to(tl.float64)
    return gamma, lam, tail


@triton.jit
def lay_out(inputs, held, first, number, past, BLOCK: tl.constexpr):
    """Lay the segments from ``number`` on side by side in a block, as long as they fit.

    A segment takes as many lanes as hold its entries; a longer one takes all, and stands alone.
    ``held`` is what `hold_segments` returns for ``first``. Return what `entries_of` takes; place
    and decay rate of each lane; the state behind its segment; the number of segments.
    """
    WIDTH: tl.constexpr = BLOCK // EACH
    chunks, cu_seqlens = inputs[0][3], inputs[1][0]
    begin, end, num_chunks, own_last, taken, behind = held
    lane = tl.arange(0, WIDTH)
    place = lane
    owner = tl.full((WIDTH,), 0, tl.int32) + (number - first)
    owned = owner >= 0
    count = 1
    if past - first > 1:
        held_lane = tl.arange(0, LANES)
        reach = behind - tl.sum(tl.where(held_lane < number - first, taken, 0), 0)
        fits = (reach <= WIDTH) & (held_lane >= number - first) & (first + held_lane < past)
        count = tl.maximum(tl.sum(fits.to(tl.int32), 0), 1)
        owner = tl.zeros_like(lane)
        for halving in tl.static_range(5):
            half = 16 >> halving
            owner += tl.where(tl.gather(reach, owner + (half - 1), 0) <= lane, half, 0)
        last = tl.gather(reach, owner, 0)
        owned = (first + owner < number + count) & (lane < last)
        place = tl.where(owned, lane - last + tl.gather(taken, owner, 0), 0)
    begin = tl.gather(begin, owner, 0)
    end = tl.where(owned, tl.gather(end, owner, 0), begin)
    own_last = tl.gather(own_last, owner, 0)
    gamma, lam, tail = rates_of(inputs, tl.minimum(first + owner, past - 1))
    rate = gamma * lam + tl.zeros_like(tail)
    top = end - 1 - place * EACH
    owners = ()
    if chunks is not None:
        first_chunk = tl.load(cu_seqlens + number)
        after = tl.load(cu_seqlens + tl.minimum(number + count, past))
        has_one_each = tl.max(tl.where(owned, tl.gather(num_chunks, owner, 0), 0), 0) == 1
        owners = first_chunk, tl.maximum(after - 1, first_chunk), own_last, has_one_each
    top = at_entries(top, 0, BLOCK) - (tl.arange(0, BLOCK) & (EACH - 1))
    begin, end = at_entries(begin, 0, BLOCK), at_entries(end, 0, BLOCK)
    return (top, begin, end, owners, gamma, lam), (place, rate), tail, count


@triton.jit
def at_entries(lanes, start, BLOCK: tl.constexpr):
    """Return the number of each entry's lane.

    ``start`` is 0 or more. One that changes in a loop keeps the compiler from holding all of the
    entries' numbers in registers throughout the loop.
    """
    return tl.gather(lanes, (tl.arange(0, BLOCK) >> LANE_SHIFT) + (start >> 31), 0)


@triton.jit
def entries_of(inputs, laid, start, FORM: tl.constexpr):
    """Return what `scan_entries` takes, ``start`` entries before the tops."""
    top, begin, end, owners, gamma, lam = laid
    owners = owners + (start,)
    if inputs[1][1] is not None:
        gamma = at_entries(gamma, start, top.shape[0])
    if inputs[1][2] is not None:
        lam = at_entries(lam, start, top.shape[0])
    position = top - start
    is_last = position == end - 1
    if FORM[0] == ADJOINT:  # mirrored: a sequence's last token comes first
        is_last = position == begin
    return position, position >= begin, is_last, owners, gamma, lam


@triton.jit
def row_of_window(chunks, cu_seqlens, num_segments, num_chunks, window, SIZES: tl.constexpr):
    """Find the row that ends in a window, if it is of a long segment and does not begin it.

    Window w is the positions [w * ROW, (w + 1) * ROW). The window's first position belongs to the
    segment of such a row, so there is at most one per window. Return its segment, the number of
    entries behind it, and whether it exists. ``SIZES`` are those of a block, a row and the longest
    walk.
    """
    ROW: tl.constexpr = SIZES[1]
    if chunks is None:
        segment = find_segment(cu_seqlens, num_segments, window * ROW, 1)
    else:
        chunk = find_segment(chunks[0], num_chunks, window * ROW, 1)
        segment = find_segment(cu_seqlens, num_segments, chunk, 1)
    begin, end, _, _ = span_of(chunks, cu_seqlens, segment)
    behind = ((end - 1) // ROW - window) * ROW
    exists = (end > window * ROW) & (end - behind - begin > ROW) & (end - begin > SIZES[2])
    return segment, behind, exists


@triton.jit
def no_effect(LANES: tl.constexpr, FORM: tl.constexpr):
    """Return the effect of no entry, which `together` and `carry_on` take."""
    one, zero = tl.full((LANES,), 1.0, tl.float64), tl.zeros((LANES,), tl.float64)
    if FORM[0] == VTRACE:
        return one, zero, one, zero, zero
    else:
        return one, zero


@triton.jit
def together(effect, following):
    """Compose the effects of two stretches of entries, of which the first is applied first."""
    if len(effect) == 2:
        return effect[0] * following[0], add_carry(following[1], following[0], effect[1])
    else:
        first, second = carry_on(following, (effect[1], effect[3]))
        factor = add_carry(following[4] * effect[2], following[0], effect[4])
        return effect[0] * following[0], first, effect[2] * following[2], second, factor


@triton.jit
def together_of_one(a, b, c, d):
    return together((a, b), (c, d))


@triton.jit
def together_of_two(a, b, c, d, e, f, g, h, i, j):
    return together((a, b, c, d, e), (f, g, h, i, j))


@triton.jit(do_not_specialize=["num_segments", "num_chunks"])
def effects_kernel(
    source, effects, cu_seqlens, rates, bootstrap, num_segments, num_chunks, gamma: tl.float64,
    lam: tl.float64, kl_coefficient: tl.float64, kl_clamp: tl.float64, reward_clip: tl.float64,
    rho_clip: tl.float64, c_clip: tl.float64, advantage_rho_clip: tl.float64,
    FORM: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """Write the effect on the state of the row of one window, if it has one."""
    limits = (kl_coefficient, kl_clamp, reward_clip, rho_clip, c_clip, advantage_rho_clip)
    one = (num_segments > 0).to(tl.float32)
    inputs = (source, (cu_seqlens, rates[0], rates[1], bootstrap, gamma, lam), limits, one)
    LANES: tl.constexpr = SIZES[0] // EACH
    window = tl.program_id(0)
    number, start, exists = row_of_window(
        source[3], cu_seqlens, num_segments, num_chunks, window, SIZES
    )
    if exists:
        held = hold_segments(inputs, number, number + 1, SIZES[0])
        laid, lanes, tail, _ = lay_out(inputs, held, number, number, number + 1, SIZES[0])
        states = tl.zeros_like(tail), tl.zeros_like(tail)
        total = no_effect(LANES, FORM)
        loaded = load_entries(inputs, entries_of(inputs, laid, start, FORM))
        for done in range(0, SIZES[1], SIZES[0]):
            entries = entries_of(inputs, laid, start + done, FORM)
            following = loaded
            if done + SIZES[0] < SIZES[1]:  # the next block is loaded while this one is scanned
                ahead = entries_of(inputs, laid, start + done + SIZES[0], FORM)
                following = load_entries(inputs, ahead)
            effect = scan_entries(inputs, (), entries, loaded, lanes, states, FORM)
            total = together(total, effect)
            loaded = following
        lane = tl.arange(0, LANES)
        for at in tl.static_range(len(total)):
            own = effects + len(total) * window + at + tl.zeros_like(lane)
            tl.store(own, total[at], mask=lane == 0)


@triton.jit
def fold_effects(effects, window, count, states, FORM: tl.constexpr):
    """Return the states behind a row, from the effects of the ``count`` rows behind it.

    ``window`` is that of the segment's last row. Each lane composes as many neighbours.
    """
    lane = tl.arange(0, LANES)
    each = tl.cdiv(count, LANES)
    neutral = no_effect(LANES, FORM)
    total = neutral
    at = 0
    while at < each:
        for beside in tl.static_range(AT_ONCE):
            row = lane * each + at + beside
            known = (at + beside < each) & (row < count)
            effect = ()
            for part in tl.static_range(len(neutral)):
                own = effects + (window - row) * len(neutral) + part
                effect = effect + (tl.load(own, mask=known, other=neutral[part]),)
            total = together(total, effect)
        at += AT_ONCE
    if FORM[0] == VTRACE:
        total = tl.associative_scan(total, 0, together_of_two)
    else:
        total = tl.associative_scan(total, 0, together_of_one)
    last = tl.full(states[0].shape, LANES - 1, tl.int32)
    effect = ()
    for part in tl.static_range(len(total)):
        effect = effect + (tl.gather(total[part], last, 0),)
    return carry_on(effect, states)


@triton.jit
def scan_side_by_side(
    inputs, outputs, effects, held, segments, reach, FORM: tl.constexpr, SIZES: tl.constexpr
):
    """Scan segments that fit side by side in a block, or one longer segment block after block.

    ``held`` is what `hold_segments` returns for the first segment of the program; ``segments`` are
    that one, the first that is laid out, and the past-last; ``reach`` the entries of a long segment
    behind the first block, and up to the end of the last one. With ``effects``, a segment of rows
    that ``reach`` holds whole is scanned in the row that begins it alone. Return how many were
    scanned.
    """
    first, number, past = segments
    done, stop = reach
    laid, lanes, tail, count = lay_out(inputs, held, first, number, past, SIZES[0])
    states = tail, tail
    if FORM[0] >= VTRACE:
        states = tl.zeros_like(tail), tail
    begin, end, _, _ = span_of(inputs[0][3], inputs[1][0], number)
    length = end - begin
    if effects is not None:  # noqa: SIM102 - the compiler takes one condition at a time
        if length > SIZES[2]:
            if stop >= length:
                done = (length - 1) // SIZES[1] * SIZES[1]
            states = fold_effects(effects, (end - 1) // SIZES[1], done // SIZES[1], states, FORM)
    stop = tl.minimum(stop, tl.maximum(length, 1))
    loaded = load_entries(inputs, entries_of(inputs, laid, done, FORM))
    while done < stop:
        entries = entries_of(inputs, laid, done, FORM)
        following = loaded
        if done + SIZES[0] < stop:  # the next block is loaded while this one is scanned
            following = load_entries(inputs, entries_of(inputs, laid, done + SIZES[0], FORM))
        effect = scan_entries(inputs, outputs, entries, loaded, lanes, states, FORM)
        states = carry_on(effect, states)
        loaded = following
        done += SIZES[0]
    return count


@triton.jit
def longest_first(inputs, program, num_segments, BLOCK: tl.constexpr):
    """Return the segment of a program, so that the first programs have the longest ones.

    The programs of each ``LANES`` neighbours take them by length; it is ``num_segments`` or more
    for a program without a segment.
    """
    stride = tl.cdiv(num_segments, LANES)
    lane = tl.arange(0, LANES)
    first = program % stride * LANES
    begin, end, _, _, _, _ = hold_segments(inputs, first, num_segments, BLOCK)
    key = tl.minimum(end - begin, 1 << 25) * LANES + LANES - lane
    place = tl.zeros_like(lane)
    for other in tl.static_range(LANES):
        place += (tl.gather(key, tl.full((LANES,), other, tl.int32), 0) > key).to(tl.int32)
    return first + tl.sum(tl.where(place == program // stride, lane, 0), 0)


@triton.jit
def fill_rest(outputs, turn_ids, program, num_tokens, BLOCK: tl.constexpr):
    """Write 0 to ``FILLED`` blocks of tokens, where no turn generated one and no chunk writes."""
    # descending as those of the scan: otherwise the compiler would change the scan's layout
    last = (program + 1) * FILLED * BLOCK - 1 - tl.arange(0, BLOCK)
    turns = ()
    for part in tl.static_range(FILLED):
        at = last - part * BLOCK
        turns = turns + (tl.load(turn_ids + at, mask=at < num_tokens, other=0),)
    for part in tl.static_range(FILLED):
        for output in tl.static_range(2):
            to = outputs[output] + (last - part * BLOCK)
            tl.store(to, tl.zeros((BLOCK,), tl.float32), mask=turns[part] < 0)


@triton.jit(do_not_specialize=["num_segments", "share", "num_chunks", "num_windows", "num_tokens"])
def scan_kernel(
    source, outputs, effects, cu_seqlens, rates, bootstrap, fill_ids, num_segments, share,
    num_chunks, num_windows, num_tokens, gamma: tl.float64, lam: tl.float64,
    kl_coefficient: tl.float64, kl_clamp: tl.float64, reward_clip: tl.float64,
    rho_clip: tl.float64, c_clip: tl.float64, advantage_rho_clip: tl.float64,
    FORM: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """Scan ``share`` segments; with ``effects``, a row of a long segment; or fill with 0.

    With ``effects`` the programs of segments scan of a long one the row that begins it alone, which
    has no window of its own.
    """
    limits = (kl_coefficient, kl_clamp, reward_clip, rho_clip, c_clip, advantage_rho_clip)
    one = (num_segments > 0).to(tl.float32)
    inputs = (source, (cu_seqlens, rates[0], rates[1], bootstrap, gamma, lam), limits, one)
    BLOCK: tl.constexpr = SIZES[0]
    program = tl.program_id(0)
    walks = tl.cdiv(num_segments, share)
    if share == 1:
        walks = tl.cdiv(walks, LANES) * LANES
    if program < walks + num_windows:
        number = program * share
        past = tl.minimum(number + share, num_segments)
        start = 0
        stop = 2147483647
        if program < walks:
            if share == 1:
                number = longest_first(inputs, program, num_segments, BLOCK)
                past = tl.minimum(number + 1, num_segments)
        elif effects is not None:
            number, start, exists = row_of_window(
                source[3], cu_seqlens, num_segments, num_chunks, program - walks, SIZES
            )
            past = number + exists.to(tl.int32)
            stop = start + SIZES[1]
        if number < past:
            first = number
            reach = start, stop
            held = hold_segments(inputs, first, past, BLOCK)
            while number < past:
                number += scan_side_by_side(
                    inputs, outputs, effects, held, (first, number, past), reach, FORM, SIZES
                )
    elif fill_ids is not None:
        fill_rest(outputs, fill_ids, program - walks - num_windows, num_tokens, BLOCK)


def credit_scan_forward(scan: Scan) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a scan; return the results of `trajpack.kernels.scan.credit_scan.credit_scan`."""
    has_one = scan.kind in ("returns", "adjoint")
    first = torch.empty(scan.num_tokens, dtype=torch.float32, device=scan.cu_seqlens.device)
    second = first.new_empty(0) if has_one else torch.empty_like(first)
    launch(scan, (first,) if has_one else (first, second))
    return first, second


def launch(scan: Scan, outputs: tuple[torch.Tensor, ...]) -> None:
    """Launch one kernel, or two where a segment may be longer than `LONGEST_WALK`."""
    num_tokens, positions = scan.num_tokens, scan.positions
    if not num_tokens:
        return
    longest = positions if scan.max_seqlen is None else scan.max_seqlen
    launch_kernel, arguments = _prepared(scan)
    # a program takes about four blocks of short segments, or one segment
    width = min(longest, cdiv(positions, max(scan.num_segments, 1))) + EACH.value
    share = min(4 * BLOCK // width, LANES.value) if 2 * width <= BLOCK else 1
    walks = cdiv(scan.num_segments, share)
    if share == 1:
        walks = cdiv(walks, LANES.value) * LANES.value
    fill_ids = None if scan.by_turn else scan.turn_ids
    tiles = 0 if fill_ids is None else cdiv(num_tokens, FILLED.value * BLOCK)
    windows, effects = 0, None
    if min(positions, longest) > LONGEST_WALK:
        windows = cdiv(positions, ROW)
        numbers = windows * (5 if scan.kind == "vtrace" else 2)
        effects = torch.empty(numbers, dtype=torch.float64, device=scan.cu_seqlens.device)
        launch_kernel(effects_kernel, windows, effects=effects, **arguments)
    launch_kernel(
        scan_kernel, walks + windows + tiles, outputs=outputs, effects=effects, fill_ids=fill_ids,
        share=share, num_windows=windows, num_tokens=num_tokens, **arguments,
    )  # fmt: skip


def _prepared(scan: Scan) -> tuple[Launch, dict[str, Any]]:
    """Return the launch of a scan, and the arguments that both kernels take."""
    mask, chunks, observation = scan.loss_mask, None, scan.observation
    # no None and no 1 in tuples: Triton 3.5 and 3.6 cannot compare those that hold one
    if scan.begins is not None:
        chunks = (
            scan.cu_positions, scan.begins, scan.begins.stride(0), scan.spans, scan.turn_rewards,
            ((),) if scan.by_turn else (),
        )  # fmt: skip
    elif mask is None:  # all tokens are steps
        observation = "ignore"
    mask = None if mask is None else mask.view(torch.uint8)
    kl = None if scan.ref_logprobs is None else (scan.logprobs, scan.ref_logprobs)
    ratios = (scan.logprobs, scan.rollout_logprobs) if scan.kind == "vtrace" else None
    # what takes so many registers that the limit of the others would make it spill
    is_wide = any(one is not None for one in (scan.gammas, scan.lams, ratios, kl))
    is_wide |= mask is not None and observation in ("compact", "reset")
    is_wide |= chunks is not None and observation in ("compact", "ignore", "multiply")
    shape = "wide_scan" if is_wide else "credit_scan"
    estimator = 0 if scan.estimator is None else KL_ESTIMATORS.index(scan.estimator) + 1
    return launch_on(shape, scan.cu_seqlens.get_device()), {
        "source": (scan.rewards, scan.values, mask, chunks, kl, ratios),
        "rates": (scan.gammas, scan.lams),
        **{name: getattr(scan, name) for name in SHARED},
        **Limits(*scan.limits)._asdict(),
        "FORM": (KINDS.index(scan.kind), OBSERVATIONS.index(observation), estimator),
        "SIZES": (BLOCK, ROW, LONGEST_WALK),
    }
