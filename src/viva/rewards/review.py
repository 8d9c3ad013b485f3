"""The rewards of critique self-play: r_sol, r_meta and r_diag from the votes of one conversation.

Solutions are voted on before and after critique; a Bradley-Terry fit makes scores V in [0, 1] of the votes. In the
paper (arXiv 2601.21464), with ``T_i`` the agents that agent i criticised and ``R_i`` its final ranking,

    r_sol(i)  = V_i^final
    r_meta(i) = 1/|R_i| sum over (a, b) in R_i of 1[Pref_i(a, b) = Maj(a, b)]    (`viva.judging.ballots`)
    r_diag(i) = sum over k in T_i of max(0, V_k^final - V_k^init)

`ReviewRules` says what else each part can be. What happens at the edges:

- A round without a vote that counts has all scores at the prior's mean, 0.5, r_meta ``None``, and no measured gain.
- A gain is measured only if votes link both solutions: in ``separate`` fits, if both were voted on; in a ``joint`` fit,
  if a chain of comparisons leads from one to the other. A gain that is not measured pays nothing.
- Where all solutions are identical and count as one item, everybody has 0.5 and gains 0.
- Where no two solutions of a round are told apart (``solution_floor``), each earns the mean of their scores.
- r_meta needs voters who meet on a pair. Where nobody votes on its own solution, that takes four agents: among three,
  each pair has one voter, so leave-one-out gives ``None`` and the paper's majority 1 for every preference. With fewer
  than four, r_meta trains nothing under leave-one-out, and nothing but to avoid ties under the paper's formula.
- In the paper's formula a pair without a majority is in the denominator and adds 0; leave-one-out leaves it out.
- Ballots of label probabilities (`viva.judging.ranking`) have no tokens: r_meta is ``None`` for everybody.
- Votes on anybody who is not among the agents are left out, and so are targets. Nobody is its own target.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from viva.conversation.messages import did_you_mean
from viva.judging.ballots import (
    Ballots,
    Item,
    Vote,
    agreement,
    count_votes,
    map_vote,
    merged,
    pair_of,
    pooled,
)
from viva.judging.bradley_terry import Duel, Score, fit_bradley_terry
from viva.judging.comparison import Comparison
from viva.judging.records import ConversationRecord

STREAMS: Mapping[str, float] = {"r_sol": 1.0, "r_meta": 1.0, "r_diag": 2.0}
"""The reward streams and their weights in the paper (arXiv 2601.21464)."""
SOLUTIONS_ALONE: Mapping[str, float] = {"r_sol": 1.0, "r_meta": 0.0, "r_diag": 0.0}
"""Weights that train solutions and nothing else. On the bench no other ones did better (`benchmarks/evidence`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewRules:
    """The choices; the defaults are those of the ``robust`` preset."""

    fit: Literal["separate", "joint"] = "joint"
    """``separate``: initial and final ballots are fitted each on its own scale. Both scales have mean 0, so where
    everybody improves by the same amount, nobody gains. ``joint``: one fit over all 2N solutions. What links the two
    rounds are comparisons of revised with initial solutions, and solutions that did not change."""
    meta: Literal["majority", "leave_one_out"] = "leave_one_out"
    """``majority``: the share of a voter's votes that agree with the majority of all, itself included, as in the paper.
    ``leave_one_out``: with that of the others, where they have one. See `viva.judging.ballots.agreement`."""
    diag: Literal["sum", "mean"] = "mean"
    """Over a critic's distinct targets. A sum pays for naming more of them."""
    diag_credit: Literal["reply", "target"] = "target"
    """Earnings of a critique's tokens: the critic's r_diag, or the gain of the target it is about."""
    noise_floor: float = 1.0
    """Gains smaller than so many of their standard errors pay nothing."""
    solution_floor: float = 0.1
    """A conversation in which no two solutions of a round differ by so many standard errors of their difference pays
    all of them the mean of their scores, so that none of them is trained on. If four agents all rank alike, their
    votes reach 0.1 with shares of 52 % and 1 with 70 %; on the bench 1 did no better (`benchmarks/log.md`)."""
    initial_earns: Literal["final", "initial"] = "initial"
    """The score that the initial solution earns: ``final`` is that of the revised one, as in the paper, which pays a
    weak draft that others rescued as much as a strong one. ``initial`` is its own."""
    identical: Literal["apart", "one_item"] = "one_item"
    """Solutions with the same words: ``apart`` lets votes between them count, which can only be noise. ``one_item``
    makes them one item, with one score. In a ``joint`` fit an agent that did not change anything gains exactly 0."""
    prior_precision: float = 1.0
    """Precision of the Bradley-Terry fit's prior, in units of one vote."""
    weights: Mapping[str, float] = field(default_factory=lambda: dict(SOLUTIONS_ALONE))
    """Weights of the streams. One of weight 0 is measured, and trains nothing."""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            choices: tuple[str, ...] = get_args(hint) if get_origin(hint) is Literal else ()
            if choices and getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        for name, floor in (("noise_floor", self.noise_floor), ("solution_floor", self.solution_floor)):
            if not 0.0 <= floor < math.inf:
                raise ValueError(f"{name} must be a finite number of at least 0; got {floor}")
        if not 0.0 < self.prior_precision < math.inf:
            raise ValueError(f"prior_precision must be a positive number; got {self.prior_precision}")
        if set(self.weights) != set(STREAMS) or not all(map(math.isfinite, self.weights.values())):
            unknown = sorted(set(self.weights) - set(STREAMS))
            hints = [f"; unknown: {name!r}.{did_you_mean(name, STREAMS)}" for name in unknown]
            raise ValueError(
                f"weights must give a finite number for each of {', '.join(STREAMS)}; got {dict(self.weights)}"
                f"{''.join(hints)}"
            )


PRESETS: Mapping[str, ReviewRules] = {
    "paper": ReviewRules(
        fit="separate",
        meta="majority",
        diag="sum",
        diag_credit="reply",
        noise_floor=0.0,
        solution_floor=0.0,
        initial_earns="final",
        identical="apart",
        weights=STREAMS,
    ),
    "robust": ReviewRules(),
}
"""``paper``: the rewards of arXiv 2601.21464. ``robust``: what its weaknesses call for, r_sol alone."""


def review_rules(preset: str) -> ReviewRules:
    """The rules of a preset; change single ones with ``dataclasses.replace``.

    Raises:
        ValueError: If there is no such preset.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}; got {preset!r}")
    return PRESETS[preset]


def initial(agent_id: int) -> Item:
    """The item that an agent's initial solution is."""
    return "initial", agent_id


def revised(agent_id: int) -> Item:
    """The item that an agent's revised solution is."""
    return "revised", agent_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewVotes:
    """Votes and critiques of one conversation, ready to be scored.

    Raises:
        ValueError: If there are fewer than two agents, or one of them twice.
    """

    agents: tuple[int, ...]
    """Agents that finished: they are scored and rewarded."""
    initial: Ballots
    """On agent ids, about initial solutions. Voters may also be agents that did not finish."""
    final: Ballots
    """On agent ids, about revised solutions."""
    targets: Mapping[int, Sequence[int]]
    """Authors of the criticised solutions, by critic."""
    across: Ballots = field(default_factory=dict[int, tuple[Vote, ...]])
    """On `initial` and `revised` items, for a joint fit."""
    duels: tuple[Duel, ...] = ()
    """Comparisons by a judge on `initial` and `revised` items, for a joint fit; see `duel_of`."""
    final_is_sampled: bool = True
    """Whether final ballots were written: of label probabilities no token was sampled that r_meta could train."""
    texts: Mapping[Item, str] = field(default_factory=dict[Item, str])
    """Solutions by `initial` and `revised` item; those without a text count as different from all others."""

    def __post_init__(self) -> None:
        if len(self.agents) < 2 or len(set(self.agents)) < len(self.agents):
            raise ValueError(f"scores need at least two agents, each once; got {list(self.agents)}")


class SolutionGain(NamedTuple):
    """The gain of one agent's solution."""

    value: float
    """Score of the revised solution minus score of the initial one."""
    standard_error: float
    measured: bool
    """Whether votes link the two."""
    paid: float
    """Worth of a critique of this agent, at least 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewScores:
    """Scores and rewards by agent."""

    initial: dict[int, Score]
    final: dict[int, Score]
    gains: dict[int, SolutionGain]
    r_sol_initial: dict[int, float]
    """Earnings of the initial solution's tokens."""
    r_sol: dict[int, float]
    """Earnings of the revised solution's tokens."""
    r_meta: dict[int, float | None]
    """Earnings of the final ranking's tokens; ``None`` for a ballot that is empty or was not sampled, and under
    leave-one-out also where the others have no majority on any of its pairs."""
    r_diag: dict[int, float]
    """0 for an agent that criticised nobody."""
    r_diag_by_target: dict[int, dict[int, float]]
    """Earnings of each critique's tokens, by critic and target."""
    totals: dict[int, float]
    """Weighted sums of ``r_sol``, ``r_meta`` and ``r_diag``; a reward that is ``None`` adds nothing."""

    def streams(self) -> dict[int, dict[str, float | None]]:
        """Rewards by agent and stream, and their total."""
        columns = {"r_sol": self.r_sol, "r_meta": self.r_meta, "r_diag": self.r_diag, "total": self.totals}
        return {agent: {name: column[agent] for name, column in columns.items()} for agent in self.totals}

    def record(self) -> dict[str, dict[int, float]]:
        """Scores and their standard errors for the transcript, see `viva.judging.records.ScoresRecord`."""
        return {
            "initial": _values(self.initial),
            "final": _values(self.final),
            "initial_error": {agent: score.standard_error for agent, score in self.initial.items()},
            "final_error": {agent: score.standard_error for agent, score in self.final.items()},
        }


def duel_of(comparison: Comparison, first: Item, second: Item) -> Duel | None:
    """A judge's comparison as one vote, so that a pair judged in both orders has two.

    This is the most at which a gain's standard error still covers the spread of gains where nothing changed: 0.82 to
    0.89 of it among 2 to 8 agents (``benchmarks/judge_weight.py``). ``None`` if the comparison is invalid.
    """
    if comparison.score is None:
        return None
    return Duel(first=first, second=second, share=(1.0 - comparison.score) / 2.0, first_shown_first=True)


def stored_rules(record: ConversationRecord) -> ReviewRules:
    """The rules that a stored conversation was scored by; `ValueError` if they cannot be read."""
    try:
        # a run that says nothing of a floor is from before there was one
        return TypeAdapter(ReviewRules).validate_python({"solution_floor": 0.0, **record.rules})
    except ValidationError as error:
        raise ValueError(f"the stored rules cannot be read: {error.errors()[0]['msg']}") from error


def score_review(votes: ReviewVotes, rules: ReviewRules) -> ReviewScores:
    """Score one conversation; a `BradleyTerryError` if a fit does not converge."""
    items = _Items(votes, rules)
    initial_ballots = items.ballots(votes.initial, "initial")
    final_ballots = items.ballots(votes.final, "revised")
    if rules.fit == "joint":
        across = [*pooled(items.ballots(votes.across)), *items.duels(votes.duels)]
        both = [*pooled(initial_ballots), *pooled(final_ballots), *across]
        before = after = _Scale(both, items.of("initial", "revised"), rules)
    else:
        before = _Scale(pooled(initial_ballots), items.of("initial"), rules)
        after = _Scale(pooled(final_ballots), items.of("revised"), rules)
    first = {agent: before.score(items.item(initial(agent))) for agent in votes.agents}
    final = {agent: after.score(items.item(revised(agent))) for agent in votes.agents}
    gains = {
        agent: _gain(before, after, items.item(initial(agent)), items.item(revised(agent)), rules.noise_floor)
        for agent in votes.agents
    }
    agreements = agreement(final_ballots, leave_one_out=rules.meta == "leave_one_out")
    r_sol = _pay(final, after.tells_apart(items.of("revised"), rules.solution_floor))
    r_sol_initial = _pay(first, before.tells_apart(items.of("initial"), rules.solution_floor))
    r_meta = {agent: agreements.get(agent) if votes.final_is_sampled else None for agent in votes.agents}
    paid = {
        critic: {
            target: gains[target].paid
            for target in dict.fromkeys(votes.targets.get(critic, ()))
            if target != critic and target in gains
        }
        for critic in votes.agents
    }
    r_diag = {
        critic: math.fsum(own.values()) / (max(len(own), 1) if rules.diag == "mean" else 1)
        for critic, own in paid.items()
    }
    return ReviewScores(
        initial=first,
        final=final,
        gains=gains,
        r_sol_initial=r_sol if rules.initial_earns == "final" else r_sol_initial,
        r_sol=r_sol,
        r_meta=r_meta,
        r_diag=r_diag,
        r_diag_by_target={
            critic: own if rules.diag_credit == "target" else dict.fromkeys(own, r_diag[critic])
            for critic, own in paid.items()
        },
        totals={
            agent: rules.weights["r_sol"] * r_sol[agent]
            + rules.weights["r_meta"] * (r_meta[agent] or 0.0)
            + rules.weights["r_diag"] * r_diag[agent]
            for agent in votes.agents
        },
    )


def _values(scores: Mapping[int, Score]) -> dict[int, float]:
    return {agent: score.value for agent, score in scores.items()}


def _pay(scores: Mapping[int, Score], are_told_apart: bool) -> dict[int, float]:
    """The scores, or for all their mean."""
    values = _values(scores)
    mean = math.fsum(values.values()) / len(values)
    return values if are_told_apart else dict.fromkeys(values, mean)


class _Items:
    """Solutions grouped into items, and votes on agents or solutions as votes on those items.

    A voter with several votes on a pair of items keeps one of equal ones and none of contradicting ones
    (`count_votes`); divided votes become their mean.
    """

    def __init__(self, votes: ReviewVotes, rules: ReviewRules) -> None:
        self._item_of: dict[Item, Item] = {}
        self._items_of_stage: dict[str, list[Item]] = {}
        first_with: dict[tuple[str, str], Item] = {}
        for stage in ("initial", "revised"):
            for agent in votes.agents:
                item: Item = (stage, agent)
                text = votes.texts.get(item)
                if rules.identical == "one_item" and text is not None:
                    scale = "both" if rules.fit == "joint" else stage
                    item = first_with.setdefault((scale, " ".join(text.split())), item)
                self._item_of[stage, agent] = item
                self._items_of_stage.setdefault(stage, []).append(item)

    def item(self, solution: Item) -> Item:
        return self._item_of[solution]

    def of(self, *stages: str) -> list[Item]:
        """The distinct items of the rounds."""
        return list(dict.fromkeys(item for stage in stages for item in self._items_of_stage[stage]))

    def ballots(self, ballots: Ballots, stage: str | None = None) -> dict[int, tuple[Vote, ...]]:
        """Ballots on solutions (or on agents, of one stage) as ballots on items."""
        result: dict[int, tuple[Vote, ...]] = {}
        for voter in sorted(ballots):
            named = ballots[voter] if stage is None else [_of_stage(vote, stage) for vote in ballots[voter]]
            known = count_votes(named, items=self._item_of).votes
            on_items = [map_vote(vote, self.item) for vote in known if self._differ(pair_of(vote))]
            result[voter] = count_votes(merged(on_items), items=self.of("initial", "revised")).votes
        return result

    def duels(self, duels: Iterable[Duel]) -> list[Duel]:
        """Duels on items, but for those of others and those between identical solutions."""
        return [
            replace(duel, first=self.item(duel.first), second=self.item(duel.second))
            for duel in duels
            if {duel.first, duel.second} <= set(self._item_of) and self._differ({duel.first, duel.second})
        ]

    def _differ(self, pair: Iterable[Item]) -> bool:
        return len({self.item(solution) for solution in pair}) == 2


def _of_stage(vote: Vote, stage: str) -> Vote:
    def name(agent: Item) -> Item:
        if not isinstance(agent, int):
            raise ValueError(f"votes of one round are on agent ids; got {vote}")
        return stage, agent

    return map_vote(vote, name)


class _Scale:
    """One fit, and which of its items votes link with one another."""

    def __init__(self, votes: Sequence[Vote | Duel], items: Sequence[Item], rules: ReviewRules) -> None:
        self.fit = fit_bradley_terry(votes, items, prior_precision=rules.prior_precision)
        self._linked: dict[Item, set[Item]] = {item: {item} for item in items}
        for vote in votes:
            one, other = (vote.first, vote.second) if isinstance(vote, Duel) else pair_of(vote)
            both = self._linked[one] | self._linked[other]
            self._linked |= dict.fromkeys(both, both)

    def score(self, item: Item) -> Score:
        return Score(self.fit.scores[item], self.fit.standard_errors[item])

    def links(self, one: Item, other: Item) -> bool:
        return other in self._linked[one]

    def has_votes_on(self, item: Item) -> bool:
        return len(self._linked[item]) > 1

    def tells_apart(self, items: Sequence[Item], floor: float) -> bool:
        """Whether the scores of any two items differ by so many standard errors of their difference."""
        gains = (self.fit.gain(one, other) for one, other in itertools.combinations(items, 2))
        return any(abs(gain.value) >= floor * gain.standard_error for gain in gains)


def _gain(before: _Scale, after: _Scale, first: Item, last: Item, noise_floor: float) -> SolutionGain:
    if before is after:
        value, standard_error = before.fit.gain(first, last)
        measured = before.links(first, last)
    else:
        low, high = before.score(first), after.score(last)
        value = high.value - low.value
        standard_error = math.hypot(low.standard_error, high.standard_error)
        measured = before.has_votes_on(first) and after.has_votes_on(last)
    pays = measured and value > 0.0 and value >= noise_floor * standard_error
    return SolutionGain(value, standard_error, measured, value if pays else 0.0)
