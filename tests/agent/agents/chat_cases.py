"""A tokenizer of characters with a chat template, and an engine that says what it is told to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from trajpack.agent.protocols import GenerationOutput, GenerationRequest, Prompt
from trajpack.agent.runner.replies import checked_prompt, turn_of
from trajpack.packing.types import Trajectory, Turn

END = "\u25a0"
"""The special token that ends a message."""


class Characters:
    """Its tokens are characters; one of them, when it is written out as text, is told apart."""

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        **_: Any,
    ) -> str:
        assert not tokenize
        names = " ".join(tool["function"]["name"] for tool in tools or ())
        text = "" if tools is None else f"<tools>{names}{END}\n"
        for m in messages:
            calls = [call["function"] for call in m.get("tool_calls", ())]
            written = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
            text += f"<{m['role']}>{m['content']}{written}{END}\n"
        return text + "<assistant>" * add_generation_prompt

    def get_added_vocab(self) -> dict[str, int]:
        return {END: ord(END)}

    def encode(
        self, text: str, *, add_special_tokens: bool, split_special_tokens: bool = False
    ) -> list[int]:
        assert not add_special_tokens
        return [ord("%") if c == END and split_special_tokens else ord(c) for c in text]

    def decode(
        self, ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        assert not clean_up_tokenization_spaces
        text = "".join(map(chr, ids))
        return text.replace(END, "") if skip_special_tokens else text


class Script:
    """An engine of one episode that says one text after the other, and then nothing.

    In place of a text it takes an error to raise, or values of the reply that differ.
    """

    def __init__(self, texts: Iterable[Any]) -> None:
        self.texts = list(texts)
        self.prompts: list[str] = []
        self.samplings: list[Any] = []

    async def __call__(self, token_ids: Any, sampling: Any = None) -> Turn:
        self.prompts.append("".join(map(chr, token_ids)))
        self.samplings.append(sampling)
        if not self.texts:
            await asyncio.Event().wait()
        text = self.texts.pop(0)
        if isinstance(text, Exception):
            raise text
        changes = text if isinstance(text, dict) else {}
        said = [ord(c) for c in (END if changes else text)]
        no_eos = not said or chr(said[-1]) != END
        ids = checked_prompt("q@0", token_ids)
        reply = GenerationOutput("q@0", ids, said, [-0.5] * len(said), no_eos, 0, 0)
        return turn_of("q@0", ids, replace(reply, **changes))


def collect(
    agent: Any, env: Any, texts: Iterable[Any], *, prompt: Prompt | None = None
) -> tuple[Trajectory, list[str]]:
    """Run one episode; return its trajectory and the prompts that the engine saw."""
    return asyncio.run(collect_async(agent, env, texts, prompt=prompt))


async def collect_async(
    agent: Any,
    env: Any,
    texts: Iterable[Any],
    *,
    prompt: Prompt | None = None,
) -> tuple[Trajectory, list[str]]:
    script = Script(texts)
    prompt = prompt or Prompt("q@0", [ord(c) for c in f"<user>go{END}\n<assistant>"])
    (trajectory,) = await agent.run(prompt, env, script)
    return trajectory, script.prompts


class SaysAlways:
    """An engine that says the same in every turn of every episode."""

    version = 0

    def __init__(self, text: str) -> None:
        self.said = [ord(c) for c in text]

    async def __aenter__(self) -> SaysAlways:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return None

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        qid, ids, _ = request
        return GenerationOutput(qid, ids, self.said, [-0.5] * len(self.said), False, 0, 0)
