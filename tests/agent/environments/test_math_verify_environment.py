from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from trajpack.agent.environments import math_verify
from trajpack.agent.environments.answer_worker import final_answers, is_arithmetic, is_full_score
from trajpack.agent.environments.math_verify import MathVerifyEnvironment
from trajpack.agent.environments.questions import Question, reasoning_gym_questions


def question(id: str, *solutions: str) -> Question:
    return Question(id, ({"role": "user", "content": "?"},), solutions)


def step(*actions: tuple[str, Sequence[Any]], **options: Any) -> list[tuple[list[bool], Any]]:
    """Return successes and info of each action, on the question "q" whose solution is 18."""

    async def ask() -> list[tuple[list[bool], Any]]:
        async with MathVerifyEnvironment([question("q", "18")], **options) as env:
            steps = [await env.step(action) for action in actions]
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


def worker_pid(env: MathVerifyEnvironment) -> int:
    (worker,) = env._workers
    assert worker.pid is not None
    return worker.pid


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
def test_a_question_is_found_by_its_id_with_or_without_a_suffix() -> None:
    async def ask() -> None:
        async with MathVerifyEnvironment([question("a", "0", "1"), question("c@b", "2")]) as env:
            await env.reset()
            assert await env.step(("a", [])) == (None, [], True, False, {})
            for qid, answer in [("a", "1"), ("a@0", "1"), ("c@b", "2"), ("c@b@0", "2")]:
                assert (await env.step((qid, [answer])))[1] == [True]
            for qid in ["", "b", "b@a", "@a", "c@b@c@d"]:
                with pytest.raises(ValueError, match=f"no question has the id '{qid}'"):
                    await env.step((qid, ["1"]))

    asyncio.run(ask())


@pytest.mark.usefixtures("warm_judge")
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
def test_a_hostile_answer_is_wrong_and_the_next_is_judged(answer: str) -> None:
    async def ask() -> None:
        async with MathVerifyEnvironment([question("q", "18")], timeout_s=1.0) as env:
            await env.step(RIGHT)
            start = time.monotonic()
            longest_pause = await _longest_pause_during(
                env.step(("q", [answer])), successes=[False]
            )
            assert time.monotonic() - start < 10
            assert longest_pause < 0.7
            assert (await env.step(RIGHT))[1] == [True]

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


def test_a_check_that_exceeds_its_time_is_reported_and_stopped() -> None:
    began = time.monotonic()
    ((successes, info),) = step(("q", ["18", SLOW]), timeout_s=1.0)
    assert time.monotonic() - began >= 1.0
    assert successes == [True, False]
    assert info == {"timed_out": [False, True], "failed": [False, False]}


