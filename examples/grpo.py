"""Train a tiny model to add, from nothing but whether its answers are right.

It runs on a CPU, in about a minute on two quiet cores:

    python examples/grpo.py

The model converses: it answers, hears whether it was right, and answers again, up to three times.
While a step is taken, episodes go on under the older weights; the new ones are pushed in flight.
"""

import asyncio
import copy
import sys
from contextlib import aclosing

import torch

import trajpack
from trajpack.agent import (
    MathMultiTurnAgent,
    Prompt,
    RolloutRunner,
    SamplingParams,
    TransformersEngine,
)
from trajpack.agent.environments.questions import ExactAnswerEnvironment, arithmetic_questions
from trajpack.agent.models.tiny_model import build_arithmetic_model
from trajpack.agent.training.arithmetic import encode_question, lazy_demonstrations
from trajpack.agent.training.policy_trainer import clipped_policy_loss, warm_up
from trajpack.packing.adapters.huggingface import LMHead
from trajpack.packing.plan.plan import plan_micro_batches

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 25
PROMPTS, GROUP, TURNS, CAPACITY, EPOCHS = 16, 8, 3, 512, 2
torch.set_num_threads(1)  # a core each for engine and trainer


def train(model, optimizer, batch, version):
    """Take one clipped policy gradient step per epoch; check the log-probabilities first."""
    plan = plan_micro_batches(batch.seqlens, CAPACITY)
    began_now = (batch.turn_version_start == version)[batch.turn_ids.long()]
    extra = {
        "loss_weights": batch.loss_weights("token_mean"),
        "is_on_policy": batch.loss_mask & began_now,
    }
    head = LMHead(model)
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        for piece in batch.micro_batches(plan, tensors=extra):
            place = piece.logprob_rows()[0] + 1  # of the generated tokens
            logprobs, old = head.logprobs(piece), piece.rollout_logprobs[place]
            if epoch == 0:  # both compute the same where the weights are the same
                gap = (logprobs - old)[piece.fields["is_on_policy"][place]].abs()
                assert (gap < 1e-5).all(), f"trainer and engine differ by {gap.max()}"
            weights = piece.fields["loss_weights"][place]
            loss, _ = clipped_policy_loss(logprobs, old, piece.advantages[place], weights=weights)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return plan.fill


async def main():
    """Warm a model up, then let it learn; return its success in each step."""
    model, tokenizer = build_arithmetic_model(seed=0)
    lessons = lazy_demonstrations(120 * 48, tokenizer, num_turns=TURNS)
    rates = {"num_steps": 120, "learning_rate": 3e-3, "capacity": CAPACITY}
    *_, loss = warm_up(model, lessons, **rates)
    print(f"warmed up by a teacher who is right one time in three: loss {loss:.2f}")

    questions = arithmetic_questions(STEPS * PROMPTS, seed=0)
    prompts = [Prompt(question.id, encode_question(question, tokenizer)) for question in questions]
    sampling = SamplingParams(max_new_tokens=3)
    agent = MathMultiTurnAgent(sampling, tokenizer, None, num_turns=TURNS, stop_on_success=True)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    buffer, successes, version = trajpack.TrajectoryBuffer(), [], 0
    # large enough that the engine reads any prompt at once, under one version of the weights
    actor = TransformersEngine(copy.deepcopy(model), max_batch_tokens=1024, page_size=16)
    async with actor as engine:
        environment = ExactAnswerEnvironment(questions)
        runner = RolloutRunner(engine, agent, environment, concurrency=32, group_size=GROUP)
        async with aclosing(runner.run_groups(prompts)) as groups:
            waiting = []
            async for group in groups:
                waiting += group.trajectories
                if len(waiting) < PROMPTS * GROUP:
                    continue
                buffer.clear()
                buffer.extend(waiting)
                batch = buffer.pack().with_advantages(trajpack.GRPO())
                optimizer.param_groups[0]["lr"] = 1e-3 * min((version + 1) / 10, 1)
                fill = await asyncio.to_thread(train, model, optimizer, batch, version)
                staleness = (version - batch.policy_versions[batch.loss_mask]).float().mean()
                version += 1
                await engine.update_weights(model.state_dict(), version)
                successes.append((batch.turn_rewards > 0).float().mean().item())
                print(
                    f"step {version:2}: {successes[-1]:4.0%} right, {batch.num_tokens:,} tokens, "
                    f"fill {fill:.0%}, staleness {staleness:.2f}"
                )
                waiting = []
    return successes


if __name__ == "__main__":
    successes = asyncio.run(main())
    last = successes[-5:]
    right = f"{sum(last) / len(last):.0%} in the last {len(last)}"
    print(f"right answers: {successes[0]:.0%} in the first step, {right}")
