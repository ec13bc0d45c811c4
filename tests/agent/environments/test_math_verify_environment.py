from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from trajpack.agent.environments import math_verify
from trajpack.agent.environments.answer_worker import final_answers, is_arithmetic, is_full_score
from trajpack.agent.environments.math_verify import MathVerifyEnvironment
from trajpack.agent.environments.questions import Question, reasoning_gym_questions
from trajpack.agent.protocols import Action


def question(id: str, *solutions: str) -> Question:
    return Question(id, ({"role": "user", "content": "?"},), solutions)


def step(*actions: tuple[str, Sequence[Any]], **options: Any) -> list[tuple[list[bool], Any]]:
    """Return successes and info of each action, on the question "q" whose solution is 18."""

    async def ask() -> list[tuple[list[bool], Any]]:
        async with MathVerifyEnvironment([question("q", "18")], **options) as env:
            steps = [await asyncio.wait_for(env.step(action), 60) for action in actions]
        assert all(step[0] is None and step[2:4] == (True, False) for step in steps)
        return [(step[1], step[4]) for step in steps]

    return asyncio.run(ask())


RIGHT = ("q", ["18"])
IS_RIGHT: tuple[list[bool], Any] = ([True], {})
SLOW = "\\boxed{(10^9)!}"
"""An answer whose check does not end by itself."""


def children() -> set[str]:
    """Processes this one started, zombies included."""
    paths = Path("/proc/self/task").glob("*/children")
    return {pid for path in paths for pid in path.read_text().split()}


@pytest.mark.usefixtures("warm_judge")
@pytest.mark.parametrize(
    ("solution", "right", "wrong"),
    [
        ("18", ["18", "so it is \\boxed{18}", "She earns $18.", "18.00"], ["19", "", "18 or 17"]),
        ("1,234", ["1234", "1,234", "\\boxed{1,234}", "$1234$"], ["1", "234", "1.234"]),
        ("\\boxed{\\frac{1}{2}}", ["1/2", "0.5", "$\\frac12$"], ["2"]),
        ("x^2 + 2x + 1", ["$(x + 1)^2$", "\\boxed{1 + 2x + x^2}"], ["$x^2 + 1$"]),
        ("Paris", ["Paris", "\\boxed{Paris}"], ["Lyon"]),
    ],
)
def test_answers_are_compared_by_value(solution: str, right: list[str], wrong: list[str]) -> None:
    async def ask() -> list[bool]:
        async with MathVerifyEnvironment([question("q", solution)]) as env:
            return (await env.step(("q", right + wrong)))[1]

    assert asyncio.run(ask()) == [True] * len(right) + [False] * len(wrong)


@pytest.mark.usefixtures("warm_judge")
def test_a_question_is_found_by_the_name_of_its_task_or_of_the_episode() -> None:
    async def ask() -> None:
        asked = [question("a", "0", "1"), question("c@b", "2"), question("a@7", "3")]
        async with MathVerifyEnvironment(asked) as env:
            await env.reset()
            assert await env.step(("a", [])) == (None, [], True, False, {})
            found = {"a": "1", "a@0": "1", "a@7": "1", "c@b": "2", "c@b@0": "2", "a@7@12": "3"}
            for qid, answer in found.items():
                for action in ((qid, [answer]), Action(qid, [answer])):
                    assert (await env.step(action))[1] == [True]
            for qid in ["", "b", "b@a", "@a", "c@b@c@d", "a@b"]:
                with pytest.raises(ValueError, match=f"no question has the id '{qid}'"):
                    await env.step((qid, ["1"]))

    asyncio.run(ask())


def test_a_check_that_exceeds_its_time_is_reported_and_stopped() -> None:
    ((successes, info),) = step(("q", ["18", SLOW]), timeout_s=1.0)
    assert successes == [True, False]
    assert info == {"timed_out": [False, True], "failed": [False, False]}


