"""Signs without answers: closed forms, indifferent to names, and each sees what it is for in simulated voters."""

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.conversation.records import ReplyStatus, Solution, Turn
from viva.judging.ballots import Preference, Tie, Vote, map_vote, mutual_votes
from viva.judging.ranking import RankingReply
from viva.judging.records import ComparisonRecord, ConversationRecord
from viva.training.signs import signs

AGENTS = range(4)
PAIRS = {voter: [(a, b) for a in AGENTS for b in AGENTS if a < b and voter not in (a, b)] for voter in AGENTS}


def ballots_by(vote: Callable[[int, int, int], Vote]) -> dict[int, list[Vote]]:
    """All voters' votes on all pairs without their own item."""
    return {voter: [vote(voter, a, b) for a, b in PAIRS[voter]] for voter in AGENTS}


def colluding(voter: int, a: int, b: int) -> Vote:
    friend = {0: 1, 1: 0}.get(voter)
    if friend == a:
        return Preference(a, b)
    return Preference(b, a) if friend == b else Tie(a, b)


def record(
    ballots: dict[int, list[Vote]],
    solutions: tuple[str, ...] = ("The answer is 1",) * 4,
    rewards: dict[int, float] | None = None,
    comparisons: tuple[ComparisonRecord, ...] = (),
    by_initial_judge: tuple[ComparisonRecord, ...] = (),
) -> ConversationRecord:
    said = [(agent, 0, "proposal", Solution(solution=text)) for agent, text in enumerate(solutions)]
    voted = [
        (voter, 1, "ranking", RankingReply(preferences=tuple(votes), dropped={}))
        for voter, votes in ballots.items()
    ]
    turns = tuple(
        Turn(
            agent_id=agent,
            round_index=index,
            segment=name,
            prompt="",
            text="",
            response=reply,
            status=ReplyStatus.OK,
        )
        for agent, index, name, reply in [*said, *voted]
    )
    return ConversationRecord(
        question="?",
        num_agents=4,
        max_rounds=2,
        turns=turns,
        rewards=rewards or {},
        comparisons=comparisons,
        initial_judge_comparisons=by_initial_judge,
    )


def test_two_colluders_among_voters_who_call_everything_a_tie_have_the_stated_excess() -> None:
    assert mutual_votes(ballots_by(colluding)) == pytest.approx(1 / 8)


def test_voters_who_all_prefer_the_same_favour_nobody() -> None:
    assert mutual_votes(ballots_by(lambda voter, a, b: Preference(a, b))) == 0.0
    assert mutual_votes({0: [Preference(1, 2)], 1: [], 2: []}) is None


@given(st.randoms(use_true_random=False))
def test_the_order_of_votes_on_a_ballot_changes_no_favour(rng: random.Random) -> None:
    ballots = ballots_by(honest(rng))
    mixed = {voter: rng.sample(votes, len(votes)) for voter, votes in ballots.items()}
    assert mutual_votes(mixed) == pytest.approx(mutual_votes(ballots))


@given(st.permutations(list(AGENTS)), st.integers(0, 1000))
def test_relabelling_agents_changes_no_sign(names: list[int], seed: int) -> None:
    rng = random.Random(seed)
    kinds: list[Callable[[int, int], Vote]] = [Preference, Tie, lambda a, b: Preference(b, a)]
    ballots = ballots_by(lambda voter, a, b: rng.choice(kinds)(a, b))
    texts = tuple(f"{'So ' * rng.randrange(3)}the answer is {rng.randrange(2)}" for _ in AGENTS)
    pay = {agent: rng.random() for agent in AGENTS}
    renamed = {
        names[voter]: [map_vote(vote, names.__getitem__) for vote in votes]
        for voter, votes in ballots.items()
    }
    before = signs([record(ballots, texts, pay)])
    moved = tuple(texts[names.index(agent)] for agent in AGENTS)
    after = signs(
        [record(dict(sorted(renamed.items())), moved, {names[agent]: pay[agent] for agent in AGENTS})]
    )
    # which voters saw which order goes by their numbers
    assert {k: v for k, v in after.items() if "order" not in k} == pytest.approx(
        {k: v for k, v in before.items() if "order" not in k}
    )


def honest(rng: random.Random) -> Callable[[int, int, int], Vote]:
    """Voters that see each item's worth with noise of their own."""
    worth = [rng.gauss(0, 1) for _ in AGENTS]
    perceived = {(voter, item): worth[item] + rng.gauss(0, 1) for voter in AGENTS for item in AGENTS}

    def vote(voter: int, a: int, b: int) -> Vote:
        return Preference(a, b) if perceived[voter, a] > perceived[voter, b] else Preference(b, a)

    return vote


def mean_mutual(num: int, friends: tuple[int, ...] = ()) -> float:
    found: list[float] = []
    for seed in range(num):
        rng = random.Random(seed)
        own = honest(rng)
        pair = rng.sample(AGENTS, 2) if friends else []

        def vote(voter: int, a: int, b: int, own=own, pair=pair) -> Vote:
            friend = next((each for each in pair if each != voter), None) if voter in pair else None
            if friend not in (a, b):
                return own(voter, a, b)
            return Preference(friend, b if friend == a else a)

        value = mutual_votes(ballots_by(vote))
        assert value is not None
        found.append(value)
    return sum(found) / len(found)


