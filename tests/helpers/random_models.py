"""Small models with random weights and a byte-level tokenizer, made on the spot: models the recipe has never seen."""

from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
    "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral": ["<s>", "[INST]", "[/INST]", "</s>"],
    "gemma": ["<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"],
}
"""The control tokens of each family's chat format; the last one is the end of text."""

_CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TEMPLATES = {
    "qwen3": _CHATML,
    "qwen2": """\
{% if messages[0].role != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}"""
    + _CHATML,
    "llama": """\
<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{{ m.content | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}""",
    "mistral": """\
<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'assistant' %} \
{{ m.content }}</s>{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}{% endfor %}""",
    "gemma": """\
<bos>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}""",
}
"""The chat templates of the families' instruction-tuned models, without tools."""

_MODELS = {
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen2": ("Qwen2Config", {}),
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"head_dim": 16, "sliding_window": 64}),
    "gemma": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def make_tokenizer(family):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROL[family]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=CONTROL[family][-1], chat_template=TEMPLATES[family]
    )


def make_model(folder: Path, family: str, *, names_labels: bool = True) -> Path:
    """A model folder; with `names_labels`, its judge always names a verdict instead of a random byte."""
    tokenizer = make_tokenizer(family)
    config_class, extra = _MODELS[family]
    config = getattr(transformers, config_class)(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=None,
        **SIZES,
        **extra,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    if names_labels:
        with torch.no_grad():
            rows, (a, b) = model.lm_head.weight, tokenizer.convert_tokens_to_ids(["A", "B"])
            rows[a] *= 100
            rows[b] = -rows[a]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


CHANCES = {"A": 0.3, "B": 0.25, "<|eot_id|>": 0.45}


def make_hesitating_model(folder: Path) -> Path:
    """A Llama with random weights but for one direction of them: it says A or B or ends, and hesitates as a judge."""
    make_model(folder, "llama", names_labels=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        model.model.embed_tokens.weight[:, 0] = 1.0  # dwarfs the rest, so it reaches the last layer as it is
        length = model.config.hidden_size**0.5
        rows = model.lm_head.weight
        rows[:, 0] = 0.0
        for text, chance in CHANCES.items():
            row = rows[tokenizer.convert_tokens_to_ids(text)]
            row[1:] = 0.5 * torch.randn(row.numel() - 1)
            row[0] = (12 + torch.tensor(chance).log()) / length
    model.save_pretrained(folder)
    return folder
