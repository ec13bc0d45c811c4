"""Items of `make hardware` that do one job in several ways: ours, torch's and other packages'."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.contest import Contender, Contest
from benchmarks.hardware_items import Row, Setting, guarded, in_turn, timed
from benchmarks.kernels import (
    build_job,
    gae_job,
    groups_job,
    logprobs_job,
    pad_job,
    returns_job,
    weights_job,
)
from benchmarks.packing import bench_micro_batches as micro
from benchmarks.rivals import find, find_file
from benchmarks.workloads import EVEN_SEQUENCES, conversations

SLOW_S = 0.25
"""Seconds of a call of a rival that is then its only one."""
JOBS: tuple[Callable[..., tuple[Contest, list[Contender]]], ...] = (
    groups_job.whiten_contest,
    groups_job.segments_contest,
    weights_job.importance_contest,
    weights_job.loss_contest,
    gae_job.contest,
    pad_job.pad_contest,
    pad_job.unpad_contest,
    returns_job.contest,
    partial(gae_job.contest, masked=True),
)
"""Contests of lengths."""


def logprobs(setting: Setting) -> Iterator[Row]:
    """Log-probabilities, forward and backward and forward alone: ours, others', bare products."""
    width, vocabulary = (64, 500) if setting.rehearse else logprobs_job.PUBLISHED[1:]
    for rows in (32,) if setting.rehearse else (8192, 2048, 512):
        given = logprobs_job.inputs(1, (rows, width, vocabulary), setting.device)
        results: dict[str, Callable[[], tuple[torch.Tensor, ...]]] = {
            "ours": partial(logprobs_job.ours, given, entropy=False),
            "dense": partial(logprobs_job.dense, given, entropy=False),
        }
        trained = results | {
            "nothing kept": partial(logprobs_job.nothing_kept, given, entropy=False)
        }
        for name, ((module, why), call) in {
            "TRL": (find("trl.kernels.chunked_logprob"), logprobs_job.of_trl),
            "Liger": (find_file("liger-kernel", logprobs_job.LIGER_FILE), logprobs_job.of_liger),
            "verl": (find_file("verl", logprobs_job.VERL_FILE), logprobs_job.of_verl),
        }.items():
            if module is None:
                yield {"rows": rows, "way": name, "missing": why}
            else:
                trained[name] = partial(call, given, module, entropy=False)
        ways = {name: logprobs_job.with_gradients(given, one) for name, one in trained.items()}
        pairs = zip(ways["ours"](), ways["nothing kept"](), strict=True)
        yield {"rows": rows, "same bits": [torch.equal(*pair) for pair in pairs]}
        ways["products"] = partial(logprobs_job.products, given)
        for name, way in ways.items():
            said = {"rows": rows, "pass": "both"}
            yield from guarded(said | {"way": name}, in_turn({name: way}, setting.device))
        with torch.no_grad():
            yield from guarded({"rows": rows, "pass": "forward"}, in_turn(results, setting.device))


def micro_batches(setting: Setting) -> Iterator[Row]:
    """Micro-batches of a batch on the device, each result checked, and the rate of their kernel."""
    for workload, job in micro.CASES[: 2 if setting.rehearse else None]:
        contest, entrants = micro.contest(job, workload, setting.size.scale, setting.device)
        batch = micro.inputs(workload, setting.size.scale, setting.device)
        made = entrants[0].work()
        moved = sum(getattr(batch, name).nbytes for name in micro.COPIED)
        moved += sum(tensor.nbytes for one in made for tensor in one.values())
        for one in entrants:
            is_index = getattr(one.work, "func", None) is micro.by_index
            if one is entrants[0] or (is_index and workload == EVEN_SEQUENCES[0]):
                contest.check(one.work())  # others take a launch a sequence
                row = timed(one.work, setting.device)
                named = row.get("kernels_us", {}).items()
                us = sum(took for name, took in named if "select_tokens" in name)
                row |= {"select_gb_per_s": moved / us / 1e3} if us else {}
                yield {"workload": workload, "job": job, "way": one.name, "bytes": moved} | row


def rivals(setting: Setting) -> Iterator[Row]:
    """Jobs of kernels in all ways, on A and C, each result checked."""
    device, size = setting.device, setting.size
    for workload, (count, members) in groups_job.GROUP_SIZES.items():
        shape = size.scaled(count), members
        yield from beside(*groups_job.groups_contest(workload, shape, device), device)
    for make in JOBS:
        for workload in EVEN_SEQUENCES[::2]:
            yield from beside(*make(workload, setting.lengths(workload), device), device)
    given = conversations(EVEN_SEQUENCES[0], size.scale)  # last: torch compiles
    yield from beside(*build_job.build_contest(EVEN_SEQUENCES[0], given, device), device)


def beside(contest: Contest, entrants: list[Contender], device: str) -> Iterator[Row]:
    """Yield what each contender takes, once its result is checked."""
    for one in entrants:
        said = {"job": contest.job, "workload": contest.workload, "way": one.name}
        yield from guarded(said, _of_contender(contest, one, device))


def _of_contender(contest: Contest, one: Contender, device: str) -> Iterator[Row]:
    if one.work is None:
        yield {"missing": one.missing}
        return
    (one.check or contest.check)(one.work())
    begin = time.perf_counter()
    one.work()
    if device == "cuda":
        torch.cuda.synchronize()
    took = time.perf_counter() - begin
    slow: Any = took > SLOW_S and not one.is_ours
    yield {"wall_ms": 1e3 * took} if slow else timed(one.work, device)
