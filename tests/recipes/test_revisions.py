"""Models and data sets of a given revision; the hub is a cache folder of its layout, and nothing is sent."""

import json
import shutil

import chz
import datasets
import pytest
import transformers
from huggingface_hub import constants
from random_models import make_model

from viva.engine import LocalServiceClient
from viva.hub import pinned, split_revision
from viva.recipes.common import learning_rate, resolve_model
from viva.recipes.config import DataOptions
from viva.recipes.critique_self_play import Config
from viva.recipes.data import check_sources, load_prompts
from viva.recipes.hub_data import load_hub
from viva.run.export import export_weights, staged_adapter
from viva.training.service import context_window

NAME, COMMITS = "someone/Model", {"main": "0" * 40, "v2": "2" * 40}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Two revisions of one model, whose windows differ."""
    cache = tmp_path / "hub"
    repository = cache / f"models--{NAME.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    for window, (revision, commit) in enumerate(COMMITS.items(), 1):
        (repository / "refs" / revision).write_text(commit)
        folder = make_model(repository / "snapshots" / commit, "llama")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024 * window}))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def test_a_revision_goes_with_the_name_and_a_folder_has_none(tmp_path, monkeypatch):
    assert split_revision(pinned(NAME, "refs/pr/1")) == (NAME, "refs/pr/1")
    assert split_revision(pinned(NAME, None)) == (NAME, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model@home").mkdir()
    assert split_revision("model@home") == ("model@home", None)


@pytest.mark.parametrize(("revision", "window"), [(None, 1024), ("v2", 2048), (COMMITS["v2"], 2048)])
def test_the_revision_that_was_asked_for_is_loaded_and_goes_into_checkpoints(hub, tmp_path, revision, window):
    model = resolve_model(NAME, revision)
    service = LocalServiceClient(device="cpu", state_dir=tmp_path / "state")
    client = service.create_lora_training_client(model, rank=2, seed=0)
    assert context_window(model) == window
    state = client.save_state("a").result().path
    shutil.rmtree(hub / f"models--{NAME.replace('/', '--')}" / "refs")  # a commit is found without
    restored = LocalServiceClient(device="cpu")
    if revision == COMMITS["v2"]:
        restored.create_training_client_from_state(state)
    else:
        with pytest.raises(ValueError, match=f"model_name={model} is not in the local cache"):
            restored.create_training_client_from_state(state)
    adapter = export_weights(state, model=model, folder=tmp_path / "out")
    told = json.loads((adapter / "adapter_config.json").read_text())
    assert (told["base_model_name_or_path"], told["revision"]) == (NAME, revision)
    staged = staged_adapter(adapter, tmp_path / "staged")
    assert any(json.loads(path.read_text()).get("base_model") == model for path in staged.glob("*.json"))


def test_all_weights_are_exported_with_configuration_and_tokenizer_of_the_revision(hub, tmp_path):
    model = resolve_model(NAME, "v2")
    service = LocalServiceClient(device="cpu", state_dir=tmp_path / "state")
    state = service.create_lora_training_client(model, rank=0, seed=0).save_state("a").result().path
    folder = export_weights(state, model=model, folder=tmp_path / "out")
    assert transformers.AutoConfig.from_pretrained(folder).max_position_embeddings == 2048


def test_a_revision_that_is_not_there_is_told(hub):
    with pytest.raises(ValueError, match=f"model_name={NAME}@v3 is not in the local cache"):
        LocalServiceClient(device="cpu").create_lora_training_client(resolve_model(NAME, "v3"))


def test_the_learning_rate_is_that_of_the_revision(hub):
    path = hub / f"models--{NAME.replace('/', '--')}" / "snapshots" / COMMITS["v2"] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 8192}))
    rates = [
        learning_rate(None, pinned(NAME, revision), is_lora=True, is_local=True) for revision in (None, "v2")
    ]
    assert rates[0] > rates[1]


@pytest.mark.parametrize("name", ["tiny", "."])
def test_a_revision_of_what_is_not_on_the_hub_is_refused(name):
    with pytest.raises(ValueError, match=r"model_revision=v2 is that of a model on the hub, but model_name="):
        resolve_model(name, "v2")


def test_two_revisions_are_refused():
    with pytest.raises(ValueError, match="model_revision must be a branch, a tag or a commit"):
        resolve_model(f"{NAME}@v1", "v2")


def test_options_name_the_revisions_and_the_run_keeps_them(tmp_path, monkeypatch):
    options = {
        "model_name": NAME,
        "model_revision": "v2",
        "train_prompts": ["a", "b"],
        "log_path": str(tmp_path),
        "learning_rate": 1e-3,
        "batch_size": 4,
        "num_agents": 4,
    }
    plan = Config(**options, engine="local").make_plan()
    assert (plan.model, plan.record["model_revision"]) == (f"{NAME}@v2", "v2")
    assert resolve_model(resolve_model(NAME, "refs/pr/1")) == f"{NAME}@refs/pr/1"
    with pytest.raises(ValueError, match="a server has one revision of someone/Model"):
        Config(**options, base_url="http://localhost:1").make_plan()


ROWS = {"question": [f"{n}+1" for n in range(50)], "result": [str(n + 1) for n in range(50)]}
COLUMNS = {"hf_prompt_column": "question", "hf_answer_column": "result"}


@pytest.fixture
def data_hub(tmp_path, monkeypatch):
    """A hub with one data set, in files; says what it was asked for, and which rows were read."""
    folder = tmp_path / "data"
    folder.mkdir()
    datasets.Dataset.from_dict(ROWS).to_parquet(folder / "train.parquet")
    datasets.Dataset.from_dict(ROWS).to_json(folder / "test.jsonl")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    load, asked = datasets.load_dataset, []

    def load_dataset(name, config=None, *, revision=None, streaming=False):
        asked.append((name, config, revision, streaming))
        files = {"train": str(folder / "train.parquet")}
        loaded = load("parquet", data_files=files, streaming=streaming)
        loaded["test"] = load(
            "json", data_files=str(folder / "test.jsonl"), split="train", streaming=streaming
        )
        return loaded

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


@pytest.mark.parametrize("streaming", [False, True])
def test_a_data_set_is_read_at_its_revision_streamed_or_not(data_hub, streaming):
    source = DataOptions(
        hf_dataset_name="someone/data", hf_dataset_revision="v2", hf_streaming=streaming, **COLUMNS
    )
    train, test = load_hub(source, max_train=7, max_test=3)
    assert data_hub == [("someone/data", None, "v2", streaming)]
    assert [item.question for item in train] == ROWS["question"][:7]
    assert [item.answer for item in test] == ROWS["result"][:3]


def test_a_stream_is_read_as_far_as_it_is_used(tmp_path, monkeypatch):
    read = []

    def rows():
        for n in range(1000):
            read.append(n)
            yield {"query": f"question {n}"}

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDatasetDict(train=stream))
    source = DataOptions(hf_dataset_name="someone/data", hf_streaming=True, max_train_samples=20)
    train, test = load_prompts(source)
    assert (len(train), test, train[19].question) == (20, [], "question 19")
    assert max(read) < 30


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_file_is_streamed_by_its_builder(tmp_path, suffix):
    data = datasets.Dataset.from_dict(ROWS)
    path = tmp_path / f"d.{suffix}"
    data.to_parquet(path) if suffix == "parquet" else data.to_json(path)
    whole, _ = load_hub(DataOptions(hf_dataset_name=str(path), **COLUMNS))
    train, _ = load_hub(DataOptions(hf_dataset_name=str(path), hf_streaming=True, **COLUMNS), max_train=5)
    assert list(train) == list(whole)[:5]
    with pytest.raises(ValueError, match=r"no column 'result2'.*Did you mean 'result'"):
        load_hub(DataOptions(hf_dataset_name=str(path), hf_streaming=True, hf_prompt_column="result2"))


def test_a_stream_that_breaks_is_told_with_its_name(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"query": "a"}\n{"query": \n')
    with pytest.raises(ValueError, match=r"hf_dataset_name=.*d.jsonl .*could not be loaded"):
        load_hub(DataOptions(hf_dataset_name=str(path), hf_streaming=True), max_train=5)


def test_streaming_needs_to_know_how_much(tmp_path):
    source = DataOptions(hf_dataset_name="someone/data", hf_streaming=True)
    with pytest.raises(ValueError, match="set max_train_samples to how many"):
        check_sources(source)
    with pytest.raises(ValueError, match="set max_test_samples to how many"):
        check_sources(chz.replace(source, max_train_samples=5, max_test_samples=None))


def test_a_revision_of_local_data_is_refused(tmp_path):
    with pytest.raises(ValueError, match="hf_dataset_revision=v2 is that of a data set on the hub"):
        load_hub(DataOptions(hf_dataset_name=str(tmp_path), hf_dataset_revision="v2"))
