"""Small models with random weights and a byte-level tokenizer, made on the spot: models the recipe has never seen."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
}
CONTROL = {
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
}


def make_tokenizer(family):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL[family]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=CONTROL[family][-1])


def make_model(folder: Path, family: str, *, names_labels: bool = True) -> Path:
    """A model folder; with `names_labels`, its judge always names a verdict instead of a random byte."""
    tokenizer = make_tokenizer(family)
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    extra = {"head_dim": 16} if family == "qwen3" else {}
    config = config_class(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **SIZES, **extra
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config)
    if names_labels:
        with torch.no_grad():
            rows, (a, b) = model.lm_head.weight, tokenizer.convert_tokens_to_ids(["A", "B"])
            rows[a] *= 100
            rows[b] = -rows[a]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
