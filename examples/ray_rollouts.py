"""A policy learns to count on a Ray cluster: two rollout workers, two trainer ranks, a log.

The policy is a table of logits, so that all of it fits here; with a language model, the engine
would be a `TransformersEngine` or one that speaks to servers.
"""

import asyncio
import sys
import tempfile
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from trajpack import Trajectory, Turn
from trajpack.agent import GenerationOutput, Prompt
from trajpack.agent.ray import (
    PackedRankTrainer,
    RayTraining,
    RolloutWorkers,
    StepRules,
    TrainerRanks,
    TrainingSettings,
    WorkerOptions,
    local_cluster,
)
from trajpack.packing.trajectory_log.log import TrajectoryLog

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
        self.obs_queue: asyncio.Queue = asyncio.Queue()
        self._model = Table()
        self._replies: dict[str, asyncio.Queue] = {}
        self._draw = torch.Generator().manual_seed(seed)

    def open_episode(self, qid):
        """Return the queue of the episode's replies."""
        return self._replies.setdefault(qid, asyncio.Queue())

    def close_episode(self, qid):
        """Forget the episode."""
        self._replies.pop(qid, None)

    async def update_weights(self, state_dict, version):
        """Sample with other weights from now on."""
        self._model.load_state_dict(state_dict)
        self.version = version

    async def serve(self):
        """Answer whatever is asked."""
        while True:
            qid, ids, _ = await self.obs_queue.get()
            with torch.no_grad():
                logprobs = self._model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            token = int(torch.multinomial(logprobs.exp(), 1, generator=self._draw))
            output = GenerationOutput(
                qid, ids, [token], [float(logprobs[token])], False, self.version, self.version
            )
            if qid in self._replies:
                self._replies[qid].put_nowait(output)


class CountingAgent:
    """Asks what comes after a number."""

    async def collect_trajectory(self, prompt, env, obs_queue, act_queue):
        """Have one turn."""
        await obs_queue.put((prompt.id, prompt.input_ids, None))
        reply = await act_queue.get()
        _, reward, *_ = await env.step((prompt.input_ids[-1], reply.output_ids[0]))
        turn = Turn(
            prompt.input_ids,
            reply.output_ids,
            reply.output_logprobs,
            reward,
            version_start=reply.version_start,
            version_end=reply.version_end,
        )
        return [Trajectory(prompt.id, [turn])]


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
    engine = TableEngine(seed=number)
    serving = asyncio.create_task(engine.serve())
    try:
        yield engine, CountingAgent(), Successor()
    finally:
        serving.cancel()


def make_trainer():
    """Make the trainer; called in the process of each rank."""
    model = Table()
    optimizer = torch.optim.SGD(model.parameters(), lr=60.0)
    return PackedRankTrainer(model, optimizer, StepRules(capacity=256, max_gradient_norm=1e9))


async def train(folder: Path, num_steps: int) -> None:
    """Train on as many groups as the steps take; with the same folder again, it goes on."""
    prompts = [Prompt(f"q{n}", [n % NUM_TOKENS]) for n in range(num_steps * NUM_TOKENS)]
    workers = RolloutWorkers(make_worker, 2, options=WorkerOptions(concurrency=24))
    trainers = TrainerRanks(make_trainer, 2)
    with TrajectoryLog.open(folder / "log") as log:
        training = RayTraining(
            workers,
            trainers,
            workers.runner(group_size=16),
            folder / "checkpoints",
            TrainingSettings(groups_per_step=NUM_TOKENS, checkpoint_every=4),
            log,
        )
        async with aclosing(training.run(prompts)) as steps:
            async for step in steps:
                loss, num_tokens = step.ranks[0]["loss"], step.ranks[0]["num_tokens"]
                print(
                    f"step {step.step:2}: {step.num_trajectories} trajectories, "
                    f"{num_tokens:.0f} tokens, mean reward {step.mean_reward:.2f}, loss {loss:+.4f}"
                )


if __name__ == "__main__":
    with local_cluster(num_cpus=4), tempfile.TemporaryDirectory() as folder:
        asyncio.run(train(Path(folder), int(sys.argv[1]) if len(sys.argv) > 1 else 8))
