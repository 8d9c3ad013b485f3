"""Math efficiency as a recipe: the reward, the options, and a whole run on a model it has never seen."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import codes, generic, page, tables
from random_models import make_model

from viva.experts.strategy import strategy_of
from viva.judging.comparison import JUDGE_SYSTEM_PROMPT
from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
from viva.judging.records import Criterion
from viva.recipes.math_efficiency import Config
from viva.recipes.programs import recipe_summaries, train_recipe
from viva.recipes.strategies import STRATEGIES, EfficientEnv, EfficientReward, Graded, Task, find_strategies
from viva.rewards import find_reward
from viva.testing import ScriptedPolicy, tiny_renderer
from viva.training.data import PromptItem
from viva.training.rollouts import run_group
from viva.view.estimates import EstimateOptions, estimate_run

main = partial(train_recipe, "math_efficiency")

ROOT = Path(__file__).parents[2]
EXAMPLE = f"{ROOT / 'examples' / 'rationalise.py'}:rationalise"


# the reward


@given(st.integers(1, 50), st.integers(1, 60), st.floats(0, 0.99), st.booleans())
def test_every_right_reply_earns_more_than_any_wrong_or_truncated_one(budget, num_tokens, weight, is_right):
    reward = EfficientReward(answer="72", token_budget=budget, length_weight=weight)
    text = "The answer is 72." if is_right else "The answer is 27."
    graded = reward(text, num_tokens=num_tokens, is_finished=True)
    assert (graded.reward > 0) == is_right == (graded.metrics["correct"] == 1)
    assert reward(text, num_tokens=num_tokens, is_finished=False).reward == 0
    if is_right:
        assert 1 - weight <= graded.reward <= 1
        longer = reward(text, num_tokens=num_tokens + 1, is_finished=True)
        assert longer.reward <= graded.reward


replies = st.lists(st.tuples(st.booleans(), st.integers(1, 20)), min_size=1, max_size=20)


@given(replies, replies, st.floats(0, 0.9))
def test_a_policy_whose_reward_has_not_fallen_has_kept_its_share_of_accuracy(before, after, weight):
    reward = EfficientReward(answer="1", token_budget=20, length_weight=weight)

    def means(policy):
        graded = [
            reward("1" if is_right else "2", num_tokens=length, is_finished=True)
            for is_right, length in policy
        ]
        return (
            sum(each.reward for each in graded) / len(policy),
            sum(each.metrics["correct"] for each in graded) / len(policy),
        )

    (reward_before, accuracy_before), (reward_after, accuracy_after) = means(before), means(after)
    if reward_after >= reward_before:
        assert accuracy_after >= (1 - weight) * accuracy_before - 1e-9


@pytest.mark.parametrize("options", [{"token_budget": 0}, {"length_weight": 1.0}, {"length_weight": -0.1}])
def test_a_reward_that_makes_no_sense_is_refused(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        EfficientReward(**({"answer": "1", "token_budget": 9} | options))


def encoded(renderer, text):
    (stop,) = renderer.get_stop_sequences()
    return [*renderer.tokenizer.encode(text, add_special_tokens=False), stop]


async def test_the_environment_shows_the_hint_to_the_sampler_only_and_counts_what_is_cut():
    renderer = tiny_renderer()
    reward = EfficientReward(answer="so 8*9 = <<8*9=72>>72.\n#### 72", token_budget=100, length_weight=0.5)
    env = EfficientEnv(
        renderer,
        "What is 8 x 9?",
        reward,
        sampling_convo_prefix=[{"role": "system", "content": "Be slow."}],
        leak_phrases=["slow"],
    )
    sampled, stop = await env.initial_observation()
    assert "Be slow." in renderer.tokenizer.decode(sampled.to_ints())
    trained = renderer.tokenizer.decode(env.get_training_observation().to_ints())
    assert "Be slow." not in trained
    assert "What is 8 x 9?" in trained
    tokens = encoded(renderer, "Slow but sure: 72")
    assert stop == [tokens[-1]]
    right = await env.step(tokens, extra={"stop_reason": "stop"})
    assert right.reward == pytest.approx(1 - 0.5 * len(tokens) / 100)
    assert right.metrics == {"correct": 1, "truncated": 0, "correct_tokens": len(tokens), "leak": 1}
    cut = await env.step(tokens[:-1], extra={"stop_reason": "length"})
    assert (cut.reward, cut.metrics) == (0, {"correct": 0, "truncated": 1, "leak": 1})


# the options


def config(**options):
    return Config(
        **({"train_prompts_path": None, "model_name": "some/model", "learning_rate": 1e-4} | options)
    )


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    rows = ({"question": f"{n} + 1?", "answer": f"{n}+1 = {n + 1}\n#### {n + 1}"} for n in range(4))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategies": []}, "strategies must name at least one of iid"),
        ({"max_staleness": 1}, "leave out max_staleness and stream_updates"),
        ({"stream_updates": True}, "leave out max_staleness and stream_updates"),
        ({"strategies": ["idd"]}, "unknown strategy 'idd'; .* Did you mean 'iid'"),
        ({"strategies": ["iid", "iid"]}, "names 'iid' twice"),
        ({"strategies": ["nowhere.py:make"]}, "there is no file 'nowhere.py'"),
        ({"strategies": ["math:pi"]}, "'math:pi' must be a function of a Task that you wrote; got float"),
        (
            {"weights": {"iid": 1.0}},
            "weights must name just the strategies iid, prompt_augmentation; got iid",
        ),
        ({"weights": {"iid": -1.0, "prompt_augmentation": 1.0}}, "must be a finite number of 0 or more"),
        ({"estimator_options": {"cap": 2.0}}, "shaped has no option 'cap'"),
        ({"estimator": "balance", "baseline": "stratum"}, "balance works with baseline weighted"),
        (
            {"estimator": "balance", "weights": {"iid": 1.0, "prompt_augmentation": 1.0}},
            "balance weighs the strategies by their numbers of samples",
        ),
        ({"estimator": "balance", "assignment": "split"}, "use assignment=all"),
        (
            {"estimator": "balance", "strategies": ["iid", "feedback"], "train_behind": "attempt"},
            "use train_behind=problem",
        ),
        ({"estimator": "balance", "temperature": 0.7}, "use temperature=1|Use temperature=1"),
        (
            {"estimator": "distill", "estimator_options": {"teacher": "hint"}},
            "distill needs the strategies iid and hint",
        ),
        ({"group_size": 0}, "group_size must be 1 or more"),
        ({"token_budget": 0}, "token_budget must be 1 or more"),
        ({"length_weight": 1.0}, "length_weight must be 0 or more and below 1"),
        ({"batch_size": 12}, "batch_size must be divisible by the samples of all strategies: .* 8 or 16"),
        ({"reward": "majority"}, "reward=majority pays plain samples as a group; use strategies=iid"),
        ({"reward": "tournament"}, "reward=tournament pays conversations; of single replies use answers"),
        ({"reward": "shuffled_tournament", "strategies": ["iid"]}, "pays conversations; of single replies"),
        ({"reward": "majorty"}, "Did you mean 'majority'"),
        (
            {"reward": "judge_answer", "strategies": ["iid"], "judge_mode": "verdict"},
            "judge_mode would change nothing: the judge of the reward judge_answer answers the problem",
        ),
        (
            {"reward": "shuffled_judge_answer", "strategies": ["iid"], "judge_prompt": "Be fair."},
            "judge_prompt would change nothing",
        ),
        (
            {"reward": "rubric", "strategies": ["iid"], "judge_mode": "verdict"},
            "judge_mode would change nothing: the judge of the reward rubric scores every solution by itself",
        ),
        (
            {"reward": "rubric", "strategies": ["iid"], "criteria": {"It is short.": -1.0}},
            "the criterion 'It is short.' needs a weight above 0, or none; got -1",
        ),
        (
            {"reward": "majority", "strategies": ["iid"], "criteria": {"It is short.": 1.0}},
            "criteria would change nothing: the reward majority asks no judge of this recipe about criteria",
        ),
        (
            {"train_prompts": ["no answer"], "reward": "shuffled", "strategies": ["iid"]},
            "every problem needs a known answer",
        ),
        ({"train_prompts": ["no answer"]}, "every problem needs a known answer; 1 of 5 have none"),
        (
            {"strategies": ["conversation"], "conversation_reward": "majorty"},
            "Did you mean 'majority'",
        ),
        (
            {"strategies": ["conversation"], "conversation_reward": "answers"},
            "conversation_reward=answers asks the known answer; give verifier, own",
        ),
        (
            {"strategies": ["conversation"], "conversation_reward": "peer_prediction"},
            "conversation_reward=peer_prediction asks a scorer",
        ),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(problems, options, message):
    with pytest.raises(ValueError, match=message):
        config(train_prompts_path=str(problems), **options).make_plan()


@pytest.mark.parametrize("name", ["judge_answer", "rubric"])
def test_the_text_of_comparisons_stands_only_in_records_of_runs_that_compare_and_may_be_given_back(
    problems, name
):
    given = {"train_prompts_path": str(problems), "reward": name, "strategies": ["iid"]}
    assert config(**given).make_plan().record["judge_prompt"] is None
    config(**given, judge_prompt=JUDGE_SYSTEM_PROMPT).make_plan()  # as older runs stored it


@pytest.mark.parametrize("name", ["rubric", "shuffled_rubric"])
def test_criteria_go_to_the_rubric(problems, name):
    given = {"reward": name, "strategies": ["iid"], "criteria": {"It is short.": 2.0}}
    reward = config(train_prompts_path=str(problems), judge="initial", **given).group_reward()
    assert reward.name == ("rubric" if name == "rubric" else "shuffled")
    assert reward.inner.criteria == (Criterion(text="It is short.", weight=2.0),)
    assert reward.judge.policy == "initial"


def test_a_batch_holds_whole_problems(problems):
    def sizes(**options):
        plan = config(train_prompts_path=str(problems), **options).make_plan()
        return plan.record["batch_size"], plan.order.groups_per_batch

    three = ["iid", "prompt_augmentation", "conversation"]
    assert sizes() == (128, 16)
    assert sizes(strategies=three, num_agents=5) == (117, 9)
    assert sizes(strategies=three, num_agents=5, assignment="split") == (117, 27)


def test_the_estimators_of_the_options_are_those_there_are(problems):
    from viva.experts.estimators import DEFAULT_ESTIMATOR, ESTIMATORS

    assert config().estimator == DEFAULT_ESTIMATOR
    for name in ESTIMATORS:
        options = {"teacher": "prompt_augmentation"} if name == "distill" else None
        assert config(estimator=name, estimator_options=options).experts().make().name == name


def test_an_option_that_cannot_be_read_ends_the_program_with_status_2(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["estimator=shapely"])
    assert "estimator" in capsys.readouterr().err


def test_viva_train_finds_the_recipe():
    assert recipe_summaries()["math_efficiency"].startswith("Expert iteration on problems")


def test_a_reward_of_viva_with_options_of_ones_own_pays_plain_samples(problems, tmp_path):
    code = tmp_path / "own.py"
    code.write_text(
        "import viva\n\nJUDGED = viva.rewards.serl(length_band=None)\n\n\ndef pay(conversation): return {}\n"
    )
    own = config(train_prompts_path=str(problems), strategies=["iid"], reward=f"{code}:JUDGED")
    assert own.group_reward().length_band is None
    assert list(own.make_plan().record["user_code"]) == [f"{code}:JUDGED"]
    with pytest.raises(ValueError, match="pays conversations"):
        config(strategies=["iid"], reward=f"{code}:pay").group_reward()


def test_rewards_that_know_no_answers_need_none(problems):
    plan = config(
        train_prompts_path=str(problems), train_prompts=["no answer"], reward="majority", strategies=["iid"]
    ).make_plan()
    assert "reward majority" in plan.summary


def task_of(renderer, **changes):
    """A problem for a strategy."""
    options = {
        "item": PromptItem(question="What is 8 x 9?", answer="72"),
        "reward": EfficientReward(answer="72", token_budget=100),
        "policy": PolicyRef(),
        "judge": lambda: None,
        "options": Config(),
    }
    return Task(seed=1, renderer=renderer, **(options | changes))


@pytest.mark.parametrize(
    ("name", "rewards"),
    [("majority", [1.0, 1.0, 0.0]), ("log_probability", [-1.0] * 3), ("shuffled", None)],
)
async def test_a_group_of_plain_samples_is_paid_by_its_reward(name, rewards):
    renderer, texts = tiny_renderer(), ["It is 9", "So 9", "It is 72"]
    task = task_of(
        renderer,
        reward=EfficientReward(answer="72", token_budget=100, length_weight=0.5),
        group_size=3,
        group_reward=find_reward(name),
    )
    builder = task.group()
    asked = iter(texts)
    policy = ScriptedPolicy(renderer=renderer, script=lambda prompt, call: next(asked))

    group = (await run_group(builder, policy, max_retries=0)).group
    found = group.get_total_rewards()
    right = [
        each["correct"]
        for each in (turn.metrics for traj in group.trajectories_G for turn in traj.transitions)
    ]
    assert right == [0, 0, 1]
    if rewards is None:  # the reward with its length term, by one of the three
        assert sorted(found)[:2] == [0, 0]
        assert 0.5 < max(found) < 1
    else:
        assert found == rewards
    assert list(builder.record()["rewards"].values()) == found


async def test_every_strategy_makes_a_group_that_is_trained_on_the_bare_question():
    renderer, policy, judges = tiny_renderer(), PolicyRef(), []

    def judge():
        judges.append(PolicySelfComparisonJudge(policy, renderer))
        return judges[0]

    task = task_of(renderer, group_size=2, policy=policy, judge=judge)
    bare = task.env().get_training_observation()
    for name, factory in find_strategies([*STRATEGIES, EXAMPLE]).items():
        builder = factory(task)
        envs = await builder.make_envs()
        sampled, _ = await envs[0].initial_observation()
        transform = strategy_of(builder).context_transform
        trained = sampled if transform is None else transform(sampled, 0)
        assert trained == bare, name
        assert (sampled != bare) == (name in ("prompt_augmentation", "conversation", "rationalise")), name
    assert not judges  # the verifier needs none
    assert task.verify("The answer is 72.") > 0.9
    assert task.verify("The answer is 27.") == 0


async def test_a_conversation_can_be_paid_by_a_reward_that_is_named():
    options = Config(
        strategies=["conversation"],
        conversation="round_robin",
        conversation_reward="majority",
        max_rounds=1,
        num_agents=3,
    )
    renderer = tiny_renderer()
    task = task_of(
        renderer,
        group_size=3,
        judge=lambda: PolicySelfComparisonJudge(PolicyRef(), renderer),
        options=options,
    )
    answers = iter((17, 72, 17))

    def reply(prompt, call):
        del prompt, call
        number = next(answers)
        return json.dumps({"reflection": "x", "evaluation": "y", "solution": f"The answer is {number}."})

    policy = ScriptedPolicy(renderer=renderer, script=reply)
    outcome = await run_group(find_strategies(["conversation"])["conversation"](task), policy)
    assert outcome.group.get_total_rewards() == [1, 0, 1]  # though 72 is right


def test_the_example_of_a_sixth_strategy_is_short():
    assert len((ROOT / "examples" / "rationalise.py").read_text().splitlines()) < 40


# a whole run


def run(model, problems, folder, **options):
    """A run of a random model, whose replies are graded by their letters: they are never right, nor ended."""
    options = {
        "model_name": model,
        "train_prompts_path": problems,
        "test_prompts_path": problems,
        "log_path": folder,
        "group_size": 2,
        "batch_size": 8,
        "max_tokens": 6,
        "lora_rank": 4,
        "learning_rate": 1e-3,
        "eval_every": 2,
        "samples_every": 1,
        "min_effective_share": 0.0,
    } | options

    def by_letters(self, text, *, num_tokens, is_finished):
        return Graded(reward=sum(map(ord, text)) % 7 / 7, metrics={"truncated": float(not is_finished)})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EfficientReward, "__call__", by_letters)
        assert main([f"{name}={value}" for name, value in options.items()]) == 0


@pytest.fixture(scope="module")
def finished(problems, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run(
        make_model(tmp_path_factory.mktemp("models") / "random", "qwen3", names_labels=False),
        problems,
        folder,
        strategies=json.dumps(["iid", "prompt_augmentation", "feedback", EXAMPLE]),
        weights=json.dumps({"iid": 2.0, "prompt_augmentation": 1.0, "feedback": 1.0, "rationalise": 1.0}),
        max_steps=2,
    )
    return folder


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_recipe_trains_an_unseen_model_with_a_strategy_of_the_users(finished):
    rows = lines(finished / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[:2]:
        for name in ("iid", "prompt_augmentation", "feedback", "rationalise"):
            assert row[f"experts/{name}/num_samples"] == 2
            factor = 1.6 if name == "iid" else 0.8
            assert row[f"experts/{name}/mixture_factor"] == pytest.approx(factor)
        assert row["optim/steps"] == 1
        assert row["experts/iid/self_check"] < 1e-4
        assert 0.3 < row["experts/feedback/masked_token_share"] < 0.7
    assert rows[0]["test/direct_accuracy"] == 0
    assert rows[0]["test/direct_finish_rate"] < 1
    assert json.loads((finished / "config.json").read_text())["recipe"] == "math_efficiency"


def test_the_samples_it_kept_can_be_estimated_again(finished):
    result = estimate_run(finished, EstimateOptions())
    assert (result.steps, result.num_samples) == ((0, 1), 16)
    computed = {each.name: each for each in result.estimators}
    assert {"importance_sampling", "token_tis", "none", "positives", "shaped", "seq_tis", "seq_is"} <= set(
        computed
    )
    assert "balance" in result.refused
    logged = lines(finished / "metrics.jsonl")[:2]
    for name, figures in computed["shaped"].diagnostics.items():
        mean = sum(row[f"experts/{name}/weight_mean"] for row in logged) / 2
        assert figures.weight_mean == pytest.approx(mean, rel=0.02)  # batches differ by a few tokens


def documented(name):
    return {code for table in tables(page(name), "metric") for row in table for code in codes(row[0])}


def family(metric):
    """The name under which the pages document a metric."""
    metric = re.sub(r"^experts/[^/]+/", "experts/<s>/", generic(metric))
    metric = re.sub(r"^experts/<s>/env/.*", "experts/<s>/env/<metric>", metric)
    metric = re.sub(r"^(experts/<s>/\w+_gap)_p\d\d$", r"\1_p<q>", metric)
    metric = re.sub(r"^experts/<s>/\w+_stderr$", "experts/<s>/<figure>_stderr", metric)
    return re.sub(
        r"^env/\w+/reward/\w+$",
        "env/<tag>/reward/<figure>",
        re.sub(r"^env/\w+/groups$", "env/<tag>/groups", metric),
    )


def test_the_metrics_of_a_run_are_those_of_the_page(finished):
    written = {family(key) for row in lines(finished / "metrics.jsonl") for key in row if key != "step"}
    own = documented("math_efficiency.md")
    assert written - documented("conversation_preference_rl.md") <= own
    unseen = {"correct", "correct_tokens", "unlocated"}  # the first two by the grader that stands in here
    unseen.add("experts/<s>/<figure>_stderr")  # which needs two problems a step
    assert own - written == unseen


def test_conversations_are_a_strategy_and_balance_scores_all_contexts(problems, tmp_path):
    folder = tmp_path / "run"
    run(
        make_model(tmp_path / "model", "qwen3"),  # as a judge, it names a verdict
        problems,
        folder,
        strategies="iid,prompt_augmentation,best_of,conversation",
        conversation="round_robin",
        num_agents=2,
        max_rounds=1,
        num_test_conversations=1,
        estimator="balance",
        max_steps=1,
    )
    row = lines(folder / "metrics.jsonl")[0]
    assert row["rollout/groups"] == 4
    assert row["rollout/void"] == 0
    assert "experts/conversation/env/unlocated" in row
    assert "test/conversation/correct/final" in row
    result = estimate_run(folder, EstimateOptions())
    assert result.used == "balance"
    assert result.refused == {}
    (balance,) = [each for each in result.estimators if each.name == "balance"]
    for name, figures in balance.diagnostics.items():
        assert row[f"experts/{name}/weight_mean"] == pytest.approx(figures.weight_mean)
