"""Rewards of critique self-play: the paper's formulas, the robust ones, and every edge."""

from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from viva.judging.ballots import Preference, SoftPreference, Tie, count_votes, majority, map_vote, pooled
from viva.judging.bradley_terry import Duel, fit_bradley_terry
from viva.judging.comparison import Comparison, Outcome
from viva.rewards.credit import group_advantages
from viva.rewards.review import (
    PRESETS,
    ReviewRules,
    ReviewVotes,
    duel_of,
    initial,
    review_rules,
    revised,
    score_review,
)

AGENTS = (0, 1, 2, 3)
PAPER, ROBUST = PRESETS["paper"], PRESETS["robust"]
presets = st.sampled_from([PAPER, ROBUST])


def everyone_on_everyone():
    return {critic: [target for target in AGENTS if target != critic] for critic in AGENTS}


def ranking(order, voter):
    """All votes of a ranking, best first, but for those on the voter's own."""
    order = [agent for agent in order if agent != voter]
    return tuple(Preference(one, other) for i, one in enumerate(order) for other in order[i + 1 :])


def rankings(order, voters=AGENTS):
    return {voter: ranking(order, voter) for voter in voters}


def across(better, voters=AGENTS, agents=AGENTS):
    """Votes on whether each agent's solution became better (True), worse (False) or neither (None)."""

    def vote(agent):
        if better[agent] is None:
            return Tie(revised(agent), initial(agent))
        pair = (revised(agent), initial(agent))
        return Preference(*pair) if better[agent] else Preference(*reversed(pair))

    return {voter: tuple(vote(agent) for agent in agents if agent != voter) for voter in voters}


def said(**changes):
    same = rankings(AGENTS)
    defaults = {"agents": AGENTS, "initial": same, "final": same, "targets": everyone_on_everyone()}
    return ReviewVotes(**(defaults | changes))


@st.composite
def ballots(draw, items, voters=AGENTS, own=lambda voter: voter):
    result = {}
    for voter in voters:
        pairs = [(a, b) for i, a in enumerate(items) for b in items[i + 1 :]]
        votes = [
            draw(st.sampled_from([None, Preference(a, b), Preference(b, a), Tie(a, b)])) for a, b in pairs
        ]
        cast = [vote for vote in votes if vote is not None]
        result[voter] = count_votes(cast, items=items, own=[own(voter)]).votes
    return result


@st.composite
def conversations(draw):
    solutions = [initial(agent) for agent in AGENTS] + [revised(agent) for agent in AGENTS]
    texts = draw(st.dictionaries(st.sampled_from(solutions), st.sampled_from(["x", "y ", " y"])))
    return ReviewVotes(
        agents=AGENTS,
        initial=draw(ballots(AGENTS)),
        final=draw(ballots(AGENTS)),
        across=draw(ballots(solutions, voters=(0, 2), own=revised)),
        targets=draw(st.dictionaries(st.sampled_from(AGENTS), st.lists(st.sampled_from(AGENTS)))),
        texts=texts,
    )


def approximately(values):
    return pytest.approx(values, abs=1e-9)


@settings(max_examples=60)
@given(conversations(), presets, st.permutations(AGENTS))
def test_relabelling_the_agents_relabels_their_rewards(votes, rules, new_ids):
    def moved(ballots, to):
        return {new_ids[voter]: [map_vote(vote, to) for vote in cast] for voter, cast in ballots.items()}

    relabelled = ReviewVotes(
        agents=AGENTS,
        initial=moved(votes.initial, new_ids.__getitem__),
        final=moved(votes.final, new_ids.__getitem__),
        across=moved(votes.across, lambda item: (item[0], new_ids[item[1]])),
        targets={new_ids[one]: [new_ids[other] for other in many] for one, many in votes.targets.items()},
        texts={(stage, new_ids[agent]): text for (stage, agent), text in votes.texts.items()},
    )
    old, new = score_review(votes, rules), score_review(relabelled, rules)
    for name in ("r_sol", "r_sol_initial", "r_diag", "totals"):
        for agent in AGENTS:
            assert getattr(new, name)[new_ids[agent]] == pytest.approx(getattr(old, name)[agent], abs=1e-9)
    for agent in AGENTS:
        assert new.r_meta[new_ids[agent]] == old.r_meta[agent]
        assert new.gains[new_ids[agent]] == approximately(old.gains[agent])


