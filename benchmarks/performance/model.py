"""The models that are measured: one with random weights and a tokenizer, made on the spot, and one of others.

The tokenizer spells control tokens, bytes, syllables (a consonant and a vowel) and words of two or three syllables
behind a space. A word's text always encodes to that word's one token, so that token counts survive decoding. Words of
the package's own prompts are tokens, too, so that these are about as long as with a real tokenizer.
"""

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

from work import SIZES, WORDS_FILE, Size

CONTROL = ("<|end|>", "<|im_start|>", "<|im_end|>")
SPACE = "\u0120"  # how byte-level tokenizers write it


def prompt_words() -> list[str]:
    """The English words of conversations and judge calls, each with a space before it where that occurs."""
    from viva.conversation.protocol import AGENT_SYSTEM_PROMPTS, View, persona
    from viva.conversation.records import AgentResponse, ReplyStatus, Turn
    from viva.judging.comparison import JUDGE_SYSTEM_PROMPT, judge_messages
    from viva.selfplay.round_robin import round_robin_protocol

    said = AgentResponse(reflection="", evaluation="", solution="")
    turns = [Turn(agent_id=0, round_index=0, prompt="", text="", response=said, status=ReplyStatus.OK)]
    view = View(agent_id=3, num_agents=4, round_index=1, aliases=(), persona=persona(3))
    protocol = round_robin_protocol(2)
    messages = [
        *protocol.messages(protocol.prompt("", turns, view)),
        *judge_messages("", "", "", JUDGE_SYSTEM_PROMPT),
    ]
    texts = [*(message["content"] for message in messages), *AGENT_SYSTEM_PROMPTS.values()]
    return sorted({word.replace(" ", SPACE) for text in texts for word in re.findall(" ?[A-Za-z]{2,}", text)})


def make_tokenizer(num_tokens: int) -> Any:
    """A ``transformers`` tokenizer of exactly that many tokens, at least 4,000."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    syllables = [c + v for c, v in itertools.product("bcdfghjklmnpqrstvwxz", "aeiou")]
    merges = [tuple(syllable) for syllable in syllables]
    merges += [(SPACE, syllable) for syllable in syllables]
    twos = [(SPACE + a, b) for a, b in itertools.product(syllables, syllables)]
    threes = ((a + b, c) for (a, b), c in itertools.product(twos, syllables))
    vocab = {text: id_ for id_, text in enumerate([*pieces, *prompt_words()])}
    used: list[tuple[str, ...]] = []
    for pair in itertools.chain(merges, twos, threes):
        if len(vocab) == num_tokens - len(CONTROL):
            break
        vocab.setdefault("".join(pair), len(vocab))
        used.append(pair)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=used, ignore_merges=True))
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
    """A model of a size of `work.SIZES`, in float32, with the ids of its whole words.

    Raises:
        SystemExit: `make models` has not fetched the model that others trained.
    """
    if name == "smollm2":
        tokenizer = _copy_trained(folder)
        pieces = tokenizer.convert_ids_to_tokens(list(range(SIZES[name].vocab)))
        ids = [id_ for id_, piece in enumerate(pieces) if re.fullmatch(f"{SPACE}[a-z]{{3,}}", piece)]
        ids = [id_ for id_ in ids if tokenizer.encode(tokenizer.decode([id_])) == [id_]]
    else:
        _save_random(folder, name)
        ids = list(range(600, SIZES[name].vocab - 8))
    (folder / WORDS_FILE).write_text(json.dumps(ids))


def _copy_trained(folder: Path) -> Any:
    """SmolLM2-135M-Instruct from its GGUF file, and files of its weights for llama.cpp; its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from viva.engine.gguf import gguf_folder, metadata_of_file, write_gguf
    from viva.recipes.demo import model_path

    if not model_path().is_file():
        raise SystemExit(
            "this row measures SmolLM2-135M-Instruct, which is not there; 'make models' fetches it"
        )
    shutil.copytree(gguf_folder(model_path()), folder, dirs_exist_ok=True)
    module = AutoModelForCausalLM.from_pretrained(folder)
    for precision in ("float16", "q8_0"):
        metadata = metadata_of_file(model_path(), precision)
        write_gguf(folder / f"model-{precision}.gguf", module, metadata, precision)
    return AutoTokenizer.from_pretrained(folder)


def _save_random(folder: Path, name: str) -> None:
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
