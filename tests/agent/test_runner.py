from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from trajpack.agent.counted_replies import CountedReplies
from trajpack.agent.errors import EngineEndedError, EpisodeError, GenerationError
from trajpack.agent.protocols import (
    Environment,
    GenerationOutput,
    Observation,
    Prompt,
    Reply,
    SamplingParams,
)
from trajpack.agent.runner import EpisodeResult, Progress, RolloutRunner
from trajpack.agent.tiny_model import build_tiny_model
from trajpack.agent.transformers_engine import TransformersEngine
from trajpack.packing.types import Trajectory, Turn

torch.set_num_threads(1)


class EchoEngine:
    """Answers each prompt at once with its last token and the one after it."""

    version = 0

    def __init__(self) -> None:
        self.obs_queue: asyncio.Queue[Observation] = asyncio.Queue()
        self.open: dict[str, asyncio.Queue[Reply]] = {}
        self.opened: list[str] = []

    def open_episode(self, qid: str) -> asyncio.Queue[Reply]:
        if qid in self.open:
            raise ValueError(f"episode {qid!r} is open already")
        self.opened.append(qid)
        return self.open.setdefault(qid, asyncio.Queue())

    def close_episode(self, qid: str) -> None:
        self.open.pop(qid, None)

    async def __aenter__(self) -> EchoEngine:
        self._task = asyncio.create_task(self._answer())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _answer(self) -> None:
        while True:
            qid, ids, _ = await self.obs_queue.get()
            output = [ids[-1], ids[-1] + 1]
            if qid in self.open:
                self.open[qid].put_nowait(
                    GenerationOutput(qid, ids, output, [-1.0, -2.0], False, 0, 0)
                )


class NoEnvironment:
    async def reset(self) -> None:
        return None

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return None, 1.0, True, False, {}


@dataclass
class TwoTurns:
    """Asks twice; the first turn is rewarded, the second is not."""

    sampling: Any = None
    group: str | None = None
    before: Callable[[Prompt], Any] | None = None
    active: int = 0
    most_active: int = 0
    cancelled: list[str] = field(default_factory=list)

    async def collect_trajectory(
        self,
        prompt: Prompt,
        env: Environment,
        obs_queue: asyncio.Queue[Observation],
        act_queue: asyncio.Queue[Reply],
    ) -> list[Trajectory]:
        self.active += 1
        self.most_active = max(self.active, self.most_active)
        try:
            if self.before is not None:
                await self.before(prompt)
            turns, ids = [], list(prompt.input_ids)
            for reward in (1.0, -0.5):
                await obs_queue.put((prompt.id, ids, self.sampling))
                reply = await act_queue.get()
                if isinstance(reply, GenerationError):
                    raise reply
                turns.append(Turn(ids, reply.output_ids, reply.output_logprobs, reward))
                ids = [*ids, *reply.output_ids]
            return [Trajectory(prompt.id, turns, group=self.group)]
        except asyncio.CancelledError:
            self.cancelled.append(prompt.id)
            raise
        finally:
            self.active -= 1


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"q{k}", [k, k + 1], task_id=k) for k in range(count)]


def runner(engine: Any, agent: Any, **options: Any) -> RolloutRunner:
    return RolloutRunner(engine, agent, NoEnvironment(), **options)


async def collect(agent: Any, asked: Any, **options: Any) -> list[EpisodeResult]:
    async with EchoEngine() as engine:
        results = [result async for result in runner(engine, agent, **options).run(asked)]
        assert engine.open == {}
        return results


def test_every_prompt_comes_back_with_its_trajectory() -> None:
    results = asyncio.run(collect(TwoTurns(), prompts(5)))
    assert sorted(result.prompt.id for result in results) == [f"q{k}" for k in range(5)]
    for result in results:
        assert result.error is None
        (trajectory,) = result.trajectories
        assert trajectory.id == result.qid == f"{result.prompt.id}@0"
        assert trajectory.group == result.prompt.id
        assert trajectory.turns[0].completion_ids == [
            result.prompt.input_ids[-1],
            result.prompt.input_ids[-1] + 1,
        ]


def test_samples_of_a_prompt_are_own_episodes_of_one_group() -> None:
    results = asyncio.run(collect(TwoTurns(), prompts(3), group_size=4))
    qids = sorted(result.qid for result in results)
    assert qids == [f"q{k}@{sample}" for k in range(3) for sample in range(4)]
    assert all(result.trajectories[0].group == result.prompt.id for result in results)
    assert all(result.trajectories[0].id == result.qid for result in results)


