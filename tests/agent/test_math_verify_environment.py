from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trajpack.agent import math_verify_environment
from trajpack.agent.answer_worker import final_answers
from trajpack.agent.math_verify_environment import MathVerifyEnvironment
from trajpack.agent.questions import Question, reasoning_gym_questions


def question(id: str, *solutions: str) -> Question:
    return Question(id, ({"role": "user", "content": "?"},), solutions)


def judge(solution: str, answers: Sequence[str], **options: Any) -> list[bool]:
    async def ask() -> list[bool]:
        async with MathVerifyEnvironment([question("q", solution)], **options) as env:
            return (await env.step(("q", answers)))[1]

    return asyncio.run(ask())


def children() -> set[str]:
    """Processes this one started, zombies included."""
    paths = Path("/proc/self/task").glob("*/children")
    return {pid for path in paths for pid in path.read_text().split()}


def worker_pid(env: MathVerifyEnvironment) -> int:
    (worker,) = env._workers
    assert worker._child is not None
    return worker._child.pid


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
    assert judge(solution, right + wrong) == [True] * len(right) + [False] * len(wrong)


def test_a_step_returns_what_the_protocol_says() -> None:
    async def ask() -> None:
        async with MathVerifyEnvironment([question("q", "3", "4")]) as env:
            await env.reset()
            assert await env.step(("q", ["4"])) == (None, [True], True, False, {})
            assert await env.step(("q", [])) == (None, [], True, False, {})

    asyncio.run(ask())


def test_a_question_is_found_by_its_id_with_or_without_a_suffix() -> None:
    async def ask() -> None:
        async with MathVerifyEnvironment([question("a", "1"), question("a@b", "2")]) as env:
            for qid, answer in [("a", "1"), ("a@0", "1"), ("a@b", "2"), ("a@b@0", "2")]:
                assert (await env.step((qid, [answer])))[1] == [True]
            for qid in ["", "b", "b@a", "@a", "a@b@c@d"]:
                with pytest.raises(ValueError, match=f"no question has the id '{qid}'"):
                    await env.step((qid, ["1"]))

    asyncio.run(ask())


@pytest.mark.parametrize(
    "answer",
    [
        "\\boxed{(10^9)!}",
        "\\boxed{2^{10^{12}}}",
        "\\boxed{9^{9^{9^{9}}}}",
        "\\boxed{" + "(" * 5000 + "1" + ")" * 5000 + "}",
        "\\boxed{" + "\\frac{1}{" * 900 + "1" + "}" * 901,
        "1" * 10**6,
        "$" * 10**6,
        "\\boxed{" * 10**5,
        "\\sum_{n=1}^{\\infty} n^{-1.01}",
    ],
    ids=range(9),
)
def test_a_hostile_answer_is_wrong_and_the_next_is_judged_as_ever(answer: str) -> None:
    async def ask() -> None:
        async with MathVerifyEnvironment([question("q", "18")], timeout_s=1.0) as env:
            await env.step(("q", ["18"]))
            start = time.monotonic()
            longest_pause = await _longest_pause_during(
                env.step(("q", [answer])), successes=[False]
            )
            assert time.monotonic() - start < 10
            assert longest_pause < 0.7
            assert (await env.step(("q", ["18"])))[1] == [True]

    asyncio.run(ask())


async def _longest_pause_during(step: Any, successes: list[bool]) -> float:
    """Return for how long, at most, the event loop ran nothing else."""
    task = asyncio.ensure_future(step)
    longest, last = 0.0, time.monotonic()
    while not task.done():
        await asyncio.sleep(0.01)
        longest, last = max(longest, time.monotonic() - last), time.monotonic()
    assert (await task)[1] == successes
    return longest


def test_a_check_that_is_cut_short_says_so() -> None:
    async def ask() -> None:
        async with MathVerifyEnvironment([question("q", "18")], timeout_s=1.0) as env:
            _, successes, *_, info = await env.step(("q", ["18", "\\boxed{(10^9)!}"]))
            assert successes == [True, False]
            assert info == {"timed_out": [False, True], "failed": [False, False]}

    asyncio.run(ask())


def test_a_worker_that_dies_fails_the_check_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, pickle, sys\nos.write(1, b'R')\n"
        "answer = pickle.load(sys.stdin.buffer)[2]\n"
        "os.write(1, b'1') if answer == '18' else os._exit(9)\n"
    )
    monkeypatch.setattr(math_verify_environment, "_SCRIPT", script)

    async def ask() -> None:
        async with MathVerifyEnvironment([question("q", "18")]) as env:
            _, successes, *_, info = await env.step(("q", ["17"]))
            assert (successes, info["failed"]) == ([False], [True])
            assert await env.step(("q", ["18"])) == (None, [True], True, False, {})

    asyncio.run(ask())


