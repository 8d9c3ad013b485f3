"""GGUF files of small random models, and texts of several scripts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFValueType, GGUFWriter
from tiny_engine import make_config
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}"
    "{{ '<|im_end|>' }}{% endfor %}"
)
TEXTS = (
    "The cat's 12 hats, don't they'LL 345.67?  \n\n\tx = f(1_000) != 'a';",
    "Größe naïve café e\u0301 ½ x² \u00a0ﬁ",
    "привет мир 2024 δύο γράμματα",
    "مرحبا بالعالم שלום नमस्ते १२३ สวัสดี",
    "你好。世界 こんにちは 안녕하세요 \u3000",
    "🙂👩\u200d👩\u200d👧 <|im_start|>user\nhehe<|im_end|> [PAD259]",
)
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
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PIECES = ["he", "▁he", "hehe", "▁", "a", "b", "c", "ab", "bc", "abc", "aa", "aaa", "12"]
"""Of SentencePiece, the best scored first."""


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
    rotary = {"rope_type": "default", "rope_theta": 77000.0} | (rope or {})
    if family == "gemma3":
        rotary = {"full_attention": rotary, "sliding_attention": rotary | {"rope_theta": 900.0}}
        config.query_pre_attn_scalar = config.head_dim
    config.rope_parameters = rotary
    return AutoModelForCausalLM.from_config(config)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Halves of a head's rotated dimensions interleaved, as llama.cpp keeps them."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _add_windows(writer: GGUFWriter, config: Any, pattern: int | list[bool] | None) -> None:
    writer.add_sliding_window(config.sliding_window)
    if pattern is not None:
        writer.add_key_value(
            "gemma3.attention.sliding_window_pattern",
            pattern,
            GGUFValueType.ARRAY if isinstance(pattern, list) else GGUFValueType.UINT32,
        )
    writer.add_float32("gemma3.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"])


def _add_tokens(writer: GGUFWriter, pre: str, space_prefix: bool) -> None:
    if pre == "sentencepiece":
        writer.add_tokenizer_model("llama")
        tokens = [f"<0x{number:02X}>" for number in range(256)]
        writer.add_token_list([*tokens, "<|im_start|>", "<|im_end|>", "\n\n", "<unk>", *PIECES])
        writer.add_token_types([6] * 256 + [3, 3, 4, 2] + [1] * len(PIECES))
        writer.add_token_scores([0.0] * 260 + [-1.0 - number for number in range(len(PIECES))])
        writer.add_add_space_prefix(space_prefix)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([*byte_tokens(), "<|im_start|>", "<|im_end|>", "he", "12"])
        writer.add_token_types([1] * 256 + [3, 3, 1, 1])
        writer.add_token_merges(["h e", "1 2"])


def write_gguf(
    path: Path,
    model: Any,
    *,
    architecture: str | None = None,
    pre: str = "smollm",
    bos: bool = False,
    space_prefix: bool = False,
    window_pattern: int | list[bool] | None = 2,
    more: Mapping[str, np.ndarray] | None = None,
) -> Path:
    config = model.config
    is_gemma = config.model_type == "gemma3_text"
    writer = GGUFWriter(str(path), architecture or config.model_type.removesuffix("_text"))
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if is_gemma:
        _add_windows(writer, config, window_pattern)
    writer.add_rope_freq_base(
        config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"]
    )
    writer.add_rope_dimension_count(model.model.layers[0].self_attn.head_dim)
    if config.model_type in ("qwen3", "gemma3_text"):
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    _add_tokens(writer, pre, space_prefix)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(bos)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy() + (1 if is_gemma and name.endswith("norm.weight") else 0)
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
            short = (GEMMA_NAMES if is_gemma else NAMES)[module]
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
