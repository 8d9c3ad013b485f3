import itertools
import random
from collections.abc import Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from timing import seconds

from viva.conversation.records import ReplyStatus
from viva.judging.ballots import Item, Preference, Tie, Vote
from viva.judging.ranking import RankingReply, parse_ranking

LETTERS: dict[str, Item] = {letter: place for place, letter in enumerate("ABCD")}

A_B, B_A, A_C, B_C, C_B = (Preference(one, other) for one, other in ((0, 1), (1, 0), (0, 2), (1, 2), (2, 1)))


def votes(text: str, **options: str | bool) -> set[Vote]:
    ballot = parse_ranking(text, LETTERS, **options)  # pyright: ignore[reportArgumentType]
    assert len(set(ballot.preferences)) == len(ballot.preferences)
    return set(ballot.preferences)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A > B", {A_B}),
        ("A < B", {B_A}),
        ("B > A", {B_A}),
        ("A = B", {Tie(0, 1)}),
        ("A>B", {A_B}),
        ("  A   >  B  ", {A_B}),
        ("A > B > C", {A_B, A_C, B_C}),
        ("C < B < A", {A_B, A_C, B_C}),
        ("A > B = C", {A_B, A_C, Tie(1, 2)}),
        ("A = B > C", {Tie(0, 1), A_C, B_C}),
        ("A = B = C", {Tie(0, 1), Tie(1, 2), Tie(0, 2)}),
        ("A > B < C", {A_B, C_B}),
        ("A > B = C < D", {A_B, A_C, Tie(1, 2), Preference(3, 1), Preference(3, 2)}),
        ("A > B, C > B", {A_B, C_B}),
        ("A > B; B = C.", {A_B, Tie(1, 2)}),
        ("Ranking: A > B", {A_B}),
        ("RANKING:A>B", {A_B}),
        ("Final ranking: A > B.", {A_B}),
        ("My final ranking: A > B", {A_B}),
        ("My ranking is: A > B", {A_B}),
        ("My ranking is A > B.", {A_B}),
        ("**My final ranking is:** A > B = C", {A_B, A_C, Tie(1, 2)}),
        ("Here is my ranking of the solutions: A > B", {A_B}),
        ("The rankings are as follows: A > B; A > C", {A_B, A_C}),
        ("**Ranking:** A > B", {A_B}),
        ("**Ranking**: **A** > **B**", {A_B}),
        ("## Ranking: A > B", {A_B}),
        ("`A > B`", {A_B}),
        ("$A > B$", {A_B}),
        ("- A > B", {A_B}),
        ("* A > B\n* B > C", {A_B, B_C}),
        ("1. A > B\n2. B > C", {A_B, B_C}),
        ("Solution A > Solution B", {A_B}),
        ("Agent A > agent B = answer C", {A_B, A_C, Tie(1, 2)}),
        ("A is right. B is wrong.\nRanking: A > B", {A_B}),
        ("A > B\r\nB > C\r\n", {A_B, B_C}),
        ("A\u00a0> B", {A_B}),
    ],
)
def test_rankings_are_read(text: str, expected: set[Vote]) -> None:
    assert votes(text) == expected
    assert parse_ranking(text, LETTERS).status is ReplyStatus.OK


@pytest.mark.parametrize(
    "text",
    [
        "1. A\n2. B\n3. C",
        "1) A\n2) B\n3) C",
        "1. **A**\n\n2. Solution B\n3. C.",
        "Ranking:\n1. A\n2. B\n3. C",
        "- 1. A\n- 2. B\n- 3. C",
    ],
)
def test_a_numbered_list_ranks_best_first(text: str) -> None:
    assert votes(text) == {A_B, A_C, B_C}


def test_a_list_that_begins_anew_is_another_list() -> None:
    assert votes("1. A\n2. B\n1. B\n2. C") == {A_B, B_C}


