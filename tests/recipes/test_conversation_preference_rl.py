"""The recipe end to end, on models and data it has never seen."""

import asyncio
import json
import os
import signal
from functools import partial
from pathlib import Path

import datasets
import peft
import pytest
import torch
from random_models import make_model
from transformers import AutoModelForCausalLM

from viva.engine import LocalTrainingClient
from viva.recipes.conversation_preference_rl import Config
from viva.recipes.programs import train_recipe
from viva.run import interrupts

main = partial(train_recipe, "conversation_preference_rl")

NUM_STEPS = 3
OPTIONS = {
    "num_agents": 2,
    "max_rounds": 2,
    "batch_size": 4,
    "max_tokens": 8,
    "lora_rank": 4,
    "max_training_datapoints": 4 * NUM_STEPS,
    "tournament_pattern": "all_pairs_one_way",  # a random judge prefers a place, which cancels out in both ways
    "judge_max_off_set_mass": 1.0,
    "learning_rate": 1e-5,
    "eval_every": 2,
    "save_every": 1,
    "num_test_conversations": 1,
}


def arguments(log_path, options):
    return [f"{name}={value}" for name, value in (OPTIONS | {"log_path": log_path} | options).items()]


def run(log_path, **options):
    return main(arguments(log_path, options))


def metrics_of(folder: Path):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {family: make_model(folder / family, family) for family in ("qwen3", "llama")}


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    path.write_text("".join(f'{{"query": "What is {n} + 1?", "answer": {n + 1}}}\n' for n in range(5)))
    return path


