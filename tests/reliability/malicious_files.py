"""Files that try to run code, to reach the network or to have others read: about 130 of them, and what loads each.

Every payload would leave the file ``viva_canary`` behind.
"""

import io
import json
import pickle
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from watched import MARK

from viva.conversation.rendering import load_renderer
from viva.engine import LocalServiceClient
from viva.engine.checkpoint import MANIFEST, read_checkpoint
from viva.engine.trust import sealed
from viva.eval.adapters import staged_adapter
from viva.recipes.data import HubSource, load_hub, load_jsonl
from viva.report.run_files import read_run
from viva.rl.checkpoints import Checkpoints
from viva.rl.files import read_json

CODE = f"open({MARK!r}, 'w').close()"
SHELL = f"touch {MARK}"


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[Path], object]
    """Writes into an empty folder."""
    load: Callable[[Path], object]


class _Reduced:
    def __init__(self, function, *args):
        self.reduced = function, args

    def __reduce__(self):
        return self.reduced


def payloads():
    """Pickles that run code in different ways and protocols."""
    import os
    import subprocess

    yield "system", pickle.dumps(_Reduced(os.system, SHELL), 0)
    yield "exec", pickle.dumps(_Reduced(exec, CODE), 2)
    yield "popen", pickle.dumps(_Reduced(subprocess.Popen, SHELL.split()), 4)
    yield "nested", pickle.dumps({"state": [_Reduced(eval, f"exec({CODE!r})")]}, 5)
    buffer = io.BytesIO()
    torch.save({"weight": _Reduced(os.system, SHELL)}, buffer)
    yield "torch", buffer.getvalue()
    buffer = io.BytesIO()
    np.save(buffer, np.array([_Reduced(os.system, SHELL)], dtype=object), allow_pickle=True)
    yield "numpy", buffer.getvalue()


def cases(model: Path, state: Path, adapter: Path, outside: Path) -> Iterator[Case]:
    """All of them.

    Args:
        model: A small model that loads.
        state: A state that the engine saved of it.
        adapter: An adapter for it.
        outside: A folder with a model, which nobody asked for.
    """
    yield from _pickled_weights(model, state, adapter)
    yield from _lying_headers(model, state, adapter)
    yield from _configurations(model, outside)
    yield from _tokenizers(model, outside)
    yield from _templates(model)
    yield from _data(outside)
    yield from _adapters(adapter, outside)
    yield from _runs(state, outside)


def load_model(folder: Path) -> None:
    """As a run loads it: the base, and a sample of it."""
    service = LocalServiceClient()
    client = service.create_lora_training_client(str(folder), rank=1, seed=0)
    load_renderer(client.get_tokenizer(), model_name=str(folder), renderer_name="chat_template")


def load_state(folder: Path) -> None:
    LocalServiceClient().create_training_client_from_state_with_optimizer(str(folder))


def load_adapter(folder: Path) -> None:
    staged = staged_adapter(folder, folder.parent / f"{folder.name}-staged")
    LocalServiceClient().create_sampling_client(model_path=str(staged))


def load_data(path: Path) -> None:
    load_hub(HubSource(name=str(path), prompt_column="prompt"))


def load_only(path: Path) -> None:
    """A data set that is a single file in a folder."""
    (file,) = path.iterdir()
    load_data(file)


def copied(source: Path, change: Callable[[Path], object]) -> Callable[[Path], object]:
    def make(folder):
        shutil.copytree(source, folder, dirs_exist_ok=True)
        change(folder)

    return make


def edited(name: str, **change) -> Callable[[Path], object]:
    def edit(folder):
        path = folder / name
        content = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(content | change))

    return edit


def resealed(folder: Path) -> None:
    """A manifest as somebody who knows the format would write it."""
    import hashlib

    content = json.loads((folder / MANIFEST).read_text())
    listed = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in content["files"]}
    (folder / MANIFEST).write_text(json.dumps(sealed(content | {"files": listed})))


