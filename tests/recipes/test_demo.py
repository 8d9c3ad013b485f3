"""A demonstration is its recipe with options that the command line may change."""

import json
import re

import pytest

from viva.recipes import demo
from viva.recipes.data import load_jsonl
from viva.recipes.demo import (
    FOLDERS,
    demo_options,
    main,
    model_path,
    problem_options,
    word_problems,
)


@pytest.mark.parametrize(
    ("argv", "seed", "given"),
    [
        ([], 0, ["a=1", "seed=0"]),
        (["seed=7", "a=2"], 7, ["seed=7", "a=2"]),
        (["seed=x"], 0, ["a=1", "seed=x"]),  # for the recipe to refuse
        (["--help"], 0, ["a=1", "seed=0", "--help"]),
    ],
)
def test_what_the_command_line_says_wins_over_the_demonstrations_options(monkeypatch, argv, seed, given):
    seen = []

    def options(recipe, folder, *, seed):
        seen.append(seed)
        return {"a": "1", "seed": str(seed)}

    monkeypatch.setattr(demo, "demo_options", options)
    monkeypatch.setattr(demo, "train_recipe", lambda recipe, arguments: seen.append((recipe, arguments)) or 5)
    assert main(["critique_self_play", *argv]) == 5
    assert seen == [seed, ("critique_self_play", given)]


def test_problems_to_train_on_follow_the_seed_and_those_to_test_on_do_not(tmp_path):
    first, second = (problem_options(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    train = [list(load_jsonl(options["train_prompts_path"])) for options in (first, second)]
    test = [list(load_jsonl(options["test_prompts_path"])) for options in (first, second)]
    assert train[0] != train[1]
    assert test[0] == test[1]
    assert not {item.question for item in train[0]} & {item.question for item in test[0]}


def test_word_problems_share_no_step_and_no_text():
    def step(question):
        a, b = map(int, re.findall(r"\d+", question))
        story = next(word for word in ("buys", "gives", "boxes") if word in question)
        return story, *((a, b) if story == "gives" else sorted((a, b)))

    def result(question):
        story, a, b = step(question)
        return {"buys": a + b, "gives": a - b, "boxes": a * b}[story]

    train, test = word_problems(seed=0)
    assert (len(train), len(test)) == (206, 100)
    assert all(result(question) == answer > 0 for question, answer in (*train, *test))
    steps = [{step(question) for question, _ in problems} for problems in (train, test)]
    assert [len(each) for each in steps] == [206, 100]
    assert not steps[0] & steps[1]
    assert word_problems(seed=1)[1] == test
    assert word_problems(seed=1)[0] != train


def test_without_the_real_model_the_built_in_policy_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VIVA_CACHE", str(tmp_path / "cache"))
    with pytest.raises(SystemExit, match="2"):
        main(["max_steps=1", "max_steps=2"])
    told = capsys.readouterr().err
    assert f"{model_path().name} is not there: `make models` fetches it" in told.replace("\n", " ")
    assert (tmp_path / FOLDERS["critique_self_play"] / "train.jsonl").is_file()


def test_a_demonstration_that_there_is_not_is_told(capsys):
    assert main(["critique"]) == 2
    assert "'critique' has no demonstration; there are critique_self_play" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", FOLDERS)
def test_the_built_in_policys_options_are_those_of_the_recipe(recipe, tmp_path):
    options = demo_options(recipe, tmp_path, seed=3)
    assert options["model_name"] == "tiny"
    assert options["seed"] == "3"


def rows_of(told):
    assert re.search(r"right on held-out problems +untrained +trained\n", told)
    return {
        name: (int(count), *map(float, shares))
        for name, count, *shares in re.findall(
            r"^(temperature .*?) \((\d+) problems?\) +(\d+\.\d)% +(\d+\.\d)%$", told, re.M
        )
    }


def test_the_built_in_policys_demonstration_ends_with_temperature_0_and_the_majority(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    small = ["max_steps=1", "batch_size=4", "max_test_samples=3", "num_test_conversations=0", "lora_rank=2"]
    assert main(["critique_self_play", *small, "max_tokens=40", "device=cpu"]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert list(rows) == [
        "temperature 0",
        "temperature 0, answer named",
        "temperature 1",
        "temperature 1, answer named",
        "temperature 1, majority of 8",
    ]
    assert {count for count, *_ in rows.values()} == {3}
    for strict in ("temperature 0", "temperature 1"):
        assert all(
            named >= right for named, right in zip(rows[f"{strict}, answer named"], rows[strict], strict=True)
        )


def test_a_demonstration_ends_with_accuracy_before_and_after(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["max_steps=1", "group_size=2", "batch_size=4", "max_tokens=8", "max_test_samples=3"]
    assert main(["model_name=tiny", "device=cpu", "lora_rank=2", *small]) == 0
    assert len(rows_of(capsys.readouterr().out)) == 5
    run = tmp_path / "runs" / "smollm2_demo" / "run"
    assert "maj@8" in (run / "report.html").read_text(encoding="utf-8")
    asked = {question for question, _ in word_problems()[0]}
    rows = [json.loads(line)["record"] for line in (run / "transcripts.jsonl").read_text().splitlines()]
    assert [row["question"] in asked for row in rows] == [True, True]
    assert all([turn["agent_id"] for turn in row["turns"]] == [0, 1] for row in rows)
    assert all(turn["text"] for row in rows for turn in row["turns"])
    assert all(row["correct"].keys() == row["rewards"].keys() == {"0", "1"} for row in rows)
