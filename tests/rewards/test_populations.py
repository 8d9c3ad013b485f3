"""Scripted populations of voters: what honest agents, and dishonest ones, can make of the rewards.

What the presets pay on the same 400 conversations of four honest agents (``python tests/rewards/populations.py``):
where everyone improves by 1, a critic's r_diag is .132 under ``paper`` and .143 under ``robust``; where nobody changes
but in words, .132 and .025; where everyone gets worse, .132 and .001; where nobody changes a word, .132 and 0. So the
paper's r_diag, from two fits of mean 0, is noise in all four cases.

What no rule can do: two agents that always put each other first and two honest ones are, in the ballots, two parties.
Two who agree on more win, whoever they are. So a colluding pair stays below rank one against two honest agents who
call its two wrong solutions equal, and against a majority of honest agents always.
"""

import itertools
import random
from functools import cache

import pytest
from populations import (
    AGENTS,
    CHANGES,
    ballot,
    ballots,
    honest,
    honest_lines,
    paid,
    pairs_of,
    rank_of,
    self_promoting,
    stuffed,
)

from viva.judging.ballots import Preference, Tie
from viva.judging.bradley_terry import fit_bradley_terry
from viva.rewards.review import PRESETS, ReviewVotes, score_review

QUALITY = {0: 3.0, 1: 2.0, 2: 1.0, 3: 0.0}
presets = pytest.mark.parametrize("preset", sorted(PRESETS))


def review(final, preset="robust", first=None, agents=AGENTS):
    targets = {critic: [target for target in agents if target != critic] for critic in agents}
    votes = ReviewVotes(agents=agents, initial=first or final, final=final, targets=targets)
    return score_review(votes, PRESETS[preset])


@presets
def test_honest_agents_rank_solutions_by_their_quality_and_agree(preset):
    scores = review(ballots(honest_lines(QUALITY)), preset)
    assert sorted(AGENTS, key=lambda agent: -scores.r_sol[agent]) == [0, 1, 2, 3]
    assert set(scores.r_meta.values()) == {1.0}


@presets
@pytest.mark.parametrize("cheat", AGENTS)
def test_ballot_stuffing_changes_nothing(preset, cheat):
    lines = honest_lines(QUALITY)
    lines[cheat] = self_promoting(cheat) + [Preference(*pair) for pair in pairs_of((3, 2, 1, 0))]
    many = lines | {cheat: stuffed(lines[cheat])}
    assert review(ballots(many), preset) == review(ballots(lines), preset)


@presets
@pytest.mark.parametrize("cheat", AGENTS)
def test_self_promotion_is_silence(preset, cheat):
    lines = honest_lines(QUALITY)
    promoting = review(ballots(lines | {cheat: self_promoting(cheat, times=20)}), preset)
    silent = review(ballots(lines | {cheat: []}), preset)
    assert promoting == silent
    assert promoting.r_meta[cheat] is None
    assert rank_of(cheat, promoting.r_sol) >= rank_of(cheat, QUALITY)


def test_without_the_caps_one_stuffing_self_promoter_takes_rank_one():
    lines = honest_lines(QUALITY) | {3: self_promoting(3, times=20)}
    votes = [line for voter in AGENTS for line in lines[voter]]
    assert rank_of(3, fit_bradley_terry(votes, AGENTS).scores) == 1
    assert rank_of(3, review(ballots(lines)).r_sol) == 4


@presets
def test_one_random_voter_among_honest_ones_leaves_the_best_and_the_worst_apart(preset):
    for seed in range(20):
        rng = random.Random(seed)
        lines = honest_lines(QUALITY)
        lines[1] = [Preference(*rng.sample(pair, 2)) for pair in pairs_of(AGENTS)]
        scores = review(ballots(lines), preset)
        assert scores.r_sol[0] > scores.r_sol[3]


def test_random_voters_agree_with_the_others_half_of_the_time():
    rng = random.Random(1)
    found = []
    for _ in range(200):
        lines = {agent: [Preference(*rng.sample(p, 2)) for p in pairs_of(AGENTS)] for agent in AGENTS}
        found += [reward for reward in review(ballots(lines)).r_meta.values() if reward is not None]
    assert sum(found) / len(found) == pytest.approx(0.5, abs=0.05)


@presets
@pytest.mark.parametrize("mute", AGENTS)
def test_a_silent_agent_is_scored_by_the_others_and_earns_nothing_for_its_votes(preset, mute):
    scores = review(ballots(honest_lines(QUALITY) | {mute: []}), preset)
    assert scores.r_meta[mute] is None
    assert [rank_of(agent, scores.r_sol) for agent in AGENTS] == [1, 2, 3, 4]


@presets
def test_silence_of_all_pays_nobody_anything(preset):
    scores = review(dict.fromkeys(AGENTS, ()), preset)
    assert set(scores.totals.values()) == {0.5}


@presets
def test_a_crashed_agent_is_left_out_and_its_earlier_ballot_still_counts(preset):
    first, final = honest_lines(QUALITY), honest_lines(QUALITY, voters=(0, 1, 2))
    scores = review(ballots(final), preset, first=ballots(first), agents=(0, 1, 2))
    assert set(scores.totals) == {0, 1, 2}
    assert [rank_of(agent, scores.r_sol) for agent in (0, 1, 2)] == [1, 2, 3]


