"""Calls that launch every kernel between them: to compare, to count, to watch and to capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.packing.resident_turns import on_device
from benchmarks.workloads import lengths_a, lengths_b, lengths_c, single_turns
from trajpack import (
    GAE,
    GRPO,
    GiGPO,
    GroupEstimator,
    TokenField,
    TrajectoryBuffer,
    TreeBatch,
    TurnGAE,
    TurnReturns,
    VTrace,
    kernels as k,
    pack_resident,
    pack_tree,
)
from trajpack.kernels.reduce.whiten import moments_of, whiten_by

SMALL = {"A": lengths_a(1 / 256), "B": lengths_b(1 / 32), "C": lengths_c(1 / 256)}
"""Small copies of the workloads."""
Call = Callable[[Any], Any]
"""Takes ``impl``."""
RATES: dict[str, Any] = {"gamma": 0.99, "lam": 0.95}


class Drawn:
    """Inputs for sequences of some lengths, drawn on the host."""

    def __init__(self, lengths: np.ndarray, device: str = "cpu") -> None:
        draw = torch.Generator().manual_seed(1)
        self.lengths, self.device = lengths, device
        self.tokens, self.longest = int(lengths.sum()), int(lengths.max())
        self.bounds = np.r_[0, lengths.cumsum()]
        self.cu_seqlens = torch.from_numpy(self.bounds).int().to(device)
        three = (torch.randn(self.tokens, generator=draw).to(device) for _ in range(3))
        self.rewards, self.values, third = three
        self.mask = (torch.rand(self.tokens, generator=draw) < 0.7).to(device)
        self.ids = torch.randint(0, 32000, (self.tokens,), generator=draw).to(device)
        self.owners = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)).int().to(device)
        self.logprobs, self.old = -self.rewards.abs(), -third.abs()
        self.trajectories = [
            replace(one, group=str(i // 2)) for i, one in enumerate(single_turns(lengths))
        ]
        self.buffer = TrajectoryBuffer(device=device)
        self.buffer.extend(self.trajectories)


def counted_calls(given: Drawn) -> Iterator[tuple[str, Call]]:
    """Yield the calls whose traffic is counted."""
    bounds, rewards, ids, mask = given.cu_seqlens, given.rewards, given.ids, given.mask
    tokens, longest, lengths = given.tokens, given.longest, given.lengths
    both = rewards, given.values, bounds
    yield "discounted_returns", lambda impl: k.discounted_returns(rewards, bounds, 0.99, impl=impl)
    yield "gae", lambda impl: k.gae(*both, **RATES, impl=impl)
    known: dict[str, Any] = {"loss_mask": mask, "max_seqlen": longest}
    yield "gae, masked, longest known", lambda impl: k.gae(*both, **RATES, **known, impl=impl)
    left: dict[str, Any] = {"side": "left"}
    yield "pad", lambda impl: k.pad(ids, bounds, longest, value=-1, **left, impl=impl)
    padded = k.pad(ids, bounds, longest, value=-1, **left, impl="torch")
    yield "unpad", lambda impl: k.unpad(padded, bounds, tokens, **left, impl=impl)
    table = np.zeros((3, len(lengths) + 1), np.int32)
    table[0] = np.r_[0, lengths[::-1].cumsum()]
    table[1, :-1], table[2, :-1] = given.bounds[:-1][::-1], lengths[::-1]
    taken, fills = torch.from_numpy(table).to(given.device), [0, 0.0, False]
    fields = [ids, rewards, mask]
    yield "select_tokens", lambda impl: k.select_tokens(fields, taken, tokens, fills, impl=impl)
    yield "segment_sum", lambda impl: k.segment_sum(rewards, bounds, impl=impl)
    yield "whiten", lambda impl: k.whiten(rewards, mask, impl=impl)
    policies = given.logprobs, given.old, mask
    tis, mis = k.Correction.tis(), k.Correction.mis()
    yield "importance_weights", lambda impl: k.importance_weights(*policies, tis, impl=impl)
    by_segment = {"segments": bounds, "segment_ids": given.owners}
    yield (
        "importance_weights, by segment",
        lambda impl: k.importance_weights(*policies, mis, **by_segment, impl=impl),
    )
    of: dict[str, Any] = {"sequence_ids": given.owners, "num_sequences": len(lengths)}
    yield (
        "loss_weights",
        lambda impl: k.loss_weights("sequence_mean_token_mean", mask, **of, impl=impl),
    )
    yield "token_logprobs", lambda impl: with_gradients(given, impl)
    yield "pack", lambda impl: given.buffer.pack(layout="turns", impl=impl)
    batch = given.buffer.pack(layout="turns", impl="torch")
    yield "GRPO", lambda impl: batch.with_advantages(GRPO(), impl=impl)


def other_calls(given: Drawn) -> Iterator[tuple[str, Call]]:
    """Yield calls of the kernels and variants that `counted_calls` does not launch."""
    bounds, rewards, mask = given.cu_seqlens, given.rewards, given.mask
    both = rewards, given.values, bounds
    policies = given.logprobs, given.old
    yield "token_logprobs, bfloat16", lambda impl: with_gradients(given, impl, lambda _: 0.7)
    yield (
        "token_logprobs, bfloat16, a temperature a row",
        lambda impl: with_gradients(given, impl, lambda rows: 0.5 + rows % 3 / 2),
    )
    tree = small_tree(given)
    yield "values of a tree", lambda impl: values_of_tree(tree, impl)
    yield "vtrace", lambda impl: k.vtrace(*both, *policies, **RATES, loss_mask=mask, impl=impl)
    yield "moments", lambda impl: moments_of(rewards, mask, impl)
    sums = moments_of(rewards, mask, "torch")
    yield "whiten, by moments", lambda impl: whiten_by(rewards, mask, sums, ddof=1, impl=impl)[0]
    experts = TokenField("experts", torch.uint8, (3,), fill=255, generated_only=False)
    rows = (torch.arange(3 * given.tokens) % 251).to(torch.uint8).view(-1, 3).numpy()
    buffer = TrajectoryBuffer(device=given.device, fields=[experts])
    for one, begin in zip(given.trajectories, given.bounds[:-1], strict=True):
        (turn,) = one.turns
        own = rows[begin : begin + len(turn.prompt_ids) + len(turn.completion_ids)]
        buffer.add(replace(one, turns=[replace(turn, fields={"experts": own})]))
    yield "pack, with a field", lambda impl: buffer.pack(impl=impl)
    resident = on_device(given.trajectories, given.device)
    yield "pack_resident", lambda impl: pack_resident(resident, impl=impl)
    batch = given.buffer.pack(impl="torch")
    order = range(len(given.lengths))[::-1]
    yield "select", lambda impl: batch.select(order, impl=impl)
    states = torch.arange(batch.num_turns, device=given.device) % 2
    beside: dict[str, Any] = {"values": given.values, "logprobs": given.logprobs}
    for estimator, inputs in (
        (GAE(0.99, 0.95, whiten=True), beside),
        (TurnGAE(), beside),
        (VTrace(0.99), beside),
        (TurnReturns(whiten=True), {}),
        (GroupEstimator("reinforce_plus_plus_baseline"), {}),
        (GroupEstimator("gpg"), {}),
        (GiGPO(0.5), {"state_ids": states}),
    ):
        yield estimator.name, credited(batch, estimator, inputs)
    tis = k.Correction.tis(level="segment")
    yield (
        "importance weights of a batch",
        lambda impl: batch.importance_weights(given.logprobs, tis, impl=impl),
    )


def every_call(given: Drawn) -> Iterator[tuple[str, Call]]:
    """Yield all calls."""
    yield from counted_calls(given)
    yield from other_calls(given)


def with_gradients(given: Drawn, impl: Any, temperature: Callable[..., Any] | None = None) -> Any:
    """Return log-probabilities of one token in eight, and their gradients.

    With a function of rows to temperatures they are of bfloat16, with bias, soft-cap and entropies.
    """
    rows = torch.arange(0, given.tokens, 8, device=given.device)
    hidden = torch.stack((given.rewards, given.values), 1)
    weight = torch.linspace(-1, 1, 2048, device=given.device).view(1024, 2)
    leaves, options = [hidden, weight], dict[str, Any]()
    if temperature is not None:
        leaves = [one.bfloat16() for one in (hidden, weight, weight[:, 0].abs())]
        options = {"temperature": temperature(rows), "softcap": 2.0, "entropy": True}
    hidden, weight, *bias = (one.requires_grad_() for one in leaves)
    options["bias"] = bias[0] if bias else None
    found = k.token_logprobs(hidden, weight, rows, given.ids[::8] % 1024, **options, impl=impl)
    several = found if isinstance(found, tuple) else (found,)
    grads = torch.autograd.grad(torch.cat(several).sum(), (hidden, weight, *bias))
    return [*(one.detach() for one in several), *grads]


def small_tree(given: Drawn) -> TreeBatch:
    """Return the tree of three trajectories, and of each with another last token."""
    few = []
    for one in given.trajectories[:3]:
        (turn,) = one.turns
        prompt, said = (np.asarray(ids) % 1000 for ids in (turn.prompt_ids, turn.completion_ids))
        for more in range(2):
            ids = np.append(said[:-1], said[-1:] + more)
            turns = [replace(turn, prompt_ids=prompt, completion_ids=ids, reward=float(more))]
            few.append(replace(one, id=f"{one.id} {more}", turns=turns))
    return pack_tree(few, device=given.device)


def values_of_tree(tree: TreeBatch, impl: Any) -> Any:
    """Return log-probabilities and entropies of a tree, the gradient of a loss, and its credit."""
    hidden, weight = (
        torch.linspace(-9, 9, 2 * size, device=tree.device).sin().view(size, 2).requires_grad_()
        for size in (tree.num_nodes, 1024)
    )
    logprobs, entropies = tree.logprobs(hidden, weight, entropy=True, impl=impl)
    credited = tree.with_advantages(GRPO(), impl=impl)
    loss = (logprobs * credited.advantages * tree.entry_weights - entropies).sum()
    grads = torch.autograd.grad(loss, (hidden, weight))
    return [logprobs.detach(), entropies.detach(), credited.advantages, *grads]


def credited(batch: Any, estimator: Any, inputs: dict[str, Any]) -> Call:
    """Return the call that gives credit."""
    return lambda impl: batch.with_advantages(estimator, **inputs, impl=impl)
