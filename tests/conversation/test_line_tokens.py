"""Oracle: a text that is encoded whole, by tokenizers with the pre-tokenizers of the model families and merges of
their own."""

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from viva.conversation.coordinator import MultiAgentCoordinator
from viva.conversation.guard import GuardedTokenizer, LineEncoder, LineTokens, remembering
from viva.conversation.rendering import build_prompt
from viva.selfplay.group import MultiAgentConversationEnv
from viva.selfplay.round_robin import round_robin_protocol
from viva.testing import honest, tiny_renderer

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def split(pattern: str, behavior: str = "isolated") -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior)


def steps(*parts: Any) -> Any:
    return pre_tokenizers.Sequence([*parts, BYTES])


CUTTING = {
    "gpt2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "qwen": (normalizers.NFC(), steps(split(CL100K))),
    "llama3": (None, steps(split(CL100K.replace(r"\p{N}|", r"\p{N}{1,3}|")))),
    "o200k": (None, steps(split(O200K))),
    "deepseek v3": (
        normalizers.Sequence([]),
        steps(
            split(r"\p{N}{1,3}"),
            split("[一-龥\u3040-\u30ff]+"),
            split(
                r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
                r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
        ),
    ),
    "deepseek": (
        normalizers.Sequence([]),
        steps(
            split("[\r\n]"),
            split(r"\s?\p{L}+"),
            split(r"\s?\p{P}+"),
            split(r"[一-龥ࠀ-一가-퟿]+"),
            pre_tokenizers.Digits(individual_digits=True),
        ),
    ),
}
NOT_CUTTING = {
    "no steps": (None, None),
    "words with a space before": (None, pre_tokenizers.Metaspace()),
    "a space before the text": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "a prefix by the normalizer": (normalizers.Prepend("_"), steps(split(CL100K))),
    "end of line joins the next": (None, steps(split(r"\n?[^\n]+"))),
    "looks back": (None, steps(split(r"(?<!\S)\S+|\S+|\s+"))),
    "looks far ahead": (None, steps(split(r"\S+(?=\n>)\n?|\S+|\s+"))),
    "beginning of the text": (None, steps(split(r"^\S+|\S+|\s+"))),
    "punctuation joins over the end": (None, steps(split(r"[^\w ]+|\w+| +"))),
}


class Own:
    """A step that is written in Python."""

    def pre_tokenize(self, pretok: Any) -> None:
        pretok.split(lambda _, text: text.split("\n", "merged_with_previous"))


CORPUS = [
    "> so\n> it is\n",
    "[round 1, agent 0]\nreflection:\n> x\n\n> y",
    ".\n> ):\n} \n\n\n a\n b 12 345's",
]


def tokenizer_of(normalizer: Any, pre_tokenizer: Any, added: tuple[AddedToken, ...] = ()) -> Any:
    backend = Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
    )
    backend.train_from_iterator(CORPUS * 9, trainer)
    backend.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


TOKENIZERS = {name: tokenizer_of(*parts) for name, parts in CUTTING.items()}
ENCODERS = {name: LineEncoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}

pieces = st.one_of(
    st.sampled_from(
        [
            "\n",
            "\n> ",
            "\n\n",
            " \n",
            "\r\n",
            "> it is",
            "[round 1, agent 0]",
            ":",
            ".",
            "'",
            "'s",
            "12",
            "é",
            "e",
        ]
    ),
    st.sampled_from(
        ["\u0301", "\u3000", "\u2028", "\u00a8", "\ufdfa", "中", "\U0001f642", "<|end|>", "\x1c", "\t"]
    ),
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=5),
)
texts = st.lists(st.lists(pieces, max_size=12).map("".join), min_size=1, max_size=4)


@settings(max_examples=300)
@given(texts=texts, whether=st.booleans())
def test_line_by_line_gives_the_tokens_of_the_whole(texts: list[str], whether: bool) -> None:
    for name, tokenizer in TOKENIZERS.items():
        encoder, memory = ENCODERS[name], LineTokens()
        assert encoder.cuts_lines, name
        for text in [*texts, "\n".join(texts)]:
            for options in ({}, {"split_special_tokens": whether}):
                with remembering(memory):
                    tokens = encoder.encode(text, **options)
                assert tokens == tokenizer.encode(text, add_special_tokens=False, **options), name


