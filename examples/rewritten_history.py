"""A conversation that is shortened on the way, and what becomes of its tokens.

    python examples/rewritten_history.py

When the history grows beyond a budget, the agent drops what was said before and keeps the question
and the end of the last answer. The next prompt then no longer begins with what came before. Nothing
is repaired: a new sequence begins there, and each sampled token is trained once, in the sequence in
which it was sampled.
"""

import asyncio
from dataclasses import replace

import torch

import trajpack
from trajpack.agent import (
    EpisodeAgent,
    Prompt,
    RolloutRunner,
    SamplingParams,
    TransformersEngine,
)
from trajpack.agent.environments.questions import ExactAnswerEnvironment, Question
from trajpack.agent.models.tiny_model import build_tiny_model


class ForgetfulAgent(EpisodeAgent):
    """Answers several times; forgets all but the end of its last answer when a budget is full."""

    def __init__(self, tokenizer, *, num_turns=5, budget=120, num_kept=8):
        super().__init__(SamplingParams(max_new_tokens=24))
        self.tokenizer = tokenizer
        self.num_turns, self.budget, self.num_kept = num_turns, budget, num_kept
        chat = [{"role": "user", "content": "That is wrong. Try again."}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        self.feedback_ids = tokenizer.encode("\n" + text, add_special_tokens=False)

    async def run(self, prompt, env):
        """Run one episode; every turn keeps the very prompt that the engine saw."""
        await env.reset()
        history, turns = list(prompt.input_ids), []
        for _ in range(self.num_turns):
            turn = await self.generate(history)
            answer = self.tokenizer.decode(turn.completion_ids, skip_special_tokens=True)
            _, (success,), *_ = await env.step((prompt.id, [answer]))
            turns.append(replace(turn, reward=float(success)))
            history += [*turn.completion_ids, *self.feedback_ids]
            if len(history) > self.budget:  # here the prefix breaks
                kept = turn.completion_ids[-self.num_kept :]
                history = [*prompt.input_ids, *kept, *self.feedback_ids]
        return [trajpack.Trajectory(prompt.id, turns)]


async def roll_out(num_questions=2, **options):
    """Return the trajectories of some questions, answered by a tiny model with random weights."""
    model, tokenizer = build_tiny_model()
    questions = [
        Question(f"q{i}", ({"role": "user", "content": f"What is {i} + 1?"},), (str(i + 1),))
        for i in range(num_questions)
    ]
    prompts = []
    for question in questions:
        text = tokenizer.apply_chat_template(
            list(question.messages), tokenize=False, add_generation_prompt=True
        )
        prompts.append(Prompt(question.id, tokenizer.encode(text, add_special_tokens=False)))
    trajectories = []
    async with TransformersEngine(model) as engine:
        agent = ForgetfulAgent(tokenizer, **options)
        runner = RolloutRunner(engine, agent, ExactAnswerEnvironment(questions))
        async for result in runner.run(prompts):
            assert result.error is None, result.error
            trajectories += result.trajectories
    return trajectories


def main():
    """Roll out, pack, and show where the prefix broke."""
    torch.set_num_threads(1)
    trajectories = asyncio.run(roll_out())
    merged = trajpack.pack(trajectories)
    print(merged)
    for trajectory in trajectories:
        lengths = [len(turn.prompt_ids) for turn in trajectory.turns]
        breaks = trajpack.pack([trajectory]).num_prefix_breaks
        print(f"{trajectory.id}: prompts of {lengths} tokens, the prefix broke {breaks} times")
    num_sampled = sum(len(turn.completion_ids) for one in trajectories for turn in one.turns)
    print(f"{num_sampled} tokens were sampled, {int(merged.loss_mask.sum())} are trained")
    assert merged.num_prefix_breaks > 0
    for layout in ("merged", "turns"):
        batch = trajpack.pack(trajectories, layout=layout)
        assert int(batch.loss_mask.sum()) == num_sampled  # each one once,
        assert batch.unpack() == trajectories  # and nothing dropped or repaired


if __name__ == "__main__":
    main()
