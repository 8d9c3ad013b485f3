"""A working folder with good and bad prompt files, data sets, models and runs, for the cases of ``bad_input``.

Everything bad is a good thing with one fault, named by its file or folder.
"""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from random_models import make_model

from viva import cli

GOOD = '{"query": "What is 2 + 2?", "answer": "4"}\n{"query": "What is 3 + 4?", "answer": "7"}\n'
GOOD_RUN = (
    *("train", "conversation_preference_rl", "model_name=models/good", "train_prompts_path=good.jsonl"),
    *("log_path=run", "num_agents=2", "max_rounds=1", "batch_size=2", "max_steps=1", "max_tokens=8"),
    *("lora_rank=1", "learning_rate=0.001", "eval_every=0", "trackers=[]", "device=cpu", "tokens_every=1"),
    "judge_max_off_set_mass=1.0",
)
"""The run that the cases find in ``run``."""


def build_world(folder: Path) -> None:
    """Write everything into an empty folder, which must be the working folder."""
    (folder / "good.jsonl").write_text(GOOD)
    (folder / "empty-folder").mkdir()
    (folder / "notes").mkdir()
    (folder / "notes" / "thesis.txt").write_text("mine")
    for name, content in PROMPT_FILES.items():
        (folder / name).write_bytes(content)
    _tables(folder)
    make_model(folder / "models" / "good", "qwen3")
    assert run_command(GOOD_RUN) == 0
    assert (
        run_command(("eval", "run", "test_prompts_path=good.jsonl", 'kinds=["direct"]', "output=good.json"))
        == 0
    )
    for name, spoil in MODELS.items():
        shutil.copytree(folder / "models" / "good", folder / "models" / name)
        spoil(folder / "models" / name)
    for name, spoil in RUNS.items():
        shutil.copytree(folder / "run", folder / "runs" / name)
        spoil(folder / "runs" / name)
    _results(folder)
    _adapters(folder)


def run_command(arguments: Sequence[str]) -> int:
    """The exit status of the ``viva`` command, in this process."""
    try:
        return cli.main(arguments)
    except SystemExit as end:  # recipes and the readers of options leave so
        return end.code if isinstance(end.code, int) else 1


def _lines(*rows: Any) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


_ROW = {"query": "What is 2 + 2?", "answer": "4"}
_NESTED = b'{"query": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"