@settings(max_examples=60)
@given(conversations(), presets)
def test_rewards_lie_in_their_ranges(votes, rules):
    scores = score_review(votes, rules)
    for agent in AGENTS:
        assert 0 < scores.r_sol[agent] < 1
        assert scores.r_meta[agent] is None or 0 <= scores.r_meta[agent] <= 1
        assert 0 <= scores.r_diag[agent] <= (1 if rules.diag == "mean" else 3)
        assert agent not in scores.r_diag_by_target[agent]
        assert scores.gains[agent].paid >= 0


@settings(max_examples=40)
@given(conversations())
def test_the_paper_preset_is_the_papers_formulas(votes):
    scores = score_review(votes, PAPER)
    before = fit_bradley_terry(pooled(votes.initial), AGENTS).scores
    after = fit_bradley_terry(pooled(votes.final), AGENTS).scores
    assert scores.r_sol == approximately(after)
    assert scores.r_sol_initial == scores.r_sol
    preferred = majority(pooled(votes.final)).values()
    for critic in AGENTS:
        ranking_of_critic = votes.final[critic]
        agreeing = sum(vote in preferred for vote in ranking_of_critic)
        assert scores.r_meta[critic] == (agreeing / len(ranking_of_critic) if ranking_of_critic else None)
        gains = [
            max(0.0, after[target] - before[target])
            for target in set(votes.targets.get(critic, [])) - {critic}
            if any(target in (a, b) for a, b in _pairs(votes.initial))
            and any(target in (a, b) for a, b in _pairs(votes.final))
        ]
        assert scores.r_diag[critic] == pytest.approx(sum(gains), abs=1e-9)
        assert set(scores.r_diag_by_target[critic].values()) <= {scores.r_diag[critic]}
        total = scores.r_sol[critic] + (scores.r_meta[critic] or 0) + 2 * scores.r_diag[critic]
        assert scores.totals[critic] == pytest.approx(total)


def _pairs(ballots):
    for vote in pooled(ballots):
        yield (vote.winner, vote.loser) if isinstance(vote, Preference) else (vote.first, vote.second)


def test_agreement_counts_the_own_vote_in_the_paper_only():
    third = [Preference(2, 1), Preference(0, 2), Preference(0, 1)]
    votes = said(final={0: [Preference(1, 2)], 1: [Preference(0, 2)], 2: [], 3: third})
    assert score_review(votes, PAPER).r_meta == {0: 0.0, 1: 1.0, 2: None, 3: 2 / 3}
    assert score_review(votes, ROBUST).r_meta == {0: 0.0, 1: 1.0, 2: None, 3: 0.5}


def test_where_everyone_improves_robust_pays_every_critic_and_the_paper_none():
    votes = said(across=across([True] * 4))
    assert set(score_review(votes, PAPER).r_diag.values()) == {0.0}
    assert min(score_review(votes, ROBUST).r_diag.values()) > 0.2


@pytest.mark.parametrize("better", [None, False], ids=["nobody-changes", "everyone-gets-worse"])
def test_where_nobody_improves_robust_pays_nothing(better):
    assert set(score_review(said(across=across([better] * 4)), ROBUST).r_diag.values()) == {0.0}


def test_a_critic_is_paid_for_its_own_targets_each_once():
    targets = {0: [1, 1, 2], 1: [1, 0], 2: [], 3: [1, 9]}
    scores = score_review(said(across=across([None, True, None, None]), targets=targets), ROBUST)
    gain = scores.gains[1].value
    assert gain > 0.2
    assert scores.r_diag_by_target == {0: {1: gain, 2: 0.0}, 1: {0: 0.0}, 2: {}, 3: {1: gain}}
    assert scores.r_diag == {0: gain / 2, 1: 0.0, 2: 0.0, 3: gain}


