from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import pytest

from tests.agent.agents.chat_cases import END, Characters, collect
from tests.support.chat_tokenizers import template_tokenizer
from trajpack.agent.agents.chat_messages import ChatMessages
from trajpack.agent.agents.conversation import ConversationLimits
from trajpack.agent.agents.tool_agent import ToolAgent
from trajpack.agent.agents.tools import Tool, ToolCall, ToolCallError, tool_calls
from trajpack.agent.models.tiny_model import build_tiny_model
from trajpack.agent.protocols import SamplingParams
from trajpack.packing.buffer.buffer import pack

NUMBERS = {"properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a"]}
NUMBER = ToolCall("add", {"a": 1})
PROMPT = f"<user>go{END}\n<assistant>"


class Judge:
    def __init__(self) -> None:
        self.answers: list[str] = []

    async def reset(self) -> None:
        return None

    async def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        _, (answer,) = action
        self.answers.append(answer)
        return None, [answer == "5"], True, False, {}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tool(function: Any, **options: Any) -> Tool:
    return Tool("add", "Adds.", NUMBERS, function, **options)


def make(*tools: Tool, **options: Any) -> ToolAgent:
    tools = tools or (tool(lambda a, b=0: a + b),)
    return ToolAgent(SamplingParams(max_new_tokens=80), Characters(), tools, **options)


def test_calls_are_answered_until_there_is_none_and_the_last_turn_is_judged() -> None:
    judge = Judge()
    first = "Let me see. " + call("add", a=2, b=3) + call("add", a=4) + END
    trajectory, prompts = collect(make(), judge, [first, f"5{END}"])
    answers = f"\n<tool>5{END}\n<tool>4{END}\n<assistant>"
    assert prompts == [PROMPT, PROMPT + first + answers]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]
    assert judge.answers == ["5"]
    batch = pack([trajectory])
    assert len(batch.seqlens) == 1  # what was sampled was never made again from text
    assert int(batch.loss_mask.sum()) == len(first) + 2


def test_a_completion_that_was_cut_off_is_closed_before_the_tool_speaks() -> None:
    first = call("add", a=2, b=3)
    _, prompts = collect(make(), Judge(), [first, f"5{END}"])
    assert prompts[1] == f"{PROMPT}{first}{END}\n<tool>5{END}\n<assistant>"


def test_the_last_turn_that_may_be_is_judged_whatever_it_says() -> None:
    judge = Judge()
    agent = make(limits=ConversationLimits(max_turns=2))
    trajectory, _ = collect(agent, judge, [call("add", a=1)] * 3)
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0]
    assert len(judge.answers) == 1


def test_no_turn_is_asked_that_might_not_fit() -> None:
    said = call("add", a=1)
    whole = len(PROMPT) + len(said) + len(f"{END}\n<tool>1{END}\n<assistant>")
    for limit, num_turns in ((whole + 1, 2), (whole, 1)):
        judge = Judge()
        agent = make(limits=ConversationLimits(max_total_tokens=limit))
        trajectory, _ = collect(agent, judge, [said, "5"])
        assert len(trajectory.turns) == num_turns
        assert trajectory.truncated is (True if num_turns == 1 else None)
        assert len(judge.answers) == 1


async def _too_slow(a: float) -> None:
    await asyncio.sleep(60)


def _ends(kind: type[BaseException]) -> Any:
    async def function(a: float) -> None:
        raise kind

    return function


def _raises(a: float) -> None:
    raise ZeroDivisionError("by nothing")


