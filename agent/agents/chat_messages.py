"""Tokens of the messages that others add to a conversation, by a chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

_MARK = "trajpack{}mark"


class _Frame(NamedTuple):
    """Text of a template around contents."""

    words: list[list[int]]
    """Tokens before, between and after the contents."""
    tokens: re.Pattern[str]
    """Pattern of added tokens in the frame, which a content may spell."""


class ChatMessages:
    """Encodes messages piece by piece, so that tokens that were sampled are never made again.

    A message's content is encoded as plain text: a special token that is written out in it becomes
    ordinary tokens, as does an added token of the template such as ``</tool_response>``. The
    template's own text around it is encoded as it renders.

    Args:
        tokenizer: A Hugging Face tokenizer with a chat template that shows each message's content
            as it is, once.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._frames: dict[tuple[str, int], _Frame] = {}

    def opening(self, instructions: str) -> list[int]:
        """Return a conversation that begins with a system message and has nothing else yet.

        Raises:
            ValueError: If the template cannot render that.
        """
        pieces = self._cut([_message("system", 0)], 1, add_generation_prompt=False)
        return self._fill(self._frame(pieces), [instructions])

    def first(self, content: str) -> list[int]:
        """Return a first message of the user, after an `opening`, and the generation prompt.

        Raises:
            ValueError: If the template renders a system message otherwise when others follow.
        """
        key = ("opening", 1)
        if key not in self._frames:
            system = self._cut([_message("system", 0)], 1, add_generation_prompt=False)
            pieces = self._cut([_message("system", 0), _message("user", 1)], 2)
            if pieces[0] != system[0] or not pieces[1].startswith(system[1]):
                raise ValueError("the chat template does not render a system message alike alone")
            pieces[1] = pieces[1].removeprefix(system[1])
            self._frames[key] = self._frame(pieces[1:])
        return self._fill(self._frames[key], [content])

    def after(self, completion_ids: Sequence[int], role: str, contents: Sequence[str]) -> list[int]:
        """Return messages after a completion, and the generation prompt.

        If the completion lacks the token that ends a message, that token comes first.

        Raises:
            ValueError: If the template does not show such messages as they are.
        """
        key = (role, len(contents))
        if key not in self._frames:
            said = [_message("user", 0), _message("assistant", 1)]
            asked = [_message(role, 2 + i) for i in range(len(contents))]
            pieces = self._cut([*said, *asked], 2 + len(contents))
            self._frames[key] = self._frame(pieces[2:])
        ids = self._fill(self._frames[key], contents)
        has_ended = len(completion_ids) > 0 and int(completion_ids[-1]) == ids[0]
        return ids[1:] if has_ended else ids

    def _cut(
        self,
        messages: Sequence[dict[str, str]],
        num_marks: int,
        *,
        add_generation_prompt: bool = True,
    ) -> list[str]:
        """Render messages of marks, and return what is before, between and after the marks."""
        options = {"add_generation_prompt": add_generation_prompt}
        text = trial_text(self._tokenizer, messages, **options)
        pieces = []
        for i in range(num_marks):
            before, mark, text = text.partition(_MARK.format(i))
            if not mark or _MARK.format(i) in text:
                role = messages[i]["role"]
                raise ValueError(f"the chat template does not show a message of the {role} once")
            pieces.append(before)
        return [*pieces, text]

    def _frame(self, pieces: Sequence[str]) -> _Frame:
        text = "".join(pieces)
        added = [word for word in self._tokenizer.get_added_vocab() if word in text]
        tokens = "|".join(re.escape(word) for word in added if len(word.strip()) > 1)
        return _Frame(
            [self._encode(piece) for piece in pieces],
            re.compile(f"(?={tokens})" if tokens else "(?!)"),
        )

    def _fill(self, frame: _Frame, contents: Sequence[str]) -> list[int]:
        ids = list(frame.words[0])
        for content, after in zip(contents, frame.words[1:], strict=True):
            begin = 0
            for found in frame.tokens.finditer(content):  # cut apart, it is text and no token
                ids += self._encode(content[begin : found.start() + 1], split_special_tokens=True)
                begin = found.start() + 1
            ids += self._encode(content[begin:], split_special_tokens=True)
            ids += after
        return ids

    def _encode(self, text: str, **options: bool) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, **options)
        return ids


def trial_text(tokenizer: Any, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
    """Render messages, behind a system message if the chat template renders none without one.

    Raises:
        Exception: That of the template for the messages alone, if it renders them neither way.
    """

    def rendered(*first: Mapping[str, str]) -> str:
        chat = [dict(message) for message in (*first, *messages)]
        text: str = tokenizer.apply_chat_template(chat, tokenize=False, **options)
        return text

    try:
        return rendered()
    except Exception:  # templates raise what they like
        with suppress(Exception):
            return rendered({"role": "system", "content": "Be brief."})
        raise


def _message(role: str, number: int) -> dict[str, str]:
    return {"role": role, "content": _MARK.format(number)}