@pytest.mark.parametrize("text", ["1. A", "1. A\nis right\n2. B", "1. A = B"])
def test_one_entry_ranks_nothing(text: str) -> None:
    assert votes(text) <= {Tie(0, 1)}
    assert not any(isinstance(vote, Preference) for vote in votes(text))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "A",
        "Ranking:",
        "Ranking: A",
        "B is not better than A",
        "A is worse; B is better",
        "a > b",
        "A > 3",
        "A1 > B2",
        "AA > BB",
        "A &gt; B",
        "With E > M it follows.",
        "x = y > z",
        "Solution > Agent",
        "A over B",
    ],
)
def test_prose_is_never_a_vote(text: str) -> None:
    ballot = parse_ranking(text, LETTERS)
    assert ballot.preferences == ()
    assert ballot.dropped == {}
    assert ballot.status is ReplyStatus.UNSTRUCTURED


@pytest.mark.parametrize(
    "text",
    [
        "A >= B",
        "A <= B",
        "A >> B",
        "A == B",
        "A != B",
        "A ~ B",
        "A -> B",
        "A => B",
        "A ≥ B",
        "A > B >= C",
        "A > B >",
        "> A > B",
        "A > > B",
        "A B",
        "Ranking: B, D, A",
        "Ranking: A > B: C",
        "2. A",
        "1. A\n3. B",
        "I think A > B",
        "A > B is wrong",
        "A > B because it is clearer",
        "Not so: A > B",
        "Wrong ranking: A > B",
        "My ranking is not: A > B",
        "This is not my ranking: A > B",
        "My ranking is not A > B",
        "(A > B)",
        '"A > B"',
        "The A > B",
        "if A > B:",
        "I prefer Solution A > Solution B, clearly",
    ],
)
def test_what_looks_like_a_ranking_and_is_none_is_counted(text: str) -> None:
    ballot = parse_ranking(text, LETTERS)
    assert ballot.preferences == ()
    assert ballot.dropped == {"unreadable": 1}


@pytest.mark.parametrize(
    ("text", "expected", "dropped"),
    [
        ("A > B, C >= D", {A_B}, {"unreadable": 1}),
        ("A > Z > B", {A_B}, {"unknown_alias": 2}),
        ("A > B\nB < A", {A_B}, {"repeated": 1}),
        ("A > B\nB > A\nA > C", {A_C}, {"contradiction": 2}),
        ("A > B\nA > A", {A_B}, {"contradiction": 1}),
        ("A > B > A\nB > C", {B_C}, {"contradiction": 1}),
        ("1. A\n2. B\n3. A\nB > C", {B_C}, {"contradiction": 1}),
    ],
)
def test_what_is_dropped_is_counted_by_cause(text: str, expected: set[Vote], dropped: dict[str, int]) -> None:
    ballot = parse_ranking(text, LETTERS)
    assert set(ballot.preferences) == expected
    assert ballot.dropped == dropped
    assert ballot.status is ReplyStatus.REPAIRED


def test_votes_on_the_own_solution_count_only_where_allowed() -> None:
    ballot = parse_ranking("A > B > C", LETTERS, own="B")
    assert ballot.preferences == (A_C,)
    assert ballot.dropped == {"own": 2}
    assert votes("A > B > C", own="B", votes_on_own=True) == {A_B, A_C, B_C}


def test_letters_may_stand_for_first_and_revised_solutions() -> None:
    letters: dict[str, Item] = {"A": ("revised", 3), "B": ("initial", 3)}
    reply = parse_ranking("A > B", letters)
    assert reply.preferences == (Preference(("revised", 3), ("initial", 3)),)
    assert RankingReply.model_validate_json(reply.model_dump_json()) == reply


