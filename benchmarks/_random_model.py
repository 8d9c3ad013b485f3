"""A random model of any architecture in a folder, with the tokenizer that the engine wants."""

from typing import Any


def save_random_model(config_class: Any, folder: str, **sizes: int) -> None:
    """A causal language model with random weights (seed 0) and tied embeddings, whose tokens are numbers."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    config = config_class(**sizes, tie_word_embeddings=True, bos_token_id=None, eos_token_id=0)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = Tokenizer(
        models.WordLevel({str(number): number for number in range(config.vocab_size)}, unk_token="0")
    )
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="0").save_pretrained(folder)