@pytest.mark.parametrize(
    ("function", "said", "answer"),
    [
        (max, call("subtract", a=1), "error: there is no such tool; tools: add"),
        (max, call("add"), "error: missing argument a"),
        (max, call("add", a="1"), "error: a must be of type number"),
        (max, call("add", a=True), "error: a must be of type number"),
        (max, call("add", a=1, c=2), "error: unknown argument; arguments: a, b"),
        (max, "<tool_call>add(1)</tool_call>", "error: the call is not JSON"),
        (_raises, call("add", a=1), "error: ZeroDivisionError: by nothing"),
        (_too_slow, call("add", a=1), "error: no answer within 0.05 s"),
        (lambda a: "x" * 99, call("add", a=1), "x" * 20 + " (cut off)"),
        (lambda a: {"sum": [a]}, call("add", a=1), '{"sum": [1]}'),
        (lambda a: object(), call("add", a=1), "error: TypeError: Obj"),
        (lambda a: f"said {END}", call("add", a=1), "said %"),
        (lambda a: next(iter(())), call("add", a=1), "error: RuntimeError: StopIteration was"),
        (lambda a: sys.exit(3), call("add", a=1), "error: RuntimeError: SystemExit was raised"),
        (lambda a: asyncio.sleep(0, "soon"), call("add", a=1), "soon"),
        (_ends(SystemExit), call("add", a=1), "error: SystemExit: "),
        (_ends(GeneratorExit), call("add", a=1), "error: GeneratorExit: "),
        (_ends(asyncio.CancelledError), call("add", a=1), "error: CancelledError: "),
        (lambda a: _ends(KeyboardInterrupt)(a=a), call("add", a=1), "error: KeyboardInterrupt: "),
    ],
)
def test_whatever_goes_wrong_is_told_to_the_model(function: Any, said: str, answer: str) -> None:
    agent = make(tool(function, timeout_s=0.05, max_chars=20 if "xx" in answer else 4096))
    _, prompts = collect(agent, Judge(), [said + END, f"5{END}"])
    assert prompts[1].removeprefix(PROMPT + said + END).startswith(f"\n<tool>{answer}")


def test_functions_that_hang_leave_the_threads_of_the_event_loop_alone() -> None:
    is_over = threading.Event()

    async def body() -> str:
        hangs = tool(lambda a: is_over.wait(), timeout_s=0.05)
        said = await asyncio.gather(*(hangs.call({"a": 1}) for _ in range(40)))
        assert set(said) == {"error: no answer within 0.05 s"}
        try:
            async with asyncio.timeout(60):
                await asyncio.to_thread(lambda: None)  # what engines and checks use
                return await tool(lambda a: "here").call({"a": 1})
        finally:
            is_over.set()

    assert asyncio.run(body()) == "here"


def test_calls_are_parsed_strictly() -> None:
    good = '{"name": "f", "arguments": {"x": [1]}}'
    parsed = tool_calls(f"a<tool_call>{good}</tool_call>b<tool_call> {good}\n</tool_call>")
    assert parsed == [ToolCall("f", {"x": [1]})] * 2
    bad = [
        "{}",
        "[]",
        '{"name": 1, "arguments": {}}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": {}, "more": 1}',
        "[" * 10_000,
        '{"name": "f", "arguments": {"x": ' + "9" * 5000 + "}}",
        good + " " * 20_000,
    ]
    for text in bad:
        (error,) = tool_calls(f"<tool_call>{text}</tool_call>")
        assert isinstance(error, ToolCallError)
    many = tool_calls(f"<tool_call>{good}</tool_call>" * 100)
    assert len(many) == 9
    assert isinstance(many[-1], ToolCallError)


WRITTEN = '{"a": 1, "b": "x"}'
CALL = ToolCall("add", {"a": 1, "b": "x"})
NAMED = f'{{"name": "add", "arguments": {WRITTEN}}}'