@pytest.mark.parametrize(
    ("letters", "own", "message"),
    [
        ({"a": 0}, None, r"single capital letters from A to Z; got \['a'\]"),
        ({"AB": 0}, None, r"got \['AB'\]"),
        ({"A": 0, "B": 0}, None, r"different items; got \{'A': 0, 'B': 0\}"),
        ({"A": 0}, "C", r"one of \['A'\], or None; got 'C'"),
    ],
)
def test_impossible_letters_are_refused(letters: Mapping[str, Item], own: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_ranking("", letters, own=own)


@st.composite
def expressions(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    order = draw(st.permutations("ABCD"))[: draw(st.integers(2, 4))]
    size = len(order) - 1
    return order, draw(st.lists(st.sampled_from("<=>"), min_size=size, max_size=size))


def written(order: list[str], signs: list[str]) -> str:
    return order[0] + "".join(f" {sign} {letter}" for sign, letter in zip(signs, order[1:], strict=True))


@given(expressions())
def test_a_chain_written_backwards_says_the_same(chain: tuple[list[str], list[str]]) -> None:
    order, signs = chain
    mirror = {"<": ">", ">": "<", "=": "="}
    backwards = written(order[::-1], [mirror[sign] for sign in reversed(signs)])
    assert votes(backwards) == votes(written(order, signs))


@given(expressions())
def test_a_chain_says_what_follows_from_its_neighbours(chain: tuple[list[str], list[str]]) -> None:
    order, signs = chain
    expected: set[Vote] = set()
    for i, j in itertools.combinations(range(len(order)), 2):
        between = set(signs[i:j]) - {"="}
        one, other = LETTERS[order[i]], LETTERS[order[j]]
        if not between:
            expected.add(Tie(one, other))
        elif len(between) == 1:
            expected.add(Preference(one, other) if between == {">"} else Preference(other, one))
    assert votes(written(order, signs)) == expected


@given(expressions(), st.permutations("ABCD"))
def test_what_a_letter_stands_for_permutes_the_votes(
    chain: tuple[list[str], list[str]], names: list[str]
) -> None:
    rename = dict(zip("ABCD", names, strict=True))
    text = written(*chain)
    renamed = "".join(rename.get(character, character) for character in text)
    aliases = {rename[letter]: item for letter, item in LETTERS.items()}
    assert set(parse_ranking(renamed, aliases).preferences) == votes(text)


@given(st.lists(expressions(), min_size=1, max_size=4), st.integers(1, 5), st.randoms(use_true_random=False))
def test_repeating_and_shuffling_lines_changes_no_vote(
    chains: list[tuple[list[str], list[str]]], times: int, rng: random.Random
) -> None:
    lines = [written(*chain) for chain in chains]
    stuffed = lines * times
    rng.shuffle(stuffed)
    assert votes("\n".join(stuffed)) == votes("\n".join(lines))


pieces = st.one_of(
    st.sampled_from([*"ABZ \n>=<-:,;.*#(", "é", "²", "\u2028", "\x00", "\ud800", "\u0661. "]),
    st.sampled_from([">=", "1. ", "2. ", "Ranking", "Solution ", "is better than"]),
)


@given(st.one_of(st.text(), st.lists(pieces, max_size=60).map("".join)))
@example("Solution " * 3 + "A > B")
@example("²\n1. A\n\uff12. B")
def test_any_text_is_read_without_raising_into_votes_about_known_items(text: str) -> None:
    ballot = parse_ranking(text, LETTERS, own="B")
    for vote in ballot.preferences:
        one, other = (vote.winner, vote.loser) if isinstance(vote, Preference) else (vote.first, vote.second)
        assert {one, other} <= {0, 2, 3}
    assert all(count > 0 for count in ballot.dropped.values())
    assert ballot.status in ReplyStatus


HOSTILE = {
    "one long chain": lambda n: "A > " * (n // 4),
    "alternating": lambda n: "A > B > " * (n // 8) + "A",
    "full alphabets": lambda n: "A>B>C>D>E>F>G>H>I>J>K>L>M>N>O>P>Q>R>S>T>U>V>W>X>Y>Z\n" * (n // 52),
    "spaces": lambda n: " " * n,
    "spaces inside": lambda n: "A" + " " * n + "> B",
    "stops": lambda n: "A > B" + ". " * (n // 2),
    "hashes": lambda n: "#" * n,
    "stars": lambda n: "*" * n + "A > B",
    "lines": lambda n: "1. A\n" * (n // 5),
    "bullets": lambda n: "- " * (n // 2),
    "titles": lambda n: "Solution " * (n // 9) + "A > B",
    "commas": lambda n: "A > B," * (n // 6),
    "colons": lambda n: "ranking:" * (n // 8),
    "operators": lambda n: "A " + ">" * n + " B",
    "letters": lambda n: "A" * n,
    "digits": lambda n: "1" * n,
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_text_takes_linear_time(name: str) -> None:
    texts = [HOSTILE[name](size) for size in (10_000, 80_000)]
    small, large = (seconds(parse_ranking, text, LETTERS) for text in texts)
    assert large < 24 * small + 0.02
