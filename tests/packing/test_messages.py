"""Turns of messages are what an engine sees and samples, whatever the chat template does."""

import json
import re

import numpy as np
import pytest
import torch

from tests.packing.isolation.tiny_models import tiny_model
from tests.packing.tree.test_tree_models import by_rows, by_tree, exact
from tests.support.chat_tokenizers import chat_tokenizer, said, sums, thought, trained
from trajpack import Trajectory, Turn, pack, pack_tree
from trajpack.packing.adapters.huggingface import LMHead

TOOL_CALL = {"name": "add", "arguments": {"a": 2, "b": 3}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
}
WITH_TOOLS = [
    said("system", "Be brief."),
    said("user", "2+3?"),
    said("assistant", "", tool_calls=[{"type": "function", "function": TOOL_CALL}]),
    said("tool", "5"),
    said("assistant", "It is 5."),
    said("user", "And 1+1?"),
    thought("one and one", "It is 2."),
]


def turns_of(messages, tokenizer, **options):
    return Trajectory.from_messages(messages, tokenizer, **options).turns


def inference_ids(tokenizer, messages, **options):
    """Tokens that an engine is given for the next message of the assistant."""
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **options
    )


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "gptoss", "llama3_1"])
@pytest.mark.parametrize("messages", [sums(3), sums(3, thinking=False), WITH_TOOLS], ids=len)
def test_prompts_are_those_of_inference_and_completions_what_the_message_adds(family, messages):
    tokenizer = chat_tokenizer(family)
    tools = [TOOL] if messages is WITH_TOOLS else None
    turns = turns_of(messages, tokenizer, tools=tools)
    places = [at for at, one in enumerate(messages) if one["role"] == "assistant"]
    assert len(turns) == len(places)
    stop = {"gptoss": r"<\|(return|call)\|>$"}.get(family, re.escape(tokenizer.eos_token) + "$")
    for at, turn in zip(places, turns, strict=True):
        assert turn.prompt_ids.tolist() == inference_ids(tokenizer, messages[:at], tools=tools)
        completion = tokenizer.decode(turn.completion_ids)
        whole = tokenizer.apply_chat_template(messages[: at + 1], tools=tools, tokenize=False)
        assert whole.rstrip("\n") == tokenizer.decode(turn.prompt_ids) + completion
        assert re.search(stop, completion)
        assert not turn.truncated
        assert turn.reward == 1.0
        assert turn.completion_logprobs.tolist() == [0.0] * len(turn.completion_ids)


@pytest.mark.parametrize(("family", "num_chains"), [("qwen3", 5), ("qwen2_5", 1)])
def test_a_prefix_that_holds_is_merged_and_one_that_breaks_is_a_chain(family, num_chains):
    trajectory = Trajectory.from_messages(sums(5), chat_tokenizer(family), "sums")
    batch = pack([trajectory])
    assert len(batch) == num_chains
    assert batch.unpack() == [trajectory]


def test_a_tree_of_stripped_thinking_grows_with_the_turns_not_with_their_square():
    tokenizer = chat_tokenizer("qwen3")
    tree, merged = {}, {}
    for num_turns in (8, 16):
        trajectory = Trajectory.from_messages(sums(num_turns), tokenizer)
        tree[num_turns] = pack_tree([trajectory]).num_nodes
        merged[num_turns] = pack([trajectory]).num_tokens
    assert tree[16] < 2.2 * tree[8]
    assert merged[16] > 3.5 * merged[8]


def test_memory_of_a_conversation_is_its_tokens_where_the_prefix_holds():
    first, *_, last = turns_of(sums(9), chat_tokenizer("qwen2_5"))
    assert np.shares_memory(first.prompt_ids, last.prompt_ids)
    assert np.shares_memory(first.completion_ids, last.prompt_ids)


@pytest.mark.parametrize("layout", ["merged", "turns", "tree"])
def test_loss_and_gradients_are_those_of_one_conversation_at_a_time(layout):
    tokenizer, model = chat_tokenizer("qwen3"), tiny_model("qwen3")
    model.resize_token_embeddings(len(tokenizer))
    model = exact(model)
    chats = [sums(3), WITH_TOOLS, sums(2, thinking=False)]
    trajectories = [Trajectory.from_messages(chat, tokenizer) for chat in chats]
    expected = -by_rows(model, trajectories).mean()
    expected.backward()
    wanted = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    if layout == "tree":
        logprobs = by_tree(model, pack_tree(trajectories), "sdpa")
    else:
        logprobs = LMHead(model).logprobs(pack(trajectories, layout=layout))
    loss = -logprobs.mean()
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.grad, wanted[name], rtol=1e-9, atol=1e-12)


def test_arguments_of_calls_may_be_json_and_keys_without_a_value_are_none():
    tokenizer = chat_tokenizer("qwen3")
    columns = ("role", "content", "tool_calls", "reasoning_content", "weight")
    filled = [{key: one.get(key) for key in columns} for one in WITH_TOOLS]
    text = {"name": "add", "arguments": json.dumps(TOOL_CALL["arguments"])}
    filled[2]["tool_calls"] = [{"type": "function", "function": text}]
    expected = turns_of(WITH_TOOLS, tokenizer, tools=[TOOL])
    assert turns_of(filled, tokenizer, tools=json.dumps([TOOL])) == expected


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


def test_chat_template_kwargs_reach_the_template():
    tokenizer = chat_tokenizer("qwen3")
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    (turn,) = turns_of(sums(1, thinking=False), tokenizer, **options)
    assert tokenizer.decode(turn.prompt_ids).endswith("<think>\n\n</think>\n\n")
    assert tokenizer.decode(turn.completion_ids) == "The sum is 2.<|im_end|>"


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
        ([said("user", "a"), said("assistant", "5<|im_end|>6")], "qwen3",
         r"message 1 \(assistant\): it holds the stop token \d+, '<\|im_end\|>', before its end"),
        ([said("user", "a"), said("assistant", "5")], "smolvlm",
         r"message 1 \(assistant\): the chat template shows nothing of its content"),
        ([said("assistant", "5")], "llama3_1", r"message 0 \(assistant\): the chat template ca"),
        ([said("user", "a"), {"content": "b"}], "qwen3", "message 1 must be a mapping with a role"),
        ([said("assistant", "b", weight="1")], "qwen3", "message 0: weight must be a number, got"),
    ],
)  # fmt: skip
def test_what_no_engine_gives_is_refused_by_its_place(messages, family, expected):
    with pytest.raises((ValueError, TypeError), match="trajectory 'conversation': " + expected):
        Trajectory.from_messages(messages, chat_tokenizer(family))


def test_tools_that_are_no_json_are_refused():
    with pytest.raises(ValueError, match="tools must be JSON where they are a text"):
        Trajectory.from_messages(sums(1), chat_tokenizer("qwen3"), tools="add")


def test_turns_are_plain_turns():
    (turn,) = turns_of([said("user", "2+3?"), said("assistant", "5")], chat_tokenizer("qwen2_5"))
    assert type(turn) is Turn
    assert turn.prompt_ids.dtype == turn.completion_ids.dtype == np.int32
