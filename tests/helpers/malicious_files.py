"""Files that try to run code, to reach the network or to have others read: about 130 of them, and what loads each.

Every payload would leave the file ``viva_canary`` behind.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from malicious_data import data_sets
from malicious_parts import (
    CODE,
    SHELL,
    Case,
    copied,
    edited,
    load_adapter,
    load_model,
    load_state,
    payloads,
    resealed,
)
from safetensors.torch import load_file
from watched import MARK

from viva.engine.checkpoint import MANIFEST, read_checkpoint
from viva.model_files import sealed
from viva.run.checkpoints import Checkpoints
from viva.run.files import read_json
from viva.view.run_index import read_run


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
    yield from data_sets(outside)
    yield from _adapters(adapter, outside)
    yield from _runs(state, outside)


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