def test_a_group_named_by_the_agent_stays() -> None:
    results = asyncio.run(collect(TwoTurns(group="mine"), prompts(2)))
    assert [result.trajectories[0].group for result in results] == ["mine", "mine"]


def test_no_prompts_give_no_results() -> None:
    assert asyncio.run(collect(TwoTurns(), [])) == []


def test_prompts_may_come_asynchronously() -> None:
    async def slowly() -> AsyncIterator[Prompt]:
        for prompt in prompts(4):
            await asyncio.sleep(0)
            yield prompt

    assert len(asyncio.run(collect(TwoTurns(), slowly()))) == 4


def test_results_come_as_they_finish() -> None:
    async def wait(prompt: Prompt) -> None:
        await asyncio.sleep({"q0@0": 0.06, "q1@0": 0.03, "q2@0": 0.0}[prompt.id])

    results = asyncio.run(collect(TwoTurns(before=wait), prompts(3)))
    assert [result.prompt.id for result in results] == ["q2", "q1", "q0"]


def test_concurrency_is_bounded_and_prompts_are_taken_lazily() -> None:
    taken: list[str] = []
    agent = TwoTurns(before=lambda _: asyncio.sleep(0.001))

    def lazily() -> Iterator[Prompt]:
        for prompt in prompts(40):
            taken.append(prompt.id)
            assert len(taken) - finished() <= 4
            yield prompt

    def finished() -> int:
        return progress[-1].num_finished if progress else 0

    progress: list[Progress] = []
    results = asyncio.run(collect(agent, lazily(), concurrency=3, on_progress=progress.append))
    assert len(results) == len(taken) == 40
    assert agent.most_active == 3


def test_episodes_wait_for_a_slow_reader() -> None:
    async def body() -> int:
        async with EchoEngine() as engine:
            results = runner(engine, TwoTurns(), concurrency=3).run(prompts(100))
            async with aclosing(results):
                await anext(results)
                await asyncio.sleep(0.1)
                return len(engine.opened)

    # One taken, three that wait to be taken, three more that hold their slots.
    assert asyncio.run(body()) <= 7


def test_a_failing_agent_is_a_result_and_the_others_go_on() -> None:
    async def fail(prompt: Prompt) -> None:
        if prompt.id == "q1@0":
            raise ZeroDivisionError("no such luck")
        if prompt.id == "q2@0":
            raise EpisodeError("q2@0", "lost")
        if prompt.id == "q3@0":
            raise EpisodeError("another", "lost")

    results = {r.prompt.id: r for r in asyncio.run(collect(TwoTurns(before=fail), prompts(5)))}
    assert [results[qid].error for qid in ("q0", "q4")] == [None, None]
    assert all(results[qid].trajectories == () for qid in ("q1", "q2", "q3"))
    error = results["q1"].error
    assert isinstance(error, EpisodeError)
    assert str(error) == "episode 'q1@0': ZeroDivisionError: no such luck"
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert str(results["q2"].error) == "episode 'q2@0': lost"
    assert str(results["q3"].error) == ("episode 'q3@0': EpisodeError: episode 'another': lost")


def test_a_cancellation_from_within_the_agent_is_a_failure_like_others() -> None:
    async def cancelled(prompt: Prompt) -> None:
        task = asyncio.create_task(asyncio.sleep(10))
        task.cancel()
        await task

    results = asyncio.run(collect(TwoTurns(before=cancelled), prompts(2)))
    assert all("was cancelled" in str(result.error) for result in results)


def test_what_is_no_list_of_trajectories_is_a_failure() -> None:
    class Broken:
        async def collect_trajectory(self, *args: Any) -> Any:
            return None

    (result,) = asyncio.run(collect(Broken(), prompts(1)))
    assert "TypeError" in str(result.error)


def test_a_name_that_is_in_flight_already_fails_and_leaves_the_first_alone() -> None:
    twice = [Prompt("same", [1]), Prompt("same", [2])]
    results = asyncio.run(collect(TwoTurns(before=lambda _: asyncio.sleep(0.01)), twice))
    assert [result.error is None for result in results] == [False, True]
    assert "'same@0' is open already" in str(results[0].error)


