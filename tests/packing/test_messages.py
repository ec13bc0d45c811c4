"""Turns of messages are what an engine sees and samples, whatever the chat template does."""

import json
import re
import warnings
from contextlib import suppress

import numpy as np
import pytest

from tests.support.chat_tokenizers import (
    TEMPLATES,
    chat_tokenizer,
    said,
    sums,
    template_tokenizer,
    thought,
    trained,
)
from trajpack import Trajectory, pack

TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
ASKED, ANSWER = said("user", "Where is vessel Kestrel?"), said("assistant", "Anchored near Bergen.")


def calls(*arguments, content="", as_text=False):
    functions = [
        {"name": f"find_ship{at}", "arguments": json.dumps(given) if as_text else given}
        for at, given in enumerate(arguments)
    ]
    made = [
        {"id": f"call0000{at}", "type": "function", "function": one}
        for at, one in enumerate(functions)
    ]
    return said("assistant", content, tool_calls=made)


SHIP = {"ship": "Amundsen", "depth": 4321, "nested": {"list": ["Nansen", 8765]}}
CHART = said("tool", '{"harbour": "Tromso\\nquay"}', tool_call_id="call00000", name="find_ship0")
SAID = {
    "Kestrel Bergen": [ASKED, ANSWER],
    "tersely Kestrel Bergen": [said("system", "Answer tersely."), ASKED, ANSWER],
    "find_ship0 Amundsen 4321 Nansen 8765": [ASKED, calls(SHIP)],
    "Searching find_ship0 Amundsen": [ASKED, calls(SHIP, content="Searching charts.")],
    "find_ship0 4321 find_ship1 Heron": [ASKED, calls(SHIP, {"ship": "Heron"})],
    "Amundsen Tromso quay Bergen": [ASKED, calls(SHIP) | {"weight": 0}, CHART, ANSWER],
    "Amundsen harbour Vardo": [
        ASKED,
        calls(SHIP),
        CHART | {"content": {"harbour": "Vardo"}},
        ANSWER,
    ],
    "taciturn Kestrel": [said("developer", "Be taciturn."), ASKED, ANSWER],
    "Ponder Bergen": [ASKED, ANSWER | {"reasoning_content": "Ponder maps."}],
    "Ponder Kestrel": [ASKED, ANSWER | {"thinking": "Ponder maps."}],
    "Ponder vessel Bergen": [ASKED, thought("Ponder maps.", "Anchored near Bergen.")],
}
"""Conversations, with words that their last turn must have."""


def turns_of(messages, tokenizer, **options):
    return Trajectory.from_messages(messages, tokenizer, **options).turns


def inference_ids(tokenizer, messages, **options):
    """Tokens that an engine is given for the next message of the assistant."""
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **options
    )


@pytest.mark.parametrize(("family", "num_chains"), [("qwen3", 5), ("qwen2_5", 1)])
def test_a_prefix_that_holds_is_merged_and_one_that_breaks_is_a_chain(family, num_chains):
    trajectory = Trajectory.from_messages(sums(5), chat_tokenizer(family), "sums")
    batch = pack([trajectory])
    assert len(batch) == num_chains
    assert batch.unpack() == [trajectory]


def test_memory_of_a_conversation_is_its_tokens_where_the_prefix_holds():
    first, *_, last = turns_of(sums(9), chat_tokenizer("qwen2_5"))
    assert np.shares_memory(first.prompt_ids, last.prompt_ids)
    assert np.shares_memory(first.completion_ids, last.prompt_ids)


