"""The built-in policy's tokenizer: byte-level BPE, one token per digit, ChatML control tokens."""

import random
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from viva.tiny.text import MIXTURE

__all__ = ["build_tokenizer", "load_tokenizer"]

_VOCAB_SIZE = 1024
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_PIECES = Regex(r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")

_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '\\n' if not loop.first else '' }}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '\\n<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer(path: Path, *, seed: int, num_examples: int = 1500) -> PreTrainedTokenizerFast:
    """Train the tokenizer on text of every generator and save it to a folder."""
    rng = random.Random(seed)
    examples = [make(rng) for make in MIXTURE for _ in range(num_examples)]
    texts = [str(message["content"]) for example in examples for message in example.messages]
    texts += [example.reply for example in examples]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(_PIECES, "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=list(_CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=_CHAT_TEMPLATE,
        model_max_length=2048,
    )
    fast.save_pretrained(path)
    return load_tokenizer(path)


def load_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Load a tokenizer folder."""
    return PreTrainedTokenizerFast.from_pretrained(path)
