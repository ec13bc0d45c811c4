from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from trajpack.agent.environments.code import (
    CodeEnvironment,
    CodeProblem,
    InputCase,
    ValueCase,
    last_code_block,
)
from trajpack.agent.sandbox.launcher import canonical
from trajpack.agent.sandbox.sandbox import SandboxError, SandboxLimits

DOUBLE = CodeProblem("double", [InputCase("2\n", "4\n"), InputCase("21\n", "42")])
ADD = CodeProblem(
    "add",
    [
        ValueCase.from_assert("assert add(2, 3) == 5"),
        ValueCase.from_assert("assert add(0, 0) == 0"),
    ],
    setup="import math",
)
LIMITS = SandboxLimits(cpu_s=1, wall_s=20.0, output_bytes=1000)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


async def judge(
    problem: CodeProblem, *codes: str, **options: Any
) -> tuple[list[bool], dict[str, Any]]:
    async with CodeEnvironment([problem], limits=LIMITS, **options) as environment:
        action = (f"{problem.id}@0", [fenced(code) for code in codes])
        observation, rewards, terminated, truncated, info = await environment.step(action)
        assert (observation, terminated, truncated) == (None, True, False)
        return rewards, info


def test_a_program_is_right_that_passes_every_case() -> None:
    rewards, info = run(judge(DOUBLE, "print(int(input()) * 2)", "print(4)", "print(5)"))
    assert rewards == [True, False, False]
    assert info["fraction_passed"] == [1.0, 0.5, 0.0]
    assert info["outcomes"] == [["passed", "passed"], ["passed", "wrong"], ["wrong", "wrong"]]


def test_values_are_compared_and_prints_do_not_matter() -> None:
    right = "print('5')\ndef add(a, b):\n    return math.fsum([a, b])"
    rewards, info = run(judge(ADD, right, "def add(a, b): return print(5)", "add = 5"))
    assert rewards == [True, False, False]
    assert info["outcomes"][1:] == [["wrong", "wrong"], ["crashed", "crashed"]]


def test_limits_that_were_hit_are_named_and_the_rest_need_not_run() -> None:
    codes = ["print('4' * 9999)", "x = bytearray(1 << 40)", "1/0"]
    rewards, info = run(judge(DOUBLE, *codes, stop_at_failure=True))
    assert rewards == [False] * 3
    firsts = ["output_limit", "memory_limit", "crashed"]
    assert info["outcomes"] == [[first, "not_run"] for first in firsts]


CHEATS = [
    # says that all is well, in all the ways that tests are known to say it
    "print('PASSED')\nprint('1 passed')\nprint([True])\nimport os\nos._exit(0)",
    "import sys\nsys.stderr.write('OK')\nraise SystemExit(0)",
    # whatever is compared with it, it is equal
    "class Equal:\n    def __eq__(self, other): return True\n"
    "    def __repr__(self): return '0x3ade68b1'\ndef secret(): return Equal()",
    # looks for what is expected, in all that it can reach
    "import gc, sys\n"
    "def secret():\n"
    "    frame, seen = sys._getframe(), []\n"
    "    while frame:\n"
    "        seen += [repr(frame.f_locals), repr(frame.f_globals)]\n"
    "        frame = frame.f_back\n"
    "    seen += [repr(found) for found in gc.get_objects() if type(found) in (dict, tuple)]\n"
    "    wanted = ''.join(reversed('123456789'))\n"
    "    return int(wanted) if any(wanted in text for text in seen) else None",
    # writes to the descriptor that its value goes to, before its value does
    "import os\ndef secret():\n"
    "    for n in range(1, 64):\n        try: os.write(n, b'0x3ade68b1')\n"
    "        except OSError: pass\n    return ''",
]


@pytest.mark.parametrize("code", CHEATS)
def test_programs_that_cheat_are_wrong(code: str) -> None:
    problem = CodeProblem("secret", [ValueCase("secret()", 987654321)])
    assert run(judge(problem, code))[0] == [False]
    assert run(judge(DOUBLE, code))[0] == [False]


def test_an_answer_without_a_program_fails_every_case() -> None:
    async def ask() -> Any:
        async with CodeEnvironment([DOUBLE]) as environment:
            return await environment.step(("double", ["The answer is 4.", "```bash\nls\n```"]))

    _, rewards, _, _, info = run(ask())
    assert rewards == [False, False]
    assert info["outcomes"] == [["no_code", "no_code"]] * 2


