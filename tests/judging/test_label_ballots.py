"""Ballots of label probabilities: shares of votes from both orders of every pair."""

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.conversation.records import ReplyStatus, Turn
from viva.judging.ballots import (
    Item,
    Preference,
    SoftPreference,
    Tie,
    agreement,
    count_votes,
    divided,
    majority,
    map_vote,
    merged,
    pair_of,
)
from viva.judging.bradley_terry import Duel, fit_bradley_terry
from viva.judging.comparison import Comparison, Outcome, label_comparisons
from viva.judging.ranking import LabelAnswer, LabelBallot, label_ballot
from viva.judging.records import ConversationRecord

SCORES = st.one_of(st.none(), st.floats(-1.0, 1.0))


def answer(first: Item, second: Item, score: float | None) -> LabelAnswer:
    outcome = Outcome.INVALID if score is None else Outcome.A if score < 0 else Outcome.B
    return LabelAnswer(first=first, second=second, outcome=outcome, score=score)


def ballot_of(scores: Mapping[tuple[Item, Item], float | None]) -> LabelBallot:
    return label_ballot(answer(*order, score) for order, score in scores.items())


@st.composite
def answered(draw: st.DrawFn, num_items: int = 4) -> dict[tuple[Item, Item], float | None]:
    """Scores of both orders of all pairs."""
    return {order: draw(SCORES) for order in itertools.permutations(range(num_items), 2)}


def share_of(ballot: LabelBallot, item: Item, other: Item) -> float | None:
    for vote in ballot.preferences:
        if pair_of(vote) == {item, other}:
            if isinstance(vote, Tie):
                return 0.5
            assert isinstance(vote, SoftPreference)
            return vote.share if vote.winner == item else 1.0 - vote.share
    return None


@given(answered())
def test_a_vote_is_the_mean_of_both_orders(scores) -> None:
    ballot = ballot_of(scores)
    for one, other in itertools.combinations(range(4), 2):
        there, back = scores[one, other], scores[other, one]
        share = share_of(ballot, one, other)
        if there is None or back is None:
            assert share is None
        else:
            assert share == pytest.approx(((1 - there) / 2 + (1 + back) / 2) / 2, abs=1e-6)


@given(answered())
def test_there_is_one_vote_per_pair_and_every_other_pair_is_counted(scores) -> None:
    ballot = ballot_of(scores)
    counted = count_votes(ballot.preferences, items=range(4))
    assert counted.votes == ballot.preferences
    assert len(ballot.preferences) + sum(ballot.dropped.values()) == 6


@given(answered(), st.permutations(range(4)))
def test_relabelling_permutes_the_votes(scores, names) -> None:
    renamed = {(names[one], names[other]): score for (one, other), score in scores.items()}
    expected = {map_vote(vote, lambda item: names[item]) for vote in ballot_of(scores).preferences}
    assert set(ballot_of(renamed).preferences) == expected


@given(answered(), st.randoms())
def test_the_order_of_the_answers_changes_no_vote(scores, rng) -> None:
    shuffled = list(scores.items())
    rng.shuffle(shuffled)
    assert set(ballot_of(dict(shuffled)).preferences) == set(ballot_of(scores).preferences)


@given(st.floats(-1.0, 1.0))
def test_a_preference_for_what_is_shown_first_is_no_vote(score) -> None:
    ballot = ballot_of(dict.fromkeys(itertools.permutations(range(4), 2), score))
    assert all(isinstance(vote, Tie) for vote in ballot.preferences)
    assert ballot.status is ReplyStatus.OK


def test_what_cannot_be_read_is_dropped_and_counted() -> None:
    ballot = ballot_of({(0, 1): -0.2, (1, 0): None, (0, 2): -1.0, (2, 0): 1.0})
    assert ballot.preferences == (SoftPreference(0, 2, 1.0),)
    assert (ballot.dropped, ballot.status) == ({"invalid": 1}, ReplyStatus.REPAIRED)
    nothing = ballot_of({(0, 1): None, (1, 0): None})
    assert (nothing.preferences, nothing.status) == ((), ReplyStatus.UNSTRUCTURED)
    with pytest.raises(ValueError, match="each order of a pair has one answer; got 2 answers to 1 orders"):
        label_ballot([answer(0, 1, 0.1), answer(0, 1, 0.1)])


