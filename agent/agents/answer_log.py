"""Log of prompts and answers for people to read."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from trajpack.packing.durable_files import replacing
from trajpack.packing.representation import brief_repr
from trajpack.packing.text import printable


@dataclass(frozen=True)
class LoggedTurn:
    """One turn of a finished episode.

    Attributes:
        turn: Which turn of the episode, from 0.
        prompt_text: Text of the whole prompt of this turn.
        completion_text: Text that the environment judged.
        prompt_len, answer_len: Tokens of this turn's prompt, and of its completion.
        success: Judgement of the environment.
        reward: Reward as shaped by the agent, not discounted.
        version_start, version_end: Policy versions of the first and the last sampled token.
    """

    turn: int
    prompt_text: str
    completion_text: str
    prompt_len: int
    answer_len: int
    success: bool
    reward: float
    version_start: int
    version_end: int

    __repr__ = brief_repr


class AnswerLog:
    """A folder of answers: ``<folder>/<policy version of the turns' first tokens>/<name>``.

    An episode has a file ``.txt`` for people and a file ``.jsonl`` with a line for each turn, both
    called after its id. A file holds a whole episode at any time; a later episode of the same id
    and version replaces it. Text of a model is escaped, so it can neither forge a line of the log
    nor command a terminal.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.path.abspath(folder))
        """Absolute path of the folder."""

    async def write(self, qid: str, turns: Sequence[LoggedTurn]) -> None:
        """Write one episode, away from the event loop.

        Raises:
            OSError: If the folder cannot be written to.
        """
        await asyncio.to_thread(self._write, qid, turns)

    def _write(self, qid: str, turns: Sequence[LoggedTurn]) -> None:
        for version in sorted({turn.version_start for turn in turns}):
            logged = [turn for turn in turns if turn.version_start == version]
            folder = self.folder / str(version)
            folder.mkdir(parents=True, exist_ok=True)
            for suffix, written in ((".txt", _as_text), (".jsonl", _as_json)):
                with replacing(folder / (answer_file_name(qid) + suffix)) as unfinished:
                    text = "".join(written(qid, turn) for turn in logged)
                    unfinished.write_text(text, encoding="utf-8", newline="\n")


def answer_file_name(qid: str) -> str:
    """Return the name, without suffix, of the files that log episode ``qid``.

    An id of small letters, digits and ``@ _ - . , : = +`` is its own name. Any other is replaced by
    what is plain in it and a hash, so that a name is never a path, and different ids never share
    one, whether or not case counts.

    Example:
        >>> answer_file_name("q0@0"), answer_file_name("Q0")
        ('q0@0', 'Q0~4d98893e06cf666506fff580b92c7ff2')
    """
    if re.fullmatch(r"[a-z0-9@_][a-z0-9@_.,:=+-]{0,159}", qid):
        return qid
    digest = hashlib.sha256(qid.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{re.sub('[^A-Za-z0-9@]', '_', qid[:100])}~{digest[:32]}"


def _as_json(qid: str, turn: LoggedTurn) -> str:
    numbers = {name: value for name, value in asdict(turn).items() if not name.endswith("_text")}
    return json.dumps({"qid": qid, **numbers}) + "\n"


def _as_text(qid: str, turn: LoggedTurn) -> str:
    return (
        f"{printable(qid)} turn {turn.turn}: versions {turn.version_start} to "
        f"{turn.version_end}, {'right' if turn.success else 'wrong'}, reward {turn.reward:g}\n"
        f"prompt ({turn.prompt_len} tokens):\n{_indented(turn.prompt_text)}"
        f"answer ({turn.answer_len} tokens):\n{_indented(turn.completion_text)}\n"
    )


def _indented(text: str) -> str:
    return "".join(f"    {printable(line)}\n" for line in text.split("\n"))
