"""Every chat format that `load_renderer` accepts, on tokenizers made on the spot with all their control tokens."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from viva.conversation.rendering import load_renderer

_DEEPSEEK = (
    *("begin of sentence", "end of sentence", "System", "User", "Assistant", "tool calls begin"),
    *(
        "tool calls end",
        "tool call begin",
        "tool call end",
        "tool sep",
        "tool output begin",
        "tool output end",
    ),
)
SPECIAL = (
    *("<\uff5c" + name.replace(" ", "\u2581") + "\uff5c>" for name in _DEEPSEEK),
    "\uff5cDSML\uff5c",
    *("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
    *("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_section_begin|>"),
    *(
        "<|tool_call_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ),
    *("<|media_begin|>", "<|media_content|>", "<|media_end|>"),
    "<|endoftext|>",
)
PLAIN = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    *("<tools>", "</tools>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|fim|>", "<|fim|>x", "|><|", "<<", " go|", "|y\n"),
)
"""Added tokens that are not marked special; some begin or end like others, or with white space."""

COOKBOOK = (
    *("role_colon", "llama3", "qwen3", "qwen3_vl", "qwen3_vl_instruct", "qwen3_disable_thinking"),
    *("qwen3_instruct", "qwen3_5", "qwen3_5_disable_thinking", "qwen3_5_preserve_thinking"),
    *("qwen3_8_xhigh_reasoning", "qwen3_8_medium_reasoning", "qwen3_8_low_reasoning"),
    *("qwen3_8_disable_thinking", "deepseekv3", "deepseekv3_disable_thinking", "deepseekv3_thinking"),
    *("deepseekv4_1", "deepseekv4_1_low_reasoning", "deepseekv4_1_max_reasoning"),
    *("deepseekv4_1_disable_thinking", "deepseekv4_1_preserve_thinking", "glm5_3_max_reasoning"),
    *("glm5_3_low_reasoning", "glm5_3_high_reasoning", "kimi_k2", "kimi_k25", "kimi_k25_disable_thinking"),
    *("kimi_k26", "kimi_k26_disable_thinking", "kimi_k26_preserve_thinking", "nemotron3"),
    *("nemotron3_low_thinking", "nemotron3_disable_thinking", "nemotron3_preserve_thinking"),
    *("nemotron3_ultra", "nemotron3_ultra_disable_thinking", "nemotron3_ultra_medium_thinking"),
    *("nemotron3_ultra_preserve_thinking", "gpt_oss_no_sysprompt", "gpt_oss_low_reasoning"),
    *("gpt_oss_medium_reasoning", "gpt_oss_high_reasoning"),
)
"""All renderers of the cookbook but ``tml_v0``, which brings a tokenizer of its own and is refused."""

_CHATML = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_MISTRAL = """\
<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% elif m.role == 'assistant' %} \
{{ m.content }}</s>{% else %}{{ raise_exception('Only user and assistant roles') }}{% endif %}{% endfor %}"""
_GEMMA = """\
<bos>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
TEMPLATES = {
    # name: template, its control tokens (the last one ends a text), how the tokenizer writes text
    "chatml, letters folded": (_CHATML, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), "folded"),
    "mistral": (_MISTRAL, ("<s>", "[INST]", "[/INST]", "</s>"), "bytes"),
    "mistral, space before all": (_MISTRAL, ("<s>", "[INST]", "[/INST]", "</s>"), "always"),
    "mistral, space before the first": (_MISTRAL, ("<s>", "[INST]", "[/INST]", "</s>"), "first"),
    "gemma": (_GEMMA, ("<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"), "never"),
}

FORMATS = (*COOKBOOK, *TEMPLATES)


@cache
def renderer_of(name: str):
    """The renderer of one of `FORMATS`."""
    if name in COOKBOOK:
        return load_renderer(_union_tokenizer(), model_name="scripted/all", renderer_name=name)
    template, control, writing = TEMPLATES[name]
    tokenizer = _bytes(control) if writing in ("bytes", "folded") else _pieces(control, writing)
    if writing == "folded":
        tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFKC(), normalizers.Lowercase()]
        )
    tokenizer.add_tokens(list(PLAIN))
    tokenizer.chat_template = template
    return load_renderer(tokenizer, model_name="scripted/template", renderer_name="chat_template")


@cache
def _union_tokenizer():
    tokenizer = _bytes(SPECIAL)
    tokenizer.backend_tokenizer.add_tokens([AddedToken(token, special=False) for token in PLAIN])
    return tokenizer


def added_tokens(name: str) -> list[str]:
    """Every added token of a format's tokenizer, in order of their ids."""
    added = renderer_of(name).tokenizer.get_added_vocab()
    return sorted(added, key=added.__getitem__)


def _bytes(control):
    """Bytes are the alphabet: every text has one spelling."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: id_ for id_, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _wrapped(backend, control)


def _pieces(control, prepend):
    """Spaces are letters, unknown ones bytes, and a space may be put before what is encoded."""
    letters = [chr(code) for code in range(33, 127)] + ["\u2581"]
    vocab = {letter: id_ for id_, letter in enumerate(letters)}
    vocab |= {f"<0x{byte:02X}>": len(letters) + byte for byte in range(256)}
    vocab["<unk>"] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps if prepend == "never" else [*steps, decoders.Strip(" ", 1, 0)])
    return _wrapped(backend, control)


def _wrapped(backend, control):
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=control[-1], clean_up_tokenization_spaces=False
    )
