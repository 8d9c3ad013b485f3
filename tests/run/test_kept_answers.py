"""Answers that are kept: read again, added to by several, torn lines left out, secrets not written."""

import json

from viva.run.kept_answers import AnswerFile


def test_what_was_kept_is_there_in_another_process_and_a_torn_line_is_not(tmp_path):
    path = tmp_path / "folder" / "answers.jsonl"
    first = AnswerFile(path)
    assert first.get("a") is None
    first.put("a", {"text": "x\u2028y"})
    with path.open("ab") as file:
        file.write(b'{"key": "b", "answer": {"te')
    other = AnswerFile(path)
    assert (other.get("a"), other.get("b")) == ({"text": "x\u2028y"}, None)
    other.put("c", {"text": "z"})
    last = AnswerFile(path)
    assert [last.get(key) for key in "abc"] == [{"text": "x\u2028y"}, None, {"text": "z"}]
    assert path.read_bytes().count(b"\n") == 3


def test_rubbish_in_the_file_is_no_answer(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_bytes(
        b'\n[]\n{"key": 1, "answer": {}}\n{"key": "k", "answer": 2}\n\xff\n{"key": "a", "answer": {}}\n'
    )
    kept = AnswerFile(path)
    assert (kept.get("k"), kept.get("a")) == (None, {})


def answer(prompt, sampled):
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": sampled}}


def test_what_the_answers_cost_is_told_up_to_a_step_whoever_reads_them(tmp_path):
    first = AnswerFile(tmp_path / "answers.jsonl")
    assert first.usage().total_tokens == 0
    for step, key in ((0, "a"), (2, "b"), (2, "c")):
        first.step = step
        first.put(key, answer(100, 10))
    first.put("d", {"usage": {"prompt_tokens": "many"}})  # of a server that tells no numbers
    for kept in (first, AnswerFile(tmp_path / "answers.jsonl")):
        told = [kept.usage(through) for through in (0, 1, 2, None)]
        assert [each.requests for each in told] == [1, 1, 4, 4]
        assert [(each.prompt_tokens, each.sampled_tokens) for each in told[1:3]] == [(100, 10), (300, 30)]


def test_two_writers_of_one_file_find_their_own_answers(tmp_path):
    one, other = (AnswerFile(tmp_path / "answers.jsonl") for _ in range(2))
    for number in range(3):
        one.put(f"one {number}", {"text": "1" * number})
        other.put(f"other {number}", {"text": "2"})
    assert [one.get(f"one {number}") for number in range(3)] == [{"text": "1" * n} for n in range(3)]
    assert [other.get(f"other {number}") for number in range(3)] == [{"text": "2"}] * 3


def test_no_secret_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "abcdefgh12345678")
    path = tmp_path / "answers.jsonl"
    AnswerFile(path).put("a", {"text": "the key is abcdefgh12345678"})
    assert json.loads(path.read_text())["answer"] == {"text": "the key is ***"}
