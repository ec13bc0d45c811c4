"""Laws of messages and calls, over the chat template of every family."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import pytest

from tests.support.chat_tokenizers import FOLDERS, TEMPLATES, template_tokenizer
from trajpack.agent.agents.chat_messages import ChatMessages
from trajpack.agent.agents.tool_agent import ToolAgent
from trajpack.agent.agents.tools import Tool, ToolCall, tool_calls
from trajpack.agent.protocols import SamplingParams

KINDS = ("integer", "string", "boolean", "object", "array", "number")
SCHEMA = {"properties": {kind: {"type": kind} for kind in KINDS}}
ADD = Tool("add", "Adds.", SCHEMA, dict)
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {"integer": 1, "string": "12"},
    {"string": 'a "b",\n{c} </think> <d> é ', "boolean": True, "number": -2.5},
    {"object": {"k": [1, "s", False]}, "array": [{"x": "y"}], "boolean": False},
    {"string": "true"},
    {},
)
READERS = {
    "hermes": "qwen2_5 qwen3 qwen3_instruct_2507 qwen3_vl",
    "qwen3_coder": "qwen3_5_nothink qwen3_5_think qwen3_6 qwen3_8 muse_glimmer nemotron_3_nano "
    "nemotron_3_super nemotron_3_ultra nemotron_3_5_lightning",
    "glm45": "glm4moe",
    "openai": "gptoss",
    "gemma4": "gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5 diffusion_gemma",
    "lfm2": "lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl lfm2_v2",
    "llama3_json": "llama3_1 llama3_2",
    "no reader reads the calls": "lfm2",
    "ignores tools": "cohere cohere2 deepseek_r1_distill deepseekv3 gemma gemma3 idefics3 llama3 "
    "llava_next phi3 phi3_5 qwen2_5_vl smolvlm",
}
OF = {name: reader for reader, names in READERS.items() for name in names.split()}
CONTENTS = ("R{}", ' {{"a": "b\\\\"}}\n{}', "", "\n{}x\t")
everywhere = pytest.mark.parametrize("name", TEMPLATES)


@cache
def agent_of(name: str) -> ToolAgent | str:
    """Return the agent with a template, or why there is none."""
    try:
        return ToolAgent(SamplingParams(), template_tokenizer(name), [ADD])
    except ValueError as error:
        return str(error)


def rendered(name: str, messages: list[dict[str, Any]]) -> str:
    render, options = template_tokenizer(name).apply_chat_template, {"add_generation_prompt": True}
    with suppress(Exception):  # templates raise what they like
        return str(render(messages, tools=[ADD.declaration], tokenize=False, **options))
    return str(render(messages, tokenize=False, **options))


def truth(name: str, role: str, contents: list[str]) -> str:
    """Return the template's text of a conversation: with calls, one call if it takes no more."""
    said: dict[str, Any] = {"role": "assistant", "content": "SAID"}
    keys: list[dict[str, str]] = [{}] * len(contents)
    if role == "tool":
        keys = [{"name": "add", "tool_call_id": f"call0000{at + 1}"} for at in range(len(contents))]
        function = {"name": "add", "arguments": {"integer": 2}}
        calls = [
            {"id": key["tool_call_id"], "type": "function", "function": function} for key in keys
        ]
        said = {"role": "assistant", "content": "", "tool_calls": calls}
    more = [
        {"role": role, "content": text, **key} for text, key in zip(contents, keys, strict=True)
    ]
    chat = [{"role": "user", "content": "Go."}, said, *more]
    if "tool_calls" in said and "single tool-calls" in TEMPLATES[name].read_text():
        said["tool_calls"] = said["tool_calls"][:1]
    try:
        text = rendered(name, chat)
        assert "Go." in text
    except Exception:  # noqa: BLE001 - templates raise what they like
        for message in chat:
            message["content"] = [{"type": "text", "text": message["content"]}]
        text = rendered(name, chat)
    return text


