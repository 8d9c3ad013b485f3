"""Options of expert iteration that no strategy of the run reads are refused, with what would make them count."""

import pytest
from evidence.arms import ARMS

from viva.recipes.config import make_options
from viva.recipes.math_efficiency import Config

EXAMPLE = "examples/rationalise.py:rationalise"
TALK = {"strategies": ["conversation"]}
MAJORITY = {"strategies": ["iid"], "reward": "majority"}


def plan(**options):
    given = {"train_prompts": ["2 + 3?"], "model_name": "some/model", "learning_rate": 1e-4}
    config = make_options(Config, given | options)
    return config.make_plan()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"strategies": ["iid"], "hint": "Be brief."},
            "hint would change nothing: it belongs to prompt_augmentation, and strategies are iid; got "
            "hint='Be brief.'; add prompt_augmentation to strategies, or leave it out",
        ),
        ({"keep": "all"}, "keep would change nothing: it belongs to best_of, .*; got keep='all'"),
        ({"feedback": "generated"}, "feedback would change nothing: it belongs to feedback"),
        ({"train_behind": "attempt"}, "train_behind would change nothing"),
        (
            {"strategies": ["iid", "best_of"], "leak_phrases": ["hint"]},
            "leak_phrases would .* add prompt_augmentation or feedback or conversation to strategies",
        ),
        ({"conversation": "round_robin"}, "conversation would change nothing: it belongs to conversation"),
        ({"conversation_reward": "own"}, "conversation_reward would change nothing"),
        ({"max_rounds": 3}, "max_rounds would change nothing: .*; got max_rounds=3; add conversation"),
        ({"num_agents": 4}, "num_agents would change nothing"),
        (
            MAJORITY | {"length_weight": 0.0},
            "length_weight would change nothing: it belongs to known answers, and reward is majority; got "
            "length_weight=0.0; use reward=answers, or leave it out",
        ),
        (MAJORITY | {"token_budget": 9}, "token_budget would change nothing"),
        (
            TALK | {"conversation_reward": "own", "token_budget": 9},
            "token_budget .* reward is own; .* use conversation_reward=verifier",
        ),
    ],
)
def test_an_option_that_nothing_reads_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plan(**options)


@pytest.mark.parametrize(
    "options",
    [
        {name: getattr(Config(), name) for name in ("hint", "keep", "feedback", "max_rounds", "num_agents")},
        {"strategies": ["iid", EXAMPLE], "hint": "Be brief.", "keep": "all", "num_agents": 4},
        {"strategies": ["feedback"], "leak_phrases": ["hint"], "train_behind": "attempt"},
        TALK | {"leak_phrases": ["agent"], "num_agents": 4, "token_budget": 9},
        {"strategies": ["iid", "conversation"], "conversation_reward": "own", "length_weight": 0.0},
        {"strategies": ["iid"], "reward": "shuffled", "length_weight": 0.0},
    ],
)
def test_an_option_that_something_reads_or_that_has_its_default_is_taken(options):
    with pytest.raises(ValueError, match="every problem needs a known answer"):  # all else was checked before
        plan(**options)


@pytest.mark.parametrize("name", [name for name, arm in ARMS.items() if arm.recipe == "math_efficiency"])
def test_the_arms_of_the_bench_hold_no_option_that_is_not_read(name, tmp_path):
    problems = tmp_path / "problems.jsonl"
    problems.write_text("".join(f'{{"query": "{n} + 1?", "answer": {n + 1}}}\n' for n in range(200)))
    given = {"train_prompts_path": str(problems), "learning_rate": 1e-4, "log_path": str(tmp_path / "run")}
    make_options(Config, given | ARMS[name].options).make_plan()
