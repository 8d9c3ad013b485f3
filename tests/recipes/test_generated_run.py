"""A run on problems of reasoning-gym: resumed exactly, graded again from its files, measured on its own test set."""

import json
from functools import partial

import pytest
from random_models import make_model

import viva
import viva.cli
from viva.judging.answers import is_correct
from viva.judging.reasoning_gym import find_problem
from viva.recipes.programs import train_recipe

pytest.importorskip("reasoning_gym")

train = partial(train_recipe, "math_efficiency")
OPTIONS = {
    "train_prompts_path": "reasoning_gym:chain_sum,max_terms=2,max_digits=1,size=12",
    "max_test_samples": 3,
    "strategies": '["iid"]',
    "group_size": 2,
    "batch_size": 4,
    "max_tokens": 5,
    "lora_rank": 4,
    "learning_rate": 1e-2,
    "eval_every": 2,
    "save_every": 1,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def run(model, folder, **options):
    given = OPTIONS | {"model_name": model, "log_path": folder} | options
    return train([f"{name}={value}" for name, value in given.items()])


def metrics(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in row.items() if not name.startswith(("time", "perf"))} for row in rows
    ]


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert run(model, folder, max_steps=2) == 0
    return folder


def test_a_resumed_run_equals_one_that_never_stopped(model, whole, tmp_path):
    stopped = tmp_path / "stopped"
    assert run(model, stopped, max_steps=1) == 0
    assert run(model, stopped, max_steps=2, behavior_if_exists="resume") == 0
    one, other = (metrics(folder)[1] for folder in (whole, stopped))
    assert one["reward/mean"] == other["reward/mean"]
    assert {name for name in one if one[name] != other.get(name)} == set()


def test_other_options_of_the_family_are_another_run(model, whole, capsys):
    changed = OPTIONS["train_prompts_path"] + ",seed=5"
    status = run(model, whole, max_steps=2, behavior_if_exists="resume", train_prompts_path=changed)
    assert status == 2
    assert "seed=5" in capsys.readouterr().err


def test_stored_replies_are_graded_again(whole):
    stored = viva.load_run(whole).conversations
    assert len(stored) == 4
    for record in stored:
        known = str(record.answer)
        problem = find_problem(known)
        assert problem is not None
        assert problem.question == record.question
        assert is_correct(f"The answer is {problem.answer}.", known)
        for turn in record.turns:
            assert is_correct(turn.text, known) or record.rewards[turn.agent_id] == 0


def test_the_run_is_measured_on_the_test_problems_it_had(whole, capsys):
    assert viva.cli.main(["eval", str(whole), "resamples=100"]) == 0
    told = capsys.readouterr().out
    assert "3 problems of reasoning_gym:chain_sum" in told