@pytest.mark.filterwarnings("ignore:from_messages")
@pytest.mark.parametrize("name", TEMPLATES)
def test_all_that_is_said_is_in_the_tokens_or_refused(name):
    tokenizer = template_tokenizer(name)
    for words, chat in SAID.items():
        asked = own = ""
        with suppress(Exception):  # templates raise what they like
            asked = tokenizer.apply_chat_template(
                chat[:-1], tokenize=False, add_generation_prompt=True
            )
            own = tokenizer.apply_chat_template(chat, tokenize=False)
        try:
            *_, turn = turns_of(chat, tokenizer)
        except ValueError:
            is_shown = all(word in own for word in words.split()) and "{'" not in own
            is_first = all(message["role"] != "assistant" for message in chat[:-1])
            assert not (is_first and is_shown and own.startswith(asked)), words
            continue
        prompt, completion = map(tokenizer.decode, (turn.prompt_ids, turn.completion_ids))
        text = prompt + completion
        assert not [word for word in words.split() if word not in text]
        assert "{'" not in text[text.index("Kestrel") :]
        if asked and own.startswith(asked):  # it is what the template itself makes of it
            assert prompt == asked
            assert own.startswith(text)


@pytest.mark.filterwarnings("ignore:from_messages")
@pytest.mark.parametrize("name", TEMPLATES)
def test_forms_of_one_conversation_give_the_same_tokens(name):
    """Parts or texts, JSON or its value, with and without the nulls of Arrow."""
    tokenizer = template_tokenizer(name)
    plain = [said("system", "Be brief."), ASKED, calls(SHIP), said("tool", "Tromso"), ANSWER]
    parts = [
        one | {"content": [{"type": "text", "text": one["content"], "image": None}]}
        for one in plain
    ]
    parts[2] = calls(SHIP, content=None, as_text=True)
    filled = [{"name": None, "tool_calls": None} | one for one in plain]
    filled[2]["tool_calls"] = calls(SHIP | {"port": None})["tool_calls"]

    def outcome(chat):
        try:
            return turns_of(chat, tokenizer)
        except ValueError:
            return None

    if (expected := outcome(plain)) is None and outcome(parts) is not None:
        assert name in {"idefics3", "llava_next", "smolvlm"}  # they show nothing but parts
        return
    assert outcome(parts) == outcome(filled) == expected


def test_a_message_without_weight_is_context_and_others_weigh_as_they_say():
    tokenizer, chat = chat_tokenizer("qwen2_5"), sums(3)
    chat[1] |= {"weight": 0}
    chat[5] |= {"weight": 0.25}
    batch = pack([Trajectory.from_messages(chat, tokenizer)])
    assert batch.turn_rewards.tolist() == [1.0, 0.25]
    assert batch.returns[batch.loss_mask].unique().tolist() == [0.25, 1.0]
    begin, end = batch.turn_spans[0].tolist()
    assert tokenizer.decode(batch.input_ids[begin:end]).endswith("The sum is 4.<|im_end|>")
    with pytest.raises(ValueError, match=r"trajectory 'c': no message of the assistant has a wei"):
        Trajectory.from_messages(chat[:2], tokenizer, "c")


def test_a_reward_is_that_of_the_last_turn():
    trajectory = Trajectory.from_messages(
        sums(3), chat_tokenizer("qwen3"), "a", group="g", reward=-2.0, turn_discount=0.5
    )
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, -2.0]
    assert (trajectory.id, trajectory.group, trajectory.turn_discount) == ("a", "g", 0.5)


def test_long_turns_are_left_out_whole():
    tokenizer = chat_tokenizer("qwen3")
    turns = turns_of(sums(3), tokenizer)
    sizes = [len(turn.prompt_ids) + len(turn.completion_ids) for turn in turns]
    assert turns_of(sums(3), tokenizer, max_tokens=sizes[1]) == turns[:2]
    with pytest.raises(ValueError, match=f"every turn has more than max_tokens={sizes[0] - 1}"):
        turns_of(sums(3), tokenizer, max_tokens=sizes[0] - 1)