class TestColludingPair:
    """Agents 0 and 1, both wrong, vote for each other; 2 and 3, both right, are honest."""

    answers = ("win", "lose", "tie")

    @staticmethod
    def vote(pair, answer):
        one, other = pair
        return {"win": Preference(one, other), "lose": Preference(other, one), "tie": Tie(one, other)}[answer]

    def every_ballot(self, voter):
        pairs = [pair for pair in pairs_of(AGENTS) if voter not in pair]
        for answers in itertools.product(self.answers, repeat=len(pairs)):
            yield [self.vote(pair, answer) for pair, answer in zip(pairs, answers, strict=True)]

    def colluding(self, voter, partner):
        return [Preference(partner, other) for other in AGENTS if other not in (voter, partner)] * 20

    def test_never_gets_to_rank_one_alone_whatever_it_votes(self):
        truth = {0: 0.0, 1: 0.0, 2: 1.0, 3: 1.0}
        honest_ballots = {
            voter: ballot(voter, honest(pairs_of(AGENTS), truth, random.Random(0))) for voter in (2, 3)
        }
        for mine, yours in itertools.product(self.every_ballot(0), self.every_ballot(1)):
            scores = fit_bradley_terry([*mine, *yours, *honest_ballots[2], *honest_ballots[3]], AGENTS).scores
            assert max(scores[0], scores[1]) <= max(scores[2], scores[3]) + 1e-9

    @presets
    def test_loses_to_three_honest_agents(self, preset):
        agents = (0, 1, 2, 3, 4)
        truth = {0: 0.0, 1: 0.5, 2: 1.0, 3: 2.0, 4: 3.0}
        lines = honest_lines(truth, voters=(2, 3, 4))
        pairs = {voter: [pair for pair in pairs_of(agents) if voter not in pair] for voter in (0, 1)}
        rng = random.Random(3)
        for _ in range(200):
            for voter in (0, 1):
                lines[voter] = [self.vote(pair, rng.choice(self.answers)) for pair in pairs[voter]]
            final = {voter: ballot(voter, lines[voter], agents) for voter in agents}
            scores = review(final, preset, agents=agents)
            assert min(rank_of(0, scores.r_sol), rank_of(1, scores.r_sol)) > 1

    def test_takes_rank_one_where_lines_are_pooled_as_written(self):
        truth = {0: 0.0, 1: 0.0, 2: 1.0, 3: 1.0}
        lines = honest_lines(truth) | {0: self.colluding(0, 1), 1: self.colluding(1, 0)}
        pooled = fit_bradley_terry([line for voter in AGENTS for line in lines[voter]], AGENTS).scores
        assert rank_of(0, pooled) == rank_of(1, pooled) == 1
        assert pooled[0] > 0.7 > 0.3 > pooled[2]
        capped = review(ballots(lines)).r_sol
        assert capped[0] <= capped[2] + 1e-9

    def test_and_an_honest_pair_that_disagrees_on_nothing_else_are_two_parties_to_any_rule(self):
        decided = honest_lines({0: 0.5, 1: 0.0, 2: 1.0, 3: 1.0}, voters=(2, 3))
        lines = decided | {0: [*self.colluding(0, 1), Tie(2, 3)], 1: [*self.colluding(1, 0), Tie(2, 3)]}
        scores = review(ballots(lines)).r_sol
        swapped = {0: 2, 1: 3, 2: 0, 3: 1}
        parties = {
            swapped[voter]: [
                type(vote)(*(swapped[agent] for agent in _named(vote))) for vote in ballot(voter, cast)
            ]
            for voter, cast in lines.items()
        }
        mirrored = review(parties).r_sol
        assert rank_of(0, scores) == 1  # two that agree on more win, whoever they are
        assert {swapped[agent]: score for agent, score in scores.items()} == pytest.approx(mirrored)


def _named(vote):
    return (vote.winner, vote.loser) if isinstance(vote, Preference) else (vote.first, vote.second)


@cache
def pay(name, preset):
    return paid(preset, CHANGES[name], trials=100)


class TestCritique:
    """What critics of noisy honest agents are paid; figures of 100 conversations."""

    def test_is_paid_by_robust_where_everyone_improves(self):
        assert pay("everyone improves by 1", "robust")["r_diag"] > 0.1

    def test_is_hardly_paid_by_robust_where_nobody_changes(self):
        assert pay("nobody changes, other words", "robust")["r_diag"] < 0.04
        assert pay("nobody changes a word", "robust")["r_diag"] == 0.0
        assert pay("everyone gets worse by 1", "robust")["r_diag"] < 0.01

    def test_is_paid_by_the_paper_all_the_same_whatever_happened(self):
        found = [pay(name, "paper")["r_diag"] for name in CHANGES if name != "only agent 0 improves by 1.5"]
        assert found == pytest.approx([0.13] * 4, abs=0.03)

    def test_of_the_one_who_improves_is_paid_best(self):
        for preset in PRESETS:
            figures = pay("only agent 0 improves by 1.5", preset)
            assert figures["for agent 0"] > 4 * figures["for others"]
