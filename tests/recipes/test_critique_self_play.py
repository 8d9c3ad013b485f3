"""Critique self-play as a recipe: options, and whole runs on a model it has never seen."""

import json
from functools import partial
from pathlib import Path

import pytest

from viva.recipes.critique_self_play import Config
from viva.recipes.programs import train_recipe
from viva.rewards.review import PRESETS

main = partial(train_recipe, "critique_self_play")

NUM_STEPS = 2
OPTIONS = {
    "num_agents": 3,
    "batch_size": 6,
    "max_tokens": 6,
    "lora_rank": 4,
    "max_steps": NUM_STEPS,
    "learning_rate": 1e-3,
    "eval_every": 2,
    "save_every": 1,
    "num_test_conversations": 1,
}
UNSEEN = {"solution_floor": 0.0}
"""The votes of a model that has never seen a text tell no solutions apart."""


# options


def config(**options):
    return Config(**({"train_prompts": ["a"], "model_name": "some/model", "learning_rate": 1e-4} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_agents": 1}, "num_agents must be from 2 to 26"),
        ({"num_agents": 27}, "num_agents must be from 2 to 26"),
        ({"num_agents": 15, "revision_votes": "agents"}, "num_agents must be from 2 to 14 with comparisons"),
        ({"prior_precision": 0.0}, "prior_precision must be a positive number; got 0.0"),
        ({"solution_floor": -0.5}, "solution_floor must be a finite number of at least 0; got -0.5"),
        ({"prior_precision": float("inf")}, "prior_precision must be a positive number; got inf"),
        (
            {"reward_weights": {"r_dig": 1.0}},
            "weights must give .* each of r_sol, r_meta, r_diag; .*; unknown: 'r_dig'. Did you mean 'r_diag'",
        ),
        ({"reward_weights": {"r_sol": 0.0}}, "leave no stream a weight above 0"),
        ({"reward_weights": {"banana": 1.0}}, "unknown: 'banana'"),
        ({"reward_weights": {"r_sol": float("nan")}}, "weights must give a finite number"),
        ({"batch_size": 6}, "batch_size must be divisible by num_agents"),
        ({"personas": {1: "x"}}, "personas must have the ids 0, 1, 2"),
        ({"stop_at": {"reward_truth": 0.4}}, "Did you mean 'reward_truth_gap'"),
        ({"stop_at": {"reward_truth_gap": 1.4}}, "must be above 0 and at most 1; got 1.4"),
        ({"reward": "r_dig"}, "unknown reward 'r_dig'.*Did you mean 'r_diag'"),
        (
            {"reward": "r_sol", "reward_weights": {"r_sol": 2.0}},
            "reward_weights would change nothing: .* one stream",
        ),
        (
            {"reward": "majority", "preset": "paper"},
            "preset would change nothing: reward=majority has no such",
        ),
        (
            {"reward": "answers", "judge": "initial"},
            "judge would change nothing: .* asks no judge",
        ),
        (
            {"reward": "r_meta", "ballots": "labels"},
            "pays the tokens of verdicts alone, .* of which no token is sampled; use ballots=written",
        ),
        (
            {"preset": "paper", "revision_votes": "agents"},
            "revision_votes would change nothing: preset=paper compares .*; got revision_votes='agents'; use preset=",
        ),
        (
            {"preset": "paper", "num_agents": 2, "votes_on_own": False},
            "votes_on_own=false leaves each of two agents one solution, .* so nothing would be trained; leave",
        ),
        (
            {"preset": "paper", "num_agents": 2, "votes_on_own": False, "reward": "r_sol"},
            "so nothing would be trained",
        ),
        ({"stop_at": {}}, "a stop rule needs at least one level"),
        (
            {"stop_at": {"reward_truth_gap": 0.4}},
            "stop_at watches reward_truth_gap, which needs known answers",
        ),
        ({"reward": "answers"}, "the reward answers needs known answers, and no problem to train on has one"),
        (
            {"train_prompts": None},
            "Must provide either train_prompts, train_prompts_path, or hf_dataset_name",
        ),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options).make_plan()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("preset=papers", "preset"),
        ("revision_votes=nobody", "revision_votes"),
        ("num_agent=3", "Did you mean 'num_agents'"),
        ("prior_precision=much", "prior_precision"),
    ],
)
def test_an_option_that_cannot_be_read_ends_the_program_with_status_2(argument, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([argument])
    told = capsys.readouterr()
    assert told.err.startswith("error: ")
    assert message in told.err


def test_a_wrong_option_ends_the_program_before_the_engine_is_opened(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        "viva.recipes.common.make_service", lambda *_, **__: pytest.fail("the engine was opened")
    )
    run_folder = tmp_path / "run"
    assert main(['train_prompts=["a"]', "num_agents=1", f"log_path={run_folder}"]) == 2
    assert "num_agents must be from 2 to 26" in capsys.readouterr().err
    assert not run_folder.exists()


def test_the_agents_may_be_more_where_nobody_compares_both_rounds():
    assert config(num_agents=15, preset="paper").make_plan().config.num_agents == 15


def test_the_rules_are_the_presets_but_for_what_is_given():
    assert config(preset="paper").rules() == PRESETS["paper"]
    assert config(preset="robust").rules() == PRESETS["robust"]
    rules = config(reward_weights={"r_diag": 2.0}, prior_precision=0.5).rules()
    assert rules.weights == {"r_sol": 1.0, "r_meta": 0.0, "r_diag": 2.0}
    assert rules.prior_precision == 0.5
    floors = {name: config(preset=name, solution_floor=2.0).rules().solution_floor for name in PRESETS}
    assert floors == {"paper": 2.0, "robust": 2.0}
    assert config().paid_by().rules == config(reward="r_sol").paid_by().rules


def test_another_reward_keeps_the_rules_that_it_has():
    game = config(reward="r_sol", preset="paper").game()
    assert (game.reward.name, game.reward.rules.fit, game.reward.judge) == ("r_sol", "separate", None)
    assert game.reward.rules.weights == {"r_sol": 1.0, "r_meta": 0.0, "r_diag": 0.0}
    shuffled = config(reward="shuffled_peer_review", reward_weights={"r_sol": 3.0}).game().reward
    assert shuffled.of.rules.weights["r_sol"] == 3.0
    by_agents = config(reward="r_diag", revision_votes="agents").game()
    assert [round_.name for round_ in by_agents.protocol.rounds][-1] == "compare"
    assert config(reward="tournament", judge="initial").game().reward.judge.policy == "initial"
    assert config(reward="majority").make_plan().summary == "4 agents, reward majority"


def test_a_reward_of_the_users_own_says_all_about_itself(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import viva\nmine = viva.rewards.r_sol(noise_floor=3.0)\n")
    reward = config(reward=f"{path}:mine").game().reward
    assert (reward.name, reward.rules.noise_floor) == ("r_sol", 3.0)
    with pytest.raises(ValueError, match="preset would change nothing"):
        config(reward=f"{path}:mine", preset="paper").game()
    assert list(config(reward=f"{path}:mine").make_plan().record["user_code"]) == [f"{path}:mine"]


def test_help_lists_the_options(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = capsys.readouterr().out
    assert all(name in told for name in ("preset", "reward_weights", "revision_votes", "stop_at"))


# whole runs


def run(folder, model, problems, **options):
    given = {"model_name": model, "train_prompts_path": problems, "test_prompts_path": problems}
    given |= {} if "reward" in options else UNSEEN
    options = OPTIONS | given | {"log_path": folder} | options
    return main([f"{name}={value}" for name, value in options.items()])


def metrics_of(folder: Path):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def transcripts_of(folder: Path):
    return [json.loads(line) for line in (folder / "transcripts.jsonl").read_text().splitlines()]


def weights_of(folder: Path) -> bytes:
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def finished(model, problems, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert run(folder, model, problems) == 0
    return folder


def test_the_recipe_trains_an_unseen_model(finished):
    rows = metrics_of(finished)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert max(row.get("optim/logprob_gap_max", 0.0) for row in rows) < 1e-4
    assert sum(row.get("optim/steps", 0) for row in rows) > 0
    first = rows[0]
    assert (first["rollout/groups"], first["rollout/void"], first["episode_length"]) == (2, 0, 15)
    assert first["test/direct_questions"] == 4
    wanted = {
        *("credit/r_sol/mean", "credit/r_sol/std", "credit/masked_share", "agent_2/score_change"),
        *("critiques/given", "critiques/received", "revision/changed", "judge/verdict/invalid_rate"),
        *("parse/ranking/ok", "parse/critique/unstructured", "correct/first", "correct/final"),
        *("judge/revision/position_bias", "test/conversation/correct/final", "reward/mean"),
    }
    assert wanted <= set(first)


def test_the_run_folder_is_complete(finished):
    assert {path.name for path in finished.iterdir()} == {
        *(".viva.lock", "adapter", "checkpoints.jsonl", "config.json", "metrics.jsonl"),
        *("report.html", "state", "tokens.jsonl", "transcripts.jsonl", "written.jsonl"),
    }
    options = json.loads((finished / "config.json").read_text())
    assert (options["recipe"], options["preset"], options["batch_size"]) == (
        "critique_self_play",
        "robust",
        6,
    )
    transcripts = transcripts_of(finished)
    assert len(transcripts) == 2 * NUM_STEPS
    record = transcripts[0]["record"]
    assert (record["protocol"], len(record["turns"])) == ("critique_self_play", 15)
    rewards_G = transcripts[0]["rewards"]
    assert rewards_G[::2] == pytest.approx(list(record["rewards"].values()))
    assert rewards_G[1::2] == [None] * 3  # no weight pays a critique
    assert "r_diag" in (finished / "report.html").read_text()


def test_two_runs_with_one_seed_are_identical(finished, model, problems, tmp_path):
    assert run(tmp_path, model, problems) == 0
    assert metrics_of(tmp_path) == metrics_of(finished)
    assert transcripts_of(tmp_path) == transcripts_of(finished)
    assert weights_of(tmp_path) == weights_of(finished)


def test_a_run_that_is_resumed_equals_one_that_was_never_stopped(finished, model, problems, tmp_path):
    assert run(tmp_path, model, problems, max_steps=1) == 0
    assert [row["step"] for row in metrics_of(tmp_path)] == [0, 1]
    assert run(tmp_path, model, problems, behavior_if_exists="resume") == 0
    assert metrics_of(tmp_path) == metrics_of(finished)
    assert weights_of(tmp_path) == weights_of(finished)


def test_a_run_that_votes_by_labels_resumes_to_the_bit(model, problems, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert run(whole, model, problems, ballots="labels") == 0
    assert run(killed, model, problems, ballots="labels", max_steps=1) == 0
    assert run(killed, model, problems, ballots="labels", behavior_if_exists="resume") == 0
    assert metrics_of(killed) == metrics_of(whole)
    assert weights_of(killed) == weights_of(whole)
    rows = metrics_of(whole)
    assert "credit/r_meta/mean" not in rows[0]
    assert "parse/verdict/ok" not in rows[0]
    assert rows[0]["judge/verdict/sampled"] == 0.0
    for transcript in transcripts_of(whole):
        voted = [turn for turn in transcript["record"]["turns"] if turn["segment"] == "verdict"]
        assert [len(turn["response"]["answers"]) for turn in voted] == [2, 2, 2]
        assert all(turn["text"] == "" for turn in voted)


@pytest.mark.parametrize(
    ("options", "num_turns", "num_comparisons"),
    [
        ({"preset": "paper"}, 15, 0),
        ({"revision_votes": "agents"}, 18, 0),
        ({"ballots": "labels"}, 15, 6),
        ({"ballots": "labels", "revision_votes": "agents"}, 18, 0),
        ({"judge": "initial"}, 15, 6),
        ({"reward": "r_sol"}, 15, 6),
        ({"reward": "majority"}, 15, 0),
        ({"reward": "majority_first"}, 15, 0),
        ({"reward": "tournament"}, 15, 6),
    ],
    ids=[
        "paper",
        "agents-compare",
        "labels",
        "labels-compare",
        "initial-judge",
        "r_sol",
        "majority",
        "majority-first",
        "tournament",
    ],
)
def test_every_way_to_score_plays_its_own_rounds(
    model, problems, tmp_path, options, num_turns, num_comparisons
):
    assert run(tmp_path, model, problems, max_steps=1, eval_every=0, **options) == 0
    for transcript in transcripts_of(tmp_path):
        assert transcript["void"] is False
        assert len(transcript["record"]["turns"]) == num_turns
        assert len(transcript["record"]["comparisons"]) == num_comparisons
