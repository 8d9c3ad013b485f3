import hashlib
import json
import tracemalloc

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.recipes.config import DataOptions
from viva.recipes.data import (
    check_sources,
    load_jsonl,
    load_prompts,
    load_test_prompts,
)
from viva.recipes.hub_data import load_hub
from viva.training.data import PromptItem, PromptOrder, prompts_digest


def write(folder, text, name="data.jsonl"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@pytest.mark.parametrize("key", ["query", "prompt", "text", "question"])
def test_each_of_the_three_keys_is_a_prompt(tmp_path, key):
    path = write(tmp_path, json.dumps({key: "Why?"}))
    assert list(load_jsonl(path)) == [PromptItem(question="Why?")]


def test_answers_blank_lines_line_ends_and_a_byte_order_mark_are_read(tmp_path):
    text = '\ufeff{"query": "a", "answer": 3}\r\n\r\n{"query": "b", "answer": "x"}\n\n{"query": "c", "answer": null}'
    items = list(load_jsonl(write(tmp_path, text)))
    assert items == [
        PromptItem(question="a", answer="3"),
        PromptItem(question="b", answer="x"),
        PromptItem(question="c"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":2: not valid JSON"),
        ("plain text", r":2: not valid JSON"),
        ("[" * 100_000, r":2: not valid JSON"),
        ('["a"]', r":2: expected an object .* got list"),
        ('"a"', r":2: expected an object .* got str"),
        ("{}", r":2: needs one of the keys query, prompt, text, question; got none"),
        ('{"problem": "a"}', r":2: needs one of the keys query, prompt, text, question; got problem"),
        ('{"query": ""}', r":2: 'query' must be text that is not empty"),
        ('{"query": "  "}', r":2: 'query' must be text that is not empty"),
        ('{"query": 3}', r":2: 'query' must be text that is not empty; got 3"),
        ('{"query": null, "prompt": "a"}', r":2: 'query' must be text that is not empty; got None"),
        ('{"query": "a", "answer": [1]}', r":2: the answer must be text or a number; got \[1\]"),
        ('{"query": "a", "answer": true}', r":2: the answer must be text or a number; got True"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(tmp_path, line, message):
    path = write(tmp_path, '{"query": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match="data.jsonl" + message):
        load_jsonl(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "holds no prompts"), (b"\n\n", "holds no prompts"), (b"\xff\xfe{", "not UTF-8")],
)
def test_a_file_without_prompts_is_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message):
        load_jsonl(write(tmp_path, content))


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_what_was_written_is_read_back(tmp_path_factory, prompts):
    path = tmp_path_factory.mktemp("data") / "x.jsonl"
    path.write_text("".join(json.dumps({"query": prompt}) + "\n" for prompt in prompts))
    assert [item.question for item in load_jsonl(path)] == prompts


def test_no_source_gives_the_message_with_three_examples():
    with pytest.raises(
        ValueError, match="Must provide either train_prompts, train_prompts_path, or hf_dataset_name"
    ) as e:
        check_sources(DataOptions())
    for example in ("train_prompts_path=/path", "hf_dataset_name=openai/gsm8k", "'train_prompts="):
        assert example in str(e.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_prompts_path": "/nowhere.jsonl"}, "train_prompts_path=/nowhere.jsonl is not a file"),
        ({"train_prompts": ["a"], "test_prompts_path": "/"}, "test_prompts_path=/ is not a file"),
        ({"train_prompts": ["a"], "max_train_samples": 0}, "max_train_samples must be 1 or more"),
        ({"train_prompts": ["a"], "max_test_samples": -1}, "max_test_samples must be 1 or more"),
        ({"train_prompts": ["a", " "]}, r"train_prompts\[1\] is empty"),
    ],
)
def test_sources_that_cannot_work_are_refused_before_anything_is_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        check_sources(DataOptions(**options))


@pytest.fixture(scope="module")
def rows():
    return {"question": ["1+1", "2+2", "3+3"], "result": ["2", "4", "6"]}


