"""Calls of tools in the completions of models, in the forms of their chat templates."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of each argument, by tool and argument."""

THOUGHTS = (
    *(("", end) for end in ("</think>", "</seed:think>", "[/THINK]", "<channel|>")),
    ("<think>", "</think>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
    (" to=self<|message|>", "<|eom|>"),
)
"""Marks around thoughts. A second one alone ends thoughts that the prompt began."""
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
    text: str,
    form: str | None = None,
    *,
    schemas: Schemas | None = None,
    thoughts: Sequence[tuple[str, str]] = THOUGHTS,
    max_calls: int = 8,
    max_chars: int = 16_384,
) -> list[ToolCall | ToolCallError]:
    r"""Return the calls in a text, in order, and an error for each that is malformed.

    Args:
        text: Text of a completion, special tokens included.
        form: Form of the calls, by a name of vLLM or SGLang for their parser of it, such as
            ``"hermes"``, ``"qwen3_coder"``, ``"llama3_json"``, ``"mistral"``, ``"deepseek_v3"``,
            ``"kimi_k2"``, ``"glm45"``, ``"openai"`` or ``"gemma4"``; None takes that whose marks
            the text has.
        schemas: Schema of each argument, by tool and argument, for forms that write text without
            quotes. An argument without one is JSON where it can be.
        thoughts: Marks around thoughts, in which nothing is a call. An empty first mark and
            a second one: all that is before the last such mark.
        max_calls: Calls at most; all further ones are one error.
        max_chars: Characters of one call at most.

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
            calls = _calls(text, known, schemas or {}, thoughts, max_chars)
            if len(calls) > max_calls:
                calls[max_calls:] = [ToolCallError(f"more than {max_calls} calls in one turn")]
            if calls:
                return calls
    return []


def _calls(
    text: str,
    form: Form,
    schemas: Schemas,
    thoughts: Sequence[tuple[str, str]],
    max_chars: int,
) -> list[ToolCall | ToolCallError]:
    calls: list[ToolCall | ToolCallError] = []
    closing = "|".join(re.escape(end) for begin, end in thoughts if not begin) or "(?!)"
    parts = re.compile(
        rf"(?:{form.begin})(?P<body>.*?)(?P<end>{form.end}|\Z)"
        rf"|{_thoughts(thoughts)}|(?P<closing>{closing})",
        re.DOTALL,
    )
    at = 0
    while found := parts.search(text, at):
        at = found.end()
        if found["body"] is None:
            calls = calls if found["closing"] is None else []
            continue
        try:
            if found["end"] == "" and not form.may_be_open:
                raise ToolCallError("the call is not closed")
            if len(found["body"]) > max_chars:
                raise ToolCallError(f"the call is longer than {max_chars} characters")
            calls += form.read(found["body"], schemas)
        except ToolCallError as error:
            ends = [one.end() for one in re.finditer(closing, found["body"])]
            calls = [] if ends else [*calls, error]
            at = found.start("body") + ends[-1] if ends else at  # its mark was in thoughts
    return calls


def outside_thoughts(text: str, thoughts: Sequence[tuple[str, str]] = THOUGHTS) -> str:
    """Return a text without its thoughts, whose marks are as `tool_calls` takes them."""
    before = [rf"\A.*{re.escape(end)}" for begin, end in thoughts if not begin]
    return re.sub("|".join([*before, _thoughts(thoughts)]), "", text, flags=re.DOTALL)


def _thoughts(thoughts: Sequence[tuple[str, str]]) -> str:
    pairs = [(re.escape(begin), re.escape(end)) for begin, end in thoughts if begin]
    return "|".join(rf"{begin}.*?(?:{end}|\Z)" for begin, end in pairs) or "(?!)"


def form_of(name: str) -> Form:
    """Return a form by one of its names."""
    known = {name: form for form in FORMS for name in form.names.split()}
    if name not in known:
        raise ValueError(f"no reader of calls {name!r}; readers: {', '.join(sorted(known))}")
    return known[name]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise ToolCallError("the call is not JSON") from None


def _named(name: str, text: str, id: str = "") -> list[ToolCall]:
    """Return the call of a name and the JSON text of its arguments."""
    arguments = _parsed(text)
    if not isinstance(arguments, dict) or not name.strip():
        raise ToolCallError("expected a name and an object of arguments")
    return [ToolCall(name.strip(), arguments, id.strip())]


def _call(value: Any, key: str = "arguments") -> ToolCall:
    """Return the call of a JSON object."""
    if not isinstance(value, dict) or value.keys() - {"id", "type"} != {"name", key}:
        raise ToolCallError(f'expected an object with "name" and "{key}"')
    name, arguments = value["name"], value[key]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ToolCallError(f'expected a string as "name" and an object as "{key}"')
    return ToolCall(name, arguments, str(value.get("id", "")))


def _hermes(body: str, schemas: Schemas) -> list[ToolCall]:
    return [_call(_parsed(body))]


def _llama(body: str, schemas: Schemas) -> list[ToolCall]:
    calls = []
    while body := body.strip().removeprefix(";").lstrip():
        try:
            value, end = json.JSONDecoder().raw_decode(body)
        except (ValueError, RecursionError):
            raise ToolCallError("the call is not JSON") from None
        calls.append(_call(value, "parameters"))
        body = body[end:]
    return calls


def _mistral(body: str, schemas: Schemas) -> list[ToolCall]:
    named = re.match(r"\s*([^\s\[{]+)(?:\[CALL_ID\]([^\[]+))?(?:\[ARGS\])?\s*(?=\{)", body)
    if named:
        return _named(named[1], body[named.end() :], named[2] or "")
    calls = _parsed(body)
    return [_call(call) for call in (calls if isinstance(calls, list) else [calls])]


def _deepseek(body: str, schemas: Schemas) -> list[ToolCall]:
    name, _, text = body.partition(f"<{_BAR}tool▁sep{_BAR}>")
    fenced = re.fullmatch(r"(.*?)\n```json\n(.*)\n```\s*", text, re.DOTALL)
    return _named(fenced[1], fenced[2]) if fenced else _named(name, text)


def _kimi(body: str, schemas: Schemas) -> list[ToolCall]:
    id, _, text = body.partition("<|tool_call_argument_begin|>")
    return _named(re.sub(r":\d+\s*$", "", id.strip().removeprefix("functions.")), text, id)


def _harmony(body: str, schemas: Schemas) -> list[ToolCall]:
    head, _, text = body.partition("<|message|>")
    return _named(re.split(r"[\s<]", head)[0], text)


def _gemma(body: str, schemas: Schemas) -> list[ToolCall]:
    name, _, text = body.partition("{")
    pieces = re.split(r'<\|"\|>|<escape>', "{" + text)
    pieces[1::2] = [json.dumps(string) for string in pieces[1::2]]
    for at in range(0, len(pieces), 2):  # between strings
        keyed = re.sub(r'(?<=[{,])\s*([^\s{}\[\],:"]+)\s*:', r'"\1":', pieces[at])
        pieces[at] = re.sub(r"\bNone\b", "null", keyed)
    return _named(name.strip().removeprefix("call:"), "".join(pieces))


def _xml(body: str, schemas: Schemas) -> list[ToolCall]:
    calls = _only(
        r'<(?P<tag>[^<>\s/=]*(?:function|invoke))(?:=| name=")(?P<name>[^<>"]+)"?>'
        r"(?P<body>.*?)</(?P=tag)>",
        body,
    )
    return [_written(call["name"], _xml_arguments(call["body"]), schemas) for call in calls]


def _xml_arguments(body: str) -> Iterator[tuple[str, str, bool]]:
    for found in _only(
        r'<(?P<tag>[^<>\s/=]*parameter)(?P<is>=| name=")(?P<key>[^<>"]+)"?'
        r'(?: string="(?P<string>\w+)")?>(?P<value>.*?)</(?P=tag)>',
        body,
    ):
        value = found["value"]
        if found["is"] == "=" and value[:1] == value[-1:] == "\n":
            value = value[1:-1]  # lines of the template
        yield found["key"], value, found["string"] == "true"


def _glm(body: str, schemas: Schemas) -> list[ToolCall]:
    name, mark, rest = body.partition("<arg_key>")
    pairs = _only(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", mark + rest)
    return [_written(name, [(pair[1], pair[2], False) for pair in pairs], schemas)]


def _only(pattern: str, body: str) -> list[re.Match[str]]:
    """Return all matches in a text that has nothing else."""
    if re.sub(pattern, "", body, flags=re.DOTALL).strip():
        raise ToolCallError("the call has not the form that the template shows")
    return list(re.finditer(pattern, body, re.DOTALL))


def _written(name: str, arguments: Iterable[tuple[str, str, bool]], schemas: Schemas) -> ToolCall:
    """Return the call of arguments that are written without quotes: key, value, is it a text."""
    types = schemas.get(name.strip(), {})
    values: dict[str, Any] = {}
    for key, text, is_text in arguments:
        values[key.strip()] = text
        if not is_text and types.get(key.strip(), {}).get("type") != "string":
            for read in (ast.literal_eval, json.loads):
                with suppress(*_UNREADABLE):
                    values[key.strip()] = read(text.strip())
    return ToolCall(name.strip(), values)


class _JSONNames(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant({"true": True, "false": False, "null": None}[node.id])


def _pythonic(body: str, schemas: Schemas) -> list[ToolCall]:
    for text in (body.strip(), body.strip().replace("\n", "\\n")):  # some leave lines in strings
        with suppress(*_UNREADABLE, LookupError, AttributeError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of backslashes in strings
            found: Any = ast.parse(text, mode="eval").body
            return [
                ToolCall(
                    ast.unparse(call.func),
                    {
                        word.arg: ast.literal_eval(_JSONNames().visit(word.value))
                        for word in call.keywords
                    },
                )
                for call in found.elts
            ]
    raise ToolCallError("expected a list of calls with named arguments")


class Form(NamedTuple):
    """Form in which a family of models writes calls."""

    names: str
    """Names of parsers of vLLM and SGLang that read it."""
    begin: str
    """Pattern of the mark before a call."""
    end: str
    """Pattern of the mark behind it."""
    read: Callable[[str, Schemas], list[ToolCall]]
    """Function of what is between them."""
    sign: str = ""
    """Pattern of a text of this form, where the first mark alone does not tell."""
    may_be_open: bool = False
    """Whether the end of the text ends a call."""


_XML = rf"<(?P<block>(?:\w+:|{_BAR}DSML{_BAR})?(?:tool_calls?|function_calls))>"
_GLM = r"<tool_call>\s*[\w.:-]+\s*(?:<arg_key>|</tool_call>)"
_LLAMA = r"\A|(?<=</think>)|<\|python_tag\|>|<\|end_header_id\|>"
FORMS = (
    Form(
        "qwen3_coder qwen3_xml nemotron_v3 seed_oss step3p5 minimax_m2 minimax-m2"
        " deepseek_v32 deepseekv32 deepseek_v4 deepseekv4",
        _XML,
        r"</(?P=block)>",
        _xml,
        sign=rf"{_XML}\s*<[^<>]*(?:function=|invoke name=)",
    ),
    Form("glm45 glm47 glm glm4_moe", "<tool_call>", "</tool_call>", _glm, sign=_GLM),
    Form("hermes qwen qwen25 qwen2_5 mimo", "<tool_call>", "</tool_call>", _hermes),
    Form("mistral", r"\[TOOL_CALLS\]", r"</s>|(?=\[TOOL_CALLS\])", _mistral, may_be_open=True),
    Form(
        "deepseek_v3 deepseekv3 deepseek_v31 deepseekv31",
        f"<{_BAR}tool▁call▁begin{_BAR}>",
        f"<{_BAR}tool▁call▁end{_BAR}>",
        _deepseek,
    ),
    Form("kimi_k2", r"<\|tool_call_begin\|>", r"<\|tool_call_end\|>", _kimi),
    Form(
        "openai gpt-oss gpt_oss",
        r"to=functions\.(?=[^\s<]+[^{\n]*<\|message\|>)",
        r"<\|call\|>",
        _harmony,
    ),
    Form(
        "gemma4 functiongemma",
        r"<\|tool_call>|<start_function_call>",
        r"<tool_call\|>|<end_function_call>",
        _gemma,
    ),
    Form("lfm2", r"<\|tool_call_start\|>", r"<\|tool_call_end\|>", _pythonic),
    Form(
        "llama3_json llama3 llama4_json",
        rf"(?:{_LLAMA})\s*(?=\{{\s*\"(?:name|type)\")",
        r"<\|eot_id\|>|<\|eom_id\|>",
        _llama,
        may_be_open=True,
    ),
)
