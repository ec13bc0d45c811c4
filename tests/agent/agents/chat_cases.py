"""A tokenizer of characters with a chat template, and an engine that says what it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from trajpack.agent.protocols import GenerationOutput, Prompt
from trajpack.packing.types import Trajectory

END = "\u25a0"
"""The special token that ends a message."""


class Characters:
    """Its tokens are characters; one of them, when it is written out as text, is told apart."""

    def apply_chat_template(
        self,
        messages: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        **_: Any,
    ) -> str:
        assert not tokenize
        names = " ".join(tool["function"]["name"] for tool in tools or ())
        text = "" if tools is None else f"<tools>{names}{END}\n"
        text += "".join(f"<{m['role']}>{m['content']}{END}\n" for m in messages)
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
    """An engine of one episode that says one text after the other, or a reply that differs."""

    def __init__(self, texts: Iterable[str | dict[str, Any]]) -> None:
        self.texts = list(texts)
        self.prompts: list[str] = []
        self.obs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.act_queue: asyncio.Queue[Any] = asyncio.Queue()

    async def serve(self) -> None:
        for text in self.texts:
            qid, ids, _ = await self.obs_queue.get()
            self.prompts.append("".join(map(chr, ids)))
            changes = text if isinstance(text, dict) else {}
            said = [ord(c) for c in (END if changes else text)]
            no_eos = not said or chr(said[-1]) != END
            reply = GenerationOutput(qid, ids, said, [-0.5] * len(said), no_eos, 0, 0)
            await self.act_queue.put(replace(reply, **changes))


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
    server = asyncio.ensure_future(script.serve())
    try:
        (trajectory,) = await agent.collect_trajectory(
            prompt or Prompt("q@0", [ord(c) for c in f"<user>go{END}\n<assistant>"]),
            env,
            script.obs_queue,
            script.act_queue,
        )
    finally:
        server.cancel()
    return trajectory, script.prompts


class SaysAlways:
    """An engine that says the same in every turn of every episode."""

    version = 0

    def __init__(self, text: str) -> None:
        self.said = [ord(c) for c in text]
        self.obs_queue: asyncio.Queue[Any] = asyncio.Queue()
        self.replies: dict[str, asyncio.Queue[Any]] = {}

    def open_episode(self, qid: str) -> asyncio.Queue[Any]:
        return self.replies.setdefault(qid, asyncio.Queue())

    def close_episode(self, qid: str) -> None:
        self.replies.pop(qid, None)

    async def __aenter__(self) -> SaysAlways:
        self.task = asyncio.create_task(self.serve())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})

    async def serve(self) -> None:
        while True:
            qid, ids, _ = await self.obs_queue.get()
            if qid in self.replies:
                logprobs = [-0.5] * len(self.said)
                reply = GenerationOutput(qid, ids, self.said, logprobs, False, 0, 0)
                self.replies[qid].put_nowait(reply)
