"""A policy that learns arithmetic from verified answers while it goes on answering."""

from __future__ import annotations

import copy
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, aclosing, contextmanager
from functools import partial

from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.blocking_work import run_to_end
from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.environments.questions import ExactAnswerEnvironment
from trajpack.agent.errors import SetupError
from trajpack.agent.models.causal_model import first_line
from trajpack.agent.protocols import Prompt, SamplingParams
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.agent.training.arithmetic import (
    arithmetic_questions,
    build_arithmetic_model,
    encode_question,
    lazy_demonstrations,
)
from trajpack.agent.training.policy_trainer import PolicyTrainer, StepOutcome
from trajpack.agent.training.records import StepRecord, record_step
from trajpack.agent.training.settings import TrainSettings
from trajpack.agent.training.warm_up import warm_up
from trajpack.packing.batch.batch import PackedBatch
from trajpack.packing.buffer.buffer import TrajectoryBuffer
from trajpack.packing.credit.group_estimators import GRPO

MAX_LOGPROB_GAP = 1e-5
"""How far the trainer's log-probabilities may be from the engine's where the weights are equal."""
_NUM_EPOCHS = 2
_PAGE_SIZE = 16
_DEMONSTRATIONS = 48
_WARM_UP_RATE = 3e-3
_QUESTION_TOKENS = 5
_MAX_NEW_TOKENS = 3
_FEEDBACK_TOKENS = 4
_MAX_CONCURRENCY = 64


class Training:
    """A tiny policy, its trainer, and the questions it will be asked.

    Args:
        settings: What to train, and how.

    Raises:
        ModuleNotFoundError: If transformers is missing.
        SetupError: If its model does not keep packed sequences apart.

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
            )
        except ValueError as error:
            raise SetupError(f"the model cannot be trained: {first_line(error)}") from error
        num_questions = settings.num_steps * settings.num_prompts
        self.questions = arithmetic_questions(num_questions, settings.seed)

    def warm_up(self) -> Iterator[float]:
        """Learn to converse, and to add now and then, from a lazy teacher.

        Yields:
            The loss of each step.
        """
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
        )

    async def learn(self, on_step: Callable[[StepRecord], None]) -> None:
        """Roll out and train at the same time, until all questions have been answered.

        While a step is taken, episodes go on under the older weights; then the new ones are
        pushed between two tokens. Every token keeps the version that sampled it.

        Args:
            on_step: Called after each step.

        Raises:
            SetupError: If the engine cannot run, or its weights cannot be replaced in flight.
            RuntimeError: If the trainer's log-probabilities are not the engine's.
        """
        settings = self.settings
        async with AsyncExitStack() as stack:
            with _refusals():
                engine = await stack.enter_async_context(self._make_engine())
            runner = RolloutRunner(
                engine,
                self._make_agent(),
                ExactAnswerEnvironment(self.questions),
                concurrency=self._concurrency,
                group_size=settings.group_size,
            )
            results = await stack.enter_async_context(aclosing(runner.run(self._prompts())))
            groups = whole_groups(results, settings.group_size, settings.num_prompts)
            began = time.monotonic()
            async for episodes in await stack.enter_async_context(aclosing(groups)):
                batch = pack_episodes(episodes)
                outcome = await run_to_end(partial(self.trainer.step, batch))
                check_logprobs(outcome)
                with _refusals():
                    await engine.update_weights(self.model.state_dict(), self.trainer.version)
                began, seconds = time.monotonic(), time.monotonic() - began
                on_step(record_step(self.trainer.version, episodes, batch, outcome, seconds))

    def _prompts(self) -> Iterator[Prompt]:
        for question in self.questions:
            yield Prompt(question.id, encode_question(question, self.tokenizer))

    def _make_agent(self) -> MathMultiTurnAgent:
        return MathMultiTurnAgent(
            SamplingParams(max_new_tokens=_MAX_NEW_TOKENS),
            self.tokenizer,
            answer_save_path=None,
            num_turns=self.settings.num_turns,
            stop_on_success=True,
        )

    @property
    def _concurrency(self) -> int:
        """Episodes in flight: a part of a step's, so that the rest sees the newest weights."""
        return min(max(self.settings.num_episodes // 4, 1), _MAX_CONCURRENCY)

    def _make_engine(self) -> TransformersEngine:
        """Return an engine on a copy of the model, that reads any prompt in one piece.

        What is read in two pieces might be read by two versions of the weights.
        """
        settings = self.settings
        longest = _QUESTION_TOKENS + settings.num_turns * (_MAX_NEW_TOKENS + _FEEDBACK_TOKENS)
        return TransformersEngine(
            copy.deepcopy(self.model),
            num_blocks=self._concurrency * -(-longest // _PAGE_SIZE),
            page_size=_PAGE_SIZE,
            max_batch_tokens=self._concurrency * longest,
            seed=settings.seed,
            version=self.trainer.version,
        )


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise what the engine refuses as one line for a person."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        raise SetupError(f"the engine cannot run this: {first_line(error)}") from error


async def whole_groups(
    results: AsyncIterable[EpisodeResult], group_size: int, num_groups: int
) -> AsyncGenerator[list[EpisodeResult], None]:
    """Gather episodes until some prompts have all of theirs, again and again.

    Yields:
        The episodes of ``num_groups`` prompts, group by group; of fewer, if there are no more.

    Raises:
        SetupError: If an episode failed.
    """
    groups: dict[str, list[EpisodeResult]] = {}
    whole: list[EpisodeResult] = []
    async for result in results:
        if result.error is not None:
            raise SetupError(f"an episode failed: {result.error.reason}") from result.error
        group = groups.setdefault(result.prompt.id, [])
        group.append(result)
        if len(group) == group_size:
            whole += groups.pop(result.prompt.id)
        if len(whole) == num_groups * group_size:
            yield whole
            whole = []
    if whole:
        yield whole


def pack_episodes(episodes: Iterable[EpisodeResult]) -> PackedBatch:
    """Pack the trajectories of episodes, and credit each with what it has beyond its group."""
    buffer = TrajectoryBuffer()
    for episode in episodes:
        for trajectory in episode.trajectories:
            buffer.add(trajectory)
    return buffer.pack().with_advantages(GRPO())


def check_logprobs(outcome: StepOutcome) -> None:
    """Raise where trainer and engine disagree on what the same weights make of the same tokens.

    Raises:
        RuntimeError: If they are further apart than rounding is.
    """
    if not outcome.logprob_gap <= MAX_LOGPROB_GAP:
        raise RuntimeError(
            f"log-probabilities of trainer and engine differ by {outcome.logprob_gap:.1e} at equal "
            f"weights, expected at most {MAX_LOGPROB_GAP:.0e}"
        )