def test_a_sum_pays_for_more_targets_and_a_mean_does_not():
    votes = said(across=across([True] * 4), targets={0: [1], 3: [1, 2]})
    summed, mean = (score_review(votes, replace(ROBUST, diag=how)).r_diag for how in ("sum", "mean"))
    assert summed[3] > 1.5 * summed[0]
    assert mean[3] == pytest.approx(mean[0], rel=0.1)


def test_gains_below_the_noise_floor_pay_nothing():
    votes = said(across=across([True] * 4, voters=(0,)))
    free = score_review(votes, replace(ROBUST, noise_floor=0.0))
    for agent in (1, 2, 3):
        gain = free.gains[agent]
        assert gain.paid == gain.value > 0
        ratio = gain.value / gain.standard_error
        for floor, paid in ((0.99 * ratio, gain.value), (1.01 * ratio, 0.0)):
            rules = replace(ROBUST, noise_floor=floor)
            assert score_review(votes, rules).gains[agent].paid == paid
    assert ratio < 1
    assert score_review(votes, ROBUST).gains[3].paid == 0


@settings(max_examples=60)
@given(conversations(), st.sampled_from(["separate", "joint"]), st.floats(0.0, 4.0), st.floats(0.0, 4.0))
def test_solutions_earn_their_scores_or_all_of_a_round_the_mean_of_them(votes, fit, one, other):
    low, high = sorted((one, other))
    free, some, fewer = (
        score_review(votes, replace(ROBUST, fit=fit, solution_floor=floor)) for floor in (0.0, low, high)
    )
    for scores in (some, fewer):
        assert (scores.initial, scores.final) == (free.initial, free.final)
        for paid, measured in ((scores.r_sol, free.final), (scores.r_sol_initial, free.initial)):
            values = {agent: score.value for agent, score in measured.items()}
            mean = sum(values.values()) / len(values)
            assert paid == values or paid == approximately(dict.fromkeys(AGENTS, mean))
    if len(set(some.r_sol.values())) == 1:  # a higher floor tells no more apart
        assert len(set(fewer.r_sol.values())) == 1


def test_votes_that_do_not_tell_solutions_apart_train_none_of_them():
    """Label ballots of a model that has no preference: 50.2 % for the first of a pair, whoever votes."""
    shares = {
        voter: tuple(
            SoftPreference(one, other, 0.502)
            for one, other in combinations(AGENTS, 2)
            if voter not in (one, other)
        )
        for voter in AGENTS
    }
    votes = said(initial=shares, final=shares)
    assert len(set(score_review(votes, replace(ROBUST, solution_floor=0.0)).r_sol.values())) > 1
    scores = score_review(votes, ROBUST)
    for paid in (scores.r_sol, scores.r_sol_initial):
        assert group_advantages(list(paid.values())) == [0.0] * len(AGENTS)
    assert score_review(said(), ROBUST).r_sol[0] > 0.7, "a ranking that all agree on is paid"


def test_the_initial_solution_earns_its_own_score_or_the_final_one():
    votes = said(final=rankings((3, 2, 1, 0)), across=across([False, None, None, True]))
    robust, paper = score_review(votes, ROBUST), score_review(votes, PAPER)
    assert robust.r_sol_initial[0] > 0.7 > 0.4 > robust.r_sol[0]
    assert paper.r_sol_initial == paper.r_sol
    assert robust.r_sol_initial == {agent: score.value for agent, score in robust.initial.items()}


def test_a_judges_comparisons_link_the_rounds_as_well_as_the_agents_votes():
    duels = tuple(
        Duel(first=revised(agent), second=initial(agent), share=0.9, weight=weight)
        for agent in AGENTS
        for weight in (1.0, 2.0)
    )
    scores = score_review(said(duels=duels), ROBUST)
    assert all(gain.measured and gain.paid > 0.1 for gain in scores.gains.values())


@pytest.mark.parametrize(
    ("outcome", "score", "share"), [(Outcome.A, -1.0, 1.0), (Outcome.B, 0.5, 0.25), (Outcome.TIE, 0.0, 0.5)]
)
def test_a_comparison_becomes_one_vote(outcome, score, share):
    comparison = Comparison(first=0, second=1, outcome=outcome, score=score)
    duel = duel_of(comparison, revised(2), initial(2))
    assert (duel.first, duel.second, duel.share, duel.weight) == (revised(2), initial(2), share, 1.0)


