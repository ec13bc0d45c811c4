"""Rows of conversations, from data sets and JSONL files, as trajectories."""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from trajpack.packing.conversion import shown
from trajpack.packing.messages import fitting, turns_of_messages, turns_of_text, without_fills
from trajpack.packing.types import Trajectory, Turn

_Rows: TypeAlias = Iterable[Mapping[str, Any]] | str | os.PathLike[str]
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

    A row has ``messages``, or ``prompt`` and ``completion``, as in OpenAI's and TRL's data sets.
    Turns are the messages of the assistant, those of the completion alone where there is one. A
    prompt and completion that are texts are one turn as they are, without the template.

    The columns ``id`` (a text or an integer; ``row-0`` and so on by default), ``tools`` (a list or
    its JSON text) and ``chat_template_kwargs`` are optional. Nulls in the structs of a Hugging Face
    data set are keys of other rows, and left out.

    Args:
        rows: Mappings, such as a Hugging Face data set, or the path of a JSONL file.
        tokenizer: A Hugging Face tokenizer.
        max_tokens: Turns with more tokens, prompt included, are left out and counted in a warning
            after the last row.
        stop_token_ids: As of `trajpack.Trajectory.from_messages`.
        chat_template_kwargs: As there, for all rows; a row's own come first, but for None.

    Returns:
        An iterable, which reads the rows again each time, so that a `trajpack.PackedDataset` can
        resume; of rows that are an iterator an iterator. Rows are read as they are needed.

    Raises:
        TypeError: If a row is no mapping.
        ValueError: As `trajpack.Trajectory.from_messages`, if a row has other columns, or a line is
            no JSON. The error names the row or the line.

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
    trajectories = _Conversations(rows, tokenizer, max_tokens, stop_token_ids, options)
    return iter(trajectories) if isinstance(rows, Iterator) else trajectories


@dataclass(frozen=True)
class _Conversations:
    """Trajectories of rows; each iteration reads the rows again."""

    rows: _Rows
    tokenizer: Any
    max_tokens: int | None
    stop_token_ids: Collection[int] | None
    chat_template_kwargs: Mapping[str, Any]

    def __iter__(self) -> Iterator[Trajectory]:
        num = Counter[str]()
        for at, (place, row) in enumerate(_placed(self.rows)):
            try:
                if not isinstance(row, Mapping):
                    raise TypeError(f"expected a mapping, got {shown(row)}")
                turns = self._turns(row)
            except (TypeError, ValueError) as error:
                raise type(error)(f"{place}: {error}") from error
            kept = fitting(turns, self.max_tokens)
            num.update(rows=1, turns=len(turns), left_out=len(turns) - len(kept))
            num.update(empty=not turns, long=bool(turns and not kept))
            if kept:
                name = row.get("id")
                yield Trajectory(f"row-{at}" if name is None else str(name), kept, turn_discount=0)
        if num["empty"] or num["left_out"]:
            warnings.warn(
                f"conversations_to_trajectories: of {num['rows']:,} rows {num['empty']:,} have no "
                f"message of the assistant with a weight other than 0; of {num['turns']:,} turns "
                f"{num['left_out']:,} have more than max_tokens={self.max_tokens} tokens, among "
                f"them all turns of {num['long']:,} rows; these rows and turns are left out",
                stacklevel=2,
            )

    def _turns(self, row: Mapping[str, Any]) -> list[Turn]:
        stops = self.stop_token_ids
        match [row.get(key) for key in ("messages", "prompt", "completion")]:
            case [None, str(prompt), str(completion)]:
                return turns_of_text(prompt, completion, self.tokenizer, stop_token_ids=stops)
            case [None, list(prompt), list(completion)]:
                messages = [{**m, "weight": 0} if isinstance(m, Mapping) else m for m in prompt]
                messages += completion
            case [list(messages), _, _]:
                pass
            case _:
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


def _placed(rows: _Rows) -> Iterator[tuple[str, Any]]:
    """Yield rows with the names of their places."""
    if not isinstance(rows, str | os.PathLike):
        features = getattr(rows, "features", None)  # a data set of Hugging Face, so of Arrow
        for at, row in enumerate(rows):
            yield f"row {at}", row if features is None else without_fills(row, features)
        return
    with open(rows, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{os.fspath(rows)}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{place}: not JSON: {error}") from error
            yield place, row