PROMPT_FILES: dict[str, bytes] = {
    "empty.jsonl": b"",
    "blank.jsonl": b"\n  \n\t\n",
    "mark-only.jsonl": b"\xef\xbb\xbf",
    "torn.jsonl": GOOD.encode()[:-12],
    "torn-middle.jsonl": b'{"query": "a", "ans\n' + GOOD.encode(),
    "array.json": json.dumps([_ROW, _ROW]).encode(),
    "pretty.json": json.dumps(_ROW, indent=2).encode(),
    "list-row.jsonl": _lines(_ROW, ["a", "b"]),
    "text-row.jsonl": _lines("What is 2 + 2?"),
    "number-row.jsonl": b"42\n",
    "null-row.jsonl": b"null\n",
    "no-key.jsonl": _lines({"instruction": "add", "output": "4"}),
    "no-key-at-all.jsonl": b"{}\n",
    "typo-key.jsonl": _lines({"qeury": "add", "answer": "4"}),
    "null-query.jsonl": _lines({"query": None}),
    "number-query.jsonl": _lines({"query": 7}),
    "list-query.jsonl": _lines({"query": ["a"]}),
    "chat-query.jsonl": _lines({"prompt": [{"role": "user", "content": "hello"}]}),
    "empty-query.jsonl": _lines(_ROW, {"query": ""}),
    "space-query.jsonl": _lines({"query": " \n\t "}),
    "list-answer.jsonl": _lines({"query": "a", "answer": ["4"]}),
    "object-answer.jsonl": _lines({"query": "a", "answer": {"value": 4}}),
    "bool-answer.jsonl": _lines({"query": "a", "answer": True}),
    "nan-answer.jsonl": b'{"query": "a", "answer": NaN}\n',
    "infinite-answer.jsonl": b'{"query": "a", "answer": -Infinity}\n',
    "no-answer.jsonl": _lines({"query": "a"}, _ROW),
    "null-answer.jsonl": _lines({"query": "b", "answer": None}, _ROW),
    "no-answers.jsonl": _lines({"query": "a"}, {"query": "b"}),
    "empty-answer.jsonl": _lines({"query": "b", "answer": " "}, _ROW),
    "latin-1.jsonl": '{"query": "Gr\u00f6\u00dfe?"}\n'.encode("latin-1"),
    "utf-16.jsonl": '{"query": "a"}\n'.encode("utf-16"),
    "utf-32.jsonl": '{"query": "a"}\n'.encode("utf-32"),
    "nul.jsonl": b'{"query": "a\x00b"}\n',
    "nul-escaped.jsonl": _lines({"query": "a\x00b"}),
    "surrogate.jsonl": b'{"query": "a\\ud800b"}\n',
    "zeros.jsonl": b"\x00" * 4096,
    "random-bytes.jsonl": random.Random(0).randbytes(4096),
    "nested.jsonl": _NESTED,
    "megabyte-garbage.jsonl": b"x" * 1_000_000 + b"\n",
    "megabyte-torn.jsonl": b'{"query": "' + b"x" * 1_000_000,
    "megabyte-key.jsonl": b'{"' + b"x" * 1_000_000 + b'": 1}\n',
    "megabyte-answer.jsonl": b'{"query": "a", "answer": [' + b"1," * 500_000 + b"1]}\n",
    "single-quotes.jsonl": b"{'query': 'a'}\n",
    "trailing-comma.jsonl": b'{"query": "a",}\n',
    "two-on-a-line.jsonl": b'{"query": "a"}{"query": "b"}\n',
    "commas.jsonl": b'{"query": "a"},\n{"query": "b"}\n',
    "prompts.txt": b"What is 2 + 2?\nWhat is 3 + 4?\n",
    "prompts.gz": b"\x1f\x8b\x08\x00" + bytes(32),
    "huge-number.jsonl": b'{"query": ' + b"9" * 5000 + b"}\n",
    "letters.jsonl": _lines({"query": "Which?", "answer": "42"}),
    # tables
    "empty.csv": b"",
    "header.csv": b"query,answer\n",
    "ragged.csv": b'query,answer\n"a",1\n"b",2,3,4\n',
    "numbers.csv": b"query,answer\n1,2\n3,4\n",
    "empty-cell.csv": b"query,answer\na,1\n,2\n",
    "latin-1.csv": "query,answer\nGr\u00f6\u00dfe,1\n".encode("latin-1"),
    "wrong-columns.csv": b"problem,answer\na,1\n",
    "torn-quote.csv": b'query,answer\n"a,1\nb,2\n',
    "nul.csv": b"query,answer\na\x00b,1\n\x00,2\n",
    "bad.json": b'{"query": "a"\n',
    "empty.json": b"",
    "mixed.jsonl": b'{"query": "a"}\n{"query": 3}\n',
    "judge-latin.txt": "W\u00e4hle".encode("latin-1"),
    "judge-empty.txt": b" \n",
    "no_code.py": b"VALUE = 3\n",
    "broken_code.py": b"def f(:\n",
}


def _tables(folder: Path) -> None:
    def write(name: str, **columns: Any) -> None:
        pq.write_table(pa.table(columns), folder / name)

    write("good.parquet", query=["What is 2 + 2?", "What is 3 + 4?"], answer=["4", "7"])
    write("no-rows.parquet", query=pa.array([], pa.string()), answer=pa.array([], pa.string()))
    write("wrong-columns.parquet", problem=["a"], solution=["4"])
    write("number-query.parquet", query=[1, 2])
    write("null-query.parquet", query=["a", None])
    write("list-query.parquet", query=[["a"], ["b"]])
    write("chat-query.parquet", query=[[{"role": "user", "content": "a"}]])
    write("bytes-query.parquet", query=[b"a"])
    write("struct-answer.parquet", query=["a"], answer=[{"value": 4}])
    write("nan-answer.parquet", query=["a"], answer=[float("nan")])
    write("bool-answer.parquet", query=["a"], answer=[True])
    write("null-answer.parquet", query=["a", "b"], answer=["4", None])
    good = (folder / "good.parquet").read_bytes()
    (folder / "torn.parquet").write_bytes(good[: len(good) // 2])
    (folder / "headless.parquet").write_bytes(bytes(4) + good[4:-4] + bytes(4))
    (folder / "empty.parquet").write_bytes(b"")
    (folder / "text.parquet").write_text(GOOD)


def _edit(name: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return spoil


def _remove(*names: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return spoil


def _write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content) and None


def _cut(name: str, share: float) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * share)])

    return spoil


