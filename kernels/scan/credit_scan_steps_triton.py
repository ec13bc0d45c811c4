# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
"""The steps that every kernel of the scan over tokens is made of: how a token is read, and met.

Positions count what is scanned, segment after segment. Where the scan has no pieces a position
is the token's own index. With pieces, stretches of tokens that stand anywhere are scanned one
behind the other: a position is looked up among the pieces' first positions.
"""

import triton
import triton.language as tl

from trajpack.kernels.scan.discounted_returns_steps_triton import add_carry, compose
from trajpack.kernels.search_triton import find_segments

CARRY, CARRY_DROP, COMPACT, IGNORE, MULTIPLY, RESET = (tl.constexpr(n) for n in range(6))
"""Observations, by their place in `OBSERVATIONS`."""
GAE, NEXT_VALUES, VTRACE, ADJOINT = (tl.constexpr(n) for n in range(4))
"""What is scanned, by its place in `KINDS`."""


@triton.jit
def _read_piece(
    pieces, position, exists, first, last, clip,
):  # fmt: skip
    """Look a position up: return token, its piece's first generated token, reward.

    A piece is a turn: its reward stands on its last generated token. The rewards of turns behind
    it that generated nothing stand there too.
    """
    cu_positions, addresses, stride, spans, rewards = (
        pieces[0],
        pieces[1],
        pieces[2],
        pieces[3],
        pieces[4],
    )
    piece = find_segments(cu_positions, first, last, position, 1)
    begins = tl.load(cu_positions + piece, mask=exists, other=0)
    at = tl.load(addresses + piece * stride, mask=exists, other=0) + position - begins
    begin = tl.load(spans + piece * 2, mask=exists, other=0)
    end = tl.load(spans + piece * 2 + 1, mask=exists, other=0)
    ends_turn = exists & (at >= begin) & (at == end - 1)
    reward = _clipped(tl.load(rewards + piece, mask=ends_turn, other=0.0).to(tl.float64), clip)
    piece += 1
    open_ended = ends_turn & (piece <= last)
    while tl.max(open_ended.to(tl.int32), 0) > 0:
        next_begin = tl.load(spans + piece * 2, mask=open_ended, other=0)
        next_end = tl.load(spans + piece * 2 + 1, mask=open_ended, other=1)
        open_ended &= next_begin == next_end
        more = tl.load(rewards + piece, mask=open_ended, other=0.0).to(tl.float64)
        reward += _clipped(more, clip)
        piece += 1
        open_ended &= piece <= last
    return at, begin, reward


@triton.jit
def _clipped(reward, clip):
    # a NaN stays, which minimum and maximum would hide on hardware
    return tl.where(reward > clip, clip, tl.where(reward < -clip, -clip, reward))


@triton.jit
def _kl(kl, at, generated, coefficient, clamp, ESTIMATOR: tl.constexpr):
    """Return the penalty of tokens: of their log-ratio itself, its square, or the unbiased one."""
    logprobs, ref_logprobs = kl
    ours = tl.load(logprobs + at, mask=generated, other=0.0).to(tl.float64)
    theirs = tl.load(ref_logprobs + at, mask=generated, other=0.0).to(tl.float64)
    ratio = ours - theirs
    if ESTIMATOR == 1:
        penalty = ratio
    elif ESTIMATOR == 2:
        ratio = _clipped(ratio, 1e150)  # whose square is finite
        penalty = 0.5 * ratio * ratio
    else:
        ratio = tl.where(ratio < -700.0, -700.0, ratio)  # whose exponential is finite
        small = ratio * ratio * (0.5 - ratio * (1.0 / 6.0 - ratio * (1.0 / 24.0)))
        penalty = tl.where(tl.abs(ratio) < 1e-3, small, tl.exp(-ratio) - 1.0 + ratio)
    return coefficient * _clipped(penalty, clamp)


