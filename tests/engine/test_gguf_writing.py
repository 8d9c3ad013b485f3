"""GGUF files that are written: what a file said stays; of other models they say what makes ids and logits the same."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf_files import LLAMA_3_ROPE, TEMPLATE, TEXTS, byte_tokens, small_model, write_gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from viva.engine.gguf import gguf_folder, metadata_of_file, metadata_of_model
from viva.engine.gguf import write_gguf as write_anew
from viva.engine.gguf_file import GgufFile, read_gguf

IDS = torch.arange(40)[None] * 5 % 260
BYTES = {"add_prefix_space": False}
EXPRESSION = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}NUMBERS| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIVA_CACHE", str(tmp_path / "cache"))


def split(numbers: str = "") -> Any:
    return pre_tokenizers.Split(Regex(EXPRESSION.replace("NUMBERS", numbers)), behavior="isolated")


CUTS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(**BYTES),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(**BYTES)]
    ),
    "llama-bpe": lambda: pre_tokenizers.Sequence(
        [split("{1,3}"), pre_tokenizers.ByteLevel(**BYTES, use_regex=False)]
    ),
    "qwen2": lambda: pre_tokenizers.Sequence([split(), pre_tokenizers.ByteLevel(**BYTES, use_regex=False)]),
}
"""As the published tokenizers of these families spell it."""


def make_tokenizer(pre: str, *, bos: bool = False, change: Any = None, **merger: Any) -> Any:
    """Tokens 0 to 255 are bytes, 256 and 257 made by merges, 258 and 259 control tokens."""
    vocabulary = {token: number for number, token in enumerate(byte_tokens())}
    vocabulary |= {"he": 256, "12": 257}
    settings = {"merges": [("h", "e"), ("1", "2")], "ignore_merges": pre == "llama-bpe"} | merger
    inner = Tokenizer(models.BPE(vocab=vocabulary, **settings))
    inner.pre_tokenizer = CUTS[pre]()
    inner.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        inner.normalizer = normalizers.NFC()
    names = ["<|im_start|>", "<|im_end|>"]
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    if bos:
        inner.post_processor = processors.TemplateProcessing(
            single=f"{names[0]} $A", special_tokens=[(names[0], inner.token_to_id(names[0]))]
        )
    if change is not None:
        change(inner)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token=names[0], eos_token=names[1], chat_template=TEMPLATE
    )


def written(file: Path, model: Any, tokenizer: Any, precision: str = "float32") -> Path:
    write_anew(file, model, metadata_of_model(model.config, tokenizer, file.stem), precision)
    return file


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def moved(model: Any) -> Any:
    """The model after weights changed, as training does."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_new_weights_in_a_file_are_read_back_to_the_bit(tmp_path: Path, family: str, tied: bool) -> None:
    model = small_model(family, tied=tied)
    first = write_gguf(tmp_path / "first.gguf", model)
    before = logits(model)
    write_anew(tmp_path / "new.gguf", moved(model), metadata_of_file(first, "new"), "float32")
    unpacked = AutoModelForCausalLM.from_pretrained(gguf_folder(tmp_path / "new.gguf"))
    assert torch.equal(logits(unpacked), logits(model))
    assert (logits(model) - before).abs().max() > 0.1
    assert unpacked.config.tie_word_embeddings is tied
    assert ("output.weight" in GgufFile(tmp_path / "new.gguf").tensors) is not tied


