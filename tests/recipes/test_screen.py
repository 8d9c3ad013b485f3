"""viva screen from the command line and from Python, on a model that it has never seen."""

import json
from pathlib import Path

import chz
import pytest
import yaml
from random_models import make_model

import viva
import viva.cli
from viva.eval.screening import FORMAT
from viva.recipes.evaluation import ScreenOptions
from viva.tiny.tasks import problems as problems_of

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


def test_a_problem_that_does_not_fit_is_told_and_the_others_are_screened(
    model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    rows = [{"query": f"{n} + 1?", "answer": n + 1} for n in range(3)] + [{"query": "x" * 5000, "answer": 1}]
    task = write(tmp_path / "task.jsonl", rows)
    out, found = screened(capsys, model, task, rewards='["rubric", "majority"]', judge_answers_first=True)
    assert "note: the judge failed 1 time; the first: The prompt has" in out
    assert [len(each["rubric"]) for each in found["problems"]] == [3, 3, 3, 0]


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


LONG = "Think of every step, one after the other, and of what may be wrong in it. " * 8


def test_a_run_is_screened_as_it_is_planned(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    task = write(tmp_path / "task.jsonl", [{"query": f"{n} + 1?", "answer": n + 1} for n in range(6)])
    planned = {"recipe": "critique_self_play", "conversations": 2, "num_agents": 2, "ballots": "labels"}
    out, found = screened(capsys, model, task, **planned)
    assert set(found["played"]) == {"critique"}
    assert found["options"]["kinds"] == ["critique"]
    assert found["options"]["critique_self_play"]["ballots"] == "labels"
    assert "peer_review, in critique" in " ".join(out.split())
    told = {"prompts": json.dumps({"proposal": LONG}), "reward": "comas", "system_prompt": LONG}
    _, other = screened(capsys, model, task, **planned, **told)
    assert "comas, in critique" in {each["about"] for each in other["advice"]}
    for part in ("critique", "answers"):  # what is read is longer by the words of the options
        costs = [each["cost"][part] for each in (found, other)]
        less, more = (each["total_tokens"] - each["sampled_tokens"] for each in costs)
        assert more > less + 500, part


def test_options_of_a_recipe_are_read_from_a_file(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    task = write(tmp_path / "task.jsonl", [{"query": f"{n} + 1?", "answer": n + 1} for n in range(6)])
    Path("run.yaml").write_text(
        "strategies: iid\nreward: rubric\ncriteria: {It is short.: 1.0}\nsystem_prompt: Be brief.\nmax_tokens: 5\n"
        "model_name: tiny\nnum_samples: 2\n"
    )
    status = viva.cli.main(["screen", str(model), str(task), "recipe=math_efficiency", "config=run.yaml"])
    told = capsys.readouterr()
    assert status == 0, told.err
    found = json.loads(Path(told.out.split()[-1]).read_text())
    assert found["options"]["system_prompt"] == "Be brief."
    assert found["options"]["max_tokens"] == 5
    assert found["options"]["criteria"] == {"It is short.": 1.0}
    assert found["options"]["rewards"][-1] == "rubric"
    assert "correlation/rubric" in found["figures"]
    Path("config.json").write_text(
        json.dumps({"recipe": "math_efficiency"} | yaml.safe_load(Path("run.yaml").read_text()))
    )
    assert found["options"]["num_samples"] == 2
    for config in ("config.json", json.loads(Path("config.json").read_text())):
        by_name = viva.screen(model, task, config=config, strategies="iid", output="own.json")
        assert by_name.figures.keys() == found["figures"].keys()
        assert json.loads(Path("own.json").read_text()) == found


@pytest.mark.parametrize(
    ("reward", "asked"), [("serl", "judge"), ("shuffled_serl", "judge"), ("peer_prediction", "scorer")]
)
def test_a_planned_reward_that_the_answers_do_not_tell_is_named(model, tmp_path, monkeypatch, reward, asked):
    monkeypatch.chdir(tmp_path)
    task = write(tmp_path / "task.jsonl", [{"query": f"{n} + 1?", "answer": n + 1} for n in range(4)])
    options = {"recipe": "math_efficiency", "strategies": "iid", "reward": reward, "rewards": ["answers"]}
    screening = viva.screen(model, task, **options, num_samples=2, max_tokens=4, resamples=100)
    advice = {each.about: each for each in screening.advice}
    assert advice[reward].verdict == "unclear"
    assert f"it asks a {asked} about all pairs of answers" in advice[reward].reason
    assert [each.about for each in screening.advice].count("answers") == 1


def test_the_judge_that_is_planned_compares_the_pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    problems = [{"query": each.question, "answer": each.answer} for each in problems_of("test", 12, seed=0)]
    options = {"num_samples": 4, "max_tokens": 80, "resamples": 100, "recipe": "conversation_preference_rl"}
    options |= {"num_problems": 12, "conversations": 1, "num_agents": 2, "max_rounds": 1}
    one = viva.screen("tiny", problems, **options)
    two = viva.screen("tiny", problems, **options, judge_prompt=LONG)
    both = [sum(each.judged is not None for each in found.problems) for found in (one, two)]
    assert both[0] == both[1] > 0
    less, more = (found.cost["judged pairs"].total_tokens for found in (one, two))
    assert more > less + 100 * both[0]


def test_a_judge_that_only_answers_pays_the_conversations_of_a_screening(
    model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    task = write(tmp_path / "task.jsonl", [{"query": f"{n} + 1?", "answer": n + 1} for n in range(6)])
    planned = {"recipe": "conversation_preference_rl", "reward": "judge_answer", "max_rounds": 1}
    _, found = screened(capsys, model, task, **planned, conversations=2, num_agents=2)
    assert "judge_answer, in conversation" in {each["about"] for each in found["advice"]}
    assert found["figures"]["conversation/void_rate"]["value"] == 0.0
    assert found["cost"]["conversation"]["sampled_tokens"] > 0


def test_a_protocol_of_ones_own_is_screened(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    debate = viva.Protocol(rounds=[viva.Round("say", "Say a number.")], reward=longest)
    rows = [{"query": f"{n} + 1?", "answer": n + 1} for n in range(3)]
    found = viva.screen(model, rows, recipe=debate, conversations=2, num_agents=2, **SMALL)
    assert len(found.played["protocol"]) == 2
    assert "protocol/void_rate" in found.figures
    assert "longest, in protocol" in {each.about for each in found.advice}
    found = viva.screen(
        model, rows, recipe=debate, conversations=2, config={"reward": shortest, "num_agents": 2}, **SMALL
    )
    assert "shortest, in protocol" in {each.about for each in found.advice}


def longest(conversation):
    return {agent_id: float(len(text)) for agent_id, text in conversation.final_solutions().items()}


def shortest(conversation):
    return {agent_id: -pay for agent_id, pay in longest(conversation).items()}


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
        ("task.jsonl", ['rewards=["serl"]'], "rewards must be told by the answers themselves"),
        ("task.jsonl", ['rewards=["peer_prediction"]'], "peer_prediction asks a judge or scorer about all"),
        ("task.jsonl", ["num_agents=4"], "num_agents would change nothing: conversations=0 holds none"),
        ("task.jsonl", ['kinds=["critique"]'], "kinds would change nothing: conversations=0 holds none"),
        ("task.jsonl", ["conversations=2", 'kinds=["critique"]', "max_rounds=3"], "max_rounds would change"),
        ("task.jsonl", ["conversations=2", "kinds=[]"], "kinds=[] holds none of the 2 conversations"),
        ("task.jsonl", ['rewards=["majorty"]'], "Did you mean 'majority'"),
        ("task.jsonl", ["question_template=no"], "question_template must have the place of the prompt"),
        ("task.jsonl", ["conversations=2", 'kinds=["talk"]'], "kinds must be of conversation, critique"),
        ("task.jsonl", ["conversations=2", "num_agents=1"], "num_agents must be 2 or more"),
        ("task.jsonl", ["sample=3"], "unknown option 'sample'"),
        ("task.jsonl", ["grader=choice"], "grader=choice needs known answers"),
        ("task.jsonl", ["num_pairs=0", "judge_answers_first=True"], "num_pairs=0 judges no pair"),
        ("task.jsonl", ['criteria={"It is short.": 1}'], "criteria would change nothing: no reward scores"),
        ("task.jsonl", ['rewards=["rubric"]', "criteria={}"], "criteria must be one or more that differ"),
        ("task.jsonl", ["recipe=critique"], "Did you mean 'critique_self_play'"),
        ("task.jsonl", ["recipe=critique_self_play"], "conversations=0 holds none; give conversations=24"),
        ("task.jsonl", ["recipe=math_efficiency", "conversations=2"], "leave conversations=2 out"),
        ("task.jsonl", ["recipe=math_efficiency", "num_problms=3"], "Did you mean 'num_problems'"),
        ("task.jsonl", ["recipe=math_efficiency", "config=odd.yaml"], "Did you mean 'num_problems'"),
        ("task.jsonl", ["recipe=math_efficiency", "reward=tournament"], "pays conversations"),
        (
            "task.jsonl",
            ["recipe=critique_self_play", "conversations=2", 'kinds=["critique"]'],
            "kinds would change nothing",
        ),
        (
            "task.jsonl",
            ["recipe=critique_self_play", "conversations=2", "judge=nobody"],
            "judge must be current, initial",
        ),
        (
            "task.jsonl",
            ["recipe=critique_self_play", "conversations=2", "judge=https://host/v1", "judge_model=m"],
            "OPENAI_API_KEY is not set",
        ),
        ("task.jsonl", ["recipe=nowhere.py:PROTOCOL", "conversations=2"], "nowhere.py"),
        ("task.jsonl", ["output=x.txt"], "output must be a file that ends in .json"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(task, options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    write(Path("task.jsonl"), [{"query": "1 + 1?", "answer": 2}])
    Path("odd.yaml").write_text("num_problms: 3\n")
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
