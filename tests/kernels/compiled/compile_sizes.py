"""Calls of every operator with inputs of many sizes: which variants of which kernels they ask for.

Nothing is compiled here. Triton asks a hook before it compiles a variant, with the key that it
would keep it under; the hook takes the key down and answers that nothing is to be done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import triton
from compile_recorder import recording, sized_kernel
from triton.backends.compiler import GPUTarget

from trajpack import (
    GAE,
    GRPO,
    Alignment,
    TokenField,
    Trajectory,
    TrajectoryBuffer,
    Turn,
    TurnReturns,
    VTrace,
    kernels,
    pack_resident,
)
from trajpack.kernels.corrections.importance_weights import weigh_tokens
from trajpack.kernels.corrections.slots import Places
from trajpack.kernels.fields.build import empty_memory
from trajpack.kernels.fields.build_triton import write_fields
from trajpack.kernels.fields.gather_fields import FieldLayout, gather_fields
from trajpack.kernels.fields.units import Rows
from trajpack.kernels.rearrange.pad_triton import pad_forward, unpad_forward
from trajpack.kernels.rearrange.select_tokens_triton import select_forward
from trajpack.kernels.reduce.segment_reduce_triton import segment_reduce_forward
from trajpack.kernels.reduce.whiten_triton import moments_forward, whiten_forward
from trajpack.kernels.scan.credit_scan_triton import credit_scan_forward
from trajpack.kernels.scan.scan_inputs import Scan
from trajpack.packing.credit.estimators import GiGPO
from trajpack.packing.plan.plan import plan_micro_batches

SIZES = (1, 2, 5, 15, 16, 17, 48, 4096, 4097, 8192, 8193, 9001, 16_400)
"""Entries: one, multiples of 16 and others, on both sides of what a program and a regime take."""
MOST_TOKENS = 2**31 - 1024
LARGE = (MOST_TOKENS, MOST_TOKENS - 15, 2**30, 3_000_000, 17)
"""Tokens, in tensors that have no values."""
BEYOND = (3_000_000_000, 3_000_000_016, 2**32 + 1, 17)
"""Entries where an operator takes more than an int32 counts."""

Calls = dict[str, Callable[..., Any]]


def variants_of_sizes(device: int) -> dict[str, dict[str, list[list[int]]]]:
    """Return by operator and kernel the variants that are asked for: the sizes that ask for each.

    ``device`` keeps what is found apart from what is compiled.
    """
    found: dict[str, dict[str, list[list[int]]]] = {}
    asked: list[tuple[str, str]] = []

    def note(*, key: Any, fn: Any, **_: Any) -> bool:
        asked.append((fn.name.rpartition(".")[2], str(key)))
        return True

    with recording(GPUTarget("cuda", 90, 32), device):
        triton.knobs.runtime.jit_cache_hook = note
        for operator, calls in calls_of_sizes():
            sizes: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
            for size, call in calls:
                asked.clear()
                call()
                for kernel, key in asked:
                    sizes[kernel][key].append(size)
            found[operator] = {kernel: list(by_key.values()) for kernel, by_key in sizes.items()}
        triton.knobs.runtime.jit_cache_hook = None
    return found


def calls_of_sizes() -> Iterator[tuple[str, list[tuple[int, Callable[[], Any]]]]]:
    """Yield each operator by name, with a call for each size."""
    for operator, call in {**OPERATORS, **RECIPES, **PATHS, "planted": planted}.items():
        yield operator, [(size, partial(call, size)) for size in SIZES]
    for operator, call in LAUNCHERS.items():
        sizes = BEYOND if "whiten" in operator or "moments" in operator else LARGE
        yield f"{operator}, large", [(size, partial(call, size)) for size in sizes]


def boundaries_of(size: int, device: str = "cpu") -> torch.Tensor:
    """Return boundaries of segments of ragged lengths, more of them where there is more."""
    segments = min(size, size % 7 + 1 + size // 1000)
    cuts = torch.linspace(0, size, segments + 1, dtype=torch.float64)
    return cuts.int().to(device)


def planted(size: int) -> None:
    words = torch.zeros(99, dtype=torch.int32)
    sized_kernel[(1,)](words, words, size, BLOCK=64, enable_fp_fusion=False)


def floats(size: int) -> torch.Tensor:
    return torch.zeros(size)


def marks(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bool)


def head_of(size: int) -> tuple[torch.Tensor, ...]:
    """Return hidden states, an LM head, and some rows and targets."""
    hidden, weight = (torch.zeros(n, 2, requires_grad=True) for n in (9, size % 3000 + 3))
    return hidden, weight, *(torch.zeros(size % 9, dtype=torch.int64) for _ in range(2))


def scan(op: Callable[..., Any], size: int, **more: Any) -> Any:
    return op(floats(size), floats(size), boundaries_of(size), impl="triton", **more)


def gradient_of_gae(size: int) -> None:
    rewards = floats(size).requires_grad_()
    advantages, _ = kernels.gae(
        rewards, floats(size), boundaries_of(size), gamma=0.9, lam=0.9, impl="triton"
    )
    advantages.sum().backward()


def gradient_of_returns(size: int) -> None:
    rewards = floats(size).requires_grad_()
    kernels.discounted_returns(rewards, boundaries_of(size), 0.9, "triton").sum().backward()


def groups(size: int, **more: Any) -> Any:
    members = size % 100 + 1
    ids = torch.zeros(members, dtype=torch.int32)
    return kernels.group_advantages(floats(members), ids, num_groups=size, impl="triton", **more)


def padded(size: int, op: str) -> Any:
    bounds = boundaries_of(size)
    longest = int(bounds.diff().max())
    if op == "pad":
        return kernels.pad(torch.zeros(size, dtype=torch.int64), bounds, longest, impl="triton")
    rows = torch.zeros(len(bounds) - 1, longest, dtype=torch.int64)
    return kernels.unpad(rows, bounds, size, impl="triton")


def table_of(size: int) -> torch.Tensor:
    """Return a table of segments, as micro-batches have it: 4 columns, 16 bytes, at a time."""
    bounds = boundaries_of(size)
    table = torch.zeros(3, -(-len(bounds) // 4) * 4, dtype=torch.int32)
    table[0] = size
    table[0, : len(bounds)] = bounds
    return table


def selected(size: int) -> Any:
    sources = [torch.zeros(size, dtype=torch.int64), floats(size), torch.zeros(size, 3)]
    return kernels.select_tokens(sources, table_of(size), size, [0, 0, 0], impl="triton")


def merged(size: int) -> Any:
    table = table_of(size)
    return kernels.merge_tokens(floats(size), table, table, size, impl="triton")


def runs_of(size: int) -> torch.Tensor:
    bounds = boundaries_of(size)
    runs = torch.zeros(len(bounds), 8, dtype=torch.int32)
    runs[:, 0] = bounds
    return runs


def built(size: int) -> Any:
    words = torch.zeros(size, dtype=torch.int32)
    return kernels.build(words, runs_of(size), floats(size), size, "triton")


def gathered(size: int) -> Any:
    runs, layouts = runs_of(size), [FieldLayout(torch.float32, (), bytes(4), True)]
    sources = torch.zeros(len(runs), 1, dtype=torch.int64)
    return gather_fields(
        torch.zeros(size, dtype=torch.int32), runs, sources, layouts, size, "triton"
    )


OPERATORS: Calls = {
    "build": built,
    "discounted_returns": lambda size: kernels.discounted_returns(
        floats(size), boundaries_of(size), 0.9, "triton"
    ),
    "discounted_returns, bounded": lambda size: kernels.discounted_returns(
        floats(size), boundaries_of(size), 0.9, "triton", max_seqlen=size
    ),
    "discounted_returns, masked": lambda size: kernels.discounted_returns(
        floats(size), boundaries_of(size), 0.9, "triton", loss_mask=marks(size)
    ),
    "discounted_returns, gradient": gradient_of_returns,
    "gae": lambda size: scan(kernels.gae, size, gamma=0.9, lam=0.9),
    "gae, bounded": lambda size: scan(kernels.gae, size, gamma=0.9, lam=0.9, max_seqlen=size),
    "gae, gradient": gradient_of_gae,
    "td_lambda": lambda size: scan(kernels.td_lambda, size, lam=0.9),
    "vtrace": lambda size: kernels.vtrace(
        floats(size), floats(size), boundaries_of(size), floats(size), floats(size), impl="triton"
    ),
    "turn_gae": lambda size: kernels.turn_gae(
        floats(size), floats(size), boundaries_of(size),
        torch.zeros(size, dtype=torch.int32), gamma=0.9, lam=0.9, impl="triton",
    ),
    "gather_fields": gathered,
    "group_advantages": groups,
    "group_advantages, weighted": lambda size: groups(
        size, baseline="length_weighted", scale="none",
        lengths=torch.ones(size % 100 + 1, dtype=torch.int64),
    ),
    "step_advantages": lambda size: kernels.step_advantages(
        floats(size % 100 + 1), *torch.zeros(2, size % 100 + 1, dtype=torch.int64), impl="triton"
    ),
    "pad": lambda size: padded(size, "pad"),
    "unpad": lambda size: padded(size, "unpad"),
    "segment_sum": lambda size: kernels.segment_sum(
        floats(size), boundaries_of(size), impl="triton"
    ),
    "segment_mean, masked": lambda size: kernels.segment_mean(
        floats(size), boundaries_of(size), mask=marks(size), impl="triton"
    ),
    "segment_max, bounded": lambda size: kernels.segment_max(
        floats(size), boundaries_of(size), max_seqlen=size, impl="triton"
    ),
    "select_tokens": selected,
    "merge_tokens": merged,
    "whiten": lambda size: kernels.whiten(floats(size), marks(size), impl="triton"),
    "whiten, by sums": lambda size: kernels.whiten(
        floats(size), marks(size), sums=torch.ones(3, dtype=torch.float64), impl="triton"
    ),
    "importance_weights": lambda size: kernels.importance_weights(
        floats(size), floats(size), marks(size), kernels.Correction.mis(),
        segments=boundaries_of(size), segment_ids=torch.zeros(size, dtype=torch.int32),
        impl="triton",
    ),
    "importance_weights, of tokens": lambda size: kernels.importance_weights(
        floats(size), floats(size), marks(size), kernels.Correction(normalize=True), impl="triton"
    ),
    "importance_weights, of trajectories": lambda size: weigh_tokens(
        floats(size), floats(size), marks(size), kernels.Correction.mis(),
        Places(boundaries_of(size), None, torch.zeros(size).int(), len(boundaries_of(size)) - 1, 1),
        impl="triton",
    ),
    "loss_weights": lambda size: kernels.loss_weights(
        "sequence_mean_token_mean", marks(size), torch.zeros(size, dtype=torch.int32),
        num_sequences=size % 9 + 1, impl="triton",
    ),
    "loss_weights, constant": lambda size: kernels.loss_weights(
        "constant", marks(size), denominator=float(size), impl="triton"
    ),
    "token_logprobs": lambda size: kernels.token_logprobs(
        *head_of(size), entropy=True, impl="triton"
    )[0].sum().backward(),
    "masked_moments": lambda size: kernels.masked_moments(floats(size), marks(size), impl="triton"),
    "moment_sums": lambda size: kernels.moment_sums(floats(size), marks(size), impl="triton"),
}  # fmt: skip
"""Public operators that run by a kernel."""


def recipe(op: Callable[..., Any], size: int) -> Any:
    members = size % 100 + 1
    ids = torch.zeros(members, dtype=torch.int32)
    lengths = [torch.ones(members, dtype=torch.int32)] * (op is kernels.opo)
    return op(floats(members), ids, *lengths, num_groups=size, impl="triton")


RECIPES: Calls = {
    op.__name__: partial(recipe, op)
    for op in (
        kernels.grpo, kernels.dr_grpo, kernels.rloo, kernels.opo, kernels.max_rl, kernels.gpg,
        kernels.grpo_pass_at_k, kernels.reinforce_plus_plus_baseline,
    )
}  # fmt: skip
"""Group statistics by name."""

FIELDS = [TokenField("values", torch.float32), TokenField("experts", torch.uint8, (3,))]


def buffer_of(size: int, num_turns: int = 3) -> TrajectoryBuffer:
    """Return a buffer of about so many tokens, and of some trajectories."""
    buffer = TrajectoryBuffer(device="cpu", fields=FIELDS)
    each = min(size, 300)
    for index in range(-(-size // each)):
        turns, seen = [], [1] * each
        for _ in range(num_turns):
            rows = {"values": torch.zeros(2), "experts": torch.zeros(2, 3, dtype=torch.uint8)}
            turns.append(Turn(seen, [2, 3], [-0.5, -0.5], 1.0, fields=rows))
            seen = [*seen, 2, 3]
        buffer.add(Trajectory(str(index), turns, group=str(index // 4)))
    return buffer


def credited(size: int, estimator: Any, **inputs: Any) -> Any:
    batch = buffer_of(size).pack()
    given = {name: floats(batch.num_tokens) for name in inputs}
    if isinstance(estimator, GiGPO):
        given["state_ids"] = torch.zeros(batch.num_turns, dtype=torch.int64)
    return batch.with_advantages(estimator, **given, impl="triton")


def cut_and_merged(size: int) -> Any:
    batch = buffer_of(size).pack()
    plan = plan_micro_batches(batch.seqlens, 1024, align=8)
    alignment = Alignment(sequence_multiple=8)
    outputs = [one.rollout_logprobs for one in batch.split(plan, alignment, impl="triton")]
    return batch.merge(plan, outputs, alignment, impl="triton")


def resident(size: int) -> Any:
    turn = Turn(
        torch.zeros(size, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.zeros(2)
    )
    return pack_resident([Trajectory(str(i), [turn] * 2) for i in range(size % 5 + 1)],
                         impl="triton")  # fmt: skip


PATHS: Calls = {
    "pack": lambda size: buffer_of(size).pack("merged", impl="triton"),
    "pack, turns": lambda size: buffer_of(size).pack("turns", impl="triton"),
    "pack, one turn": lambda size: buffer_of(size, 1).pack("turns", impl="triton"),
    "pack_resident": resident,
    "split and merge": cut_and_merged,
    "GRPO": lambda size: credited(size, GRPO()),
    "GiGPO": lambda size: credited(size, GiGPO()),
    "GAE": lambda size: credited(size, GAE(), values=floats),
    "VTrace": lambda size: credited(size, VTrace(), values=floats, logprobs=floats),
    "TurnReturns": lambda size: credited(size, TurnReturns()),
}
"""What packing does by kernels."""


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def ends(size: int) -> torch.Tensor:
    return empty(size % 100 + 2, dtype=torch.int32)


def reduced(size: int, longest: int | None) -> None:
    bounds = ends(size)
    segment_reduce_forward(
        empty(size), bounds, None, empty(len(bounds) - 1), reduction="sum", max_seqlen=longest
    )


def scanned(size: int, longest: int | None, kind: str = "gae") -> Any:
    scan = Scan(ends(size), empty(size), gamma=0.9, kind=kind, max_seqlen=longest)
    if kind == "returns":
        return credit_scan_forward(scan)
    return credit_scan_forward(scan._replace(values=empty(size), lam=0.9))


LAUNCHERS: Calls = {
    "build": lambda size: write_fields(
        empty(size, dtype=torch.int32), empty(size % 100 + 1, 8, dtype=torch.int32), empty(9),
        num_tokens=size, memory=empty_memory(size, torch.device("meta")),
    ),
    "discounted_returns": lambda size: scanned(size, None, "returns"),
    "discounted_returns, bounded": lambda size: scanned(size, 4096, "returns"),
    "gae": lambda size: scanned(size, None),
    "gae, bounded": lambda size: scanned(size, 4096),
    "pad": lambda size: pad_forward(empty(size), ends(size), size // 50, 0, "left"),
    "unpad": lambda size: unpad_forward(
        empty(len(ends(size)) - 1, size // 50), ends(size), size, "left"
    ),
    "segment_sum": lambda size: reduced(size, None),
    "segment_sum, bounded": lambda size: reduced(size, 64),
    "select_tokens": lambda size: select_forward(
        [empty(size)], empty(3, size % 100 // 4 * 4 + 4, dtype=torch.int32), size,
        [Rows(1, 4, 0)], "zero",
    ),
    "whiten": lambda size: whiten_forward(
        empty(size), empty(size, dtype=torch.bool), None, ddof=1, eps=0.0, center=True,
    ),
    "moments": lambda size: moments_forward(empty(size), empty(size, dtype=torch.bool)),
}  # fmt: skip
"""Launchers behind the operators, on tensors without values."""
