"""Agent that may call tools before it answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trajpack.agent.agents.chat_agent import ChatAgent
from trajpack.agent.agents.chat_messages import trial_text
from trajpack.agent.agents.conversation import Conversation, ConversationLimits, Exchange
from trajpack.agent.agents.tools import BEGIN, END, Tool, ToolCall, ToolCallError, tool_calls
from trajpack.agent.errors import reason_of

_GREETING = ({"role": "user", "content": "Hello"},)


class ToolAgent(ChatAgent):
    """Lets the model call tools turn by turn, until a completion has no call in it.

    A turn with calls is answered by messages of the role ``"tool"``, one for each call, and earns
    nothing. The last turn, whatever ended the conversation, is judged by the environment and earns
    what that says. Calls are written ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``.
    A call that is malformed, of no tool, with wrong arguments, too slow or that raises is answered
    with a line that says so.

    Args:
        gconfig: Sampling parameters.
        tokenizer: A Hugging Face tokenizer with a chat template, or the local folder of one.
        tools: Tools that the model may call.
        limits: Limits of each conversation; None takes the default ones.
        turn_discount: Discount from one turn to the next, stored in the trajectory.
        max_calls: Calls in one turn at most.
        own_declaration: Whether the prompts themselves declare the tools, for example in
            a system message. Otherwise the chat template must.

    Raises:
        ValueError: If two tools have one name, an option is out of range, the tokenizer leaves
            the marks of a call out of texts, or its chat template does not name each tool.

    Example:
        A tool and an agent that may use it: see ``examples/calculator.py``.
    """

    def __init__(
        self,
        gconfig: Any,
        tokenizer: Any,
        tools: Sequence[Tool],
        *,
        limits: ConversationLimits | None = None,
        turn_discount: float = 1.0,
        max_calls: int = 8,
        own_declaration: bool = False,
    ) -> None:
        super().__init__(gconfig, tokenizer, limits=limits, turn_discount=turn_discount)
        self.tools = {tool.name: tool for tool in tools}
        """Tools by name."""
        if len(self.tools) < len(tools):
            raise ValueError(f"two tools have one name: {[tool.name for tool in tools]}")
        if max_calls < 1:
            raise ValueError(f"max_calls must be at least 1, got {max_calls}")
        self._max_calls = max_calls
        hidden = {BEGIN, END} & {*getattr(self.tokenizer, "all_special_tokens", ())}
        if hidden:
            raise ValueError(
                f"the tokenizer has {' and '.join(sorted(hidden))} as special tokens, which are "
                "left out of texts: no call would ever be seen"
            )
        self._declared = None if own_declaration else self._declarations()

    def _declarations(self) -> list[dict[str, Any]]:
        """Return the tools as a chat template takes them, after checking that it shows each.

        Raises:
            ValueError: If a conversation has no form with them, or names one of them no more often
                than without them.
        """
        declared = [tool.declaration for tool in self.tools.values()]
        if not declared:
            return declared
        name = getattr(self.tokenizer, "name_or_path", "") or type(self.tokenizer).__name__
        remedy = "declare them in the prompts and say own_declaration=True"
        form = {"add_generation_prompt": True}
        try:
            with_tools = trial_text(self.tokenizer, _GREETING, tools=declared, **form)
            without = trial_text(self.tokenizer, _GREETING, tools=None, **form)
        except Exception as error:  # templates raise what they like
            raise ValueError(
                f"the chat template of {name} cannot show tools: {reason_of(error)}; {remedy}"
            ) from error
        hidden = []
        for tool in self.tools:  # a part of a longer word is no name
            word = re.compile(rf"(?<!\w){re.escape(tool)}(?!\w)")
            if len(word.findall(with_tools)) <= len(word.findall(without)):
                hidden.append(tool)
        if hidden:
            fault = "does not name all tools" if len(hidden) < len(self.tools) else "ignores tools"
            raise ValueError(
                f"the chat template of {name} {fault}: the model would not be told of "
                f"{', '.join(hidden)}; take a tokenizer whose template declares tools, or {remedy}"
            )
        return declared

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return a prompt's tokens: a chat, with the tools as the chat template declares them.

        With ``own_declaration`` it is the chat as it is.
        """
        text = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=self._declared,
            tokenize=False,
            add_generation_prompt=True,
        )
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    async def respond(self, conversation: Conversation, exchange: Exchange) -> list[int] | None:
        """Return the tools' answers to the calls in a completion; judge the last turn instead."""
        calls = tool_calls(exchange.text, max_calls=self._max_calls)
        if not calls:
            await self._judge(conversation, exchange)
            return None
        if len(conversation.exchanges) >= self.limits.max_turns:
            return []
        answers = [await self._answer(conversation, call) for call in calls]
        with conversation.guard("the tools' messages could not be encoded"):
            return self.messages.after(exchange.ids.tolist(), "tool", answers)

    async def cut_off(self, conversation: Conversation) -> None:
        """Judge the last turn, whose calls have no answers that it could read."""
        await self._judge(conversation, conversation.exchanges[-1])

    async def _judge(self, conversation: Conversation, exchange: Exchange) -> None:
        exchange.reward, _ = await conversation.judge(exchange.text)
        exchange.success = exchange.reward > 0

    async def _answer(self, conversation: Conversation, call: ToolCall | ToolCallError) -> str:
        if isinstance(call, ToolCallError):
            return f"error: {call}"
        if call.name not in self.tools:
            return f"error: there is no such tool; tools: {', '.join(self.tools)}"
        with conversation.guard("a tool failed"):
            return await self.tools[call.name].call(call.arguments)
