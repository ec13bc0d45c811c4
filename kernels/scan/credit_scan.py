"""The reverse scan behind every credit estimator: its op, and its meaning in torch and numpy.

GAE, TD(λ), turn-level GAE, discounted returns and credit along turns scan one state. V-trace scans
two: the value that follows each token, and the trace. The recurrence, with state ``x`` behind a
token, is ``decay·x + increment``; see `trajpack.kernels.scan.observations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.corrections.penalties import estimate
from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.scan.observations import PASSING
from trajpack.kernels.scan.scan_inputs import Limits, Scan, check_scan_inputs, split_rate
from trajpack.kernels.validation import check_boundaries

ROW = 64
"""Entries of a row on the host. Rows are cut from a segment's end: ROW fixes the order of sums."""
ENTRIES_AT_ONCE = 2**16
"""Entries that the host walks together, so that they stay in the cache."""

Coefficient: TypeAlias = torch.Tensor | float
"""One number per entry, float64 ``[entries]``, or the same number for all."""
Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]


class EntryIndex:
    """Segment of each entry of packed segments; entries behind the last segment belong to it."""

    def __init__(self, bounds: torch.Tensor, num_entries: int) -> None:
        self.bounds, self.num_entries = bounds, num_entries

    @cached_property
    def segment(self) -> torch.Tensor:
        """int32 ``[entries]``: segment of each entry."""
        starts = self.bounds[:-1]
        end = starts.new_full((min(starts.shape[0], 1),), self.num_entries)
        lengths = torch.cat([starts[1:], end]) - starts
        return torch.repeat_interleave(lengths, output_size=self.num_entries)

    def expand(self, number: Coefficient) -> Coefficient:
        """Return a number of each segment at the segment's entries; a single number as it is."""
        return number.index_select(0, self.segment) if isinstance(number, torch.Tensor) else number

    @cached_property
    def is_first(self) -> torch.Tensor:
        """Bool ``[entries]``: True on the first entry of each segment."""
        return self._entries() == self.bounds.index_select(0, self.segment)

    @cached_property
    def is_last(self) -> torch.Tensor:
        """Bool ``[entries]``: True on the last entry of each segment."""
        return self._entries() + 1 == self.bounds[1:].index_select(0, self.segment)

    def _entries(self) -> torch.Tensor:
        return torch.arange(self.num_entries, device=self.bounds.device)


class ScannedTokens(NamedTuple):
    """Tokens in the order of the scan: ``[positions]`` each."""

    entries: EntryIndex
    rewards: torch.Tensor
    """float64."""
    values: torch.Tensor
    """float64; the scalar 0 without values."""
    generated: torch.Tensor | None
    """bool; ``None`` where all tokens were generated."""
    token: torch.Tensor | None = None
    """int64: token at each position, ``num_tokens`` where there is none; ``None`` where a position
    is a token."""


