"""Rows of data sets and lines of files become the trajectories of their messages."""

import copy
import json
import warnings

import pytest
from datasets import Dataset, Features, Json, List, Value
from tokenizers.processors import TemplateProcessing

from tests.support.chat_tokenizers import chat_tokenizer, said, sums, thought
from trajpack import Trajectory
from trajpack.agent import conversations_to_trajectories

TOKENIZER = chat_tokenizer("qwen3")
ROWS = [{"messages": sums(2)}, {"messages": sums(3), "id": 7}, {"messages": sums(1), "id": "last"}]


def trajectories_of(rows, tokenizer=TOKENIZER, **options):
    return [*conversations_to_trajectories(rows, tokenizer, **options)]


def expected_of(rows):
    names = ["row-0", "7", "last"]
    pairs = zip(rows, names, strict=True)
    return [Trajectory.from_messages(row["messages"], TOKENIZER, name) for row, name in pairs]


def test_rows_are_their_messages_one_after_the_other():
    taken = []
    found = conversations_to_trajectories((taken.append(row) or row for row in ROWS), TOKENIZER)
    first = next(found)
    assert len(taken) == 1  # a row is read when it is asked for
    assert [first, *found] == expected_of(ROWS)


def call_row(arguments, schema, **options):
    """Return a row with a call of a tool, and options of the template."""
    function = {"name": "look", "description": "Looks.", "parameters": schema}
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    chat = [said("user", "1+1?"), said("assistant", None, tool_calls=[call]), said("tool", "2")]
    options = {"chat_template_kwargs": options or {"enable_thinking": False}}
    return {
        "messages": [*chat, *sums(1, thinking=False)],
        "tools": [{"function": function}],
        **options,
    }


def test_a_row_of_arrow_gives_the_tokens_of_the_row_as_it_was_written():
    rows = [
        call_row({"at": {"places": [{"a": "b"}], "x": 1}, "city": "Oslo"}, {"city": {"type": "s"}}),
        call_row({"at": {"places": [{"c": "d"}], "y": [2]}, "ship": "Fram"}, {"ship": {"max": 3}}),
        call_row({}, {"ship": {"min": 1}}, enable_thinking=False, style="brief"),
    ]
    expected = [one.turns for one in trajectories_of(rows)]
    data_set = Dataset.from_list(rows)
    assert data_set[0]["tools"][0]["function"]["parameters"]["ship"] is None  # filled in
    for given in (data_set, data_set.to_iterable_dataset(), [*data_set]):
        kwargs = {"chat_template_kwargs": {"enable_thinking": False}}
        assert [one.turns for one in trajectories_of(given, **kwargs)] == expected


@pytest.mark.parametrize("kind", ["JSON text", "Json", "mapping"])
def test_a_null_that_was_meant_stays(kind):
    rows = [call_row({"city": None, "days": [None]}, {}), call_row({"city": "Oslo"}, {})]
    if kind == "JSON text":
        for row in rows:
            function = row["messages"][1]["tool_calls"][0]["function"]
            function["arguments"] = json.dumps(function["arguments"])
        rows = Dataset.from_list(rows)
    elif kind == "Json":
        text = Value("string")
        function = {"name": text, "arguments": Json()}
        call = {"type": text, "function": function}
        message = {"role": text, "content": text, "tool_calls": List(call)}
        features = Features(
            {"messages": List(message), "tools": Json(), "chat_template_kwargs": Json()}
        )
        rows = Dataset.from_list(rows, features=features)
    first, _ = trajectories_of(rows)
    text = TOKENIZER.decode(first.turns[0].completion_ids)
    assert '"arguments": {"city": null, "days": [null]}' in text


def test_a_file_of_lines_is_rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    assert trajectories_of(path) == trajectories_of(str(path)) == expected_of(ROWS)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[1]", r"rows.jsonl, line 2: expected a mapping, got \[1\]"),
        ('{"a": ', "rows.jsonl, line 2: not JSON"),
        ("[" * 200_000, "rows.jsonl, line 2: not JSON"),
        ('{"text": "a"}', "line 2: a row must have 'messages', or 'prompt' and 'compl.*got 'text'"),
        ('{"messages": [{"role": "user"}, 3]}', "line 2: message 1 must be a mapping"),
        ('{"prompt": "a", "completion": [3]}', "line 2: a row must have 'messages', or 'prompt'"),
        ('{"prompt": [3], "completion": [3]}', "line 2: message 0 must be a mapping with a role"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, expected):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" + line)
    with pytest.raises((ValueError, TypeError), match=expected):
        trajectories_of(path)


def test_a_bad_row_is_named():
    with pytest.raises(TypeError, match="row 1: expected a mapping, got 'messages'"):
        trajectories_of([ROWS[0], "messages"])


def test_only_the_messages_of_the_completion_are_turns():
    chat = sums(3)
    (found,) = trajectories_of([{"prompt": chat[:4], "completion": chat[4:]}])
    assert [*found.turns] == [Trajectory.from_messages(chat, TOKENIZER).turns[-1]]


@pytest.mark.parametrize("completion", ["5", "5<|im_end|>"])
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("2+3=", "<bos>2+3="), ("<bos>2+3=", "<bos>2+3="), ("<|im_start|>2+3=", "<|im_start|>2+3=")],
)
def test_texts_are_taken_as_they_are_with_one_beginning(prompt, completion, expected):
    tokenizer = copy.deepcopy(chat_tokenizer("qwen2_5"))
    begin = ("<bos>", tokenizer.bos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", pair=None, special_tokens=[begin]
    )
    (found,) = trajectories_of([{"prompt": prompt, "completion": completion}], tokenizer)
    assert tokenizer.decode(found.turns[0].prompt_ids) == expected
    assert tokenizer.decode(found.turns[0].completion_ids) == "5<|im_end|>"


def test_options_of_a_row_come_before_those_of_the_call():
    chat = {"messages": sums(1, thinking=False)}
    chat["chat_template_kwargs"] = {"enable_thinking": None}  # as a list of Arrow's rows has it
    rows = [chat, {**chat, "chat_template_kwargs": {"enable_thinking": True}}]
    with pytest.warns(UserWarning, match="an empty block of thoughts"):
        off, on = trajectories_of(rows, chat_template_kwargs={"enable_thinking": False})
    assert len(on.turns[0].completion_ids) > len(off.turns[0].completion_ids)


def test_what_is_left_out_is_counted():
    turns = Trajectory.from_messages(sums(3), TOKENIZER).turns
    room = len(turns[0].prompt_ids) + len(turns[0].completion_ids)
    long = [said("user", "1+1? " * 99), thought("1+1", "2")]
    rows = [{"messages": sums(3)}, {"messages": [said("user", "a")]}, {"messages": long}]
    expected = (
        "of 3 rows 1 have no message of the assistant with a weight other than 0; of 4 turns 3 "
        f"have more than max_tokens={room} tokens, among them all turns of 1 rows"
    )
    with pytest.warns(UserWarning, match=expected):
        (found,) = trajectories_of(rows, max_tokens=room)
    assert [*found.turns] == [turns[0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trajectories_of(ROWS, max_tokens=10_000)


def test_rows_are_read_again_unless_they_are_an_iterator():
    again = conversations_to_trajectories(ROWS, TOKENIZER)
    assert [*again] == [*again] == expected_of(ROWS)
    once = conversations_to_trajectories(iter(ROWS), TOKENIZER)
    assert [*once] == expected_of(ROWS)
    assert not [*once]
    assert iter(once) is once
