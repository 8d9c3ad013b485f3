"""What keeps a run from learning is named once, with what to do, and honest runs are left alone."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from viva.tiny import model_path
from viva.tiny.tasks import problems
from viva.training.advice import WINDOW, causes, is_void, told_causes
from viva.training.console import RunConsole
from viva.training.data import SPELLED_OUT, spelled_out

HONEST = {
    "rollout/groups": 8,
    "rollout/void": 0,
    "rollout/finish_rate": 0.94,
    "parse/unstructured": 0.01,
    "correct/final": 0.7,
    "reward/mean": 0.0,
    "reward/min": -1.0,
    "reward/max": 1.0,
    "advantage/silent_groups_share": 0.25,
    "optim/steps": 1,
}
FLAT = HONEST | {"advantage/silent_groups_share": 1.0, "optim/steps": 0}
VOID = {"rollout/groups": 2, "rollout/void": 2, "rollout/errors/NoValidComparisonsError": 4, "optim/steps": 0}


def topics(*rows, **options):
    return [cause.topic for cause in causes(rows, **options)]


@pytest.mark.parametrize(
    ("changes", "topic", "told"),
    [
        (VOID, "all void", ["NoValidComparisonsError", "viva view"]),
        ({"rollout/finish_rate": 0.1}, "cut replies", ["90%", "Raise max_tokens"]),
        ({"parse/unstructured": 1.0}, "format", ["not one reply", "example"]),
        ({"format": 0.0, "parse/unstructured": None}, "format", ["not one reply"]),
        (FLAT | {"correct/final": 0.0}, "all wrong", ["easier prompts"]),
        (FLAT | {"correct/final": None, "correct": 0.0}, "all wrong", ["grader"]),
        (FLAT | {"correct/final": 1.0}, "all right", ["harder prompts"]),
        (FLAT, "no spread", ["between groups only", "larger group"]),
        (FLAT | {"reward/min": -10.0, "reward/max": -10.0}, "no spread", ["every reward", "is -10"]),
    ],
)
def test_a_cause_that_lasts_is_named_with_what_to_do(changes, topic, told):
    row = {name: value for name, value in (HONEST | changes).items() if value is not None}
    (cause,) = causes([row] * WINDOW)
    assert cause.topic == topic
    assert all(words in cause.text for words in told), cause.text
    assert topics(*[row] * (WINDOW - 1)) == []  # one or two such steps happen
    assert topics(row, HONEST, row) == []
    assert topics(row, is_whole_run=True) == [topic]


@pytest.mark.parametrize(
    ("changes", "topic", "told"),
    [
        ({SPELLED_OUT: 0.8}, "unreadable prompts", ["80%", "pretrained model"]),
        ({"rollout/errors/PromptTooLongError": 3}, "context", ["3 prompts", "longer context"]),
        (
            VOID | {"void/judge/invalid_rate": 1.0, "void/judge/off_set_mass": 0.987},
            "judge",
            ["100% of the judge's comparisons", "98.7%", "judge_max_off_set_mass=1.0"],
        ),
        (VOID | {"void/judge/invalid_rate": 0.5}, "judge", ["judge_mode=logprob", "judge_max_tokens"]),
    ],
)
def test_a_cause_that_is_certain_is_named_at_once(changes, topic, told):
    (cause,) = causes([HONEST | changes])
    assert cause.topic == topic
    assert all(words in cause.text for words in told), cause.text


def test_what_explains_rewards_without_spread_is_named_in_their_place():
    assert topics(*[FLAT | {"rollout/finish_rate": 0.2, "correct/final": 0.0}] * WINDOW) == ["cut replies"]
    assert topics(*[FLAT | {SPELLED_OUT: 0.9, "correct/final": 0.0}] * WINDOW) == ["unreadable prompts"]


def test_honest_runs_are_left_alone():
    rows = [HONEST | {"reward/mean": step / 50, SPELLED_OUT: 0.05} for step in range(25)]
    rows[3] = rows[9] = rows[10] = FLAT  # by chance
    assert told_causes(rows) == []
    assert told_causes([HONEST]) == []
    assert told_causes([]) == []


def test_the_stored_metrics_of_the_recipes_demonstrations_name_nothing():
    """Six steps of ``python -m viva.recipes.demo RECIPE max_steps=6 eval_every=0``, the keys that are looked at."""
    lines = Path(__file__).with_name("demo_metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    recipes = {row["recipe"] for row in rows}
    assert len(recipes) == 3
    for recipe in recipes:
        own = [
            {name: value for name, value in row.items() if name != "recipe"}
            for row in rows
            if row["recipe"] == recipe
        ]
        assert len(own) == 6
        assert told_causes(own) == []


def test_a_run_is_explained_by_its_rows_as_it_was_while_it_went():
    rows = [HONEST, HONEST, *[FLAT] * 4, {"test/direct_accuracy": 0.5}]
    ((place, cause),) = told_causes(rows)
    assert (place, cause.topic) == (4, "no spread")
    text = io.StringIO()
    with RunConsole(num_steps=6, console=Console(file=text, width=500)) as console:
        for step, row in enumerate(rows[:6]):
            console.step_done(step, row)
        console.ended()
    warnings = [line for line in text.getvalue().splitlines() if line.startswith("warning: ")]
    assert warnings == [f"warning: step 5: {cause.text}"]


def test_a_short_run_that_trained_nothing_says_so_at_its_end():
    text = io.StringIO()
    with RunConsole(num_steps=1, console=Console(file=text, width=500)) as console:
        console.step_done(0, FLAT)
        console.ended()
    assert "warning: step 1: rewards differ between groups only" in text.getvalue()
    assert "the optimiser took no step in the whole run" in text.getvalue()


def test_void_is_all_of_a_step():
    assert is_void(VOID)
    assert not is_void(HONEST)
    assert not is_void({})


def test_words_that_a_tokenizer_does_not_know_are_counted():
    tokenizer = AutoTokenizer.from_pretrained(model_path())

    def share(*texts):
        return spelled_out(lambda text: tokenizer.encode(text, add_special_tokens=False), texts)

    assert share(*(problem.question for problem in problems("train", 100, seed=0))) < 0.05
    for haiku in ("Write a haiku about autumn rain on a quiet temple roof.", "Haiku: winter moonlight"):
        assert share(haiku) > 0.4
    assert share("1 + 2 = ?", "\u79cb\u306e\u96e8") is None
