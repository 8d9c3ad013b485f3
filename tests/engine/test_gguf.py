"""GGUF files: weights, tokenizer and template are those of the model that was written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch
from gguf import GGUFWriter
from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import make_config
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from viva.engine import LocalServiceClient
from viva.engine.gguf import gguf_folder, is_gguf
from viva.engine.gguf_file import PRE_TOKENIZERS
from viva.recipes.common import resolve_model

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{ '<|im_end|>' }}{% endfor %}"
)
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def byte_tokens() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def small_model(family: str = "llama", *, tied: bool = False, rope: dict[str, Any] | None = None) -> Any:
    torch.manual_seed(0)
    config = make_config(family)
    config.tie_word_embeddings = tied
    config.rope_parameters = {"rope_type": "default", "rope_theta": 77000.0} | (rope or {})
    return AutoModelForCausalLM.from_config(config)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Halves of a head's rotated dimensions interleaved, as llama.cpp keeps them."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(
    path: Path,
    model: Any,
    *,
    architecture: str | None = None,
    pre: str = "smollm",
    bos: bool = False,
    more: Mapping[str, np.ndarray] | None = None,
) -> Path:
    config = model.config
    writer = GGUFWriter(str(path), architecture or config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(model.model.layers[0].self_attn.head_dim)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    tokens = [*byte_tokens(), "<|im_start|>", "<|im_end|>", "he", "12"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 1, 1])
    writer.add_token_merges(["h e", "1 2"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(bos)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if name == "model.embed_tokens.weight":
            writer.add_tensor("token_embd.weight", array)
        elif name == "model.norm.weight":
            writer.add_tensor("output_norm.weight", array)
        elif name == "lm_head.weight":
            if not config.tie_word_embeddings:
                writer.add_tensor("output.weight", array)
        else:
            _, _, layer, rest = name.split(".", 3)
            module, kind = rest.rsplit(".", 1)
            short = NAMES[module]
            if config.model_type == "llama" and short in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if short == "attn_q" else config.num_key_value_heads
                array = permuted(array, heads)
            writer.add_tensor(f"blk.{layer}.{short}.{kind}", np.ascontiguousarray(array))
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIVA_CACHE", str(tmp_path / "cache"))


def check_unpacked(folder: Path, model: Any) -> None:
    pair: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    unpacked, told = pair
    tokens = torch.arange(40)[None] * 5 % 260
    with torch.no_grad():
        assert torch.allclose(unpacked(tokens).logits, model(tokens).logits, atol=1e-5)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert unpacked.config.tie_word_embeddings is model.config.tie_word_embeddings
    assert unpacked.config.eos_token_id == 257


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_an_unpacked_model_computes_what_the_written_one_computes(
    tmp_path: Path, family: str, tied: bool
) -> None:
    model = small_model(family, tied=tied)
    check_unpacked(gguf_folder(write_gguf(tmp_path / "small.gguf", model)), model)


def test_rotary_frequencies_are_scaled_as_the_file_says(tmp_path: Path) -> None:
    model = small_model(rope=LLAMA_3_ROPE)
    size = model.config.head_dim
    factors = 77000.0 ** -(np.arange(0, size, 2) / size) / model.model.rotary_emb.inv_freq.numpy()
    assert factors.max() > factors.min()
    rope = {"rope_freqs.weight": factors.astype(np.float32)}
    check_unpacked(gguf_folder(write_gguf(tmp_path / "small.gguf", model, more=rope)), model)
    with pytest.raises(ValueError, match=r"other\.gguf.*not the scaling of Llama 3"):
        gguf_folder(
            write_gguf(
                tmp_path / "other.gguf", model, more={name: array * 2 + 1 for name, array in rope.items()}
            )
        )


def test_a_tensor_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    more = {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}
    with pytest.raises(ValueError, match=r"small\.gguf.*'blk\.0\.attn_sinks\.weight'"):
        gguf_folder(write_gguf(tmp_path / "small.gguf", small_model(), more=more))


async def test_the_engine_samples_from_a_gguf_file_and_saves_its_folder_as_the_base(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", small_model())
    service = LocalServiceClient(device="cpu", state_dir=tmp_path / "state")
    client = await service.create_lora_training_client(str(file), rank=2)
    assert client.get_tokenizer().decode([258]) == "he"
    path = (await client.save_state("one")).path
    adapter = json.loads((Path(path) / "adapter_config.json").read_text(encoding="utf-8"))
    assert adapter["base_model_name_or_path"] == str(gguf_folder(file)) == resolve_model(str(file))


def test_the_tokenizer_and_the_template_are_those_of_the_file(tmp_path: Path) -> None:
    folder = gguf_folder(write_gguf(tmp_path / "small.gguf", small_model()))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    # smollm cuts digits one by one before merges: "12" is never one token there
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hehe 12")) == ["he", "he", "Ġ", "1", "2"]
    assert tokenizer.encode("<|im_start|>") == [256]
    assert tokenizer.chat_template == TEMPLATE
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    other = AutoTokenizer.from_pretrained(
        gguf_folder(write_gguf(tmp_path / "other.gguf", small_model(), pre="gpt-2", bos=True))
    )
    assert other.convert_ids_to_tokens(other.encode("he12")) == ["<|im_start|>", "he", "12"]


def oracle(pre: str, text: str) -> list[str]:
    """Pieces that merges cannot cross, by another library for regular expressions."""
    pieces = [text]
    for rule in (*PRE_TOKENIZERS[pre].cuts, *(() if pre in ("llama-bpe", "qwen2") else (GPT_2,))):
        found: list[str] = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(rule, piece):
                found += [piece[end : match.start()], match.group()]
                end = match.end()
            found.append(piece[end:])
        pieces = [piece for piece in found if piece]
    return pieces


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
@given(
    text=st.text(
        alphabet=st.one_of(
            st.sampled_from("aB'sdll 12\n\t.é中²"), st.characters(exclude_categories=("Cn", "Co", "Cs"))
        ),
        max_size=30,
    )
)
def test_text_is_cut_as_the_pre_tokenizer_says(pre: str, text: str) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in ("llama-bpe", "qwen2"))
    cuts = [pre_tokenizers.Split(Regex(rule), behavior="isolated") for rule in PRE_TOKENIZERS[pre].cuts]
    cut = pre_tokenizers.Sequence([*cuts, byte_level]).pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == oracle(pre, text)


def test_a_file_is_unpacked_once_and_another_one_of_its_name_anew(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", small_model())
    first = gguf_folder(file)
    before = (first / "model.safetensors").stat().st_mtime_ns
    assert gguf_folder(file) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == before
    assert json.loads((first / "gguf.json").read_text())["file"] == "small.gguf"
    write_gguf(file, small_model(tied=True))
    assert gguf_folder(file) != first
    assert not [path for path in first.parent.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"architecture": "bloom"}, "architecture 'bloom'"), ({"pre": "tekken"}, "pre-tokenizer 'tekken'")],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        gguf_folder(write_gguf(tmp_path / "small.gguf", small_model(), **change))


def test_a_damaged_file_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "small.gguf", small_model())
    whole = file.read_bytes()
    for size in (0, 3, 24, 400, len(whole) // 2):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"small\.gguf"):
            gguf_folder(file)
    file.write_bytes(b"GGUF" + b"\xff" * 400)
    with pytest.raises(ValueError, match=r"small\.gguf"):
        gguf_folder(file)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert not is_gguf(str(tmp_path / "gone.gguf"))


def test_a_path_that_is_neither_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not a folder, nor a GGUF file"):
        resolve_model("/gone/model.gguf")
