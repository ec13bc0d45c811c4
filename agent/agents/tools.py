"""Tools: functions that a model may call."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from trajpack.agent.agents.tool_calls import ToolCall, ToolCallError, tool_calls
from trajpack.agent.blocking_work import contained
from trajpack.agent.errors import reason_of
from trajpack.packing.representation import brief_repr

__all__ = ["Tool", "ToolCall", "ToolCallError", "tool_calls"]

_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True)
class Tool:
    """Function that a model may call, and its declaration.

    Attributes:
        name: Name in a call.
        description: Description for the model.
        parameters: JSON schema of the arguments: ``properties``, each with a ``type``, and which of
            them are ``required``. Nothing deeper is checked; other arguments are refused.
        function: Function of the arguments, by name. A coroutine function runs on the event loop;
            any other in one of 64 threads that all tools share, which cannot be stopped: it must
            end by itself.
        timeout_s: Seconds to wait for the function at most, and for a thread too.
        max_chars: Characters of its answer at most; the rest is cut off.

    Raises:
        ValueError: If the schema is not that of an object or uses an unknown type, or if a limit is
            not positive.
        TypeError: If the function cannot be called.

    Example:
        >>> schema = {"properties": {"text": {"type": "string"}}, "required": ["text"]}
        >>> tool = Tool("length", "Counts characters.", schema, lambda text: len(text))
        >>> asyncio.run(tool.call({"text": "four"})), asyncio.run(tool.call({"text": 4}))
        ('4', 'error: text must be of type string')
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any]
    timeout_s: float = 10.0
    max_chars: int = 4096

    __repr__ = brief_repr

    def __post_init__(self) -> None:
        if not callable(self.function):
            kind = type(self.function).__name__
            raise TypeError(f"tool {self.name!r}: expected a function, got {kind}")
        properties = self.parameters.get("properties")
        if not isinstance(properties, Mapping):
            raise ValueError(f"tool {self.name!r}: the parameters need properties")
        for name, schema in properties.items():
            if schema.get("type") not in _TYPES:
                known = ", ".join(_TYPES)
                raise ValueError(f"tool {self.name!r}: {name!r} needs a type, one of {known}")
        unknown = set(self.parameters.get("required", ())) - properties.keys()
        if unknown:
            raise ValueError(f"tool {self.name!r}: required, but no property: {sorted(unknown)}")
        for name in ("timeout_s", "max_chars"):
            if not getattr(self, name) > 0:
                raise ValueError(f"tool {self.name!r}: {name} must be positive")

    @property
    def declaration(self) -> dict[str, Any]:
        """Declaration in the form of chat templates."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": {"type": "object", **self.parameters},
        }
        return {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Call the function and return its answer, or a line that says why there is none.

        Text is returned as it is, any other value as JSON. A failure is a text that
        begins with ``error:``, for the model to read.
        """
        if problem := self._problem(arguments):
            return f"error: {problem}"
        try:
            async with asyncio.timeout(self.timeout_s):
                text = await self._answer(arguments)
        except TimeoutError:
            text = f"error: no answer within {self.timeout_s:g} s"
        except BaseException as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            text = f"error: {reason_of(error)}"
        if len(text) > self.max_chars:
            text = f"{text[: self.max_chars]} (cut off)"
        return text.encode("utf-8", "replace").decode()

    async def _answer(self, arguments: Mapping[str, Any]) -> str:
        if inspect.iscoroutinefunction(self.function):
            answer = self.function(**arguments)
        else:
            work = contained(functools.partial(self.function, **arguments))
            run = contextvars.copy_context().run
            answer = await asyncio.get_running_loop().run_in_executor(_threads(), run, work)
        if inspect.isawaitable(answer):
            answer = await answer
        return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)

    def _problem(self, arguments: Mapping[str, Any]) -> str:
        properties = self.parameters["properties"]
        for name in self.parameters.get("required", ()):
            if name not in arguments:
                return f"missing argument {name}"
        for name, value in arguments.items():
            if name not in properties:
                return f"unknown argument; arguments: {', '.join(properties)}"
            kind = properties[name]["type"]
            is_bool = isinstance(value, bool)
            if is_bool != (kind == "boolean") or not isinstance(value, _TYPES[kind]):
                return f"{name} must be of type {kind}"
        return ""


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return threads of all tools: functions that hang keep them, and engines have others."""
    return ThreadPoolExecutor(64, thread_name_prefix="trajpack-tool")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_threads.cache_clear)  # a forked process has no threads