def test_progress_counts_what_has_finished() -> None:
    seen: list[Progress] = []

    async def fail(prompt: Prompt) -> None:
        if prompt.id == "q0@1":
            raise ValueError("no")

    asked = collect(TwoTurns(before=fail), prompts(3), group_size=2, on_progress=seen.append)
    asyncio.run(asked)
    assert sorted({progress.num_finished for progress in seen} - {0}) == [1, 2, 3, 4, 5, 6]
    last = seen[-1]
    assert (last.num_prompts, last.num_started, last.num_failed) == (3, 6, 1)
    assert (last.num_turns, last.num_kept_turns, last.num_rewarded_turns) == (10, 10, 5)
    assert last.num_tokens == 20
    assert last.reward_sum == 2.5
    assert last.elapsed_s > 0
    assert last.tokens_per_s == pytest.approx(20 / last.elapsed_s)


def test_progress_moves_with_every_reply() -> None:
    seen: list[Progress] = []
    asyncio.run(collect(TwoTurns(), prompts(1), on_progress=seen.append))
    assert [(one.num_turns, one.num_tokens, one.num_finished) for one in seen] == [
        (1, 2, 0),
        (2, 4, 0),
        (2, 4, 1),
    ]


def test_turns_of_a_failed_episode_are_sampled_but_not_kept() -> None:
    class FailsAtTheEnd(TwoTurns):
        async def collect_trajectory(self, *args: Any) -> list[Trajectory]:
            await super().collect_trajectory(*args)
            raise ValueError("no")

    seen: list[Progress] = []
    asyncio.run(collect(FailsAtTheEnd(), prompts(1), on_progress=seen.append))
    assert (seen[-1].num_turns, seen[-1].num_kept_turns, seen[-1].num_failed) == (2, 0, 1)


def test_a_callback_that_fails_on_a_reply_ends_the_run() -> None:
    def fail(progress: Progress) -> None:
        if progress.num_finished == 0:
            raise KeyError("bar")

    agent = TwoTurns()
    with pytest.raises(KeyError, match="bar"):
        asyncio.run(collect(agent, prompts(20), concurrency=2, on_progress=fail))
    assert agent.active == 0


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_no_prompts_are_drawn_once_the_engine_has_ended(is_wrapped: bool) -> None:
    async def end(prompt: Prompt) -> None:
        if prompt.id != "q0@0":
            await asyncio.sleep(0.005)
            error = EngineEndedError(prompt.id, "generation has died")
            if is_wrapped:
                raise ValueError("no reply") from error
            raise error

    taken: list[str] = []

    def lazily() -> Iterator[Prompt]:
        for prompt in prompts(100):
            taken.append(prompt.id)
            yield prompt

    results = asyncio.run(collect(TwoTurns(before=end), lazily(), concurrency=3))
    assert len(results) == len(taken) <= 5
    assert [result.qid for result in results if result.error is None] == ["q0@0"]


def test_counted_replies_are_the_queue_behind_them() -> None:
    reply = GenerationOutput("q", [1], [2], [-1.0], False, 0, 0)
    counted: list[Reply] = []

    async def body() -> None:
        inner: asyncio.Queue[Reply] = asyncio.Queue(2)
        queue = CountedReplies(inner, counted.append)
        await queue.put(reply)
        queue.put_nowait(reply)
        assert (queue.qsize(), queue.full(), inner.full()) == (2, True, True)
        assert await queue.get() is queue.get_nowait() is reply
        assert queue.empty()
        queue.task_done()
        queue.task_done()
        await asyncio.wait_for(queue.join(), 1)
        with pytest.raises(asyncio.QueueEmpty):
            queue.get_nowait()

    asyncio.run(body())
    assert counted == [reply, reply]


def test_a_failing_progress_callback_comes_through_as_it_is() -> None:
    def fail(progress: Progress) -> None:
        raise KeyError("bar")

    agent = TwoTurns(before=lambda _: asyncio.sleep(0.001))
    with pytest.raises(KeyError, match="bar"):
        asyncio.run(collect(agent, prompts(20), concurrency=2, on_progress=fail))
    assert agent.active == 0


def test_a_failing_source_of_prompts_comes_through_as_it_is() -> None:
    async def broken() -> AsyncIterator[Prompt]:
        for prompt in prompts(2):
            yield prompt
        await asyncio.sleep(0.01)
        raise OSError("disk")

    agent = TwoTurns(before=lambda _: asyncio.sleep(10))
    with pytest.raises(OSError, match="disk"):
        asyncio.run(collect(agent, broken()))
    assert sorted(agent.cancelled) == ["q0@0", "q1@0"]


