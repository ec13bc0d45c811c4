"""The reverse scan behind every credit estimator: its op, and its meaning in torch and numpy.

GAE, TD(λ), turn-level GAE, discounted returns and credit along turns scan one state. V-trace scans
two: the value that follows each token, and the trace. The recurrence, with state ``x`` behind a
token, is ``decay·x + increment``; see `trajpack.kernels.scan.observations`.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from trajpack.kernels.corrections.penalties import estimate
from trajpack.kernels.dispatch import Impl, register_op, resolve_impl
from trajpack.kernels.scan.observations import PASSING
from trajpack.kernels.scan.scan_inputs import Limits, Scan, check_scan_inputs, split_rate
from trajpack.kernels.validation import check_boundaries, check_segments_within, values_to_check

ROW = 64
"""Entries of a row on the host. Rows are cut from a segment's end: ROW fixes the order of sums."""
ENTRIES_AT_ONCE = 2**16
"""Entries that the host walks together, so that they stay in the cache."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Rate: TypeAlias = torch.Tensor | float


class EntryIndex:
    """Segment of each entry of packed segments; entries behind the last segment belong to it."""

    def __init__(self, bounds: torch.Tensor, num_entries: int) -> None:
        self.bounds, self.num_entries = bounds, num_entries

    @cached_property
    def entry(self) -> torch.Tensor:
        """int64 ``[entries]``: index of each entry."""
        return torch.arange(self.num_entries, device=self.bounds.device)

    @cached_property
    def segment(self) -> torch.Tensor:
        """int32 ``[entries]``: segment of each entry."""
        end = self.bounds.new_full((1,), self.num_entries)
        lengths = torch.cat([self.bounds[:-1], end]).diff()
        return torch.repeat_interleave(lengths, output_size=self.num_entries)

    def expand(self, of_segments: torch.Tensor) -> torch.Tensor:
        """Return what each segment has at the segment's entries."""
        return of_segments.index_select(0, self.segment)

    @cached_property
    def is_first(self) -> torch.Tensor:
        """Bool ``[entries]``: True on the first entry of each segment."""
        return self.entry == self.expand(self.bounds[:-1])

    @cached_property
    def is_last(self) -> torch.Tensor:
        """Bool ``[entries]``: True on the last entry of each segment."""
        return self.entry + 1 == self.expand(self.bounds[1:])