def test_an_invalid_comparison_is_no_vote():
    comparison = Comparison(first=0, second=1, outcome=Outcome.INVALID, score=None)
    assert duel_of(comparison, revised(2), initial(2)) is None


class TestIdenticalSolutions:
    def texts(self, initial_texts, revised_texts):
        return {initial(a): text for a, text in enumerate(initial_texts)} | {
            revised(a): text for a, text in enumerate(revised_texts)
        }

    @given(conversations())
    @settings(max_examples=30)
    def test_have_one_score(self, votes):
        scores = score_review(votes, ROBUST)
        for one in AGENTS:
            for other in AGENTS:
                words = [votes.texts.get(revised(agent)) for agent in (one, other)]
                if None not in words and words[0].split() == words[1].split():
                    assert scores.final[one] == scores.final[other]

    @given(conversations())
    @settings(max_examples=30)
    def test_that_did_not_change_gain_exactly_nothing(self, votes):
        texts = self.texts("abcd", ["a", "b ", "c", "new"])
        scores = score_review(replace(votes, texts=texts), ROBUST)
        for agent in (0, 1, 2):
            assert scores.gains[agent] == (0.0, 0.0, True, 0.0)

    @given(conversations(), st.sampled_from(["separate", "joint"]))
    @settings(max_examples=30)
    def test_of_everyone_leave_nothing_to_learn(self, votes, fit):
        texts = self.texts(["same"] * 4, ["same"] * 4)
        scores = score_review(replace(votes, texts=texts), replace(ROBUST, fit=fit))
        assert set(scores.r_sol.values()) == {0.5}
        assert set(scores.r_diag.values()) == {0.0}
        assert set(scores.r_meta.values()) == {None}

    def test_link_the_rounds_for_those_that_did_change(self):
        texts = self.texts("abcd", "abcD")
        final = rankings((3, 0, 1, 2))
        scores = score_review(said(final=final, texts=texts), ROBUST)
        assert scores.gains[3].measured
        assert scores.gains[3].paid > 0.2

    def test_are_voted_on_as_they_are_in_the_paper(self):
        votes = said()
        same = replace(votes, texts=self.texts(["same"] * 4, ["same"] * 4))
        assert score_review(same, PAPER) == score_review(votes, PAPER)

    def test_count_once_for_a_voter_who_names_them_all(self):
        final = {0: [Preference(1, 3), Preference(2, 3)], 1: (), 2: (), 3: ()}
        votes = said(initial={}, final=final, texts={revised(1): "a", revised(2): "a"})
        alone = said(initial={}, final={0: [Preference(1, 3)]})
        assert score_review(votes, ROBUST).final[3] == score_review(alone, ROBUST).final[3]

    def test_are_not_voted_on_by_who_contradicts_itself(self):
        final = {0: [Preference(1, 3), Preference(3, 2)]}
        scores = score_review(said(initial={}, final=final, texts={revised(1): "a", revised(2): "a"}), ROBUST)
        assert set(scores.r_sol.values()) == {0.5}


