from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from typing import Any

import pytest

from trajpack.agent.environments.code import (
    CodeEnvironment,
    CodeProblem,
    last_code_block,
)
from trajpack.agent.errors import SetupError

DOUBLE = CodeProblem("double", [("2\n", "4\n"), ("21\n", "42")])
ADD = CodeProblem(
    "add",
    [("2 3", "5"), ("0 0", "0")],
    setup="import math",
    call="print(int(add(*map(int, input().split()))))",
)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


def fenced(code: str) -> str:
    return f"Here it is:\n```python\n{code}\n```\nDone."


async def run_plainly(program: str, stdin: str) -> tuple[str, str]:
    """Run one of our own programs, with our own rights."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *("python3", "-I", "-c", program), stdin=pipe, stdout=pipe, stderr=pipe
    )
    output, _ = await process.communicate(stdin.encode())
    return "crashed" if process.returncode else "exited", output.decode()


async def judge(
    problem: CodeProblem, *codes: str, **options: Any
) -> tuple[list[bool], dict[str, Any]]:
    options = {"run_program": run_plainly} | options
    async with CodeEnvironment([problem], **options) as environment:
        action = (f"{problem.id}@0", [fenced(code) for code in codes])
        observation, rewards, terminated, truncated, info = await environment.step(action)
        assert (observation, terminated, truncated) == (None, True, False)
        return rewards, info


def test_a_program_is_right_that_passes_every_case() -> None:
    rewards, info = run(judge(DOUBLE, "print(int(input()) * 2)", "print(4)", "print(5)"))
    assert rewards == [True, False, False]
    assert info["fraction_passed"] == [1.0, 0.5, 0.0]
    assert info["outcomes"] == [["passed", "passed"], ["passed", "wrong"], ["wrong", "wrong"]]


def test_a_function_is_called_after_the_answer() -> None:
    right = "def add(a, b): return math.fsum([a, b])"
    rewards, info = run(judge(ADD, right, "def add(a, b): return 5", "add = 5"))
    assert rewards == [True, False, False]
    assert info["outcomes"][1:] == [["passed", "wrong"], ["crashed", "crashed"]]


CHEATS = [
    # says that all is well, in all the ways that tests are known to say it
    "print('PASSED')\nprint('1 passed')\nprint([True])\nimport os\nos._exit(0)",
    "import sys\nsys.stderr.write('OK')\nraise SystemExit(0)",
    # looks for what is expected, in all that it can reach
    "import gc, sys\n"
    "def secret():\n"
    "    frame, seen = sys._getframe(), sys.orig_argv\n"
    "    while frame:\n"
    "        seen += [repr(frame.f_locals), repr(frame.f_globals)]\n"
    "        frame = frame.f_back\n"
    "    seen += [repr(found) for found in gc.get_objects() if type(found) in (dict, tuple)]\n"
    "    wanted = ''.join(reversed('123456789'))\n"
    "    return int(wanted) if any(wanted in text for text in seen) else None",
    # keeps what calls it from printing
    "import builtins\nsecret = builtins.print = lambda *x: None",
]


@pytest.mark.parametrize("code", CHEATS)
def test_programs_that_cheat_are_wrong(code: str) -> None:
    problem = CodeProblem("secret", [("", "987654321")], call="print(secret())")
    assert run(judge(problem, code))[0] == [False]
    assert run(judge(DOUBLE, code))[0] == [False]


def test_programs_run_in_bubblewrap_unless_told_otherwise() -> None:
    if shutil.which("bwrap") is None:
        with pytest.raises(SetupError, match="pass a function of yours, run_program"):
            CodeEnvironment([DOUBLE])
        return
    try:
        environment = CodeEnvironment([ADD, DOUBLE])
    except SetupError as error:
        pytest.skip(str(error))
    answers = [fenced("def add(a, b): return a + b"), fenced("x = bytearray(1 << 40)"), "4"]
    _, rewards, _, _, info = run(environment.step(("add", answers)))
    assert rewards == [True, False, False]
    assert info["outcomes"][1:] == [["memory_limit"] * 2, ["no_code"] * 2]
    assert run(environment.step(("double", [fenced("print(int(input()) * 2)")])))[1] == [True]


def test_no_more_programs_run_at_once_than_there_are_workers() -> None:
    running, most = 0, 0

    async def count(program: str, stdin: str) -> tuple[str, str]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return "exited", "4"

    problem = CodeProblem("four", [("", "4")] * 9)
    assert run(judge(problem, "print(4)", run_program=count, workers=3))[0] == [True]
    assert most == 3


def test_a_cancelled_step_cancels_its_programs() -> None:
    async def ask() -> int:
        begun, ended = asyncio.Event(), 0

        async def sleep(program: str, stdin: str) -> tuple[str, str]:
            nonlocal ended
            begun.set()
            try:
                await asyncio.sleep(999)
            finally:
                ended += 1
            raise AssertionError

        environment = CodeEnvironment([DOUBLE], run_program=sleep, workers=2)
        step = asyncio.ensure_future(environment.step(("double", [fenced("")])))
        await begun.wait()
        await asyncio.sleep(0)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        return ended

    assert run(ask()) == 2


@pytest.mark.parametrize(
    ("result", "words"),
    [(OSError(24, "Too many open files"), "Too many open"), (None, "NoneType"), (("x",), "values")],
)
def test_programs_that_were_not_run_are_no_verdicts(result: Any, words: str) -> None:
    async def fail(program: str, stdin: str) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    with pytest.raises(RuntimeError, match=f"step: a program was not run: .*{words}"):
        run(judge(DOUBLE, "print(4)", run_program=fail))


def make(*problems: CodeProblem, **options: Any) -> CodeEnvironment:
    return CodeEnvironment(problems, run_program=run_plainly, **options)


def step(*action: Any) -> Any:
    return lambda: run(make(DOUBLE).step(action))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (step("triple@0", ["x"]), ValueError, "no problem has the id 'triple@0'"),
        (step("double@0", "x"), TypeError, "answers to 'double@0' must be a list of strings"),
        (lambda: make(DOUBLE, DOUBLE), ValueError, "problem id 'double' appears twice"),
        (lambda: make(DOUBLE, workers=0), ValueError, "workers must be at least 1, got 0"),
        (lambda: CodeProblem("empty", []), ValueError, "problem 'empty' has no cases"),
    ],
)
def test_wrong_actions_and_options_are_refused(
    call: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()


def test_the_last_block_of_python_counts() -> None:
    assert last_code_block("```python\na\n```\n```py\nb\n```\n```json\n{}\n```") == "b"
    assert last_code_block("```\nfirst\n```\ntext\n```python\ncut off") == "cut off"
    assert last_code_block("```Python title=a.py\na\n```\n```bash\nb\n```") == "a"
    assert last_code_block("```text\nno\n``` \n") is None
    assert last_code_block("```python\na\n```\n```json\n{}") == "a"
