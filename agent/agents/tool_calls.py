"""What a model asks of tools, taken from its text without trusting any of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"
"""What is around a call."""


@dataclass(frozen=True)
class ToolCall:
    """One call, as the model wrote it."""

    name: str
    """Of the tool that is meant; there may be none."""
    arguments: Mapping[str, Any]
    """By name, not checked yet."""


class ToolCallError(ValueError):
    """What is between the marks is no call; the message is for the model to read."""


def tool_calls(
    text: str, *, max_calls: int = 8, max_chars: int = 16_384
) -> list[ToolCall | ToolCallError]:
    r"""Return the calls in a text, in order, and an error for each that is malformed.

    A call is ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, as Hermes and Qwen write
    it: one JSON object with these two keys and no others.

    Args:
        text: All that the model said.
        max_calls: What comes after as many is one error.
        max_chars: Of one call's JSON at most.

    Example:
        >>> tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        [ToolCall(name='add', arguments={'a': 1})]
        >>> tool_calls("no call"), tool_calls("<tool_call>{")
        ([], [ToolCallError('the call is not closed')])
    """
    found: list[ToolCall | ToolCallError] = []
    at = text.find(BEGIN)
    while at >= 0:
        if len(found) == max_calls:
            return [*found, ToolCallError(f"more than {max_calls} calls in one turn")]
        begin = at + len(BEGIN)
        end = text.find(END, begin)
        if end < 0:
            return [*found, ToolCallError("the call is not closed")]
        if end - begin > max_chars:
            found.append(ToolCallError(f"the call is longer than {max_chars} characters"))
        else:
            found.append(_parse(text[begin:end]))
        at = text.find(BEGIN, end)
    return found


def _parse(text: str) -> ToolCall | ToolCallError:
    try:
        call = json.loads(text, **_STRICT)
    except (ValueError, RecursionError):
        return ToolCallError("the call is not JSON")
    if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
        return ToolCallError('expected an object with "name" and "arguments"')
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCallError('expected a string as "name" and an object as "arguments"')
    return ToolCall(name, arguments)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key appears twice")
    return dict(pairs)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number


_STRICT: dict[str, Any] = {
    "object_pairs_hook": _object,
    "parse_constant": _refuse,
    "parse_float": _finite,
}