def hub(name, **options):
    return DataOptions(
        hf_dataset_name=str(name),
        **({"hf_prompt_column": "question", "hf_answer_column": "result"} | options),
    )


def test_a_saved_data_set_is_read_with_its_splits(tmp_path, rows):
    data = datasets.Dataset.from_dict(rows)
    datasets.DatasetDict(train=data, test=data.select([0])).save_to_disk(tmp_path / "d")
    train, test = load_hub(hub(tmp_path / "d"))
    assert train[1] == PromptItem(question="2+2", answer="4")
    assert (len(train), len(test)) == (3, 1)


def test_a_saved_single_split_is_the_training_split(tmp_path, rows):
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "d")
    train, test = load_hub(hub(tmp_path / "d"))
    assert (len(train), test) == (3, [])


@pytest.mark.parametrize("name", ["x.parquet", "x.json", "x.csv"])
def test_a_data_file_is_a_data_set(tmp_path, rows, name, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = datasets.Dataset.from_dict(rows)
    path = tmp_path / name
    {"parquet": data.to_parquet, "json": data.to_json, "csv": data.to_csv}[path.suffix[1:]](path)
    train, _ = load_hub(hub(path))
    assert [item.question for item in train] == rows["question"]
    assert [item.answer for item in train] == rows["result"]


def test_a_folder_of_files_has_its_splits(tmp_path, rows, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "d"
    folder.mkdir()
    datasets.Dataset.from_dict(rows).to_parquet(folder / "train.parquet")
    datasets.Dataset.from_dict(rows).to_parquet(folder / "test.parquet")
    train, test = load_hub(hub(folder))
    assert (len(train), len(test)) == (3, 3)


def test_a_test_set_needs_no_training_split(tmp_path, rows):
    datasets.DatasetDict(test=datasets.Dataset.from_dict(rows)).save_to_disk(tmp_path / "d")
    found = load_test_prompts(hub(tmp_path / "d", max_test_samples=2))
    assert [item.question for item in found] == rows["question"][:2]
    with pytest.raises(ValueError, match="has no split 'train'; it has test"):
        load_hub(hub(tmp_path / "d"))


def test_unknown_splits_and_columns_are_listed(tmp_path, rows):
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "d")
    with pytest.raises(
        ValueError, match=r"no column 'questoin'; it has question, result. Did you mean 'question'"
    ):
        load_hub(hub(tmp_path / "d", hf_prompt_column="questoin"))
    with pytest.raises(ValueError, match=r"no column 'x'.*Set hf_answer_column"):
        load_hub(hub(tmp_path / "d", hf_answer_column="x"))
    with pytest.raises(ValueError, match="no split 'validation'; it has train"):
        load_hub(hub(tmp_path / "d", hf_test_split="validation"))


def test_rows_without_text_are_named(tmp_path):
    datasets.Dataset.from_dict({"question": ["a", ""], "result": ["1", "2"]}).save_to_disk(tmp_path / "d")
    with pytest.raises(ValueError, match=r"train\[1\]: 'question' must be text that is not empty"):
        load_hub(hub(tmp_path / "d"))


def test_a_data_set_that_is_not_there_is_an_error_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"hf_dataset_name=.*empty .*could not be loaded"):
        load_hub(hub(tmp_path / "empty"))


def test_sources_are_joined_in_order_and_cut_to_their_limits(tmp_path, rows):
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "d")
    sources = hub(
        tmp_path / "d",
        train_prompts=["first"],
        train_prompts_path=str(write(tmp_path, '{"query": "second"}')),
        test_prompts_path=str(write(tmp_path, '{"text": "t1"}\n{"text": "t2"}', "test.jsonl")),
        max_train_samples=4,
        max_test_samples=1,
    )
    train, test = load_prompts(sources)
    assert [item.question for item in train] == ["first", "second", "1+1", "2+2"]
    assert [item.question for item in test] == ["t1"]


