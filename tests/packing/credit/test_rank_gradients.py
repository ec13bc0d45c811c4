"""Two data-parallel ranks give the gradients of one rank on the whole batch."""

from __future__ import annotations

import datetime
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from trajpack import GRPO, PackedBatch, Trajectory, Turn, pack
from trajpack.packing.micro_batches.alignment import Alignment
from trajpack.packing.plan.plan import plan_micro_batches, plan_ranks

CAPACITY = 96
CLIP = 0.2
PADDED = Alignment(sequence_multiple=8, total_multiple=32)
CASES = {
    # trajectories' tokens: turns of prompt and completion
    "many": [[(5 + n % 7, 3 + n % 5)] * (1 + n % 3) for n in range(15)],
    "one rank has less to do": [[(60, 30)], [(50, 20), (4, 6)], [(40, 50)]],
}


def random_trajectories(shape: list[list[tuple[int, int]]]) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    trajectories = []
    for n, lengths in enumerate(shape):
        ids: list[int] = []
        turns = []
        for new, sampled in lengths:
            ids = ids + rng.integers(3, 380, new).tolist()
            completion = rng.integers(3, 380, sampled)
            turns.append(Turn(ids, completion, np.zeros(sampled), reward=float(rng.normal())))
            ids = ids + completion.tolist()
        trajectories.append(Trajectory(f"t{n}", turns, group=f"g{n // 3}"))
    return trajectories


def build_model() -> torch.nn.Module:
    from trajpack.agent import build_tiny_model

    return build_tiny_model(seed=0)[0].double()


def logprobs_of(model: torch.nn.Module, batch) -> torch.Tensor:
    """Log-probability of the label that stands at each token: of the next token."""
    logits = model(**batch.model_inputs()).logits[0]
    labels = batch.labels("next", ignore=0)
    return logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]


def off_policy(trajectories: list[Trajectory], model: torch.nn.Module) -> list[Trajectory]:
    """Return them as sampled by a policy somewhat beside the model's: some ratios are clipped."""
    batch = pack(trajectories, device="cpu")
    with torch.no_grad():
        logprobs = batch.shift(logprobs_of(model, batch), "right")
    noise = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(0)) * 0.2
    sampled = (logprobs + noise).float()
    spans = iter(batch.turn_spans.tolist())
    return [
        Trajectory(
            path.id,
            [
                Turn(t.prompt_ids, t.completion_ids, sampled[slice(*next(spans))], t.reward)
                for t in path.turns
            ],
            path.group,
        )
        for path in trajectories
    ]


def policy_loss(model: torch.nn.Module, batch, weights: torch.Tensor) -> torch.Tensor:
    """Clipped policy gradient, as a plain sum of what the weights weigh."""
    old, advantages, weights = (
        batch.shift(x, "left") for x in (batch.rollout_logprobs, batch.advantages, weights)
    )
    ratio = torch.exp(logprobs_of(model, batch) - old)
    ratio = torch.where(weights != 0, ratio, 1.0)
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(weights * surrogate).sum()


def credited(trajectories: list[Trajectory]) -> PackedBatch:
    return pack(trajectories, device="cpu").with_advantages(GRPO())


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.grad.clone() for name, value in model.named_parameters()}


def train_rank(rank: int, folder: str) -> None:
    """Be one of two ranks: write its gradients after each case, as DDP has reduced them."""
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=90),
    )
    model = DistributedDataParallel(build_model())
    found = {}
    for name, paths in torch.load(f"{folder}/trajectories.pt", weights_only=False).items():
        for how, share in (("whole", whole_batch), ("own", own_trajectories)):
            model.zero_grad()
            micro_batches = share(paths, rank)
            for index, micro_batch in enumerate(micro_batches):
                model.require_backward_grad_sync = index == len(micro_batches) - 1
                # DDP takes the mean over ranks; the loss is a sum over all of them.
                (2 * policy_loss(model, micro_batch, micro_batch.fields["weights"])).backward()
            sizes = [(mb.is_dummy, mb.sequences) for mb in micro_batches]
            found[name, how] = gradients_of(model.module), sizes
    torch.save(found, f"{folder}/gradients_{rank}.pt")
    dist.destroy_process_group()


def whole_batch(trajectories: list[Trajectory], rank: int):
    """Every rank has the whole batch, makes the same plan of it, and takes its part."""
    batch = credited(trajectories)
    plan = plan_ranks(batch.seqlens, 2, CAPACITY).plan(rank)
    return batch.split(plan, tensors={"weights": batch.loss_weights("sequence_mean_token_mean")})


def own_trajectories(trajectories: list[Trajectory], rank: int):
    """Every rank has rolled out whole groups of its own, or none; they agree on two numbers."""
    batch = credited([path for path in trajectories if int(path.group[1:]) % 2 == rank])
    denominator = batch.loss_denominator("sequence_mean_token_mean")
    dist.all_reduce(denominator)
    weights = batch.loss_weights("sequence_mean_token_mean", denominator=denominator)
    plan = plan_micro_batches(batch.seqlens, CAPACITY, align=32)
    most = torch.tensor(len(plan))
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    plan = plan_micro_batches(batch.seqlens, CAPACITY, align=32, min_bins=int(most))
    return batch.split(plan, PADDED, tensors={"weights": weights})


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return build_model()


@pytest.fixture(scope="module")
def trajectories(model: torch.nn.Module) -> dict[str, list[Trajectory]]:
    return {name: off_policy(random_trajectories(shape), model) for name, shape in CASES.items()}


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory, warm_programs, trajectories):
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(trajectories, folder / "trajectories.pt")
    ranks = [
        subprocess.Popen(
            [*warm_programs.command("script"), __file__, str(rank), str(folder)],
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    return [torch.load(folder / f"gradients_{rank}.pt", weights_only=False) for rank in (0, 1)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["whole", "own"])
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_gradients_of_one(name, how, model, trajectories, gradients):
    batch = credited(trajectories[name])
    weights = batch.loss_weights("sequence_mean_token_mean")
    model.zero_grad()
    policy_loss(model, batch, weights).backward()
    expected = gradients_of(model)
    (first, sizes), (second, other_sizes) = (found[name, how] for found in gradients)
    assert len(sizes) == len(other_sizes) > 1, "as many passes on each rank"
    dummies = sum(is_dummy for is_dummy, _ in sizes + other_sizes)
    assert dummies == (name != "many") * (1 if how == "whole" else len(sizes))
    for parameter, gradient in expected.items():
        assert torch.equal(first[parameter], second[parameter])
        largest = gradient.abs().max().item()
        assert largest > 0
        torch.testing.assert_close(first[parameter], gradient, rtol=0, atol=1e-10 * largest)


def test_the_loss_clips_some_tokens_and_not_others(model, trajectories):
    for paths in trajectories.values():
        batch = credited(paths)
        with torch.no_grad():
            own = batch.shift(logprobs_of(model, batch), "right")
        ratio = torch.exp(own - batch.rollout_logprobs)[batch.loss_mask]
        is_clipped = (ratio - 1).abs() > CLIP
        assert 0.1 < is_clipped.double().mean() < 0.9


if __name__ == "__main__":
    train_rank(int(sys.argv[1]), sys.argv[2])
