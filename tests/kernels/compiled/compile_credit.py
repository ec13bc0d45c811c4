"""Launches that make Triton compile the variants of the kernels that give credit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

from trajpack.kernels.credit.turns import Turns
from trajpack.kernels.credit.turns_triton import scores_forward, spread_forward
from trajpack.kernels.scan.credit_scan_triton import steps_of_blocks, walk_segments, write_blocks
from trajpack.kernels.scan.observations import OBSERVATIONS
from trajpack.kernels.scan.scan_inputs import KINDS, Limits, Scan, ScanChunks

Launches = Iterator[tuple[str, Callable[[], Any]]]


def launches_of_scans(cu_seqlens: torch.Tensor) -> Launches:
    """Every kind of scan, with and without what it may do without, by both regimes."""
    for label, scan in scans(cu_seqlens).items():
        yield from _launches_of_scan(label, scan)


def _launches_of_scan(label: str, scan: Scan) -> Launches:
    before = None
    if scan.kind == "vtrace" and scan.chunks is None:
        before = torch.zeros(99, dtype=torch.float64, device=scan.device)
    alone = scan.kind in ("returns", "next_values", "adjoint")
    dtype = torch.float64 if scan.kind == "next_values" else torch.float32
    main = torch.zeros(99, dtype=dtype, device=scan.device)
    outputs = main, None if alone else torch.zeros_like(main)
    steps = torch.zeros((2, 2), dtype=torch.float64, device=scan.device)
    yield label, partial(walk_segments, scan, before, outputs)
    yield label, partial(steps_of_blocks, scan, before)
    yield label, partial(write_blocks, scan, before, outputs, steps)


def launches_of_every_scan(device: str = "cpu") -> Launches:
    """Every kind of scan by every observation, with the least and the most it may be given."""
    cu_seqlens = torch.zeros(9, dtype=torch.int32, device=device)
    some = scans(cu_seqlens)
    plain, rated = some["carry"], some["reset, float64, a rate each"]
    of_chunks, by_chunk = some["chunks, k3"], some["chunks, by turn"]
    given = {name: getattr(rated, name) for name in ("gammas", "lams", "bootstrap")}
    most = {name: getattr(of_chunks, name) for name in ("kl", "estimator")}
    most |= {"bootstrap": rated.bootstrap, "chunks": by_chunk.chunks}
    weights = some["vtrace, multiply"].weights
    kinds = [kind for kind in KINDS if kind != "returns"]  # "gae" with less of it
    for kind, observation in product(kinds, OBSERVATIONS):
        scan = plain._replace(kind=kind, observation=observation)
        if kind == "vtrace":
            scan = scan._replace(weights=weights)
        if kind == "adjoint":
            scan = scan._replace(values=None)
        full = scan._replace(rewards=rated.rewards, **given)
        if kind == "adjoint":
            full = full._replace(bootstrap=None)
        cases = {"least": scan, "most": full}
        if kind in ("gae", "vtrace"):
            chunks = scan._replace(
                rewards=None, loss_mask=None, chunks=of_chunks.chunks, turn_ids=of_chunks.turn_ids
            )
            cases |= {"least, chunks": chunks, "most, chunks": chunks._replace(**most)}
        for label, case in cases.items():
            yield from _launches_of_scan(f"{kind}, {observation}, {label}", case)


def scans(cu_seqlens: torch.Tensor) -> dict[str, Scan]:
    """Return scans by what they are like."""
    device = cu_seqlens.device
    tokens = torch.zeros(99, device=device)
    mask = torch.zeros(99, dtype=torch.bool, device=device)
    each = torch.zeros(8, device=device)
    gae = Scan(cu_seqlens, 99, 99, tokens, tokens, mask, 1.0, 0.95, "carry")
    rated = {"gammas": each.double(), "lams": each.double(), "bootstrap": each}
    words = torch.zeros(16, dtype=torch.int32, device=device)
    spans = words.view(8, 2)
    ids = torch.zeros(99, dtype=torch.int32, device=device)
    chunks = ScanChunks(words[:9], spans[:, 0], spans, each.double())
    of_chunks = gae._replace(rewards=None, loss_mask=None, chunks=chunks, turn_ids=ids)
    weighted = {"weights": (tokens, tokens), "limits": Limits(rho_clip=1.0)}
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
        "next values": gae._replace(kind="next_values"),
        "vtrace, multiply": gae._replace(kind="vtrace", observation="multiply", **weighted),
        "chunks, vtrace": of_chunks._replace(kind="vtrace", **weighted),
        "chunks, k3": of_chunks._replace(
            kl=(tokens, tokens), estimator="k3", limits=Limits(kl_coefficient=0.1)
        ),
        "chunks, by turn": of_chunks._replace(
            by_turn=True, bootstrap=each, chunks=chunks._replace(truncated=mask[:8])
        ),
    }


def launches_of_spreads(cu_turns: torch.Tensor) -> Launches:
    """Scores of trajectories; and what turns or trajectories have, spread over their tokens."""
    device = cu_turns.device
    words = torch.zeros(64, dtype=torch.int32, device=device)
    rows = torch.zeros(64, device=device)
    turns = Turns(words, cu_turns, words.view(32, 2))
    truncated = torch.zeros(32, dtype=torch.bool, device=device)
    yield (
        "turns",
        partial(scores_forward, rows[:32].double(), truncated, words[:33], cu_turns, 1.0),
    )
    yield "trajectories", partial(spread_forward, turns, rows, None, others=None, weight=0.5)
    yield (
        "trajectories and steps",
        partial(spread_forward, turns, rows, rows, others=None, weight=0.5),
    )
    yield "turns", partial(spread_forward, turns, rows, None, others=rows, weight=0.5)
