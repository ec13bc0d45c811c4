"""Agent that may call tools before it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from typing import Any

from trajpack.agent.agents.chat_agent import ChatAgent
from trajpack.agent.agents.chat_messages import ChatMessages
from trajpack.agent.agents.conversation import Conversation, Exchange
from trajpack.agent.agents.tool_calls import (
    FORMS,
    ToolCall,
    ToolCallError,
    form_of,
    outside_thoughts,
    tool_calls,
)
from trajpack.agent.agents.tools import Tool
from trajpack.agent.errors import reason_of
from trajpack.packing.chat_template import unnamed_tools
from trajpack.packing.text import one_line

_GREETING = ({"role": "user", "content": "Hello"},)
_PROBES: tuple[dict[str, Any], ...] = (
    {"count": 2, "text": 'two "words", {x}\nand so on', "flag": True, "more": {"list": [0.5, "a"]}},
    {"text": "10 < 20", "count": -1, "flag": False},
)
"""Arguments of two calls that a reader must find in what the template renders of them."""


@dataclass(eq=False, repr=False)
class ToolAgent(ChatAgent):
    """Lets the model call tools turn by turn, until a completion has no call in it.

    A turn with calls is answered by messages of the role ``"tool"``, one for each call, and earns
    nothing. The last turn, whatever ended the conversation, is judged by the environment and earns
    what that says. What is in thoughts is no call. A call that is malformed, of no tool, with wrong
    arguments, too slow or that raises is answered with a line that says so. Other arguments are
    those of a `ChatAgent`.

    Attributes:
        tools: Tools that the model may call.
        max_calls: Calls in one turn at most.
        own_declaration: Whether the prompts themselves declare the tools, for example in
            a system message. Otherwise the chat template must.
        read_calls: Form of the calls, by a name of vLLM or SGLang for its parser, as
            `trajpack.agent.agents.tools.tool_calls` knows them; or a function of a completion's
            text, special tokens included and thoughts left out, that returns a list of `ToolCall`
            and `ToolCallError`. None takes the form that the chat template renders; with
            ``own_declaration``, that of Hermes if it renders none.

    Raises:
        ValueError: If two tools have one name, an option is out of range, the chat template does
            not name each tool or does not show a tool's message, or the form of its calls is not
            known, or not that of ``read_calls``.

    Example:
        See ``examples/calculator.py``.
    """

    role = None

    tools: Sequence[Tool]
    _: KW_ONLY
    max_calls: int = 8
    own_declaration: bool = False
    read_calls: str | Callable[[str], list[ToolCall | ToolCallError]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tools = {tool.name: tool for tool in self.tools}
        if len(self._tools) < len(self.tools):
            raise ValueError(f"two tools have one name: {[tool.name for tool in self.tools]}")
        if self.max_calls < 1:
            raise ValueError(f"max_calls must be at least 1, got {self.max_calls}")
        if not self.tools:
            return
        if not self.own_declaration:
            plain = self.messages
            self.messages = ChatMessages(self.tokenizer, [tool.declaration for tool in self.tools])
            self._check_declarations(plain)
        if not callable(self.read_calls):
            self.read_calls = self._form(self.read_calls)
        self.messages.check("tool")

    def _check_declarations(self, plain: ChatMessages) -> None:
        """Raise unless the chat template names each tool more often than without tools."""
        remedy = "declare them in the prompts and say own_declaration=True"
        try:
            with_tools = self.messages.text(_GREETING, is_asking=True)
        except Exception as error:  # templates raise what they like
            reason = f"the chat template cannot show tools: {reason_of(error)}; {remedy}"
            raise ValueError(reason) from error
        without = ""
        with suppress(Exception):  # some have no form without tools
            without = plain.text(_GREETING, is_asking=True)
        if hidden := unnamed_tools(self._tools, with_tools, without):
            raise ValueError(
                "the chat template ignores tools: the model would not be told of "
                f"{', '.join(hidden)}; take a tokenizer whose template declares tools, or {remedy}"
            )

    def _form(self, name: str | None) -> str:
        """Return the form of calls that the chat template renders, which must be that of a name."""
        first, said = next(iter(self._tools)), ""
        calls = [ToolCall(first, arguments) for arguments in _PROBES]
        forms = [form.names.split()[0] for form in FORMS] if name is None else [name]
        for made, said in self.messages.calling(calls):
            for form in forms:
                if tool_calls(said, form) == made:
                    return form
        if self.own_declaration or (name is not None and first not in said):
            return form_of(name or "hermes").names.split()[0]
        read = f"{name!r} does not read" if name else "no reader reads"
        raise ValueError(
            f"{read} the calls of the chat template, which writes {one_line(repr(said[-200:]))}; "
            "say read_calls= with a function that reads its calls"
        )

    async def converse(self, conversation: Conversation, observation: list[int] | None) -> None:
        """Call tools until there is no call or no turn left, and judge the last turn."""
        await super().converse(conversation, observation)
        is_cut = conversation.truncated
        await conversation.judge(conversation.exchanges[-1])
        conversation.truncated = is_cut or conversation.truncated

    async def respond(self, conversation: Conversation, exchange: Exchange) -> list[int] | None:
        """Return the tools' answers to the calls in a completion; None if there are none."""
        calls = self.calls(exchange.turn.prompt_ids, exchange.ids)
        if not calls:
            return None
        if len(conversation.exchanges) >= self.limits.max_turns:
            return []
        answers = [await self._answer(call) for call in calls]
        has_ended = False if exchange.turn.truncated else None
        ids = exchange.ids.tolist()
        return self.messages.after(ids, "tool", answers, calls=calls, has_ended=has_ended)

    def calls(self, prompt_ids: Any, completion_ids: Any) -> list[ToolCall | ToolCallError]:
        """Return the calls in a completion; its prompt may have opened thoughts."""
        text = self.messages.said(prompt_ids, completion_ids)
        if callable(self.read_calls):
            return self.read_calls(outside_thoughts(text))
        return tool_calls(
            text,
            self.read_calls,
            schemas={name: tool.parameters["properties"] for name, tool in self._tools.items()},
            max_calls=self.max_calls,
        )

    async def _answer(self, call: ToolCall | ToolCallError) -> str:
        if isinstance(call, ToolCallError):
            return f"error: {call}"
        if call.name not in self._tools:
            return f"error: there is no such tool; tools: {', '.join(self._tools)}"
        return await self._tools[call.name].call(call.arguments)
