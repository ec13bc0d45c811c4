"""Log-probabilities from hidden states, forward and backward: the same job done other ways.

Each takes hidden states, an LM head, the rows to compute and their targets, and returns the
log-probabilities and the gradients of hidden states and head. The last column has the most bytes
that are allocated at once beside the inputs and the gradients. The bare products are the three
matrix products that every way needs. On the host the processor time of one thread counts: threads
of a product wait for each other, so other work on the machine would decide the wall time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.contest import OURS, Contender, Contest, processor_clock
from benchmarks.promises import LOGPROBS, PRODUCTS
from benchmarks.rivals import find, find_file, quietly
from trajpack.kernels import token_logprobs

SHAPE = (1024, 256, 32_000)
"""Tokens, width of hidden states, vocabulary."""
PUBLISHED = (8192, 4096, 151_936)
"""The shape that TRL publishes times of."""
TRL_CHUNK = 8192
"""Columns of a tile, TRL's default."""
LIGER_FILE = "liger_kernel/chunked_loss/fused_linear_ppo.py"
VERL_FILE = "verl/utils/experimental/torch_functional.py"
NOTHING_KEPT = f"{OURS}, no logits kept"
ROWS = {"all rows": (1, False), "a third of the rows": (3, False), "all rows, entropies": (1, True)}
"""Every how many-th row is computed, and whether entropies are."""


class Given(NamedTuple):
    """What all contenders get."""

    hidden: torch.Tensor
    weight: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor


def inputs(every: int, shape: tuple[int, int, int] = SHAPE, device: str = "cpu") -> Given:
    """Return seeded inputs, bfloat16 on a device; one row in ``every`` is computed."""
    tokens, width, vocabulary = shape
    generator = torch.Generator(device).manual_seed(13)
    hidden, weight = (
        torch.randn(size, width, generator=generator, device=device)
        for size in (tokens, vocabulary)
    )
    rows = torch.arange(0, tokens, every, device=device)
    targets = torch.randint(vocabulary, rows.shape, generator=generator, device=device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    hidden, weight = hidden.to(dtype), (weight / width).to(dtype)
    return Given(hidden.requires_grad_(), weight.requires_grad_(), rows, targets)


def with_gradients(
    given: Given, results: Callable[[], tuple[torch.Tensor, ...]]
) -> Callable[[], Any]:
    """Return the work: log-probabilities and entropies, if any, and the gradients of their sum."""

    def work() -> Any:
        found = results()
        total = sum(one.float().sum() for one in found)
        inputs = given.hidden, given.weight
        return *(one.detach() for one in found), *torch.autograd.grad(total, inputs)

    return work


def ours(given: Given, *, entropy: bool) -> tuple[torch.Tensor, ...]:
    """Call `trajpack.kernels.token_logprobs`, which keeps the logits of `SHAPE`."""
    return _ours(given, None, entropy=entropy)


def nothing_kept(given: Given, *, entropy: bool) -> tuple[torch.Tensor, ...]:
    """Call it so that it computes all logits twice."""
    return _ours(given, 0, entropy=entropy)


def _ours(given: Given, keep: int | None, *, entropy: bool) -> tuple[torch.Tensor, ...]:
    found = token_logprobs(*given, entropy=entropy, keep_logits=keep)
    return found if entropy else (found,)


def dense(given: Given, *, entropy: bool) -> tuple[torch.Tensor, ...]:
    """Make the logits of the rows at once."""
    every = (given.hidden[given.rows] @ given.weight.T).float().log_softmax(-1)
    logprobs = every.gather(1, given.targets[:, None])[:, 0]
    return (logprobs, -(every.exp() * every).sum(-1)) if entropy else (logprobs,)


def of_trl(given: Given, module: Any, *, entropy: bool) -> tuple[torch.Tensor, ...]:
    """Call TRL's chunked log-probabilities on the rows."""
    outputs = ("entropy",) if entropy else ()
    options = (None, given.targets, 1.0, TRL_CHUNK, None, 1.0, outputs)
    found = module.ChunkedLogProbFunction.apply(given.hidden[given.rows], given.weight, *options)
    return tuple(found[: 1 + entropy])


def of_verl(given: Given, module: Any, *, entropy: bool) -> tuple[torch.Tensor, ...]:
    """Call verl's chunked log-probabilities on the rows; they make entropies in any case."""
    options = (given.targets, 1.0, module.FusedLinearForPPO().chunk_size)
    found = module.FusedLinearForPPOFunction.apply(given.hidden[given.rows], given.weight, *options)
    return tuple(found[: 1 + entropy])


def of_liger(given: Given, module: Any, *, entropy: bool) -> tuple[torch.Tensor, ...]:
    """Call the chunk of Liger's losses of policies on the rows, which has no entropies."""
    assert not entropy
    chunk = module.LigerFusedLinearPPOBase.chunk_forward
    found: torch.Tensor = chunk(given.hidden[given.rows][None], given.weight, given.targets[None])[
        0
    ]
    return (found,)


def products(given: Given) -> None:
    """Compute the product of the forward pass and the two of the backward pass, and keep none."""
    rows, weight = given.hidden.detach()[given.rows], given.weight.detach()
    for first in range(0, len(weight), TRL_CHUNK):
        part = weight[first : first + TRL_CHUNK]
        logits = rows @ part.T
        logits @ part
        logits.T @ rows


def most_bytes(work: Callable[[], Any], device: str) -> int:
    """Return the most bytes that torch held at once beyond those before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = work()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda one: one.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    del kept
    return most


def contest(
    which: str, shape: tuple[int, int, int] = SHAPE, device: str = "cpu"
) -> tuple[Contest, list[Contender]]:
    """Return the contest of a row of `ROWS`."""
    every, entropy = ROWS[which]
    given = inputs(every, shape, device)
    expected = with_gradients(given, partial(dense, given, entropy=entropy))()
    gradients = sum(one.nbytes for one in expected[-2:])
    apart = 1e-4 if given.hidden.dtype == torch.float32 else 5e-2

    def check(found: Any) -> None:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.float(), other.float(), rtol=apart, atol=apart)

    def made(results: Callable[..., tuple[torch.Tensor, ...]], *rest: Any) -> dict[str, Any]:
        work = with_gradients(given, partial(results, given, *rest, entropy=entropy))
        most = most_bytes(quietly(work), device) - gradients
        wrote = f"{most / 1e6:,.0f} MB"
        return {"work": work, "wrote": wrote}

    entrants = [
        Contender(OURS, **made(ours)),
        Contender(NOTHING_KEPT, **made(nothing_kept)),
        Contender("all logits of the rows at once", **made(dense)),
        Contender(PRODUCTS, lambda: products(given), "", lambda _: None),
    ]
    rivals = {
        "trl chunked log-probabilities": (find("trl.kernels.chunked_logprob"), of_trl),
        "verl chunks of rows, entropies too": (find_file("verl", VERL_FILE), of_verl),
    }
    if not entropy:
        rivals["liger chunk of a policy loss"] = (find_file("liger-kernel", LIGER_FILE), of_liger)
    for name, ((module, why), call) in rivals.items():
        if module is None:
            entrants.append(Contender(name, None, "", missing=why))
        else:
            entrants.append(Contender(name, **made(call, module)))
    options: dict[str, Any] = {"rounds": 3, "seconds": 10, "clock": processor_clock}
    return Contest(LOGPROBS, which, len(given.rows), check, **options), entrants
