"""Votes on solutions: read out of a ranking that was written, or made of label probabilities.

A line is read only if it consists of nothing but a ranking: letters and the words "Solution", "Agent", "Answer" or
"Proposal" before them, ``>``, ``<`` and ``=`` between them, commas or semicolons between several rankings, and
possibly a label such as "Final ranking:" or "My ranking is", a bullet or number, emphasis, and a full stop. Or it is
one entry, with one letter, of a list that is numbered 1, 2, 3, ..., best first. Prose is never searched for votes: "B
is not better than A", "I think A > B" and "Not so: A > B" are none; those with an operator between two letters are
counted as unreadable.

    line     [bullet | number] [label (":" | "is")] chain {("," | ";") chain}
    chain    name {(">" | "<" | "=") name}

In a chain, two letters stand in a relation if the operators between them do not point both ways: "A > B = C" says
A > C, but "A > B < C" says nothing about A and C.

A ballot of label probabilities has, of each pair of solutions shown in both orders, a share of one vote. An answer to a
pair is a comparison by the probabilities of the labels A, B and Tie (`viva.judging.judge`) with the score p(B) - p(A).
Of items i and j, i takes the share

    1/2 + (score(j shown first) - score(i shown first)) / 4

of one vote: the mean over the orders of its probability to be preferred, a tie counting half. A model that prefers
whatever it sees first gives 1/2 to both. A pair of which an order cannot be read has no vote. Nobody sampled the
vote, so no token of the ballot earns anything.
"""

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from string import ascii_uppercase
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pydantic import BaseModel, ConfigDict

from viva.conversation.records import Reply, ReplyStatus
from viva.judging.ballots import (
    Item,
    Outcome,
    Preference,
    SoftPreference,
    Tie,
    Vote,
    count_votes,
    divided,
    pair_of,
)

if TYPE_CHECKING:
    from viva.judging.comparison import Comparison

_OPERATORS = frozenset("<=>")
_TITLES = frozenset({"solution", "agent", "answer", "proposal"})
_LABELS = frozenset({"ranking", "rankings", "order", "preference", "preferences", "verdict"})
_LABEL_ADJECTIVES = frozenset({"my", "the", "final", "overall", "blind", "pairwise", "initial", "complete"})
_LABEL_WORDS = (
    _LABELS | _LABEL_ADJECTIVES | {"here", "is", "are", "as", "follows", "of", "solutions", "answers"}
)
"""Words that say nothing but that a ranking follows; a label is one of `_LABELS` among them."""
_MOST_VOTES = 3_000
"""A reply in which more was voted is not read further: no ballot of 26 items has more than 325 pairs."""
_LONGEST_LINE = 10_000
"""Characters of a line that may be a ranking; all pairs of 26 items, with titles, take 8,000."""
_EMPHASIS = str.maketrans("", "", "*_`$")
_START = re.compile(r"(?:#{1,6}\s++|[-+•]\s++)?+(?:([0-9]{1,3}+)[.)]\s*+)?+")
_IN_PROSE = re.compile(
    r"(?<!\w)([A-Z])\s*+[-<>=~!≥≤≠≈≻≺≽≼]++\s*+(?:(?i:solution|agent|answer|proposal)\s++)?+([A-Z])(?!\w)"
)
"""An operator between two letters, wherever it stands."""
_TOKEN = re.compile(r"\s*+([A-Za-z]++|[<>=~!≥≤≠≈≻≺≽≼-]++|[,;:])")


class RankingReply(Reply):
    """A ranking that was read."""

    preferences: tuple[SoftPreference | Preference | Tie, ...]
    """At most one vote on each pair, about agent ids or whatever the letters stood for."""
    dropped: dict[str, int]
    """Numbers of what was left out, by cause: see `parse_ranking`."""

    @property
    def status(self) -> ReplyStatus:
        """``ok`` if every vote counts that was written, or asked for by labels; ``unstructured`` without any vote."""
        if not self.preferences:
            return ReplyStatus.UNSTRUCTURED
        return ReplyStatus.REPAIRED if self.dropped else ReplyStatus.OK


class _Chain(NamedTuple):
    """Letters and the operators between them."""

    letters: list[str]
    operators: list[str]