@triton.jit
def read_token(
    source, limits, position, exists, first, last,
    OBSERVATION: tl.constexpr, ESTIMATOR: tl.constexpr,
):  # fmt: skip
    """Return token, whether it was generated, reward and value, 0 where it does not exist."""
    rewards, values, loss_mask, pieces, kl = source
    coefficient, clamp, clip = limits[0], limits[1], limits[2]
    if pieces is None:
        at = position
        generated = exists
        if loss_mask is not None:
            generated = exists & (tl.load(loss_mask + at, mask=exists, other=0) != 0)
        reward = tl.load(rewards + at, mask=exists, other=0.0).to(tl.float64)
    else:
        at, begin, reward = _read_piece(pieces, position, exists, first, last, clip)
        generated = exists & (at >= begin)
    if kl is not None:
        reward -= _kl(kl, at, generated, coefficient, clamp, ESTIMATOR)
    if pieces is not None:  # noqa: SIM102 - the compiler takes one by one
        if len(pieces[5]) > 0:  # a turn is one action, its first token
            generated = exists & (at == begin)
    value = tl.zeros_like(reward)
    if values is not None:
        value = tl.load(values + at, mask=exists, other=0.0).to(tl.float64)
    if OBSERVATION == MULTIPLY:
        reward = tl.where(generated, reward, 0.0)
        value = tl.where(generated, value, 0.0)
    return at, generated, reward, value


@triton.jit
def clipped_ratio(weights, at, generated, cap):
    """Return min(π/μ, cap) of generated tokens, 1 of others."""
    logprobs, rollout_logprobs = weights
    ours = tl.load(logprobs + at, mask=generated, other=0.0).to(tl.float64)
    theirs = tl.load(rollout_logprobs + at, mask=generated, other=0.0).to(tl.float64)
    ratio = tl.exp(ours - theirs)
    return tl.where(generated, tl.where(ratio > cap, cap, ratio), 1.0)


@triton.jit
def _passed_on(reward, is_last, SCAN: tl.constexpr, OBSERVATION: tl.constexpr):
    """Return what tokens nobody generated hand to the last generated one before them."""
    passed = tl.zeros_like(reward)
    if SCAN <= NEXT_VALUES:
        if OBSERVATION == CARRY:
            passed = reward
        elif OBSERVATION == COMPACT:
            passed = tl.where(is_last, reward, 0.0)
    return passed


@triton.jit
def _behind(
    source, before, position, exists, end, first, last, gamma, tail, OBSERVATION: tl.constexpr,
):  # fmt: skip
    """Return the discounted value that stands behind tokens, with rewards that lie between.

    Among pieces it is the next position's: they hold no token that such a value passes.
    """
    values, pieces = source[1], source[3]
    if pieces is None:
        behind = tl.load(before + position, mask=exists, other=0.0)
    else:
        follows = exists & (position + 1 < end)
        piece = find_segments(pieces[0], first, last, position + 1, 1)
        begins = tl.load(pieces[0] + piece, mask=follows, other=0)
        at = tl.load(pieces[1] + piece * pieces[2], mask=follows, other=0) + position + 1 - begins
        value = tl.load(values + at, mask=follows, other=0.0).to(tl.float64)
        if OBSERVATION == MULTIPLY:
            begin = tl.load(pieces[3] + piece * 2, mask=follows, other=0)
            value = tl.where(at >= begin, value, 0.0)
        behind = tl.where(follows, gamma * value, tail)
    return behind


@triton.jit
def step_of(
    source, limits, weights, token, behind, exists, is_last, gamma, lam,
    SCAN: tl.constexpr, OBSERVATION: tl.constexpr,
):  # fmt: skip
    """Return gain and gift of tokens: ``x`` before one is ``gain * x + gift``."""
    at, generated, reward, value = token
    gain = tl.zeros_like(reward) + gamma * lam
    if SCAN == ADJOINT:
        gift = tl.where(generated, reward, 0.0)
    elif SCAN == NEXT_VALUES:
        gain = tl.zeros_like(reward)
        gift = gamma * value
    elif SCAN == VTRACE:
        ratio = clipped_ratio(weights, at, generated, limits[3])
        if OBSERVATION == RESET:
            behind = tl.where(generated, behind, 0.0)
        gift = gamma * ratio * (reward + behind - value)
        gain *= clipped_ratio(weights, at, generated, limits[4])
    else:
        gift = gamma * (1.0 - lam) * value + gain * reward
    if OBSERVATION == RESET:
        gain = tl.where(generated, gain, 0.0)
    elif OBSERVATION <= COMPACT:
        gain = tl.where(generated, gain, 1.0)
        gift = tl.where(generated, gift, _passed_on(reward, is_last, SCAN, OBSERVATION))
    return tl.where(exists, gain, 1.0), tl.where(exists, gift, 0.0)


