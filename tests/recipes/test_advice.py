"""A judge that cannot be read: said once, with what it means and which option changes it."""

import json
from functools import partial

import pytest
from random_models import make_model

from viva.judging.comparison import Comparison, NoValidComparisonsError, Outcome, win_minus_loss
from viva.recipes.loop import StepTimeNotice
from viva.recipes.programs import train_recipe

main = partial(train_recipe, "conversation_preference_rl")


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
    assert main([f"{name}={value}" for name, value in options.items()]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("error: all conversations of all 2 steps are void")
    assert len(err.splitlines()) == 1  # no bars of what is loaded
    assert out.count("warning: step 1: conversations have no reward") == 1
    assert "Choose judge_max_off_set_mass=1.0" in out
    assert out.count("every conversation of 2 steps in a row is void (mostly NoValidComparisonsError)") == 1
    assert "the optimiser took no step" in out
    assert not (tmp_path / "run" / "adapter").exists()
    assert "conversations have no reward" in (tmp_path / "run" / "report.html").read_text()
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert (row["void/judge/invalid_rate"], row["rollout/void"]) == (1.0, 2)
    assert row["void/judge/off_set_mass"] > 0.9
    assert "void/parse/unstructured" in row


@pytest.mark.parametrize(("seconds", "told"), [(7200, "take 6.0 hours"), (40, "take 2.0 minutes")])
def test_the_first_measured_step_says_how_long_the_others_take(seconds, told, capsys):
    note = StepTimeNotice(num_steps=5)
    note(0, {"test/direct_accuracy": 1.0, "time/step": 3.0})
    assert capsys.readouterr().out == ""
    for step in (1, 2):
        note(step, {"time/rollouts": 1.0, "time/step": seconds + 2.0, "time/evaluation": 2.0})
    said = capsys.readouterr().out
    assert said.startswith(f"step 2 took {seconds:.1f} s without evaluation; at that rate 3 other steps will")
    assert told in said
    assert said.count("took") == 1


def test_a_run_of_seconds_says_nothing_of_its_length(capsys):
    StepTimeNotice(num_steps=5)(0, {"time/rollouts": 1.0, "time/step": 10.0})
    assert capsys.readouterr().out == ""
