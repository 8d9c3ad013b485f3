"""Token ranges of pieces of text, against an oracle that knows the bytes of every token."""

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from viva.conversation.rendering import load_renderer, read_reply
from viva.rewards.credit import token_ranges, token_texts
from viva.testing import tiny_renderer, tiny_tokenizer

BYTES = tiny_renderer("qwen3_instruct")
ROLES = tiny_renderer("role_colon")


def _merging(backend, decoder, pre_tokenizer, alphabet=()):
    tokenizer = Tokenizer(backend)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    corpus = ["Critique of B: wrong, 3+4=7. Critique of C: right. Critique of D: née 日本語 😀😀 x"] * 3
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=list(alphabet), show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_special_tokens(["<|end|>", "<|im_start|>", "<|im_end|>"])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )
    return load_renderer(fast, model_name="scripted/merging", renderer_name="qwen3_instruct")


MERGED = _merging(
    models.BPE(),
    decoders.ByteLevel(),
    pre_tokenizers.ByteLevel(add_prefix_space=False),
    sorted(pre_tokenizers.ByteLevel.alphabet()),
)
"""Byte-level with merges: a token is up to a whole phrase, a character up to four tokens."""
SPACED = _merging(
    models.BPE(), decoders.Metaspace(), pre_tokenizers.Metaspace(prepend_scheme="first"), "\nk<>/thin"
)
"""Its first token is written without its leading space."""

END = BYTES.tokenizer.convert_tokens_to_ids("<|im_end|>")


def encode(renderer, text):
    return renderer.tokenizer.inner.encode(text, add_special_tokens=False)


def spelled(renderer, pieces, *, end=True):
    """One of the many spellings of a text: its pieces encoded on their own."""
    tokens = [token for piece in pieces for token in encode(renderer, piece)]
    return tokens + [renderer.tokenizer.convert_tokens_to_ids("<|im_end|>")] * end


def first_characters(renderer, tokens, text):
    """For every token the index of the character its first byte belongs to."""
    owner = [index for index, letter in enumerate(text) for _ in letter.encode()]
    starts, place = [], 0
    for token in tokens:
        starts.append(owner[place])
        place += len(renderer.tokenizer.convert_ids_to_tokens(token))  # one letter per byte
    return starts


words = st.text(alphabet="abB: \n.né日😀", min_size=1, max_size=6)
pieces_of_text = st.lists(words, min_size=1, max_size=6)


@settings(max_examples=150)
@given(pieces_of_text, st.data())
def test_a_token_belongs_to_the_span_of_its_first_character(pieces, data):
    text = "".join(pieces)
    if not text.strip():
        return
    body = spelled(MERGED, pieces, end=False)
    tokens = [*body, MERGED.tokenizer.convert_tokens_to_ids("<|im_end|>")]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), min_size=2, max_size=5)))
    ranges = list(pairwise(cuts))
    starts = first_characters(MERGED, body, text)
    expected = [[index for index, start in enumerate(starts) if low <= start < high] for low, high in ranges]
    found = token_ranges(MERGED, tokens, text, ranges)
    assert [list(range(*span)) if span else [] for span in found] == expected


@given(pieces_of_text, st.booleans())
def test_neighbouring_spans_share_no_token_and_lose_none(pieces, ended):
    text = "".join(pieces)
    tokens = spelled(MERGED, pieces, end=ended)
    if not text.strip():
        return
    ranges = [(place, place + 1) for place in range(len(text))]
    found = [span for span in token_ranges(MERGED, tokens, text, ranges) if span]
    assert [index for span in found for index in range(*span)] == list(range(len(tokens) - ended))


@pytest.mark.parametrize("renderer", [BYTES, MERGED, SPACED], ids=["bytes", "merged", "spaced"])
@pytest.mark.parametrize(
    "thoughts", ["", "<think>\nCritique of B: ok\n</think>\n\n"], ids=["plain", "thinking"]
)
@pytest.mark.parametrize("ended", [True, False], ids=["ended", "cut"])
def test_critiques_are_found_in_what_read_reply_returns(renderer, thoughts, ended):
    reply = "Critique of B: ok\nCritique of C: ok"
    tokens = spelled(renderer, [thoughts + reply] if thoughts else [reply], end=ended)
    text, _ = read_reply(renderer, tokens)
    start = text.index("Critique of C")
    spans = token_ranges(renderer, tokens, text, [(text.index("Critique"), start), (start, len(text))])
    first, second = (renderer.tokenizer.decode(tokens[slice(*span)]) for span in spans)
    assert second.strip() == "Critique of C: ok"
    assert first.strip() == "Critique of B: ok"
    assert spans[1][1] == len(tokens) - ended  # the last one, not the one in the thoughts


def test_a_reply_that_was_stopped_by_a_text_is_located_before_it():
    tokens = encode(ROLES, "Critique of B: ok.\n\nUser: and now")
    text, ended = read_reply(ROLES, tokens)
    assert (text, ended) == ("Critique of B: ok.", True)
    assert token_ranges(ROLES, tokens, text, [(0, len(text))]) == [(0, len(text))]


def test_an_end_of_text_token_is_a_stop_too():
    tokens = [*encode(ROLES, " yes"), ROLES.tokenizer.eos_token_id]
    text, _ = read_reply(ROLES, tokens)
    assert token_ranges(ROLES, tokens, text, [(0, len(text))]) == [(len(" yes") - len(text), len(" yes"))]


