"""Answers to test prompts against those before training: who judges, what a resumed run finds, what is refused."""

import json
from pathlib import Path

import pytest

import viva
from viva.recipes.conversation_preference_rl import Config

OPEN = [{"query": f"Say a number above {n}."} for n in range(3)]
KNOWN = [{"query": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(3)]
OPTIONS = {
    "num_agents": 2,
    "max_rounds": 1,
    "batch_size": 4,
    "max_tokens": 5,
    "lora_rank": 4,
    "max_steps": 4,
    "learning_rate": 3e-2,
    "eval_every": 2,
    "save_every": 1,
    "num_test_conversations": 0,
    "trackers": [],
}


@pytest.fixture
def train(model, tmp_path):
    """Train on open prompts; the run's folder."""

    def _train(name="run", test=OPEN, **options):
        path = tmp_path / f"{name}-test.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in test))
        given = OPTIONS | {"test_prompts_path": str(path), "log_path": str(tmp_path / name)} | options
        prompts = [row["query"] for row in OPEN]
        viva.train("conversation_preference_rl", model=model, prompts=prompts, **given)
        return tmp_path / name

    return _train


def judged(folder: Path):
    """Figures of judged answers by step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {row["step"]: {key: row[key] for key in row if key.startswith("test/judged/")} for row in rows}
    return {step: figures for step, figures in found.items() if figures}


def test_answers_to_open_prompts_are_judged_at_every_evaluation(train):
    found = judged(train())
    assert list(found) == [0, 2, 4]
    assert (found[0]["test/judged/win_rate"], found[0]["test/judged/identical_rate"]) == (0.5, 1.0)
    assert all(found[step]["test/judged/identical_rate"] < 1 for step in (2, 4)), (
        "nothing changed: nothing is tested"
    )


def test_nothing_is_judged_where_answers_are_known_or_nobody_is_to(train):
    assert judged(train("known", test=KNOWN)) == judged(train("none", eval_judge="none")) == {}
    named = judged(train("named", test=KNOWN, eval_judge="initial"))
    assert list(named) == [0, 2, 4]


def test_a_run_that_is_never_evaluated_keeps_no_weights_for_it(train):
    warm = train("warm", max_steps=1)
    folder = train(load_checkpoint_path=str(warm / "state" / "weights" / "000001"), max_steps=1, eval_every=0)
    assert judged(folder) == {}
    assert not list((folder / "state").glob("sampler_weights/start-*"))


def test_another_model_judges(train):
    by_start, by_other = judged(train()), judged(train("other", eval_judge="tiny"))
    assert by_start[0] == by_other[0]
    assert by_start != by_other


@pytest.mark.parametrize(
    "options", [{}, {"judge": "every", "judge_every": 2}], ids=["start", "start and judge"]
)
def test_a_resumed_run_is_judged_against_the_weights_that_it_started_from(train, options):
    warm = train("warm", max_steps=2)
    options = {"load_checkpoint_path": str(warm / "state" / "weights" / "000002"), **options}
    whole = train("whole", **options)
    train("stopped", **options, max_steps=1)
    resumed = train("stopped", **options, behavior_if_exists="resume")
    found = judged(whole)
    assert found[0]["test/judged/identical_rate"] == 1.0, "the start is not the base model"
    assert judged(resumed) == found
    assert (resumed / "state" / "sampler_weights" / "start-000000").is_dir()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"eval_judge": "initial", "test_prompts_path": None},
            "eval_judge=initial would change nothing: there are no",
        ),
        ({"eval_judge": "initial", "eval_every": 0}, "eval_judge=initial would change nothing.*eval_every=0"),
        ({"eval_judge": "current"}, "eval_judge must be initial .* or none, .*; got current"),
        ({"eval_judge": "https://host/v1"}, "got https://host/v1.*viva eval RUN judge="),
        (
            {"eval_judge": "intial"},
            "eval_judge must be current, initial, .*got 'intial'. Did you mean 'initial'",
        ),
        ({"eval_judge": "./nowhere"}, "eval_judge=./nowhere is no model that could judge"),
    ],
)
def test_a_judge_that_could_not_be_is_refused_before_anything_is_computed(tmp_path, options, message):
    path = tmp_path / "test.jsonl"
    path.write_text(json.dumps(OPEN[0]))
    given = {
        "train_prompts": ["a"],
        "test_prompts_path": str(path),
        "log_path": str(tmp_path / "run"),
    } | options
    with pytest.raises(ValueError, match=message):
        Config(**given).make_plan()
