"""Tokens of the messages that others add to a conversation, by a chat template."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

from trajpack.agent.agents.tool_calls import THOUGHTS, ToolCall, ToolCallError, outside_thoughts
from trajpack.agent.errors import reason_of

_MARK = "trajpack{}mark"
_PROBE = ' "a" \\ b\nc <d> '
"""Content with all that templates are known to change."""
_SYSTEM: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
_PLAIN_NAME = re.compile(r"[\w.:-]{1,64}")
_MOST_FRAMES = 256
_MOST_MARK = 16
"""Tokens at the end of a prompt that may open thoughts."""

_TRIMS: tuple[Callable[[str], str], ...] = (str, str.strip, str.lstrip, str.rstrip)
_FORMS: tuple[Callable[[str], str], ...] = (
    *_TRIMS,
    *(lambda text, trim=trim: json.dumps(trim(text), ensure_ascii=False)[1:-1] for trim in _TRIMS),
)
"""How templates show a content: as it is, without blanks at its ends, or in JSON's spelling."""


class _Frame(NamedTuple):
    """Text of a template around contents, behind messages whose text is ``head``."""

    before: list[dict[str, Any]]
    head: str
    pieces: list[str]
    num_end: int
    """How many tokens at the beginning end the message before."""


class ChatMessages:
    """Encodes messages piece by piece, so that tokens that were sampled are never made again.

    The text is what the template writes of these messages. A content is encoded as plain text: a
    special token that is written out in it becomes ordinary tokens, as does an added token of
    the template such as ``</tool_response>``.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template.
        tools: Declarations of tools, with which the template renders conversations.
    """

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        options = {"tools": list(tools)} if tools else {}
        self._render = partial(tokenizer.apply_chat_template, tokenize=False, **options)
        plain = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        self._decode: Callable[..., str] = partial(tokenizer.decode, **plain)
        self._encode: Callable[..., list[int]] = partial(tokenizer.encode, add_special_tokens=False)
        self._tool = tools[0]["function"]["name"] if tools else "tool"
        self._added: dict[int, str] = {i: word for word, i in tokenizer.get_added_vocab().items()}
        template = str(getattr(tokenizer, "chat_template", ""))
        shown = [w for w in self._added.values() if len(w.strip()) > 1 and w in template]
        self._marks = re.compile(f"(?={'|'.join(map(re.escape, shown))})" if shown else "(?!)")
        self._frames: dict[Any, _Frame] = {}
        for self._takes_parts in (False, True):
            with suppress(Exception):  # templates raise what they like
                if _MARK in self.text(_said("user", [_MARK])):
                    break
        else:
            self._takes_parts = False

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return a conversation and the generation prompt.

        Raises:
            ValueError: If the template does not show what a user says.
        """
        text = self._rendered(messages, is_asking=True)
        for content in (message["content"] for message in messages if message["role"] == "user"):
            for part in [{"text": content}] if isinstance(content, str) else content:
                said = str(part.get("text", part)).strip()
                if not any(form(said) in text for form in _FORMS):
                    raise ValueError(f"the chat template does not show {said!r:.80} of the user")
        return self._encode(text)

    def text(self, messages: Sequence[Mapping[str, Any]], *, is_asking: bool = False) -> str:
        """Render messages, behind a system message if the template renders none without one.

        Raises:
            Exception: That of the template for the messages alone, if it renders them neither way.
        """
        try:
            return self._rendered(messages, is_asking=is_asking)
        except Exception:  # templates raise what they like
            with suppress(Exception):
                return self._rendered([*_SYSTEM, *messages], is_asking=is_asking)
            raise

    def _rendered(self, messages: Sequence[Mapping[str, Any]], *, is_asking: bool) -> str:
        chat = [dict(message) for message in messages]
        for message in chat:
            content = message.get("content")
            if self._takes_parts and isinstance(content, str):
                message["content"] = [{"type": "text", "text": content}]
            elif not self._takes_parts and isinstance(content, list):
                with suppress(KeyError):  # other parts are for the template to show
                    message["content"] = "".join(part["text"] for part in content)
        return str(self._render(chat, add_generation_prompt=is_asking))

    def check(self, role: str) -> None:
        """Raise unless one and two messages of a role can follow a completion, as `after`."""
        for num in (1, 2) if role == "tool" else (1,):
            self.after([], role, [_PROBE] * num)

    def opening(self, instructions: str) -> list[int]:
        """Return a conversation that begins with a system message and has nothing else yet."""
        return self._behind([], _said("system", [instructions]), is_asking=False)

    def first(self, content: str) -> list[int]:
        """Return a first message of the user, after an `opening`, and the generation prompt."""
        return self._behind(_SYSTEM, _said("user", [content]), is_asking=True)

    def _behind(
        self, before: list[dict[str, Any]], messages: list[dict[str, Any]], *, is_asking: bool
    ) -> list[int]:
        head = self.text(before) if before else ""
        marks = [{**messages[0], "content": _MARK.format(0)}]
        text = self.text([*before, *marks], is_asking=is_asking)
        if not text.startswith(head):
            raise ValueError("the chat template does not render a system message alike alone")
        return self._fill(before, _pieces(text[len(head) :], 1), messages, is_asking=is_asking)

    def after(
        self,
        completion_ids: Sequence[int],
        role: str,
        contents: Sequence[str],
        *,
        calls: Sequence[ToolCall | ToolCallError] | None = None,
        has_ended: bool | None = None,
    ) -> list[int]:
        """Return messages of a role after a completion, and the generation prompt.

        The template's end of a message comes first, unless the completion has one.

        Args:
            completion_ids: Tokens that were sampled.
            role: Role of the messages.
            contents: Their texts.
            calls: What each message of a tool answers; templates show names and ids. By default
                calls of the first tool, with the ids ``call00001``, ``call00002`` ...
            has_ended: Whether the completion ends with a token that ends a message, whichever. By
                default it does if its last token is an added one and no part of a call.

        Raises:
            ValueError: If the template does not show such messages.
        """
        named = []
        for at, call in enumerate(calls or [None] * len(contents), 1) if role == "tool" else ():
            name, id = getattr(call, "name", ""), getattr(call, "id", "")  # what templates may see
            name = name if _PLAIN_NAME.fullmatch(name) else self._tool
            named.append((name, id if _PLAIN_NAME.fullmatch(id) else f"call{at:05d}"))
        key = (role, len(contents), *named)
        if key not in self._frames:
            if len(self._frames) >= _MOST_FRAMES:
                self._frames.clear()
            self._frames[key] = self._frame_after(role, len(contents), named)
        frame = self._frames[key]
        ids = self._fill(frame.before, frame.pieces, _said(role, contents, named))
        last = int(completion_ids[-1]) if len(completion_ids) else -1
        end = ids[: max(frame.num_end, 1)]
        if last in self._added and last in end:
            return ids[end.index(last) + 1 :]
        if has_ended is None:
            has_ended = last in self._added and self._added[last] not in frame.head
        return ids[frame.num_end if has_ended else 0 :]

    def said(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> str:
        """Return a completion's text, special tokens included.

        It begins with the mark of thoughts that the end of the prompt opened.
        """
        before, text = self._decode(prompt_ids[-_MOST_MARK:]), self._decode(completion_ids)
        for begin, end in THOUGHTS.items():
            if before.rfind(begin) > before.rfind(end):
                return begin + text
        return text

    def without_thoughts(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int]
    ) -> list[int]:
        """Return a prompt and its completion as in a history: without the completion's thoughts.

        Tokens behind thoughts stay as they were sampled.
        """
        greeting, text = _said("user", ["Hello"]), self.said(prompt_ids, completion_ids)
        before, asks = self.text(greeting), self.text(greeting, is_asking=True)
        asks, answer = asks.removeprefix(before), outside_thoughts(text)
        if answer == text and outside_thoughts(asks) == asks:
            return [*prompt_ids, *completion_ids]
        marks = [*greeting, *_said("assistant", [_MARK]), *greeting]
        whole = self.text(marks).partition(_MARK)[0]
        head = whole.removeprefix(before) if whole.startswith(before) else asks
        if answer != text:
            answer = answer.removeprefix(asks).lstrip()
        own = re.match(r"\s*(\W*\w+)", head.removeprefix(asks))
        if own and answer.startswith(own[1]):  # it names its channel or recipient
            head = asks
        prompt, ids, asking = [*prompt_ids], [*completion_ids], self._encode(asks)
        if prompt[len(prompt) - len(asking) :] == asking:
            prompt[len(prompt) - len(asking) :] = self._encode(head)
        ends_at = range(len(ids))
        begin = bisect_left(ends_at, True, key=lambda at: answer.endswith(self._decode(ids[at:])))
        more = answer.removesuffix(self._decode(ids[begin:]))
        return [*prompt, *self._encode(more), *ids[begin:]]

    def calling(self, calls: Sequence[ToolCall]) -> Iterator[tuple[Sequence[ToolCall], str]]:
        """Yield texts of completions that make calls, as the template renders them, and the calls.

        A template may take only one call, the first, or arguments as JSON text only.
        """
        for made, message in _callings(calls):
            with suppress(Exception):  # templates raise what they like
                yield made, self.text([*_said("user", [_MARK]), message]).rpartition(_MARK)[2]

    def _frame_after(self, role: str, num: int, named: Sequence[tuple[str, str]]) -> _Frame:
        """Return the frame of messages behind one of the assistant, which makes calls."""
        marks = _said(role, [_MARK.format(at) for at in range(num)], named)
        user, plain = _said("user", ["Hello"]), _said("assistant", [_MARK])[0]
        problem: Exception | None = None
        with_calls = ""
        calls = [ToolCall(name, {}, id) for name, id in named]
        for made, message in [*_callings(calls), ([], plain)]:
            try:
                text = self.text([*user, message, *marks], is_asking=True)
                end = self.text([*user, plain]).partition(_MARK)[2]
                with_calls = text if made else with_calls
                alone = self.text([*user, message])
                head, end = self._ended(alone, text, end, made[-1].name if made else _MARK)
                if with_calls and not made and not with_calls.endswith(text[len(head + end) :]):
                    break
                pieces = _pieces(text[len(head) :], num)
            except Exception as error:  # noqa: BLE001 - templates raise what they like
                problem = problem or error
                continue
            begin, last = self._encode(pieces[0]), self._encode(end)
            sizes = range(1, 1 + min(len(begin), len(last)))
            ends = [n for n in sizes if begin[n - 1] in self._added and begin[:n] == last[:n]]
            if end and not ends and begin and begin[0] in self._added:
                ends = [1]  # in the midst of a conversation, messages end otherwise
            return _Frame([*user, message], head, pieces, max(ends, default=0))
        raise ValueError(
            f"the chat template cannot show a message of the {role} after one of the assistant: "
            f"{reason_of(problem) if problem else 'its text is lost'}"
        ) from problem

    def _ended(self, alone: str, text: str, end: str, name: str) -> tuple[str, str]:
        """Return a conversation's text up to where its message with calls ends, and that end.

        Templates may write what is before its last call otherwise when others follow, and end
        it with a token of its own.
        """
        tail = alone[max(alone.rfind(name), 0) :]
        if tail.endswith(end):
            tail = tail.removesuffix(end)
        else:
            own = max((tail.rfind(word) for word in self._added.values()), default=-1)
            tail, end = (tail[:own], tail[own:]) if own > 0 else (tail, "")
        begin = text.rfind(tail, 0, text.find(_MARK.format(0)))
        if begin < 0:
            raise ValueError("it writes that message otherwise when others follow")
        return text[: begin + len(tail)], end

    def _fill(
        self,
        before: Sequence[Mapping[str, Any]],
        pieces: Sequence[str],
        messages: Sequence[Mapping[str, Any]],
        *,
        is_asking: bool = True,
    ) -> list[int]:
        """Return tokens of pieces with the contents between them, if the template writes those."""
        text = self.text([*before, *messages], is_asking=is_asking)
        for form in _FORMS:
            shown = [*(form(message["content"]) for message in messages), ""]
            if text.endswith("".join(chain(*zip(pieces, shown, strict=True)))):
                break
        else:
            raise ValueError(
                f"the chat template does not show a message of the {messages[0]['role']} as it is, "
                "trimmed or as JSON"
            )
        ids: list[int] = []
        for piece, content in zip(pieces, shown, strict=True):
            ids += self._encode(piece)
            # A mark that is cut behind its first character is text and no token.
            cuts = [0, *(mark.start() + 1 for mark in self._marks.finditer(content)), len(content)]
            for begin, end in pairwise(cuts):
                ids += self._encode(content[begin:end], split_special_tokens=True)
        return ids


def _pieces(text: str, num: int) -> list[str]:
    """Return the text before, between and after marks."""
    pieces = re.split(r"(trajpack\d+mark)", text)
    if pieces[1::2] != [_MARK.format(at) for at in range(num)]:
        raise ValueError("it does not show the content of each once")
    return pieces[::2]


def _said(role: str, contents: Sequence[str], named: Any = ()) -> list[dict[str, Any]]:
    """Return messages; those of a tool have the names and ids of its calls."""
    keys = [{"name": name, "tool_call_id": id} for name, id in named] or [{}] * len(contents)
    pairs = zip(contents, keys, strict=True)
    return [{"role": role, "content": content, **key} for content, key in pairs]


def _callings(calls: Sequence[ToolCall]) -> Iterator[tuple[Sequence[ToolCall], dict[str, Any]]]:
    """Yield messages that make the calls, or the first of them: as values, then as JSON text."""
    for made in (calls, calls[:1]) if calls else ():
        for is_text in (False, True):
            written = []
            for at, call in enumerate(made, 1):
                arguments = json.dumps(call.arguments) if is_text else call.arguments
                function = {"name": call.name, "arguments": arguments}
                id = call.id or f"call{at:05d}"
                written.append({"id": id, "type": "function", "function": function})
            yield made, {"role": "assistant", "content": "", "tool_calls": written}
