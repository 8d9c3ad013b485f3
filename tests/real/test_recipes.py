"""The recipes on SmolLM2-135M-Instruct: a step of each, a killed run resumed to the bit, weights out and in again."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from forked_commands import start
from gguf_files import TEXTS
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from viva.cli import main as viva_main
from viva.engine import LocalServiceClient
from viva.engine.gguf import gguf_folder
from viva.engine.gguf_file import GgufFile
from viva.recipes.programs import train_recipe

pytestmark = pytest.mark.slow

RECIPES = {
    "conversation_preference_rl": {
        "num_agents": 2,
        "max_rounds": 1,
        "batch_size": 4,
        "max_tokens": 8,
        "max_steps": 1,
    },
    "critique_self_play": {"num_agents": 2, "batch_size": 2, "max_tokens": 8, "max_steps": 1},
    "math_efficiency": {
        "strategies": "iid",
        "group_size": 4,
        "batch_size": 8,
        "max_tokens": 10,
        "max_steps": 3,
    },
}
COMMON = {
    "lora_rank": 4,
    "learning_rate": 1e-3,
    "device": "cpu",
    "eval_every": 0,
    "save_every": 1,
    "num_test_conversations": 0,
    "behavior_if_exists": "resume",
}
CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Germany": "Berlin",
}


def arguments(recipe: str, model: Path, log_path: Path, **options: object) -> list[str]:
    """The command line of a run, behind the module's name."""
    problems = log_path.with_suffix(".jsonl")
    with problems.open("w", encoding="utf-8") as file:
        for country, city in CAPITALS.items():
            question, answer = (
                f"What is the capital of {country}? Answer in one word.",
                f"The capital of {country} is {city}.",
            )
            file.write(json.dumps({"query": question, "answer": answer}) + "\n")
    given = {"model_name": model, "train_prompts_path": problems, "log_path": log_path}
    return [f"{name}={value}" for name, value in (given | COMMON | RECIPES[recipe] | options).items()]


def run(recipe: str, model: Path, log_path: Path, **options: object) -> list[dict[str, Any]]:
    """Begin or resume a run; its metrics."""
    assert train_recipe(recipe, arguments(recipe, model, log_path, **options)) == 0
    return metrics(log_path)


def metrics(log_path: Path) -> list[dict[str, Any]]:
    lines = (log_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith("time/")}
        for line in lines
    ]


