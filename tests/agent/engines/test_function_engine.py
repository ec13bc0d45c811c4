"""The engine of a function: concurrent calls, cancellation, errors, versions."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.agent.runner.runner_cases import TwoTurns, prompts, runner, take
from tests.support.replies import asking
from trajpack.agent import FunctionEngine, GenerationError, GenerationOutput
from trajpack.agent.errors import (
    EngineEndedError,
    MalformedResponseError,
    RequestRefusedError,
    causes_of,
)
from trajpack.agent.runner.replies import turn_of
from trajpack.packing.types import Turn


async def echo(prompt_ids: Any, sampling: Any) -> Any:
    return [prompt_ids[-1], prompt_ids[-1] + 1], [-1.0, -2.0], True


def asked(function: Any, *, version: int = 0) -> GenerationOutput:
    async def ask() -> GenerationOutput:
        async with FunctionEngine(function, version=version) as engine:
            return await engine.generate(("q", [5, 6], "sampling"))  # type: ignore[arg-type]

    return asyncio.run(ask())


def test_a_tuple_is_a_completion_of_the_version_at_the_call() -> None:
    async def changes(prompt_ids: Any, sampling: Any) -> Any:
        assert (prompt_ids, sampling) == ([5, 6], "sampling")
        engine.set_version(4)
        completion = await echo(prompt_ids, sampling)
        prompt_ids.append(9)  # a copy
        return completion

    engine = FunctionEngine(changes, version=3)

    async def ask() -> GenerationOutput:
        async with engine:
            return await engine.generate(("q", [5, 6], "sampling"))  # type: ignore[arg-type]

    expected = Turn([5, 6], [6, 7], [-1.0, -2.0], truncated=True, version_start=3, version_end=3)
    assert turn_of("q", np.array([5, 6], np.int32), asyncio.run(ask())) == expected
    assert engine.version == 4
    with pytest.raises(ValueError, match=r"version must be in \[4, "):
        engine.set_version(3)


def test_an_output_gets_the_name_of_its_request_and_keeps_the_rest() -> None:
    async def whole(prompt_ids: Any, sampling: Any) -> GenerationOutput:
        spans = [(7, 0, 1), (8, 1, 2)]
        return GenerationOutput("", prompt_ids, [1, 2], [-1.0, -0.5], False, 7, 8, spans)

    turn = turn_of("q", np.array([5, 6], np.int32), asked(whole))
    assert turn == Turn([5, 6], [1, 2], [-1.0, -0.5], version_spans=[(7, 0, 1), (8, 1, 2)])


class Blocked:
    """Function that never returns; it notes what began and what was cancelled."""

    def __init__(self) -> None:
        self.began, self.was_cancelled = asyncio.Event(), False

    async def __call__(self, prompt_ids: Any, sampling: Any) -> Any:
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise


def test_a_cancelled_request_cancels_its_call() -> None:
    async def cancel() -> None:
        function = Blocked()
        async with FunctionEngine(function) as engine, asyncio.timeout(20):
            request = asyncio.ensure_future(engine.generate(("q", [1], None)))  # type: ignore[arg-type]
            await function.began.wait()
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            assert function.was_cancelled

    asyncio.run(cancel())


def test_the_end_of_the_context_ends_the_calls() -> None:
    async def leave() -> None:
        function = Blocked()
        async with asyncio.timeout(20):
            async with FunctionEngine(function) as engine:
                asked = asking(engine, "q", [1], None)
                await function.began.wait()
            assert function.was_cancelled
            assert isinstance(await asked, EngineEndedError)
            with pytest.raises(EngineEndedError, match="'late': the engine was shut down"):
                await engine.generate(("late", [1], None))  # type: ignore[arg-type]
            with pytest.raises(RuntimeError, match="can be entered once"):
                await engine.__aenter__()

    asyncio.run(leave())


@pytest.mark.parametrize("error", [KeyError("x"), RequestRefusedError("", "too long")])
def test_an_exception_is_raised_as_it_is_and_fails_its_episode_alone(error: Exception) -> None:
    async def fails_once(prompt_ids: Any, sampling: Any) -> Any:
        if not failures:
            failures.append(error)
            raise error
        return await echo(prompt_ids, sampling)

    async def roll() -> list[Any]:
        async with FunctionEngine(fails_once) as engine, asyncio.timeout(20):
            return await take(runner(engine, TwoTurns(), concurrency=1).run(prompts(2)))

    failures: list[Exception] = []
    with pytest.raises(type(error)) as caught:
        asked(fails_once)
    assert caught.value is error
    failures.clear()
    first, second = asyncio.run(roll())
    assert isinstance(first.error, GenerationError)
    assert error in causes_of(first.error)
    assert second.error is None


@pytest.mark.parametrize("returned", [None, ([1], [-1.0])])
def test_what_is_no_completion_is_malformed(returned: Any) -> None:
    async def function(prompt_ids: Any, sampling: Any) -> Any:
        return returned

    words = "'q': the engine's function must return .output_ids, output_logprobs, no_eos. or a"
    with pytest.raises(MalformedResponseError, match=words):
        asked(function)


def test_what_is_no_asynchronous_function_is_refused() -> None:
    with pytest.raises(TypeError, match="function must be an asynchronous function, got 3"):
        FunctionEngine(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="has not been entered"):
        asyncio.run(FunctionEngine(echo).generate(("q", [1], None)))  # type: ignore[arg-type]