def parse_ranking(
    text: str, letters: Mapping[str, Item], *, own: str | None = None, votes_on_own: bool = False
) -> RankingReply:
    """Read a reply, whatever it is; never raises for its text, and takes time linear in it.

    Args:
        text: The decoded reply without end-of-turn token and thinking.
        letters: What each letter stands for, in the prompt that was answered.
        own: Letter of the voter's own item, if it has one.
        votes_on_own: Whether votes on the voter's own item count.

    Returns:
        The votes, at most one per pair, and what was left out, by cause: votes with an ``unknown_alias``, votes on
        the voter's ``own`` item, ``repeated`` votes, and every vote of a ``contradiction``, be it between votes or
        within a chain that names a letter twice (counted once); lines that are ``unreadable`` in full or in part:
        with another operator such as ``>=``, with letters and nothing between them, or of a list that is not
        numbered 1, 2, 3, and lines of prose with an operator between two known letters; ``flood`` (counted once) where
        a reply votes without end, and the rest was not read.

    Raises:
        ValueError: If the letters are not single capitals for different items, or the own letter is not among them.
    """
    _check_letters(letters, own)
    dropped: Counter[str] = Counter()
    votes: list[Vote] = []
    for chain in _chains(text, letters, dropped):
        if len(votes) + dropped.total() > _MOST_VOTES:
            dropped["flood"] += 1
            break
        if len(set(chain.letters)) < len(chain.letters):
            dropped["contradiction"] += 1
            continue
        for one, other, operator in _relations(chain):
            if one not in letters or other not in letters:
                dropped["unknown_alias"] += 1
            elif operator == "=":
                votes.append(Tie(letters[one], letters[other]))
            else:
                winner, loser = (one, other) if operator == ">" else (other, one)
                votes.append(Preference(letters[winner], letters[loser]))
    excluded = [] if own is None or votes_on_own else [letters[own]]
    ballot = count_votes(votes, items=set(letters.values()), own=excluded)
    dropped.update(ballot.dropped)
    return RankingReply(preferences=ballot.votes, dropped=dict(dropped))


def _check_letters(letters: Mapping[str, Item], own: str | None) -> None:
    if not all(len(letter) == 1 and letter in ascii_uppercase for letter in letters):
        raise ValueError(f"aliases must be single capital letters from A to Z; got {list(letters)}")
    if len(set(letters.values())) < len(letters):
        raise ValueError(f"letters must stand for different items; got {dict(letters)}")
    if own is not None and own not in letters:
        raise ValueError(f"the own letter must be one of {list(letters)}, or None; got {own!r}")


def _chains(text: str, letters: Mapping[str, Item], dropped: Counter[str]) -> Iterator[_Chain]:
    """All rankings of a reply in order, those of numbered lists included."""
    entries: list[str] = []
    for raw in text.splitlines():
        line = raw.translate(_EMPHASIS).strip()
        if not line:
            continue
        number, content = (None, line) if len(line) == 1 else _split_start(line)
        tokens = None if len(line) == 1 else _tokens(content)  # one character ranks nothing
        letter = None if number is None or tokens is None else _single_letter(tokens)
        if letter is not None and number == len(entries) + 1:
            entries.append(letter)
            continue
        yield from _close_list(entries)
        entries = []
        if letter is not None:
            if number == 1:
                entries = [letter]
            else:
                dropped["unreadable"] += 1
        elif tokens is not None and (read := _read_line(tokens)) is not None:
            chains, all_read = read
            if not all_read:
                dropped["unreadable"] += 1
            yield from chains
        elif any(found[1] in letters and found[2] in letters for found in _IN_PROSE.finditer(line)):
            dropped["unreadable"] += 1
    yield from _close_list(entries)


def _close_list(entries: list[str]) -> Iterator[_Chain]:
    if len(entries) > 1:
        yield _Chain(entries, [">"] * (len(entries) - 1))


def _split_start(line: str) -> tuple[int | None, str]:
    """The number that a line begins with, if any, and the line without bullet and number."""
    start = _START.match(line)
    if start is None:
        return None, line
    return None if start[1] is None else int(start[1]), line[start.end() :]


def _tokens(line: str) -> list[str] | None:
    """Words, operators and separators of a line; ``None`` if there is anything else in it, or too much."""
    line = line.rstrip(" \t.;,")
    if len(line) > _LONGEST_LINE:
        return None
    tokens: list[str] = []
    place = 0
    while place < len(line):
        found = _TOKEN.match(line, place)
        if found is None:
            return None
        tokens.append(found[1])
        place = found.end()
    return tokens


def _single_letter(tokens: Sequence[str]) -> str | None:
    names = _without_titles(tokens)
    return names[0] if len(names) == 1 and _is_letter(names[0]) else None


def _is_letter(token: str) -> bool:
    return len(token) == 1 and token in ascii_uppercase


