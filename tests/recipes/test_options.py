"""Wrong options are told before a model is loaded, with what is allowed."""

import asyncio
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import chz
import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.judging import comparison
from viva.recipes import loop
from viva.recipes.common import learning_rate, located, resolve_batch_size, resolve_model
from viva.recipes.config import read_options
from viva.recipes.conversation_preference_rl import Config
from viva.recipes.programs import train_recipe

main = partial(train_recipe, "conversation_preference_rl")

SEED_OPTIONS = {
    "renderer_name": None,
    "num_agents": 3,
    "max_rounds": 5,
    "learning_rate": None,
    "max_tokens": 512,
    "num_substeps": 1,
    "max_training_datapoints": 131072,
    "train_prompts": None,
    "train_prompts_path": None,
    "test_prompts_path": None,
    "hf_dataset_name": None,
    "hf_dataset_name_config": None,
    "hf_prompt_column": "query",
    "max_train_samples": None,
    "max_test_samples": 100,
    "eval_every": 5,
    "save_every": 20,
    "tokens_every": 10,
    "trackers": ["console"],
    "wandb_project": None,
    "wandb_name": None,
    "behavior_if_exists": "ask",
}


def config(**options):
    return Config(**({"train_prompts": ["a"], "model_name": "some/model", "learning_rate": 1e-4} | options))


def test_every_option_of_the_specification_has_its_name_and_default():
    defaults = chz.asdict(Config())
    assert {name: defaults[name] for name in SEED_OPTIONS} == SEED_OPTIONS
    assert {"model_name", "batch_size", "log_path"} <= set(defaults)


def test_weights_that_a_run_started_from_are_not_asked_for_when_it_goes_on(tmp_path):
    plan = config(load_checkpoint_path=str(tmp_path / "gone"), engine="local", log_path="x").make_plan()
    assert plan.load_checkpoint_path == str(tmp_path / "gone")


def test_project_and_name_of_wandb_may_change_when_a_run_goes_on(monkeypatch):
    monkeypatch.setattr("viva.run.trackers.find_spec", lambda name: SimpleNamespace(origin="a file"))
    options = config(wandb_project="p", wandb_name="n", log_path="x").make_plan()
    assert [(each.name, each.project, each.run_name) for each in options.trackers][1:] == [
        ("wandb", "p", "n")
    ]
    assert {"wandb_project", "wandb_name", "trackers"} <= set(options.free_options)


@given(st.integers(2, 300))
def test_the_default_batch_size_is_the_largest_multiple_up_to_128(num_agents):
    size = resolve_batch_size(None, num_agents)
    assert size % num_agents == 0
    assert size == num_agents if num_agents > 64 else 128 - num_agents < size <= 128


