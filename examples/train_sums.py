"""Train a tiny model to add, from nothing but whether its answers are right.

It runs on a CPU, in about a minute on two quiet cores, and draws its curves on a page:

    python examples/train_sums.py --out demo/train.html

The model converses: it answers, hears whether it was right, and answers again, up to three times.
While a step is taken, episodes go on under the older weights; the new ones are pushed in flight.
"""

import argparse
import asyncio
import copy
import time
from contextlib import aclosing
from html import escape
from pathlib import Path

import numpy as np
import torch

import trajpack
from trajpack import Trajectory, Turn, save
from trajpack.agent import (
    MathMultiTurnAgent,
    Prompt,
    RolloutRunner,
    SamplingParams,
    TransformersEngine,
)
from trajpack.agent.environments.questions import ExactAnswerEnvironment, arithmetic_questions
from trajpack.agent.models.tiny_model import build_arithmetic_model
from trajpack.packing.adapters.huggingface import LMHead, check_isolation
from trajpack.packing.plan.plan import plan_micro_batches
from trajpack.packing.text import printable

GROUP, TURNS, CAPACITY, EPOCHS = 8, 3, 512, 2
DEMONSTRATIONS = 48  # of a warm-up step
CLIP = 0.2, 0.28  # distances of a token's ratio from 1, below and above
MAX_GAP = 1e-5  # of log-probabilities of trainer and engine at equal weights, nats
RETRY = "Unfortunately your answer is wrong. Let's try again."  # what the agent tells the model


# The training step: what a trainer writes.


def train_step(model, optimizer, batch, version):
    """Take a clipped policy-gradient step (PPO) per epoch; return what was measured.

    A turn that the trainer's own weights sampled has the same log-probabilities here and in the
    engine. A turn that began under older weights keeps their attention cache, and may differ.
    """
    head, plan = LMHead(model), plan_micro_batches(batch.seqlens, CAPACITY)
    began_now = (batch.turn_version_start == version)[batch.turn_ids.long()]
    tensors = {"weights": batch.loss_weights("token_mean"), "on_policy": began_now}
    gap, num_clipped = 0.0, 0
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        for piece in batch.micro_batches(plan, tensors=tensors):
            generated, logprobs = piece.generated, head.logprobs(piece)
            change, advantages = logprobs - generated.rollout_logprobs, generated.advantages
            ratio = change.exp()
            clipped = ratio.clamp(1 - CLIP[0], 1 + CLIP[1]) * advantages
            gain = torch.minimum(ratio * advantages, clipped)
            (-(gain * generated["weights"]).sum()).backward()
            num_clipped += int((clipped < ratio * advantages).sum())
            if epoch == 0:
                of_policy = change.detach()[generated["on_policy"]]
                gap = max([gap, *of_policy.abs().tolist()])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return {
        "fill of micro-batches": plan.fill,
        "clipped tokens": num_clipped / EPOCHS / batch.num_generated,
        "staleness": (version - batch.generated.policy_versions).float().mean().item(),
        "log-probability gap": gap,
    }


def check_step(model, measured):
    """Raise if the trainer disagrees with the engine, or if the weights diverged."""
    broken = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    if broken:
        others = f" and {len(broken) - 1} others" if len(broken) > 1 else ""
        raise RuntimeError(f"the training diverged: NaN or infinity in {broken[0]}{others}")
    gap = measured["log-probability gap"]
    if not gap <= MAX_GAP:
        raise RuntimeError(f"trainer and engine differ by {gap:.1e} nats at equal weights")


# The warm-up: a model with random weights never answers with a number, so that nothing is learned
# from its rewards.


def encode_question(question, tokenizer, *, before=""):
    """Return the token ids of a question and of the mark that the assistant speaks."""
    messages = list(question.messages)
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(before + text, add_special_tokens=False)