class TestEdges:
    @given(presets)
    def test_without_any_vote_everyone_has_the_prior_mean(self, rules):
        scores = score_review(said(initial={}, final={}), rules)
        assert set(scores.r_sol.values()) == set(scores.r_sol_initial.values()) == {0.5}
        assert set(scores.r_diag.values()) == {0.0}
        assert set(scores.r_meta.values()) == {None}
        assert set(scores.totals.values()) == {0.5}

    @pytest.mark.parametrize("rules", [PAPER, ROBUST], ids=["paper", "robust"])
    @pytest.mark.parametrize("empty", ["initial", "final"])
    def test_a_round_without_votes_pays_no_gain(self, rules, empty):
        scores = score_review(said(**{empty: dict.fromkeys(AGENTS, ())}), rules)
        assert not any(gain.measured for gain in scores.gains.values())
        assert set(scores.r_diag.values()) == {0.0}

    def test_a_joint_fit_without_links_is_two_separate_ones_and_measures_no_gain(self):
        votes = said(final=rankings((3, 2, 1, 0)))
        joint, separate = (score_review(votes, replace(ROBUST, fit=fit)) for fit in ("joint", "separate"))
        assert joint.r_sol == approximately(separate.r_sol)
        assert separate.r_diag[0] > 0
        assert set(joint.r_diag.values()) == {0.0}

    def test_two_agents_agree_or_not_with_each_other(self):
        final = {0: [Preference(0, 1)], 1: [Preference(0, 1)]}
        votes = ReviewVotes(agents=(0, 1), initial={}, final=final, targets={0: [1], 1: [0]})
        agreed = score_review(votes, ROBUST)
        assert agreed.r_meta == {0: 1.0, 1: 1.0}
        assert agreed.r_sol[0] > 0.5 > agreed.r_sol[1]
        split = score_review(replace(votes, final=final | {1: [Preference(1, 0)]}), ROBUST)
        assert split.r_meta == {0: 0.0, 1: 0.0}
        assert split.r_sol == {0: 0.5, 1: 0.5}

    @given(presets)
    def test_agents_that_are_left_over_are_scored_without_the_others(self, rules):
        votes = said(agents=(0, 2), targets={0: [1, 2, 3], 2: [3]})
        scores = score_review(votes, rules)
        assert set(scores.r_sol) == set(scores.r_meta) == set(scores.gains) == {0, 2}
        assert set(scores.r_diag_by_target[0]) == {2}
        assert scores.r_sol[0] > scores.r_sol[2]  # by the votes of those that failed

    @pytest.mark.parametrize("agents", [(), (1,), (1, 1, 2)])
    def test_fewer_than_two_agents_are_refused(self, agents):
        with pytest.raises(ValueError, match="at least two agents, each once; got"):
            said(agents=agents)

    def test_votes_of_a_round_on_anything_but_agents_are_refused(self):
        with pytest.raises(ValueError, match="votes of one round are on agent ids"):
            score_review(said(final={0: [Preference(revised(1), revised(2))]}), ROBUST)


@given(conversations(), presets)
@settings(max_examples=30)
def test_repeating_every_vote_changes_nothing(votes, rules):
    def stuffed(ballots):
        return {voter: [*cast] * 5 for voter, cast in ballots.items()}

    repeated = replace(
        votes,
        initial=stuffed(votes.initial),
        final=stuffed(votes.final),
        across=stuffed(votes.across),
        targets={critic: [*targets] * 3 for critic, targets in votes.targets.items()},
    )
    assert score_review(repeated, rules) == score_review(votes, rules)


@given(conversations())
@settings(max_examples=30)
def test_the_order_of_voters_and_votes_makes_no_difference(votes):
    assume(votes.initial)
    turned = replace(
        votes,
        initial={voter: [*reversed(votes.initial[voter])] for voter in reversed(votes.initial)},
        final={voter: [*reversed(votes.final[voter])] for voter in reversed(votes.final)},
    )
    assert score_review(turned, ROBUST) == score_review(votes, ROBUST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fit": "both"}, "fit must be one of separate, joint; got 'both'"),
        ({"meta": ""}, "meta must be one of majority, leave_one_out"),
        ({"diag": "max"}, "diag must be one of sum, mean"),
        ({"diag_credit": "none"}, "diag_credit must be one of reply, target"),
        ({"initial_earns": "none"}, "initial_earns must be one of final, initial"),
        ({"identical": "tie"}, "identical must be one of apart, one_item"),
        ({"noise_floor": -1.0}, "noise_floor must be a finite number of at least 0; got -1"),
        ({"prior_precision": 0.0}, "prior_precision must be a positive number; got 0"),
        ({"weights": {"r_sol": 1.0}}, "weights must give a finite number for each of r_sol, r_meta, r_diag"),
    ],
)
def test_rules_that_say_nothing_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ReviewRules(**change)


def test_presets_are_found_by_name():
    assert review_rules("paper") is PAPER
    with pytest.raises(ValueError, match="preset must be one of paper, robust; got 'best'"):
        review_rules("best")