def last_adapter(log_path: Path) -> Path:
    """The weights that a run ended with."""
    last = json.loads((log_path / "checkpoints.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    return log_path / last["state_path"]


@pytest.fixture(scope="session")
def whole(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of math efficiency that nothing stopped."""
    log_path = tmp_path_factory.mktemp("real") / "whole"
    run("math_efficiency", smollm2, log_path)
    return log_path


@pytest.fixture(scope="session")
def exported(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its adapter and its merged model."""
    to = tmp_path_factory.mktemp("real") / "export"
    assert viva_main(["export", str(whole), f"to={to}"]) == 0
    return to


@pytest.mark.parametrize("recipe", ["conversation_preference_rl", "critique_self_play"])
def test_a_conversation_is_played_and_trained_on(recipe: str, smollm2: Path, tmp_path: Path) -> None:
    options = {"solution_floor": 0.0} if recipe == "critique_self_play" else {}
    (row,) = run(recipe, smollm2, tmp_path / "run", **options)
    assert row["rollout/sampled_tokens"] > 0
    assert row["optim/logprob_gap_max"] < 1e-3


EXAMPLE = Path(__file__).parents[2] / "examples" / "smollm2_critique.yaml"
LABELS = {"config": EXAMPLE, "num_agents": 3, "batch_size": 3, "max_tokens": 20}
"""The example, which votes by label probabilities, in one short conversation."""


def test_agents_that_cannot_write_a_ranking_vote_by_label_probabilities(
    smollm2: Path, tmp_path: Path
) -> None:
    (row,) = run("critique_self_play", smollm2, tmp_path / "run", **LABELS, solution_floor=0.0)
    assert row["judge/ranking/invalid_rate"] == row["judge/verdict/invalid_rate"] == 0.0
    assert row["judge/verdict/off_set_mass"] < 0.5
    assert row["credit/r_sol/std"] > 0
    assert row["optim/grad_norm"] > 0
    assert row["optim/logprob_gap_max"] < 1e-3


def test_votes_of_half_for_each_solution_train_nothing_and_the_run_says_so(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example's first lines promise both."""
    (row,) = run("critique_self_play", smollm2, tmp_path / "run", **LABELS)
    told = " ".join("".join(capsys.readouterr()).split())
    assert "the optimiser took no step in the whole run" in told
    assert 0 < row["agent_0/score_final"] < 1
    assert row["advantage/silent_groups_share"] == 1.0
    assert "optim/grad_norm" not in row


def test_answers_are_paid_and_trained_on(whole: Path) -> None:
    rows = metrics(whole)
    assert len(rows) == 3
    assert max(row["reward/mean"] for row in rows) > 0
    assert all(row["optim/logprob_gap_max"] < 1e-3 for row in rows if "optim/logprob_gap_max" in row)
    assert max(row.get("optim/grad_norm", 0.0) for row in rows) > 0


def test_a_killed_run_resumes_to_the_bit(whole: Path, smollm2: Path, tmp_path: Path) -> None:
    log_path = tmp_path / "killed"
    command = ["train", "math_efficiency", *arguments("math_efficiency", smollm2, log_path)]
    process = start(command, tmp_path, tmp_path / "told.txt")
    written = log_path / "metrics.jsonl"
    while process.is_alive() and not (written.is_file() and "\n" in written.read_text(encoding="utf-8")):
        time.sleep(0.01)
    process.kill()
    process.join()
    assert 1 <= len(metrics(log_path)) < 3
    assert run("math_efficiency", smollm2, log_path) == metrics(whole)
    names = ("adapter_model.safetensors", "adapter_config.json")
    for name in names:
        assert (last_adapter(log_path) / name).read_bytes() == (last_adapter(whole) / name).read_bytes()


@pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*")  # peft; the output layer has an adapter
async def test_exported_weights_compute_what_the_engine_computes(
    whole: Path, exported: Path, folder: Path
) -> None:
    tokens = AutoTokenizer.from_pretrained(folder).encode(
        "The capital of France is Paris. That is all I know."
    )
    sampler = LocalServiceClient(device="cpu").create_sampling_client(model_path=str(last_adapter(whole)))
    found = torch.tensor((await sampler.compute_logprobs(tinker.ModelInput.from_ints(tokens)))[1:])

    def logprobs(model: Any) -> torch.Tensor:
        with torch.inference_mode():
            every = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        return every[range(len(tokens) - 1), tokens[1:]]

    base = AutoModelForCausalLM.from_pretrained(folder)
    assert (logprobs(base) - found).abs().max() > 1e-3  # else nothing was trained
    assert torch.allclose(logprobs(PeftModel.from_pretrained(base, exported / "adapter")), found, atol=1e-3)
    merged = AutoModelForCausalLM.from_pretrained(exported / "model")
    assert torch.allclose(logprobs(merged), found, atol=1e-3)


def test_a_trained_model_goes_back_into_a_file_with_all_that_the_first_one_says(
    whole: Path,
    exported: Path,
    smollm2: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, merged = tmp_path / "trained.gguf", exported / "model"
    assert viva_main(["export", str(whole), f"to={file}"]) == 0
    monkeypatch.setenv("VIVA_CACHE", str(tmp_path / "cache"))  # for the new file; the first one is unpacked
    new, old = GgufFile(file), GgufFile(smollm2)
    kept = {key for key in old.fields if not key.startswith(("general.name", "general.file_type"))}
    kept.remove("general.quantization_version")
    assert {key: new.typed_fields[key] for key in kept} == {key: old.typed_fields[key] for key in kept}
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (gguf_folder(file), folder)]
    ids, first = ([tokenizer.encode(text) for text in TEXTS] for tokenizer in tokenizers)
    assert ids == first
    models = [AutoModelForCausalLM.from_pretrained(place) for place in (gguf_folder(file), merged, folder)]
    with torch.inference_mode():
        ours, theirs, before = (model(torch.tensor([first[0]])).logits for model in models)
    assert torch.equal(ours, theirs)
    assert (ours - before).abs().max() > 1e-3
    by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name)
    with torch.inference_mode():
        assert torch.allclose(by_transformers(torch.tensor([first[0]])).logits, theirs, atol=1e-3)
