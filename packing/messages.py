"""Turns of a chat's messages, each with the prompt that an engine sees at inference.

The one place of `trajpack.packing` that calls a tokenizer. It needs ``apply_chat_template``, a
call with a list of texts, ``decode``, ``eos_token_id`` and ``all_special_ids``, as the tokenizers
of Hugging Face have them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trajpack.packing.conversion import as_ids, as_number, several, shown
from trajpack.packing.text import one_line
from trajpack.packing.types import Turn

Ids = npt.NDArray[np.int32]
_SHOWN = 40
"""Characters of a template's text that an error shows on each side of a place."""


class _Texts(NamedTuple):
    """Texts of a turn."""

    message: int
    """Index of the assistant's message; -1 of plain text."""
    prompt: str
    """Messages before it, and the generation prompt."""
    whole: str
    """Messages up to it: `prompt`, and what the message adds."""
    reward: float
    """Weight of the message."""
    has_text: bool
    """Whether the message has a text that a completion must show."""


def turns_of_messages(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    tools: Sequence[Any] | str | None = None,
    stop_token_ids: Collection[int] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Turn]:
    """Return a turn for each message of the assistant that has not weight 0.

    As `trajpack.Trajectory.from_messages`, which adds the name of the trajectory to errors.
    """
    chat = [_message(at, one) for at, one in enumerate(several("messages must be many", messages))]
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tools must be JSON where they are a text: {error}") from error
    options = {"tools": tools or None, **(chat_template_kwargs or {})}
    texts = []
    for at, (message, weight) in enumerate(chat):
        if message["role"] == "assistant" and weight:
            before = [one for one, _ in chat[:at]]
            prompt = _rendered(tokenizer, at, before, add_generation_prompt=True, **options)
            whole = _rendered(tokenizer, at, [*before, message], **options)
            _check_extends(at, prompt, whole)
            content = message.get("content")
            has_text = isinstance(content, str) and bool(content.strip())
            texts.append(_Texts(at, prompt, whole, weight, has_text))
    return _turns(texts, tokenizer, stop_token_ids, add_special_tokens=False)


def turns_of_text(
    prompt: str, completion: str, tokenizer: Any, *, stop_token_ids: Collection[int] | None = None
) -> list[Turn]:
    """Return the turn of plain text without a chat template; the completion ends with ``eos``."""
    end = tokenizer.eos_token or ""
    whole = prompt + completion + ("" if completion.endswith(end) else end)
    texts = [_Texts(-1, prompt, whole, 1.0, bool(completion.strip()))]
    return _turns(texts, tokenizer, stop_token_ids, add_special_tokens=True)


def fitting(turns: Sequence[Turn], max_tokens: int | None) -> list[Turn]:
    """Return the turns of at most ``max_tokens`` tokens, prompt included; all if it is None."""
    return [
        turn
        for turn in turns
        if max_tokens is None or len(turn.prompt_ids) + len(turn.completion_ids) <= max_tokens
    ]


