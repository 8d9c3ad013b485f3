"""A judge that cannot be read: said once, with what it means and which option changes it."""

import json

import pytest
from random_models import make_model

from viva.judging.comparison import Comparison, Outcome
from viva.judging.tournament import NoValidComparisonsError, win_minus_loss
from viva.recipes.advice import JudgeAdvice
from viva.recipes.conversation_preference_rl.train import main

UNREADABLE = {
    "rollout/errors/NoValidComparisonsError": 2,
    "void/judge/invalid_rate": 1.0,
    "void/judge/off_set_mass": 0.987,
}


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("logprob", ["98.7%", "judge_max_off_set_mass=0.9 allows", "judge_max_off_set_mass=1.0"]),
        ("verdict", ["judge_mode=logprob", "judge_max_tokens"]),
    ],
)
def test_the_first_step_with_an_unreadable_judge_is_explained_and_no_other(mode, told, capsys):
    advice = JudgeAdvice(mode=mode, max_off_set_mass=0.9)
    advice(0, {"judge/invalid_rate": 0.1})
    assert capsys.readouterr().out == ""
    advice(1, UNREADABLE)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("note: step 2 has conversations without a reward")
    assert all(words in line for words in ["100% of the judge's comparisons", *told])
    advice(2, UNREADABLE)
    assert capsys.readouterr().out == ""


def test_an_error_of_the_judge_brings_its_figures_along():
    invalid = Comparison(first=0, second=1, outcome=Outcome.INVALID, score=None, off_set_mass=0.95)
    with pytest.raises(NoValidComparisonsError) as caught:
        win_minus_loss([invalid], [0, 1])
    assert caught.value.metrics["judge/invalid_rate"] == 1.0
    assert caught.value.metrics["judge/off_set_mass"] == 0.95


def test_a_run_with_random_weights_and_default_judge_says_why_nothing_is_learned(tmp_path, capsys):
    model = make_model(tmp_path / "model", "llama", names_labels=False)
    capsys.readouterr()  # saving a model shows a bar
    options = {
        "model_name": model,
        "train_prompts": '["a", "b"]',
        "log_path": tmp_path / "run",
        "num_agents": 2,
        "max_rounds": 1,
        "batch_size": 4,
        "max_steps": 2,
        "max_tokens": 4,
        "lora_rank": 2,
    }
    assert main([f"{name}={value}" for name, value in options.items()]) == 0
    out, err = capsys.readouterr()
    assert err == ""  # no bars of what is loaded, no warnings
    assert out.count("note: step 1 has conversations without a reward") == 1
    assert "Choose judge_max_off_set_mass=1.0" in out
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert (row["void/judge/invalid_rate"], row["rollout/void"]) == (1.0, 2)
    assert row["void/judge/off_set_mass"] > 0.9
    assert "void/parse/unstructured" in row