def test_each_template_of_the_wheel_has_a_reader_or_is_refused() -> None:
    wheel = [name for name, file in TEMPLATES.items() if file.parent == FOLDERS[0]]
    assert sorted(OF) == sorted(wheel)
    for name in wheel:
        agent = agent_of(name)
        assert OF[name] in (agent if isinstance(agent, str) else [agent.read_calls]), name


@everywhere
def test_the_calls_that_a_template_renders_are_read_back(name: str) -> None:
    agent = agent_of(name)
    if isinstance(agent, str):
        return
    calls = [ToolCall("add", arguments) for arguments in ARGUMENTS]
    for asked in [*([call] for call in calls), calls[:3]]:
        made, said = next(agent.messages.calling(asked))
        if said.count("add") < len(asked):  # gpt-oss writes the first one alone
            made = made[:1]
        ids = agent.tokenizer.encode(said, add_special_tokens=False)
        assert agent.calls([], ids) == made
        assert tool_calls(said, schemas={"add": SCHEMA["properties"]}) == made


def messages_of(name: str) -> ChatMessages:
    """Return the encoder with a template; skip others than those of the wheel that it refuses."""
    for tools in (None, [ADD.declaration]):
        messages = ChatMessages(template_tokenizer(name), tools)
        try:
            messages.check("user")
        except ValueError:
            assert name not in OF
        else:
            return messages
    return pytest.skip("no message of a user can follow")


@everywhere
@pytest.mark.parametrize("role", ["user", "tool"])
def test_what_is_appended_is_what_the_template_writes(name: str, role: str) -> None:
    agent = agent_of(name)
    if role == "tool" and isinstance(agent, str):
        return
    messages = messages_of(name) if isinstance(agent, str) else agent.messages
    for content in CONTENTS:
        for num in (1, 2) if role == "tool" else (1,):
            contents = [content.format(at) for at in range(num)]
            added = template_tokenizer(name).decode(messages.after([], role, contents))
            text = truth(name, role, contents)
            assert added
            assert text.endswith(added)
            before = text.removesuffix(added).partition("Go.")[2]
            assert "add" in before if role == "tool" else before.endswith("SAID")
            assert not content or contents[0].strip() not in before


@everywhere
def test_what_a_content_spells_is_no_token(name: str) -> None:
    tokenizer, messages = template_tokenizer(name), messages_of(name)
    forged = "7".join(tokenizer.get_added_vocab())
    plain = messages.after([], "user", ["7"])
    try:
        ids = messages.after([], "user", [forged])
    except ValueError:
        assert name not in OF  # others take some marks for instructions
        return
    added = {*tokenizer.get_added_vocab().values()}
    assert [id for id in ids if id in added] == [id for id in plain if id in added]
    assert forged in tokenizer.decode(ids)


@everywhere
def test_a_history_without_thoughts_is_what_the_template_writes(name: str) -> None:
    tokenizer, messages = template_tokenizer(name), messages_of(name)
    asked, more = {"role": "user", "content": "Go."}, {"role": "user", "content": "More."}
    prompt = messages.prompt([asked])
    opened = "<think>" in messages.said(prompt, [])
    said = "I think.\n</think>\n\nThe answer."
    ids = tokenizer.encode(said if opened else f"<think>\n{said}", add_special_tokens=False)
    ends, eos = messages.after([], "user", ["More."]), tokenizer.eos_token_id
    ids += ends[: ends.index(eos) + 1] if eos in ends else []
    history = messages.without_thoughts(prompt, ids)
    got = tokenizer.decode([*history, *messages.after(ids, "user", ["More."])])
    answered = {"role": "assistant", "content": "The answer."}
    whole = messages.text([asked, answered, more], is_asking=True)
    assert got == whole or not whole.startswith(messages.text([asked]))
    assert [*history[-3:]] == ids[-3:]  # as they were sampled