def test_a_template_that_does_not_continue_its_prompt_is_named_with_the_place():
    expected = (
        r"trajectory 'c': message 3 \(assistant\): the chat template does not continue its "
        r"generation prompt: behind '.*3\?<.Assistant.>', at character (\d+), the prompt has "
        r"'<think>\\n' and the conversation '\\n\\nThe sum is 4.<.end.of.sentence.>'"
    )
    chat, tokenizer = sums(2), chat_tokenizer("deepseekv3")
    chat[1]["weight"] = 0
    with pytest.raises(ValueError, match=expected) as raised:
        Trajectory.from_messages(chat, tokenizer, "c")
    text = tokenizer.apply_chat_template(chat[:3], add_generation_prompt=True, tokenize=False)
    assert int(re.search(r"character (\d+)", str(raised.value))[1]) == text.rindex("<think>")


@pytest.mark.parametrize(
    ("family", "more", "options", "expected"),
    [
        ("qwen3", {}, {}, r"empty block of thoughts .* chat_template_kwargs=.'enable_thinking': F"),
        ("qwen3_5_think", {}, {}, "puts an empty block of thoughts"),
        ("deepseekv3", {}, {}, "opens thoughts in its generation prompt"),
        ("qwen2_5", {"mood": "grim"}, {}, "does not show the key 'mood' of messages of the role a"),
        ("qwen3", {}, OFF, None),
        ("qwen3_5_think", {}, OFF, None),
        ("qwen2_5", {"name": None, "tool_calls": []}, {}, None),
        ("qwen2_5", {"tool_calls": [{"name": "add", "arguments": ""}]}, {}, None),
        ("qwen3", {"reasoning_content": "Hm.", "reasoning": "Hm."}, {}, None),
    ],
)
def test_what_the_template_adds_or_leaves_out_is_warned_of(family, more, options, expected):
    for _ in range(2):  # also where the shape of the messages is known
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            (turn,) = turns_of([ASKED, ANSWER | more], chat_tokenizer(family), **options)
        assert [bool(re.search(expected or "", str(one.message))) for one in seen] == [True] * bool(
            expected
        )
        text = chat_tokenizer(family).decode(turn.completion_ids)
        assert text.startswith("Anchored near Bergen.") or "</think>" in text


@pytest.mark.parametrize("arguments", [{"a": 1, "b": "x"}, '{"a": 1, "b": "x"}', "{not JSON"])
def test_a_template_that_takes_arguments_as_text_is_given_a_text(arguments):
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    tokenizer = chat_tokenizer("deepseekv3")
    with pytest.warns(UserWarning, match="opens thoughts"):
        (turn,) = turns_of([ASKED, said("assistant", None, tool_calls=[call])], tokenizer)
    assert f"add\n```json\n{text}\n```" in tokenizer.decode(turn.completion_ids)


def test_a_token_over_the_end_of_the_prompt_is_never_made():
    template = "{% for m in messages %}{{ m.role + '=\n' + m.content }}<end>{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant=\n' }}{% endif %}"
    tokenizer = trained(template, "<end>", use_regex=False)
    chat = [said("user", "2+3?"), said("assistant", "\n\n5")]
    (turn,) = turns_of(chat, tokenizer)
    whole = tokenizer.apply_chat_template(chat, return_dict=False)
    assert turn.prompt_ids.tolist() == inference_ids(tokenizer, chat[:1])
    assert whole[: len(turn.prompt_ids)] != turn.prompt_ids.tolist()  # as the case is meant
    assert tokenizer.decode(turn.completion_ids) == "\n\n5<end>"


@pytest.mark.parametrize(
    ("family", "stop_token", "expected"),
    [
        ("gemma3", None, "5<end_of_turn>"),
        ("phi3", None, "5<|end|>\n<|endoftext|>"),
        ("phi3", "<|end|>", "5<|end|>"),
    ],
)
def test_a_completion_ends_with_the_token_at_which_the_engine_stops(family, stop_token, expected):
    tokenizer = chat_tokenizer(family)
    stops = stop_token and [tokenizer.convert_tokens_to_ids(stop_token)]
    chat = [said("user", "2+3?"), said("assistant", "5")]
    (turn,) = turns_of(chat, tokenizer, stop_token_ids=stops)
    assert tokenizer.decode(turn.completion_ids) == expected
    assert not turn.truncated


