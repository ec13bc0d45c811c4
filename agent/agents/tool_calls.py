"""Calls of tools in the completions of models, in the forms of their chat templates."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]
"""JSON schema of each argument, by tool and argument."""

THOUGHTS = {
    "<think>": "</think>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "<|channel>": "<channel|>",
    "<|channel|>analysis<|message|>": "<|end|>",
    " to=self<|message|>": "<|eom|>",
}
"""Marks around thoughts."""
_ENDS = [*map(re.escape, ("</think>", "</seed:think>", "[/THINK]", "<channel|>"))]
"""Marks that alone end thoughts which the prompt began."""
_CLOSING = "|".join(_ENDS)
_IN_THOUGHTS = "|".join(
    rf"{re.escape(begin)}.*?(?:{re.escape(end)}|\Z)" for begin, end in THOUGHTS.items()
)
_MAX_CHARS = 16_384
"""Characters of one call at most."""
_BAR = "\uff5c"
"""Bar in tokens of DeepSeek."""
_UNREADABLE = (SyntaxError, ValueError, TypeError, MemoryError, RecursionError)


@dataclass(frozen=True)
class ToolCall:
    """One call, as the model wrote it.

    Attributes:
        name: Name of the tool; it may not exist.
        arguments: Arguments by name, not checked yet.
        id: Name that the model gave to the call, which equality leaves out; empty without one.
    """

    name: str
    arguments: Mapping[str, Any]
    id: str = field(default="", compare=False, repr=False)


class ToolCallError(ValueError):
    """Malformed call; the message is for the model to read."""


def tool_calls(
    text: str, form: str | None = None, *, schemas: Schemas | None = None, max_calls: int = 8
) -> list[ToolCall | ToolCallError]:
    r"""Return the calls in a text, in order, and an error for each that is malformed.

    What is in thoughts is no call, nor what is before the end of thoughts that the prompt began.

    Args:
        text: Text of a completion, special tokens included.
        form: Form of the calls, by a name of vLLM or SGLang for their parser of it, such as
            ``"hermes"``, ``"qwen3_coder"``, ``"llama3_json"``, ``"mistral"``, ``"deepseek_v3"``,
            ``"kimi_k2"``, ``"glm45"``, ``"openai"`` or ``"gemma4"``; None takes that whose marks
            the text has.
        schemas: Schema of each argument, by tool and argument, for forms that write text without
            quotes. An argument without one is JSON where it can be.
        max_calls: Calls at most; all further ones are one error.

    Raises:
        ValueError: If the form is unknown.

    Example:
        >>> tool_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
        [ToolCall(name='add', arguments={'a': 1})]
        >>> tool_calls("no call"), tool_calls("<tool_call>{")
        ([], [ToolCallError('the call is not closed')])
    """
    for known in FORMS if form is None else [form_of(form)]:
        if form is not None or re.search(known.sign or known.begin, text):
            calls = _calls(text, known, schemas or {})
            if len(calls) > max_calls:
                calls[max_calls:] = [ToolCallError(f"more than {max_calls} calls in one turn")]
            if calls:
                return calls
    return []


def _calls(text: str, form: Form, schemas: Schemas) -> list[ToolCall | ToolCallError]:
    calls: list[ToolCall | ToolCallError] = []
    parts = re.compile(
        rf"(?:{form.begin})(?P<body>.*?)(?P<end>{form.end}|\Z)"
        rf"|{_IN_THOUGHTS}|(?P<closing>{_CLOSING})",
        re.DOTALL,
    )
    at = 0
    while part := parts.search(text, at):
        at = part.end()
        if part["body"] is None:
            calls = calls if part["closing"] is None else []
            continue
        try:
            if part["end"] == "" and not form.may_be_open:
                raise ToolCallError("the call is not closed")
            if len(part["body"]) > _MAX_CHARS:
                raise ToolCallError(f"the call is longer than {_MAX_CHARS} characters")
            calls += form.read(part["body"], schemas)
        except ToolCallError as error:
            ends = [end.end() for end in re.finditer(_CLOSING, part["body"])]
            calls = [] if ends else [*calls, error]
            at = part.start("body") + ends[-1] if ends else at  # its mark was in thoughts
    return calls


def outside_thoughts(text: str) -> str:
    """Return a text without its thoughts."""
    marks = "|".join([*(rf"\A.*{end}" for end in _ENDS), _IN_THOUGHTS])
    return re.sub(marks, "", text, flags=re.DOTALL)


def form_of(name: str) -> Form:
    """Return a form by one of its names."""
    known = {name: form for form in FORMS for name in form.names.split()}
    if name not in known:
        raise ValueError(f"no reader of calls {name!r}; readers: {', '.join(sorted(known))}")
    return known[name]


_Reader: TypeAlias = Callable[[str, Schemas], list[ToolCall]]
"""Function of the text between the marks around a call, or around several."""


def _parsed(text: str, parse: Callable[[str], Any] = json.loads) -> Any:
    try:
        return parse(text)
    except (ValueError, RecursionError):
        raise ToolCallError("the call is not JSON") from None


def _call(value: Any, key: str = "arguments") -> ToolCall:
    """Return the call of a JSON object."""
    if not isinstance(value, dict) or value.keys() - {"id", "type"} != {"name", key}:
        raise ToolCallError(f'expected an object with "name" and "{key}"')
    name, arguments = value["name"], value[key]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ToolCallError(f'expected a string as "name" and an object as "{key}"')
    return ToolCall(name, arguments, str(value.get("id", "")))


def _llama(body: str, schemas: Schemas) -> list[ToolCall]:
    calls = []
    while body := body.strip().removeprefix(";").lstrip():
        value, end = _parsed(body, json.JSONDecoder().raw_decode)
        calls.append(_call(value, "parameters"))
        body = body[end:]
    return calls


def _named(*patterns: str, in_json: Callable[[str], str] = str) -> _Reader:
    """Return a reader of a name and JSON of arguments, by the first pattern that matches."""

    def read(body: str, schemas: Schemas) -> list[ToolCall]:
        matches = (re.fullmatch(pattern, in_json(body), re.DOTALL) for pattern in patterns)
        if (call := next(filter(None, matches), None)) is None:
            raise ToolCallError("the call has not the form that the template shows")
        arguments, id = _parsed(call["arguments"]), call.groupdict().get("id") or ""
        if not isinstance(arguments, dict) or not call["name"].strip():
            raise ToolCallError("expected a name and an object of arguments")
        return [ToolCall(call["name"].strip(), arguments, id.strip())]

    return read


def _mistral(body: str, schemas: Schemas) -> list[ToolCall]:
    if re.match(r"\s*[\[{]", body):
        calls = _parsed(body)
        return [_call(call) for call in (calls if isinstance(calls, list) else [calls])]
    name = r"\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\](?P<id>[^\[]+))?(?:\[ARGS\])?\s*"
    return _named(name + r"(?P<arguments>\{.*)")(body, schemas)


def _gemma_in_json(body: str) -> str:
    pieces = re.split(r'<\|"\|>|<escape>', body)
    pieces[1::2] = [json.dumps(string) for string in pieces[1::2]]
    for at in range(0, len(pieces), 2):  # between strings
        keyed = re.sub(r'(?<=[{,])\s*([^\s{}\[\],:"]+)\s*:', r'"\1":', pieces[at])
        pieces[at] = re.sub(r"\bNone\b", "null", keyed)
    return "".join(pieces)


def _tagged(call: str, argument: str) -> _Reader:
    """Return a reader of elements with an element for each argument, written without quotes.

    One that is no string, by its schema or an attribute, is a literal of Python or JSON if it can.
    """

    def read(body: str, schemas: Schemas) -> list[ToolCall]:
        calls = []
        for element in _only(call, body):
            name = element["name"].strip()
            values: dict[str, Any] = {}
            for part in (part.groupdict() for part in _only(argument, element["body"])):
                key, text = part["key"].strip(), part["value"]
                if part.get("is") == "=" and text[:1] == text[-1:] == "\n":
                    text = text[1:-1]  # lines of the template
                values[key] = text
                kind = schemas.get(name, {}).get(key, {}).get("type")
                for parse in (ast.literal_eval, json.loads):
                    with suppress(*_UNREADABLE):
                        if kind != "string" and part.get("string") != "true":
                            values[key] = parse(text.strip())
            calls.append(ToolCall(name, values))
        return calls

    return read


def _only(pattern: str, body: str) -> list[re.Match[str]]:
    """Return all matches in a text that has nothing else."""
    if re.sub(pattern, "", body, flags=re.DOTALL).strip():
        raise ToolCallError("the call has not the form that the template shows")
    return list(re.finditer(pattern, body, re.DOTALL))


class _JSONNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])


def _pythonic(body: str, schemas: Schemas) -> list[ToolCall]:
    for text in (body.strip(), body.strip().replace("\n", "\\n")):  # some leave lines in strings
        with suppress(*_UNREADABLE, LookupError, AttributeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes in strings
            calls: Any = ast.parse(text, mode="eval").body
            return [
                ToolCall(
                    ast.unparse(call.func),
                    {
                        word.arg: ast.literal_eval(_JSONNames().visit(word.value))
                        for word in call.keywords
                    },
                )
                for call in calls.elts
            ]
    raise ToolCallError("expected a list of calls with named arguments")


class Form(NamedTuple):
    """Form in which a family of models writes calls: patterns of marks, and what reads a call."""

    names: str
    """Names of parsers of vLLM and SGLang that read it."""
    begin: str
    end: str
    read: _Reader
    sign: str = ""
    """Pattern of a text of this form, where the first mark alone does not tell."""
    may_be_open: bool = False
    """Whether the end of the text ends a call."""


_XML = rf"<(?P<block>(?:\w+:|{_BAR}DSML{_BAR})?(?:tool_calls?|function_calls))>"
FORMS = (
    Form(
        "qwen3_coder qwen3_xml nemotron_v3 seed_oss step3p5 minimax_m2 minimax-m2"
        " deepseek_v32 deepseekv32 deepseek_v4 deepseekv4",
        _XML,
        r"</(?P=block)>",
        _tagged(
            r'<(?P<tag>[^<>\s/=]*(?:function|invoke))(?:=| name=")(?P<name>[^<>"]+)"?>'
            r"(?P<body>.*?)</(?P=tag)>",
            r'<(?P<tag>[^<>\s/=]*parameter)(?P<is>=| name=")(?P<key>[^<>"]+)"?'
            r'(?: string="(?P<string>\w+)")?>(?P<value>.*?)</(?P=tag)>',
        ),
        sign=rf"{_XML}\s*<[^<>]*(?:function=|invoke name=)",
    ),
    Form(
        "glm45 glm47 glm glm4_moe",
        "<tool_call>",
        "</tool_call>",
        _tagged(
            r"\A(?P<name>.*?)(?P<body>(?:<arg_key>.*)?)\Z",
            r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        ),
        sign=r"<tool_call>\s*[\w.:-]+\s*(?:<arg_key>|</tool_call>)",
    ),
    Form(
        "hermes qwen qwen25 qwen2_5 mimo",
        "<tool_call>",
        "</tool_call>",
        lambda body, _: [_call(_parsed(body))],
    ),
    Form("mistral", r"\[TOOL_CALLS\]", r"</s>|(?=\[TOOL_CALLS\])", _mistral, may_be_open=True),
    Form(
        "deepseek_v3 deepseekv3 deepseek_v31 deepseekv31",
        f"<{_BAR}tool▁call▁begin{_BAR}>",
        f"<{_BAR}tool▁call▁end{_BAR}>",
        _named(
            rf".*?<{_BAR}tool▁sep{_BAR}>(?P<name>.*?)\n```json\n(?P<arguments>.*)\n```\s*",
            rf"(?P<name>.*?)<{_BAR}tool▁sep{_BAR}>(?P<arguments>.*)",
        ),
    ),
    Form(
        "kimi_k2",
        r"<\|tool_call_begin\|>",
        r"<\|tool_call_end\|>",
        _named(
            r"\s*(?P<id>(?:functions\.)?(?P<name>.*?)(?::\d+)?)\s*"
            r"<\|tool_call_argument_begin\|>(?P<arguments>.*)"
        ),
    ),
    Form(
        "openai gpt-oss gpt_oss",
        r"to=functions\.(?=[^\s<]+[^{\n]*<\|message\|>)",
        r"<\|call\|>",
        _named(r"(?P<name>[^\s<]*).*?<\|message\|>(?P<arguments>.*)"),
    ),
    Form(
        "gemma4 functiongemma",
        r"<\|tool_call>|<start_function_call>",
        r"<tool_call\|>|<end_function_call>",
        _named(r"\s*(?:call:)?(?P<name>[^{]*)(?P<arguments>\{.*)", in_json=_gemma_in_json),
    ),
    Form("lfm2", r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", _pythonic),
    Form(
        "llama3_json llama3 llama4_json",
        r"(?:\A|(?<=</think>)|<\|python_tag\|>|<\|end_header_id\|>)"
        r"\s*(?=\{\s*\"(?:name|type)\")",
        r"<\|eot_id\|>|<\|eom_id\|>",
        _llama,
        may_be_open=True,
    ),
)