@pytest.mark.parametrize(
    ("form", "text", "calls"),
    [
        ("llama3", f'<|python_tag|>{{"name": "add", "parameters": {WRITTEN}}}', 1),
        ("llama3_json", f'{{"name": "add", "parameters": {WRITTEN}}};' * 2, 2),
        ("mistral", f"[TOOL_CALLS] [{NAMED}]</s>", 1),
        ("mistral", f"I add.[TOOL_CALLS]add[ARGS]{WRITTEN}[TOOL_CALLS]add{WRITTEN}", 2),
        ("mistral", f"[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{WRITTEN}</s>", 1),
        ("deepseekv31", f"<|tool▁call▁begin|>add<|tool▁sep|>{WRITTEN}<|tool▁call▁end|>", 1),
        (
            "deepseek_v3",
            "<|tool▁call▁begin|>function<|tool▁sep|>add\n```json\n"
            f"{WRITTEN}\n```<|tool▁call▁end|>" * 2,
            2,
        ),
        (
            "deepseek_v32",
            '<|DSML|function_calls><|DSML|invoke name="add">'
            '<|DSML|parameter name="a" string="false">1</|DSML|parameter>'
            '<|DSML|parameter name="b" string="true">x</|DSML|parameter>'
            "</|DSML|invoke></|DSML|function_calls>",
            1,
        ),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
            f"<|tool_call_argument_begin|>{WRITTEN}<|tool_call_end|><|tool_calls_section_end|>",
            1,
        ),
        (
            "openai",
            "<|channel|>analysis<|message|>to=functions.no<|message|>{}<|call|><|end|><|start|>"
            "assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
            f"{WRITTEN}<|call|>",
            1,
        ),
        (
            "seed_oss",
            "<seed:tool_call><function=add><parameter=a>1</parameter><parameter=b>x</parameter>"
            "</function></seed:tool_call>",
            1,
        ),
        (
            "glm47",
            "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>"
            "<arg_value>x</arg_value></tool_call>",
            1,
        ),
    ],
)
def test_calls_of_other_families_are_read(form: str, text: str, calls: int) -> None:
    if form.startswith("deepseek"):
        text = text.replace("|", "\uff5c")
    assert tool_calls(text, form) == tool_calls(text) == [CALL] * calls
    (cut, *_) = tool_calls(text[: text.rindex("1") + 1], form)
    assert isinstance(cut, ToolCallError) or calls == 2


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("<think>{7} would be wrong.</think>{1}", [1]),
        ("{7} would be wrong.</think>{1}", [1]),
        ("The form is <tool_call>.</think>Nothing.", []),
        ("<think>The form is <tool_call>.</think>{1}", [1]),
        ("{1}<think>{7}", [1]),
        ("<|channel>thought\n{7}<channel|>{1}{2}", [1, 2]),
        ("[THINK]{7}[/THINK]{1}", [1]),
    ],
)
def test_calls_in_thoughts_are_none(text: str, numbers: list[int]) -> None:
    for number in (1, 2, 7):
        text = text.replace(f"{{{number}}}", call("add", a=number))
    assert [one.arguments["a"] for one in tool_calls(text)] == numbers


def test_thoughts_that_the_prompt_opened_have_no_calls() -> None:
    agent = make()
    opened, said = [ord(c) for c in "<assistant><think>\n"], [ord(c) for c in call("add", a=1)]
    assert agent.calls(opened, said) == []
    assert agent.calls(opened, [*map(ord, "no.</think>"), *said]) == [NUMBER]
    assert agent.calls([*opened, *map(ord, "</think>")], said) == [NUMBER]


def test_a_function_may_read_the_calls() -> None:
    agent = make(read_calls=lambda text: [ToolCall("add", {"a": 4.0})] if "plus" in text else [])
    first = f"<think>I call plus.</think>two plus two{END}"
    _, prompts = collect(agent, Judge(), [first, f"5{END}"])
    assert prompts[1].endswith(f"\n<tool>4.0{END}\n<assistant>")
    trajectory, _ = collect(agent, Judge(), [f"<think>plus?</think>5{END}"])
    assert len(trajectory.turns) == 1


def test_old_thoughts_are_kept_or_dropped() -> None:
    first = f"<think>I add.</think>{call('add', a=2, b=3)}{END}"
    answers = f"\n<tool>5{END}\n<assistant>"
    for kept, said in (("keep", first), ("drop", first.partition("</think>")[2])):
        agent = make(old_thoughts=kept)
        trajectory, prompts = collect(agent, Judge(), [first, f"5{END}"])
        assert prompts[1] == PROMPT + said + answers
        assert list(trajectory.turns[1].prompt_ids) == [*map(ord, prompts[1])]
        assert len(pack([trajectory]).seqlens) == (1 if kept == "keep" else 2)


def test_a_message_has_one_end() -> None:
    ends = {"gptoss": "<|return|>", "llama3_1": "<|eom_id|>", "phi3": "<|endoftext|>"}
    for family, stop in {**ends, "glm4moe": "<|user|>", "qwen3": "<|im_end|>"}.items():
        tokenizer = template_tokenizer(family)
        tokenizer.add_special_tokens({"additional_special_tokens": [stop]})
        messages, last = ChatMessages(tokenizer), tokenizer.convert_tokens_to_ids(stop)
        whole = messages.after([], "user", ["Next?"])
        assert messages.after([5, last], "user", ["Next?"]) == whole[1:]
        assert messages.after([5], "user", ["Next?"], has_ended=True) in (whole, whole[1:])
        assert messages.after([5], "user", ["Next?"]) == whole


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function|tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = "{% for t in tools or [] %}{{ t.function.name }}\n{% endfor %}"
DEMANDS_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
)


