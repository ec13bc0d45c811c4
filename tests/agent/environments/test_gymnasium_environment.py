from __future__ import annotations

import asyncio
import threading
from typing import Any, ClassVar

import gymnasium
import pytest

from tests.agent.agents.chat_cases import END, Characters, SaysAlways, collect_async
from trajpack.agent.agents.conversation import ConversationLimits
from trajpack.agent.agents.environment_agent import Closing, EnvironmentAgent, Opening
from trajpack.agent.environments.gymnasium import GymnasiumEnvironment
from trajpack.agent.protocols import Prompt, SamplingParams
from trajpack.agent.runner.runner import RolloutRunner
from trajpack.packing.buffer.buffer import pack


class Guess(gymnasium.Env[str, int]):
    """A number between 0 and 9 is to be found; it says whether a guess is too low or too high."""

    made: ClassVar[list[Guess]] = []

    def __init__(self) -> None:
        self.made.append(self)
        self.threads: set[int] = set()
        self.seeds: list[Any] = []
        self.is_closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.number = int(self.np_random.integers(10))
        return "guess", {"seed": seed}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.threads.add(threading.get_ident())
        if action == 99:
            raise ZeroDivisionError("the end of the world")
        is_found = action == self.number
        word = "found" if is_found else "low" if action < self.number else "high"
        return word, 1.0 if is_found else -0.5, is_found, False, {}

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


@pytest.fixture(autouse=True)
def _none_made() -> None:
    Guess.made.clear()


def make(**limits: Any) -> EnvironmentAgent:
    sampling = SamplingParams(max_new_tokens=8)
    return EnvironmentAgent(sampling, Characters(), limits=ConversationLimits(**limits))


def prompt(agent: EnvironmentAgent, qid: str = "q@0") -> Prompt:
    return Prompt(qid, agent.prompt_ids("Find it."))


def test_the_model_sees_the_observations_of_the_environment() -> None:
    async def play() -> Any:
        agent = make(max_turns=20)
        async with GymnasiumEnvironment(Guess, to_action=int, seed=3) as env:
            says = [f"{number}{END}" for number in range(10)]
            played = await collect_async(agent, env, says, prompt=prompt(agent))
        return played

    trajectory, prompts = asyncio.run(play())
    (env,) = Guess.made
    beginning = f"<system>Find it.{END}\n<user>guess{END}\n<assistant>"
    assert prompts[0] == beginning
    if env.number:
        assert prompts[1] == f"{beginning}0{END}\n<user>low{END}\n<assistant>"
    assert [turn.reward for turn in trajectory.turns] == [-0.5] * env.number + [1.0]
    assert len(pack([trajectory]).seqlens) == 1
    assert env.threads
    assert threading.get_ident() not in env.threads
    assert env.is_closed


def test_an_episode_is_the_same_for_the_same_name_or_seed() -> None:
    def seed(seed: int, qid: str, of_episode: int | None) -> int:
        async def opened() -> int:
            async with GymnasiumEnvironment(Guess, seed=seed) as env:
                _, _, _, _, info = await env.step(Opening(qid, of_episode))
                return int(info["seed"])

        return asyncio.run(opened())

    assert seed(0, "a", None) == seed(0, "a", None)
    assert len({seed(0, "a", None), seed(0, "b", None), seed(1, "a", None)}) == 3
    assert seed(0, "a", 7) == seed(1, "b", 7) == 7

    async def seed_of_prompt() -> int:
        agent = make(max_turns=1)
        seeded = Prompt("q@0", agent.prompt_ids("Find it."), seed=11)
        async with GymnasiumEnvironment(Guess, to_action=int) as env:
            await collect_async(agent, env, ["0"], prompt=seeded)
        return Guess.made[-1].seeds[-1]

    assert asyncio.run(seed_of_prompt()) == 11