@pytest.mark.parametrize("precision", ["float32", "q8_0"])
def test_what_a_file_says_is_kept_but_for_its_name_and_the_type_of_its_weights(
    tmp_path: Path, precision: str
) -> None:
    model = small_model()
    factors = {"rope_freqs.weight": np.ones(4, np.float32)}
    first = GgufFile(write_gguf(tmp_path / "first.gguf", model, bos=True, more=factors))
    write_anew(tmp_path / "new.gguf", model, metadata_of_file(tmp_path / "first.gguf", "new"), precision)
    new = GgufFile(tmp_path / "new.gguf")
    for key, field in first.typed_fields.items():
        assert new.typed_fields[key] == field
    added = {key: value for key, value in new.fields.items() if key not in first.fields}
    assert added == {"general.name": "new", "general.file_type": 0 if precision == "float32" else 7} | (
        {} if precision == "float32" else {"general.quantization_version": 2}
    )
    assert (new.floats(new.tensors["rope_freqs.weight"]) == 1).all()
    # a file of a file names the one that it was made of
    again = metadata_of_file(tmp_path / "new.gguf", "third")
    assert again.fields["general.base_model.0.name"].value == "new"
    assert "general.file_type" not in again.fields


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("pre", sorted(CUTS))
def test_a_model_of_transformers_has_the_same_ids_logits_and_template(
    tmp_path: Path, pre: str, bos: bool
) -> None:
    family = {"qwen2": "qwen2", "gpt-2": "qwen3"}.get(pre, "llama")
    model, tokenizer = small_model(family), make_tokenizer(pre, bos=bos)
    file = written(tmp_path / "model.gguf", model, tokenizer)
    assert read_gguf(file).fields["tokenizer.ggml.pre"] == pre
    unpacked: Any = AutoModelForCausalLM.from_pretrained(gguf_folder(file))
    assert torch.equal(logits(unpacked), logits(model))
    read = AutoTokenizer.from_pretrained(gguf_folder(file))
    for text in TEXTS:
        assert read.encode(text) == tokenizer.encode(text)
        assert read.decode(read.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert (read.encode("x")[0] == read.bos_token_id) is bos
    assert read.chat_template == TEMPLATE
    assert read.all_special_ids == tokenizer.all_special_ids


def test_every_pre_tokenizer_cuts_some_text_in_its_own_way() -> None:
    text = "12 cats'S 1234 e\u0301"
    ways = {
        (str(each.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)), *each.encode(text))
        for each in map(make_tokenizer, CUTS)
    }
    assert len(ways) == len(CUTS)  # else any name would do


def test_scaled_frequencies_of_llama_3_are_written_as_factors(tmp_path: Path) -> None:
    model = small_model(rope=LLAMA_3_ROPE)
    file = written(tmp_path / "model.gguf", model, make_tokenizer("llama-bpe"))
    unpacked: Any = AutoModelForCausalLM.from_pretrained(gguf_folder(file))
    assert torch.allclose(logits(unpacked), logits(model), atol=1e-5)
    assert not torch.allclose(logits(small_model()), logits(model), atol=1e-3)


def test_rows_without_a_token_get_one_that_is_not_used(tmp_path: Path) -> None:
    tokenizer = make_tokenizer("smollm")
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    assert len(tokenizer) == 261
    config = small_model().config
    config.vocab_size = 264
    fields = metadata_of_model(config, tokenizer, "x").fields
    assert fields["tokenizer.ggml.tokens"].value[256:] == [
        *("he", "12", "<|im_start|>", "<|im_end|>", "<tool>"),
        *("[PAD261]", "[PAD262]", "[PAD263]"),
    ]
    assert fields["tokenizer.ggml.token_type"].value[254:] == [1, 1, 1, 1, 3, 3, 4, 5, 5, 5]


@pytest.mark.parametrize(
    ("precision", "bits"),
    [("float16", torch.float16), ("bfloat16", torch.bfloat16)],
)
def test_matrices_are_rounded_and_vectors_are_not(tmp_path: Path, precision: str, bits: torch.dtype) -> None:
    model = moved(small_model())
    file = written(tmp_path / "model.gguf", model, make_tokenizer("smollm"), precision)
    unpacked: Any = AutoModelForCausalLM.from_pretrained(gguf_folder(file))
    read = unpacked.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(read[name], weight.to(bits).float() if weight.dim() > 1 else weight)
    assert not torch.equal(logits(unpacked), logits(model))