def test_messages_without_a_stop_token_are_truncated_and_warned_of():
    tokenizer = trained("{% for m in messages %}{{ m.content }}{% endfor %}", "<end>")
    chat = [said("user", "2+3?"), said("assistant", "5")]
    with pytest.warns(UserWarning, match="messages end without a stop token"):
        (turn,) = turns_of(chat, tokenizer)
    assert tokenizer.decode(turn.completion_ids) == "5"
    assert turn.truncated


@pytest.mark.parametrize(
    ("messages", "family", "expected"),
    [
        ([said("user", "a"), said("assistant", "5<|im_end|>6")], "qwen2_5",
         r"message 1 \(assistant\): it holds the stop token \d+, '<\|im_end\|>', before its end"),
        ([said("user", "a"), said("assistant", "5")], "smolvlm",
         r"message 1 \(assistant\): the chat template does not show the content of it"),
        ([ASKED, calls(SHIP)], "gemma3", "message 1 .*does not show the tool_calls of it"),
        ([ASKED, calls({})], "phi3", "message 1 .*does not show the tool_calls of it"),
        ([ASKED, calls(SHIP, SHIP)], "gptoss", "message 1 .*does not show the tool_calls of it"),
        ([ASKED, calls(SHIP) | {"weight": 0}, ASKED, ANSWER], "phi3",
         r"message 3 .*does not show the tool_calls of message 1 \(assistant\) before it"),
        ([ASKED, ANSWER | {"reasoning": "a"}], "llama3_1", "message 1 .*show the reasoning of it"),
        ([said("developer", "a"), ASKED, ANSWER], "qwen3",
         r"message 2 .*does not show the content of message 0 \(developer\) before it"),
        ([ASKED, calls(SHIP), said("tool", {"a": "b"}), ANSWER], "qwen2_5",
         r"message 3 .*show the content of message 2 \(tool\) before it"),
        ([said("user", [{"type": "text", "text": "a"}, {"type": "image", "url": "a"}]), ANSWER],
         "qwen3", r"message 0 \(user\): a part of its content has the type 'image', and only te"),
        ([said("user", [{"video": "a.mp4"}, "b"]), ANSWER], "qwen3", ".*has the type 'video'"),
        ([said("assistant", "5")], "llama3_1", r"message 0 \(assistant\): the chat template ca"),
        ([said("user", "a"), {"content": "b"}], "qwen3", "message 1 must be a mapping with a role"),
        ([said("assistant", "b", weight="1")], "qwen3", "message 0: weight must be a number, got"),
    ],
)  # fmt: skip
def test_what_no_engine_gives_is_refused_by_its_place(messages, family, expected):
    with pytest.raises((ValueError, TypeError), match="trajectory 'conversation': " + expected):
        Trajectory.from_messages(messages, chat_tokenizer(family))


@pytest.mark.parametrize(
    ("family", "tools", "expected"),
    [
        ("qwen3", "add", "tools must be JSON where they are a text"),
        ("gemma3", [TOOL], "the chat template does not name the tools add; give a template that"),
        ("phi3", json.dumps([TOOL]), "the chat template does not name the tools add; give a temp"),
    ],
)
def test_tools_that_are_not_declared_are_refused(family, tools, expected):
    with pytest.raises(ValueError, match=expected):
        Trajectory.from_messages([ASKED, ANSWER], chat_tokenizer(family), tools=tools, **OFF)


def test_thoughts_that_the_history_loses_are_no_fault():
    tokenizer = chat_tokenizer("gptoss")
    looked = calls({"a": "b"}, content="Ponder maps.")
    chat = [ASKED, looked, said("tool", "c"), ANSWER | {"weight": 0}, ASKED, ANSWER]
    first, last = turns_of(chat, tokenizer)
    assert "Ponder maps." in tokenizer.decode(first.completion_ids)
    assert "Ponder maps." not in tokenizer.decode(last.prompt_ids)