@pytest.fixture(scope="module")
def jsonl_run(models, problems, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    code = run(folder, model_name=models["qwen3"], train_prompts_path=problems, test_prompts_path=problems)
    assert code == 0
    return folder


def test_the_recipe_trains_an_unseen_model_on_a_jsonl_file(jsonl_run):
    rows = metrics_of(jsonl_run)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert sum(row.get("optim/steps", 0) for row in rows) >= 2
    assert max(row.get("optim/logprob_gap_max", 0.0) for row in rows) < 1e-4
    assert [row["test/direct_questions"] for row in rows if "test/direct_questions" in row] == [5, 5, 5]
    assert {"judge/preference_A_rate", "agent_1/win_rate", "episode_length", "matchup_count"} <= set(rows[0])


def test_the_run_folder_is_complete(jsonl_run):
    names = {path.name for path in jsonl_run.iterdir()}
    assert names == {
        ".viva.lock",
        "adapter",
        "checkpoints.jsonl",
        "config.json",
        "metrics.jsonl",
        "report.html",
        "state",
        "tokens.jsonl",
        "transcripts.jsonl",
        "written.jsonl",
    }
    config = json.loads((jsonl_run / "config.json").read_text())
    assert config["recipe"] == "conversation_preference_rl"
    assert config["batch_size"] == 4
    transcripts = [json.loads(line) for line in (jsonl_run / "transcripts.jsonl").read_text().splitlines()]
    assert len(transcripts) == 2 * NUM_STEPS
    assert len(transcripts[0]["record"]["turns"]) == 4


def test_kept_tokens_spell_the_replies_and_the_trainer_agrees_with_the_sampler(jsonl_run):
    kept = json.loads((jsonl_run / "tokens.jsonl").read_text().splitlines()[0])
    transcripts = [json.loads(line) for line in (jsonl_run / "transcripts.jsonl").read_text().splitlines()]
    row = next(row for row in transcripts if (row["step"], row["group"]) == (kept["step"], kept["group"]))
    replies = {(turn["agent_id"], turn["round_index"]): turn["text"] for turn in row["record"]["turns"]}
    assert len(kept["turns"]) == len(replies)
    for turn in kept["turns"]:
        said, spelled = replies[turn["seat"], turn["turn"]], "".join(turn["pieces"])
        # random bytes are no text; their ASCII letters are the same however the rest is shown
        assert "".join(filter(str.isascii, said)).strip() in "".join(filter(str.isascii, spelled))
        pairs = zip(turn["training"], turn["sampling"], strict=True)
        assert all(new is None or new == pytest.approx(old, abs=1e-3) for new, old in pairs)


def test_the_adapter_loads_with_plain_peft_and_changes_the_model(jsonl_run, models):
    base = AutoModelForCausalLM.from_pretrained(models["qwen3"])
    tokens = torch.arange(1, 9)[None]
    with torch.no_grad():
        before = base(tokens).logits
        after = peft.PeftModel.from_pretrained(base, jsonl_run / "adapter")(tokens).logits
    assert (before - after).abs().max() > 1e-6


def test_two_runs_with_one_seed_write_identical_metrics(jsonl_run, models, problems, tmp_path):
    run(tmp_path, model_name=models["qwen3"], train_prompts_path=problems, test_prompts_path=problems)
    assert metrics_of(tmp_path) == metrics_of(jsonl_run)
    assert (tmp_path / "transcripts.jsonl").read_text() == (jsonl_run / "transcripts.jsonl").read_text()
    assert _weights(tmp_path) == _weights(jsonl_run)


def test_a_run_made_longer_equals_one_that_was_long_from_the_start(jsonl_run, models, problems, tmp_path):
    data = {"train_prompts_path": problems, "test_prompts_path": problems}
    run(tmp_path, model_name=models["qwen3"], **data, max_steps=1)
    assert [row["step"] for row in metrics_of(tmp_path)] == [0, 1]
    assert run(tmp_path, model_name=models["qwen3"], **data, behavior_if_exists="resume") == 0
    assert metrics_of(tmp_path) == metrics_of(jsonl_run)
    assert _weights(tmp_path) == _weights(jsonl_run)


def test_the_recipe_runs_on_a_saved_data_set_with_columns_and_splits(models, tmp_path):
    rows = {"question": [f"{n} + {n}" for n in range(6)], "result": [str(2 * n) for n in range(6)]}
    data = datasets.DatasetDict(
        fit=datasets.Dataset.from_dict(rows), held_out=datasets.Dataset.from_dict(rows)
    )
    data.save_to_disk(tmp_path / "data")
    code = run(
        tmp_path / "run",
        model_name=models["qwen3"],
        hf_dataset_name=tmp_path / "data",
        hf_prompt_column="question",
        hf_answer_column="result",
        hf_train_split="fit",
        hf_test_split="held_out",
        max_train_samples=4,
        max_test_samples=2,
        max_steps=1,
        judge_mode="verdict",
        judge="initial",
        judge_max_tokens=4,
    )
    assert code == 1  # nothing could be trained
    assert not (tmp_path / "run" / "adapter").exists()
    (first, last) = metrics_of(tmp_path / "run")
    assert (first["test/direct_questions"], last["step"]) == (2, 1)
    assert (
        first["rollout/errors/NoValidComparisonsError"] == 4
    )  # random text is no verdict: void, counted, no update
    assert first["optim/steps"] == 0


def test_full_fine_tuning_leaves_a_whole_model(models, problems, tmp_path):
    assert (
        run(tmp_path, model_name=models["qwen3"], train_prompts_path=problems, lora_rank=0, max_steps=1) == 0
    )
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    base = AutoModelForCausalLM.from_pretrained(models["qwen3"])
    gap = max((a - b).abs().max() for a, b in zip(trained.parameters(), base.parameters(), strict=True))
    assert 0 < gap < 0.01


def test_ctrl_c_saves_and_tells_how_to_go_on(jsonl_run, models, problems, tmp_path, monkeypatch, capsys):
    data = {"model_name": models["qwen3"], "train_prompts_path": problems, "test_prompts_path": problems}
    sample = LocalTrainingClient.save_weights_and_get_sampling_client
    calls = iter(range(9))

    def interrupting(self, *args, **kwargs):
        if next(calls) == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return sample(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(LocalTrainingClient, "save_weights_and_get_sampling_client", interrupting)
        assert run(tmp_path, **data) == 128 + signal.SIGINT
    assert "behavior_if_exists=resume" in capsys.readouterr().out
    assert run(tmp_path, **data, behavior_if_exists="resume") == 0
    assert metrics_of(tmp_path) == metrics_of(jsonl_run)
    assert _weights(tmp_path) == _weights(jsonl_run)


def test_an_interrupted_update_tells_what_is_left(models, problems, tmp_path, monkeypatch, capsys):
    def interrupting(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        return asyncio.get_running_loop().create_future()  # never done

    monkeypatch.setattr(LocalTrainingClient, "optim_step", interrupting)
    monkeypatch.setattr(interrupts, "GRACE_S", 0.1)
    options = {"model_name": models["qwen3"], "train_prompts_path": problems}
    assert run(tmp_path, **options, eval_every=0) == 128 + signal.SIGINT
    assert "stopped by SIGINT; what was sampled is kept. Go on" in " ".join(capsys.readouterr().out.split())


def _weights(folder: Path) -> bytes:
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def test_a_run_without_a_judge_is_repeated_from_its_own_options():
    given = {"train_prompts": ["a"], "model_name": "some/model", "learning_rate": 1e-4, "reward": "majority"}
    record = Config(**given).make_plan().record
    again = Config(**given, judge_prompt=record["judge_prompt"])
    assert again.game().reward.name == "majority"
    with pytest.raises(
        ValueError, match="judge_prompt would change nothing: the reward majority asks no judge"
    ):
        Config(**given, judge_prompt="Which is better?").game()