@pytest.mark.parametrize(
    ("batch_size", "num_agents", "nearest"), [(128, 3, "126 or 129"), (2, 3, "3"), (0, 3, "3"), (-1, 2, "")]
)
def test_an_indivisible_batch_size_is_refused_with_the_nearest_allowed(batch_size, num_agents, nearest):
    with pytest.raises(
        ValueError, match=rf"batch_size must be divisible by num_agents: .*Nearest allowed: {nearest}"
    ):
        resolve_batch_size(batch_size, num_agents)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"train_prompts": None},
            "Must provide either train_prompts, train_prompts_path, or hf_dataset_name",
        ),
        ({"batch_size": 128}, "batch_size must be divisible by num_agents"),
        ({"num_agents": 1}, "num_agents must be 2 or more; got 1"),
        ({"max_rounds": 0}, "max_rounds must be 1 or more"),
        ({"max_tokens": 0}, "max_tokens must be 1 or more"),
        ({"num_substeps": 0}, "num_substeps must be 1 or more"),
        ({"max_training_datapoints": 2}, "max_training_datapoints must be 3 or more"),
        ({"max_steps": 0}, "max_steps must be 1 or more"),
        ({"lora_rank": -1}, "lora_rank must be 0 or more"),
        ({"eval_every": -1}, "eval_every must be 0 or more"),
        ({"save_every": -1}, "save_every must be 0 or more"),
        ({"tokens_every": -1}, "tokens_every must be 0 or more"),
        ({"max_retries": -1}, "max_retries must be 0 or more"),
        ({"learning_rate": 0.0}, "learning_rate must be a positive number"),
        ({"learning_rate": float("nan")}, "learning_rate must be a positive number"),
        ({"temperature": 0.0}, "temperature must be a positive number"),
        ({"eval_temperature": -0.1}, "eval_temperature must be 0 or more"),
        ({"policy_timeout_s": 0.0}, "policy_timeout_s must be a positive number"),
        ({"judge_max_off_set_mass": 1.1}, "judge_max_off_set_mass must be from 0 to 1"),
        ({"personas": {1: "x"}}, "personas must have the ids 0, 1, 2"),
        ({"loss_fn": "ppo", "loss_fn_config": {"clip": 0.2}}, "Unknown loss_fn_config keys .*clip"),
        ({"loss_fn_config": {"beta": 0.1}}, "Unknown loss_fn_config keys .*allowed: \\[.temperature.\\]"),
        ({"loss_fn": "dro", "loss_fn_config": {"beta": -1.0}}, "must be a number of at least 0"),
        ({"loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 2.0}}, "is above clip_high_threshold"),
        ({"judge_prompt": "a", "judge_prompt_path": "b"}, "give judge_prompt or judge_prompt_path, not both"),
        ({"judge_prompt": " "}, "judge_prompt must be text that is not empty"),
        ({"judge_prompt_path": "/nowhere"}, "judge_prompt_path=/nowhere cannot be read"),
        ({"engine": "local", "base_url": "http://x"}, "base_url=http://x needs engine=remote"),
        ({"max_staleness": -1}, "max_staleness must be 0 or more"),
        ({"max_staleness": 2}, "max_staleness=2 lets an engine .* needs engine=remote"),
        ({"stream_updates": True}, "stream_updates=True lets an engine .* needs engine=remote"),
        ({"ttl_seconds": 60}, "ttl_seconds must be 86400 or more; got 60"),
        ({"model_name": "/nowhere"}, "model_name=/nowhere is not a folder"),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options).make_plan()


def test_the_plan_counts_trajectories_and_keeps_a_partial_last_batch():
    plan = config(batch_size=6, max_training_datapoints=21).make_plan()
    assert [len(plan.order.batch(index)) for index in range(len(plan.order))] == [2, 2, 2, 1]
    assert len(config(batch_size=6, max_steps=2).make_plan().order) == 2
    assert config().make_plan().record["batch_size"] == 126


def test_a_wrong_option_ends_the_program_with_one_line(capsys, tmp_path):
    assert main(["train_prompts_path=/nowhere.jsonl", f"log_path={tmp_path}"]) == 2
    assert capsys.readouterr().err.startswith("error: train_prompts_path=/nowhere.jsonl is not a file")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("num_agent=3", "Did you mean 'num_agents'"),
        ("num_agents=many", "num_agents"),
        ("order=random", "order"),
        ("3", "'3' is no option of the form name=value"),
    ],
)
def test_an_option_that_cannot_be_read_ends_the_program_with_status_2(argument, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([argument])
    told = capsys.readouterr()
    assert told.err.startswith("error: ")
    assert message in told.err
    assert told.out == ""


def test_help_lists_the_options_and_ends_with_status_0(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = capsys.readouterr()
    assert "judge_prompt_path" in told.out
    assert "num_agents" in told.out
    assert told.err == ""


def test_a_tracker_without_its_package_is_told_with_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("viva.run.trackers.find_spec", lambda name: None)
    code = main(['train_prompts=["a"]', "trackers=console,wandb:p", f"log_path={tmp_path / 'run'}"])
    assert code == 2
    assert "pip install 'viva-rl[wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_model_name_is_a_folder_a_hub_name_or_tiny(tmp_path):
    assert resolve_model("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert resolve_model("viva/tiny") == "viva/tiny"  # the built-in policy has one name
    with pytest.raises(ValueError, match=r"is a folder without config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == str(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        resolve_model("./missing")


@pytest.mark.parametrize("given", ["text", "file"])
def test_the_judges_prompt_is_recorded_and_told(given, tmp_path):
    (tmp_path / "prompt.txt").write_text("Prefer short ones.", encoding="utf-8")
    options = {
        "text": {"judge_prompt": "Prefer short ones."},
        "file": {"judge_prompt_path": str(tmp_path / "prompt.txt")},
    }[given]
    assert config(**options).make_plan().record["judge_prompt"] == "Prefer short ones."


def test_the_default_prompt_of_the_judge_is_kept_with_the_run():
    assert config().make_plan().record["judge_prompt"] == comparison.JUDGE_SYSTEM_PROMPT


def test_an_edited_default_prompt_of_the_judge_is_told_and_kept(monkeypatch):
    monkeypatch.setattr(comparison, "JUDGE_SYSTEM_PROMPT", "Prefer the shorter.")
    assert config().game().reward.judge.system_prompt == "Prefer the shorter."
    assert config().make_plan().record["judge_prompt"] == "Prefer the shorter."


def test_a_missing_learning_rate_is_told_before_a_model_is_loaded(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("viva.training.service._fetched_config", lambda name: None)
    monkeypatch.setattr(
        "viva.recipes.common.make_service", lambda *_, **__: pytest.fail("the engine was opened")
    )
    run = tmp_path / "run"
    assert main(['train_prompts=["a"]', "model_name=nobody/unknown", f"log_path={run}"]) == 2
    assert "no learning rate is known for nobody/unknown" in capsys.readouterr().err
    assert not run.exists()


def test_the_learning_rate_is_the_users_or_the_built_in_policys_own(tmp_path):
    assert learning_rate(0.5, "tiny", is_lora=True) == 0.5
    assert learning_rate(None, "tiny", is_lora=True) == 1.5e-3


def test_help_and_option_errors_do_not_load_torch():
    code = (
        "import importlib, sys\nfrom viva.recipes.programs import RECIPES\n"
        "for name in RECIPES: importlib.import_module(f'viva.recipes.{name}')\n"
        "import viva.cli\n"
        "for planned in ([], ['recipe=critique_self_play']):\n"
        "    try: viva.cli.main(['screen', 'tiny', 'task.jsonl', 'num_problms=3', *planned])\n"
        "    except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'datasets' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_relative_paths_of_a_run_are_looked_for_where_it_was_started_then_beside_it(tmp_path, monkeypatch):
    config = {
        "log_path": "runs/first",
        "model_name": "models/own",
        "test_prompts_path": "test.jsonl",
        "seed": 0,
    }
    config |= {"train_prompts_path": "/data/train.jsonl", "judge_prompt_path": None}
    run = tmp_path / "project" / "runs" / "first"
    (tmp_path / "project" / "models" / "own").mkdir(parents=True)
    run.mkdir(parents=True)
    (tmp_path / "project" / "test.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    project = tmp_path / "project"
    found = {"model_name": str(project / "models" / "own"), "test_prompts_path": str(project / "test.jsonl")}
    assert located(config, run) == config | found
    assert located(config, Path("project/runs/first")) == config | found
    moved = run.rename(tmp_path / "elsewhere")
    assert located(config, moved) == config  # as before: they mean the current folder
    (moved / "test.jsonl").touch()
    assert located(config, moved) == config | {"test_prompts_path": str(moved / "test.jsonl")}
    for name in ("tiny", "Qwen/Qwen3-8B"):
        assert located({"model_name": name}, moved) == {"model_name": name}


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"num_epochs": 3}, 3),
        ({"num_epochs": 0.5}, 1),
        ({"num_epochs": 3, "max_steps": 2}, 2),
        ({"num_epochs": 1, "max_steps": 2}, 1),
        ({"max_training_datapoints": 24}, 4),
    ],
)
def test_passes_over_the_prompts_say_how_long_a_run_is(options, steps):
    plan = config(train_prompts=["a", "b"], num_agents=3, batch_size=6, **options).make_plan()
    assert len(plan.order) == steps


@pytest.mark.parametrize("value", [0, -1, float("nan"), 1e9])
def test_passes_are_a_number_that_makes_sense(value):
    with pytest.raises(ValueError, match="num_epochs must be"):
        config(train_prompts=["a", "b"], num_epochs=value).make_plan()


def test_two_lengths_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="both say how long the run is; leave one of them out"):
        config(train_prompts=["a", "b"], num_epochs=2, max_training_datapoints=24).make_plan()


def test_ctrl_c_before_the_first_step_is_told_in_one_line(monkeypatch, capsys):
    async def interrupted(config):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    monkeypatch.setattr(loop, "run_recipe", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        assert main(["model_name=tiny"]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "interrupted; the run can be resumed\n"


@pytest.mark.parametrize("named", [{}, {"recipe": "conversation_preference_rl"}])
def test_an_unknown_name_in_a_file_is_refused_whether_or_not_it_names_its_recipe(
    named: dict[str, str],
) -> None:
    with pytest.raises(ValueError, match="lerning_rate"):
        read_options({"lerning_rate": 1.0, **named}, Config, "conversation_preference_rl")
    record = {"lerning_rate": 1.0, "prompts_digest": "", **named}  # of an older version, perhaps
    assert read_options(record | {"max_steps": 3}, Config, "conversation_preference_rl") == {"max_steps": 3}