@pytest.fixture
def use_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have workers run a line with ``answer`` for each request."""

    def use(line: str) -> None:
        script = tmp_path / "worker.py"
        script.write_text(
            "import os, signal\n"
            "from multiprocessing.connection import Connection\n"
            "asked = Connection(0)\n"
            f"while True:\n    *_, answer, _ = asked.recv()\n    {line}\n    asked.send(True)\n"
        )
        monkeypatch.setattr(math_verify, "SCRIPT", script)

    return use


@pytest.mark.parametrize("loss", ["os._exit(9)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_lost_worker_is_an_error_and_no_verdict(
    use_worker: Callable[[str], None], loss: str
) -> None:
    use_worker(f"if answer != '18': {loss}")

    async def ask() -> None:
        async with MathVerifyEnvironment([question("q", "18")]) as env:
            with pytest.raises(
                RuntimeError, match="an answer was not checked: its worker was lost"
            ):
                await env.step(("q@7", ["17"]))
            assert (await env.step(RIGHT))[1] == [True]

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("loss", "reported"),
    [("SIGALRM", "timed_out"), ("SIGPROF", "timed_out"), ("SIGSEGV", "failed")],
)
def test_an_answer_that_its_worker_does_not_survive_is_wrong(
    use_worker: Callable[[str], None], loss: str, reported: str
) -> None:
    use_worker(f"if answer != '18': os.kill(os.getpid(), signal.{loss})")
    wrong, right = step(("q", ["17"]), RIGHT)
    assert (wrong[0], wrong[1][reported]) == ([False], [True])
    assert right == IS_RIGHT


def test_a_worker_that_stands_still_is_killed_and_its_answer_has_timed_out(
    use_worker: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_worker("if answer != '18': os.kill(os.getpid(), signal.SIGSTOP)")
    monkeypatch.setattr(math_verify, "_START_TIMEOUT_S", 3.0, raising=False)
    fresh, right, idle, again = step(("q", ["17"]), RIGHT, ("q", ["17"]), RIGHT, timeout_s=0.1)
    assert fresh == idle == ([False], {"timed_out": [True], "failed": [False]})
    assert right == again == IS_RIGHT


def test_workers_killed_while_idle_fail_no_step(use_worker: Callable[[str], None]) -> None:
    use_worker("pass")

    async def ask() -> None:
        async with MathVerifyEnvironment([question("q", "18")], workers=2) as env:
            await env.step(("q", ["18"] * 2))
            for worker in env._workers:
                worker.kill()
                worker.wait()
            assert (await env.step(RIGHT))[1] == [True]
            assert len(env._workers) == 1

    asyncio.run(ask())


def test_nothing_is_left_after_close_even_when_a_check_was_running() -> None:
    before = children()

    async def ask() -> None:
        env = MathVerifyEnvironment([question("q", "18")], workers=2, timeout_s=60)
        await env.step(("q", ["18", "18"]))
        assert len(children() - before) == 2
        stuck = asyncio.ensure_future(env.step(("q", [SLOW])))
        await asyncio.sleep(0.2)
        start = time.monotonic()
        await env.close()
        await env.close()
        assert time.monotonic() - start < 10
        with pytest.raises(RuntimeError, match="the environment is closed"):
            await stuck
        with pytest.raises(RuntimeError, match="the environment is closed"):
            await env.step(RIGHT)

    asyncio.run(ask())
    assert children() == before


@pytest.mark.usefixtures("warm_judge")
def test_many_tasks_and_several_event_loops_share_one_environment() -> None:
    env = MathVerifyEnvironment([question(f"q{i}", str(i)) for i in range(50)], workers=2)

    async def ask_all() -> list[list[bool]]:
        steps = [env.step((f"q{i}@0", [f"it is {i}.", f"{i + 1}"])) for i in range(50)]
        return [step[1] for step in await asyncio.gather(*steps)]

    assert asyncio.run(ask_all()) == [[True, False]] * 50
    assert asyncio.run(ask_all()) == [[True, False]] * 50
    asyncio.run(env.close())


@pytest.mark.usefixtures("warm_judge")
def test_a_cancelled_step_leaves_the_environment_usable() -> None:
    async def ask() -> None:
        async with MathVerifyEnvironment([question("q", "18")], timeout_s=1.0) as env:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(env.step(("q", [SLOW])), 0.05)
            assert (await env.step(RIGHT))[1] == [True]

    asyncio.run(ask())


@pytest.mark.usefixtures("warm_judge")
def test_reasoning_gym_questions_are_judged_by_their_scorer_without_partial_credit() -> None:
    questions = reasoning_gym_questions(size=2, seed=1)
    gold = questions[0].solutions[0]

    async def ask() -> list[bool]:
        async with MathVerifyEnvironment(questions) as env:
            answers = [gold, f"\\boxed{{{gold}}}", f"5 + 5 = {gold}.", f"{gold}1", f"{gold} or 3"]
            return (await env.step((f"{questions[0].id}@2", answers)))[1]

    assert asyncio.run(ask()) == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("task", "rewrite"),
    [
        ("countdown", ("94*4 - 61 - 6", "(94*4) - (61 + 6)")),
        ("simple_integration", ("-34*x**8/15 - 5*x/4 + C", "-5*x/4 - 34*x**8/15 + C")),
        ("polynomial_multiplication", ("-", "- 0 - ")),
        ("complex_arithmetic", (".0", "")),
    ],
)
def test_a_scorer_still_judges_another_form_of_the_answer(
    task: str, rewrite: tuple[str, str]
) -> None:
    (asked,) = reasoning_gym_questions(task, size=1, seed=1)
    own = asked.solutions[0]
    answer = own.replace(*rewrite)
    assert answer != own
    assert is_full_score(task, asked.gym_entry or {}, answer)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        *((text, True) for text in ["-1.5", "1,234", "2*x**3 + C", "sin(x)^2", "3.0i", "x = 3"]),
        *((text, True) for text in ["0x5b993", "1.7e-22", "(4.051, -5.487)", ".5", "00:34:28"]),
        *((text, False) for text in ["", "x.y", "(1).x", "1 .x", "x1", "a_b", "'a'", "eval(x)"]),
        *((text, False) for text in ["f\n(x)", "[1]", "{1}", "x; y", "lambda x: x", "@"]),
        *((text, False) for text in ["\uff45xp", "\u00b2", "\\x", "`x`", "#"]),
        ("1" * 1001, False),
    ],
)
def test_only_arithmetic_reaches_a_scorer(text: str, is_one: bool) -> None:
    assert is_arithmetic(text) == is_one


@pytest.mark.usefixtures("warm_judge")
def test_an_honest_answer_does_not_wait_for_a_hostile_one() -> None:
    if (os.cpu_count() or 1) < 2:
        pytest.skip("needs two cores")

    async def ask() -> None:
        async with MathVerifyEnvironment([question("q", "18")], timeout_s=20) as env:
            hostile = asyncio.ensure_future(env.step(("q", [SLOW])))
            await asyncio.sleep(0)
            assert (await env.step(RIGHT))[1] == [True]
            assert not hostile.done()
            hostile.cancel()

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("text", "finals"),
    [
        ("\\boxed{1} and \\boxed{\\frac{1}{2}} or 3", ["\\frac{1}{2}"]),
        ("\\boxed{1,234}", ["1,234", "1234"]),
        ("7-3 is 4", ["7-3 is 4", "4"]),
        ("1,234.5", ["1,234.5", "1234.5"]),
        ("7 - 8 = -1.", ["7 - 8 = -1.", "-1"]),
        ("\\boxed{1", ["\\boxed{1", "1"]),
        (" yes ", ["yes"]),
        ("", [""]),
    ],
)
def test_the_final_answer_is_the_box_or_the_last_number(text: str, finals: list[str]) -> None:
    assert final_answers(text) == finals


def refused(*questions: Question, **options: Any) -> Any:
    return lambda: MathVerifyEnvironment(questions, **options)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (refused(workers=0), ValueError, "workers must be at least 1, got 0"),
        (refused(timeout_s=math.nan), ValueError, "timeout_s must be positive and finite, got nan"),
        (refused(question("q", "1"), question("q", "2")), ValueError, "id 'q' appears twice"),
        (
            refused(*reasoning_gym_questions("coin_flip", size=1, seed=1)),
            ValueError,
            "scorer of 'coin_flip' gives wrong numbers the full score",
        ),
        (lambda: step(("q", "18")), TypeError, "the answers to 'q' must be a list of strings"),
        (lambda: step(("q", [18])), TypeError, "the answers to 'q' must be a list of strings"),
    ],
)
def test_wrong_options_and_actions_are_refused(
    call: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()