@pytest.mark.parametrize("name", NOT_CUTTING)
def test_other_tokenizers_encode_the_whole(name: str) -> None:
    tokenizer = tokenizer_of(*NOT_CUTTING[name])
    encoder, memory = LineEncoder(tokenizer), LineTokens()
    assert not encoder.cuts_lines
    with remembering(memory):
        assert encoder.encode(CORPUS[1]) == tokenizer.encode(CORPUS[1], add_special_tokens=False)
    assert not memory


@pytest.mark.parametrize(
    "token", [AddedToken("<x>", lstrip=True), AddedToken("x\n>"), AddedToken("\n\n[", normalized=False)]
)
def test_an_added_token_that_reaches_over_a_lines_end_is_seen(token: AddedToken) -> None:
    normalizer, pre_tokenizer = CUTTING["qwen"]
    assert not LineEncoder(tokenizer_of(normalizer, pre_tokenizer, (token,))).cuts_lines


def test_only_new_lines_are_encoded() -> None:
    encoder, memory = ENCODERS["qwen"], LineTokens()
    with remembering(memory):
        encoder.encode("Problem:\n> one\n> two\nReply.")
        assert [line for _, line, _ in memory] == ["Problem:\n", "> one\n", "> two\n", "Reply."]
        memory[encoder, "> two\n", False] = (7,)  # it is looked up, not encoded again
        assert encoder.encode("> two\n> three") == [7, *encoder.encode("> three")]
    assert (encoder, "> three", False) in memory
    with remembering(memory):  # another tokenizer may share the memory, not the tokens
        assert ENCODERS["gpt2"].encode("> two\n") == TOKENIZERS["gpt2"].encode("> two\n")


def test_a_step_written_in_python_could_do_anything() -> None:
    tokenizer = tokenizer_of(*CUTTING["gpt2"])
    custom: Any = pre_tokenizers.PreTokenizer
    tokenizer.backend_tokenizer.pre_tokenizer = custom.custom(Own())
    assert not LineEncoder(tokenizer).cuts_lines


def test_without_a_memory_or_with_other_options_the_text_is_encoded_whole() -> None:
    tokenizer, encoder, memory = TOKENIZERS["qwen"], ENCODERS["qwen"], LineTokens()
    text = "> one\n> two\n"
    assert encoder.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    with remembering(memory):
        assert encoder.encode(text, truncation=True, max_length=3) == encoder.encode(text)[:3]
        memory.clear()
        tokenizer(text, truncation=True, max_length=3)  # the library leaves its backend cutting texts off
        assert tokenizer.backend_tokenizer.truncation is not None
        assert len(encoder.encode(text)) > 3
    assert not memory


def test_the_turns_of_a_conversation_share_what_they_show() -> None:
    async def play() -> tuple[list[list[int]], list[list[int]], LineTokens]:
        renderer = tiny_renderer()
        protocol = round_robin_protocol(2)
        coordinator = MultiAgentCoordinator("What is\n\n 2 + 2?", 2, protocol)
        envs = [MultiAgentConversationEnv(agent_id, coordinator, renderer) for agent_id in range(2)]
        shown: list[list[int]] = []
        expected: list[list[int]] = []

        async def seat(env: MultiAgentConversationEnv) -> None:
            observation, stop = await env.initial_observation()  # pyright: ignore[reportAssignmentType]
            while observation.length:
                shown.append(observation.to_ints())
                assert env._asked is not None
                expected.append(build_prompt(renderer, protocol.messages(env._asked.prompt)).to_ints())
                reply = honest(f"It is\n> 4 of {env.agent_id}.\nSurely").text
                tokens = renderer.tokenizer.encode(reply, add_special_tokens=False)
                observation = (await env.step([*tokens, *stop])).next_observation

        await asyncio.gather(*map(seat, envs))
        return shown, expected, coordinator.line_tokens

    shown, expected, memory = asyncio.run(play())
    assert len(shown) == 4
    assert shown == expected
    assert "> Surely\n" in {line for _, line, _ in memory}


def test_options_that_cannot_be_remembered_reach_the_tokenizer() -> None:
    tokenizer = TOKENIZERS["qwen"]
    guarded = GuardedTokenizer(tokenizer)
    options: dict[str, Any] = {"text_pair": ["> two"], "is_split_into_words": True}  # a list has no hash
    expected = tokenizer.encode(["> one"], add_special_tokens=True, **options)
    assert guarded.encode(["> one"], **options) == expected  # pyright: ignore[reportArgumentType]