class ScannedTokens(NamedTuple):
    """Tokens in the order of the scan: ``[positions]`` each."""

    entries: EntryIndex
    rewards: torch.Tensor
    """float64."""
    generated: torch.Tensor
    """bool."""
    observation: str
    """Convention for tokens that were not generated."""
    token: torch.Tensor | None = None
    """int64: token at each position, ``num_tokens`` where there is none; ``None`` where a position
    is a token."""

    def rows_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` [tokens] at each position in float64, 0 where there is no token."""
        rows = rows.double()
        return rows if self.token is None else torch.cat([rows, rows.new_zeros(1)])[self.token]

    def passed_rewards(self) -> torch.Tensor | float:
        """Return the rewards that skipped tokens pass to the last generated token before them."""
        if self.observation == "carry":
            return self.rewards
        if self.observation == "compact":
            return torch.where(self.entries.is_last, self.rewards, 0.0)
        return 0.0

    def states(
        self,
        decay: torch.Tensor | float,
        increment: torch.Tensor,
        start: torch.Tensor,
        passed: torch.Tensor | float = 0.0,
    ) -> torch.Tensor:
        """Return the state behind each entry, by the convention where none was generated.

        ``passed`` is the increment of tokens through which the state passes.
        """
        if not isinstance(decay, torch.Tensor):
            decay = torch.full_like(increment, decay)
        if self.observation in PASSING:
            decay = torch.where(self.generated, decay, 1.0)
            increment = torch.where(self.generated, increment, passed)
        elif self.observation == "reset":
            decay = torch.where(self.generated, decay, 0.0)
        on_host = increment.device.type == "cpu"
        run = exclusive_scan_on_host if on_host else exclusive_scan_reference
        return run(decay, increment, start, self.entries.bounds)


def scan_tokens(
    op: str, scan: Scan, impl: Impl, *, gamma_name: str = "gamma"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Check the arguments of the estimator ``op``, the fields of ``scan``, then run its scan.

    The second result is empty for ``kind="returns"``.
    """
    check_scan_inputs(op, scan)
    gamma, gammas = split_rate(op, gamma_name, scan.gamma, scan.cu_seqlens)
    lam, lams = split_rate(op, "lam", scan.lam, scan.cu_seqlens)
    scan = scan._replace(gamma=gamma, gammas=gammas, lam=lam, lams=lams)
    scan = Scan._make(one.contiguous() if isinstance(one, torch.Tensor) else one for one in scan)
    return credit_scan(scan, op, resolve_impl(op, impl, scan.cu_seqlens.device))


def credit_scan(scan: Scan, op: str, impl: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the op ``trajpack::credit_scan`` for ``op``; values of its tables alone are checked.

    Returns:
        Advantages and returns, float32 ``[tokens]``, 0 where not generated. The kinds ``"returns"``
        and ``"adjoint"`` have one result; their second tensor is empty.
    """
    inputs = scan._replace(limits=list(scan.limits))
    results: tuple[torch.Tensor, torch.Tensor] = torch.ops.trajpack.credit_scan(*inputs, op, impl)
    return results


def credit_scan_reference(scan: Scan) -> tuple[torch.Tensor, torch.Tensor]:
    """Define every kind of scan in plain torch; numpy runs the recurrence on the CPU."""
    tokens = _tokens(scan) if scan.spans is None else _tokens_of_chunks(scan)
    rewards, generated, start = tokens.rewards, tokens.generated, _start(scan)
    gamma, lam = (
        float(rate) if rates is None else tokens.entries.expand(rates)
        for rate, rates in ((scan.gamma, scan.gammas), (scan.lam, scan.lams))
    )
    if scan.kind == "adjoint":
        results = [_gradient(tokens, gamma * lam, start)]
    else:
        values = rewards.new_zeros(()) if scan.values is None else tokens.rows_of(scan.values)
        if tokens.observation == "multiply":
            rewards, values = (torch.where(generated, rows, 0.0) for rows in (rewards, values))
            tokens = tokens._replace(rewards=rewards)
        if scan.kind == "vtrace":
            results = _vtrace(scan, tokens, values, gamma, lam)
        else:
            increment = gamma * lam * rewards
            if scan.values is not None:
                increment = gamma * (1 - lam) * values + increment
            states = tokens.states(gamma * lam, increment, start, tokens.passed_rewards())
            results = [rewards + states]
            if scan.kind == "gae":
                results.insert(0, rewards - values + states)
        if scan.loss_mask is not None or scan.spans is not None:
            results = [torch.where(generated, rows, 0.0) for rows in results]
    first, *others = [_at_tokens(rows.float(), tokens.token, scan.num_tokens) for rows in results]
    return first, others[0] if others else first.new_empty(0)


def _vtrace(
    scan: Scan, tokens: ScannedTokens, values: torch.Tensor, gamma: Rate, lam: Rate
) -> list[torch.Tensor]:
    """Return advantages and value targets."""
    rewards, start = tokens.rewards, _start(scan)
    behind = tokens.states(0.0, gamma * values, start, tokens.passed_rewards())
    if tokens.observation == "reset":
        behind = torch.where(tokens.generated, behind, 0.0)
    rho, c, advantage_rho = _clipped_ratios(scan, tokens)
    surprise = rewards + behind - values
    trace = tokens.states(gamma * lam * c, gamma * rho * surprise, torch.zeros_like(start))
    return [advantage_rho * (surprise + trace), values + rho * surprise + lam * c * trace]


def _gradient(tokens: ScannedTokens, rate: Rate, start: torch.Tensor) -> torch.Tensor:
    """Return the gradient of rewards; ``tokens`` are mirrored, their rewards are gradients."""
    own = torch.where(tokens.generated, tokens.rewards, 0.0)
    states = tokens.states(rate, own, start)
    if tokens.observation in ("ignore", "reset"):
        return own + rate * states
    factor = torch.zeros_like(own)  # of the states, where tokens were not generated
    if tokens.observation == "carry":
        factor = torch.ones_like(own)
    elif tokens.observation == "compact":
        factor = tokens.entries.is_first.double()
    return own + torch.where(tokens.generated, rate, factor) * states


def _at_tokens(rows: torch.Tensor, token: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
    """Return what each position has at its token; 0 at other tokens."""
    if token is None:
        return rows
    return rows.new_zeros(num_tokens + 1).index_copy_(0, token, rows)[:-1]


def _start(scan: Scan) -> torch.Tensor:
    """Return the state behind each segment's last entry: float64 ``[segments]``."""
    if scan.bootstrap is None:
        return torch.zeros_like(scan.cu_seqlens[1:], dtype=torch.float64)
    return (scan.gamma if scan.gammas is None else scan.gammas) * scan.bootstrap.double()


def _clipped_ratios(scan: Scan, tokens: ScannedTokens) -> list[torch.Tensor]:
    """Return the importance ratio of each token under the three clips; 1 if not generated."""
    assert scan.logprobs is not None
    assert scan.rollout_logprobs is not None
    ratio = tokens.rows_of(scan.logprobs) - tokens.rows_of(scan.rollout_logprobs)
    ratio = torch.where(tokens.generated, ratio, 0.0).exp()
    clips = Limits(*scan.limits)[3:]
    return [torch.where(tokens.generated, ratio.clamp(max=clip), 1.0) for clip in clips]


def _tokens(scan: Scan) -> ScannedTokens:
    """Return all tokens; without a mask they are steps."""
    assert scan.rewards is not None
    rewards, generated, observation = scan.rewards.double(), scan.loss_mask, scan.observation
    if generated is None:
        generated, observation = torch.ones_like(rewards, dtype=torch.bool), "ignore"
    entries = EntryIndex(scan.cu_seqlens, scan.num_tokens)
    return ScannedTokens(entries, rewards, generated, observation)


def _tokens_of_chunks(scan: Scan) -> ScannedTokens:
    """Return the tokens of the chunks, with the rewards of the turns on their last tokens."""
    limits, spans, cu_positions = Limits(*scan.limits), scan.spans, scan.cu_positions
    assert spans is not None
    assert cu_positions is not None
    assert scan.begins is not None
    assert scan.turn_rewards is not None
    position = torch.arange(scan.positions, device=spans.device)
    chunk = torch.searchsorted(cu_positions[1:].long(), position, right=True)
    exists = chunk < scan.num_chunks
    chunk = chunk.clamp(max=max(scan.num_chunks - 1, 0))
    token = scan.begins.long()[chunk] + position - cu_positions.long()[chunk]
    generated = exists & (token >= spans[chunk, 0])
    rewards = scan.turn_rewards.clamp(-limits.reward_clip, limits.reward_clip)
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
    entries = EntryIndex(cu_positions[scan.cu_seqlens.long()], scan.positions)
    place = torch.where(exists, token, scan.num_tokens)
    tokens = ScannedTokens(entries, reward, generated, scan.observation, place)
    if scan.ref_logprobs is not None:
        assert scan.logprobs is not None
        logprobs, ref_logprobs = tokens.rows_of(scan.logprobs), tokens.rows_of(scan.ref_logprobs)
        clamp = None if limits.kl_clamp == float("inf") else limits.kl_clamp
        penalty = estimate(logprobs, ref_logprobs, str(scan.estimator), clamp)
        penalty = torch.where(generated, limits.kl_coefficient * penalty, 0.0)
        tokens = tokens._replace(rewards=reward - penalty)
    if scan.by_turn:
        tokens = tokens._replace(generated=exists & (token == spans[chunk, 0]))
    return tokens


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
    end = index.expand(bounds[1:])
    reach = 1
    while reach < longest:
        inside = index.entry[:-reach] + reach < end[:-reach]
        later_decay = torch.where(inside, decay[reach:], 1.0)
        later_increment = torch.where(inside, increment[reach:], 0.0)
        first = increment[:-reach] + _times(decay[:-reach], later_increment)
        increment = torch.cat([first, increment[-reach:]])
        decay = torch.cat([decay[:-reach] * later_decay, decay[-reach:]])
        reach *= 2
    return increment + _times(decay, index.expand(start.double()))


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


def _check_chunks(op: str, scan: Scan) -> None:
    """Raise if the values of the tables can be read and lead out of the tokens."""
    assert scan.cu_positions is not None
    assert scan.spans is not None
    check_boundaries(op, scan.cu_seqlens, scan.num_chunks, name="cu_turns", end="turns")
    check_segments_within(op, "spans", scan.spans, scan.num_tokens)
    check_segments_within(op, "cu_positions", scan.cu_positions, scan.positions)
    readable = values_to_check(scan.cu_positions)
    if readable is not None and scan.begins is not None:
        begins = scan.begins.cpu()
        scanned = torch.stack([begins, begins + readable.diff()], 1)
        check_segments_within(op, "chunks from begins", scanned, scan.num_tokens)


def _check_turn_ids(op: str, turn_ids: torch.Tensor, spans: torch.Tensor) -> None:
    """Raise if the values can be read and tokens with a turn are not those of the spans.

    The kernel writes the results of spans, and 0 on tokens without a turn. A token that is neither
    keeps what was in memory.
    """
    if (ids := values_to_check(turn_ids)) is None:
        return
    begins, ends = (torch.bincount(one, minlength=len(ids) + 1) for one in spans.cpu().unbind(1))
    wrong = ((begins - ends).cumsum(0)[:-1] > 0) != (ids >= 0)
    if wrong.any():
        first = int(wrong.int().argmax())
        raise ValueError(
            f"{op}: turn_ids must be 0 or more on the tokens of spans alone, token {first} has "
            f"{int(ids[first])}"
        )


def _run(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *fields, op, impl = inputs
    scan = Scan(*fields)
    if scan.spans is None:
        check_boundaries(op, scan.cu_seqlens, scan.num_tokens)
    else:
        _check_chunks(op, scan)
        if impl == "triton" and scan.turn_ids is not None and not scan.by_turn:
            _check_turn_ids(op, scan.turn_ids, scan.spans)
    if impl == "torch":
        return credit_scan_reference(scan)
    from trajpack.kernels.scan.credit_scan_triton import credit_scan_forward

    return credit_scan_forward(scan)


def _fake(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scan = Scan(*inputs[:-2])
    first = scan.cu_seqlens.new_empty(scan.num_tokens, dtype=torch.float32)
    has_one = scan.kind in ("returns", "adjoint")
    return first, first.new_empty(0) if has_one else torch.empty_like(first)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *fields, ctx.op, ctx.impl = inputs
    scan = Scan(*fields)
    ctx.save_for_backward(scan.cu_seqlens, scan.loss_mask, scan.gammas, scan.lams)
    ctx.dtype = None if scan.rewards is None else scan.rewards.dtype
    ctx.rest = Scan._make(None if isinstance(one, torch.Tensor) else one for one in scan)


def _backward(ctx: Any, of_first: torch.Tensor, of_second: torch.Tensor) -> tuple[Any, ...]:
    # the transpose of a scan from the right is the scan from the left: mirror, scan, mirror
    if ctx.rest.kind not in ("gae", "returns"):
        raise NotImplementedError(
            f"{ctx.op}: no gradient flows through a scan of kind {ctx.rest.kind!r}"
        )
    cu_seqlens, *optional = ctx.saved_tensors
    loss_mask, gammas, lams = (None if rows is None else rows.flip(0) for rows in optional)
    given = of_first.double()
    if ctx.rest.kind == "gae":
        given = given + of_second.double()
    scan = ctx.rest._replace(
        cu_seqlens=(given.shape[0] - cu_seqlens).flip(0),
        rewards=given.flip(0),
        loss_mask=loss_mask,
        gammas=gammas,
        lams=lams,
        kind="adjoint",
    )
    gradient, _ = credit_scan(scan, ctx.op, ctx.impl)
    return None, gradient.flip(0).to(ctx.dtype), *[None] * len(scan)


register_op(
    "credit_scan(Tensor cu_seqlens, Tensor? rewards, Tensor? values, Tensor? loss_mask, "
    "float gamma, float lam, str observation, Tensor? gammas, Tensor? lams, Tensor? bootstrap, "
    "Tensor? logprobs, Tensor? rollout_logprobs, Tensor? ref_logprobs, str? estimator, "
    "Tensor? cu_positions, Tensor? begins, Tensor? spans, Tensor? turn_rewards, "
    "Tensor? turn_ids, SymInt? num_positions, bool by_turn, float[] limits, str kind, "
    "SymInt? max_seqlen, str op, str impl) -> (Tensor, Tensor)",
    _run,
    _fake,
    setup_context=_setup_context,
    backward=_backward,
)
