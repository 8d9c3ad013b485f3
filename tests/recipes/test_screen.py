"""viva screen from the command line and from Python, on a model that it has never seen."""

import json
from pathlib import Path

import chz
import pytest
from random_models import make_model

import viva
import viva.cli
from viva.eval.screening import FORMAT
from viva.recipes.evaluation import ScreenOptions

SMALL = {"num_problems": 6, "num_samples": 3, "max_tokens": 6, "resamples": 100}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def arguments(**options):
    return [f"{name}={value}" for name, value in (SMALL | options).items()]


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def screened(capsys, model, task, **options):
    status = viva.cli.main(["screen", str(model), str(task), *arguments(**options)])
    told = capsys.readouterr()
    assert status == 0, told.err
    path = Path(told.out.split()[-1])
    return told.out, json.loads(path.read_text())


def test_a_task_with_answers(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = {"question_template": "{question} Only the number.", "system_prompt": "Be brief."}
    rows = [{"query": f"{n} + 1?", "answer": n + 1} for n in range(8)] + [{"query": "Why?"}]
    out, found = screened(capsys, model, write(tmp_path / "task.jsonl", rows), **asked)
    assert found["format"] == FORMAT
    assert len(found["problems"]) == 6
    assert found["problems"][0]["question"] == "0 + 1? Only the number."
    assert [len(each["tries_N"]) for each in found["problems"]] == [3] * 6
    for name in (
        "accuracy/greedy",
        "accuracy/maj@3",
        "solved/never",
        "correlation/majority",
        "replies/finished",
    ):
        assert name in found["figures"]
        assert name in out
    assert found["advice"][-1]["about"] == "summary"
    assert found["options"]["num_samples"] == 3
    assert found["target"]["kind"] == "model"
    again, same = screened(capsys, model, tmp_path / "task.jsonl", **asked)
    assert (again, same) == (out, found)


def test_conversations_are_held_on_the_first_problems(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    task = write(tmp_path / "task.jsonl", [{"query": f"{n} + 1?", "answer": n + 1} for n in range(6)])
    out, found = screened(capsys, model, task, conversations=2, num_agents=2)
    assert {kind: len(played) for kind, played in found["played"].items()} == {
        "conversation": 2,
        "critique": 2,
    }
    assert {"conversation/void_rate", "critique/reward_truth_gap"} <= set(found["figures"])
    told = {each["about"] for each in found["advice"]}
    assert {"tournament, in conversation", "peer_review, in critique"} <= told
    assert "peer_review, in critique" in " ".join(out.split())


def test_a_task_without_answers(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    task = write(tmp_path / "task.jsonl", [{"query": f"Why {n}?"} for n in range(6)])
    out, found = screened(capsys, model, task)
    assert not found["has_answers"]
    assert "answers/agreement" in found["figures"]
    assert not [name for name in found["figures"] if name.startswith("accuracy")]
    assert "accuracy" not in out


def test_a_family_of_reasoning_gym_in_python(model, tmp_path, monkeypatch):
    pytest.importorskip("reasoning_gym")
    monkeypatch.chdir(tmp_path)
    screening = viva.screen(model, "reasoning_gym:chain_sum,max_terms=2", output="own.json", **SMALL)
    assert screening.has_answers
    assert "[reasoning_gym:chain_sum," in (screening.problems[0].answer or "")
    assert json.loads(Path("own.json").read_text())["prompts_digest"] == screening.prompts_digest


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("nowhere.jsonl", [], "TASK=nowhere.jsonl is not a file"),
        ("reasoning_gym:chainsum", [], "Did you mean 'chain_sum'"),
        ("task.jsonl", ["temperature=0"], "temperature must be positive: all tries would be the same"),
        ("task.jsonl", ["num_samples=1"], "num_samples must be 2 or more; got 1"),
        ("task.jsonl", ['rewards=["tournament"]'], "tournament pays conversations"),
        ("task.jsonl", ['rewards=["majorty"]'], "Did you mean 'majority'"),
        ("task.jsonl", ["question_template=no"], "question_template must have the place of the prompt"),
        ("task.jsonl", ["conversations=2", 'kinds=["talk"]'], "kinds must be of conversation, critique"),
        ("task.jsonl", ["conversations=2", "num_agents=1"], "num_agents must be 2 or more"),
        ("task.jsonl", ["sample=3"], "unknown option 'sample'"),
        ("task.jsonl", ["grader=choice"], "grader=choice needs known answers"),
        ("task.jsonl", ["num_pairs=0", "judge_answers_first=True"], "num_pairs=0 judges no pair"),
        ("task.jsonl", ['criteria={"It is short.": 1}'], "criteria would change nothing: no reward scores"),
        ("task.jsonl", ['rewards=["rubric"]', "criteria={}"], "criteria must be one or more that differ"),
        ("task.jsonl", ["output=x.txt"], "output must be a file that ends in .json"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(task, options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(Path("task.jsonl"), [{"query": "1 + 1?", "answer": 2}])
    try:
        status = viva.cli.main(["screen", "tiny", task, *options])
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert message in capsys.readouterr().err


def test_the_page_names_every_option_with_its_default():
    from pages import codes, page, tables

    rows = [row for table in tables(page("screen.md"), "option") for row in table]
    defaults = ScreenOptions()
    assert sorted(codes(row[0])[0] for row in rows) == sorted(chz.asdict(defaults))
    for row in rows:
        assert codes(row[1])[0] == str(getattr(defaults, codes(row[0])[0])), row[0]