def _pickled_weights(model, state, adapter):
    for kind, payload in payloads():
        for name in ("pytorch_model.bin", "model.safetensors"):

            def replaced(folder, payload=payload, name=name):
                (folder / "model.safetensors").unlink()
                (folder / name).write_bytes(payload)

            yield Case(f"{kind} as {name}", copied(model, replaced), load_model)

        def beside(folder, payload=payload):
            for name in (
                "pytorch_model.bin",
                "training_args.bin",
                "optimizer.pt",
                "rng_state.pth",
                "tokenizer.pkl",
            ):
                (folder / name).write_bytes(payload)

        yield Case(f"{kind} beside the weights", copied(model, beside), load_model)
        for name in ("adapter_model.safetensors", "optimizer.safetensors"):

            def stated(folder, payload=payload, name=name):
                (folder / name).write_bytes(payload)
                resealed(folder)

            yield Case(f"{kind} as a state's {name}", copied(state, stated), load_state)

        def adapted(folder, payload=payload):
            (folder / "adapter_model.safetensors").write_bytes(payload)

        yield Case(f"{kind} as an adapter", copied(adapter, adapted), load_adapter)


def _header(text: str | bytes, length: int | None = None, body: bytes = b"\0" * 64) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data) if length is None else length) + data + body


def _lying_headers(model, state, adapter):
    def one(**entry):
        return json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry})

    headers = {
        "endless": _header("{}", 2**63),
        "longer than the file": _header("{}", 10**6),
        "no JSON": _header("__import__('os')"),
        "no UTF-8": _header(b"\xff\xfe{}"),
        "a list": _header("[]"),
        "empty": b"",
        "seven bytes": b"\0" * 7,
        "offsets beyond the end": _header(one(data_offsets=[0, 10**12])),
        "negative offsets": _header(one(data_offsets=[-8, 8])),
        "offsets that overlap": _header(
            json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in "xy"})
        ),
        "shape that overflows": _header(one(shape=[2**32, 2**32, 2**32])),
        "unknown type": _header(one(dtype="pickle")),
        "shape of other size": _header(one(shape=[3])),
        "deeply nested": _header('{"x":' + "[" * 5000 + "]" * 5000 + "}"),
        "metadata that is code": _header(
            json.dumps({"__metadata__": {"format": "pt", "__reduce__": CODE}, "x": {}})
        ),
    }
    for kind, content in headers.items():

        def bent(folder, content=content):
            (folder / "model.safetensors").write_bytes(content)

        yield Case(f"header: {kind}", copied(model, bent), load_model)
    for kind in ("endless", "offsets beyond the end", "shape that overflows"):

        def stated(folder, content=headers[kind]):
            (folder / "adapter_model.safetensors").write_bytes(content)
            resealed(folder)

        yield Case(f"header of a state: {kind}", copied(state, stated), load_state)

        def adapted(folder, content=headers[kind]):
            (folder / "adapter_model.safetensors").write_bytes(content)

        yield Case(f"header of an adapter: {kind}", copied(adapter, adapted), load_adapter)


_EVIL = f"""
{CODE}
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
class EvilConfig(PretrainedConfig):
    model_type = "{MARK}"
class EvilModel(PreTrainedModel):
    config_class = EvilConfig
class EvilTokenizer(PreTrainedTokenizerFast):
    pass
"""