def test_eight_bits_are_written_where_rows_can_be_cut_into_blocks(tmp_path: Path) -> None:
    model = small_model()  # feed-forward layers are 48 wide, no multiple of 32
    file = written(tmp_path / "model.gguf", model, make_tokenizer("smollm"), "q8_0")
    types = {name: GGMLQuantizationType(tensor.type).name for name, tensor in GgufFile(file).tensors.items()}
    found = [types[name] for name in ("blk.0.attn_q.weight", "blk.0.ffn_down.weight", "output_norm.weight")]
    assert found == ["Q8_0", "F16", "F32"]
    read = AutoModelForCausalLM.from_pretrained(gguf_folder(file)).state_dict()
    for name, weight in model.state_dict().items():
        steps = weight.abs().max() / 127
        assert (read[name] - weight).abs().max() <= 0.51 * steps


def test_a_weight_beyond_float16_is_refused(tmp_path: Path) -> None:
    model = small_model()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = -70000.0
    with pytest.raises(
        ValueError, match=r"blk\.1\.ffn_up\.weight has numbers up to 7e\+04.*precision=bfloat16"
    ):
        written(tmp_path / "model.gguf", model, make_tokenizer("smollm"), "float16")


def metaspace(inner: Any) -> None:
    inner.pre_tokenizer = pre_tokenizers.Metaspace()


def spaced(inner: Any) -> None:
    inner.add_special_tokens([AddedToken("<|im_start|>", lstrip=True)])


def ended(inner: Any) -> None:
    inner.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", inner.token_to_id("<|im_end|>"))]
    )


def lowered(inner: Any) -> None:
    inner.normalizer = normalizers.Lowercase()


@pytest.mark.parametrize(
    ("config", "tokenizer", "message"),
    [
        ({"model_type": "gemma3_text"}, {}, r"architecture is 'gemma3_text'; allowed: llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, {}, r"hidden_act: 'gelu'; allowed: 'silu'"),
        ({"mlp_bias": True}, {}, r"mlp_bias: True; allowed: False"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, {}, r"rotary frequencies by 'yarn'"),
        ({"vocab_size": 200}, {}, r"ids up to 259, and its embeddings 200 rows"),
        ({}, {"change": metaspace}, r"cuts text by .*Metaspace.* none of gpt-2, llama-bpe, qwen2, smollm"),
        ({}, {"change": lowered}, r"with normalizer .*Lowercase"),
        ({}, {"ignore_merges": True}, r"ignore_merges true"),
        ({}, {"change": spaced}, r"its token '<\|im_start\|>' takes spaces"),
        ({}, {"change": ended}, r"turns 'a' into \[\d+, 25\d\]"),
        ({}, {"merges": []}, r"has no merges"),
        ({}, {"dropout": 0.5}, r"dropout: 0.5; allowed: None"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused_with_what_to_do(
    config: dict[str, Any], tokenizer: dict[str, Any], message: str
) -> None:
    settings = small_model().config
    for name, value in config.items():
        setattr(settings, name, value)
    if "model_type" in config:
        settings.__class__.model_type, kept = config["model_type"], settings.__class__.model_type
    try:
        with pytest.raises(ValueError, match=rf"(?s){message}.*convert_hf_to_gguf\.py"):
            metadata_of_model(settings, make_tokenizer("smollm", **tokenizer), "x")
    finally:
        if "model_type" in config:
            settings.__class__.model_type = kept


def test_a_tokenizer_without_a_file_of_the_fast_kind_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json.*convert_hf_to_gguf"):
        metadata_of_model(small_model().config, object(), "x")  # pyright: ignore[reportArgumentType]


def test_transformers_reads_the_file(tmp_path: Path) -> None:
    model = small_model()
    written(tmp_path / "model.gguf", model, make_tokenizer("gpt-2"), "float32")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    assert torch.allclose(logits(read), logits(model), atol=1e-5)
    assert json.loads(read.config.to_json_string())["num_key_value_heads"] == 2
