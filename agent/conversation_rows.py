"""Rows of conversations, from data sets and JSONL files, as trajectories."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trajpack.packing.conversion import shown
from trajpack.packing.messages import fitting, turns_of_messages, turns_of_text, without_fills
from trajpack.packing.types import Trajectory, Turn

_COLUMNS = "'messages', or 'prompt' and 'completion', both texts or both lists of messages"


def conversations_to_trajectories(
    rows: Iterable[Mapping[str, Any]] | str | os.PathLike[str],
    tokenizer: Any,
    *,
    max_tokens: int | None = None,
    stop_token_ids: Collection[int] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Iterable[Trajectory]:
    r"""Make a trajectory of each conversation: `trajpack.Trajectory.from_messages` of rows.

    A row has one of these forms, as in OpenAI's and TRL's data sets:

    ======================================== ====================================================
    columns                                  turns
    ======================================== ====================================================
    ``messages``                             each message of the assistant
    ``prompt``, ``completion``: messages     those of the completion; the prompt is context
    ``prompt``, ``completion``: texts        one, of the texts as they are, without the template
    ======================================== ====================================================

    The columns ``id`` (a text or an integer), ``tools`` (a list or its JSON text) and
    ``chat_template_kwargs`` are optional. A row without ``id`` is called ``row-0`` and so on. Nulls
    in the structs of a Hugging Face data set are keys of other rows, and left out.

    Args:
        rows: Mappings, such as a Hugging Face data set, or the path of a JSONL file.
        tokenizer: A Hugging Face tokenizer.
        max_tokens: Turns with more tokens, prompt included, are left out. Nothing is cut off
            within a turn.
        stop_token_ids: As of `trajpack.Trajectory.from_messages`.
        chat_template_kwargs: As there, for all rows; a row's own come first, but for None.

    Returns:
        An iterable, which reads the rows again each time, so that a `trajpack.PackedDataset` can
        resume; of rows that are an iterator an iterator. Rows are read as they are needed.

    Raises:
        TypeError: If a row is no mapping.
        ValueError: As `trajpack.Trajectory.from_messages`, if a row has other columns, or a line is
            no JSON. The error names the row or the line.
        OSError: If the file cannot be read.

    Warns:
        UserWarning: After the last row, with the number of turns and rows that were left out.

    Example:
        >>> from trajpack import pack
        >>> from trajpack.agent import build_tiny_model
        >>> _, tokenizer = build_tiny_model()
        >>> rows = [{"prompt": "2+3=", "completion": "5", "id": "sum"}]
        >>> batch = pack([*conversations_to_trajectories(rows, tokenizer)])
        >>> tokenizer.decode(batch.input_ids)
        '2+3=5<|im_end|>'
    """
    options = chat_template_kwargs or {}
    found = _Conversations(rows, tokenizer, max_tokens, stop_token_ids, options)
    return iter(found) if isinstance(rows, Iterator) else found


@dataclass(frozen=True)
class _Conversations:
    """Trajectories of rows; each iteration reads the rows again."""

    rows: Iterable[Mapping[str, Any]] | str | os.PathLike[str]
    tokenizer: Any
    max_tokens: int | None
    stop_token_ids: Collection[int] | None
    chat_template_kwargs: Mapping[str, Any]

    def __iter__(self) -> Iterator[Trajectory]:
        num_rows = num_empty = num_long = num_turns = num_left_out = 0
        for at, (place, row) in enumerate(_placed(self.rows)):
            try:
                turns = self._turns(row)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{place}: {error}") from error
            kept = fitting(turns, self.max_tokens)
            num_rows, num_turns = num_rows + 1, num_turns + len(turns)
            num_left_out += len(turns) - len(kept)
            num_empty, num_long = num_empty + (not turns), num_long + bool(turns and not kept)
            if kept:
                name = row.get("id")
                name = f"row-{at}" if name is None else str(name)
                yield Trajectory(name, kept, turn_discount=0.0)
        if num_empty or num_left_out:
            warnings.warn(
                f"conversations_to_trajectories: of {num_rows:,} rows {num_empty:,} have no "
                f"message of the assistant with a weight other than 0; of {num_turns:,} turns "
                f"{num_left_out:,} have more than max_tokens={self.max_tokens} tokens, among them "
                f"all turns of {num_long:,} rows; these rows and turns are left out",
                stacklevel=2,
            )

    def _turns(self, row: Mapping[str, Any]) -> list[Turn]:
        keys = ("messages", "prompt", "completion")
        messages, prompt, completion = (row.get(key) for key in keys)
        stops = self.stop_token_ids
        if messages is None and isinstance(prompt, str) and isinstance(completion, str):
            return turns_of_text(prompt, completion, self.tokenizer, stop_token_ids=stops)
        if messages is None and isinstance(prompt, list) and isinstance(completion, list):
            messages = [
                {**one, "weight": 0} if isinstance(one, Mapping) else one for one in prompt
            ] + completion
        if not isinstance(messages, list):
            raise ValueError(f"a row must have {_COLUMNS}, got {', '.join(map(shown, row))}")
        own = row.get("chat_template_kwargs") or {}
        named = {key: value for key, value in own.items() if value is not None}
        return turns_of_messages(
            messages,
            self.tokenizer,
            tools=row.get("tools"),
            stop_token_ids=stops,
            chat_template_kwargs={**own, **self.chat_template_kwargs, **named},
        )


def _placed(
    rows: Iterable[Mapping[str, Any]] | str | os.PathLike[str],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield rows with the names of their places."""
    if not isinstance(rows, str | os.PathLike):
        features = getattr(rows, "features", None)  # a data set of Hugging Face, so of Arrow
        for at, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise TypeError(f"row {at} must be a mapping, got {shown(row)}")
            yield f"row {at}", row if features is None else without_fills(row, features)
        return
    with open(rows, "rb") as file:
        for number, line in enumerate(file, start=1):
            place = f"{os.fspath(rows)}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise TypeError(f"{place}: expected an object, got {shown(row)}")
            yield place, row