def _configurations(model, outside):
    auto_map = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
    remote = {key: f"someone/evil--{value}" for key, value in auto_map.items()}
    changes = {
        "code beside it": {"auto_map": auto_map},
        "code of an unknown model": {
            "auto_map": auto_map,
            "model_type": MARK,
            "architectures": ["EvilModel"],
        },
        "code on the hub": {"auto_map": remote, "model_type": MARK},
        "asks to be trusted": {"auto_map": auto_map, "trust_remote_code": True, "model_type": MARK},
        "attention of the hub": {"_attn_implementation_internal": "someone/evil:run"},
        "attention of the hub by its old name": {"attn_implementation": "someone/evil:run"},
        "attention as a private key": {"_attn_implementation": "someone/evil"},
        "experts of the hub": {
            "_experts_implementation_internal": "someone/evil",
            "experts_implementation": "someone/evil",
        },
        "attention of parts": {"_attn_implementation_internal": {"": "someone/evil"}},
        "kernels": {"use_kernels": True, "kernel_config": {"RMSNorm": "someone/evil:Norm"}},
        "type that is code": {"dtype": f"float32'; {CODE} #", "torch_dtype": CODE},
        "activation that is code": {"hidden_act": f"__import__('os').system('{SHELL}')"},
        "architecture in a folder": {"architectures": ["../../outside/evil", "os.system"]},
        "model type in a folder": {"model_type": "../outside/evil"},
        "quantised by code": {
            "quantization_config": {"quant_method": "custom", "module": "os", "function": "system"}
        },
        "quantised by a package": {
            "quantization_config": {"quant_method": "gptq", "bits": 4, "dataset": str(outside)}
        },
        "weights elsewhere": {
            "_name_or_path": str(outside),
            "transformers_weights": str(outside / "model.safetensors"),
        },
        "weights above": {"transformers_weights": "../outside/model.safetensors"},
        "generation that is code": {"custom_generate": "someone/evil", "task_specific_params": {"x": CODE}},
    }
    for kind, change in changes.items():

        def bent(folder, change=change):
            edited("config.json", **change)(folder)
            (folder / "evil.py").write_text(_EVIL)
            (folder / "custom_generate").mkdir()
            (folder / "custom_generate" / "generate.py").write_text(CODE)

        yield Case(f"configuration: {kind}", copied(model, bent), load_model)
    nested = '{"model_type": ' + '{"a":' * 3000 + "1" + "}" * 3000 + "}"
    yield Case(
        "configuration: nested deeply",
        copied(model, lambda folder: (folder / "config.json").write_text(nested)),
        load_model,
    )
    for kind, shard in {
        "above": "../outside/model.safetensors",
        "absolute": str(outside / "model.safetensors"),
    }.items():

        def sharded(folder, shard=shard):
            names = load_file(folder / "model.safetensors")
            (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
            content = {"metadata": {}, "weight_map": dict.fromkeys(names, shard)}
            (folder / "model.safetensors.index.json").write_text(json.dumps(content))

        yield Case(f"shards {kind}", copied(model, sharded), load_model)


def _tokenizers(model, outside):
    auto_map = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}
    changes = {
        "code beside it": {"auto_map": auto_map},
        "code of an unknown class": {"auto_map": auto_map, "tokenizer_class": "EvilTokenizer"},
        "class in a module": {"tokenizer_class": "os.system"},
        "files elsewhere": {
            "vocab_file": str(outside / "secret.json"),
            "tokenizer_file": str(outside / "secret.json"),
        },
        "processor of the hub": {"processor_class": "someone/evil", "name_or_path": "someone/evil"},
        "tokens that are objects": {
            "eos_token": {"__type": "AddedToken", "content": CODE, "__reduce__": CODE}
        },
        "extra arguments": {"__init__": CODE, "from_slow": True, "tokenizer_object": CODE},
    }
    for kind, change in changes.items():

        def bent(folder, change=change):
            edited("tokenizer_config.json", **change)(folder)
            (folder / "evil.py").write_text(_EVIL)
            (folder / "tokenization_evil.py").write_text(CODE)

        yield Case(f"tokenizer: {kind}", copied(model, bent), load_model)
    for kind, payload in list(payloads())[:3]:

        def slow(folder, payload=payload):
            (folder / "tokenizer.json").unlink()
            (folder / "tokenizer.model").write_bytes(payload)
            (folder / "vocab.json").write_bytes(payload)

        yield Case(f"tokenizer: {kind} as its vocabulary", copied(model, slow), load_model)


_PROBE = "{% for m in messages %}<|start_header_id|>{{ m.content }}<|eot_id|>{% endfor %}"
TEMPLATES = {
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of cycler": "{{ cycler.__init__.__globals__.os.system('%s') }}" % SHELL,  # noqa: UP031
    "globals of lipsum": "{{ lipsum.__globals__['os'].popen('%s').read() }}" % SHELL,  # noqa: UP031
    "globals of a helper": "{{ raise_exception.__globals__['__builtins__']['exec'](\"%s\") }}" % CODE,  # noqa: UP031
    "globals of the clock": "{{ strftime_now.__globals__.sys.modules.os.system('%s') }}" % SHELL,  # noqa: UP031
    "through a filter": "{{ (messages|attr('__class__')|attr('__init__')|attr('__globals__'))['os'] }}",
    "through a format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "through format_map": "{{ '{a.__class__}'.format_map({'a': messages}) }}",
    "through map": "{{ messages|map(attribute='__class__')|list }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}{{ os.system('x') }}",
    "extends": "{% extends '../outside/secret.json' %}",
    "do": "{% do messages.append(1) %}",
    "changes the messages": "{{ messages.clear() }}{{ messages[0].update({'role': 'system'}) }}",
    "endless range": "{% for i in range(10**12) %}x{% endfor %}",
    "self": "{{ self._TemplateReference__context.eval_ctx.environment.from_string('x') }}",
}


