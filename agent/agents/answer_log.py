"""Log of prompts and answers for people to read.

A finished episode leaves two files in one folder per policy version::

    <folder>/<version of the turn's first token>/<name>.txt      for people
    <folder>/<version of the turn's first token>/<name>.jsonl    one object per turn

`answer_file_name` makes ``<name>`` from the episode's id.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from trajpack.packing.representation import brief_repr
from trajpack.packing.text import printable

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789@_-.,:=+")
_MAX_NAME_CHARS = 160
"""File systems take 255 bytes; suffixes and a mark for unfinished files come on top."""


@dataclass(frozen=True)
class LoggedTurn:
    """One turn of a finished episode.

    Attributes:
        turn: Which turn of the episode, from 0.
        prompt_text: Text of the whole prompt of this turn.
        completion_text: Text that the environment judged.
        prompt_len: Tokens of this turn's prompt.
        answer_len: Tokens of this turn's completion.
        success: Judgement of the environment.
        reward: Reward as shaped by the agent, not discounted.
        version_start: Policy version of the first sampled token.
        version_end: Policy version of the last sampled token.
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
    """A folder of answers.

    A file is written beside its place and then moved there, so that it holds a whole episode at any
    time. A later episode of the same id and version replaces an earlier one. Text of a model is
    escaped, so it can neither forge a line of the log nor command a terminal.
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
        name = answer_file_name(qid)
        by_version = attrgetter("version_start")
        for version, group in groupby(sorted(turns, key=by_version), by_version):
            logged = list(group)
            folder = self.folder / str(int(version))
            folder.mkdir(parents=True, exist_ok=True)
            _replace(folder / f"{name}.txt", "".join(_as_text(qid, turn) for turn in logged))
            _replace(folder / f"{name}.jsonl", "".join(_as_json(qid, turn) for turn in logged))


def answer_file_name(qid: str) -> str:
    """Return the name, without suffix, of the files that log episode ``qid``.

    Letters, digits and ``@ _ - . , : = +`` stand for themselves, save a leading dot or
    dash; other bytes of the UTF-8 form are percent-encoded. Where the result has capitals
    or is too long for a file system, it ends in ``~`` and a hash of ``qid``. So a name is
    never a path, and different ids never share one, whether or not case counts.

    Example:
        >>> answer_file_name("q0@0"), answer_file_name("../q0")
        ('q0@0', '%2e.%2fq0')
        >>> answer_file_name("Q0")
        'Q0~4d98893e06cf666506fff580b92c7ff2'
    """
    raw = qid.encode("utf-8", "surrogatepass")
    name = "".join(
        chr(byte) if byte in _PLAIN and (i > 0 or byte not in b".-") else f"%{byte:02x}"
        for i, byte in enumerate(raw[: _MAX_NAME_CHARS + 1])
    )
    if name == name.lower() and len(name) <= _MAX_NAME_CHARS:
        return name or "%"
    return f"{name[:_MAX_NAME_CHARS]}~{hashlib.sha256(raw).hexdigest()[:32]}"


def _as_json(qid: str, turn: LoggedTurn) -> str:
    numbers = {name: value for name, value in asdict(turn).items() if not name.endswith("_text")}
    return json.dumps({"qid": qid, **numbers}) + "\n"


def _as_text(qid: str, turn: LoggedTurn) -> str:
    title = (
        f"{printable(qid)} turn {turn.turn}: versions {turn.version_start} to "
        f"{turn.version_end}, {'right' if turn.success else 'wrong'}, reward {turn.reward:g}"
    )
    return (
        f"{title}\n"
        f"prompt ({turn.prompt_len} tokens):\n{_indented(turn.prompt_text)}"
        f"answer ({turn.answer_len} tokens):\n{_indented(turn.completion_text)}\n"
    )


def _indented(text: str) -> str:
    return "".join(f"    {printable(line)}\n" for line in text.split("\n"))


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
