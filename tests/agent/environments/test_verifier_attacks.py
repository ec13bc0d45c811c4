"""Answers that are written against the verifiers: none is run, none is right, none stays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from trajpack.agent.environments import answer_worker, math_verify
from trajpack.agent.environments.math_verify import MathVerifyEnvironment
from trajpack.agent.environments.questions import Question, reasoning_gym_questions

pytestmark = [
    pytest.mark.attack,
    pytest.mark.usefixtures("warm_judge"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # of a data set
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
SEED = 14
NO_SOLUTION = 987654321987
EVALUATING = {"countdown", "puzzle24", "simple_integration", "n_queens", "binary_matrix"}
"""Tasks whose scorers evaluate what they get."""
CONSTANTS = ["0", "1", "-1", "0.5", "10", "True", "x"]


def injections(mark: Path) -> list[str]:
    """Return expressions of Python that make a file where they are evaluated.

    The last number in them is the solution of no question.
    """
    write = f"__import__('os').system('touch {mark} #{NO_SOLUTION}')"
    return [
        write,
        f"[{write}]",
        f"1 + 0*len(str({write}))",
        f"(lambda: {write})()",
        f'eval("{write}")',
        f'exec("{write}")',
        f"{{'a': {write}}}",
        f"().__class__.__base__.__subclasses__() and {write}",
        f"open('{mark}', 'w').write('{NO_SOLUTION}')",
        f"getattr(__builtins__, 'open')('{mark}', 'w').write('{NO_SOLUTION}')",
        f"sympify(\"open('{mark}', 'w').write('{NO_SOLUTION}')\")",
        f"parse_expr(\"open('{mark}', 'w').write('{NO_SOLUTION}')\")",
        f'f"{{{write}}}"',
        f"x if {write} else y",
        f"17 or {write}",
        f"17; {write}",
        f"17\n{write}",
        f"17 #\n{write}",
    ]


def hostile_answers(mark: Path) -> list[str]:
    """Return answers to a question whose solution is 18; none of them is right."""
    expressions = [
        *("(10^9)!", "2^{10^{12}}", "9^{9^{9^{9}}}", "17 + 10^{-400}", "1" * 100_000, "0/0", "1/0"),
        *("\\infty", "-\\infty", "\\sqrt{-324}", "\\int_0^\\infty e^{-x^{x^x}} dx"),
        *("\\sum_{n=1}^{\\infty} n^{-1.01}", "\\prod_{n=1}^{10^9} n", "\\lim_{x\\to0} x^{x^{x}}"),
        *("\\frac{1}{" * 900 + "1" + "}" * 900, "(" * 5000 + "17" + ")" * 5000, "[" * 9999),
        *("\\sqrt{" * 900 + "17" + "}" * 900, "17^" * 5000 + "1", "-" * 9999 + "17"),
        *("\\left" * 3000, "\\begin{matrix}" * 999, "\\begin{pmatrix}1&" + "1&" * 9999, "{" * 9999),
        *("a" * 9999, "\\text{" * 999, "1e999999", "0x" + "f" * 9999, "1,2," * 5000, "1;" * 5000),
        *(
            "x=" * 999 + "17",
            "17=" * 999,
            "\0" * 999,
            "\u202e81",
            "\ud800",
            "\N{CIRCLED NUMBER EIGHTEEN}",
        ),
        *(
            "\\boxed{17",
            "\\input{/etc/passwd}",
            "\\write17{touch x}",
            "17" + "\\" * 9999,
            "%" * 9999,
        ),
        *("True", "None", "nan", "17 \\neq 17", "\\neg 17", "17 \\in \\emptyset"),
    ]
    boxed = [f"\\boxed{{{expression}}}" for expression in expressions]
    bare = ["$" * 100_000, "\\boxed{" * 10_000, "\\boxed{}" * 10_000, "", " " * 100_000]
    codes = injections(mark)
    return [*boxed, *bare, *codes, *(f"\\boxed{{{code}}}" for code in codes)]


def test_hostile_answers_are_wrong_and_do_not_affect_others(
    tmp_path: Path, tries: Callable[[int], int]
) -> None:
    mark = tmp_path / "mark"
    answers = hostile_answers(mark)
    assert len(answers) >= 60
    chosen = random.Random(SEED).sample(answers, tries(len(answers)))
    controls = {"18": True, "so it is $18.00$": True, "\\boxed{81}": False}

    async def ask() -> None:
        question = Question("q", ({"role": "user", "content": "?"},), ("18",))
        async with MathVerifyEnvironment([question], workers=2, timeout_s=2.0) as environment:
            for answer in chosen:
                _, successes, *_ = await environment.step(("q", [answer]))
                assert successes == [False], answer[:80]
                _, successes, *_ = await environment.step(("q", list(controls)))
                assert successes == list(controls.values()), answer[:80]

    asyncio.run(ask())
    assert not mark.exists()


def test_no_scorer_of_reasoning_gym_runs_an_answer(
    tmp_path: Path, tries: Callable[[int], int]
) -> None:
    from reasoning_gym.factory import DATASETS

    tasks = sorted(DATASETS.keys() - {"composite", *math_verify.LENIENT})
    mark = tmp_path / "mark"
    codes = injections(mark)[:6]
    hostile = [*codes, f"\\boxed{{{codes[0]}}}"]
    assert len(tasks) * len(hostile) >= 660
    chosen = {*EVALUATING, *random.Random(SEED).sample(tasks, tries(len(tasks)))}
    asked = [
        question
        for task in sorted(chosen)
        for question in reasoning_gym_questions(task, size=1, seed=1)
    ]

    async def ask() -> None:
        async with MathVerifyEnvironment(asked, workers=2, timeout_s=20) as environment:
            for question in asked:
                _, successes, *_ = await environment.step((question.id, hostile))
                assert successes == [False] * len(hostile), question.id
                own = [form for one in question.solutions for form in (one, f"\\boxed{{{one}}}")]
                _, successes, *_ = await environment.step((question.id, own))
                assert successes == [True] * len(own), question.id

    asyncio.run(ask())
    assert not mark.exists()


def test_scorers_that_give_a_wrong_number_the_full_score_are_refused(
    tries: Callable[[int], int],
) -> None:
    """A constant is right for few of a task's questions, unless most have that very answer."""
    from reasoning_gym.factory import DATASETS

    tasks = sorted(DATASETS.keys() - {"composite", *math_verify.LENIENT})
    chosen = random.Random(SEED).sample(tasks, tries(len(tasks)))
    for task in [*chosen, *math_verify.LENIENT]:
        asked = reasoning_gym_questions(task, size=6, seed=2)
        wrong = [
            (question.solutions, constant)
            for question in asked
            for constant in CONSTANTS
            if constant not in question.solutions
            and answer_worker.verdict((), (task, question.gym_entry or {}), constant)
        ]
        assert (len(wrong) >= 3) == (task in math_verify.LENIENT), (task, wrong)
