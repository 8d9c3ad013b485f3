"""The text of a sample, handed out while it is drawn."""

from hypothesis import given
from hypothesis import strategies as st
from tiny_engine import EOS, make_tokenizer

from viva.serve.sampling import SampleText

TOKENIZER = make_tokenizer()
TEXTS = st.text(st.sampled_from("abé中\U0001f642 \n"), max_size=30)


def pieces_of(tokens: list[int], stops: list[str]) -> list[str]:
    text = SampleText(TOKENIZER, {EOS}, stops)
    return [*(text.feed(token) for token in tokens), text.finish()]


@given(TEXTS, st.lists(st.text(st.sampled_from("abé中\n"), min_size=1, max_size=4), max_size=3))
def test_the_pieces_are_the_text_up_to_the_first_stop_string(text: str, stops: list[str]) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    ends = [text.find(stop) for stop in stops if stop in text]
    assert "".join(pieces_of(tokens, stops)) == text[: min(ends, default=len(text))]


@given(TEXTS)
def test_no_piece_holds_a_part_of_a_character(text: str) -> None:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    assert not any("\ufffd" in piece for piece in pieces_of(tokens, ["ab中"]))


@given(TEXTS, TEXTS)
def test_the_token_that_ends_a_sample_and_what_follows_are_no_text(before: str, after: str) -> None:
    first, second = (TOKENIZER.encode(each, add_special_tokens=False) for each in (before, after))
    assert "".join(pieces_of([*first, EOS, *second], [])) == before


@given(st.lists(st.integers(0, 255), max_size=40), st.sampled_from([[], ["a"], ["é", "ab"]]))
def test_bytes_that_are_no_text_are_handed_out_before_long(tokens: list[int], stops: list[str]) -> None:
    pieces = pieces_of(tokens, stops)
    assert len(pieces) == len(tokens) + 1
    if not stops and len(tokens) >= 8:
        assert any(pieces[:8])


def test_text_that_may_become_a_stop_string_waits() -> None:
    tokens = TOKENIZER.encode("say END or ENDE", add_special_tokens=False)
    pieces = pieces_of(tokens, ["ENDE"])
    assert "".join(pieces) == "say END or "
    assert pieces[4:8] == ["", "", "", "END "]