def _message(at: int, message: Any) -> tuple[dict[str, Any], float]:
    """Return a message as templates take it, and its weight.

    Keys without a value, which data sets with fixed columns have, are left out, and the arguments
    of calls are parsed, as servers do.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TypeError(f"message {at} must be a mapping with a role, got {shown(message)}")
    weight = message.get("weight")
    weight = 1.0 if weight is None else as_number(f"message {at}: weight", weight)
    kept = {
        key: value
        for key, value in message.items()
        if key != "weight" and (value is not None or key == "content")
    }
    if isinstance(kept.get("tool_calls"), (list, tuple)):
        kept["tool_calls"] = [_call(call) for call in kept["tool_calls"]]
    return kept, weight


def _call(call: Any) -> Any:
    """Return a tool call whose arguments are no JSON text but its value."""
    if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping):
        return {**call, "function": _call(call["function"])}
    if isinstance(call, Mapping) and isinstance(call.get("arguments"), str):
        with suppress(ValueError, RecursionError):
            return {**call, "arguments": json.loads(call["arguments"])}
    return call


def _rendered(tokenizer: Any, at: int, messages: list[dict[str, Any]], **options: Any) -> str:
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as error:  # templates raise what they like
        first = "the chat template cannot render the messages before it"
        if not options.get("add_generation_prompt"):
            first = "the chat template cannot render it"
        raise ValueError(f"message {at} (assistant): {first}: {error}") from error
    if not isinstance(text, str) or not text:
        raise ValueError(f"message {at} (assistant): no text comes before it; give it weight 0")
    return text


def _check_extends(at: int, prompt: str, whole: str) -> None:
    """Raise unless a message continues the prompt that asks for it."""
    if whole.startswith(prompt):
        return
    pairs = enumerate(zip(prompt, whole, strict=False))
    place = next((at for at, (one, other) in pairs if one != other), len(whole))
    asked, rendered = (one_line(repr(one[place : place + _SHOWN])) for one in (prompt, whole))
    raise ValueError(
        f"message {at} (assistant): the chat template does not continue its generation prompt: "
        f"behind {one_line(repr(prompt[max(0, place - _SHOWN) : place]))}, at character {place}, "
        f"the prompt has {asked} and the conversation {rendered}; give a template, or "
        "chat_template_kwargs, whose messages begin as it asks for them"
    )


def _turns(
    texts: Sequence[_Texts],
    tokenizer: Any,
    stop_token_ids: Collection[int] | None,
    *,
    add_special_tokens: bool,
) -> list[Turn]:
    """Encode all texts together, and cut each behind its prompt and at the stop token."""
    if not texts:
        return []
    flat = [text for one in texts for text in (one.prompt, one.whole)]
    rows = tokenizer(flat, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
    turns = list[Turn]()
    stream = np.empty(0, np.int32)  # tokens of the turn after this one
    for one, prompt, whole in reversed([*zip(texts, rows[::2], rows[1::2], strict=True)]):
        if whole[: len(prompt)] == prompt:
            completion = whole[len(prompt) :]
        else:  # a token reaches over the end of the prompt, which no engine samples
            added = one.whole[len(one.prompt) :]
            completion = tokenizer([added], add_special_tokens=False)["input_ids"][0]
        size, has_stop = _stop(one, completion, tokenizer, stop_token_ids)
        ids = as_ids(f"message {one.message}: ids", [*prompt, *completion[:size]])
        if np.array_equal(stream[: ids.size], ids):
            ids = stream[: ids.size]  # the next turn continues it: they share memory
        stream = ids
        turn = Turn(
            prompt_ids=ids[: len(prompt)],
            completion_ids=ids[len(prompt) :],
            completion_logprobs=np.zeros(size, np.float32),
            reward=one.reward,
            truncated=not has_stop,
        )
        turns.append(turn)
    return turns[::-1]


def _stop(
    one: _Texts, completion: list[int], tokenizer: Any, stops: Collection[int] | None
) -> tuple[int, bool]:
    """Return how many tokens an engine samples for a completion, and whether the last one stops."""

    def is_blank(ids: Sequence[int]) -> bool:
        return not tokenizer.decode(ids, skip_special_tokens=True).strip()

    if is_blank(completion) and one.has_text:
        raise ValueError(
            f"message {one.message} (assistant): the chat template shows nothing of its content"
        )
    known = {tokenizer.eos_token_id} if stops is None else {*stops}
    size = next((at for at, token in enumerate(completion, 1) if token in known), 0)
    if size and not is_blank(completion[size:]):
        raise ValueError(
            f"message {one.message} (assistant): it holds the stop token {completion[size - 1]}, "
            f"{tokenizer.decode([completion[size - 1]])!a}, before its end, so no engine gives it"
        )
    if not size and stops is None:  # templates may end messages with another token than eos
        special = {*tokenizer.all_special_ids}
        tail = len(completion)
        while tail and is_blank(completion[tail - 1 : tail]):
            tail -= 1
            size = tail + 1 if completion[tail] in special else size
    if size:
        return size, True
    warnings.warn(
        "from_messages: messages end without a stop token, so that nothing teaches the model to "
        "stop; pass stop_token_ids, or a template that ends messages with the tokenizer's eos",
        stacklevel=2,
    )
    return len(completion), False
