"""Checks of calls on a device: the reference's result, and the same bits again."""

from __future__ import annotations

from typing import Any

import torch

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