def scan_tokens(  # noqa: PLR0913 - all but three are keywords
    op: str,
    rewards: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    gamma: float | torch.Tensor,
    observation: str,
    impl: Impl,
    kind: str = "gae",
    gamma_name: str = "gamma",
    lam: float | torch.Tensor = 1.0,
    values: torch.Tensor | None = None,
    loss_mask: torch.Tensor | None = None,
    bootstrap: torch.Tensor | None = None,
    logprobs: torch.Tensor | None = None,
    rollout_logprobs: torch.Tensor | None = None,
    clips: Sequence[float] = (),
    max_seqlen: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the arguments of the estimator ``op``, then run its scan.

    Arguments are those of `trajpack.kernels.gae` and `trajpack.kernels.vtrace`; ``clips`` are the
    three of V-trace. The second result is empty for ``kind="returns"``.
    """
    over_tokens: dict[str, Any] = {} if kind == "returns" else {"values": values}
    if kind == "vtrace":
        over_tokens |= {"logprobs": logprobs, "rollout_logprobs": rollout_logprobs}
    check_scan_inputs(
        op,
        rewards,
        cu_seqlens,
        loss_mask=loss_mask,
        observation=observation,
        bootstrap=bootstrap,
        max_seqlen=max_seqlen,
        **over_tokens,
    )
    gamma, gammas = split_rate(op, gamma_name, gamma, cu_seqlens)
    lam, lams = split_rate(op, "lam", lam, cu_seqlens)
    weighted = logprobs is not None and rollout_logprobs is not None
    scan = Scan(
        cu_seqlens,
        rewards.shape[0],
        rewards.shape[0],
        rewards,
        values,
        loss_mask,
        gamma,
        lam,
        observation,
        gammas,
        lams,
        bootstrap,
        (logprobs, rollout_logprobs) if weighted else None,  # type: ignore[arg-type]
        limits=Limits()._replace(**dict(zip(Limits._fields[3:], clips, strict=False))),
        kind=kind,
        max_seqlen=max_seqlen,
    )
    return credit_scan(scan, op, resolve_impl(op, impl, rewards))


def credit_scan(scan: Scan, op: str, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the op ``trajpack::credit_scan`` for a scan without chunks, which is not checked."""
    rows = (scan.values, scan.loss_mask, scan.bootstrap, *(scan.weights or (None, None)))
    assert scan.rewards is not None
    results: tuple[torch.Tensor, torch.Tensor] = torch.ops.trajpack.credit_scan(
        scan.rewards.contiguous(),
        scan.cu_seqlens.contiguous(),
        *(None if tensor is None else tensor.contiguous() for tensor in rows),
        scan.gamma,
        scan.gammas,
        scan.lam,
        scan.lams,
        list(scan.limits),
        scan.observation,
        scan.kind,
        op,
        impl,
        scan.max_seqlen,
    )
    return results


def run_scan(scan: Scan, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, float32 ``[tokens]``.

    The kinds ``"returns"`` and ``"adjoint"`` have one result; their second tensor is empty.
    """
    if impl == "torch":
        return credit_scan_reference(scan)
    from trajpack.kernels.scan.credit_scan_triton import credit_scan_forward

    return credit_scan_forward(scan)


def credit_scan_reference(scan: Scan) -> tuple[torch.Tensor, torch.Tensor]:
    """Define every kind of scan in plain torch; numpy runs the recurrence on the CPU."""
    if scan.chunks is not None:
        tokens = _tokens_of_chunks(scan)
    else:
        assert scan.rewards is not None
        rewards = scan.rewards.double()
        values = rewards.new_zeros(()) if scan.values is None else scan.values.double()
        entries = EntryIndex(scan.cu_seqlens, scan.num_tokens)
        tokens = ScannedTokens(entries, rewards, values, scan.loss_mask)
    if scan.observation == "multiply" and tokens.generated is not None:
        rewards, values = (
            torch.where(tokens.generated, rows, 0.0) for rows in (tokens.rewards, tokens.values)
        )
        tokens = tokens._replace(rewards=rewards, values=values)
    gamma: Coefficient = scan.gamma if scan.gammas is None else scan.gammas
    lam: Coefficient = scan.lam if scan.lams is None else scan.lams
    expand = tokens.entries.expand
    if scan.kind == "adjoint":
        results = [_gradient(scan, tokens, expand(gamma * lam))]
    elif scan.kind == "vtrace":
        results = _vtrace(scan, tokens, expand(gamma), expand(lam))
    else:
        rate = expand(gamma * lam)
        increment = rate * tokens.rewards
        if scan.values is not None:
            increment = expand(gamma * (1 - lam)) * tokens.values + increment
        if tokens.generated is not None:
            passed = _passed_rewards(scan, tokens)
            rate, increment = _with_observations(scan, tokens, rate, increment, passed)
        states = _states(scan, tokens, rate, increment, _start(scan))
        results = [tokens.rewards + states]
        if scan.kind == "gae":
            results.insert(0, tokens.rewards - tokens.values + states)
    if tokens.generated is not None and scan.kind != "adjoint":
        results = [torch.where(tokens.generated, rows, 0.0) for rows in results]
    outputs = [rows.float() for rows in results]
    if tokens.token is not None:
        tables = [rows.new_zeros(scan.num_tokens + 1) for rows in outputs]
        outputs = [
            table.index_copy_(0, tokens.token, rows)[:-1]
            for table, rows in zip(tables, outputs, strict=True)
        ]
    return outputs[0], outputs[1] if len(outputs) == 2 else outputs[0].new_empty(0)


def _vtrace(
    scan: Scan, tokens: ScannedTokens, gamma: Coefficient, lam: Coefficient
) -> list[torch.Tensor]:
    """Return advantages and value targets."""
    next_values = _with_observations(
        scan,
        tokens,
        0.0,
        gamma * tokens.values,
        _passed_rewards(scan, tokens),
    )
    behind = _states(scan, tokens, *next_values, _start(scan))
    if scan.observation == "reset" and tokens.generated is not None:
        behind = torch.where(tokens.generated, behind, 0.0)
    rho, c, advantage_rho = _clipped_ratios(scan, tokens)
    surprise = tokens.rewards + behind - tokens.values
    steps = _with_observations(scan, tokens, gamma * lam * c, gamma * rho * surprise, 0.0)
    states = _states(scan, tokens, *steps, torch.zeros_like(_start(scan)))
    return [
        advantage_rho * (surprise + states),
        tokens.values + rho * surprise + lam * c * states,
    ]


def _gradient(scan: Scan, tokens: ScannedTokens, rate: Coefficient) -> torch.Tensor:
    """Return the gradient of rewards; ``tokens`` are mirrored, their rewards are gradients."""
    own = tokens.rewards
    if tokens.generated is not None:
        own = torch.where(tokens.generated, own, 0.0)
    decay, _ = _with_observations(scan, tokens, rate, own, 0.0)
    states = _states(scan, tokens, decay, own, _start(scan))
    if tokens.generated is None or scan.observation in ("ignore", "reset"):
        return own + rate * states
    factor = torch.zeros_like(own)  # of the states, where tokens were not generated
    if scan.observation == "carry":
        factor = torch.ones_like(own)
    elif scan.observation == "compact":
        factor = tokens.entries.is_first.double()
    return own + torch.where(tokens.generated, rate, factor) * states


def _with_observations(
    scan: Scan,
    tokens: ScannedTokens,
    decay: Coefficient,
    increment: torch.Tensor,
    passed: Coefficient,
) -> tuple[Coefficient, torch.Tensor]:
    """Return decay and increment with the convention's steps on tokens that were not generated.

    ``passed`` is the increment of tokens through which the state passes.
    """
    if tokens.generated is None:
        return decay, increment
    if scan.observation == "reset":
        decay = torch.where(tokens.generated, decay, torch.zeros_like(increment))
    elif scan.observation in PASSING:
        decay = torch.where(tokens.generated, decay, torch.ones_like(increment))
        increment = torch.where(tokens.generated, increment, passed)
    return decay, increment


def _passed_rewards(scan: Scan, tokens: ScannedTokens) -> Coefficient:
    """Return the rewards that skipped tokens pass to the last generated token before them."""
    if scan.observation == "carry":
        return tokens.rewards
    if scan.observation == "compact":
        return torch.where(tokens.entries.is_last, tokens.rewards, 0.0)
    return 0.0


def _start(scan: Scan) -> torch.Tensor:
    """Return the state behind each segment's last entry: float64 ``[segments]``."""
    if scan.bootstrap is None:
        return torch.zeros_like(scan.cu_seqlens[1:], dtype=torch.float64)
    gamma = scan.gamma if scan.gammas is None else scan.gammas.double()
    start = gamma * scan.bootstrap.double()
    if scan.chunks is None or scan.chunks.truncated is None or not scan.num_chunks:
        return start
    ends = scan.cu_seqlens[1:].long()
    cut_off = (ends > scan.cu_seqlens[:-1]) & scan.chunks.truncated[(ends - 1).clamp(min=0)]
    return torch.where(cut_off, start, 0.0)


def _states(
    scan: Scan,
    tokens: ScannedTokens,
    decay: Coefficient,
    increment: torch.Tensor,
    start: torch.Tensor,
) -> torch.Tensor:
    """Return the state behind each entry."""
    if not isinstance(decay, torch.Tensor):
        decay = torch.full_like(increment, decay)
    run = exclusive_scan_on_host if increment.device.type == "cpu" else exclusive_scan_reference
    return run(decay, increment, start, tokens.entries.bounds)


def _clipped_ratios(scan: Scan, tokens: ScannedTokens) -> list[torch.Tensor]:
    """Return the importance ratio of each token under the three clips; 1 if not generated."""
    assert scan.weights is not None
    ours, theirs = (_rows_of(tokens, logprobs.double()) for logprobs in scan.weights)
    ratio = ours - theirs
    if tokens.generated is not None:
        ratio = torch.where(tokens.generated, ratio, 0.0)
    ratio, ratios = ratio.exp(), []
    for clip in (scan.limits.rho_clip, scan.limits.c_clip, scan.limits.advantage_rho_clip):
        clipped = ratio.clamp(max=clip)
        if tokens.generated is not None:
            clipped = torch.where(tokens.generated, clipped, 1.0)
        ratios.append(clipped)
    return ratios


def _tokens_of_chunks(scan: Scan) -> ScannedTokens:
    """Return the tokens of the chunks, with the rewards of the turns on their last tokens."""
    assert scan.chunks is not None
    cu_positions, begins, spans, rewards, _ = scan.chunks
    position = torch.arange(scan.num_positions, device=scan.device)
    chunk = torch.searchsorted(cu_positions[1:].long(), position, right=True)
    exists = chunk < scan.num_chunks
    chunk = chunk.clamp(max=max(scan.num_chunks - 1, 0))
    token = begins.long()[chunk] + position - cu_positions.long()[chunk]
    generated = exists & (token >= spans[chunk, 0])
    rewards = rewards.clamp(-scan.limits.reward_clip, scan.limits.reward_clip)
    # the reward of a turn without generated tokens goes to the last one before it that has some
    is_empty = spans[:, 0] == spans[:, 1]
    moved = exclusive_scan_reference(
        is_empty.double(),
        torch.where(is_empty, rewards, 0.0),
        rewards.new_zeros(scan.num_segments),
        scan.cu_seqlens,
    )
    on_last = generated & (token == spans[chunk, 1] - 1)
    reward = torch.where(on_last, (rewards + moved)[chunk], 0.0)
    index = EntryIndex(cu_positions[scan.cu_seqlens.long()], scan.num_positions)
    token = torch.where(exists, token, scan.num_tokens)
    tokens = ScannedTokens(index, reward, reward.new_zeros(()), generated, token)
    if scan.values is not None:
        tokens = tokens._replace(values=_rows_of(tokens, scan.values.double()))
    if scan.kl is not None:
        logprobs, ref_logprobs = (_rows_of(tokens, rows) for rows in scan.kl)
        clamp = None if scan.limits.kl_clamp == float("inf") else scan.limits.kl_clamp
        penalty = estimate(logprobs, ref_logprobs, str(scan.estimator), clamp)
        penalty = scan.limits.kl_coefficient * penalty
        tokens = tokens._replace(rewards=reward - torch.where(generated, penalty, 0.0))
    if scan.by_turn:
        tokens = tokens._replace(generated=exists & (token == spans[chunk, 0]))
    return tokens


def _rows_of(tokens: ScannedTokens, rows: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` [tokens] at each position, 0 where there is no token."""
    if tokens.token is None:
        return rows
    return torch.cat([rows, rows.new_zeros(1)])[tokens.token]


def exclusive_scan_reference(
    decay: torch.Tensor, increment: torch.Tensor, start: torch.Tensor, bounds: torch.Tensor
) -> torch.Tensor:
    """Return the state behind each entry, where the state before an entry is decay·x + increment.

    ``decay`` and ``increment`` are float64 ``[entries]``; ``start`` ``[segments]`` is the state
    behind the last entry. Doubling: after round k an entry holds the effect of the 2ᵏ entries
    behind it. No value is read by the host, so it runs on any device.
    """
    entries = longest = decay.shape[0]
    if not entries:
        return decay
    if bounds.device.type == "cpu":
        longest = int(bounds.diff().max())
    index = EntryIndex(bounds, entries)
    decay = torch.where(index.is_last, 1.0, decay.roll(-1))  # of the entry behind
    increment = torch.where(index.is_last, 0.0, increment.roll(-1))
    entry = torch.arange(entries, device=decay.device)
    end = bounds[1:].index_select(0, index.segment)
    reach = 1
    while reach < longest:
        inside = entry[:-reach] + reach < end[:-reach]
        later_decay = torch.where(inside, decay[reach:], 1.0)
        later_increment = torch.where(inside, increment[reach:], 0.0)
        first = increment[:-reach] + _times(decay[:-reach], later_increment)
        increment = torch.cat([first, increment[-reach:]])
        decay = torch.cat([decay[:-reach] * later_decay, decay[-reach:]])
        reach *= 2
    return increment + _times(decay, start.double().index_select(0, index.segment))


def _times(decay: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Return the product; 0 where ``state`` is 0, even if ``decay`` has overflowed."""
    return torch.where(state == 0, 0.0, decay * state)


def exclusive_scan_on_host(
    decay: torch.Tensor, increment: torch.Tensor, start: torch.Tensor, bounds: torch.Tensor
) -> torch.Tensor:
    """Return the same as `exclusive_scan_reference` for CPU tensors.

    Segments are cut from their ends into rows of ``ROW`` entries. A step takes the next entry of
    all rows, so a few dozen vector operations serve any number of rows. The effect of whole rows
    on the state is the same problem, ``ROW`` times smaller. No operation mixes rows: the bits of
    a segment depend on the segment alone.
    """
    arrays = (decay.numpy(), increment.numpy(), start.double().numpy())
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        states = _states_behind(*arrays, bounds.numpy().astype(np.int64))
    return torch.from_numpy(states)


def _states_behind(decay: Floats, increment: Floats, start: Floats, bounds: Ints) -> Floats:
    lengths, entries = np.diff(bounds), decay.size
    width = min(ROW, int(lengths.max(initial=0)))
    if not width:
        return np.empty(entries)
    num_rows = -(-lengths // width)
    segment = np.repeat(np.arange(lengths.size), num_rows)
    rows_behind = np.cumsum(num_rows)[segment] - np.arange(1, segment.size + 1)
    begin, top = bounds[segment], bounds[segment + 1] - rows_behind * width
    state, overflows = start[segment], bool(np.isinf(decay).any())
    at_once = max(ENTRIES_AT_ONCE // width, 1)
    chunks = [slice(first, first + at_once) for first in range(0, segment.size, at_once)]
    lane = np.arange(1, width + 1)[:, None]
    blocks = []  # place, decay and increment of the entries of some rows: [width, rows] each
    for rows in chunks:
        place = top[rows] - lane
        np.copyto(place, entries, where=place < begin[rows])
        blocks.append((place, decay.take(place, mode="clip"), increment.take(place, mode="clip")))
    if num_rows.max() > 1:
        row_decay, row_increment = np.ones(segment.size), np.zeros(segment.size)
        for rows, (_, decays, increments) in zip(chunks, blocks, strict=True):
            total = row_increment[rows]
            for step_decay, step_increment in zip(decays, increments, strict=True):
                _advance(total, step_decay, step_increment, total, overflows)
                row_decay[rows] *= step_decay
        cu_rows = np.append(0, np.cumsum(num_rows))
        state = _states_behind(row_decay, row_increment, start, cu_rows)
    states = np.empty(entries + 1)  # the last takes the lanes before a segment's first entry
    for rows, (place, decays, increments) in zip(chunks, blocks, strict=True):
        walked = np.empty(decays.shape)
        walked[0] = state[rows]
        steps = zip(walked, decays, increments, walked[1:], strict=False)
        for current, step_decay, step_increment, before in steps:
            _advance(current, step_decay, step_increment, before, overflows)
        states[place] = walked
    return states[:-1]


def _advance(state: Floats, decay: Floats, increment: Floats, out: Floats, overflows: bool) -> None:
    """Write ``decay·state + increment``; a state of 0 stays 0 where ``decay`` overflowed."""
    if overflows:
        decay = np.where(state == 0, 0.0, decay)
    np.multiply(state, decay, out=out)
    np.add(out, increment, out=out)


def _scan_of(
    rewards: torch.Tensor, cu_seqlens: torch.Tensor, *inputs: Any
) -> tuple[Scan, str, str]:
    """Return the scan that arguments of the op describe, the name of its caller and the `impl`."""
    values, loss_mask, bootstrap, logprobs, rollout_logprobs, gamma, gammas, lam, lams = inputs[:9]
    limits, observation, kind, op, impl, max_seqlen = inputs[9:]
    scan = Scan(
        cu_seqlens,
        rewards.shape[0],
        rewards.shape[0],
        rewards,
        values,
        loss_mask,
        gamma,
        lam,
        observation,
        gammas,
        lams,
        bootstrap,
        None if logprobs is None else (logprobs, rollout_logprobs),
        limits=Limits(*limits),
        kind=kind,
        max_seqlen=max_seqlen,
    )
    return scan, op, impl


def _run(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scan, op, impl = _scan_of(*inputs)
    check_boundaries(op, scan.cu_seqlens, scan.num_tokens)
    return run_scan(scan, impl)


def _fake(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rewards, kind = inputs[0], inputs[13]
    first = torch.empty_like(rewards, dtype=torch.float32)
    return first, first.new_empty(0) if kind in ("returns", "adjoint") else torch.empty_like(first)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    scan, *ctx.names = _scan_of(*inputs)
    ctx.dtype, ctx.kind, ctx.gamma, ctx.lam = inputs[0].dtype, scan.kind, scan.gamma, scan.lam
    ctx.observation, ctx.max_seqlen = scan.observation, scan.max_seqlen
    ctx.save_for_backward(scan.cu_seqlens, scan.loss_mask, scan.gammas, scan.lams)


def _backward(ctx: Any, of_first: torch.Tensor, of_second: torch.Tensor) -> tuple[Any, ...]:
    # the transpose of a scan from the right is the scan from the left: mirror, scan, mirror
    if ctx.kind not in ("gae", "returns"):
        raise NotImplementedError(
            f"{ctx.names[0]}: no gradient flows through a scan of kind {ctx.kind!r}"
        )
    cu_seqlens, *optional = ctx.saved_tensors
    loss_mask, gammas, lams = (None if rows is None else rows.flip(0) for rows in optional)
    given = of_first.double()
    if ctx.kind == "gae":
        given = given + of_second.double()
    num, mirrored = given.shape[0], (given.shape[0] - cu_seqlens).flip(0)
    scan = Scan(
        mirrored,
        num,
        num,
        given.flip(0),
        None,
        loss_mask,
        ctx.gamma,
        ctx.lam,
        ctx.observation,
        gammas,
        lams,
        kind="adjoint",
        max_seqlen=ctx.max_seqlen,
    )
    gradient, _ = credit_scan(scan, *ctx.names)
    return gradient.flip(0).to(ctx.dtype), *[None] * 16


register_op(
    "credit_scan(Tensor rewards, Tensor cu_seqlens, Tensor? values, Tensor? loss_mask, "
    "Tensor? bootstrap, Tensor? logprobs, Tensor? rollout_logprobs, float gamma, Tensor? gammas, "
    "float lam, Tensor? lams, float[] limits, str observation, str kind, str op, str impl, "
    "SymInt? max_seqlen) -> (Tensor, Tensor)",
    _run,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
)
