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


def test_no_secret_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "abcdefgh12345678")
    path = tmp_path / "answers.jsonl"
    AnswerFile(path).put("a", {"text": "the key is abcdefgh12345678"})
    assert json.loads(path.read_text())["answer"] == {"text": "the key is ***"}
