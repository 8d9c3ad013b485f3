from hypothesis import given
from hypothesis import strategies as st

from viva.conversation.messages import did_you_mean, text_table, unknown

NAMES = ["majority", "tournament", "shuffled"]
cells = st.text(st.characters(codec="ascii", exclude_categories=["C", "Z"]), max_size=8)


def test_the_nearest_known_name_is_asked_for_and_a_far_one_is_not():
    assert did_you_mean("majorty", NAMES) == " Did you mean 'majority'?"
    assert did_you_mean("xyz", NAMES) == ""


def test_an_unknown_name_is_told_with_all_that_are_allowed():
    told = unknown("reward", "turnament", iter(NAMES), also=", or a function")
    assert told == (
        "unknown reward 'turnament'; allowed: majority, tournament, shuffled, or a function. "
        "Did you mean 'tournament'?"
    )


@given(st.lists(st.tuples(cells, cells, cells), min_size=1, max_size=5))
def test_columns_of_a_table_begin_or_end_at_one_place(rows):
    widths = [max(len(row[place]) for row in rows) for place in range(3)]
    lines = text_table(rows)
    assert len(lines) == len(rows)
    for (first, *others), line in zip(rows, lines, strict=True):
        padded = line.ljust(sum(widths) + 4)
        assert padded[: widths[0]].rstrip() == first
        assert padded[widths[0] + 2 : widths[0] + 2 + widths[1]].lstrip() == others[0]
        assert padded[widths[0] + widths[1] + 4 :].strip() == others[1]
