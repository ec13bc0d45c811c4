"""The demonstration of GRPO: the training loop and the record of each step."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, contextmanager
from dataclasses import dataclass
from functools import partial

from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.blocking_work import run_to_end
from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.environments.questions import ExactAnswerEnvironment, arithmetic_questions
from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line
from trajpack.agent.models.tiny_model import build_arithmetic_model
from trajpack.agent.protocols import Prompt, SamplingParams
from trajpack.agent.rollout.settings import LayoutName
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.agent.training.arithmetic import encode_question, lazy_demonstrations
from trajpack.agent.training.policy_trainer import (
    Batch,
    PolicyTrainer,
    StepOutcome,
    pack_as,
    warm_up,
)
from trajpack.agent.training.settings import TrainSettings
from trajpack.packing.credit.estimators import GRPO
from trajpack.packing.tree.tree_batch import TreeBatch
from trajpack.packing.types import Trajectory

MAX_LOGPROB_GAP = 1e-5
"""Largest allowed difference of log-probabilities between trainer and engine at equal weights."""
_NUM_EPOCHS = 2
_PAGE_SIZE = 16
_DEMONSTRATIONS = 48
_WARM_UP_RATE = 3e-3
_QUESTION_TOKENS, _MAX_NEW_TOKENS, _FEEDBACK_TOKENS = 5, 3, 4
_MAX_CONCURRENCY = 64
_NUM_EXAMPLES = 6


@dataclass(frozen=True)
class StepRecord:
    """Measurements of one finished step.

    Attributes:
        step: Number of the step, from 1.
        success: Share of the answers that were right.
        solved: Share of the episodes that ended with a right answer.
        reward: Mean over episodes of the sum of rewards.
        num_tokens: Tokens of the batch, or nodes: what a forward pass without micro-batches
            computes.
        seconds: Seconds since the end of the step before, or since the first episode began.
    """

    step: int
    success: float
    solved: float
    reward: float
    num_tokens: int
    num_generated: int
    seconds: float
    outcome: StepOutcome
    examples: tuple[Trajectory, ...] = ()
    """Some of the step's episodes, each of another question."""

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of the step."""
        return self.num_generated / self.seconds


class Training:
    """A tiny policy, its trainer, and its questions.

    Raises:
        ModuleNotFoundError: If transformers is missing.
        SetupError: If the model does not keep packed sequences apart, or does not compute trees.

    Cost: imports transformers, some seconds.
    """

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        self.model, self.tokenizer = build_arithmetic_model(settings.seed)
        try:
            self.trainer = PolicyTrainer(
                self.model,
                learning_rate=settings.learning_rate,
                capacity=settings.capacity,
                num_epochs=_NUM_EPOCHS,
                layout=settings.layout,
            )
        except ValueError as error:
            raise SetupError(f"the model cannot be trained: {first_line(error)}") from error
        size = settings.num_steps * settings.num_prompts
        self.questions = arithmetic_questions(size, settings.seed)
        self.last_batch: Batch | None = None
        """Batch of the last finished step."""

    def warm_up(self) -> Iterator[float]:
        """Train on demonstrations of a lazy teacher, and yield the loss of each step."""
        settings = self.settings
        demonstrations = lazy_demonstrations(
            settings.warm_up_steps * _DEMONSTRATIONS,
            self.tokenizer,
            num_turns=settings.num_turns,
            seed=settings.seed,
        )
        yield from warm_up(
            self.model,
            demonstrations,
            num_steps=settings.warm_up_steps,
            learning_rate=_WARM_UP_RATE,
            capacity=settings.capacity,
            layout=settings.layout,
        )

    async def learn(self, on_step: Callable[[StepRecord], None]) -> None:
        """Roll out and train at the same time, until all questions were answered.

        Episodes continue under the older weights while a step is taken; then the engine gets the
        new ones between two tokens. ``on_step`` is called after each step.

        Raises:
            SetupError: If the engine cannot run, cannot replace weights in flight, or an episode
                failed.
            RuntimeError: If the log-probabilities of trainer and engine differ.
        """
        settings, group_size = self.settings, self.settings.group_size
        agent = MathMultiTurnAgent(
            SamplingParams(max_new_tokens=_MAX_NEW_TOKENS),
            self.tokenizer,
            answer_save_path=None,
            num_turns=settings.num_turns,
            stop_on_success=True,
        )
        # A quarter of a step's episodes in flight, so that the others sample the newest weights.
        num_episodes = settings.num_prompts * group_size
        concurrency = min(max(num_episodes // 4, 1), _MAX_CONCURRENCY)
        prompts = (Prompt(one.id, encode_question(one, self.tokenizer)) for one in self.questions)
        async with AsyncExitStack() as stack:
            with _as_setup_error():
                engine = await stack.enter_async_context(self._make_engine(concurrency))
            runner = RolloutRunner(
                engine,
                agent,
                ExactAnswerEnvironment(self.questions),
                concurrency=concurrency,
                group_size=group_size,
            )
            groups = await stack.enter_async_context(aclosing(runner.run_groups(prompts)))
            began, episodes = time.monotonic(), list[EpisodeResult]()
            async for group in groups:
                episodes += group.results
                for error in (episode.error for episode in group.results if episode.error):
                    raise SetupError(f"an episode failed: {error.reason}") from error
                if len(episodes) < num_episodes:
                    continue
                batch = pack_episodes(episodes, settings.layout)
                outcome = await run_to_end(partial(self.trainer.step, batch))
                check_logprobs(outcome)
                self.last_batch = batch
                with _as_setup_error():
                    await engine.update_weights(self.model.state_dict(), self.trainer.version)
                began, seconds = time.monotonic(), time.monotonic() - began
                on_step(
                    StepRecord(
                        self.trainer.version,
                        *shares(episodes),
                        len(batch.input_ids),
                        (batch.entries if isinstance(batch, TreeBatch) else batch).num_generated,
                        seconds,
                        outcome,
                        tuple(
                            episodes[at].trajectories[0]
                            for at in range(0, num_episodes, group_size)
                        )[:_NUM_EXAMPLES],
                    )
                )
                episodes = []

    def _make_engine(self, concurrency: int) -> TransformersEngine:
        """Return an engine on a copy of the model that reads any prompt in one forward pass.

        Two passes could read a prompt with two versions of the weights. The copy samples with
        attention of its own, since trees take no cache.
        """
        model = copy.deepcopy(self.model)
        model.set_attn_implementation("sdpa")
        turn_tokens = _MAX_NEW_TOKENS + _FEEDBACK_TOKENS
        longest = _QUESTION_TOKENS + self.settings.num_turns * turn_tokens
        return TransformersEngine(
            model,
            num_blocks=concurrency * -(-longest // _PAGE_SIZE),
            page_size=_PAGE_SIZE,
            max_batch_tokens=concurrency * longest,
            seed=self.settings.seed,
            version=self.trainer.version,
        )


@contextmanager
def _as_setup_error() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise SetupError(f"the engine cannot run this: {first_line(error)}") from error


def pack_episodes(episodes: Sequence[EpisodeResult], layout: LayoutName = "merged") -> Batch:
    """Pack the trajectories of episodes, with advantages by `GRPO`."""
    trajectories = [path for episode in episodes for path in episode.trajectories]
    return pack_as(trajectories, layout).with_advantages(GRPO())


def check_logprobs(outcome: StepOutcome) -> None:
    """Raise RuntimeError if log-probabilities of trainer and engine differ at equal weights."""
    if not outcome.logprob_gap <= MAX_LOGPROB_GAP:
        raise RuntimeError(
            f"log-probabilities of trainer and engine differ by {outcome.logprob_gap:.1e} at equal "
            f"weights, expected at most {MAX_LOGPROB_GAP:.0e}"
        )


def shares(episodes: Sequence[EpisodeResult]) -> tuple[float, float, float]:
    """Return right answers of all answers, solved episodes of all, and the mean sum of rewards."""
    turns = [episode.trajectories[0].turns for episode in episodes]
    num_solved = sum(one[-1].reward > 0 for one in turns)
    reward = sum(turn.reward for one in turns for turn in one) / len(turns)
    return num_solved / sum(map(len, turns)), num_solved / len(turns), reward