@given(answered())
def test_a_ballot_is_read_back_from_the_record_as_it_was(scores) -> None:
    stages: dict[Item, Item] = {0: ("initial", 0), 1: ("revised", 0), 2: ("initial", 1), 3: 3}
    named = {(stages[one], stages[other]): score for (one, other), score in scores.items()}
    ballot = ballot_of(named)
    turn = Turn(
        agent_id=0,
        round_index=1,
        segment="verdict",
        prompt="",
        text="",
        response=ballot,
        status=ballot.status,
    )
    stored = ConversationRecord(question="?", turns=(turn,)).model_dump_json()
    (again,) = ConversationRecord.model_validate_json(stored).turns
    assert isinstance(again.response, LabelBallot)
    assert again.response == ballot
    assert label_ballot(again.response.answers) == ballot
    assert not again.response.is_sampled


@given(st.floats(0.0, 1.0))
def test_a_divided_vote_is_the_same_seen_from_both_sides(share) -> None:
    assert divided(0, 1, share) == divided(1, 0, 1.0 - share)


@given(answered(3), st.floats(0.1, 5.0))
def test_votes_enter_the_fit_as_fractions(scores, precision) -> None:
    votes = ballot_of(scores).preferences
    pairs = list(itertools.combinations(range(3), 2))
    duels = [
        Duel(first=one, second=other, share=share)
        for one, other in pairs
        if (share := share_of(ballot_of(scores), one, other)) is not None
    ]
    found = fit_bradley_terry(votes, range(3), prior_precision=precision)
    expected = fit_bradley_terry(duels, range(3), prior_precision=precision)
    for item in range(3):
        assert found.strengths[item] == pytest.approx(expected.strengths[item], abs=1e-7)


def test_a_whole_vote_is_a_divided_one_of_share_one() -> None:
    soft, whole = [SoftPreference(0, 1, 1.0)], [Preference(0, 1)]
    assert fit_bradley_terry(soft, [0, 1]) == fit_bradley_terry(whole, [0, 1])
    assert majority(soft) == majority(whole)


def test_the_majority_adds_up_shares() -> None:
    votes = [SoftPreference(0, 1, 0.9), SoftPreference(1, 0, 0.6), SoftPreference(1, 0, 0.7)]
    assert majority(votes) == {frozenset((0, 1)): Preference(0, 1)}  # 1.6 of 3
    ballots = {voter: [vote] for voter, vote in enumerate(votes)}
    assert agreement(ballots, leave_one_out=False) == {0: 1.0, 1: 0.0, 2: 0.0}


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5))
def test_divided_votes_on_what_is_one_item_become_their_mean(shares) -> None:
    votes = [divided(0, 1, share) for share in shares]
    found = merged(votes)
    if any(isinstance(vote, SoftPreference) for vote in votes):
        (vote,) = found
        share = 0.5 if isinstance(vote, Tie) else vote.share if vote.winner == 0 else 1 - vote.share
        assert share == pytest.approx(sum(shares) / len(shares), abs=2e-6)
    else:
        assert found == votes


def test_written_votes_are_not_merged() -> None:
    votes = [Preference(0, 1), Preference(1, 0), Tie(0, 1)]
    assert merged(votes) == votes


@pytest.mark.parametrize("share", [0.5, 0.2, 1.1, float("nan")])
def test_a_share_that_names_no_winner_is_refused(share) -> None:
    with pytest.raises(ValueError, match="the winner's share must be above 1/2 and at most 1; got"):
        SoftPreference(0, 1, share)


def test_the_answers_are_comparisons_again() -> None:
    comparison = Comparison(
        first=0, second=1, outcome=Outcome.A, score=-0.5, probabilities=(0.7, 0.2, 0.1), off_set_mass=0.3
    )
    there = LabelAnswer.of(comparison, ("initial", 2), ("revised", 2))
    assert label_comparisons(label_ballot([there])) == [comparison]