def _tensors(
    change: Callable[[dict[str, Any]], Any], name: str = "model.safetensors"
) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / name)
        change(tensors)
        save_file(tensors, folder / name, {"format": "pt"})

    return spoil


def _shard(keep: bool) -> Callable[[Path], None]:
    """Weights in two files, of which the second is missing, or is not where the index says."""

    def spoil(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        first = {name: tensors[name] for name in names[: len(names) // 2]}
        save_file(first, folder / "model-00001-of-00002.safetensors", {"format": "pt"})
        places = {name: f"model-0000{1 if name in first else 2}-of-00002.safetensors" for name in names}
        text = json.dumps({"metadata": {"total_size": 1}, "weight_map": places})
        (folder / "model.safetensors.index.json").write_text(text[:-40] if keep else text)

    return spoil


def _nan(tensors: dict[str, Any]) -> None:
    name = next(name for name in tensors if name.endswith("norm.weight"))
    tensors[name] = tensors[name] * float("nan")


def _wide(tensors: dict[str, Any]) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = tensors[name][:-1].contiguous()


def _lose(part: str) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if part in name]:
            del tensors[name]

    return change


def _pickle(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _tiny_vocabulary(folder: Path) -> None:
    """A tokenizer that knows no byte and a few letters only."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "a": 1, "b": 2}
    tokenizer = Tokenizer(models.WordLevel(vocab=words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    _remove("tokenizer.json", "tokenizer_config.json")(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="b")
    fast.save_pretrained(folder)


MODELS: dict[str, Callable[[Path], None]] = {
    "no-config": _remove("config.json"),
    "empty-config": _write("config.json", b""),
    "torn-config": _cut("config.json", 0.5),
    "list-config": _write("config.json", b"[]"),
    "no-type": _edit("config.json", lambda c: (c.pop("model_type"), c.pop("architectures"))),
    "unknown-type": _edit("config.json", lambda c: c.update(model_type="quantumformer", architectures=["Q"])),
    "no-width": _edit("config.json", lambda c: c.pop("hidden_size")),
    "text-width": _edit("config.json", lambda c: c.update(hidden_size="wide")),
    "wrong-width": _edit("config.json", lambda c: c.update(hidden_size=48)),
    "wrong-layers": _edit(
        "config.json", lambda c: c.update(num_hidden_layers=3, layer_types=["full_attention"] * 3)
    ),
    "wrong-heads": _edit("config.json", lambda c: c.update(num_attention_heads=3)),
    "wrong-vocabulary": _edit("config.json", lambda c: c.update(vocab_size=999)),
    "encoder": _edit("config.json", lambda c: c.update(model_type="bert", architectures=["BertModel"])),
    "remote-code": _edit(
        "config.json",
        lambda c: c.update(
            model_type="mine", auto_map={"AutoModelForCausalLM": "mine.Model", "AutoConfig": "mine.C"}
        ),
    ),
    "no-weights": _remove("model.safetensors"),
    "torn-weights": _cut("model.safetensors", 0.6),
    "torn-header": _cut("model.safetensors", 0.001),
    "empty-weights": _write("model.safetensors", b""),
    "text-weights": _write(
        "model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    ),
    "pickled-weights": _pickle,
    "wrong-shape": _tensors(_wide),
    "lost-layer": _tensors(_lose("layers.1.mlp")),
    "lost-head": _tensors(_lose("lm_head")),
    "not-finite": _tensors(_nan),
    "missing-shard": _shard(False),
    "torn-index": _shard(True),
    "no-tokenizer": _remove("tokenizer.json", "tokenizer_config.json"),
    "torn-tokenizer": _cut("tokenizer.json", 0.5),
    "empty-tokenizer": _write("tokenizer.json", b"{}"),
    "tiny-vocabulary": _tiny_vocabulary,
    "dynamic-positions": _edit(
        "config.json",
        lambda c: c.update(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
    ),
}


def _rows(change: Callable[[list[dict[str, Any]]], Any], name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        change(rows)
        (folder / name).write_bytes(_lines(*rows))

    return spoil


def _state(spoil: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda folder: spoil(next((folder / "state" / "weights").iterdir()))


def _bend(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-10] ^= 1
    path.write_bytes(content)


RUNS: dict[str, Callable[[Path], None]] = {
    "torn-config": _cut("config.json", 0.5),
    "empty-config": _write("config.json", b""),
    "list-config": _write("config.json", b"[1]"),
    "no-config": _remove("config.json"),
    "no-metrics": _remove("metrics.jsonl"),
    "damaged-metrics": _write("metrics.jsonl", b'{"step": 0\n{"step": 1}\n'),
    "list-metrics": _write("metrics.jsonl", b"[0]\n[1]\n"),
    "stepless-metrics": _write("metrics.jsonl", b'{"reward": 1}\n{"reward": 1}\n'),
    "short-metrics": _write("metrics.jsonl", b""),
    "damaged-transcripts": _write("transcripts.jsonl", b"{{{\n{}\n"),
    "foreign-transcripts": _write(
        "transcripts.jsonl", b'{"step": 0, "group": 0, "text": "a"}\n{"step": 1}\n'
    ),
    "damaged-tokens": _write("tokens.jsonl", b'{"step": "a"}\n{"step": 1}\n'),
    "damaged-index": _write("checkpoints.jsonl", b'{"name"\n{"name": "000001"}\n'),
    "foreign-index": _write("checkpoints.jsonl", b'{"name": "000001", "batch": 3, "loop_state": "x"}\n'),
    "list-index": _write("checkpoints.jsonl", b'["000001"]\n'),
    "no-checkpoints": _remove("checkpoints.jsonl"),
    "outside-index": _rows(lambda rows: rows[-1].update(state_path="../../models/good"), "checkpoints.jsonl"),
    "no-state": lambda folder: shutil.rmtree(folder / "state"),
    "bent-state": _state(_bend),
    "torn-state": _state(_cut("adapter_model.safetensors", 0.5)),
    "torn-manifest": _state(_cut("checkpoint.json", 0.5)),
    "list-manifest": _state(_write("checkpoint.json", b"[]")),
    "no-manifest": _state(_remove("checkpoint.json")),
    "new-manifest": _state(_edit("checkpoint.json", lambda c: c.update(format=99))),
    "nameless-manifest": _state(_edit("checkpoint.json", lambda c: c.pop("base_model"))),
    "lost-tensors": _state(_remove("adapter_model.safetensors")),
    "moved-model": _edit("config.json", lambda c: c.update(model_name="models/gone")),
    "other-recipe": _edit("config.json", lambda c: c.update(recipe="other")),
    "newer-options": _edit("config.json", lambda c: c.update(option_of_tomorrow=3)),
    "text-options": _edit("config.json", lambda c: c.update(num_agents="three")),
}


def _results(folder: Path) -> None:
    result = json.loads((folder / "good.json").read_text())
    (folder / "torn-result.json").write_text((folder / "good.json").read_text()[:200])
    (folder / "foreign-result.json").write_text('{"score": 1}')
    (folder / "list-result.json").write_text("[]")
    (folder / "new-result.json").write_text(json.dumps(result | {"format": "viva evaluation 9"}))
    (folder / "short-result.json").write_text(json.dumps(result | {"asked": [{"reply": 3}]}))
    (folder / "other-problems.json").write_text(json.dumps(result | {"prompts_digest": "0" * 16}))


ADAPTERS: dict[str, Callable[[Path], None]] = {
    "torn-config": _cut("adapter_config.json", 0.5),
    "list-config": _write("adapter_config.json", b"[]"),
    "dora": _edit("adapter_config.json", lambda c: c.update(use_dora=True)),
    "no-rank": _edit("adapter_config.json", lambda c: c.update(r=0)),
    "other-alpha": _edit("adapter_config.json", lambda c: c.update(lora_alpha=64)),
    "no-base": _edit("adapter_config.json", lambda c: c.update(base_model_name_or_path=None)),
    "gone-base": _edit("adapter_config.json", lambda c: c.update(base_model_name_or_path="/models/gone")),
    "prefix": _edit("adapter_config.json", lambda c: c.update(peft_type="PREFIX_TUNING")),
    "torn-weights": _cut("adapter_model.safetensors", 0.5),
    "wrong-rank": _edit("adapter_config.json", lambda c: c.update(r=7)),
    "lost-tensors": _tensors(_lose("layers.0"), "adapter_model.safetensors"),
    "no-weights": _remove("adapter_model.safetensors"),
}


def _adapters(folder: Path) -> None:
    for name, spoil in ADAPTERS.items():
        shutil.copytree(folder / "run" / "adapter", folder / "adapters" / name)
        spoil(folder / "adapters" / name)
    config = folder / "models" / "wide" / "config.json"
    make_model(config.parent, "llama", names_labels=False)
