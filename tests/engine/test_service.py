import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_engine import ints, params, plain_logprobs, supervised, weights
from trained_clients import TEXTS, go_on, make, scores

from viva.engine import EngineLimits, LocalServiceClient
from viva.engine.checkpoint import MANIFEST
from viva.model_files import sealed


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("rank", [0, 4])
def test_a_saved_state_goes_on_bit_for_bit_in_another_process(
    rank: int, saving_service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    trainer = make(saving_service, model_dir("qwen3"), rank)
    path = trainer.save_state("step_3").result().path
    expected = go_on(trainer)
    elsewhere = LocalServiceClient(device="cpu")  # as after a restart: nothing shared
    resumed = elsewhere.create_training_client_from_state_with_optimizer(path)
    assert same(go_on(resumed), expected)
    fresh = elsewhere.create_training_client_from_state(path).result()
    assert not same(go_on(fresh), expected)
    assert resumed.get_info().lora_rank == (rank or None)


def test_loading_into_a_client_replaces_weights_and_optimiser_and_drops_gradients(
    saving_service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    trainer = make(saving_service, model_dir("qwen3"))
    path = trainer.save_state("early").result().path
    saved = weights(trainer)
    expected = go_on(trainer)
    trainer.forward_backward([supervised(TEXTS[0])], "cross_entropy")
    trainer.load_state_with_optimizer(path).result()
    assert same(weights(trainer), saved)
    assert same(go_on(trainer), expected)
    trainer.load_state(path).result()
    assert trainer._policy.optimizer.num_steps == 0


async def test_saving_and_loading_work_from_async_code(
    saving_service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    trainer = await saving_service.create_lora_training_client_async(model_dir("qwen3"), rank=2)
    state = await (await trainer.save_state_async("s", ttl_seconds=3600))
    await (await trainer.load_state_async(state.path))
    await (await trainer.load_state_with_optimizer_async(state.path))
    sampler_weights = await (await trainer.save_weights_for_sampler_async("s"))
    first = await trainer.create_sampling_client_async(sampler_weights.path)
    second = await saving_service.create_sampling_client_async(model_path=state.path)
    prompt = ints(TEXTS[0])
    assert await first.compute_logprobs(prompt) == await second.compute_logprobs(prompt)
    again = await saving_service.create_training_client_from_state_async(state.path)
    whole = await saving_service.create_training_client_from_state_with_optimizer_async(state.path)
    assert same(weights(again), weights(whole))
    assert await first.get_base_model_async() == model_dir("qwen3")


@pytest.mark.parametrize("rank", [0, 4])
def test_saved_weights_sample_as_the_snapshot_did(
    rank: int, saving_service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    trainer = make(saving_service, model_dir("qwen3"), rank)
    snapshot = trainer.save_weights_and_get_sampling_client()
    path = trainer.save_weights_for_sampler("final").result().path
    go_on(trainer)
    stored = LocalServiceClient(device="cpu").create_sampling_client(model_path=path)
    assert scores(stored) == scores(snapshot)
    ours = stored.sample(ints(TEXTS[0]), 2, params()).result().sequences
    theirs = snapshot.sample(ints(TEXTS[0]), 2, params()).result().sequences
    assert [s.tokens for s in ours] == [s.tokens for s in theirs]


@pytest.mark.parametrize("family", ["gemma3", "llama", "mistral", "qwen3"])
def test_plain_peft_loads_the_adapter_with_the_same_logprobs(
    family: str, saving_service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    import peft
    from transformers import AutoModelForCausalLM

    trainer = make(saving_service, model_dir(family))
    path = trainer.save_weights_for_sampler("final").result().path
    base = AutoModelForCausalLM.from_pretrained(model_dir(family))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
        model = peft.PeftModel.from_pretrained(base, path).eval()
    np.testing.assert_allclose(
        scores(trainer.save_weights_and_get_sampling_client())[1:], plain_logprobs(model, TEXTS[0]), atol=1e-4
    )
    config = json.loads((Path(path) / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (4, 32)
    assert set(config["target_modules"]) >= {"q_proj", "down_proj", "lm_head"}
    assert config["target_modules"] == sorted(config["target_modules"])  # in every process the same
    assert {file.suffix for file in Path(path).iterdir()} == {".json", ".safetensors"}


def other_of_equal_shapes(folder: str, to: Path) -> Path:
    """A model that differs in one weight."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


@pytest.mark.parametrize("rank", [0, 4])
def test_saved_weights_are_refused_on_another_base_of_equal_shapes(
    rank: int, saving_service: LocalServiceClient, model_dir: Callable[[str], str], tmp_path: Path
) -> None:
    state = make(saving_service, model_dir("llama"), rank).save_state("s").result().path
    other = str(other_of_equal_shapes(model_dir("llama"), tmp_path / "other"))
    there = (
        rf"belongs to another base model than '{other}', which differs in its weights \(SHA-256 .* trained on"
    )
    for load in (
        lambda: saving_service.create_training_client_from_state(state, other),
        lambda: saving_service.create_training_client_from_state_with_optimizer(state, other),
        lambda: saving_service.create_sampling_client(state, other),
        lambda: saving_service.create_lora_training_client(other, rank=rank).load_state(state).result(),
    ):
        with pytest.raises(ValueError, match=there):
            load()


def test_a_base_that_was_replaced_where_it_lies_is_refused(
    saving_service: LocalServiceClient, model_dir: Callable[[str], str], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    shutil.copytree(model_dir("llama"), base)
    state = make(saving_service, str(base)).save_state("s").result().path
    shutil.rmtree(base)
    other_of_equal_shapes(model_dir("llama"), base)
    with pytest.raises(ValueError, match="which differs in its weights"):
        LocalServiceClient().create_training_client_from_state_with_optimizer(state)


def test_a_checkpoint_of_before_bases_were_recorded_is_read_and_that_is_said(
    saving_service: LocalServiceClient,
    model_dir: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    state = Path(make(saving_service, model_dir("llama")).save_state("s").result().path)
    manifest = json.loads((state / MANIFEST).read_text())
    assert set(manifest.pop("base_digests")) == {"weights", "config", "tokenizer"}
    (state / MANIFEST).write_text(json.dumps(sealed(manifest)))
    saving_service.create_training_client_from_state(str(state))
    (record,) = caplog.records
    assert "cannot be checked: the checkpoint has no record of it" in record.getMessage()
    other = str(other_of_equal_shapes(model_dir("llama"), tmp_path / "other"))
    with pytest.raises(
        ValueError, match="which differs in its weights"
    ):  # the one that it names is still there
        saving_service.create_training_client_from_state(str(state), other)


def test_plain_transformers_loads_fully_trained_weights(
    saving_service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = make(saving_service, model_dir("qwen3"), rank=0)
    path = trainer.save_weights_for_sampler("whole").result().path
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    np.testing.assert_allclose(
        scores(trainer.save_weights_and_get_sampling_client())[1:], plain_logprobs(model, TEXTS[0]), atol=1e-4
    )
    assert AutoTokenizer.from_pretrained(path).decode(TEXTS[0]) == trainer.get_tokenizer().decode(TEXTS[0])
    base = LocalServiceClient(device="cpu").create_sampling_client(base_model=path)
    np.testing.assert_allclose(scores(base)[1:], plain_logprobs(model, TEXTS[0]), atol=1e-4)


def test_states_are_replaced_only_when_asked_and_sampler_weights_always(
    saving_service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    trainer = make(saving_service, model_dir("qwen3"))
    first = trainer.save_state("s").result().path
    with pytest.raises(ValueError, match="overwrite=True"):
        trainer.save_state("s").result()
    assert trainer.save_state("s", overwrite=True, user_metadata={"note": "b"}).result().path == first
    manifest = json.loads((Path(first) / "checkpoint.json").read_text())
    assert manifest["user_metadata"] == {"run": "a", "note": "b"}
    assert manifest["num_steps"] == 3
    paths = [trainer.save_weights_for_sampler("s").result().path for _ in range(2)]
    assert paths[0] == paths[1] != first


def test_equal_names_of_two_clients_are_two_checkpoints(
    saving_service: LocalServiceClient, model_dir: Callable[[str], str], tmp_path: Path
) -> None:
    beside = LocalServiceClient(device="cpu", state_dir=tmp_path / "states")
    paths: set[str] = set()
    for service in (saving_service, saving_service, beside):
        trainer = make(service, model_dir("qwen3"), 2 + len(paths) // 2)
        path, state = (
            save("final").result().path for save in (trainer.save_weights_for_sampler, trainer.save_state)
        )
        paths |= {path, state}
        trained = scores(trainer.save_weights_and_get_sampling_client())
        for saved in (path, state):
            assert scores(service.create_sampling_client(model_path=saved)) == trained
        go_on(trainer)
    assert len(paths) == 6
    # who goes on from a state is a client of its own, as in the SDK
    resumed = saving_service.create_training_client_from_state_with_optimizer(state)
    assert resumed.save_state("final").result().path not in paths


NEXT_FOLDERS = """
import sys
from pathlib import Path
import torch
from viva.engine import EngineLimits
from viva.engine.core import Core
exact = dict.fromkeys(("dtype", "decode_dtype", "matrix_dtype"), torch.float32)
made = dict(device=torch.device("cpu"), **exact, seed=0, limits=EngineLimits())
core = Core(state_dir=Path(sys.argv[1]), one_run=False, **made)
sys.stdin.readline()
print(*(core.claim_folder().name for _ in range(40)))
"""


def test_processes_that_take_folders_at_the_same_time_get_different_ones(tmp_path: Path) -> None:
    command = [sys.executable, "-c", NEXT_FOLDERS, str(tmp_path)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    taken = [process.communicate()[0].split() for process in processes]
    assert sum(map(len, taken)) == 120
    assert len({name for names in taken for name in names}) == 120


def test_a_service_of_one_run_saves_in_its_folder_and_goes_on_there(
    model_dir: Callable[[str], str], tmp_path: Path
) -> None:
    service = LocalServiceClient(device="cpu", state_dir=tmp_path, one_run=True)
    trainer = service.create_lora_training_client(model_dir("qwen3"), rank=2, seed=0)
    path = trainer.save_state("000001").result().path
    assert path == str(tmp_path / "weights" / "000001")
    other = service.create_training_client_from_state(path)
    with pytest.raises(ValueError, match="another training client of this service has saved '000001'"):
        other.save_state("000001", overwrite=True)
    assert other.save_state("000001.b").result().path == str(tmp_path / "weights" / "000001.b")
    later = LocalServiceClient(device="cpu", state_dir=tmp_path, one_run=True)
    resumed = later.create_training_client_from_state_with_optimizer(path)
    assert resumed.save_state("000002").result().path == str(tmp_path / "weights" / "000002")


def test_a_base_model_that_has_moved_can_be_named(
    saving_service: LocalServiceClient, model_dir: Callable[[str], str], tmp_path: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(model_dir("qwen3"), old)
    trainer = make(saving_service, str(old))
    expected = scores(trainer.save_weights_and_get_sampling_client())
    path = trainer.save_state("s").result().path
    shutil.move(old, new)
    later = LocalServiceClient(device="cpu")
    assert scores(later.create_sampling_client(model_path=path, base_model=str(new))) == expected
    resumed = later.create_training_client_from_state_with_optimizer(path, base_model=str(new))
    assert scores(resumed.save_weights_and_get_sampling_client()) == expected


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".x"])
def test_names_are_checked_before_anything_is_written(
    name: str, saving_service: LocalServiceClient, model_dir: Callable[[str], str], tmp_path: Path
) -> None:
    trainer = saving_service.create_lora_training_client(model_dir("qwen3"), rank=2)
    for save in (trainer.save_state, trainer.save_weights_for_sampler):
        with pytest.raises(ValueError, match="is not a checkpoint name"):
            save(name)
    assert not (tmp_path / "states").exists()


def test_saving_without_a_state_dir_says_what_to_do(
    service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    trainer = service.create_lora_training_client(model_dir("qwen3"), rank=2)
    with pytest.raises(ValueError, match="state_dir"):
        trainer.save_state("s")


def test_a_damaged_state_is_refused_and_the_client_stays_as_it_was(
    saving_service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    trainer = make(saving_service, model_dir("qwen3"))
    path = Path(trainer.save_state("s").result().path)
    before = go_on(trainer)
    file = path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors' is damaged"):
        trainer.load_state(str(path)).result()
    with pytest.raises(ValueError, match="is damaged"):
        saving_service.create_sampling_client(model_path=str(path))
    assert same(weights(trainer), before)


def test_states_of_other_shapes_are_refused(
    saving_service: LocalServiceClient, model_dir: Callable[[str], str]
) -> None:
    small, large = make(saving_service, model_dir("qwen3"), 2), make(saving_service, model_dir("qwen3"), 4)
    path = small.save_state("small").result().path
    sampler = small.save_weights_for_sampler("small").result().path
    before = weights(large)
    with pytest.raises(ValueError, match="another model or adapter"):
        large.load_state(path).result()
    with pytest.raises(ValueError, match="no optimiser state"):
        small.load_state_with_optimizer(sampler).result()
    assert same(weights(large), before)


def test_a_sampling_client_needs_to_know_what_to_sample_from(service: LocalServiceClient) -> None:
    with pytest.raises(ValueError, match="model_path or base_model"):
        service.create_sampling_client()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"precision": "int8"}, r"choose from \['bfloat16', 'fast', 'float32'\]"),
        ({"device": "cuda"}, "finds no CUDA GPU"),
    ],
)
def test_a_service_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    if "device" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match=message):
        LocalServiceClient(**arguments)


@pytest.mark.parametrize("name", ["decode_rows", "training_tokens"])
def test_limits_are_checked(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1"):
        EngineLimits(**{name: 0})


async def test_capabilities_list_what_is_loaded(model_dir: Callable[[str], str]) -> None:
    service = LocalServiceClient(device="cpu")
    assert service.get_server_capabilities().supported_models == []
    service.create_sampling_client(base_model=model_dir("llama"))
    listed = (await service.get_server_capabilities_async()).supported_models
    assert len(listed) == 1
    assert listed[0].model_name == model_dir("llama")


async def test_a_service_is_closed_as_the_sdks_is(model_dir: Callable[[str], str]) -> None:
    with LocalServiceClient(device="cpu") as service:
        sampler = service.create_sampling_client(base_model=model_dir("llama"))
        (model,) = service.get_server_capabilities().supported_models
        assert (model.max_context_length, model.trainable, model.sampleable) == (256, True, True)
    await service.close("interrupted", "by hand")
    assert scores(sampler)[0] is None
    assert service.get_telemetry() is None
