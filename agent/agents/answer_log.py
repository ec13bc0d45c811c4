"""Log of prompts and answers for people to read."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from trajpack.agent.agents.conversation import Exchange
from trajpack.packing.durable_files import write_durably
from trajpack.packing.text import printable


def log_answers(
    folder: str | os.PathLike[str], qid: str, turns: Sequence[tuple[str, Exchange]]
) -> None:
    """Write one episode to ``<folder>/<policy version of the turns' first tokens>/<name>``.

    It has a file ``.txt`` for people and a file ``.jsonl`` with a line for each turn, both called
    after its id. A file holds a whole episode at any time; a later episode of the same id
    and version replaces it. Text of a model is escaped, so it can neither forge a line of the log
    nor command a terminal.

    Args:
        folder: Folder of all episodes.
        qid: Name of the episode.
        turns: Text of each turn's whole prompt, and the turn.

    Raises:
        OSError: If the folder cannot be written to.
    """
    texts = defaultdict[str, str](str)
    for at, (prompt_text, exchange) in enumerate(turns):
        turn = exchange.turn
        numbers = {
            "qid": qid,
            "turn": at,
            "prompt_len": len(turn.prompt_ids),
            "answer_len": len(exchange.ids),
            "success": exchange.success,
            "reward": exchange.reward,
            "version_start": turn.version_start,
            "version_end": turn.version_end,
        }
        path = os.path.join(folder, str(turn.version_start), answer_file_name(qid))
        texts[f"{path}.txt"] += (
            f"{printable(qid)} turn {at}: versions {turn.version_start} to {turn.version_end}, "
            f"{'right' if exchange.success else 'wrong'}, reward {exchange.reward:g}\n"
            f"prompt ({len(turn.prompt_ids)} tokens):\n{_indented(prompt_text)}"
            f"answer ({len(exchange.ids)} tokens):\n{_indented(exchange.text)}\n"
        )
        texts[f"{path}.jsonl"] += json.dumps(numbers) + "\n"
    for path, text in texts.items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_durably(Path(path), text.encode())


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


def _indented(text: str) -> str:
    return "".join(f"    {printable(line)}\n" for line in text.split("\n"))
