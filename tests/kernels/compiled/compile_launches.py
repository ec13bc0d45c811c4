"""Launches that make Triton compile every variant of every kernel.

Of the scans there are a few among them; `launches_of_every_scan` has all kinds by all observations.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from compile_recorder import crowded_kernel, hinted_kernel, masked_kernel, shuffled_kernel

from trajpack.kernels.corrections.importance_weights import Correction
from trajpack.kernels.corrections.importance_weights_triton import importance_weights_forward
from trajpack.kernels.corrections.loss_weights_triton import loss_weights_forward
from trajpack.kernels.corrections.slots import Places
from trajpack.kernels.credit.turns_triton import scores_forward, spread_forward
from trajpack.kernels.fields.build import empty_memory
from trajpack.kernels.fields.build_triton import write_fields
from trajpack.kernels.fields.gather_fields import GatherInputs
from trajpack.kernels.fields.gather_fields_triton import write_rows
from trajpack.kernels.fields.units import UNITS, Rows, empty_units
from trajpack.kernels.groups.group_advantages import Rule
from trajpack.kernels.groups.group_advantages_triton import (
    LONG,
    group_advantages_forward,
)
from trajpack.kernels.logprobs.logit_statistics import Tile
from trajpack.kernels.logprobs.logit_statistics_triton import BLOCK, fold_forward, slope_forward
from trajpack.kernels.logprobs.pair_logits import Logits, Pairs
from trajpack.kernels.rearrange.pad_triton import pad_forward, unpad_forward
from trajpack.kernels.rearrange.select_tokens_triton import select_forward
from trajpack.kernels.reduce.whiten_triton import moments_forward, whiten_forward
from trajpack.kernels.scan.credit_scan_triton import LONGEST_WALK, launch
from trajpack.kernels.scan.observations import OBSERVATIONS
from trajpack.kernels.scan.scan_inputs import KINDS, Limits, Scan

PLAIN = {"BLOCK": 1024, "num_warps": 4, "enable_fp_fusion": False}
Launches = Iterator[tuple[str, partial[Any]]]
TOKENS = 1500
OWN = (8, 4, 1, 1, 4, 4, 4, 4)
"""Units of a micro-batch's tensors: ids, turns, two masks, log-probabilities, versions, returns
and advantages."""
CHUNKS = ("cu_positions", "begins", "spans", "turn_rewards", "turn_ids")
"""Inputs of a scan that has chunks."""
DEMANDING = {
    "write_fields": {"aligned"},
    "write_rows": {"1 x 1 and 3 x 2 and 1 x 4 and 1 x 8"},
    "pad_forward": {"3 x 1", "3 x 2"},
    "unpad_forward": {"3 x 1", "3 x 2"},
    "select_forward": {"own and 3 x 1 and 3 x 2 and 3 x 4 and 3 x 8"},
    "launch": {"carry, in rows", "reset, float64, a rate each", "chunks, vtrace, in rows"},
    "scores_forward": {"turns", "given"},
    "spread_forward": {"trajectories and steps", "two of turns"},
    "group_advantages_forward": {
        "mean by std, valid",
        "second_best by std",
        "leave_one_out by leave_one_out_std, valid",
        "mean by std, valid, a warp each",
        "mean by std, valid, long",
    },
    "moments_forward": {"float64", "float64, numbers"},
    "whiten_forward": {"float64", "float64, numbers, own"},
    "importance_weights_forward": {"float32", "float64, bounds"},
    "loss_weights_forward": {"int64 ids, owners", "ends"},
    "fold_forward": {"bfloat16, all", "float64, all"},
    "slope_forward": {"bfloat16, all", "float64, all"},
}
"""By what launches: the variants that take most registers, shuffles and barriers, or stand beside
those under another ceiling. Aligned inputs are where the compiler may widen an access."""


def demanding_launches(device: str = "cpu") -> Launches:
    """Yield the variants that are closest to a kernel's bounds."""
    for label, call in launches_of_every_variant(device):
        if label in DEMANDING[call.func.__name__]:
            yield label, call


def launches_of_every_variant(device: str = "cpu") -> Launches:
    """Yield what the inputs are like, and a launch on them that compiles one variant."""
    words, cu_seqlens = (torch.zeros(n, dtype=torch.int32, device=device) for n in (99, 9))
    runs = words[:24].view(3, 8)
    returns = torch.zeros(9, device=device)
    written = {"num_tokens": 1500, "memory": empty_memory(1500, words.device)}
    yield "aligned", partial(write_fields, words, runs, returns, **written)
    yield "unaligned", partial(write_fields, words[1:], runs, returns[1:], **written)
    yield from launches_of_every_field(words, runs)
    yield from launches_of_every_row(cu_seqlens)
    yield from launches_of_selections(words)
    yield from launches_of_scans(cu_seqlens)
    yield from launches_of_spreads(cu_seqlens)
    yield from launches_of_groups(returns)
    yield from launches_of_whitening(returns)
    yield from launches_of_importance(cu_seqlens)
    yield from launches_of_loss_weights(cu_seqlens)
    yield from launches_of_logits(cu_seqlens)


