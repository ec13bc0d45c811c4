"""Every op: shapes without values, and one graph of torch.compile with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.gpu.checks import tensors_of
from tests.ptx.calls import Drawn, every_call
from trajpack import kernels as k
from trajpack.testing import assert_same_bits

LENGTHS = np.array([3, 1, 40])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("impl", ["auto", "torch", "triton"])
def test_shapes_alone_are_enough_on_the_meta_device(impl: str) -> None:
    on_host, on_meta = (every_call(Drawn(LENGTHS, device)) for device in ("cpu", "meta"))
    for (name, expected), (_, call) in zip(on_host, on_meta, strict=True):
        found, wanted = tensors_of(call(impl)), tensors_of(expected("torch"))
        assert found.keys() == wanted.keys(), name
        for part, tensor in found.items():
            kind = tensor.shape, tensor.dtype, tensor.device.type
            assert kind == (wanted[part].shape, wanted[part].dtype, "meta"), (name, part)


CALLS: dict[str, Callable[..., torch.Tensor]] = {
    "discounted_returns": lambda x, _, ends, mask, *__: k.discounted_returns(
        x * 2, ends, 0.5, loss_mask=mask
    ),
    "gae": lambda x, y, ends, mask, _, longest: torch.stack(
        k.gae(x * 2, y, ends, loss_mask=mask, max_seqlen=longest)
    ),
    "turn_gae": lambda x, y, ends, _, owners, __: torch.stack(k.turn_gae(x, y, ends, owners)),
    "vtrace": lambda x, y, ends, *_: torch.stack(k.vtrace(x.detach(), y, ends, y, -y)),
    "segment_sum": lambda x, _, ends, mask, *__: k.segment_sum(x * 2, ends, mask=mask),
    "pad": lambda x, _, ends, __, ___, longest: k.pad(x * 2, ends, longest, value=-1),
    "whiten": lambda x, _, __, mask, *___: k.whiten(x.detach() * 2, mask, ddof=0),
    "group_advantages": lambda x, _, __, ___, owners, longest: k.group_advantages(
        x.detach(), owners, "rloo", num_groups=longest
    ),
    "importance_weights": lambda x, y, ends, mask, *_: k.importance_weights(
        x.detach(), y, mask, k.Correction.mis(), segments=ends
    )[0],
    "loss_weights": lambda _, __, ___, mask, owners, longest: k.loss_weights(
        "sequence_mean_token_mean", mask, owners, num_sequences=longest
    ),
    "kl_penalty": lambda x, y, *_: k.kl_penalty(x, y, estimator="k3"),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_it_compiles_into_one_graph(name: str, dynamic: bool) -> None:
    compiled = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for lengths in ([3, 4], [1, 2, 8]):
        given = Drawn(np.array(lengths))
        beside: Any = given.values, given.cu_seqlens, given.mask, given.owners, given.longest
        eager, traced = (given.rewards.clone().requires_grad_() for _ in range(2))
        results = CALLS[name](eager, *beside), compiled(traced, *beside)
        assert_same_bits(results[1].detach(), results[0].detach())
        if results[0].requires_grad:
            for result in results:
                result.square().sum().backward()
            assert_same_bits(traced.grad, eager.grad)  # type: ignore[arg-type]
