"""What others wrote reaches the log as one harmless line, or not at all."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from trajpack.agent.agents.math_multi_turn import MathMultiTurnAgent
from trajpack.agent.protocols import Prompt, SamplingParams
from trajpack.packing.text import one_line
from trajpack.packing.types import Turn

ROOT = Path(__file__).parents[3]
HOSTILE = (
    "x\r\n2026-01-01 ERROR forged\x1b[2J\x00\u2028\u202e\ud800{0.__class__}%s%(a)s" + "y" * 9000
)
LEVELS = {"debug", "info", "warning", "error", "critical", "exception", "log"}


def is_harmless(line: str) -> bool:
    return line.isprintable() and len(line) < 2000


class Mute(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def test_a_line_is_plain_text_cut_between_escapes() -> None:
    shown = one_line(HOSTILE)
    assert is_harmless(shown)
    assert shown.startswith("x\\r\\n2026-01-01 ERROR forged\\x1b[2J\\x00\\u2028\\u202e\\ud800{0.")
    for text in ("Größe 数 🙂: fine", "a" * 300):
        assert one_line(text) == text
    assert one_line("\n\n\n", max_chars=2) == "\\n\\n... (1 more characters)"
    assert one_line(Mute()) == "<Mute without a text>"
    assert one_line(ValueError("a\nb")) == "a\\nb"


class HostileTokenizer:
    """Decodes answers as they are judged, and then fails with what the model said."""

    num_decoded = 0

    def decode(self, ids: list[int], **options: Any) -> str:
        self.num_decoded += 1
        if self.num_decoded > 1:
            raise ValueError(HOSTILE)
        return HOSTILE

    def apply_chat_template(self, *args: Any, **options: Any) -> str:
        return ""

    def encode(self, *args: Any, **options: Any) -> list[int]:
        return [1]


class Right:
    async def reset(self) -> None:
        return None

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        return None, [1.0], True, False, {}


def test_an_answer_that_cannot_be_logged_forges_no_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agent = MathMultiTurnAgent(
        gconfig=SamplingParams(),
        tokenizer=HostileTokenizer(),
        answer_save_path=str(tmp_path),
        num_turns=1,
    )

    async def body() -> None:
        async def generate(token_ids: Any, sampling: Any = None) -> Turn:
            return Turn([1], [2], [-1.0])

        await agent.run(Prompt("q\n@0", [1]), Right(), generate)

    asyncio.run(body())
    (record,) = caplog.records
    assert is_harmless(record.getMessage())
    assert record.getMessage().startswith("episode 'q\\n@0': its answers were not logged: x\\r\\n")
    assert record.exc_info is None


def log_calls() -> list[Any]:
    return [
        pytest.param(call, id=f"{path.relative_to(ROOT)}:{call.lineno}")
        for path in sorted((ROOT / "agent").rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in LEVELS
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id in {"logger", "_logger", "logging"}
    ]


@pytest.mark.parametrize("call", log_calls())
def test_every_log_call_has_a_fixed_format_escaped_texts_and_no_traceback(call: ast.Call) -> None:
    template = call.args[0]
    assert isinstance(template, ast.Constant), "the format must be a literal"
    assert isinstance(template.value, str)
    assert isinstance(call.func, ast.Attribute)
    assert call.func.attr != "exception", "a traceback quotes its error unescaped"
    assert not [word for word in call.keywords if word.arg in {"exc_info", "stack_info"}]
    kinds = re.findall(r"%[-#0 +.\d]*([a-zA-Z])", template.value)
    for kind, argument in zip(kinds, call.args[1:], strict=True):
        if kind == "s":
            assert ast.unparse(argument).startswith("one_line("), ast.unparse(argument)
