"""Estimators that cannot go with the strategies of math efficiency are refused when the run is planned."""

import pytest

from viva.recipes.math_efficiency import Config


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text('{"question": "What is 7 + 5?", "answer": "12"}\n')

    def made(**options):
        return Config(
            train_prompts_path=str(path), model_name="some/model", learning_rate=1e-4, **options
        ).make_plan()

    return made


TALK = {"strategies": ["iid", "conversation"], "conversation_reward": "own"}


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"baseline": "prompt_union"}, "use baseline=stratum"),
        ({"baseline": "weighted", "conversation_reward": "majority"}, "use baseline=stratum"),
        ({"estimator": "seq_is"}, "use baseline=stratum"),
        ({"estimator": "balance"}, "use estimator=shaped with baseline=stratum"),
        ({"estimator": "seq_tis"}, "use estimator=shaped with baseline=stratum"),
    ],
)
def test_rewards_of_different_units_are_never_in_one_mean(plan, options, fix):
    with pytest.raises(ValueError, match=f"pays conversations in another unit than .*; {fix}, or"):
        plan(**TALK | options)
    plan(**TALK | options | {"conversation_reward": "verifier"})


def test_rewards_of_different_units_go_with_a_baseline_per_strategy(plan):
    plan(**TALK)
    plan(**TALK, estimator="positives")
    plan(**TALK | {"strategies": ["conversation"]}, baseline="prompt_union")


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo"])
def test_the_context_gap_is_never_clipped(plan, loss_fn):
    clips = {"loss_fn": loss_fn, "estimator": "importance_sampling"}
    with pytest.raises(ValueError, match=r"context of prompt_augmentation is from .* such as shaped"):
        plan(**clips)
    plan(**clips, strategies=["iid", "best_of"])
    plan(loss_fn=loss_fn)


@pytest.mark.parametrize("teacher", ["iid", "best_of", "feedback", "conversation"])
def test_a_teacher_is_one_context_for_a_whole_problem(plan, teacher):
    strategies = list(dict.fromkeys(["iid", "prompt_augmentation", teacher]))
    taught = {"estimator": "distill", "strategies": strategies}
    with pytest.raises(ValueError, match=f"{teacher} cannot be the teacher; .* such as prompt_augmentation"):
        plan(**taught, estimator_options={"teacher": teacher})
    plan(**taught, estimator_options={"teacher": "prompt_augmentation"})