def lazy_demonstrations(count, tokenizer, *, seed=0):
    """Return conversations of a teacher who adds one time in three.

    Otherwise the teacher repeats one of the two numbers, which is wrong; hears the agent's
    feedback, and tries again. The log-probabilities are 0.
    """
    draw = np.random.default_rng([seed, count])
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": RETRY}], tokenize=False, add_generation_prompt=True
    )
    retry = tokenizer.encode("\n" + asked, add_special_tokens=False)
    trajectories = []
    for question in arithmetic_questions(count, seed):
        ids, turns = encode_question(question, tokenizer), []
        while len(turns) < TURNS and not (turns and turns[-1].reward > 0):
            is_right = draw.random() < 1 / 3
            answer = question.solutions[0] if is_right else draw.choice(question.text.split("+"))
            completion = tokenizer.encode(answer + tokenizer.eos_token, add_special_tokens=False)
            reward = 1.0 if is_right else -1.0
            turns.append(Turn(list(ids), completion, [0.0] * len(completion), reward))
            ids += [*completion, *retry]
        trajectories.append(Trajectory(question.id, turns))
    return trajectories


def warm_up(model, trajectories, num_steps):
    """Train on the generated tokens of demonstrations, in one pass; return the last loss."""
    head, size = LMHead(model), len(trajectories) // num_steps
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step in range(num_steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min((step + 1) / 20, 1 - step / num_steps)
        batch = trajpack.pack(trajectories[step * size : (step + 1) * size])
        optimizer.zero_grad()
        loss = -head.logprobs(batch).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


# The loop: episodes of the next batch run while the model learns from this one.


async def learn(model, tokenizer, options, on_step):
    """Roll out and train at the same time until each question was answered.

    Calls ``on_step`` with the numbers, the batch and the episodes of each step.
    """
    questions = arithmetic_questions(options.steps * options.prompts, options.seed)
    prompts = [Prompt(question.id, encode_question(question, tokenizer)) for question in questions]
    sampling = SamplingParams(max_new_tokens=3)
    agent = MathMultiTurnAgent(sampling, tokenizer, None, num_turns=TURNS, stop_on_success=True)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    num_episodes, version, began, episodes = options.prompts * GROUP, 0, time.monotonic(), []
    async with (
        # large enough that the engine reads any prompt at once, under one version of the weights
        TransformersEngine(copy.deepcopy(model), max_batch_tokens=1024, page_size=16) as engine,
        # a quarter of a step's episodes in flight, so that the others sample the newest weights
        aclosing(
            RolloutRunner(
                engine,
                agent,
                ExactAnswerEnvironment(questions),
                concurrency=max(num_episodes // 4, 1),
                group_size=GROUP,
            ).run_groups(prompts)
        ) as groups,
    ):
        async for group in groups:
            for error in (episode.error for episode in group.results if episode.error):
                raise error
            episodes += group.trajectories
            if len(episodes) < num_episodes:
                continue
            batch = trajpack.pack(episodes).with_advantages(trajpack.GRPO())
            optimizer.param_groups[0]["lr"] = options.learning_rate * min((version + 1) / 10, 1)
            measured = await asyncio.to_thread(train_step, model, optimizer, batch, version)
            version += 1
            now = time.monotonic()
            numbers = {
                "right answers": (batch.turn_rewards > 0).float().mean().item(),
                "reward of an episode": batch.turn_rewards.sum().item() / num_episodes,
                "generated tokens per second": batch.num_generated / (now - began),
            }
            on_step(numbers | measured, batch, episodes)
            check_step(model, measured)
            await engine.update_weights(model.state_dict(), version)
            began, episodes = now, []


# The page: curves and conversations, as SVG and text.

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 70rem; margin: auto; padding: 1rem;
  color-scheme: light dark }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(20rem, 1fr)); gap: 1rem }
