"""Counts in words."""

import pytest

from viva.conversation.messages import counted


@pytest.mark.parametrize(
    ("number", "words", "told"),
    [
        (0, ("step",), "0 steps"),
        (1, ("step",), "1 step"),
        (1200, ("step",), "1,200 steps"),
        (1, ("reply", "replies"), "1 reply"),
        (2, ("reply", "replies"), "2 replies"),
    ],
)
def test_a_noun_stands_in_the_plural_for_everything_but_one(
    number: int, words: tuple[str, ...], told: str
) -> None:
    assert counted(number, *words) == told
