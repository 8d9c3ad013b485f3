"""The strategy ``conversation`` of expert iteration, as its rewards pay it."""

import json
from types import SimpleNamespace

import pytest

from viva.judging.judge import PolicyRef
from viva.recipes.cost import CostOptions, recipe_cost
from viva.recipes.loop import _conversation_evaluators
from viva.recipes.math_efficiency import Config
from viva.recipes.strategies import EfficientReward, Task, find_strategies
from viva.testing import ScriptedPolicy, tiny_renderer
from viva.training.data import PromptItem
from viva.training.rollouts import run_group

RENDERER = tiny_renderer()


def config(kind, **options):
    return Config(strategies=["conversation"], conversation=kind, max_rounds=1, num_agents=2, **options)


def task_of(options, answer):
    """A task whose run has no judge that could be asked."""

    def judge():
        raise AssertionError("a judge was asked for")

    return Task(
        item=PromptItem(question="What is 8 x 9?", answer=answer),
        seed=1,
        renderer=RENDERER,
        reward=EfficientReward(answer=answer, token_budget=10_000),
        group_size=2,
        policy=PolicyRef(),
        judge=judge,
        options=options,
    )


class Replies:
    """Two agents, one of them right in the end; and all that they were asked."""

    def __init__(self, kind):
        self.kind, self.solved, self.asked = kind, 0, []

    def __call__(self, prompt, call):
        asked = prompt.rpartition("<|im_start|>user")[2]
        self.asked.append(asked)
        if self.kind == "critique" and "Write your full solution" not in asked and "Revise" not in asked:
            return "nothing to say"
        text = f"The answer is {(72, 17)[self.solved % 2]}."
        self.solved += 1
        if self.kind == "critique":
            return text if "Write your full solution" in asked else f"Revise: {text}"
        return json.dumps({"reflection": "x", "evaluation": "y", "solution": text})


@pytest.mark.parametrize("kind", ["critique", "round_robin"])
async def test_a_verifier_asks_for_no_votes_on_what_it_pays(kind):
    options, replies = config(kind), Replies(kind)
    strategy = find_strategies(["conversation"])["conversation"](task_of(options, "72"))
    outcome = await run_group(strategy, ScriptedPolicy(renderer=RENDERER, script=replies))
    rewards = sorted(outcome.group.get_total_rewards())
    assert rewards[0] == 0
    assert 0.9 < rewards[-1] < 1  # as plain samples are paid
    assert len(replies.asked) == (8 if kind == "critique" else 2)  # nobody was asked for a verdict
    names = {name for metrics in outcome.group.metrics_G for name in metrics}
    assert "unlocated" in names
    assert not [name for name in names if name.startswith("judge/")]
    with pytest.raises(ValueError, match="judge would change nothing: the reward verifier asks no judge"):
        config(kind, judge="initial").game()


def test_test_prompts_that_cannot_be_paid_are_not_talked_about():
    items = [PromptItem(question=f"{n}?", answer=answer) for n, answer in enumerate((None, "1", None, "3"))]
    plan = SimpleNamespace(test=items, config=config("critique", num_test_conversations=2))
    opened = SimpleNamespace(context_window=None)
    for needs_answers, asked in ((True, ["1?", "3?"]), (False, ["0?", "1?"])):
        (evaluator,) = _conversation_evaluators(
            plan, opened, lambda item, seed: item.question, needs_answers=needs_answers
        )
        assert evaluator.make_builders() == asked
    assert config("critique").game().reward.needs_answers
    assert not config("critique", conversation_reward="own").game().reward.needs_answers


@pytest.mark.parametrize("kind", ["critique", "round_robin"])
def test_no_judge_is_counted_where_the_verifier_pays(kind):
    text = CostOptions(recipe="").text
    verified, own = (
        recipe_cost(config(kind, **more), text).counts for more in ({}, {"conversation_reward": "own"})
    )
    assert own.num_judge_calls > verified.num_judge_calls == verified.judged == 0
    assert own.trained == verified.trained
    assert verified.num_calls == own.num_calls - (128 if kind == "critique" else 0)