def test_a_worker_killed_while_idle_is_replaced() -> None:
    async def ask() -> None:
        async with MathVerifyEnvironment([question("q", "18")]) as env:
            await env.step(("q", ["18"]))
            first = worker_pid(env)
            os.kill(first, signal.SIGKILL)
            await asyncio.to_thread(os.waitid, os.P_PID, first, os.WEXITED | os.WNOWAIT)
            assert await env.step(("q", ["18"])) == (None, [True], True, False, {})
            assert worker_pid(env) != first

    asyncio.run(ask())


def test_a_worker_that_cannot_start_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit(3)\n")
    monkeypatch.setattr(math_verify_environment, "_SCRIPT", script)
    with pytest.raises(RuntimeError, match="did not start"):
        judge("18", ["18"])


def test_nothing_is_left_after_close_even_when_a_check_was_running() -> None:
    before = children()

    async def ask() -> None:
        env = MathVerifyEnvironment([question("q", "18")], workers=2, timeout_s=60)
        await env.step(("q", ["18", "18"]))
        assert len(children() - before) == 2
        stuck = asyncio.ensure_future(env.step(("q", ["\\boxed{(10^9)!}"])))
        await asyncio.sleep(0.2)
        start = time.monotonic()
        await env.close()
        await env.close()
        assert time.monotonic() - start < 10
        assert (await stuck)[4]["failed"] == [True]
        with pytest.raises(RuntimeError, match="the environment is closed"):
            await env.step(("q", ["18"]))

    asyncio.run(ask())
    assert children() == before


def test_many_tasks_and_several_event_loops_share_one_environment() -> None:
    env = MathVerifyEnvironment([question(f"q{i}", str(i)) for i in range(50)], workers=2)

    async def ask_all() -> list[list[bool]]:
        steps = [env.step((f"q{i}@0", [f"it is {i}.", f"{i + 1}"])) for i in range(50)]
        return [step[1] for step in await asyncio.gather(*steps)]

    assert asyncio.run(ask_all()) == [[True, False]] * 50
    assert asyncio.run(ask_all()) == [[True, False]] * 50
    asyncio.run(env.close())


def test_a_cancelled_step_leaves_the_environment_usable() -> None:
    async def ask() -> None:
        async with MathVerifyEnvironment([question("q", "18")], timeout_s=1.0) as env:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(env.step(("q", ["\\boxed{(10^9)!}"])), 0.05)
            assert (await env.step(("q", ["18"])))[1] == [True]

    asyncio.run(ask())


def test_a_script_needs_no_guard_and_ends_without_closing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio\n"
        "from trajpack.agent.math_verify_environment import MathVerifyEnvironment\n"
        "from trajpack.agent.questions import Question\n"
        "env = MathVerifyEnvironment([Question('q', (), ('18',))])\n"
        "print(asyncio.run(env.step(('q', ['18', '17'])))[1], flush=True)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-W", "error", script],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ("[True, False]\n", "", 0)


def test_reasoning_gym_questions_are_judged_by_their_scorer_without_partial_credit() -> None:
    questions = reasoning_gym_questions(size=2, seed=1)
    gold = questions[0].solutions[0]

    async def ask() -> list[bool]:
        async with MathVerifyEnvironment(questions) as env:
            answers = [gold, f"\\boxed{{{gold}}}", f"5 + 5 = {gold}.", f"{gold}1", f"{gold} or 3"]
            return (await env.step((f"{questions[0].id}@2", answers)))[1]

    assert asyncio.run(ask()) == [True, True, True, False, False]


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
def test_the_final_answer_is_what_is_boxed_or_else_the_last_number(
    text: str, finals: list[str]
) -> None:
    assert final_answers(text) == finals


def test_wrong_options_and_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        MathVerifyEnvironment([], workers=0)
    with pytest.raises(ValueError, match=r"timeout_s must be positive and finite, got nan"):
        MathVerifyEnvironment([], timeout_s=float("nan"))
    with pytest.raises(ValueError, match="question id 'q' appears twice"):
        MathVerifyEnvironment([question("q", "1"), question("q", "2")])
    for answers in ("18", [18]):
        with pytest.raises(TypeError, match="the answers to 'q' must be a list of strings"):
            judge("18", answers)  # type: ignore[arg-type]