def _templates(model):
    for kind, text in TEMPLATES.items():

        def bent(folder, text=text):
            (folder / "chat_template.jinja").write_text(text + _PROBE)

        yield Case(f"template: {kind}", copied(model, bent), load_model)

    def named(folder):
        (folder / "chat_template.jinja").unlink()
        text = TEMPLATES["globals of cycler"] + _PROBE
        edited("tokenizer_config.json", chat_template=[{"name": "default", "template": text}])(folder)

    yield Case("template: one of several in the configuration", copied(model, named), load_model)


def _data(outside):
    payload = dict(payloads())
    rows = [
        {"prompt": {"py/object": "os.system", "py/reduce": [{"py/function": "os.system"}, SHELL]}},
        {"prompt": "x", "__reduce__": CODE, "__class__": "os.system"},
        {"prompt": "!!python/object/apply:os.system ['x']"},
        {"prompt": "=cmd|'/c calc'!A0"},
    ]
    for index, row in enumerate(rows):

        def lines(folder, row=row):
            (folder / "data.jsonl").write_text(json.dumps(row) + "\n")

        yield Case(f"data: JSON lines {index}", lines, load_only)
        yield Case(
            f"data: JSON lines {index}, read by viva", lines, lambda folder: load_jsonl(folder / "data.jsonl")
        )
    for kind, content in payload.items():
        for name in ("data.jsonl", "data.csv", "data.parquet"):

            def pickled(folder, content=content, name=name):
                (folder / name).write_bytes(content)

            yield Case(f"data: {kind} as {name}", pickled, load_only)
    yield Case(
        "data: a table of code",
        lambda folder: (folder / "d.csv").write_text(f'prompt,x\n"{CODE}",=1+1\n"@eval(1)",2\n'),
        load_only,
    )
    schema = pa.schema(
        [
            pa.field("prompt", pa.string()),
            pa.field(
                "x",
                pa.binary(),
                metadata={
                    b"ARROW:extension:name": b"arrow.py_extension_type",
                    b"ARROW:extension:metadata": payload["system"],
                },
            ),
        ]
    )
    table = pa.table({"prompt": ["a"], "x": [b"b"]}, schema=schema)

    def features(kind):
        info = {"info": {"features": {"prompt": {"_type": kind, "dtype": "string", "id": CODE}}}}
        return table.drop_columns(["x"]).replace_schema_metadata({"huggingface": json.dumps(info)})

    yield Case(
        "data: an extension type that is a pickle",
        lambda f: pq.write_table(table, f / "d.parquet"),
        load_only,
    )
    for kind in ("os.system", "Value", "../evil"):
        yield Case(
            f"data: features of type {kind}",
            lambda folder, kind=kind: pq.write_table(features(kind), folder / "d.parquet"),
            load_only,
        )
    yield from _data_folders(payload, outside, table)