def test_columns_of_every_kind_of_file_are_mapped_and_rows_beyond_the_limit_are_not_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    good = {"task": ["1+1", "2+2", " "], "solution": ["2", "4", "6"], "source": ["x", "y", "z"]}
    data = datasets.Dataset.from_dict(good)
    for name in ("x.parquet", "x.jsonl", "x.csv"):
        path = tmp_path / name
        {"parquet": data.to_parquet, "jsonl": data.to_json, "csv": data.to_csv}[path.suffix[1:]](path)
        source = DataOptions(hf_dataset_name=str(path), hf_prompt_column="task", hf_answer_column="solution")
        train, _ = load_hub(source, max_train=2)
        assert list(train) == [PromptItem(question="1+1", answer="2"), PromptItem(question="2+2", answer="4")]
        with pytest.raises(ValueError, match=r"train\[2\]: 'task' must be text that is not empty"):
            load_hub(source)
    assert len(load_jsonl(write(tmp_path, '{"query": "a"}\n{"query": "b"}\nnonsense'), limit=2)) == 2


def test_memory_stays_flat_whatever_the_size_of_a_file(tmp_path):
    line = json.dumps({"query": "How much is it? " * 60, "answer": 1}) + "\n"
    peaks = []
    for count in (2_000, 20_000):  # 2 and 20 MB
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as file:
            file.writelines(line for _ in range(count))
        sources = DataOptions(train_prompts_path=str(path))
        tracemalloc.start()
        train, test = load_prompts(sources)
        assert len(prompts_digest(train, test)) == 16
        order = PromptOrder(items=train, seed=0, groups_per_batch=4, num_groups=8)
        assert [item.answer for item in order.batch(1)] == ["1"] * 4
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    # 18 MB more of text cost two integers for every prompt: where it is, and its place in the order
    assert peaks[1] - peaks[0] < 100 * 18_000
    assert peaks[1] < 2_500_000


@given(st.lists(st.text(min_size=1).filter(str.strip), max_size=3), st.integers(0, 3))
def test_the_digest_is_that_of_the_lists_as_json(prompts, num_lists):
    items = [PromptItem(question=prompt, answer=None) for prompt in prompts]
    lists = [items] * num_lists
    text = json.dumps([[[item.question, item.answer] for item in one] for one in lists])
    assert prompts_digest(*lists) == hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def test_prompts_are_found_by_place_from_either_end_and_in_slices(tmp_path):
    path = write(tmp_path, '\ufeff{"query": "b"}\r\n\n{"query": "c"}\n')
    train, _ = load_prompts(DataOptions(train_prompts=["a"], train_prompts_path=str(path)))
    assert [train[place].question for place in (0, 1, 2, -1, -3)] == ["a", "b", "c", "c", "a"]
    assert [item.question for item in train[1:]] == ["b", "c"]
    with pytest.raises(IndexError):
        train[3]


def hub_answers(monkeypatch, error):
    monkeypatch.setattr("viva.hub._is_reached", lambda _: True)

    def fail(*args, **kwargs):
        raise datasets.exceptions.DatasetNotFoundError("not here") from error

    monkeypatch.setattr(datasets, "load_dataset", fail)


def test_a_gated_data_set_is_told_as_one(monkeypatch):
    import httpx
    from huggingface_hub.errors import GatedRepoError

    request = httpx.Request("GET", "https://hub")
    hub_answers(monkeypatch, GatedRepoError("403", response=httpx.Response(403, request=request)))
    with pytest.raises(ValueError, match=r"hf_dataset_name=someone/data is gated: .*HF_TOKEN"):
        load_hub(hub("someone/data"))


def test_a_folder_of_everything_is_refused_before_it_is_searched(tmp_path, monkeypatch):
    monkeypatch.setattr("viva.recipes.hub_data._MOST_FILES", 5)
    for number in range(6):
        (tmp_path / f"{number}.txt").touch()
    with pytest.raises(
        ValueError, match="could not be loaded: the folder holds more than 5 files; name the one"
    ):
        load_hub(hub(tmp_path))
