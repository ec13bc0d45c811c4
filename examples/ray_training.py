"""Train a policy to count on a Ray cluster: two rollout workers feed two ranks of `ray.train`.

It runs on a CPU, in about a minute:

    python examples/ray_training.py

The policy is a table of logits, so that all of it fits here; with a language model, the engine
would be a `TransformersEngine` or one of a server. Rank 0 rolls out on its workers while both ranks
train. `ray.train` restarts the ranks from the last checkpoint when one of them dies; a program that
was killed continues when it is started again with the same folder. `local_cluster` protects its
cluster by a token if it is entered before Ray is imported, so that functions import Ray here.
"""

import asyncio
import sys
import tempfile
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import trajpack
from trajpack import Trajectory
from trajpack.agent import GenerationOutput, Prompt
from trajpack.agent.ray import (
    RolloutWorkers,
    TrajectoryArrays,
    Weights,
    WorkerOptions,
    local_cluster,
)
from trajpack.packing.plan.plan import plan_ranks

NUM_TOKENS = 12


class Table(torch.nn.Module):
    """Logits of the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(NUM_TOKENS, NUM_TOKENS))

    def forward(self, input_ids, **_):
        """Look the logits up."""
        return SimpleNamespace(logits=self.table[input_ids])


class TableEngine:
    """Samples one token for each prompt."""

    def __init__(self, seed: int) -> None:
        self.version = 0
        self._model = Table()
        self._draw = torch.Generator().manual_seed(seed)

    async def update_weights(self, state_dict, version):
        """Sample with other weights from now on."""
        self._model.load_state_dict(state_dict)
        self.version = version

    async def generate(self, request):
        """Return the completion of a request."""
        qid, ids, _ = request
        with torch.no_grad():
            logprobs = self._model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        token = int(torch.multinomial(logprobs.exp(), 1, generator=self._draw))
        version = self.version
        return GenerationOutput(
            qid, ids, [token], [float(logprobs[token])], False, version, version
        )


async def count(prompt, env, generate):
    """Be an agent that asks what comes after a number."""
    turn = await generate(prompt.input_ids)
    _, reward, *_ = await env.step((prompt.input_ids[-1], int(turn.completion_ids[0])))
    return [Trajectory(prompt.id, [replace(turn, reward=reward)])]


class Successor:
    """Rewards the number that comes next."""

    async def reset(self):
        """Do nothing: there is no state."""
        return None

    async def step(self, action):
        """Compare number and answer."""
        number, answer = action
        return None, float(answer == (number + 1) % NUM_TOKENS), True, False, {}


@asynccontextmanager
async def make_worker(number):
    """Make engine, agent and environment; called in the process of each worker."""
    yield TableEngine(seed=number), count, Successor()


class Rank:
    """Model and optimizer of one rank; all ranks take the same steps."""

    def __init__(self) -> None:
        import ray.train

        self.model = Table()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=60.0)
        self.num_steps, self.trained = 0, set()
        if (checkpoint := ray.train.get_checkpoint()) is not None:
            with checkpoint.as_directory() as folder:
                state = torch.load(Path(folder, "state.pt"))
            self.model.load_state_dict(state["model"])
            self.num_steps, self.trained = state["num_steps"], set(state["trained"])

    def step(self, groups=None):
        """Train on groups that rank 0 gives to all ranks; return False at the end."""
        shared = [None]
        if groups is not None:
            trajectories = [path for group in groups for path in group.trajectories]
            shared = [([group.prompt.id for group in groups], TrajectoryArrays.of(trajectories))]
        dist.broadcast_object_list(shared, src=0)
        if shared[0] is None:
            return False
        prompts, arrays = shared[0]
        batch = trajpack.pack(arrays.trajectories()).with_advantages(trajpack.GRPO())
        plan = plan_ranks(batch.seqlens, dist.get_world_size(), capacity=256).plan(dist.get_rank())
        self.optimizer.zero_grad(set_to_none=False)
        total = torch.zeros(())
        for piece in batch.split(plan, tensors={"loss_weights": batch.loss_weights("token_mean")}):
            generated = piece.generated  # in the order of the log-probabilities
            logprobs = piece.logprobs(self.model(piece.input_ids).logits)
            ratio = (logprobs - generated.rollout_logprobs).exp()
            clipped = ratio.clamp(0.8, 1.28) * generated.advantages
            gain = torch.minimum(ratio * generated.advantages, clipped)
            loss = -(gain * generated["loss_weights"]).sum()
            loss.backward()
            total += loss.detach()
        for tensor in [total, *(weights.grad for weights in self.model.parameters())]:
            dist.all_reduce(tensor)
        self.optimizer.step()
        self.num_steps += 1
        self.trained.update(prompts)
        reward = batch.turn_rewards.mean().item()
        self.report({"step": self.num_steps, "reward": reward, "loss": total.item()})
        return True

    def report(self, metrics):
        """Report to `ray.train`, from rank 0 with a checkpoint."""
        import ray.train

        if dist.get_rank() != 0:
            ray.train.report(metrics)
            return
        state = {"model": self.model.state_dict(), "num_steps": self.num_steps}
        with tempfile.TemporaryDirectory() as folder:
            torch.save(state | {"trained": sorted(self.trained)}, Path(folder, "state.pt"))
            ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


async def lead(rank, num_steps):
    """Roll out the prompts that no checkpoint has, train on the groups, publish the weights."""
    prompts = [Prompt(f"q{n}", [n % NUM_TOKENS]) for n in range(num_steps * NUM_TOKENS)]
    prompts = [prompt for prompt in prompts if prompt.id not in rank.trained]
    workers = RolloutWorkers(make_worker, 2, options=WorkerOptions(concurrency=24))
    if rank.num_steps:
        await workers.publish(Weights.of(rank.model.state_dict(), rank.num_steps))
    async with workers, aclosing(workers.runner(group_size=16).run_groups(prompts)) as results:
        groups = []
        async for group in results:
            groups.append(group)
            if len(groups) == NUM_TOKENS:
                await asyncio.to_thread(rank.step, groups)
                await workers.publish(Weights.of(rank.model.state_dict(), rank.num_steps))
                groups = []
    rank.step()


def train_loop(config):
    """Run one rank; called by `ray.train` in the process of each."""
    rank = Rank()
    if dist.get_rank() == 0:
        asyncio.run(lead(rank, config["num_steps"]))
    else:
        while rank.step():
            pass


def train(folder, num_steps):
    """Train for some steps, and return the result of `ray.train`."""
    import ray.train
    from ray.train.torch import TorchTrainer

    return TorchTrainer(
        train_loop,
        train_loop_config={"num_steps": num_steps},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name="counting",
            storage_path=str(folder),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    ).fit()


if __name__ == "__main__":
    num_steps = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    with tempfile.TemporaryDirectory() as folder, local_cluster(num_cpus=4):
        result = train(sys.argv[2] if len(sys.argv) > 2 else folder, num_steps)
    for _, metrics in result.best_checkpoints:
        print("step {step:2}: mean reward {reward:.2f}, loss {loss:+.4f}".format(**metrics))