def _data_folders(payload, outside, table):
    good = '{"prompt": "a"}\n'

    def script(folder):
        (folder / f"{folder.name}.py").write_text(CODE)
        (folder / "evil.py").write_text(CODE)
        (folder / "train.jsonl").write_text(good)

    yield Case("data: a folder with a script", script, load_data)

    def only_script(folder):
        (folder / f"{folder.name}.py").write_text(CODE)

    yield Case("data: a folder that is a script", only_script, load_data)
    for kind in ("pkl", "pt", "npy", "bin"):

        def pickles(folder, kind=kind):
            (folder / f"train.{kind}").write_bytes(payload["system"])
            (folder / "README.md").write_text(
                f"---\nconfigs:\n- config_name: default\n  data_files: train.{kind}\n---\n"
            )

        yield Case(f"data: a folder of .{kind}", pickles, load_data)

    def yaml(folder):
        (folder / "train.jsonl").write_text(good)
        (folder / "README.md").write_text(f"---\nx: !!python/object/apply:os.system ['{SHELL}']\n---\n")

    yield Case("data: a description with objects", yaml, load_data)

    def saved(folder):
        state = {
            "_data_files": [{"filename": "../../outside/secret.json"}],
            "_fingerprint": "x",
            "_format_type": CODE,
        }
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text(
            json.dumps({"features": {"prompt": {"_type": "os.system"}}})
        )

    yield Case("data: saved, with tables elsewhere", saved, load_data)

    def arrow(folder):
        with (
            pa.OSFile(str(folder / "data.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, table.schema) as writer,
        ):
            writer.write_table(table)

    yield Case("data: an Arrow file with a pickled type", arrow, load_data)
    yield from _archives(payload, outside, good)


def _archives(payload, outside, good):
    for kind in ("../../escaped.jsonl", "/tmp/viva_escaped.jsonl", "link"):

        def tar(folder, kind=kind):
            with tarfile.open(folder / "train.tar", "w") as archive:
                member = tarfile.TarInfo(kind)
                if kind == "link":
                    member.type, member.linkname = tarfile.SYMTYPE, str(outside)
                    archive.addfile(member)
                    member = tarfile.TarInfo("link/written.json")
                member.size = len(good)
                archive.addfile(member, io.BytesIO(good.encode()))
                member = tarfile.TarInfo("0001.pyd")
                member.size = len(payload["system"])
                archive.addfile(member, io.BytesIO(payload["system"]))

        yield Case(f"data: an archive with {kind}", tar, load_data)

    def zipped(folder):
        with zipfile.ZipFile(folder / "train.zip", "w") as archive:
            archive.writestr("../../../escaped.jsonl", good)
            archive.writestr("train.jsonl", good)

    yield Case("data: a zip that climbs", zipped, load_data)


def _adapters(adapter, outside):
    changes = {
        "base elsewhere": {"base_model_name_or_path": "../../outside/nothing"},
        "base on another host": {"base_model_name_or_path": "http://127.0.0.1:9/model"},
        "base that is code": {"base_model_name_or_path": f"$({SHELL})"},
        "mapped to a function": {
            "auto_mapping": {"parent_library": "os", "base_model_class": "system"},
            "peft_type": "X",
        },
        "of another type": {"peft_type": "os.system"},
        "patterns": {"target_modules": "(a+)+$", "rank_pattern": {CODE: 3}},
        "trained modules": {"modules_to_save": ["../../outside"]},
        "runtime": {
            "runtime_config": {"x": CODE},
            "eva_config": CODE,
            "corda_config": {"cache_file": str(outside)},
        },
    }
    for kind, change in changes.items():
        yield Case(f"adapter: {kind}", copied(adapter, edited("adapter_config.json", **change)), load_adapter)


def _runs(state, outside):
    def index(**change):
        row = {"name": "000001", "next_step": 1, "state_path": "state", "log_sizes": {}} | change

        def make(folder):
            (folder / "state").mkdir()
            (folder / "checkpoints.jsonl").write_text(json.dumps(sealed(row)) + "\n")

        return make

    def load_index(folder):
        checkpoints = Checkpoints(folder)
        read_checkpoint(Path(checkpoints.resolve(checkpoints.all()[-1])))

    yield Case("run: state elsewhere", index(state_path=str(outside)), load_index)
    yield Case("run: state above", index(state_path="../outside"), load_index)
    yield Case("run: name that climbs", index(name="../../outside"), load_index)
    yield Case("run: log elsewhere", index(log_sizes={"../outside/secret.json": 0}), load_index)

    def lead(folder):
        content = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(
            json.dumps(sealed(content | {"files": {"../outside/secret.json": "0"}}))
        )

    yield Case("state: files elsewhere", copied(state, lead), load_state)

    def base(folder):
        content = json.loads((folder / MANIFEST).read_text())
        (folder / MANIFEST).write_text(
            json.dumps(sealed(content | {"base_model": "http://127.0.0.1:9/model"}))
        )

    yield Case("state: base on another host", copied(state, base), load_state)

    def logs(folder):
        (folder / "config.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)
        (folder / "metrics.jsonl").write_text('{"step": 0, "x": ' + "[" * 5000 + "]" * 5000 + "}\n")

    yield Case("run: logs nested deeply", logs, read_run)
    yield Case("run: options nested deeply", logs, lambda folder: read_json(folder / "config.json"))


def save_adapter(folder: Path, base: Path, tensors: Path) -> None:
    """An adapter of a run, as ``peft`` writes it."""
    folder.mkdir()
    shutil.copyfile(tensors / "adapter_config.json", folder / "adapter_config.json")
    save_file(load_file(tensors / "adapter_model.safetensors"), folder / "adapter_model.safetensors")
    edited("adapter_config.json", base_model_name_or_path=str(base))(folder)