def launches_of_every_field(words: torch.Tensor, runs: torch.Tensor) -> Launches:
    """Extra fields of every unit, one and several to a row, one and several at once."""
    one, three = ([Rows(width, unit, -1) for unit in UNITS] for width in (1, 3))
    cases = {f"{row.width} x {row.unit}": ([row], [row.unit % 2 > 0]) for row in (*one, *three)}
    cases["1 x 1, all tokens"] = [one[0]], [False]
    cases["1 x 2, generated"] = [one[1]], [True]
    several = [one[0], three[1], one[2], one[3]], [True, False, False, False]
    cases["1 x 1 and 3 x 2 and 1 x 4 and 1 x 8"] = several
    for label, (layouts, masks) in cases.items():
        sources = torch.zeros((3, len(layouts)), dtype=torch.int64, device=words.device)
        out = empty_units(layouts, 1500, words.device)
        given = GatherInputs(words, runs, sources, 1500, layouts, masks)
        yield label, partial(write_rows, out, given)
    unaligned = torch.zeros(13, dtype=torch.int64, device=words.device)[1:].view(3, 4)
    shifted = {"words": words[1:], "runs": words[25:49].view(3, 8), "sources": unaligned}
    yield f"{label}, unaligned", partial(write_rows, out, given._replace(**shifted))


def launches_of_every_row(cu_seqlens: torch.Tensor) -> Launches:
    """Pad and unpad rows of one unit and of several, for every width of a unit."""
    memory = torch.zeros(9000, dtype=torch.int8, device=cu_seqlens.device)
    for unit in (1, 2, 4, 8, 16):
        unaligned = f"3 x {unit} unaligned", 3 * unit, unit % 16, cu_seqlens[1:]
        aligned = [(f"{units} x {unit}", units * unit, 0, cu_seqlens) for units in (1, 3)]
        for label, row, start, ends in (*aligned, unaligned):
            batch = len(ends) - 1
            packed = memory[start : start + 99 * row].view(99, row)
            padded = memory[start : start + batch * 12 * row].view(batch, 12, row)
            yield label, partial(pad_forward, packed, ends, 12, 1, "left")
            yield label, partial(unpad_forward, padded, ends, 99, "left")


def launches_of_whitening(returns: torch.Tensor) -> Launches:
    """Moments and whitening of both dtypes; inputs that are not aligned are moved first."""
    given = torch.zeros(5, dtype=torch.float64, device=returns.device)
    options = {"ddof": 1, "eps": 0.0, "center": True}
    for dtype in (torch.float32, torch.float64):
        x = returns.to(dtype)
        label = str(dtype).removeprefix("torch.")
        for kind, suffix in ((torch.bool, ""), (torch.int32, ", numbers")):
            counts = torch.zeros(x.shape, dtype=kind, device=x.device)
            yield f"{label}{suffix}", partial(moments_forward, x, counts)
            yield f"{label}{suffix}", partial(whiten_forward, x, counts, given, **options)
            yield f"{label}{suffix}, own", partial(whiten_forward, x, counts, None, **options)


def launches_of_importance(cu_seqlens: torch.Tensor) -> Launches:
    """Importance weights of both dtypes, without segments, by ids and by boundaries."""
    device, rule = cu_seqlens.device, Correction(level="segment")
    ids = torch.zeros(99, dtype=torch.int32, device=device)
    mask = torch.zeros(99, dtype=torch.int8, device=device)
    by_ids, by_bounds = Places(None, ids, None, 8, 8), Places(cu_seqlens, None, ids[1:9], 8, 8)
    for dtype in (torch.float32, torch.float64):
        x, name = torch.zeros(99, dtype=dtype, device=device), str(dtype).removeprefix("torch.")
        weigh = partial(importance_weights_forward, x, x, mask)
        yield name, partial(weigh, Correction(), None)
        yield f"{name}, no metrics", partial(weigh, Correction(), None, measures=False)
        for places, label in ((by_ids, f"{name}, ids"), (by_bounds, f"{name}, bounds")):
            yield label, partial(weigh, rule, places)