def named(name: str) -> Tool:
    return Tool(name, "Works.", NUMBERS, max)


def with_template(template: str, *names: str, **options: Any) -> ToolAgent:
    _, tokenizer = build_tiny_model()
    tokenizer.chat_template = template
    return ToolAgent(SamplingParams(), tokenizer, [named(name) for name in names], **options)


@pytest.mark.parametrize(
    ("before", "names", "hidden"),
    [
        ("{% if tools %}You have tools, additional ones.{% endif %}", "add second", "add, second"),
        ("{% if tools %}{{ tools|length }} tools{% endif %}", "add second", "add, second"),
        ("{% if tools %}{{ tools[0]|tojson }}{% endif %}", "add second", "second"),
        ("{% for t in tools or [] %}{{ t.function.description }}{% endfor %}", "add", "add"),
        ("{{ strftime_now('%H%M%S%f') }}", "add second", "add, second"),
        ("You may add. {% if tools %}Tools: some.{% endif %}", "add", "add"),
        ("{% if messages[0].role == 'system' and tools %}{{ tools }}{% endif %}", "add", "add"),
        (DEMANDS_SYSTEM, "add second", "add, second"),
        ("", "add", "add"),
    ],
)
def test_a_template_that_does_not_name_each_tool_is_refused(
    before: str, names: str, hidden: str
) -> None:
    with pytest.raises(ValueError, match=rf"not be told of {hidden}; .* own_declaration=True$"):
        with_template(before + CHAT, *names.split())
    with_template(before + CHAT, *names.split(), own_declaration=True)


@pytest.mark.parametrize(
    "before", [NAMES, "{{ tools }}", "{{ tools|tojson }}", DEMANDS_SYSTEM + NAMES]
)
@pytest.mark.parametrize("name", ["add", "user", "a-b"])
def test_a_template_that_names_each_tool_is_taken(before: str, name: str) -> None:
    agent = with_template(before + CHAT, name, "second", "sec")
    chat = [{"role": "system", "content": "Hi."}, {"role": "user", "content": "go"}]
    text = agent.tokenizer.decode(agent.prompt_ids(chat))
    assert all(shown in text for shown in (name, "second", "sec"))


def test_prompts_may_declare_tools_themselves() -> None:
    messages = [{"role": "user", "content": "go"}]
    for agent in (make(own_declaration=True), ToolAgent(SamplingParams(), Characters(), [])):
        assert "".join(map(chr, agent.prompt_ids(messages))) == PROMPT
    assert "".join(map(chr, make().prompt_ids(messages))) == f"<tools>add{END}\n{PROMPT}"


@pytest.mark.parametrize(
    ("make_it", "error"),
    [
        (
            lambda: with_template("{% if tools %}{{ raise_exception('no') }}{% endif %}", "add"),
            "cannot show tools: TemplateError: no; .* own_declaration=True$",
        ),
        (lambda: make(read_calls="xml"), "no reader of calls 'xml'; readers: deepseek_v3, "),
        (lambda: make(read_calls="mistral"), "'mistral' does not read the calls of the chat templ"),
        (lambda: make(tool(max), tool(min)), r"two tools have one name: \['add', 'add'\]"),
        (lambda: make(old_thoughts="hide"), 'old_thoughts must be "keep" or "drop", got \'hide\''),
        (lambda: make(max_calls=0), "max_calls must be at least 1, got 0"),
        (lambda: make(turn_discount=float("nan")), "turn_discount must be finite"),
        (lambda: Tool("t", "", {}, max), "tool 't': the parameters need properties"),
        (lambda: Tool("t", "", {"properties": {"a": {}}}, max), "'a' needs a type, one of string"),
        (lambda: Tool("t", "", {"properties": {}, "required": ["b"]}, max), "no property: .'b'"),
        (lambda: tool(max, timeout_s=0), "timeout_s must be positive"),
        (lambda: ConversationLimits(max_turns=0), "max_turns must be at least 1, got 0"),
    ],
)
def test_options_out_of_range_are_refused(make_it: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        make_it()
