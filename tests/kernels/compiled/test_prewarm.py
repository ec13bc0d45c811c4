"""After `prewarm` no batch and no estimator asks Triton for another variant.

Nothing is compiled for the estimators: Triton asks a hook before it compiles a variant, and the
hook answers that nothing is to be done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
import triton

from tests.gpu.checks import tensors_of
from tests.packing.credit.credit_cases import EVERY
from tests.ptx.calls import Drawn, every_call
from trajpack import (
    Alignment,
    PackedBatch,
    Trajectory,
    TrajectoryBuffer,
    Turn,
    plan_micro_batches,
)
from trajpack.kernels import (
    Correction,
    Rejection,
    gae,
    loss_weights,
    prewarm,
    segment_sum,
    whiten,
)
from trajpack.kernels.launches import EVERY_WAY
from trajpack.packing.credit.estimators import (
    GAE,
    GRPO,
    GiGPO,
    KLPenalty,
    ReinforcePlusPlusBaseline,
    VTrace,
)
from trajpack.testing import assert_same_bits

RAGGED = ((1,), (2, 3), (15, 16, 17), (8192,), (8193,), (4097, 1, 8191), (17,) * 300, (16_400, 48))
RAGGED += ((0, 0), (1,) * 520, (1,) * 4100, ())
"""Generated tokens of each trajectory of a batch. The trajectories of the longest are in groups of
700; those of others are in groups of 4. The last has one trajectory of 4,100 turns."""


TRITON = {"impl": "triton"}
Step = Callable[[TrajectoryBuffer], object]


@cache
def buffer_of(sizes: tuple[int, ...]) -> TrajectoryBuffer:
    buffer, members = TrajectoryBuffer(device="cpu"), 700 if len(sizes) > 4000 else 4
    if not sizes:
        buffer.add(Trajectory("turns", [Turn([1], [2], [0.0], 1.0)] * 4100))
    for index, size in enumerate(sizes):
        ids = np.ones(size, np.int32)
        turns = [Turn([1] * (index % 5 + 1), ids, ids.astype(np.float32), 1.0)]
        if index % 3 == 1:
            turns.append(Turn([*turns[0].prompt_ids, *ids, 7], ids[: size // 2], -ids[: size // 2]))
        buffer.add(Trajectory(str(index), turns, group=str(index // members)))
    return buffer


@cache
def batch_of(buffer: TrajectoryBuffer) -> PackedBatch:
    return buffer.pack(impl="torch")


@pytest.fixture
def asked(executor: Any) -> Iterator[list[tuple[str, str]]]:
    """Variants that are asked for; none is compiled, and none that a test compiled is known."""
    found: list[tuple[str, str]] = []

    def note(*, key: Any, fn: Any, **_: Any) -> bool:
        found.append((fn.name, str(key)))
        return True

    executor.device = 7_000_000  # Triton keeps variants apart by device
    triton.knobs.runtime.jit_cache_hook = note
    yield found
    triton.knobs.runtime.jit_cache_hook = None


def assert_prewarmed(step: Step, asked: list[tuple[str, str]]) -> None:
    """Prewarm a step, and run it with ragged batches."""
    prewarm(lambda: step(buffer_of((2, 3))))
    known = set(asked)
    assert known
    for sizes in RAGGED:
        asked.clear()
        step(buffer_of(sizes))
        assert set(asked) <= known, sizes


def credited(batch: PackedBatch, estimator: Any) -> PackedBatch:
    inputs = {}
    if hasattr(estimator, "lam"):
        inputs["values"] = torch.zeros(batch.num_tokens)
    if isinstance(estimator, VTrace):
        inputs["logprobs"] = batch.rollout_logprobs
    if getattr(estimator, "kl", None) is not None:
        inputs["ref_logprobs"] = batch.rollout_logprobs
    if estimator.truncated == "bootstrap":
        inputs["bootstrap"] = torch.zeros(len(batch.ids))
    if isinstance(estimator, GiGPO):
        inputs["state_ids"] = torch.zeros(batch.num_turns, dtype=torch.int64)
    return batch.with_advantages(estimator, **inputs, impl="triton")


OTHERS = {
    "GAE, bootstrap and KL": GAE(truncated="bootstrap", kl=KLPenalty(0.1, "k3")),
    "GRPO, mask": GRPO(truncated="mask"),
    "VTrace, mask": VTrace(truncated="mask", whiten=True),
}


@pytest.mark.filterwarnings("ignore:with_advantages. every group has one member")
@pytest.mark.parametrize("estimator", (EVERY | OTHERS).values(), ids=EVERY | OTHERS)
def test_no_batch_asks_for_a_variant_of_an_estimator(estimator: Any, asked: Any) -> None:
    assert_prewarmed(lambda buffer: credited(batch_of(buffer), estimator), asked)


def split_and_merged(buffer: TrajectoryBuffer) -> None:
    batch, aligned = batch_of(buffer), Alignment(sequence_multiple=8)
    plan = plan_micro_batches(batch.seqlens, 20_000, align=8)
    outputs = [one.rollout_logprobs for one in batch.split(plan, aligned, impl="triton")]
    merged = batch.merge(plan, [row.requires_grad_() for row in outputs], aligned, impl="triton")
    merged.sum().backward()


def gradient(buffer: TrajectoryBuffer) -> None:
    rewards, batch = torch.zeros(batch_of(buffer).num_tokens), batch_of(buffer)
    gae(
        rewards.requires_grad_(), batch.rollout_logprobs, batch.cu_seqlens,
        max_seqlen=batch.max_seqlen, impl="triton",
    )[0].sum().backward()  # fmt: skip


def weighed(correction: Correction, buffer: TrajectoryBuffer) -> None:
    batch = batch_of(buffer)
    for per in ("trajectory", "turn"):
        batch.importance_weights(batch.rollout_logprobs, correction, per=per, impl="triton")


def unaligned(buffer: TrajectoryBuffer) -> None:
    batch = batch_of(buffer)
    values = torch.zeros(batch.num_tokens + 1)[1:]
    batch.with_advantages(GAE(), values=values, impl="triton")


STEPS: dict[str, Step] = {
    "pack, turns": lambda buffer: buffer.pack("turns", impl="triton"),
    "pack, merged": lambda buffer: buffer.pack("merged", impl="triton"),
    "split and merge": split_and_merged,
    "gradient of GAE": gradient,
    "values at any address": unaligned,
    "weights of tokens": partial(weighed, Correction.tis()),
    "weights of segments": partial(weighed, Correction.mis(level="geometric")),
    "weights, rejection": partial(weighed, Correction(normalize=True, rejection=Rejection(0.5))),
    "loss weights": lambda buffer: loss_weights(
        "sequence_mean_token_mean", batch_of(buffer).loss_mask, batch_of(buffer).sequence_ids,
        num_sequences=len(batch_of(buffer).seqlens), impl="triton",
    ),
    "loss weights of a batch": lambda buffer: batch_of(buffer).loss_weights(
        "token_mean", impl="triton"
    ),
    "whiten": lambda buffer: whiten(
        batch_of(buffer).returns, batch_of(buffer).loss_mask, impl="triton"
    ),
    "segments": lambda buffer: segment_sum(
        batch_of(buffer).returns, batch_of(buffer).cu_seqlens, impl="triton"
    ),
}  # fmt: skip


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_no_batch_asks_for_another_variant(step: Step, asked: Any) -> None:
    assert_prewarmed(step, asked)


@pytest.mark.parametrize(
    ("estimator", "sizes"),
    [(GAE(), (9_001,)), (GRPO(), (1,) * 4100), (ReinforcePlusPlusBaseline(), (1,) * 4100)],
    ids=["a long segment", "a large group", "many trajectories"],
)
def test_variants_that_are_missed_would_be_noticed(
    estimator: Any, sizes: tuple[int, ...], asked: Any
) -> None:
    credited(batch_of(buffer_of((2, 3))), estimator)
    known = set(asked)
    credited(batch_of(buffer_of(sizes)), estimator)
    assert set(asked) - known


CUT = {"discounted_returns", "gae, masked, longest known", "segment_sum", "whiten", "GiGPO"}
"""Calls whose launchers cut their work in more than one way."""


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(3, 1, 40), (4100, 5000)], ids=["short", "long"])
def test_launches_of_every_way_change_no_result(
    lengths: tuple[int, ...], executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {name: call for name, call in every_call(Drawn(np.array(lengths))) if name in CUT}
    assert calls.keys() == CUT
    for name, call in calls.items():
        executor.launched.clear()
        expected = tensors_of(call("triton"))
        launches = len(executor.launched)
        executor.launched.clear()
        monkeypatch.setattr(EVERY_WAY, "is_set", lambda: True)
        found = tensors_of(call("triton"))
        monkeypatch.undo()
        assert len(executor.launched) > launches, name
        for part, tensor in found.items():
            assert_same_bits(tensor, expected[part], f"{name}: {part}")


def test_what_was_compiled_is_counted(executor: Any) -> None:
    def step(size: int = 2) -> None:
        segment_sum(torch.ones(size), torch.tensor([0, size], dtype=torch.int32), impl="triton")

    hook = triton.knobs.runtime.jit_post_compile_hook
    executor.device = 7_000_001
    compiled = prewarm(step)
    assert compiled == Counter(executor.launched), "one variant for each launch"
    for size in (3, 16, 9_008):
        assert prewarm(partial(step, size)) == {}
    assert triton.knobs.runtime.jit_post_compile_hook is hook


def test_kernels_that_another_thread_launches_are_compiled_too(executor: Any) -> None:
    """On a device autograd runs ``backward`` in threads of its own."""

    def step() -> None:
        segments = torch.tensor([0, 2], dtype=torch.int32)
        thread = Thread(target=segment_sum, args=(torch.ones(2), segments), kwargs=TRITON)
        thread.start()
        thread.join()

    executor.device = 7_000_002
    compiled = prewarm(step)
    assert {name.rpartition(".")[2] for name in compiled} >= {"chunk_partials_kernel"}
    assert not EVERY_WAY.is_set()


def test_a_capture_is_too_late(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r"^prewarm: cannot be captured.*before the capture"):
        prewarm(lambda: pytest.fail("no step"))
