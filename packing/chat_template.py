"""Texts that a chat template makes of messages, and the check that they have what is said.

The check renders the messages with a unique word in place of each value, once for each shape of
messages: keys and types of values.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from trajpack.packing.conversion import is_bool, shown
from trajpack.packing.text import one_line

Message = Mapping[str, Any]
_EXCERPT = 40
"""Characters of a template's text that an error shows on each side of a place."""
_MAX_SHAPES = 1024
"""Shapes of messages that are remembered."""
_THOUGHTS = ("reasoning_content", "reasoning", "thinking", "thought", "tool_plan")
"""Keys of what the assistant says that templates leave out of the history."""
_CALLS = ("tool_calls", "function_call")
_PARTS = {"type", "text", "image", "image_url", "video", "audio"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_THINK_MARK = re.compile(r"</?think>")
_THINK_TAG = re.compile(r"\s*<(\|channel>thought|[^<>\s]*think)", re.IGNORECASE)
_OPENED = re.compile(r"<[^/<>\s]*think[^<>\s]*>\s*\Z", re.IGNORECASE)


class Exchange(NamedTuple):
    """Texts of a turn."""

    name: str
    """What errors call the turn."""
    prompt: str
    whole: str
    """`prompt`, and what the turn adds."""
    weight: float = 1.0


@dataclass
class _Known:
    """What earlier messages have shown of a template."""

    forms: list[tuple[bool, bool]] = field(
        default_factory=lambda: [(False, False), (False, True), (True, False), (True, True)]
    )
    """Forms of messages, that of the last conversation first."""
    checked: dict[Any, list[str]] = field(default_factory=dict)
    """Shapes of messages, and names of tools, with what is to be warned of."""


_KNOWN = WeakKeyDictionary[Any, dict[Any, _Known]]()


class ChatTemplate:
    """The chat template of a tokenizer, with its options."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._options = dict(options)
        self._notes = list[str]()
        functions = [
            tool.get("function", tool)
            for tool in options["tools"] or ()
            if isinstance(tool, Mapping)
        ]
        self._tools = tuple(function["name"] for function in functions if "name" in function)
        self._shape = repr({**options, "tools": bool(options["tools"])})
        template = options.get("chat_template") or getattr(tokenizer, "chat_template", None)
        key = template if isinstance(template, str) else repr(template)
        try:
            self._known = _KNOWN.setdefault(tokenizer, {}).setdefault(key, _Known())
        except TypeError:  # an object without hash or weak references
            self._known = _Known()

    def exchanges(self, messages: Sequence[Message], weights: Sequence[float]) -> list[Exchange]:
        """Return the texts of the assistant's messages that have a weight.

        Raises:
            ValueError: If the template cannot render the messages, does not continue its generation
                prompt, or does not show what a message says or the name of a tool.
        """
        errors, versions = list[ValueError](), list[Any]()
        for form in self._known.forms:
            version = [_formed(message, form) for message in messages]
            if version in versions:
                continue
            versions.append(version)
            self._notes.clear()
            try:
                exchanges = [
                    self._exchange(at, version, weight)
                    for at, weight in enumerate(weights)
                    if weight and messages[at]["role"] == "assistant"
                ]
            except ValueError as error:
                errors.append(error)
                continue
            for note in dict.fromkeys(self._notes):
                warnings.warn(f"from_messages: the chat template {note}", stacklevel=2)
            self._known.forms = [form, *(other for other in self._known.forms if other != form)]
            return exchanges
        raise errors[0]

    def _exchange(self, at: int, messages: Sequence[Message], weight: float) -> Exchange:
        before, message = messages[:at], messages[at]
        prompt = self._rendered(at, before, add_generation_prompt=True)
        whole = self._rendered(at, [*before, message])
        prompt = self._continued(at, prompt, whole, message)
        added = whole[len(prompt) :]
        for key in ("content", *_THOUGHTS):  # as it is, since the words have no thoughts
            pieces = _THINK_MARK.split(_text(message.get(key)))
            if any(piece.strip() not in added for piece in pieces):
                raise _not_shown(at, key)
        self._notes += self._checked(
            (self._shape, *map(_shape, messages[: at + 1])), lambda: self._hidden(at, messages)
        )
        self._checked(self._tools, lambda: self._check_tools(at, before, prompt))
        if _THINK_TAG.match(added) and not _has_thoughts(message):
            self._notes.append(
                "puts an empty block of thoughts before messages without reasoning, which teaches "
                "the model not to think where it is asked to; pass chat_template_kwargs="
                "{'enable_thinking': False}, or what the template calls it"
            )
        return Exchange(f"message {at} (assistant)", prompt, whole, weight)

    def _rendered(self, at: int, messages: Sequence[Message], **options: Any) -> str:
        options = {**self._options, **options}
        try:
            text = self._tokenizer.apply_chat_template([*messages], tokenize=False, **options)
        except Exception as error:  # templates raise what they like
            subject = "the messages before it" if options.get("add_generation_prompt") else "it"
            raise ValueError(
                f"message {at} (assistant): the chat template cannot render {subject}: {error}"
            ) from error
        if not isinstance(text, str) or not text:
            raise ValueError(f"message {at} (assistant): no text comes before it; give it weight 0")
        return text

    def _continued(self, at: int, prompt: str, whole: str, message: Message) -> str:
        """Return the prompt that a message continues."""
        if whole.startswith(prompt):
            return prompt
        before = _OPENED.sub("", prompt)
        is_opened = whole.startswith(before) and not _THINK_TAG.match(whole[len(before) :])
        if is_opened and not _has_thoughts(message):
            self._notes.append(
                "opens thoughts in its generation prompt, which messages without reasoning do not "
                "close; their prompts end before the thoughts"
            )
            return before
        pairs = enumerate(zip(prompt, whole, strict=False))
        place = next((at for at, (asked, came) in pairs if asked != came), len(whole))
        asked, came = (one_line(repr(text[place : place + _EXCERPT])) for text in (prompt, whole))
        behind = one_line(repr(prompt[max(0, place - _EXCERPT) : place]))
        raise ValueError(
            f"message {at} (assistant): the chat template does not continue its generation prompt: "
            f"behind {behind}, at character {place}, the prompt has {asked} and the conversation "
            f"{came}; give a template, or chat_template_kwargs, whose messages begin as it asks"
        )

    def _checked(self, key: Any, check: Callable[[], list[str]]) -> list[str]:
        """Return the notes of a check that is made once."""
        notes = self._known.checked.get(key)
        if notes is None:
            if len(self._known.checked) >= _MAX_SHAPES:
                self._known.checked.clear()
            notes = self._known.checked[key] = check()
        return notes

    def _hidden(self, at: int, messages: Sequence[Message]) -> list[str]:
        """Return notes of keys that are not shown; raise for those that say something."""
        marks = _Marks(messages[: at + 1])
        notes, message = list[str](), messages[at]
        missing = marks.missing(self._rendered(at, marks.messages))
        shown_thoughts = [message.get(key) for key in _THOUGHTS if (at, key) not in missing]
        for number, key in missing:
            if number == at and key in _THOUGHTS and message[key] in shown_thoughts:
                continue  # two keys say the same
            role = one_line(messages[number]["role"])
            if key not in ("content", *_CALLS, *_THOUGHTS):
                notes.append(f"does not show the key {shown(key)} of messages of the role {role}")
            elif number == at:
                raise _not_shown(at, key)
            elif key in _CALLS or (key == "content" and not self._is_stripped(number, marks)):
                raise _not_shown(at, key, f" of message {number} ({role}) before it")
        return notes

    def _is_stripped(self, number: int, marks: _Marks) -> bool:
        """Return whether the assistant's content is shown until other messages follow."""
        with suppress(ValueError):
            text = self._rendered(number, marks.messages[: number + 1])
            is_assistant = marks.messages[number]["role"] == "assistant"
            return is_assistant and (number, "content") not in marks.missing(text)
        return False

    def _check_tools(self, at: int, before: Sequence[Message], prompt: str) -> list[str]:
        """Raise unless a prompt names each tool more often than without tools."""
        text = self._rendered(at, before, add_generation_prompt=True, tools=None)
        if unnamed := unnamed_tools(self._tools, prompt, text):
            raise ValueError(
                f"the chat template does not name the tools {', '.join(unnamed)}; give a template "
                "that declares tools, or no tools where the messages declare them"
            )
        return []


def unnamed_tools(names: Iterable[str], text: str, text_without: str) -> list[str]:
    """Return the tools that a text names no more often than the text without tools does."""
    unnamed = []
    for name in names:  # a part of a longer word is no name
        word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
        if len(word.findall(text)) <= len(word.findall(text_without)):
            unnamed.append(name)
    return unnamed


def checked_message(at: int, message: Any) -> dict[str, Any]:
    """Return a message without keys that say nothing; parts of its content are texts.

    Raises:
        TypeError: If it is no mapping with a role.
        ValueError: If its content has other parts.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"message {at} must be a mapping with a role, got {shown(message)}")
    kept = {key: value for key, value in message.items() if value is not None}
    if not kept.get("tool_calls", True):
        del kept["tool_calls"]
    if message["role"] == "assistant":
        kept.setdefault("content", "")
    content = kept.get("content")
    if isinstance(content, (list, tuple)) and any(
        isinstance(part, Mapping) and part.keys() & _PARTS for part in content
    ):
        kept["content"] = [_text_part(at, message["role"], part) for part in content]
    return kept


def _text_part(at: int, role: str, part: Any) -> dict[str, str]:
    part = {"text": part} if isinstance(part, str) else part
    others = [key for key, value in part.items() if value is not None and key != "text"]
    kind = part.get("type") or next(iter(others), "text")
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise ValueError(
            f"message {at} ({one_line(role)}): a part of its content has the type {shown(kind)}, "
            "and only texts are trained"
        )
    return {"type": "text", "text": part["text"]}


def _formed(message: Message, form: tuple[bool, bool]) -> Message:
    """Return a message in a form: whether parts stay a list, and arguments of calls JSON text."""
    has_parts, has_text_arguments = form

    def formed_call(call: dict[str, Any]) -> dict[str, Any]:
        arguments = call.get("arguments")
        if has_text_arguments and isinstance(arguments, (Mapping, list)):
            return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
        if isinstance(arguments, str) and not has_text_arguments:
            with suppress(ValueError, RecursionError):
                return {**call, "arguments": json.loads(arguments or "{}")}
        return call

    if _is_parts(message.get("content")) and not has_parts:
        message = {**message, "content": _text(message["content"])}
    return _with_calls(message, formed_call)


def _with_calls(message: Message, change: Callable[[dict[str, Any]], Any]) -> Message:
    """Return a message with its calls changed, which have no nulls then."""

    def changed(call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        call = {key: value for key, value in call.items() if value is not None}
        return (
            {**call, "function": changed(call["function"])} if "function" in call else change(call)
        )

    calls = message.get("tool_calls")
    return {**message, "tool_calls": [*map(changed, calls)]} if isinstance(calls, list) else message


def _is_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, Mapping) and part.keys() == {"type", "text"} for part in content
    )


def _text(content: Any) -> str:
    """Return the text of a content or of its parts; that of anything else is empty."""
    if _is_parts(content):
        return "".join(part["text"] for part in content)
    return content if isinstance(content, str) else ""


def _has_thoughts(message: Message) -> bool:
    is_marked = _THINK_TAG.search(_text(message.get("content"))) is not None
    return is_marked or any(message.get(key) for key in _THOUGHTS)


def _not_shown(at: int, key: str, owner: str = " of it") -> ValueError:
    return ValueError(f"message {at} (assistant): the chat template does not show the {key}{owner}")


def _shape(value: Any) -> Any:
    """Return a value's keys and types, and whether texts are blank."""
    if isinstance(value, Mapping):
        role = value.get("role") if isinstance(value.get("role"), str) else None
        return (role, *((key, _shape(inner)) for key, inner in value.items()))
    if isinstance(value, (list, tuple)):
        return (list, *map(_shape, value))
    return bool(value.strip()) if isinstance(value, str) else type(value)


class _Marks:
    """Messages with unique words in place of values."""

    def __init__(self, messages: Sequence[Message]) -> None:
        self._shown = list[tuple[int, str, str]]()
        self._spelled = list[tuple[int, str, str]]()
        self.messages = [self._message(at, message) for at, message in enumerate(messages)]

    def missing(self, text: str) -> list[tuple[int, str]]:
        """Return messages and keys whose words a text lacks, or has as Python spells them."""
        places = [(at, key) for at, key, word in self._shown if word not in text]
        places += [(at, key) for at, key, word in self._spelled if word in text]
        return [*dict.fromkeys(places)]

    def _message(self, at: int, message: Message) -> Message:
        def marked_call(call: dict[str, Any]) -> dict[str, Any]:
            marked = {
                name: self._value(at, "tool_calls", call.get(name))
                for name in ("name", "arguments")
            }
            if isinstance(call.get("arguments"), str):  # JSON, which is not to be spelled again
                marked["arguments"] = json.dumps({marked["arguments"]: 0})
                self._shown.append((at, "tool_calls", marked["arguments"]))
            return {**call, **marked}

        marked = dict(_with_calls(message, marked_call))
        links = ("name",) if message["role"] == "tool" else ()  # calls name their results
        for key, value in message.items():
            if key in ("role", "tool_calls", "tool_call_id", *links):
                continue
            if _is_parts(value):
                texts = [self._value(at, key, part["text"]) for part in value]
                marked[key] = [{"type": "text", "text": text} for text in texts]
                self._spelled += [(at, key, spell(marked[key])) for spell in (str, json.dumps)]
            else:
                marked[key] = self._value(at, key, value)
        return marked

    def _value(self, at: int, key: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            value = {name: self._value(at, key, inner) for name, inner in value.items()}
        elif isinstance(value, (list, tuple)):
            value = [self._value(at, key, inner) for inner in value]
        elif value is None or is_bool(value) or not str(value).strip():
            return value
        else:
            number = 7_000_000 + len(self._shown)
            value = f"trajpack{number}mark" if isinstance(value, str) else number
            self._shown.append((at, key, str(value)))
            return value
        if str(value) != json.dumps(value):
            self._spelled.append((at, key, str(value)))
        return value