def test_role_colon_replies_end_at_another_end_of_text_that_the_model_has_too():
    renderer = load_renderer(
        tiny_tokenizer("llama3", ["<tool_call>"]), model_name="x/y", renderer_name="role_colon"
    )
    other, tool = renderer.tokenizer.convert_tokens_to_ids(["<|eot_id|>", "<tool_call>"])
    tokens = [*encode(renderer, " yes"), other]
    assert read_reply(renderer, tokens) == ("yes", True)
    assert token_ranges(renderer, tokens, "yes", [(0, 3)]) == [(1, 4)]
    assert read_reply(renderer, [*encode(renderer, " yes"), tool]) == (" yes<tool_call>", False)


def test_the_parts_of_one_character_stay_together():
    tokens = encode(BYTES, "a😀b")
    assert token_ranges(BYTES, tokens, "a😀b", [(0, 1), (1, 2), (2, 3)]) == [(0, 1), (1, 5), (5, 6)]


def test_a_range_inside_one_token_has_none():
    tokens = encode(MERGED, "Critique of B: wrong")
    assert len(tokens) < len("Critique")
    assert token_ranges(MERGED, tokens, "Critique of B: wrong", [(1, 2), (3, 3)]) == [None, None]


@pytest.mark.parametrize(
    "text",
    ["other", "first half", "", " \n", "the whole and more than was sampled, by far"],
    ids=["absent", "not-last", "empty", "blank", "longer"],
)
def test_a_text_that_is_not_where_it_must_be_has_no_span(text):
    tokens = spelled(BYTES, ["first half, second half"])
    assert token_ranges(BYTES, tokens, text, [(0, len(text))]) == [None]


def test_bytes_that_are_no_text_have_a_span_or_none_but_never_a_wrong_one():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    broken = [token for token in range(len(letters)) if BYTES.tokenizer.decode([token]) == "\ufffd"]
    tokens = [*encode(BYTES, "ab"), *broken[:6], *encode(BYTES, "cd"), END]
    text, _ = read_reply(BYTES, tokens)
    (span,) = token_ranges(BYTES, tokens, text, [(len(text) - 1, len(text))])
    assert span in (None, (len(tokens) - 2, len(tokens) - 1))
    (span,) = token_ranges(BYTES, tokens, text, [(0, 2)])
    assert span in (None, (0, 2))


def test_a_range_outside_the_text_is_refused():
    with pytest.raises(ValueError, match=r"range must lie in the text's 2 characters; got \[0, 3\)"):
        token_ranges(BYTES, encode(BYTES, "ab"), "ab", [(0, 3)])


@settings(max_examples=30)
@given(st.lists(st.integers(0, 255), max_size=40))
def test_any_ids_whatsoever_raise_nothing(ids):
    text, _ = read_reply(MERGED, [*ids])
    spans = token_ranges(MERGED, ids, text, [(0, len(text))])
    assert len(spans) == 1


@pytest.mark.parametrize("renderer", [BYTES, MERGED, SPACED], ids=["bytes", "merged", "spaced"])
@given(st.text(max_size=30))
def test_the_texts_of_all_tokens_are_the_text(renderer, text):
    tokens = encode(renderer, text)
    texts = token_texts(renderer.tokenizer, tokens)
    assert len(texts) == len(tokens)
    assert "".join(texts) == renderer.tokenizer.decode(tokens)


class Pieces:
    """A tokenizer whose token ``i`` is the ``i``-th of some bytes."""

    def __init__(self, *pieces):
        self.pieces = pieces

    def decode(self, tokens):
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        ([b"\xf0", b"\x9f", b"\x98", b"\x80", b"c"], ["", "", "", "😀", "c"]),
        ([b"a\xf0", b"\x9f\x98", b"\x80b", b"c"], ["a", "", "😀b", "c"]),
        ([b"ab\xe6\x97", b"\xa5", b"\xe6", b"\x9c\xac"], ["ab", "日", "", "本"]),
        ([b"\xff", b"a", b"b"], ["\ufffd", "a", "b"]),
        ([b"a", b"b\xf0\x9f"], ["a", "b\ufffd"]),
    ],
    ids=["a byte a token", "begun beside a letter", "three bytes", "never finished", "cut"],
)
def test_a_character_that_tokens_leave_unfinished_begins_where_its_first_byte_does(pieces, texts):
    found = token_texts(Pieces(*pieces), range(len(pieces)))
    assert found == texts


def test_a_reply_that_is_cut_within_a_character_is_located_before_it():
    tokens = encode(BYTES, "ab 😀")[:-1]
    text, _ = read_reply(BYTES, tokens)
    assert text == "ab \ufffd"
    assert token_ranges(BYTES, tokens, text, [(0, 1), (1, 2)]) == [(0, 1), (1, 2)]


def test_time_grows_with_the_reply_and_not_with_its_square():
    def seconds(length):
        tokens = encode(BYTES, "é" * (length // 2))
        start = time.process_time()
        assert token_ranges(BYTES, tokens, "é" * (length // 2), [(0, 1)]) == [(0, 2)]
        return time.process_time() - start

    seconds(100)
    assert seconds(4000) < 8 * seconds(1000) + 0.05
