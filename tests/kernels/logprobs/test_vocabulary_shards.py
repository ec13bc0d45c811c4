"""`token_logprobs` over two processes, each with a part of the vocabulary, equals one process."""

from __future__ import annotations

import datetime
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed as dist

from trajpack import Trajectory, Turn, pack
from trajpack.kernels import token_logprobs, topk_kl
from trajpack.kernels.logprobs import token_logprobs as module

ROWS, TARGETS = torch.tensor([0, 3, 3, 4]), torch.tensor([0, 9, 25, 4])
TEMPERATURE = torch.tensor([1.0, 0.5, 2.0, 1.5])
TOP = torch.tensor([[0, 19], [9, 8], [25, 3], [4, 13]])
SUPPORT = torch.tensor([0, 2, 2, 3, 5]).int(), torch.tensor([0, 22, 25, 4, 14])
EVERY = torch.tensor([0, 2, 3, 4, 6]).int(), torch.tensor([0, 22, 9, 25, 4, 14])


def leaves(vocabulary: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(4)
    shapes = ((5, 6), (26, 6), (26,))
    hidden, weight, bias = (torch.randn(shape, generator=random) for shape in shapes)
    return [hidden, weight[:vocabulary], bias[:vocabulary]]


def results(leaves: list[torch.Tensor], **options: Any) -> dict[str, list[torch.Tensor]]:
    """Return results and gradients of each call."""
    hidden, weight, bias = (leaf.detach().requires_grad_() for leaf in leaves)
    options |= {"bias": bias, "softcap": 4.0, "temperature": TEMPERATURE}
    teacher, head = torch.tensor([0.5, 0.25] * 4).log(), (hidden, weight)
    boundaries = torch.arange(0, 9, 2).int()

    def divergence() -> tuple[torch.Tensor, ...]:
        found = token_logprobs(*head, ROWS, (boundaries, TOP.flatten()), **options)
        return (topk_kl(*found, teacher, boundaries=boundaries),)

    def plain(pairs: int = module.LOGITS_PER_PAIR["cpu"], **support: Any) -> Any:
        with patch.object(module, "LOGITS_PER_PAIR", {"cpu": pairs}):
            return token_logprobs(*head, ROWS, TARGETS, entropy=True, **support, **options)

    calls = {
        "tokens": plain,
        "support": partial(plain, support=SUPPORT),
        "every row supported": partial(plain, support=EVERY),
        "pairs alone": partial(plain, 0, support=EVERY),
        "top": divergence,
    }
    found = {}
    for name, call in calls.items():
        values = call()
        total = sum((one * torch.arange(1, 5)).sum() for one in values)
        grads = torch.autograd.grad(total, (hidden, weight, bias))
        found[name] = [*(one.detach() for one in values), *grads]
    return found


def results_of_a_model(mesh: Any = None) -> dict[str, list[torch.Tensor]]:
    """Return log-probabilities, entropies and gradients of a model with an odd vocabulary."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    from transformers import LlamaConfig, LlamaForCausalLM

    from trajpack.packing.adapters.huggingface import LMHead

    torch.manual_seed(0)
    sizes = {"vocab_size": 27, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    if mesh is not None:
        plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh, plan)
    head = LMHead(model, group=None if mesh is None else mesh.get_group())
    batch = pack([Trajectory("a", [Turn([1, 2], [3, 26, 14, 13, 12], [-0.5] * 5)])])
    found = head.logprobs(batch, entropy=True)
    (found[0].sum() + found[1] @ torch.arange(5.0)).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return {"a model": [*(one.detach() for one in found), *grads]}


def be_rank(rank: int, folder: str) -> None:
    """Write results of half of the vocabulary, plain and as parts of ``DTensor``."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=90),
    )
    mesh = init_device_mesh("cpu", (2,))
    group = mesh.get_group()
    hidden, *head = leaves(26)
    half = slice(13 * rank, 13 * rank + 13)
    spread = [distribute_tensor(one, mesh, [Shard(0)]) for one in head]
    found = {
        "parts": results([hidden, *(one[half] for one in head)], group=group),
        "DTensor": results([hidden, *spread], group=group) | results_of_a_model(mesh),
    }
    for message, wrong in (("without group", {}), ("Replicate", {"group": group})):
        other = spread[0] if not wrong else spread[0].redistribute(placements=[Replicate()])
        with pytest.raises(ValueError, match=message):
            token_logprobs(hidden, other, ROWS, TARGETS, **wrong)
    for calls in found.values():
        for name, tensors in calls.items():
            calls[name] = [
                one.full_tensor() if hasattr(one, "full_tensor") else one for one in tensors
            ]
    torch.save(found, f"{folder}/found_{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.timeout(240)
def test_two_ranks_equal_one(tmp_path: Path, warm_programs: Any) -> None:
    command = [*warm_programs.command("script"), __file__]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], cwd=tmp_path) for rank in range(2)
    ]
    assert [rank.wait(200) for rank in ranks] == [0, 0]
    expected = results(leaves(26)) | results_of_a_model()
    for rank in range(2):
        found = torch.load(tmp_path / f"found_{rank}.pt")
        for how, calls in found.items():
            for name, tensors in calls.items():
                wanted, label = expected[name], f"{name}, {how}: "
                if how == "parts":  # a rank has the gradient of its part of the head
                    half = slice(13 * rank, 13 * rank + 13)
                    wanted = [*wanted[:-2], *(one[half] for one in wanted[-2:])]
                for one, other in zip(tensors, wanted, strict=True):
                    torch.testing.assert_close(one, other, msg=label.__add__)


if __name__ == "__main__":
    be_rank(int(sys.argv[1]), sys.argv[2])