@triton.jit
def _parted(entries, BLOCK: tl.constexpr):
    """Give every lane four entries that follow each other: return the first of each, and so on."""
    evens, odds = tl.split(tl.reshape(entries, [BLOCK // 4, 2, 2]))
    first, third = tl.split(evens)
    second, fourth = tl.split(odds)
    return first, second, third, fourth


@triton.jit
def scan_block(gain, gift, BLOCK: tl.constexpr):
    """Compose the steps of a block, last token first, in lanes of four.

    Return what the lanes before each one do to the state; gains and gifts of each lane's first
    three entries; what all lanes do to it, gain and gift. Four entries of a lane take a
    quarter of the shuffles that an entry each would.
    """
    lane = tl.arange(0, BLOCK // 4)
    gain0, gain1, gain2, gain3 = _parted(gain, BLOCK)
    gift0, gift1, gift2, gift3 = _parted(gift, BLOCK)
    gains, gifts = compose(gain0, gift0, gain1, gift1)
    gains, gifts = compose(gains, gifts, gain2, gift2)
    gains, gifts = compose(gains, gifts, gain3, gift3)
    gains, gifts = tl.associative_scan((gains, gifts), 0, compose)
    all_gain = entry_of(gains, BLOCK // 4 - 1)
    all_gift = entry_of(gifts, BLOCK // 4 - 1)
    before = tl.maximum(lane - 1, 0)
    gains = tl.where(lane == 0, 1.0, tl.gather(gains, before, 0))
    gifts = tl.where(lane == 0, 0.0, tl.gather(gifts, before, 0))
    return (gains, gifts), (gain0, gain1, gain2), (gift0, gift1, gift2), all_gain, all_gift


@triton.jit
def states_of_block(lanes, gains, gifts, state, BLOCK: tl.constexpr):
    """Return the state behind each entry of a block, with ``state`` behind the first."""
    state0 = add_carry(lanes[1], lanes[0], state)
    state1 = add_carry(gifts[0], gains[0], state0)
    state2 = add_carry(gifts[1], gains[1], state1)
    state3 = add_carry(gifts[2], gains[2], state2)
    states = tl.join(tl.join(state0, state2), tl.join(state1, state3))
    return tl.reshape(states, [BLOCK])


@triton.jit
def read_block(
    source, limits, weights, before, top, begin, end, first, last, gamma, lam, tail,
    SCAN: tl.constexpr, OBSERVATION: tl.constexpr, ESTIMATOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the tokens before ``top``, last one first, what is behind each, gains and gifts."""
    position = top - 1 - tl.arange(0, BLOCK)
    exists = position >= begin
    token = read_token(source, limits, position, exists, first, last, OBSERVATION, ESTIMATOR)
    behind = tl.zeros((BLOCK,), tl.float64)
    if SCAN == VTRACE:
        behind = _behind(
            source, before, position, exists, end, first, last, gamma, tail, OBSERVATION
        )
    is_last = position == end - 1
    gain, gift = step_of(
        source, limits, weights, token, behind, exists, is_last, gamma, lam, SCAN, OBSERVATION
    )
    return token, behind, gain, gift


@triton.jit
def write_block(
    source, limits, weights, outputs, token, behind, states, top, begin, gamma, lam,
    SCAN: tl.constexpr, OBSERVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put out what the tokens before ``top`` are given; ``states`` is ``x`` behind each."""
    position = top - 1 - tl.arange(0, BLOCK)
    exists = position >= begin
    at, generated, reward, value = token
    main, other = outputs
    if SCAN == NEXT_VALUES:
        tl.store(main + position, states, mask=exists)
    elif SCAN == ADJOINT:
        rate = tl.zeros_like(reward) + gamma * lam
        if OBSERVATION == CARRY:
            rate = tl.where(generated, rate, 1.0)
        elif OBSERVATION == COMPACT:  # mirrored: the sequence's last token comes first
            rate = tl.where(generated, rate, tl.where(position == begin, 1.0, 0.0))
        elif OBSERVATION != IGNORE and OBSERVATION != RESET:  # noqa: PLR1714
            rate = tl.where(generated, rate, 0.0)
        own = tl.where(generated, reward, 0.0)
        tl.store(main + at, (own + rate * states).to(tl.float32), mask=exists)
    else:
        written = exists
        if source[3] is not None:
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


@triton.jit
def entry_of(lanes, place):
    """Return the entry of ``lanes`` [BLOCK] that stands at ``place``."""
    return tl.sum(tl.where(tl.arange(0, lanes.shape[0]) == place, lanes, 0.0), 0)
