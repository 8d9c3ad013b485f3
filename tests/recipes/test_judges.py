"""Which weights judge, in whole runs on a model that no recipe has seen: what each equals, resumes to and refuses."""

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

import viva
from viva.conversation.rendering import load_renderer
from viva.engine import LocalServiceClient
from viva.judging.judge import PolicyRef, PolicySelfComparisonJudge
from viva.recipes.conversation_preference_rl import Config as PreferenceConfig
from viva.recipes.critique_self_play import Config as CritiqueConfig
from viva.recipes.math_efficiency import Config as MathConfig
from viva.recipes.programs import train_recipe
from viva.recipes.protocol import Config as ProtocolConfig
from viva.tiny import model_path

NUM_STEPS = 4
COMMON = {
    "num_agents": 2,
    "batch_size": 4,
    "max_tokens": 5,
    "lora_rank": 4,
    "max_steps": NUM_STEPS,
    "learning_rate": 3e-2,
    "eval_every": 2,
    "save_every": 3,
    "num_test_conversations": 1,
    "max_rounds": 1,
    "trackers": "[]",
}


@pytest.fixture(scope="module")
def run(model, problems, tmp_path_factory):
    """Do a run, or return the one that was done with these options; its folder."""
    done = {}

    def _run(recipe="conversation_preference_rl", *, folder=None, **options):
        key = (recipe, *sorted((name, str(value)) for name, value in options.items()))
        if folder is None and key in done:
            return done[key]
        place = folder or tmp_path_factory.mktemp("run") / "run"
        given = {"model_name": model, "train_prompts_path": problems, "test_prompts_path": problems}
        everything = COMMON | given | {"log_path": place} | options
        if recipe == "critique_self_play":
            del everything["max_rounds"]
            # the votes of a model that has never seen a text tell no solutions apart
            everything["solution_floor"] = 0.0
        assert train_recipe(recipe, [f"{name}={value}" for name, value in everything.items()]) == 0
        return place if folder else done.setdefault(key, place)

    return _run


def metrics_of(folder: Path):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def left_by(folder: Path):
    """What a run leaves that depends on its judge: metrics, transcripts and trained weights."""
    transcripts = [json.loads(line) for line in (folder / "transcripts.jsonl").read_text().splitlines()]
    return metrics_of(folder), transcripts, (folder / "adapter" / "adapter_model.safetensors").read_bytes()


RECIPES = ("conversation_preference_rl", "critique_self_play")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_judge_refreshed_every_step_is_the_current_policy(run, recipe):
    assert left_by(run(recipe, judge="every", judge_every=1)) == left_by(run(recipe))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_judge_that_is_never_refreshed_is_the_initial_policy(run, recipe):
    frozen = left_by(run(recipe, judge="initial"))
    assert left_by(run(recipe, judge="every", judge_every=NUM_STEPS + 1)) == frozen
    assert left_by(run(recipe)) != frozen, "the judge makes no difference here, so the test could not fail"


