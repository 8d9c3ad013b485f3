"""A model with random weights and a tokenizer, made on the spot.

The tokenizer spells control tokens, bytes, syllables (a consonant and a vowel) and words of two or three syllables
behind a space. A word's text always encodes to that word's one token, so that token counts survive decoding.
"""

import itertools
from pathlib import Path
from typing import Any

from work import SIZES, Size

__all__ = ["make_tokenizer", "save_model"]

CONTROL = ("<|end|>", "<|im_start|>", "<|im_end|>")
SPACE = "\u0120"  # how byte-level tokenizers write it


def make_tokenizer(num_tokens: int) -> Any:
    """A ``transformers`` tokenizer of exactly that many tokens, at least 4,000."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    syllables = [c + v for c, v in itertools.product("bcdfghjklmnpqrstvwxz", "aeiou")]
    merges = [tuple(syllable) for syllable in syllables]
    stems = [(SPACE, syllable) for syllable in syllables]
    room = num_tokens - len(CONTROL) - len(pieces) - len(merges) - len(stems)
    twos = [(SPACE + a, b) for a, b in itertools.product(syllables, syllables)]
    threes = [(a + b, c) for (a, b), c in itertools.product(twos, syllables)]
    merges += stems + (twos + threes)[:room]
    backend = Tokenizer(
        models.BPE(
            vocab={text: id_ for id_, text in enumerate([*pieces, *("".join(pair) for pair in merges)])},
            merges=merges,
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=CONTROL[0],
        pad_token=CONTROL[0],
        clean_up_tokenization_spaces=False,
    )


def save_model(folder: Path, name: str) -> None:
    """A model of a size of `work.SIZES`, in float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    size: Size = SIZES[name]
    tokenizer = make_tokenizer(size.vocab)
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head,
        max_position_embeddings=size.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
