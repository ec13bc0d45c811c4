"""Episodes of our agents as what TRL's `GRPOTrainer` trains on: its ``rollout_func``."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import torch

from trajpack.agent.engines.transformers_engine import TransformersEngine
from trajpack.agent.environments.questions import Question
from trajpack.agent.errors import EpisodeError, has_engine_ended
from trajpack.agent.protocols import Agent, Engine, Environment, Prompt
from trajpack.agent.runner.runner import EpisodeResult, RolloutRunner
from trajpack.agent.trl.prompts import (
    encode_prompt,
    number_samples,
    prompt_key,
    questions_by_prompt,
)
from trajpack.agent.trl.rows import Row, masked_row, rows_of_episodes
from trajpack.packing.optional import require

if TYPE_CHECKING:
    from trl import GRPOTrainer

_T = TypeVar("_T")


def sum_of_rewards(result: EpisodeResult) -> float:
    """Return the rewards of an episode's turns, added up and not discounted."""
    return float(sum(turn.reward for path in result.trajectories for turn in path.turns))


@dataclass(eq=False)
class TRLRollout:
    """What TRL's `GRPOTrainer` takes as its ``rollout_func``, with our agent behind it.

    Called with prompts and the trainer, it runs an episode for each prompt on the model that
    is being trained, with the weights it has at that moment, and returns lists with one entry
    for each prompt, in their order:

    =================== =============== =====================================================
    key                 an entry        content
    =================== =============== =====================================================
    ``prompt_ids``      list of int     what stands before the first generated token
    ``completion_ids``  list of int     from there to the last generated token
    ``env_mask``        list of 0 and 1 1 where generated, 0 on observations: TRL's tool mask
    ``logprobs``        list of float   as sampled, 0 on observations
    ``episode_reward``  float or None   for `episode_reward`; None: TRL leaves the row out
    ``episode_id``      str             the episode's ``qid``
    ``episode_turns``   int             its turns
    =================== =============== =====================================================

    TRL trains one row for each prompt and has one advantage for it. Not carried: credit by
    turn, policy versions and extra token fields; take them from the trajectories that
    ``on_results`` is given.

    A ``max_completion_length`` of TRL bounds nothing here: the agent's ``gconfig`` bounds a
    completion, its ``max_total_tokens`` a conversation. Of TRL's sampling options only
    ``temperature`` matters, which divides the logits in its loss: it must be the agent's.

    Raises:
        ValueError: If an option is out of range, or two questions have the same messages.

    Cost: one engine for each call, with a cache of its own that is given back before the
    trainer goes on; the trajectories are packed on the host.
    """

    agent: Agent
    """Leads the episodes. Where it has a ``gconfig`` with a temperature, that is compared."""
    environment: Environment
    """Judges them. It is entered and closed by the caller, and bound to no event loop: each
    call has one of its own."""
    questions: Iterable[Question]
    """Whatever may be asked: a prompt of the trainer is looked up by its messages, or by its
    text if it is a string, and the question's id is what agent and environment see."""
    _: KW_ONLY
    concurrency: int = 64
    """Episodes in flight at most."""
    score: Callable[[EpisodeResult], float] = sum_of_rewards
    """The number that stands for an episode."""
    several_sequences: Literal["raise", "mask", "last"] = "raise"
    """What to do with an episode whose turns do not continue each other and so make more
    sequences than one: raise, leave the episode out, or train its last sequence alone, with
    the score of all."""
    failures: Literal["raise", "mask"] = "raise"
    """What to do with an episode that failed or sampled nothing: raise, or leave it out. An
    engine that ended raises in any case."""
    seed: int = 0
    """Of the sampling, together with the step, the number of the call and the process."""
    make_engine: Callable[..., Engine] = TransformersEngine
    """Makes the engine of one call from the model, a ``seed`` and a ``version``, which is the
    trainer's step."""
    on_results: Callable[[list[EpisodeResult]], None] | None = None
    """Called with the episodes of each call, in the order of the prompts."""
    _by_prompt: dict[Any, Question] = field(init=False, repr=False)
    _calls: itertools.count[int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, got {self.concurrency}")
        for name, known in (
            ("several_sequences", ("raise", "mask", "last")),
            ("failures", ("raise", "mask")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {known}, got {getattr(self, name)!r}")
        self._by_prompt = questions_by_prompt(self.questions)
        self._calls = itertools.count()

    def __call__(self, prompts: Sequence[Any], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Run an episode for each prompt and return TRL's fields.

        Raises:
            ValueError: If a prompt is none of the questions, the temperatures differ, the weights
                are sharded, or an episode has several sequences and that is to raise.
            EpisodeError: If an episode failed and that is to raise, or the engine ended.

        Cost: an event loop of its own, in a thread of its own where one runs already. Torch's
        random generators are left as they were.
        """
        self._check_trainer(trainer)
        asked = [self._question(prompt) for prompt in prompts]
        encoded = {question.id: encode_prompt(question, prompt, trainer)
                   for question, prompt in zip(asked, prompts, strict=True)}  # fmt: skip
        samples = number_samples([question.id for question in asked])
        results = self._generate(list(encoded.values()), samples, trainer)
        rows = self._rows(results, int(trainer.processing_class.eos_token_id))
        if self.on_results is not None:
            self.on_results(results)
        return {
            **{name: [getattr(row, name) for row in rows] for name in Row._fields},
            "episode_id": [result.qid for result in results],
            "episode_turns": [
                sum(len(path.turns) for path in result.trajectories) for result in results
            ],
        }

    def _generate(
        self, prompts: list[Prompt], samples: list[tuple[str, int]], trainer: GRPOTrainer
    ) -> list[EpisodeResult]:
        require("trl")
        from trl.models import unwrap_model_for_generation

        accelerator, step = trainer.accelerator, int(trainer.state.global_step)
        entropy = [self.seed, accelerator.process_index, step, next(self._calls)]
        seed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        device = accelerator.device
        unwrapped = unwrap_model_for_generation(
            trainer.model_wrapped,
            accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        )
        # The engine seeds the generator that the trainer draws its dropout from.
        with torch.random.fork_rng([device] if device.type == "cuda" else []), unwrapped as model:
            engine = self.make_engine(model, seed=seed, version=step)
            found = _run(self._episodes(engine, prompts, samples))
        return [found[sample] for sample in samples]

    async def _episodes(
        self, engine: Engine, prompts: list[Prompt], samples: list[tuple[str, int]]
    ) -> dict[tuple[str, int], EpisodeResult]:
        """Run as many episodes of each prompt as are asked for.

        A runner takes equally many of each. So they do, but where a group lies on two
        processes.
        """
        sizes = Counter(id for id, _ in samples)
        found: dict[tuple[str, int], EpisodeResult] = {}
        async with engine:
            for size in sorted(set(sizes.values()), reverse=True):
                runner = RolloutRunner(
                    engine,
                    self.agent,
                    self.environment,
                    concurrency=self.concurrency,
                    group_size=size,
                )
                alike = [prompt for prompt in prompts if sizes[prompt.id] == size]
                async with aclosing(runner.run(alike)) as results:
                    async for result in results:
                        self._check_failure(result)
                        found[result.prompt.id, result.sample] = result
        return found

    def _check_failure(self, result: EpisodeResult) -> None:
        error = result.error
        if error is not None and (self.failures == "raise" or has_engine_ended(error)):
            raise error

    def _rows(self, results: list[EpisodeResult], eos_token_id: int) -> list[Row]:
        pieces = rows_of_episodes([result.trajectories for result in results])
        return [
            self._row(result, rows, eos_token_id)
            for result, rows in zip(results, pieces, strict=True)
        ]

    def _row(self, result: EpisodeResult, rows: list[Row], eos_token_id: int) -> Row:
        """Choose the one row that TRL can take, or one that it leaves out."""
        if not rows and result.error is None and self.failures == "raise":
            raise EpisodeError(result.qid, "nothing was sampled")
        if len(rows) > 1 and self.several_sequences == "raise":
            raise ValueError(
                f"episode {result.qid!r} has {len(rows)} sequences, and TRL takes one row for each "
                "prompt: set several_sequences to 'mask' or 'last'"
            )
        if not rows or (len(rows) > 1 and self.several_sequences == "mask"):
            return masked_row(result.prompt.input_ids, eos_token_id)
        return rows[-1]._replace(episode_reward=float(self.score(result)))

    def _question(self, prompt: Any) -> Question:
        question = self._by_prompt.get(prompt_key(prompt))
        if question is None:
            raise ValueError(f"a prompt of the trainer is none of the questions: {prompt!r:.200}")
        return question

    def _check_trainer(self, trainer: GRPOTrainer) -> None:
        if trainer.is_fsdp_enabled:
            raise ValueError("the engine needs whole weights, but the trainer shards them by FSDP")
        gconfig = getattr(self.agent, "gconfig", None)
        if isinstance(gconfig, Mapping):
            sampled = gconfig.get("temperature")
        else:
            sampled = getattr(gconfig, "temperature", None)
        if sampled is not None and sampled != trainer.args.temperature:
            raise ValueError(
                f"the agent samples at temperature {sampled}, but the trainer's loss is at "
                f"{trainer.args.temperature}: they must be the same"
            )


def episode_reward(
    *,
    episode_reward: list[float | None],
    episode_turns: Sequence[int] = (),
    log_metric: Callable[[str, float], None] | None = None,
    **_: Any,
) -> list[float | None]:
    """Return what a `TRLRollout` found, as the trainer asks for it: pass it as ``reward_funcs``.

    The mean number of turns and the share of episodes that were left out are logged as
    ``episode/turns`` and ``episode/left_out``.
    """
    if log_metric is not None and episode_reward:
        num_left_out = sum(reward is None for reward in episode_reward)
        log_metric("episode/turns", sum(episode_turns) / len(episode_reward))
        log_metric("episode/left_out", num_left_out / len(episode_reward))
    return episode_reward


def _run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine to its end, also where this thread has a running loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1, thread_name_prefix="trajpack-episodes") as thread:
        return thread.submit(asyncio.run, coroutine).result()