@pytest.fixture
def use_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have workers run lines with ``nonce``, ``answer`` and ``is_retry`` for each request."""

    def use(*lines: str, start: str = "os.write(1, b'R')") -> None:
        begin = (
            "import os, pickle, signal, sys, time",
            f"mark = {str(tmp_path / 'mark')!r}",
            start,
            "while True:",
            "    nonce, _, _, answer, _ = pickle.load(sys.stdin.buffer)",
            "    is_retry = os.path.exists(mark)",
            "    open(mark, 'w').close()",
        )
        script = tmp_path / "worker.py"
        script.write_text("\n".join([*begin, *(f"    {line}" for line in lines)]))
        monkeypatch.setattr(math_verify, "SCRIPT", script)

    return use


LOSES = {
    "exits": "os._exit(9)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "is stopped": "os.kill(os.getpid(), signal.SIGSTOP)",
    "crashes": "os.kill(os.getpid(), signal.SIGSEGV)",
    "says too much": "os.write(1, b'1' + nonce + b'1')",
    "forges": "os.write(1, b'1' * 100)",
    "says nothing that counts": "os.write(1, b'?' + nonce)",
}


SAYS_RIGHT = "os.write(1, b'1' + nonce)"


@pytest.mark.parametrize("loss", LOSES.values(), ids=LOSES)
def test_a_check_whose_worker_is_lost_is_repeated(
    use_worker: Callable[..., None], loss: str
) -> None:
    use_worker(f"if not is_retry: {loss}; continue", SAYS_RIGHT)
    assert step(RIGHT, timeout_s=0.2) == [IS_RIGHT]


@pytest.mark.parametrize("loss", ["exits", "is killed"])
def test_two_lost_workers_are_an_error_and_no_verdict(
    use_worker: Callable[..., None], loss: str
) -> None:
    use_worker(f"if answer != '18': {LOSES[loss]}", SAYS_RIGHT)

    async def ask() -> None:
        async with MathVerifyEnvironment([question("q", "18")]) as env:
            with pytest.raises(RuntimeError, match="answer to 'q@7' was not checked: its worker"):
                await env.step(("q@7", ["17"]))
            assert (await env.step(RIGHT))[1] == [True]

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("loss", "reported"),
    [
        ("is stopped", "timed_out"),
        ("crashes", "failed"),
        ("says too much", "failed"),
        ("forges", "failed"),
    ],
)
def test_an_answer_over_which_two_workers_misbehave_is_wrong(
    use_worker: Callable[..., None], loss: str, reported: str
) -> None:
    use_worker(f"if answer != '18': {LOSES[loss]}; continue", SAYS_RIGHT)
    wrong, right = step(("q", ["17"]), RIGHT, timeout_s=0.2)
    assert (wrong[0], wrong[1][reported]) == ([False], [True])
    assert right == IS_RIGHT


def test_a_surplus_reply_does_not_answer_the_next_request(use_worker: Callable[..., None]) -> None:
    use_worker(
        "os.write(1, b'0' + nonce)",
        "if answer == 'forge': time.sleep(0.1); os.write(1, b'1' * 100)",
    )

    async def ask() -> None:
        async with MathVerifyEnvironment([question("q", "18")], workers=1) as env:
            await env.step(("q", ["forge"]))
            await asyncio.sleep(0.3)
            assert await env.step(("q", ["17"])) == (None, [False], True, False, {})

    asyncio.run(ask())


def test_a_worker_that_does_not_read_a_long_request_is_killed(
    use_worker: Callable[..., None],
) -> None:
    use_worker(start="os.write(1, b'R'); time.sleep(60)")
    began = time.monotonic()
    ((successes, _),) = step(("q", ["18" * 10**6]), timeout_s=0.2)
    assert successes == [False]
    assert time.monotonic() - began < 20


def test_a_worker_that_cannot_start_raises(use_worker: Callable[..., None]) -> None:
    use_worker(start="raise SystemExit(3)")
    with pytest.raises(RuntimeError, match="did not start"):
        step(RIGHT)


def test_closing_while_a_worker_starts_is_reported(use_worker: Callable[..., None]) -> None:
    use_worker(start="time.sleep(60)")

    async def ask() -> None:
        env = MathVerifyEnvironment([question("q", "18")])
        waiting = asyncio.ensure_future(env.step(RIGHT))
        await asyncio.sleep(0.2)
        await env.close()
        with pytest.raises(RuntimeError, match="the environment is closed"):
            await waiting

    asyncio.run(ask())


def test_a_worker_killed_while_idle_is_replaced() -> None:
    async def ask() -> None:
        async with MathVerifyEnvironment([question("q", "18")], workers=1) as env:
            await env.step(RIGHT)
            first = worker_pid(env)
            os.kill(first, signal.SIGKILL)
            await asyncio.to_thread(os.waitid, os.P_PID, first, os.WEXITED | os.WNOWAIT)
            assert await env.step(RIGHT) == (None, [True], True, False, {})
            assert worker_pid(env) != first

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


@pytest.mark.slow
def test_a_script_needs_no_guard_and_ends_without_closing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio\n"
        "from trajpack.agent.environments.math_verify import MathVerifyEnvironment\n"
        "from trajpack.agent.environments.questions import Question\n"
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


@pytest.mark.usefixtures("warm_judge")
def test_reasoning_gym_questions_are_judged_by_their_scorer_without_partial_credit() -> None:
    questions = reasoning_gym_questions(size=2, seed=1)
    gold = questions[0].solutions[0]

    async def ask() -> list[bool]:
        async with MathVerifyEnvironment(questions) as env:
            answers = [gold, f"\\boxed{{{gold}}}", f"5 + 5 = {gold}.", f"{gold}1", f"{gold} or 3"]
            return (await env.step((f"{questions[0].id}@2", answers)))[1]

    assert asyncio.run(ask()) == [True, True, True, False, False]


EVALUATING_TASKS = (
    *("countdown", "puzzle24", "simple_integration", "intermediate_integration"),
    *("polynomial_multiplication", "n_queens", "binary_matrix", "spiral_matrix"),
    "string_insertion",
)


@pytest.mark.usefixtures("warm_judge")
@pytest.mark.parametrize("task", EVALUATING_TASKS)
def test_no_scorer_runs_an_answer_as_code(task: str, tmp_path: Path) -> None:
    (asked,) = reasoning_gym_questions(task, size=1, seed=1)
    mark = tmp_path / "mark"
    write = f"__import__('os').system('touch {mark}')"
    hostile = [write, f"\\boxed{{{write}}}", f"[{write}]", "1" + f" + 0*len(str({write}))"]

    async def ask() -> None:
        async with MathVerifyEnvironment([asked], workers=1, timeout_s=20) as env:
            assert not any((await env.step((asked.id, hostile)))[1])
            own = asked.solutions[0]
            assert (await env.step((asked.id, [own, f"\\boxed{{{own}}}"])))[1] == [True, True]

    asyncio.run(ask())
    assert not mark.exists()


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
        *((text, False) for text in ["", "x.y", "1..real", "(1).x", "1 .x", "x1", "a_b", "'a'"]),
        *(
            (text, False)
            for text in ["eval(x)", "f\n(x)", "[1]", "{1}", "x; y", "lambda x: x", '"']
        ),
        *((text, False) for text in ["\uff45xp", "\u00b2", "\\x", "`x`", "@", "#", ")(", "(" * 51]),
        ("1" * 1001, False),
    ],
)
def test_only_arithmetic_reaches_a_scorer(text: str, is_one: bool) -> None:
    assert is_arithmetic(text) == is_one


def test_a_worker_sees_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "hidden")

    async def ask() -> bytes:
        async with MathVerifyEnvironment([question("q", "18")], workers=1) as env:
            assert (await env.step(RIGHT))[1] == [True]
            environ = Path(f"/proc/{worker_pid(env)}/environ")
            return await asyncio.to_thread(environ.read_bytes)

    environ = asyncio.run(ask())
    assert b"PATH=" in environ
    assert b"API_KEY" not in environ


@pytest.mark.slow
def test_workers_start_only_as_many_as_are_busy_at_once() -> None:
    async def ask() -> None:
        before = children()
        async with MathVerifyEnvironment([question("q", "18")], workers=3, timeout_s=0.5) as env:
            for _ in range(5):
                await env.step(RIGHT)
            assert len(children() - before) == 1
            await env.step(("q", [SLOW] * 2))
            await env.step(("q", ["18"] * 2))
            assert len(children() - before) <= 2

    asyncio.run(ask())


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


def test_an_id_that_could_be_the_sample_of_another_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'a@0' might be a sample of .* 'a'"):
        MathVerifyEnvironment([question("a@0", "1"), question("a", "2")])


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


def test_wrong_options_and_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        MathVerifyEnvironment([], workers=0)
    with pytest.raises(ValueError, match=r"timeout_s must be positive and finite, got nan"):
        MathVerifyEnvironment([], timeout_s=float("nan"))
    with pytest.raises(ValueError, match="question id 'q' appears twice"):
        MathVerifyEnvironment([question("q", "1"), question("q", "2")])
    for answers in ("18", [18]):
        with pytest.raises(TypeError, match="the answers to 'q' must be a list of strings"):
            step(("q", answers))  # type: ignore[arg-type]