def test_many_episodes_are_rolled_out_each_in_an_instance_of_its_own() -> None:
    async def play() -> None:
        agent = make(max_turns=3)
        prompts = [Prompt(f"q{i}", agent.prompt_ids("Find it.")) for i in range(20)]
        env = GymnasiumEnvironment(Guess, to_action=int)
        async with env, SaysAlways(f"4{END}") as engine:
            runner = RolloutRunner(engine, agent, env, concurrency=8, group_size=2)
            lengths = []
            async for result in runner.run(prompts):
                assert result.error is None
                (trajectory,) = result.trajectories
                rewards = [turn.reward for turn in trajectory.turns]
                assert rewards in ([1.0], [-0.5, -0.5, -0.5])
                lengths.append(len(rewards))
        assert len(lengths) == 40
        assert set(lengths) == {1, 3}
        assert len(Guess.made) <= 8

    asyncio.run(play())
    assert all(made.is_closed for made in Guess.made)


def test_an_episode_that_ends_early_gives_its_instance_back() -> None:
    async def play() -> None:
        agent = make(max_turns=5)
        has_stepped = asyncio.Event()

        class Tells(GymnasiumEnvironment):
            async def step(self, *values: Any) -> Any:
                result = await super().step(*values)
                has_stepped.set()  # no thread has the instance any more
                return result

        async with Tells(Guess, to_action=int) as env:
            episode = asyncio.ensure_future(
                collect_async(agent, env, ["-1"], prompt=prompt(agent))  # and then says nothing
            )
            await has_stepped.wait()
            episode.cancel()
            with pytest.raises(asyncio.CancelledError):
                await episode
            await collect_async(agent, env, ["-1"] * 5, prompt=prompt(agent, "q@1"))
        assert len(Guess.made) == 1

    asyncio.run(play())


def test_an_instance_that_raised_is_not_used_again() -> None:
    async def play() -> None:
        agent = make(max_turns=5)
        async with GymnasiumEnvironment(Guess, to_action=int) as env:
            with pytest.raises(ZeroDivisionError, match="the end of the world"):
                await collect_async(agent, env, ["99"], prompt=prompt(agent))
            await collect_async(agent, env, ["-1"] * 5, prompt=prompt(agent, "q@1"))
            first, second = Guess.made
            assert (first.is_closed, second.is_closed) == (True, False)

    asyncio.run(play())


def test_an_invalid_action_is_reported_to_the_model() -> None:
    agent = make(max_turns=2)

    async def play() -> Any:
        async with GymnasiumEnvironment(Guess, to_action=int, invalid_reward=-2.0) as env:
            return await collect_async(agent, env, [f"nine{END}", "5"], prompt=prompt(agent))

    trajectory, prompts = asyncio.run(play())
    assert trajectory.turns[0].reward == -2.0
    assert prompts[1].endswith(f"nine{END}\n<user>That is no action.\nguess{END}\n<assistant>")


OPEN, CLOSE = Opening("q@0"), Closing("q@0")


@pytest.mark.parametrize(
    ("actions", "error", "words"),
    [
        ([("q@0", ["1"])], ValueError, "no episode 'q@0' is open"),
        ([OPEN, CLOSE, ("q@0", ["1"])], ValueError, "no episode 'q@0' is open"),
        (
            [OPEN, ("q@0", ["1", "2"])],
            ValueError,
            r"a list of one text for 'q@0', got \['1', '2'\]",
        ),
        ([OPEN, ("q@0", [1])], ValueError, r"a list of one text for 'q@0', got \[1\]"),
        ([None, OPEN], RuntimeError, "the environment is closed"),
    ],
)
def test_wrong_actions_are_refused(actions: list[Any], error: type[Exception], words: str) -> None:
    async def ask() -> None:
        async with GymnasiumEnvironment(Guess) as env:
            for action in actions:
                await (env.close() if action is None else env.step(action))

    with pytest.raises(error, match=words):
        asyncio.run(ask())
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        GymnasiumEnvironment(Guess, workers=0)


def test_an_instance_that_cannot_be_closed_does_not_keep_others_open() -> None:
    class Stuck(Guess):
        def close(self) -> None:
            super().close()
            if self is self.made[0]:
                raise OSError("stuck")

    async def play() -> None:
        env = GymnasiumEnvironment(Stuck)
        for qid in ("q@0", "q@1", "q@2"):
            await env.step(Opening(qid))
        with pytest.raises(OSError, match="stuck"):
            await env.close()

    asyncio.run(play())
    assert [one.is_closed for one in Guess.made] == [True, True, True]