def _without_titles(tokens: Sequence[str]) -> list[str]:
    """Tokens without the titles that stand before a letter."""
    return [
        token
        for token, following in itertools.zip_longest(tokens, tokens[1:], fillvalue="")
        if not (token.lower() in _TITLES and _is_letter(following))
    ]


def _read_line(tokens: Sequence[str]) -> tuple[list[_Chain], bool] | None:
    """Rankings of a line, and whether all of it could be read; ``None`` if it is prose, or ranks nothing."""
    label, tokens = _split_label(tokens)
    if label and not (_LABELS.intersection(label) and _LABEL_WORDS.issuperset(label)):
        return None
    tokens = _without_titles(tokens)
    if len(tokens) < 2 or not all(_is_letter(token) or not token[0].isalpha() for token in tokens):
        return None
    chains: list[_Chain] = []
    all_read = True
    for is_separator, part in itertools.groupby(tokens, key=lambda token: token in (",", ";")):
        if is_separator:
            continue
        names_and_operators = list(part)
        chain = _Chain(names_and_operators[::2], names_and_operators[1::2])
        if len(chain.letters) == len(chain.operators) + 1 > 1 and _is_chain(chain):
            chains.append(chain)
        else:
            all_read = False
    return chains, all_read


def _split_label(tokens: Sequence[str]) -> tuple[list[str], Sequence[str]]:
    """The words before a colon, or before the last "is" or "are" of words, and what comes after them."""
    if ":" in tokens:
        end = tokens.index(":")
        return [word.lower() for word in tokens[:end]] or [""], tokens[end + 1 :]
    words = [word.lower() for word in itertools.takewhile(lambda token: token[0].isalpha(), tokens)]
    end = max((place + 1 for place, word in enumerate(words) if word in ("is", "are")), default=0)
    return words[:end], tokens[end:]


def _is_chain(chain: _Chain) -> bool:
    return all(map(_is_letter, chain.letters)) and all(sign in _OPERATORS for sign in chain.operators)


def _relations(chain: _Chain) -> Iterator[tuple[str, str, str]]:
    """Every related pair of a chain without repeated letters, so at most 26 * 25 / 2 of them."""
    for i, first in enumerate(chain.letters):
        relation = "="
        for second, operator in zip(chain.letters[i + 1 :], chain.operators[i:], strict=True):
            if "=" not in (relation, operator) and relation != operator:
                break
            relation = operator if relation == "=" else relation
            yield first, second, relation


class LabelAnswer(BaseModel):
    """The answer to one pair in one order: ``first`` was shown as A."""

    model_config = ConfigDict(frozen=True)

    first: Item
    second: Item
    outcome: Outcome
    score: float | None
    """p(B) - p(A); ``None`` if it cannot be read."""
    probabilities: tuple[float, float, float] | None = None
    """p(A), p(B), p(Tie), normalised over the three labels."""
    off_set_mass: float | None = None
    """Probability of anything but the three labels."""
    was_asked: bool = True
    """Whether the policy was asked; if not, both solutions have the same words."""

    @classmethod
    def of(cls, comparison: "Comparison", first: Item, second: Item) -> "LabelAnswer":
        """A judge's comparison of two items."""
        return cls.model_validate({**asdict(comparison), "first": first, "second": second})


class LabelBallot(RankingReply):
    """A ballot that nobody wrote: one vote for every pair that could be read in both orders."""

    is_sampled: ClassVar[bool] = False

    answers: tuple[LabelAnswer, ...]
    """Both orders of every pair, from which the votes are made."""


def label_ballot(answers: Iterable[LabelAnswer]) -> LabelBallot:
    """The ballot of one voter's answers; ``dropped`` counts pairs without both orders under ``invalid``.

    Raises:
        ValueError: If an order of a pair is answered twice.
    """
    given = tuple(answers)
    by_order = {(answer.first, answer.second): answer for answer in given}
    if len(by_order) < len(given):
        raise ValueError(
            f"each order of a pair has one answer; got {len(given)} answers to {len(by_order)} orders. Give each once."
        )
    votes: list[Vote] = []
    pairs = dict.fromkeys(frozenset(order) for order in by_order)
    for one, other in (sorted(pair, key=str) for pair in pairs):
        there, back = by_order.get((one, other)), by_order.get((other, one))
        if there is not None and back is not None and there.score is not None and back.score is not None:
            votes.append(divided(one, other, 0.5 + (back.score - there.score) / 4.0))
    missing = len(pairs) - len({pair_of(vote) for vote in votes})
    return LabelBallot(
        preferences=tuple(votes), dropped={"invalid": missing} if missing else {}, answers=given
    )