def launches_of_loss_weights(owners: torch.Tensor) -> Launches:
    """Ids of sequences, with and without groups, or none; masks of tokens, or their numbers."""
    device = owners.device
    mask, numbers = (torch.zeros(99, dtype=t, device=device) for t in (torch.int8, torch.int32))
    share = partial(loss_weights_forward, denominator=None, given=0.0, divides=True)
    yield "no ids", partial(share, mask, None)
    for dtype in (torch.int32, torch.int64):
        ids = torch.zeros(99, dtype=dtype, device=device)
        label, places = f"{dtype} ids".removeprefix("torch."), Places(None, ids, None, 8, 8)
        yield label, partial(share, mask, places, given=2.0)
    yield f"{label}, owners", partial(share, mask, Places(None, ids, owners, 9, 8))
    yield "ends", partial(share, numbers, Places(None, None, owners, 98, 8))


def launches_of_logits(rows: torch.Tensor) -> Launches:
    """Tiles of logits of every dtype, with all that a head may have and without."""
    pairs = Pairs(rows.new_zeros(10), torch.zeros(9, dtype=torch.int64, device=rows.device))
    picked = torch.zeros(9, dtype=torch.float64, device=rows.device)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        memory = torch.zeros(9 * BLOCK, dtype=dtype, device=rows.device)
        sums = torch.float64 if dtype == torch.float64 else torch.float32
        vectors = torch.zeros((4, 16), dtype=sums, device=rows.device)
        padded = memory.view(9, -1)
        tile = Tile(slice(0, 9), slice(0, 99), padded[:, :99], padded, memory, padded)
        name = str(dtype).removeprefix("torch.")
        for label, temperature in ((name, None), (f"{name}, all", vectors[0].float())):
            logits = Logits(memory, memory, None, rows, temperature, 0.0)
            mean = {"with_mean": temperature is not None}
            yield label, partial(fold_forward, logits, tile, pairs, vectors[:3], picked, **mean)
            of_picked = picked.to(dtype)
            yield label, partial(slope_forward, logits, tile, pairs, vectors, of_picked, **mean)


def launches_of_scans(cu_seqlens: torch.Tensor) -> Launches:
    """Every kind of scan, with and without what it may do without, by both regimes."""
    for label, scan in scans(cu_seqlens).items():
        yield from _launches_of_scan(label, scan)


def _launches_of_scan(label: str, scan: Scan) -> Launches:
    main = torch.zeros(99, device=scan.cu_seqlens.device)
    outputs = (main,) if scan.kind in ("returns", "adjoint") else (main, torch.zeros_like(main))
    yield label, partial(launch, scan, outputs)
    long = scan._replace(num_positions=LONGEST_WALK + 1)
    yield f"{label}, in rows", partial(launch, long, outputs)


def launches_of_every_scan(device: str = "cpu") -> Launches:
    """Every kind of scan by every observation, with the least and the most it may be given."""
    cu_seqlens = torch.zeros(9, dtype=torch.int32, device=device)
    some = scans(cu_seqlens)
    plain, rated = some["carry"], some["reset, float64, a rate each"]
    of_chunks = some["chunks, k3"]
    given = {name: getattr(rated, name) for name in ("gammas", "lams", "bootstrap")}
    names = ("logprobs", "ref_logprobs", "estimator")
    most = {name: getattr(of_chunks, name) for name in names}
    most |= {"bootstrap": rated.bootstrap}
    weights = {"logprobs": plain.rewards, "rollout_logprobs": plain.rewards}
    chunks = {name: getattr(of_chunks, name) for name in CHUNKS}
    kinds = [kind for kind in KINDS if kind != "returns"]  # "gae" with less of it
    for kind, observation in product(kinds, OBSERVATIONS):
        scan = plain._replace(kind=kind, observation=observation)
        if kind == "vtrace":
            scan = scan._replace(**weights)
        if kind == "adjoint":
            scan = scan._replace(values=None)
        full = scan._replace(rewards=rated.rewards, **given)
        if kind == "adjoint":
            full = full._replace(bootstrap=None)
        cases = {"least": scan, "most": full}
        if kind in ("gae", "vtrace"):
            least = scan._replace(rewards=None, loss_mask=None, **chunks)
            cases |= {"least, chunks": least, "most, chunks": least._replace(**most)}
        for label, case in cases.items():
            yield from _launches_of_scan(f"{kind}, {observation}, {label}", case)