def test_the_event_loop_goes_on_while_programs_run() -> None:
    async def ask() -> float:
        worst = 0.0
        async with CodeEnvironment([DOUBLE], workers=2) as environment:
            answers = [fenced("print(int(input()) * 2)")] * 4
            step = asyncio.ensure_future(environment.step(("double", answers)))
            while not step.done():
                began = time.thread_time()
                await asyncio.sleep(0.001)
                worst = max(worst, time.thread_time() - began)
            assert step.result()[1] == [True] * 4
        return worst

    assert min(run(ask()) for _ in range(3)) < 0.02


def test_steps_of_a_closed_environment_are_no_verdicts() -> None:
    async def ask() -> None:
        environment = CodeEnvironment([DOUBLE], workers=1)
        answer = fenced("import time; time.sleep(60)")
        steps = [asyncio.ensure_future(environment.step(("double", [answer]))) for _ in range(3)]
        await asyncio.sleep(0.1)  # one is running, or beginning to; others wait
        await environment.close()
        results = await asyncio.gather(*steps, return_exceptions=True)
        assert [type(result) for result in results] == [SandboxError] * 3
        with pytest.raises(SandboxError):
            await environment.step(("double", [fenced("print(4)")]))

    run(ask())


def test_wrong_actions_and_options_are_refused() -> None:
    async def ask(action: Any) -> None:
        async with CodeEnvironment([DOUBLE]) as environment:
            await environment.step(action)

    with pytest.raises(ValueError, match="no problem has the id 'triple@0'"):
        run(ask(("triple@0", ["x"])))
    with pytest.raises(TypeError, match="the answers to 'double@0' must be a list of strings"):
        run(ask(("double@0", "x")))
    with pytest.raises(ValueError, match="problem id 'double' appears twice"):
        CodeEnvironment([DOUBLE, DOUBLE])
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        CodeEnvironment([DOUBLE], workers=0)
    with pytest.raises(ValueError, match="problem 'empty' has no cases"):
        CodeProblem("empty", [])


def test_the_last_block_of_python_counts() -> None:
    assert last_code_block("```python\na\n```\n```py\nb\n```\n```json\n{}\n```") == "b"
    assert last_code_block("```\nfirst\n```\ntext\n```python\ncut off") == "cut off"
    assert last_code_block("```Python title=a.py\na\n```\n```bash\nb\n```") == "a"
    assert last_code_block("```text\nno\n``` \n") is None
    assert last_code_block("```python\na\n```\n```json\n{}") == "a"


@pytest.mark.parametrize(
    ("text", "expression", "value"),
    [
        ("assert f('a') == [1, (2,)]", "f('a')", [1, (2,)]),
        ("assert set(f(1)) == set((4, 5)), 'message'", "set(f(1))", {4, 5}),
        ("assert f(1) is None", "f(1)", None),
        ("assert f([1, 2], key=3)", "bool(f([1, 2], key=3))", True),
        ("assert not f(-1)", "bool(f(-1))", False),
    ],
)
def test_an_assertion_is_taken_apart(text: str, expression: str, value: Any) -> None:
    assert ValueCase.from_assert(text) == ValueCase(expression, value)


@pytest.mark.parametrize(
    "text",
    [
        "assert isclose(f(1), 2.5)",  # the answer could redefine isclose
        "assert f(1) == g(1)",
        "assert f(1) < 2",
        "assert f(1) == 1 == g(1)",
        "assert f(1) == set(1)",
        "assert x",
        "f(1) == 2",
        "assert f(",
        "",
    ],
)
def test_an_assertion_that_would_give_the_answer_away_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="from_assert: expected 'assert EXPRESSION == VALUE'"):
        ValueCase.from_assert(text)


def test_equal_values_have_equal_texts_and_others_do_not() -> None:
    values = [0, 1, 2.5, "1", "0x1", b"1", None, [], (), {}, set(), [1], [[1]], (1,), {1}, {1: 1}]
    values += [{1: 2}, {"1": 1}, {2, 1}, 1j, True, 1.0, -0.0, frozenset({1}), {2: 1, 1: 2}, "None"]
    for left in values:
        for right in values:
            assert (canonical(left) == canonical(right)) == (left == right), (left, right)
    assert canonical(10**5000) != canonical(10**5000 + 1)


@pytest.mark.parametrize(
    "value", [Decimal(3), [range(2)], {"a": (1, object())}, {Fraction(1, 2): 1}]
)
def test_expected_values_without_a_canonical_text_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"expected of 'f\(1\)' must be a number, .*, got "):
        ValueCase("f(1)", value)
    deep: list[Any] = []
    for _ in range(99):
        deep = [deep]
    assert ValueCase("f(1)", deep).is_met_by(canonical(deep).encode())
    with pytest.raises(TypeError, match="got list"):
        ValueCase("f(1)", [deep])
