"""Every planted fault is found, and what is right is left alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.ptx.executor import Executor, on_executor
from tests.ptx.memory import PtxError
from trajpack import Trajectory, TrajectoryBuffer, Turn
from trajpack.kernels.fields.build import empty_memory


@triton.jit
def increment(x, y, n, BLOCK: tl.constexpr, IS_CAREFUL: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(x + i, mask=i < n, other=0) + 1
    if IS_CAREFUL:
        tl.store(y + i, word, mask=i < n)
    else:
        tl.store(y + i, word)


@triton.jit
def clash(y, BLOCK: tl.constexpr, SAME: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, i if SAME else i + tl.program_id(0))


@triton.jit
def hand_over(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i))
    tl.store(x + i, tl.load(y + BLOCK - 1 - i))


@triton.jit
def lie(x, y, begin, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(tl.multiple_of(x + begin, 16) + i))


@triton.jit
def scan(x, y, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    running = tl.cumsum(tl.load(x + i), 0)
    tl.store(y + i, running)
    tl.store(y + BLOCK + i, tl.sum(running, 0) + running)


@triton.jit
def merge(x, partial, counter, out, BLOCK: tl.constexpr, SEM: tl.constexpr):
    place = tl.program_id(0)
    tl.store(partial + place, tl.sum(tl.load(x + place * BLOCK + tl.arange(0, BLOCK))))
    seen = tl.atomic_add(counter, 1, sem=SEM)
    if seen == tl.num_programs(0) - 1:  # the last block merges
        j = tl.arange(0, BLOCK)
        tl.store(out, tl.sum(tl.load(partial + j, mask=j < tl.num_programs(0), other=0)))
        tl.store(counter, 0)


@triton.jit
def merge_rows(x, partial, counter, out, BLOCK: tl.constexpr, HAS_BARRIER: tl.constexpr):
    place, i = tl.program_id(0), tl.arange(0, BLOCK)
    tl.store(partial + place * BLOCK + i, tl.load(x + place * BLOCK + i))
    if HAS_BARRIER:
        tl.debug_barrier()
    seen = tl.atomic_add(counter, 1, sem="acq_rel")
    if seen == tl.num_programs(0) - 1:
        total = tl.zeros([BLOCK], tl.int32)
        for row in range(tl.num_programs(0)):
            total += tl.load(partial + row * BLOCK + i)
        tl.store(out + i, total)


def watched(**options: Any) -> Any:
    return on_executor(strict=False, **options)


def kinds(executor: Executor) -> set[str]:
    return {text.partition(":")[0] for text in executor.findings}


@pytest.mark.parametrize("arch", [80, 90])
def test_a_kernel_without_a_fault_computes(arch: int) -> None:
    x, y = torch.arange(1000, dtype=torch.int32), torch.zeros(1000, dtype=torch.int32)
    with on_executor(arch) as executor:
        increment[(2,)](x, y, 1000, BLOCK=512, IS_CAREFUL=True)
    assert torch.equal(y, x + 1)
    assert not executor.findings
    assert executor.launched == ["increment"]


def test_a_store_past_the_end_is_found_and_writes_nothing() -> None:
    memory = torch.zeros(1024, dtype=torch.int32)
    y = torch.zeros(1000, dtype=torch.int32)
    with watched() as executor:
        increment[(1,)](memory, y, 1000, BLOCK=1024, IS_CAREFUL=False)
    assert kinds(executor) == {"out of bounds"}
    with on_executor(), pytest.raises(PtxError, match="out of bounds: increment, line"):
        increment[(1,)](memory, y, 1000, BLOCK=1024, IS_CAREFUL=False)


def test_a_read_of_fresh_memory_is_found() -> None:
    with watched(fresh=__name__) as executor:
        x, y = torch.empty(512, dtype=torch.int32), torch.zeros(512, dtype=torch.int32)
        x[:500] = 0
        increment[(1,)](x, y, 500, BLOCK=512, IS_CAREFUL=True)
        assert not executor.findings
        increment[(1,)](x, y, 512, BLOCK=512, IS_CAREFUL=True)
    assert kinds(executor) == {"uninitialised"}


def test_a_read_of_memory_that_the_library_allocates_is_found() -> None:
    with watched() as executor:
        fresh, y = empty_memory(1000, torch.device("cpu")), torch.zeros(512, dtype=torch.int32)
        increment[(1,)](fresh.view(torch.int32), y, 512, BLOCK=512, IS_CAREFUL=True)
        assert kinds(executor) == {"uninitialised"}


def test_a_read_of_fresh_bytes_is_found() -> None:
    mask, y = torch.zeros(516, dtype=torch.bool), torch.zeros(516, dtype=torch.int32)
    with watched(fresh=__name__) as executor:
        fresh = torch.empty_like(mask)
        fresh[:512] = True
        increment[(1,)](fresh.view(torch.uint8), y, 512, BLOCK=1024, IS_CAREFUL=True)
        assert not executor.findings
        increment[(1,)](fresh.view(torch.uint8), y, 514, BLOCK=1024, IS_CAREFUL=True)
    assert kinds(executor) == {"uninitialised"}


def test_a_store_into_the_next_tensor_of_an_allocation_is_found() -> None:
    memory, x = torch.zeros(4096, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    field, following = memory[:1000], memory[1008:2032]
    for source in (x, following):  # also where the launch may access what lies behind
        with watched() as executor:
            increment[(1,)](source, field, 1000, BLOCK=1024, IS_CAREFUL=False)
        assert kinds(executor) == {"out of bounds"}
    assert not memory[1000:].any()


def test_a_load_from_the_next_tensor_of_an_allocation_is_found() -> None:
    memory, y = torch.zeros(4096, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    with watched() as executor:
        increment[(1,)](memory[:1024], y, 1024, BLOCK=1024, IS_CAREFUL=True)
        assert not executor.findings
        increment[(1,)](memory[:1000], y, 1024, BLOCK=1024, IS_CAREFUL=True)
    assert kinds(executor) == {"out of bounds"}


def test_a_store_into_the_next_field_behind_one_pointer_is_found() -> None:
    turns = [Turn([1] * 700, [2] * 700, [-0.5] * 700)]
    buffer = TrajectoryBuffer(device="cpu")
    buffer.extend([Trajectory("a", turns)])

    def moved(text: str) -> str:  # a field of 32 bits is stored 4 tokens too far
        return re.sub(r"(st\.global\.v4\.b32 \[ %rd\d+) \+ 0", r"\1 + 16", text, count=1)

    with watched() as executor:
        buffer.pack(layout="turns", impl="triton")
        assert not executor.findings
        executor.rewrite = moved
        buffer.pack(layout="turns", impl="triton")
    assert "race" in kinds(executor)


def test_two_programs_at_one_address_are_found() -> None:
    with watched() as executor:
        clash[(2,)](torch.zeros(512, dtype=torch.int32), BLOCK=512, SAME=True)
        assert not executor.findings, "the same value twice is harmless"
        clash[(2,)](torch.zeros(512, dtype=torch.int32), BLOCK=512, SAME=False)
    assert kinds(executor) == {"race"}


def test_a_hand_over_between_threads_without_a_barrier_is_found() -> None:
    x, y = torch.arange(512, dtype=torch.int32), torch.zeros(512, dtype=torch.int32)
    with watched() as executor:
        hand_over[(1,)](x, y, BLOCK=512)
    assert kinds(executor) == {"race"}


def test_a_hint_that_lies_is_found() -> None:
    x, y = torch.arange(600, dtype=torch.int32), torch.zeros(512, dtype=torch.int32)
    with watched() as executor:
        lie[(1,)](x, y, 1, BLOCK=512)
    assert kinds(executor) == {"misaligned"}


@pytest.mark.parametrize("arch", [80, 90])
def test_each_barrier_that_is_removed_is_missed(arch: int) -> None:
    x = torch.arange(1024, dtype=torch.int32)
    expected = x.cumsum(0, dtype=torch.int32)
    y = torch.zeros(2048, dtype=torch.int32)
    texts: list[str] = []

    def keep(text: str) -> str:
        texts.append(text)
        return text

    with on_executor(arch) as executor:
        executor.rewrite = keep
        scan[(1,)](x, y, BLOCK=1024, num_warps=8)
    assert torch.equal(y, torch.cat([expected, expected.sum(dtype=torch.int32) + expected]))
    barriers = [found.start() for found in re.finditer(r"bar\.sync", texts[0])]
    assert len(barriers) >= 3
    for place in barriers:
        with watched() as executor:
            executor.device = arch
            executor.rewrite = lambda text, at=place: text[:at] + "//" + text[at:]
            scan[(1,)](x, y, BLOCK=1024, num_warps=8)
        assert kinds(executor) == {"race"}


@pytest.mark.parametrize("order", [None, 0, 1])
def test_the_last_block_may_merge_what_others_published(order: int | None) -> None:
    x = torch.arange(200 * 256, dtype=torch.int32)
    partial, counter, out = (torch.zeros(n, dtype=torch.int32) for n in (200, 1, 1))
    with on_executor(order=order):
        for _ in range(2):
            merge[(200,)](x, partial, counter, out, BLOCK=256, SEM="acq_rel")
    assert (out.item(), counter.item()) == (x.sum().item(), 0)


@pytest.mark.parametrize("sem", ["relaxed", "release", "acquire"])
def test_a_merge_of_what_is_not_published_is_found(sem: str) -> None:
    x = torch.ones(200 * 256, dtype=torch.int32)
    partial, counter, out = (torch.zeros(n, dtype=torch.int32) for n in (200, 1, 1))
    with watched() as executor:
        merge[(200,)](x, partial, counter, out, BLOCK=256, SEM=sem)
    assert kinds(executor) == {"race"}


def without_barriers_before_the_atomic(text: str) -> str:
    before, atom, after = text.partition("atom.global")
    return before.replace("bar.sync", "//") + atom + after


def test_a_publication_before_all_threads_have_written_is_found() -> None:
    x = torch.ones(20 * 256, dtype=torch.int32)
    partial, counter = torch.zeros_like(x), torch.zeros(1, dtype=torch.int32)
    out = torch.zeros(256, dtype=torch.int32)
    with on_executor():
        merge_rows[(20,)](x, partial, counter, out, BLOCK=256, HAS_BARRIER=True)
    assert (out == 20).all()
    counter.zero_()
    with watched() as executor:
        executor.rewrite = without_barriers_before_the_atomic
        merge_rows[(20,)](x, partial, counter, out, BLOCK=256, HAS_BARRIER=True)
    assert kinds(executor) == {"race"}


def test_what_is_not_supported_is_named() -> None:
    x = torch.zeros(512, dtype=torch.int32)
    with on_executor() as executor:
        executor.rewrite = lambda text: text.replace("ret;", "frobnicate.b32 %r1;")
        with pytest.raises(NotImplementedError, match=r"frobnicate\.b32 %r1"):
            clash[(1,)](x, BLOCK=512, SAME=True)