def scans(cu_seqlens: torch.Tensor) -> dict[str, Scan]:
    """Return scans by what they are like."""
    device = cu_seqlens.device
    tokens = torch.zeros(99, device=device)
    mask = torch.zeros(99, dtype=torch.bool, device=device)
    each = torch.zeros(8, device=device)
    gae = Scan(cu_seqlens, tokens, tokens, mask, 1.0, 0.95, "carry")
    rated = {"gammas": each.double(), "lams": each.double(), "bootstrap": each}
    words = torch.zeros(16, dtype=torch.int32, device=device)
    spans = words.view(8, 2)
    ids = torch.zeros(99, dtype=torch.int32, device=device)
    chunks = dict(zip(CHUNKS, (words[:9], spans[:, 0], spans, each.double(), ids), strict=True))
    of_chunks = gae._replace(rewards=None, loss_mask=None, **chunks)
    weighted = {"logprobs": tokens, "rollout_logprobs": tokens, "limits": Limits(rho_clip=1.0)}
    return {
        "carry": gae,
        "reset, float64, a rate each": gae._replace(
            rewards=tokens.double(), observation="reset", **rated
        ),
        "returns": gae._replace(values=None, kind="returns"),
        "returns of turns, float64, a rate each": gae._replace(
            rewards=tokens.double(), values=None, loss_mask=None, kind="returns", **rated
        )._replace(lams=None, bootstrap=None),
        "gradient": gae._replace(values=None, kind="adjoint"),
        "vtrace, carry": gae._replace(kind="vtrace", **weighted),
        "vtrace, multiply": gae._replace(kind="vtrace", observation="multiply", **weighted),
        "chunks, vtrace": of_chunks._replace(kind="vtrace", **weighted),
        "chunks, k3": of_chunks._replace(
            logprobs=tokens, ref_logprobs=tokens, estimator="k3", limits=Limits(kl_coefficient=0.1)
        ),
        "chunks, by turn": of_chunks._replace(by_turn=True, bootstrap=each),
    }


def launches_of_spreads(cu_turns: torch.Tensor) -> Launches:
    """Scores of trajectories; and what turns or trajectories have, spread over their tokens."""
    device = cu_turns.device
    words = torch.zeros(64, dtype=torch.int32, device=device)
    rows = torch.zeros(64, device=device)
    runs, index = words[:24].view(3, 8), words[:32]
    truncated = torch.zeros(32, dtype=torch.bool, device=device)
    inputs = rows[:32].double(), words[:33], cu_turns, words[:32]
    for label, given in (("turns", None), ("given", rows), ("given, float64", rows.double())):
        cut = None if given is None else truncated
        yield label, partial(scores_forward, *inputs, given=given, truncated=cut, clip=1.0)
    for label, given in {
        "turns": (rows, None, None, None),
        "trajectories": (rows, None, index, None),
        "trajectories and steps": (rows, rows, index, None),
        "two of turns": (rows, None, index, rows),
    }.items():
        yield label, partial(spread_forward, 1500, runs, *given, weight=0.5)


def launches_of_groups(scores: torch.Tensor) -> Launches:
    """What is summed in each way that a recipe asks for, with and without marks."""
    scores = scores.new_zeros(LONG + 1)
    ids = torch.zeros_like(scores, dtype=torch.int64)
    valid, small = ids.bool(), ids.int()
    spans = torch.stack([small, small], 1)

    def launch(
        baseline: str, scale: str, order: torch.Tensor, longest: int = 9, **more: Any
    ) -> partial[Any]:
        rule, more = Rule(baseline, scale), more | {"longest": longest}
        kind, segments = (scores.double(), small) if order is small else (scores, spans)
        return partial(group_advantages_forward, kind, segments, order, rule, **more)

    yield "mean by std", launch("mean", "std", small)
    yield "mean by std, valid", launch("mean", "std", small, valid=valid)
    yield "mean by std, valid, a warp each", launch("mean", "std", small, LONG, valid=valid)
    yield "mean by std, valid, long", launch("mean", "std", small, LONG + 1, valid=valid)
    yield "length_weighted", launch("length_weighted", "none", ids, lengths=ids)
    yield "second_best by std", launch("second_best", "std", ids)
    others = launch("leave_one_out", "leave_one_out_std", small, valid=valid)
    yield "leave_one_out by leave_one_out_std, valid", others
    yield "none by std_about_baseline", launch("none", "std_about_baseline", ids)
    yield "mean by nonzero, valid", launch("mean", "nonzero", small, valid=valid, shares=small[:2])


def launches_of_selections(words: torch.Tensor) -> Launches:
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


def launches_of_planted(backend: str) -> Launches:
    """Kernels with a fault each."""
    words = torch.zeros(99, dtype=torch.int32)
    for kernel in (masked_kernel, hinted_kernel, shuffled_kernel):
        yield "planted", partial(kernel[(1,)], words, words, 99, **PLAIN)
    if backend == "cuda":
        crowded = PLAIN | {"BLOCK": 8192, "maxnreg": 32}
        yield "planted", partial(crowded_kernel[(1,)], words, words, 99, **crowded)