def test_leaving_the_loop_early_cancels_and_closes_every_episode() -> None:
    async def wait(prompt: Prompt) -> None:
        await asyncio.sleep(0 if prompt.id == "q0@0" else 10)

    agent = TwoTurns(before=wait)

    async def body() -> None:
        async with EchoEngine() as engine:
            async for result in runner(engine, agent).run(prompts(5)):
                assert result.prompt.id == "q0"
                break
            await asyncio.sleep(0.01)
            assert engine.open == {}
            assert len(asyncio.all_tasks()) == 2

    asyncio.run(body())
    assert agent.active == 0
    assert len(agent.cancelled) == 4


def test_ending_the_program_right_after_leaving_early_is_silent(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def body() -> None:
        async with EchoEngine() as engine:
            agent = TwoTurns(before=lambda _: asyncio.sleep(0.001))
            async for _ in runner(engine, agent, concurrency=2).run(prompts(20)):
                break

    asyncio.run(body())
    gc.collect()
    assert capfd.readouterr().err == ""


def test_closing_the_generator_waits_for_the_episodes_to_end() -> None:
    agent = TwoTurns(before=lambda p: asyncio.sleep(0 if p.id == "q0@0" else 10))

    async def body() -> None:
        async with EchoEngine() as engine:
            async with aclosing(runner(engine, agent, concurrency=3).run(prompts(50))) as results:
                await anext(results)
            assert engine.open == {}
            assert agent.active == 0
            assert len(asyncio.all_tasks()) == 2

    asyncio.run(body())


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.05])
def test_cancelling_the_reader_cancels_and_closes_every_episode(delay: float) -> None:
    agent = TwoTurns(before=lambda _: asyncio.sleep(10))

    async def body() -> None:
        async with EchoEngine() as engine:
            task = asyncio.create_task(read(engine))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert engine.open == {}
            assert agent.active == 0

    async def read(engine: EchoEngine) -> None:
        async for _ in runner(engine, agent, concurrency=8).run(prompts(50)):
            pass

    asyncio.run(body())


def test_a_runner_can_run_again_and_at_the_same_time() -> None:
    async def body() -> list[int]:
        async with EchoEngine() as engine:
            one = runner(engine, TwoTurns(before=lambda _: asyncio.sleep(0.001)))

            async def count(asked: list[Prompt]) -> int:
                return len([r async for r in one.run(asked) if r.error is None])

            both = await asyncio.gather(count(prompts(6)[:3]), count(prompts(6)[3:]))
            return [*both, await count(prompts(6))]

    assert asyncio.run(body()) == [3, 3, 6]


@pytest.mark.parametrize("option", ["concurrency", "group_size"])
def test_counts_below_one_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        runner(EchoEngine(), TwoTurns(), **{option: 0})


def test_the_real_engine_serves_a_run_from_start_to_end() -> None:
    model, tokenizer = build_tiny_model()
    asked = [Prompt(f"q{k}", tokenizer(f"What is {k} + 30?")["input_ids"]) for k in range(6)]
    agent = TwoTurns(sampling=SamplingParams(max_new_tokens=12))

    async def body() -> list[EpisodeResult]:
        async with TransformersEngine(model, num_blocks=64, page_size=16) as engine:
            too_long = Prompt("too long", [1] * 2000)
            run = runner(engine, agent, concurrency=5, group_size=2).run([*asked, too_long])
            return [result async for result in run]

    results = asyncio.run(body())
    failed = {result.qid: str(result.error) for result in results if result.error is not None}
    assert sorted(failed) == ["too long@0", "too long@1"]
    assert all("cache of 1024 tokens" in reason for reason in failed.values())
    for result in results:
        for trajectory in result.trajectories:
            first, second = trajectory.turns
            assert list(second.prompt_ids) == [*first.prompt_ids, *first.completion_ids]


def test_leaving_a_run_early_frees_the_real_engine() -> None:
    model, tokenizer = build_tiny_model()
    ids = tokenizer("What is 12 + 30?")["input_ids"]
    asked = (Prompt(str(k), ids) for k in range(1000))
    agent = TwoTurns(sampling=SamplingParams(max_new_tokens=200))

    async def body() -> None:
        engine = TransformersEngine(model, num_blocks=64, page_size=16)
        async with engine, aclosing(runner(engine, agent, concurrency=4).run(asked)) as results:
            await anext(results)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(body())
    assert agent.active == 0
