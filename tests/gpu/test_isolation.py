"""`check_isolation` on real hardware: coarse dtypes, and generators of the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trajpack.packing.adapters.huggingface import check_isolation

pytestmark = pytest.mark.gpu


class Experts(nn.Module):
    """Routes tokens to experts, whose products are as long as what they are sent."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(256, 256) for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen, sent = x[..., :8].argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            sent[chosen == number] = expert(x[chosen == number]).to(x.dtype)
        return x + sent


class Model(nn.Module):
    """Layers of experts. Each is a module, whose rounding is compared on equal inputs."""

    def __init__(self, leaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.leaks = nn.Embedding(500, 256), leaks
        self.layers = nn.ModuleList([Experts() for _ in range(4)])
        self.head = nn.Linear(256, 500)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.tokens

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        x = self.tokens(input_ids)
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.1, self.training)
        return SimpleNamespace(logits=self.head(x + 0.1 * x.cumsum(1) if self.leaks else x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_no_leak_and_a_leak_is_found(dtype: torch.dtype) -> None:
    check_isolation(Model(leaks=False).to("cuda", dtype))
    with pytest.raises(ValueError, match="Model lets sequences of a packed batch see each other"):
        check_isolation(Model(leaks=True).to("cuda", dtype))


def test_generators_of_the_device_are_left_as_they_were() -> None:
    model = Model(leaks=False).cuda()
    before = torch.cuda.get_rng_state()
    check_isolation(model)
    assert torch.equal(torch.cuda.get_rng_state(), before)
