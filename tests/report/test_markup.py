"""Text in HTML: what goes in is what a reader sees, and nothing in it acts."""

import html
import math
import unicodedata
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.view.markup import MAX_TEXT_CHARS, data, escape, format_number, text_block

ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=()))


class Tags(HTMLParser):
    """Collects the tags and the text of a fragment."""

    def __init__(self, fragment: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.feed(fragment)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


@given(ANY_TEXT)
def test_no_text_can_open_a_tag_or_leave_an_attribute(text: str) -> None:
    assert not set("<>\"'") & set(escape(text))
    assert Tags(f'<p title="{escape(text)}">{escape(text)}</p>').tags == ["p"]


@given(ANY_TEXT)
def test_escaped_text_is_utf8_without_invisible_controls(text: str) -> None:
    shown = html.unescape(escape(text))
    shown.encode("utf-8")
    assert all(unicodedata.category(char) not in ("Cc", "Cs") or char in "\n\t" for char in shown)
    assert not set("\u202e\u2066\u200f\u061c") & set(shown)


@given(
    st.text(
        alphabet=st.characters(codec="ascii", exclude_categories=("Cc",))
        | st.sampled_from("\n\t\u00e9\u4e2d")
    )
)
def test_ordinary_text_comes_through_unchanged(text: str) -> None:
    assert html.unescape(escape(text)) == text


def test_a_reply_of_a_megabyte_is_shortened_and_the_page_says_by_how_much() -> None:
    text = "a" * 500_000 + "MIDDLE" + "z" * 500_000
    block = text_block(text)
    assert len(block) < 1.2 * MAX_TEXT_CHARS
    assert "MIDDLE" not in block
    kept = Tags(block).text.partition("[")[0], Tags(block).text.rpartition("]")[2]
    assert f"[{len(text) - len(kept[0]) - len(kept[1]):,} characters left out]" in block


@given(st.text(max_size=50))
def test_a_short_text_is_kept_whole(text: str) -> None:
    assert text_block(text) == f"<pre>{escape(text)}</pre>"


@given(st.floats(-1e300, 1e300))
def test_a_number_is_shown_to_three_digits_or_better_and_carried_exactly(value: float) -> None:
    shown = float(format_number(value).replace(",", ""))
    assert shown == pytest.approx(value, rel=6e-3)
    assert f'value="{value!r}"' in data(value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (1, "1"),
        (100, "100"),
        (0.41, "0.41"),
        (-0.5, "-0.5"),
        (12.3456, "12.35"),
        (12345.6, "12,346"),
        (131072, "131,072"),
        (0.0003, "0.0003"),
        (1e-7, "1e-07"),
        (1e20, "1e+20"),
        (math.nan, "nan"),
    ],
)
def test_numbers_are_written_for_people(value: float, shown: str) -> None:
    assert format_number(value) == shown
