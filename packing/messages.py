"""Turns of a chat's messages, each with the prompt that an engine sees at inference.

The one place of `trajpack.packing` that calls a tokenizer: with a list of texts, for ``decode`` and
its special tokens; `chat_template` calls ``apply_chat_template``.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from trajpack.packing.chat_template import ChatTemplate, Exchange, checked_message
from trajpack.packing.conversion import as_ids, as_number, several
from trajpack.packing.types import Turn


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
    messages = [*several("messages must be many", messages)]
    if _is_filled(messages):
        messages, tools = without_fills(messages), without_fills(tools)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"tools must be JSON where they are a text: {error}") from error
    chat = [checked_message(at, message) for at, message in enumerate(messages)]
    weights = [
        as_number(f"message {at}: weight", message.pop("weight", 1.0))
        for at, message in enumerate(chat)
    ]
    template = ChatTemplate(tokenizer, {"tools": tools or None, **(chat_template_kwargs or {})})
    texts = template.exchanges(chat, weights)
    return _turns(texts, tokenizer, stop_token_ids, add_special_tokens=False)


def turns_of_text(
    prompt: str, completion: str, tokenizer: Any, *, stop_token_ids: Collection[int] | None = None
) -> list[Turn]:
    """Return the turn of plain text without a chat template; the completion ends with ``eos``.

    A prompt that begins with a special token has them all: a template has made it.
    """
    end = tokenizer.eos_token or ""
    whole = prompt + completion + ("" if completion.endswith(end) else end)
    is_plain = not prompt.startswith(tuple(filter(None, tokenizer.all_special_tokens)))
    texts = [Exchange("the completion", prompt, whole)]
    return _turns(texts, tokenizer, stop_token_ids, add_special_tokens=is_plain)


def without_fills(value: Any, feature: Any = None) -> Any:
    """Return a value of Arrow without the nulls that fill its structs.

    Arrow gives each struct of a column the keys of all, so that a null is a key which a row does
    not have. Nulls in lists and in JSON stay.

    Args:
        value: Structs are mappings.
        feature: Type of the column, of `datasets`. None: all mappings are structs.
    """
    if isinstance(value, Mapping) and (feature is None or isinstance(feature, Mapping)):
        types = feature or {}
        return {
            key: without_fills(inner, types.get(key))
            for key, inner in value.items()
            if inner is not None
        }
    inner_type = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if isinstance(value, list) and (feature is None or inner_type is not None):
        return [without_fills(inner, inner_type) for inner in value]
    return value


def _is_filled(messages: Sequence[Any]) -> bool:
    """Return whether messages are structs of Arrow: all have the same keys, some of them null."""
    if not all(isinstance(message, Mapping) for message in messages):
        return False
    keys = [message.keys() for message in messages]
    nulls = {key for message in messages for key, value in message.items() if value is None}
    return keys == keys[:1] * len(keys) and not nulls <= {"content"}


def fitting(turns: Sequence[Turn], max_tokens: int | None) -> list[Turn]:
    """Return the turns of at most ``max_tokens`` tokens, prompt included; all if it is None."""
    return [
        turn
        for turn in turns
        if max_tokens is None or len(turn.prompt_ids) + len(turn.completion_ids) <= max_tokens
    ]


def _turns(
    texts: Sequence[Exchange],
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
        ids = as_ids(f"{one.name}: ids", [*prompt, *completion[:size]])
        if np.array_equal(stream[: ids.size], ids):
            ids = stream[: ids.size]  # the next turn continues it: they share memory
        stream = ids
        turn = Turn(
            prompt_ids=ids[: len(prompt)],
            completion_ids=ids[len(prompt) :],
            completion_logprobs=np.zeros(size, np.float32),
            reward=one.weight,
            truncated=not has_stop,
        )
        turns.append(turn)
    return turns[::-1]


def _stop(
    one: Exchange, completion: list[int], tokenizer: Any, stops: Collection[int] | None
) -> tuple[int, bool]:
    """Return how many tokens an engine samples for a completion, and whether the last one stops."""

    def is_blank(ids: Sequence[int]) -> bool:
        return not tokenizer.decode(ids, skip_special_tokens=True).strip()

    known = {tokenizer.eos_token_id} if stops is None else {*stops}
    size = next((at for at, token in enumerate(completion, 1) if token in known), 0)
    if size and not is_blank(completion[size:]):
        raise ValueError(
            f"{one.name}: it holds the stop token {completion[size - 1]}, "
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
