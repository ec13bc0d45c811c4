"""Checks of calls on a device: the reference's result, no wait for the device, replays of a graph.

With tensors on the host, where the executor runs the kernels, they rehearse.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from tests.gpu.conftest import capture, no_waiting
from tests.ptx.calls import Call
from trajpack.testing import assert_same_bits


def compared(on_host: Call, on_device: Call) -> dict[str, Any]:
    """Compare a call with its reference on the host, and with itself, run again."""
    expected, got, again = (
        tensors_of(work(impl))
        for work, impl in ((on_host, "torch"), (on_device, "triton"), (on_device, "triton"))
    )
    assert got.keys() == expected.keys()
    apart = 0.0
    limit = 2e-2 if any(one.dtype == torch.bfloat16 for one in got.values()) else 1e-5
    for name, tensor in got.items():
        wanted, here = expected[name], tensor.cpu()
        torch.testing.assert_close(here, wanted, rtol=limit, atol=limit, equal_nan=True)
        assert_same_bits(again[name], tensor, name)
        if here.is_floating_point() and here.numel():
            apart = max(apart, float((here.double() - wanted.double()).nan_to_num().abs().max()))
    return {"tensors": len(got), "most_apart": apart}


def tensors_of(result: Any, name: str = "result") -> dict[str, torch.Tensor]:
    """Return the tensors of what a call returned, by name."""
    if isinstance(result, torch.Tensor):
        return {name: result}
    if isinstance(result, (tuple, list)):
        parts = [tensors_of(one, f"{name} {index}") for index, one in enumerate(result)]
        return {key: tensor for part in parts for key, tensor in part.items()}
    found: dict[str, torch.Tensor] = result.tensors()
    return found | dict(getattr(result, "fields", {}))


def without_waits(call: Call, device: str) -> dict[str, Any]:
    """Make a call with every wait for the device an error, after one that compiles."""
    call("triton")
    with no_waiting() if device == "cuda" else nullcontext():
        call("triton")
    return {}


def captured(work: Callable[[], Any], device: str) -> tuple[Callable[[], Any], Any]:
    """Return the replay of ``work`` and what it returned; without a device, plain calls."""
    if device == "cpu":
        return work, work()
    graph, result = capture(work)
    return graph.replay, result


def replays_call(call: Call, device: str) -> dict[str, Any]:
    """Replay a captured call: it writes the bits of the call itself."""
    expected = {name: one.clone() for name, one in tensors_of(call("triton")).items()}
    replay, result = captured(lambda: call("triton"), device)
    replay()
    for name, tensor in tensors_of(result).items():
        assert_same_bits(tensor, expected[name], name)
    return {}