svg { width: 100%; font-size: 11px; overflow: visible }
polyline { fill: none; stroke: #2b6cb0; stroke-width: 2 } .pale { opacity: .3; stroke-width: 1 }
text { fill: currentColor } line { stroke: gray } pre { white-space: pre-wrap }
"""


def curve(name, values):
    """Draw the values of each step pale, and the mean of five steps bold."""
    low, high = min(0.0, *values), max(0.0, *values)
    high += low == high
    means = [np.mean(values[max(end - 5, 0) : end]) for end in range(1, len(values) + 1)]

    def points(heights):
        x = np.linspace(50, 390, len(heights)) if len(heights) > 1 else [50]
        y = 150 - 140 * (np.asarray(heights) - low) / (high - low)
        return " ".join(f"{left:.1f},{top:.1f}" for left, top in zip(x, y, strict=True))

    return f"""<figure><figcaption>{escape(name)}: {values[0]:.4g} in the first step,
{means[-1]:.4g} at the end</figcaption><svg viewBox="0 0 400 170" role="img">
<line x1="50" x2="390" y1="10" y2="10"/><line x1="50" x2="390" y1="150" y2="150"/>
<text x="45" y="14" text-anchor="end">{high:.3g}</text>
<text x="45" y="154" text-anchor="end">{low:.3g}</text>
<text x="50" y="166">1</text><text x="390" y="166" text-anchor="end">{len(values)}</text>
<polyline class="pale" points="{points(values)}"/><polyline points="{points(means)}"/>
</svg></figure>"""


def conversation(trajectory, tokenizer):
    """Return the text of a conversation, whose last prompt has all turns before."""
    turn = trajectory.turns[-1]
    text = tokenizer.decode([*turn.prompt_ids, *turn.completion_ids])
    return f"<pre>{escape(printable(text, keep=chr(10)))}</pre>"


def page(records, first, last, title):
    """Return a page that loads nothing."""
    rows = {name: [record[name] for record in records] for name in records[0]}
    finite = {name: values for name, values in rows.items() if np.isfinite(values).all()}
    curves = "".join(curve(name, values) for name, values in finite.items())
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>
<style>{STYLE}</style><h1>{escape(title)}</h1><main>{curves}</main>
<h2>Conversations of the first step</h2>{"".join(first)}
<h2>Conversations of the last step</h2>{"".join(last)}</html>
"""


def parse(arguments):
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=16, help="questions of a step")
    parser.add_argument("--warm-up", type=int, default=120, help="steps with demonstrations")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo/train.html"), help="page")
    parser.add_argument("--batch", type=Path, help="keeps the last batch, .safetensors")
    return parser.parse_args(arguments)


def main(arguments=None):
    """Warm a model up and let it learn; write the page also of a training that ends early."""
    options = parse(arguments)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # a core each for engine and trainer
    model, tokenizer = build_arithmetic_model(options.seed)
    check_isolation(model)  # the sequences of a packed batch must not see each other
    lessons = lazy_demonstrations(options.warm_up * DEMONSTRATIONS, tokenizer, seed=options.seed)
    loss = warm_up(model, lessons, options.warm_up)
    print(f"warmed up by a teacher who is right one time in three: loss {loss:.2f}", flush=True)
    records, texts, batches = [], [], []

    def on_step(numbers, batch, episodes):
        records.append(numbers)
        texts.append([conversation(episode, tokenizer) for episode in episodes[::GROUP][:6]])
        batches[:] = [batch]
        print(
            f"step {len(records):2}: {numbers['right answers']:4.0%} right, {batch.num_tokens:,} "
            f"tokens, fill {numbers['fill of micro-batches']:.0%}, "
            f"staleness {numbers['staleness']:.2f}",
            flush=True,
        )

    try:
        asyncio.run(learn(model, tokenizer, options, on_step))
    except RuntimeError as error:
        raise SystemExit(f"train_sums: step {len(records)}: {error}") from error
    finally:
        if records:
            title = f"Sums by GRPO: {len(records)} of {options.steps} steps, seed {options.seed}"
            options.out.write_text(page(records, texts[0], texts[-1], title), encoding="utf-8")
            print(f"curves: {options.out}")
        if batches and options.batch is not None:
            options.batch.parent.mkdir(parents=True, exist_ok=True)
            save(batches[0], options.batch)
            tokenizer.save_pretrained(options.batch.with_suffix(".tokenizer"))
    right = [record["right answers"] for record in records]
    print(f"right answers: {right[0]:.0%} in the first step, {np.mean(right[-5:]):.0%} at the end")


if __name__ == "__main__":
    main()
