"""The steps that every kernel of the scan over tokens is made of: how a token is read, and met.

Positions count what is scanned, segment after segment. Where the scan has no pieces a position
is the token's own index. With pieces, stretches of tokens that stand anywhere are scanned one
behind the other: a position is looked up among the pieces' first positions.
"""

import triton
import triton.language as tl

from trajpack.kernels.discounted_returns_steps_triton import add_carry, compose
from trajpack.kernels.search_triton import find_segments

CARRY, CARRY_DROP, COMPACT, IGNORE, MULTIPLY, RESET = (tl.constexpr(n) for n in range(6))
"""Observations, by their place in `OBSERVATIONS`."""
NEXT_VALUES, VTRACE, ADJOINT = (tl.constexpr(n) for n in range(1, 4))
"""What is scanned, by its place in `KINDS`; 0 is what GAE scans."""


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
    return tl.minimum(tl.maximum(reward, -clip), clip)


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
        penalty = 0.5 * ratio * ratio
    else:
        penalty = tl.exp(-ratio) - 1.0 + ratio
    return coefficient * _clipped(penalty, clamp)


@triton.jit
def read_token(
    source, position, exists, first, last,
    OBSERVATION: tl.constexpr, ESTIMATOR: tl.constexpr,
):  # fmt: skip
    """Return token, whether it was generated, reward and value, 0 where it does not exist."""
    rewards, values, loss_mask, pieces, kl, limits = source
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
        if pieces[5] is not None:  # a turn is one action, its first token
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
    ratio = tl.minimum(tl.exp(ours - theirs), cap)
    return tl.where(generated, ratio, 1.0)


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
def step_of(
    source, weights, before, token, position, exists, is_last, gamma, lam,
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
        limits = source[5]
        ratio = clipped_ratio(weights, at, generated, limits[3])
        behind = tl.load(before + position, mask=exists, other=0.0)
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
def scan_block(
    source, weights, before, top, begin, end, first, last, gamma, lam,
    SCAN: tl.constexpr, OBSERVATION: tl.constexpr, ESTIMATOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compose, for each of the last ``BLOCK`` entries before ``top``, the steps behind it in there.

    The first lane is the entry before ``top``, behind which stands the entry at ``top``.
    """
    position = top - tl.arange(0, BLOCK)
    exists = (position > begin) & (position < end)
    token = read_token(source, position, exists, first, last, OBSERVATION, ESTIMATOR)
    gain, gift = step_of(
        source, weights, before, token, position, exists, position == end - 1, gamma, lam,
        SCAN, OBSERVATION,
    )  # fmt: skip
    return tl.associative_scan((gain, gift), 0, compose)


@triton.jit
def write_block(
    source, weights, before, outputs, states, top, begin, end, first, last, gamma, lam,
    SCAN: tl.constexpr, OBSERVATION: tl.constexpr, ESTIMATOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put out what the entries before ``top`` are given; ``states`` is ``x`` behind each."""
    position = top - 1 - tl.arange(0, BLOCK)
    exists = position >= begin
    at, generated, reward, value = read_token(
        source, position, exists, first, last, OBSERVATION, ESTIMATOR
    )
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
            limits = source[5]
            behind = tl.load(before + position, mask=exists, other=0.0)
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
def state_at(gains, gifts, state, place):
    """Return the state of lane ``place``, with ``state`` behind the block."""
    return add_carry(entry_of(gifts, place), entry_of(gains, place), state)


@triton.jit
def entry_of(lanes, place):
    """Return the entry of ``lanes`` [BLOCK] that stands at ``place``."""
    return tl.sum(tl.where(tl.arange(0, lanes.shape[0]) == place, lanes, 0.0), 0)
