"""What pages can be about besides runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from viva.view.files import kind_of, names_of, options_of, read_evaluations
from viva.view.run_index import read_run

MakeRun = Callable[..., Path]

RESULT = {
    "format": "viva evaluation 1",
    "target": {"name": "tiny", "kind": "model", "model": "some/model", "checkpoint": None},
    "options": {"seed": 3, "kinds": ["direct"]},
    "figures": {"direct/avg@1": {"value": 0.5, "low": None, "high": None, "num_problems": 4}},
}


def write(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_a_run_a_result_and_a_folder_of_results_are_told_apart(
    make_finished_run: MakeRun, tmp_path: Path
) -> None:
    run = make_finished_run()
    folder = tmp_path / "results"
    folder.mkdir()
    result = write(folder / "tiny-1.json", RESULT)
    write(folder / "other.json", {"format": "else"})
    assert [kind_of(source) for source in (run, result, folder)] == ["run", "result", "results"]
    assert [each["name"] for each in read_evaluations(folder)] == ["tiny-1"]
    assert read_evaluations(result) == read_evaluations(folder)
    assert options_of(result) == {
        "target": "tiny", "checkpoint": None, "model_name": "some/model", "seed": 3, "kinds": ["direct"],
    }  # fmt: skip
    assert options_of(folder) == {}


def test_a_result_brings_the_conversations_that_were_held_for_it(
    make_finished_run: MakeRun, transcript: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    result = write(tmp_path / "tiny-1.json", RESULT)
    assert read_run(result).entries == {}
    lines = [json.dumps(transcript(0, group)) for group in range(3)]
    (tmp_path / "tiny-1.transcripts.jsonl").write_text("\n".join(lines))
    source = read_run(result)
    assert list(source.entries) == [(0, 0), (0, 1), (0, 2)]
    assert (source.metrics, source.config["seed"]) == ([], 3)
    assert read_run(make_finished_run()).num_steps > 0


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("gone", None, "is not there"),
        ("empty.json", "", "is no result of viva eval"),
        ("list.json", "[]", "is no result"),
        ("deep.json", "[" * 100_000, "is no result"),
        ("other.json", '{"format": "viva evaluation 1"}', "is no result"),
    ],
)
def test_what_is_none_of_these_is_refused_with_what_to_give(
    tmp_path: Path, name: str, content: str | None, why: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"{why}.*Give the folder of a run.* or a result of viva eval"):
        kind_of(tmp_path / name)


def test_the_same_run_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"below/\.\./run is given twice; give another one beside it"):
        names_of([tmp_path / "other", tmp_path / "run", tmp_path / "below" / ".." / "run"])
    assert names_of([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no results of viva eval"):
        kind_of(tmp_path)