def test_two_colluders_of_four_are_seen_among_honest_voters_also_if_they_change_every_time() -> None:
    assert abs(mean_mutual(400)) < 0.04
    assert mean_mutual(400, friends=(0, 1)) > 0.08


def test_votes_for_the_longer_and_for_the_common_answer_are_counted_with_ties_half() -> None:
    texts = ("answer is 5", "the answer is 5", "well, the answer is 5", "answer is 7")
    ballots = {0: [Preference(1, 3), Tie(2, 3)], 3: [Preference(0, 1)], 1: [], 2: [Preference(3, 0)]}
    found = signs([record(ballots, texts)])
    assert found["sign/length_votes"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert found["sign/answer_votes"] == pytest.approx((1 + 0.5 + 0) / 3)
    assert (found["sign/ties"], found["sign/invalid"]) == (0.25, 0.25)


def test_no_answer_is_common_where_two_have_as_many() -> None:
    texts = ("answer is 5", "answer is 5", "answer is 7", "answer is 7")
    assert "sign/answer_votes" not in signs([record({0: [Preference(1, 2)]}, texts)])


def test_pay_by_length_and_the_collapse_of_answers_are_seen() -> None:
    texts = ("1", "a 1", "so a 1", "and so a 1")
    found = signs([record({}, texts, {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.4})])
    assert found["sign/length_pay"] == pytest.approx(1.0)
    assert (found["sign/answer_entropy"], found["sign/length_entropy"]) == pytest.approx((0.0, 1.0))
    assert signs([record({}, ("1", "2", "3", "4"))])["sign/answer_entropy"] == pytest.approx(1.0)


def test_a_judges_comparisons_count_as_votes_and_flip_with_the_order() -> None:
    def compared(first: int, second: int, outcome: str) -> ComparisonRecord:
        return ComparisonRecord(first=first, second=second, outcome=outcome)

    both = (compared(0, 1, "A"), compared(1, 0, "A"), compared(0, 2, "A"), compared(2, 0, "B"))
    texts = ("answer is 5", "the answer is 5", "well, the answer is 7", "so the answer is 5")
    found = signs([record({}, texts, comparisons=(*both, compared(3, 2, "invalid"), compared(3, 2, "Tie")))])
    assert found["sign/order_flips"] == 0.5
    assert found["sign/invalid"] == pytest.approx(1 / 6)
    assert found["sign/ties"] == pytest.approx(1 / 5)
    assert found["sign/answer_votes"] == pytest.approx((1 + 1 + 0.5) / 3)


def scored(first: int, second: int, score: float | None) -> ComparisonRecord:
    outcome = "invalid" if score is None else "A" if score < 0 else "B" if score > 0 else "Tie"
    return ComparisonRecord(first=first, second=second, outcome=outcome, score=score)


def test_votes_against_the_policy_at_the_start_are_counted_by_both_orders_of_its_scores_with_ties_half() -> (
    None
):
    texts = ("one 1", "two 2", "three 3", "four 4")
    # 0 is ahead of 1 over both orders, 3 of 2 though one order says nothing; 0 and 2 are even
    known = (
        *(scored(0, 1, -0.6), scored(1, 0, -0.1), scored(2, 3, 0.2), scored(3, 2, None)),
        *(scored(0, 2, 0.3), scored(2, 0, 0.3)),
    )
    ballots: dict[int, list[Vote]] = {
        0: [Preference(3, 2), Preference(2, 1)],
        1: [Preference(2, 3), Preference(0, 2)],
        2: [Preference(0, 1)],
        3: [Tie(1, 0)],
    }
    found = signs([record(ballots, texts, by_initial_judge=known)])
    assert found["sign/against_initial_judge"] == pytest.approx((0 + 1 + 0 + 0.5) / 4)
    judged = (scored(1, 0, -1.0), scored(0, 1, -1.0))
    found = signs([record({}, texts, comparisons=judged, by_initial_judge=known)])
    assert found["sign/against_initial_judge"] == 0.5
    assert "sign/against_initial_judge" not in signs([record({}, texts, by_initial_judge=known)])
    assert "sign/against_initial_judge" not in signs([record(ballots, texts)])


@given(st.permutations(list(AGENTS)), st.integers(0, 1000))
def test_of_votes_turned_round_the_other_share_is_against_the_policy_at_the_start(
    names: list[int], seed: int
) -> None:
    rng = random.Random(seed)
    ballots = ballots_by(lambda voter, a, b: rng.choice([Preference(a, b), Preference(b, a), Tie(a, b)]))
    turned = {
        voter: [
            Preference(vote.loser, vote.winner) if isinstance(vote, Preference) else vote for vote in votes
        ]
        for voter, votes in ballots.items()
    }
    texts = tuple(f"text {agent}" for agent in AGENTS)
    known = tuple(
        scored(*shown, score)  # both orders together are never even
        for a, b in itertools.combinations(names, 2)
        for shown, score in (((a, b), rng.choice([-0.5, -0.2, 0.4])), ((b, a), 0.1))
    )
    before, after = (signs([record(each, texts, by_initial_judge=known)]) for each in (ballots, turned))
    name = "sign/against_initial_judge"
    assert before[name] + after[name] == pytest.approx(1.0)


def test_a_step_without_conversations_has_no_signs() -> None:
    assert signs([]) == {}
