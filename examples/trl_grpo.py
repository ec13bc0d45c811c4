"""Train with TRL's `GRPOTrainer` on episodes of two turns: a tiny model learns to say digits."""

import os
import tempfile
import warnings

from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from trajpack.agent import (
    MathMultiTurnAgent,
    Question,
    SamplingParams,
    TRLRollout,
    build_tiny_model,
    episode_reward,
    trl_dataset_rows,
)

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # rollout_func may change, says TRL
# TRL calls what transformers has given new names.
warnings.filterwarnings("ignore", "`.*gradient_checkpointing.*` is deprecated", FutureWarning)


class ShareOfDigits:
    """An environment that calls an answer as good as many of its characters are digits."""

    async def reset(self):
        """Start an episode: there is nothing to do."""
        return None

    async def step(self, action):
        """Return the share of digits in each answer, as MathMultiTurnAgent wants successes."""
        _, answers = action
        shares = [sum(map(str.isdigit, answer)) / max(1, len(answer)) for answer in answers]
        return None, shares, True, False, {}


model, tokenizer = build_tiny_model(seed=0)
questions = [
    Question("digits", ({"role": "user", "content": "Say some digits."},), ()),
    Question("number", ({"role": "user", "content": "And now a number."},), ()),
]
agent = MathMultiTurnAgent(SamplingParams(max_new_tokens=4), tokenizer, None, num_turns=2)

with tempfile.TemporaryDirectory() as folder:
    trainer = GRPOTrainer(
        model,
        reward_funcs=episode_reward,
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=16,
            num_generations=8,
            learning_rate=2e-2,
            lr_scheduler_type="constant",
            max_steps=8,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(trl_dataset_rows(questions)),
        processing_class=tokenizer,
        rollout_func=TRLRollout(agent, ShareOfDigits(), questions),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()

rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
print("mean reward of an episode, from -2 to 2:", *(f"{reward:.2f}" for reward in rewards))
assert rewards[-1] > 0 > rewards[0]