def test_every_choice_judges_otherwise(run):
    scores = []
    for options in ({}, {"judge": "initial"}, {"judge": "every", "judge_every": 2}, EMA):
        transcripts = left_by(run(**options))[1]
        scores.append([one["score"] for row in transcripts for one in row["record"]["comparisons"]])
    assert len({json.dumps(each) for each in scores}) == len(scores)
    first = [each[: len(each) // NUM_STEPS] for each in scores]
    assert all(each == pytest.approx(first[0], abs=1e-5) for each in first), "the first step has one policy"


EMA = {"judge": "ema", "judge_decay": 0.5}
EVERY = {"judge": "every", "judge_every": 2}


@pytest.mark.parametrize("options", [EMA, EVERY], ids=["ema", "every"])
@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_that_is_resumed_judges_as_one_that_was_never_stopped(run, tmp_path, options, stop):
    folder = tmp_path / "run"
    run(folder=folder, **options | {"max_steps": stop})
    run(folder=folder, **options, behavior_if_exists="resume")
    assert left_by(folder) == left_by(run(**options))


def test_the_folder_keeps_the_judges_that_its_checkpoints_need(run):
    folder = run(**EVERY)
    index = [json.loads(line) for line in (folder / "checkpoints.jsonl").read_text().splitlines()]
    assert [(each["next_step"], each["beside"]) for each in index] == [
        (3, {"judge-000002": "state/sampler_weights/judge-000002"}),
        (4, {}),
    ]
    assert [path.name for path in (folder / "state" / "sampler_weights").iterdir()] == ["judge-000002"]


@pytest.mark.parametrize("options", [{}, {"judge": "initial"}, EMA, EVERY], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_tells_how_often_its_judge_is_right(recipe, options, model, problems, tmp_path):
    """This model never gives the known answer, so another grader finds some replies right."""
    name = "judge/accuracy" if recipe == RECIPES[0] else "judge/revision/accuracy"
    given = COMMON | {"trackers": [], "eval_every": 0, "max_steps": 2} | options
    given["log_path"] = str(tmp_path / "run")
    if recipe == RECIPES[1]:
        del given["max_rounds"]
        given |= {"num_agents": 3, "batch_size": 6}
    found = viva.train(
        recipe, model=model, prompts=problems, grader=lambda solution, _: len(solution) % 2 == 0, **given
    )
    told = found.metrics[name].dropna()
    assert len(told)
    assert told.between(0, 1).all()


@pytest.mark.parametrize("stop", [None, 1])
def test_the_initial_policy_of_a_run_that_starts_from_weights_is_these(run, tmp_path, stop):
    start = run(judge="initial") / "state" / "weights" / "000003"
    options = {"load_checkpoint_path": start, "max_steps": 2}
    folder = tmp_path / "run"
    if stop is not None:
        run(folder=folder, **options | {"judge": "initial", "max_steps": stop})
    run(folder=folder, **options, judge="initial", behavior_if_exists="resume")
    assert left_by(folder) == left_by(run(**options, judge=start))
    assert left_by(folder) != left_by(run(**options))


# the policy at the start beside the judge


def without_initial_judge(folder: Path):
    """What a run leaves but for what the policy at the start said and costs."""
    metrics, transcripts, weights = left_by(folder)
    ignored = (
        "sign/against_initial_judge",
        "alarm/initial_judge",
        "judge/prompt_tokens",
        "judge/sampled_tokens",
    )
    kept = [
        {name: value for name, value in row.items() if name not in ignored and "total_tokens" not in name}
        for row in metrics
    ]
    for row in transcripts:
        row["record"].pop("initial_judge_comparisons", None)
    return kept, transcripts, weights


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_policy_at_the_start_compares_pairs_and_changes_nothing(run, recipe):
    watched = run(recipe, initial_judge_pairs=1)
    assert without_initial_judge(watched) == without_initial_judge(run(recipe))
    rows = [row for row in left_by(watched)[1] if not row["void"]]
    told = [row["record"]["initial_judge_comparisons"] for row in rows]
    orders = [sorted((each["first"], each["second"]) for each in one) for one in told]
    assert orders == [[(0, 1), (1, 0)]] * len(rows)
    assert len({each["score"] for one in told for each in one}) > 1


def test_it_says_what_a_judge_says_that_stays_as_it_was(run):
    rows = [row for row in left_by(run(judge="initial", initial_judge_pairs=5))[1] if not row["void"]]
    for row in rows:
        said = {(each["first"], each["second"]): each["score"] for each in row["record"]["comparisons"]}
        told = {
            (each["first"], each["second"]): each["score"]
            for each in row["record"]["initial_judge_comparisons"]
        }
        assert told == pytest.approx(said, abs=1e-5), "of other batches, that share other beginnings"


def test_it_is_the_judge_of_the_first_step_and_not_that_of_later_ones(run):
    def scores(row, name):
        return {(each["first"], each["second"]): each["score"] for each in row["record"][name]}

    rows = [row for row in left_by(run(initial_judge_pairs=5))[1] if not row["void"]]
    differ = {row["step"]: [] for row in rows}
    for row in rows:
        said, told = scores(row, "comparisons"), scores(row, "initial_judge_comparisons")
        assert said.keys() == told.keys()
        differ[row["step"]].append(told != pytest.approx(said, abs=1e-5))
    assert not any(differ[0])
    assert any(any(each) for step, each in differ.items() if step)


@pytest.mark.parametrize("asked", [{"initial_judge_pairs": 1}, {"kl_penalty_coef": 0.5}], ids=str)
@pytest.mark.parametrize("start", ["base", "weights"])
def test_a_resumed_run_has_the_same_policy_at_the_start(run, tmp_path, start, asked):
    options = asked | {"max_steps": 3}
    if start == "weights":
        options["load_checkpoint_path"] = run(judge="initial") / "state" / "weights" / "000003"
    folder = tmp_path / "run"
    run(folder=folder, **options | {"max_steps": 1})
    run(folder=folder, **options, behavior_if_exists="resume")
    assert left_by(folder) == left_by(run(**options))
    assert left_by(folder) != left_by(run(**options | dict.fromkeys(asked, 0)))


def test_an_alarm_of_the_policy_at_the_start_needs_pairs():
    for options, message in (
        ({"stop_on": ["initial_judge"]}, "stop_on names initial_judge, which needs pairs"),
        ({"initial_judge_pairs": -1}, "initial_judge_pairs must be 0 or more; got -1"),
    ):
        for kind in (PreferenceConfig, CritiqueConfig, partial(ProtocolConfig, protocol="round_robin")):
            with pytest.raises(ValueError, match=message):
                config(kind, **options).make_plan()


# a judge that answers


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The judge's answers by step, of a run on the built-in policy, and the folder."""

    def run(folder=None, **options):
        folder = folder or tmp_path_factory.mktemp("answers") / "run"
        given = {"strategies": ["iid"], "group_size": 4, "batch_size": 8, "max_tokens": 60, "trackers": []}
        rates = {"learning_rate": 3e-2, "lora_rank": 4, "eval_every": 0, "save_every": 0, "max_steps": 3}
        given |= {"reward": "judge_answer", "judge_max_tokens": 60, "log_path": str(folder)} | rates | options
        questions = ["Ann has 3 pens and gets 4 more. How many pens does Ann have now?"] * 2
        viva.train("math_efficiency", model="tiny", prompts=questions, **given)
        rows = [json.loads(line) for line in (folder / "transcripts.jsonl").read_text().splitlines()]
        return [row["record"]["judge_answer"] for row in rows], folder

    return run


def test_a_judge_that_answers_has_the_weights_that_are_named(answers):
    current, _ = answers()
    initial, _ = answers(judge="initial")
    assert len(set(initial)) == 1
    assert answers(judge="every", judge_every=1)[0] == current
    assert answers(judge="every", judge_every=4)[0] == initial
    assert current[:2] == initial[:2]
    assert current[4:] != initial[4:], "the policy does not change, so the test could not fail"


def test_a_resumed_run_has_the_answers_of_one_that_was_never_stopped(answers, tmp_path):
    options = {"judge": "ema", "judge_decay": 0.5}
    whole, folder = answers(**options)
    answers(tmp_path / "run", **options | {"max_steps": 1})
    found, resumed = answers(tmp_path / "run", **options, behavior_if_exists="resume")
    assert found == whole
    weights = Path("adapter") / "adapter_model.safetensors"
    assert (resumed / weights).read_bytes() == (folder / weights).read_bytes()


# another model


def test_a_past_checkpoint_judges_as_the_policy_that_it_was(run):
    past = run(judge="initial")
    judged = run(judge=past, judge_checkpoint=3, max_steps=1)
    state = past / "state" / "weights" / "000003"
    assert left_by(run(judge=state, max_steps=1)) == left_by(judged)
    assert left_by(run(judge=past / "adapter", max_steps=1)) != left_by(judged)
    assert left_by(run(judge="initial", max_steps=1)) != left_by(judged)
    last = left_by(run(judge=past, judge_checkpoint="last", max_steps=1))
    assert left_by(run(judge=past, max_steps=1)) == last != left_by(judged)
    assert json.loads((run(judge=past, max_steps=1) / "config.json").read_text())["judge_weights"]


def test_the_model_before_training_is_the_initial_policy(run, model):
    initial = left_by(run(judge="initial"))
    assert left_by(run(judge=model)) == initial


def asked_of(path: Path):
    """Question, solutions and comparison of all that a judge was asked."""
    for line in path.read_text().splitlines():
        record = json.loads(line)["record"]
        said = {turn["agent_id"]: turn["response"]["solution"] for turn in record["turns"]}
        yield from ((record["question"], said, one) for one in record["comparisons"] if one["was_asked"])


def test_a_model_of_another_family_judges_in_its_own_format_in_training_and_evaluation(run, problems):
    folder = run(judge="tiny", max_steps=1)
    viva.evaluate(folder, problems, kinds=["conversation"], num_test_conversations=4)
    client = LocalServiceClient(device="cpu").create_sampling_client(base_model=str(model_path()))
    judge = PolicySelfComparisonJudge(
        PolicyRef(sampling_client=client), load_renderer(client.get_tokenizer(), model_name="tiny")
    )
    for path in (folder / "transcripts.jsonl", *(folder / "eval").glob("*.transcripts.jsonl")):
        asked = list(asked_of(path))
        assert asked
        for question, said, one in asked:
            found = asyncio.run(judge.compare(question, said, one["first"], one["second"], 0))
            assert found.outcome == one["outcome"]
            assert found.score == pytest.approx(one["score"], abs=1e-4)


@pytest.mark.parametrize("options", [{"judge": "initial"}, EMA, EVERY], ids=str)
def test_a_run_is_evaluated_whoever_judged_it(run, problems, options):
    evaluation = viva.evaluate(run(**options), problems, kinds=["conversation"], num_test_conversations=2)
    assert len(evaluation.played["conversation"]) == 2


def test_a_run_whose_judge_was_changed_is_not_resumed(run, tmp_path, capsys):
    past, folder = tmp_path / "past", tmp_path / "run"
    run(folder=past, max_steps=1)
    run(folder=folder, judge=past, max_steps=1)
    run(folder=past, max_steps=2, behavior_if_exists="resume")
    with pytest.raises(AssertionError):
        run(folder=folder, judge=past, max_steps=2, behavior_if_exists="resume")
    assert "judge_weights was" in capsys.readouterr().err


def test_a_judge_is_found_from_elsewhere_and_is_no_path_in_a_model_card(run, tmp_path, monkeypatch):
    from viva.recipes.common import located
    from viva.view.model_card import _shown

    folder = tmp_path / "runs" / "own"
    for name in ("judge", "initial"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    config = {"log_path": "runs/own", "judge": "runs/judge"}
    assert located(config, folder)["judge"] == str(tmp_path / "runs" / "judge")
    monkeypatch.chdir(tmp_path / "runs")
    assert located({"log_path": "own", "judge": "initial"}, folder)["judge"] == "initial"
    assert _shown("judge", "/home/me/judge") == _shown("eval_judge", "/home/me/judge") == "judge"
    for name in ("ema", "Qwen/Qwen3-8B", "https://host/v1"):
        assert _shown("judge", name) == name


# options


def config(kind, **options):
    given = {"train_prompts": ["a"], "model_name": "some/model", "learning_rate": 1e-4}
    return kind(**(given | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"judge": "inital"}, "got 'inital'. Did you mean 'initial'"),
        ({"judge": "me"}, "judge must be current, initial, every, ema, or a model"),
        ({"judge": ""}, "judge must be current"),
        ({"judge_every": 3}, "judge_every would change nothing: it belongs to judge=every"),
        ({"judge": "ema", "judge_every": 3}, "judge_every would change nothing"),
        ({"judge": "every", "judge_decay": 0.5}, "judge_decay would change nothing"),
        (
            {"judge_checkpoint": "last"},
            "judge_checkpoint would change nothing: it belongs to judge=RUN",
        ),
        ({"judge": "every", "judge_every": 0}, "judge_every must be 1 or more; got 0"),
        ({"judge": "ema", "judge_decay": 1.0}, "judge_decay must be above 0 and below 1"),
        ({"judge": "./nothing"}, "is no model that could judge"),
        ({"judge": "some/model", "judge_checkpoint": "last"}, "needs the folder of a run"),
        (
            {"judge": "ema", "engine": "remote", "base_url": "http://localhost:1"},
            "engine=local.*every",
        ),
        ({"judge": "tinker://a/weights/b"}, "with a remote engine, and engine=local cannot read them"),
        ({"reward": "majority", "judge": "ema"}, "judge would change nothing"),
        ({"reward": "majority", "judge_every": 3}, "judge_every would change nothing"),
    ],
)
def test_a_judge_that_could_not_be_is_refused_before_anything_is_computed(options, message):
    for kind in (PreferenceConfig, CritiqueConfig, partial(ProtocolConfig, protocol="round_robin")):
        with pytest.raises(ValueError, match=message):
            config(kind, **options).make_plan()


def test_agents_who_compare_need_no_judge():
    with pytest.raises(ValueError, match="judge would change nothing"):
        config(CritiqueConfig, revision_votes="agents", judge="initial").make_plan()
    with pytest.raises(ValueError, match="judge would change nothing"):
        config(CritiqueConfig, preset="paper", judge="initial").make_plan()


def test_every_recipe_takes_the_choice_where_its_reward_asks_a_judge():
    given = {"judge": "ema", "judge_decay": 0.8}
    for kind in (
        PreferenceConfig,
        CritiqueConfig,
        partial(PreferenceConfig, reward="serl"),
        partial(CritiqueConfig, reward="comas"),
        partial(CritiqueConfig, reward="shuffled_tournament"),
        partial(ProtocolConfig, protocol="round_robin"),
        partial(ProtocolConfig, protocol="critique"),
        partial(ProtocolConfig, protocol="round_robin", reward="serl"),
    ):
        judge = config(kind, **given).game().reward.judge
        assert (judge.policy, judge.decay) == ("ema", 0.8)
    judge = config(MathConfig, strategies=["iid"], reward="serl", **given).group_reward().judge
    assert (judge.policy, judge.decay) == ("ema", 0.8)


def test_a_reward_of_the_users_own_says_itself_who_judges(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import viva\nmine = viva.rewards.tournament(policy='every', every=7)\n")
    reward = config(PreferenceConfig, reward=f"{path}:mine").game().reward
    assert (reward.judge.policy, reward.judge.every) == ("every", 7)
    with pytest.raises(ValueError, match="judge would change nothing"):
        config(PreferenceConfig, reward=f"{path}:mine", judge="initial").game()
    for options, message in (
        ({"every": 7}, "every=7 would change nothing"),
        ({"policy": "every", "every": 0}, "every of 1 or more"),
        ({"policy": "ema", "decay": 1.0}, "a decay above 0 and below 1"),
        ({"policy": "emma"}, "policy must be current, .* Did you mean 'ema'"),
    ):
        with pytest.raises(ValueError, match=message):
            viva.rewards.tournament(**options)
