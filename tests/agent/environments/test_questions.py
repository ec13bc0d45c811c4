from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from trajpack.agent.environments.questions import (
    ExactAnswerEnvironment,
    Question,
    arithmetic_questions,
    load_questions,
    reasoning_gym_questions,
)

GSM8K = Path(__file__).parents[3] / ".." / "shared" / "data" / "gsm8k_test.jsonl"
REFUSED = "expected 'prompt' and 'solutions', or .*, and messages that end with a question, got "
GOOD = json.dumps({"question": "1 + 1?", "answer": "#### 2"})


def write(folder: Path, *lines: str | dict[str, Any]) -> Path:
    path = folder / "sums.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


def test_the_final_answer_of_a_gsm8k_line_follows_the_last_mark(tmp_path: Path) -> None:
    path = write(tmp_path, {"question": "Q?", "answer": "#### no\nyes\n#### 1,234 "})
    assert load_questions(path) == [
        Question("sums-1", ({"role": "user", "content": "Q?"},), ("1,234",))
    ]


def test_a_prompt_may_be_text_or_a_chat(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]
    path = write(
        tmp_path,
        {"prompt": "1 + 1?", "solutions": ["2", "\\boxed{2}"], "id": "a@b", "task_id": 3},
        {"prompt": chat, "solutions": ["2"], "id": 7},
    )
    text, messages = load_questions(path)
    assert (text.id, text.task_id, text.solutions) == ("a@b", 3, ("2", "\\boxed{2}"))
    assert (messages.id, messages.messages) == ("7", tuple(chat))
    assert messages.text == "Be brief.\n\n1 + 1?"


def test_blank_lines_and_a_byte_order_mark_are_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, "\ufeff" + GOOD, "", "   ", GOOD)
    assert [question.id for question in load_questions(path)] == ["sums-1", "sums-4"]


@pytest.mark.parametrize(
    ("answer", "solution"),
    [("One and one.\n#### 2", "2"), (" 1/2 ", "1/2"), (2, "2"), (-0.5, "-0.5")],
)
def test_an_answer_is_a_number_or_a_word(tmp_path: Path, answer: Any, solution: str) -> None:
    (question,) = load_questions(write(tmp_path, {"question": "Q?", "answer": answer}))
    assert question.solutions == (solution,)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON: Expecting property name"),
        pytest.param("[" * 100_000, "recursion", id="deep nesting"),
        ("[1]", REFUSED),
        ({"question": "Q?"}, REFUSED),
        ({"question": "", "answer": "#### 2"}, REFUSED),
        ({"question": "Q?", "answer": "It is 2."}, "no final answer after .*'It is 2.'"),
        ({"question": "Q?", "answer": "2 ####  "}, REFUSED),
        ({"prompt": [{"role": "assistant", "content": "2"}], "solutions": ["2"]}, REFUSED),
        ({"prompt": "Q?", "solutions": []}, REFUSED),
        ({"prompt": "Q?", "solutions": ["2", 2]}, REFUSED),
        ({"prompt": [], "solutions": ["2"]}, REFUSED),
        ({"prompt": ["Q?"], "solutions": ["2"]}, REFUSED),
        ({"prompt": [{"role": "user"}], "solutions": ["2"]}, REFUSED),
        ({"prompt": "Q?", "solutions": ["2"], "task_id": True}, "task_id an integer, .* and True"),
        ({"prompt": "Q?", "solutions": ["2"], "id": 1.5}, "id must be a name .*, got 1.5"),
    ],
)
def test_a_malformed_line_is_named_by_file_and_number(
    tmp_path: Path, line: str | dict[str, Any], message: str
) -> None:
    path = write(tmp_path, GOOD, line, GOOD)
    with pytest.raises(ValueError, match=rf"sums\.jsonl, line 2: .*{message}"):
        load_questions(path)


def test_nothing_is_read_beyond_the_limit(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "", GOOD, "not JSON")
    assert [question.id for question in load_questions(path, limit=2)] == ["sums-1", "sums-3"]
    with pytest.raises(ValueError, match=r"sums\.jsonl, line 4: not JSON"):
        load_questions(path, limit=3)
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        load_questions(path, limit=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f'{GOOD}\n{{"question": "\udcff"}}', "line 2: 'utf-8' codec can't decode"),
        ("\n", r"sums\.jsonl: no question"),
    ],
)
def test_a_malformed_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message):
        load_questions(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_questions(tmp_path / "nowhere.jsonl")


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K test set is not there")
def test_the_whole_gsm8k_test_set_is_read() -> None:
    questions = load_questions(GSM8K)
    assert len(questions) == 1319
    assert questions[0].id == "gsm8k_test-1"
    assert questions[0].solutions == ("18",)
    for question in questions:
        float(question.solutions[0].replace(",", ""))


def test_reasoning_gym_questions_repeat_with_their_seed() -> None:
    first = reasoning_gym_questions(size=3, seed=1)
    assert first == reasoning_gym_questions(size=3, seed=1)
    assert first != reasoning_gym_questions(size=3, seed=2)
    assert [question.id for question in first] == [f"chain_sum-1-{i}" for i in range(3)]
    for question in first:
        expression = question.text.rpartition(":")[2].rstrip(" =")
        assert eval(expression) == int(question.solutions[0])  # sums of integers
        assert question.gym_entry is not None
        assert question.gym_task == "chain_sum"
    with pytest.raises(ValueError, match="no_such_task"):
        reasoning_gym_questions("no_such_task", size=1, seed=0)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        reasoning_gym_questions(size=0, seed=0)


def test_a_sum_is_up_to_nine_and_the_seed_decides_which() -> None:
    questions = arithmetic_questions(500, seed=3)
    assert len({question.id for question in questions}) == 500
    assert len({question.text for question in questions}) == 36
    for question in questions:
        left, right = map(int, question.text.split("+"))
        assert min(left, right) >= 1
        assert question.solutions == (str(left + right),)
        assert left + right <= 9
    assert arithmetic_questions(500, seed=3) == questions
    assert arithmetic_questions(500, seed=4) != questions
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        arithmetic_questions(0, seed=0)


def judged(environment: ExactAnswerEnvironment, qid: str, *answers: str) -> list[bool]:
    return asyncio.run(environment.step((qid, answers)))[1]


def test_an_answer_is_right_word_for_word() -> None:
    ask = ({"role": "user", "content": "2+3"},)
    environment = ExactAnswerEnvironment([Question("q", ask, ("5", "five"))])
    rewards = judged(environment, "q@7", "5", " five\n", "2+3", "55", "")
    assert rewards == [True, True, False, False, False]
    with pytest.raises(ValueError, match="no question has the id 'p@0'"):
        judged(environment, "p@0", "5")
    with pytest.raises(TypeError, match="must be a list of strings"):
        asyncio.run(environment.step(("q", "5")))


def test_questions_without_answers_or_names_of_their_own_are_refused() -> None:
    question = Question("q", (), ("1",))
    with pytest.raises(ValueError, match="question id 'q' appears twice"):
        ExactAnswerEnvironment([question, question])
    with pytest.raises(ValueError, match="question 'q' has no solutions"):
        ExactAnswerEnvironment([Question("q", (), ())])
