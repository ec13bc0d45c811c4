from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from trajpack.agent.agents.answer_log import answer_file_name, log_answers
from trajpack.agent.agents.conversation import Exchange
from trajpack.packing.types import Turn

parts = [
    *"aA./%~\\- \0\ud800",
    "%2e",
    "CON",
    "ß",
    "a\u0308",
    "\u017f",
    "x" * 161,
    "X" * 161,
    ".txt",
]
any_qid = st.one_of(
    st.text(st.characters(categories=None), max_size=300),
    st.lists(st.sampled_from(parts), max_size=6).map("".join),
)


def logged(
    prompt: str = "1 + 1?",
    text: str = "2",
    *,
    success: bool = True,
    reward: float = 1.0,
    **versions: int,
) -> tuple[str, Exchange]:
    turn = Turn([1, 2, 3, 4], [5], [-0.5], **versions)
    return prompt, Exchange(turn, np.array([5], np.int32), text, success, reward)


def write(folder: Path, qid: str, *turns: tuple[str, Exchange]) -> None:
    log_answers(folder, qid, turns)


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_each_version_gets_a_folder_with_its_turns_in_order(tmp_path: Path) -> None:
    turns = [logged(version_start=2, version_end=10), logged(version_start=10, reward=-0.5)]
    write(tmp_path, "q0@0", *turns, logged(version_start=10, success=False))
    assert files(tmp_path) == ["10/q0@0.jsonl", "10/q0@0.txt", "2/q0@0.jsonl", "2/q0@0.txt"]
    lines = [json.loads(line) for line in (tmp_path / "10/q0@0.jsonl").read_text().splitlines()]
    assert [(line["turn"], line["success"]) for line in lines] == [(1, True), (2, False)]
    assert lines[0] == {
        "qid": "q0@0",
        "turn": 1,
        "version_start": 10,
        "version_end": 0,
        "success": True,
        "reward": -0.5,
        "prompt_len": 4,
        "answer_len": 1,
    }


def test_the_text_file_shows_prompt_and_answer_of_each_turn(tmp_path: Path) -> None:
    write(tmp_path, "q0@0", logged("1 + 1?\nSay it."))
    assert (tmp_path / "0/q0@0.txt").read_text() == (
        "q0@0 turn 0: versions 0 to 0, right, reward 1\n"
        "prompt (4 tokens):\n    1 + 1?\n    Say it.\n"
        "answer (1 tokens):\n    2\n\n"
    )


def test_a_later_episode_of_the_same_id_replaces_the_earlier(tmp_path: Path) -> None:
    write(tmp_path, "q0", logged(), logged())
    write(tmp_path, "q0", logged())
    assert len((tmp_path / "0/q0.jsonl").read_text().splitlines()) == 1
    assert files(tmp_path) == ["0/q0.jsonl", "0/q0.txt"]


@settings(deadline=None)
@given(text=st.text(st.characters(categories=None)), qid=any_qid)
def test_no_text_can_forge_a_line(
    tmp_path_factory: pytest.TempPathFactory, text: str, qid: str
) -> None:
    folder = tmp_path_factory.mktemp("log")
    write(folder, qid, logged(text, text))
    name = answer_file_name(qid)
    jsonl = (folder / f"0/{name}.jsonl").read_text()
    assert jsonl.count("\n") == 1
    assert json.loads(jsonl)["qid"] == qid
    written = (folder / f"0/{name}.txt").read_text()
    lines = written.splitlines()
    assert lines == written.split("\n")[:-1]
    assert all(line.isprintable() for line in lines)
    titles = [line for line in lines if line and not line.startswith("    ")]
    assert len([line for line in titles if line.startswith(("prompt (", "answer ("))]) >= 2
    assert len(lines) == 4 + 2 * (text.count("\n") + 1)


@settings(deadline=None)
@given(st.lists(any_qid, unique=True, min_size=2, max_size=20))
def test_different_ids_have_different_files_even_where_case_does_not_count(
    qids: list[str],
) -> None:
    assert len({answer_file_name(qid).lower() for qid in qids}) == len(qids)


@settings(deadline=None)
@given(any_qid)
def test_a_file_name_is_one_component_of_a_path_that_a_file_system_takes(qid: str) -> None:
    name = answer_file_name(qid)
    assert Path(name).parts == (name,)
    assert name.isascii()
    assert name.isprintable()
    assert not set(name) & set("/\\\0 ")
    assert not name.startswith((".", "-"))
    assert 0 < len(name) <= 200


def test_plain_ids_keep_their_name() -> None:
    plain = ["q0@0", "gsm8k_test-17@3", "abc@idx:0-1", "a.b,c=d+e"]
    assert [*map(answer_file_name, plain)] == plain


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, *args: Any) -> Any:
        if ".jsonl" in path.name:
            with open(path, "w") as file:
                file.write("half")
            raise OSError("full")
        return open(path, *args)

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(OSError, match="full"):
        write(tmp_path, "../q0", logged())
    assert files(tmp_path) == [f"0/{answer_file_name('../q0')}.txt"]
